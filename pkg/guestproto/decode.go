package guestproto

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"unicode"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// These limit the size of what is read.
const (
	MaxStatus = 64 << 10
	MaxQuery  = 16 << 10 // one line
	maxText   = 1024     // of one text field
	maxList   = 64       // elements of one list or map
)

// These limit a session's secrets, equally on both sides.
const (
	MaxSecrets      = 64                                       // without the token
	MaxSecretBytes  = 256 << 10                                // of one value
	maxSecretsBytes = MaxSecrets*(2*MaxSecretBytes+256) + 4096 // of the message; text that JSON escapes is twice as long
)

// DecodeStatus reads one status.
func DecodeStatus(r io.Reader) (Status, error) {
	s, err := decode[Status](r, MaxStatus)
	if err != nil {
		return Status{}, fmt.Errorf("guest status: %w", err)
	}
	if s.Version != Version {
		return Status{}, fmt.Errorf("guest status: version must be %d, got %d", Version, s.Version)
	}
	for _, text := range []*string{&s.Program, &s.Policy.Mode, &s.Policy.Digest, &s.Firewall.Error, &s.DNS.Listen, &s.DNS.Error} {
		*text = Clean(*text)
	}
	s.DNS.Upstream = cleanList(s.DNS.Upstream)
	dropped := map[string]int64{}
	for chain, n := range s.Counters.Dropped {
		if len(dropped) < maxList {
			dropped[Clean(chain)] = n
		}
	}
	s.Counters.Dropped = dropped
	return s, nil
}

// DecodeSecrets reads one set of secrets. Its errors quote nothing of the input.
func DecodeSecrets(r io.Reader) (Secrets, error) {
	m, err := decode[secretsMessage](r, maxSecretsBytes)
	if err != nil {
		return Secrets{}, errors.New("secrets: must be a message of this version within the size limit")
	}
	if m.Version != Version {
		return Secrets{}, fmt.Errorf("secrets: version must be %d, got %d", Version, m.Version)
	}
	return Secrets{Env: m.Env, Token: m.Token}, nil
}

// Queries reads a query log line by line until r ends. It stops after the first
// error.
func Queries(r io.Reader) iter.Seq2[Query, error] {
	return func(yield func(Query, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(make([]byte, 0, 4096), MaxQuery)
		for lines.Scan() {
			if len(bytes.TrimSpace(lines.Bytes())) == 0 {
				continue
			}
			q, err := decode[Query](bytes.NewReader(lines.Bytes()), MaxQuery)
			if err != nil {
				yield(Query{}, fmt.Errorf("query log: %w", err))
				return
			}
			if !yield(cleanQuery(q), nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Query{}, fmt.Errorf("query log: %w", err))
		}
	}
}

func cleanQuery(q Query) Query {
	for _, text := range []*string{&q.Name, &q.Type, &q.Rule, &q.Source, &q.Reason, &q.Process} {
		*text = Clean(*text)
	}
	q.Answer = cleanList(q.Answer)
	return q
}

// decode reads exactly one JSON value without unknown fields.
func decode[T any](r io.Reader, limit int64) (T, error) {
	var v T
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return v, err
	}
	if int64(len(data)) > limit {
		return v, fmt.Errorf("over %d bytes", limit)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return *new(T), errors.New(Clean(err.Error())) // the error quotes the input
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return *new(T), errors.New("more than one value")
	}
	return v, nil
}

func cleanList(list []string) []string {
	clean := []string{}
	for _, s := range list[:min(len(list), maxList)] {
		clean = append(clean, Clean(s))
	}
	return clean
}

// Clean makes a guest's text safe to display: valid UTF-8, one line, limited in
// length, without characters that a terminal interprets or that change the reading
// order.
func Clean(s string) string {
	s = strings.ToValidUTF8(s[:min(len(s), 4*maxText)], "\ufffd")
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '\ufffd'
		}
		return r
	}, s)
	return termtext.Head(s, maxText)
}
