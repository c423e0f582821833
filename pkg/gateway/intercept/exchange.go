package intercept

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// Bound is a secret with its placeholder, the text that the guest has instead of it.
type Bound struct {
	Name        string // of the variable
	Placeholder string
	Value       secret.Value
	Body        bool   // whether the placeholder is also replaced in bodies
	Problem     string // why there is no value; "" if there is one
}

// Exchange replaces the placeholders of the secrets that are bound to one host. It is safe
// for concurrent use.
type Exchange struct {
	bound  []Bound
	redact *secret.Redactor
}

// NewExchange returns an exchange of the secrets that are bound to a host.
func NewExchange(bound []Bound) *Exchange {
	e := &Exchange{bound: slices.Clone(bound), redact: secret.NewRedactor()}
	for _, b := range bound {
		e.redact.Add(b.Value)
	}
	return e
}

// ErrInURL is returned for a placeholder in a URL, where servers and proxies would log the
// secret.
var ErrInURL = errors.New("a secret must not be part of a URL")

// MissingError is returned for the placeholder of a secret that has no value.
type MissingError struct{ Name, Problem string }

func (e *MissingError) Error() string {
	return fmt.Sprintf("the secret %s has no value: %s", e.Name, e.Problem)
}

// maxBuffered is the size in bytes of the longest body whose length is known before it is sent.
// Longer ones with replaced placeholders are sent in chunks.
const maxBuffered = 1 << 20

// Request puts the secrets into the headers and the body of r. After an error, r must not be
// sent.
func (e *Exchange) Request(r *http.Request) error {
	if e.inURL(r.URL) {
		return ErrInURL
	}
	used := false
	for _, values := range r.Header {
		for i, v := range values {
			now, err := e.header(v)
			if err != nil {
				return err
			}
			used = used || now != v
			values[i] = now
		}
	}
	if used { // otherwise the host could reflect a secret in parts, which are not recognized
		r.Header.Del("Range")
		r.Header.Del("If-Range")
	}
	// What a server sends over a WebSocket is masked only where it is not compressed.
	r.Header.Del("Sec-Websocket-Extensions")
	if r.Body == nil || r.Body == http.NoBody || !slices.ContainsFunc(e.bound, func(b Bound) bool { return b.Body }) {
		return nil
	}
	return e.body(r)
}

// header returns v with the secrets in the place of their placeholders, also inside the
// credentials of basic authentication (RFC 7617).
func (e *Exchange) header(v string) (string, error) {
	scheme, credentials, ok := strings.Cut(v, " ")
	if ok && strings.EqualFold(scheme, "basic") {
		if text, err := base64.StdEncoding.DecodeString(strings.TrimSpace(credentials)); err == nil {
			now, err := e.replace(string(text))
			if err != nil {
				return "", err
			}
			if now != string(text) {
				return scheme + " " + base64.StdEncoding.EncodeToString([]byte(now)), nil
			}
		}
	}
	for _, b := range e.bound {
		if strings.Contains(v, b.Placeholder) && !httpguts.ValidHeaderFieldValue(b.Value.Reveal()) {
			return "", fmt.Errorf("the value of the secret %s cannot be part of a header", b.Name)
		}
	}
	return e.replace(v)
}

func (e *Exchange) replace(text string) (string, error) {
	for _, b := range e.bound {
		if !strings.Contains(text, b.Placeholder) {
			continue
		}
		if b.Problem != "" {
			return "", &MissingError{b.Name, b.Problem}
		}
		text = strings.ReplaceAll(text, b.Placeholder, b.Value.Reveal())
	}
	return text, nil
}

// inURL reports whether a URL contains a placeholder, also percent-encoded.
func (e *Exchange) inURL(u *url.URL) bool {
	forms := []string{u.Path, u.RawPath, u.RawQuery, u.Opaque, u.Fragment, u.User.String()}
	if q, err := url.QueryUnescape(u.RawQuery); err == nil {
		forms = append(forms, q)
	}
	return slices.ContainsFunc(e.bound, func(b Bound) bool {
		return slices.ContainsFunc(forms, func(f string) bool { return strings.Contains(f, b.Placeholder) })
	})
}

// body replaces placeholders in the body of r while it is sent.
func (e *Exchange) body(r *http.Request) error {
	b := &exchangedBody{e: e, from: r.Body}
	for _, s := range e.bound {
		b.keep = max(b.keep, len(s.Placeholder)-1)
	}
	if r.ContentLength < 0 || r.ContentLength > maxBuffered {
		r.Body, r.ContentLength = b, -1
		r.Header.Del("Content-Length")
		return nil
	}
	text, err := io.ReadAll(b)
	if err != nil {
		return err
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	r.Header.Set("Content-Length", fmt.Sprint(len(text)))
	return nil
}

// exchangedBody is a body with the secrets in the place of their placeholders.
type exchangedBody struct {
	e     *Exchange
	from  io.ReadCloser
	keep  int    // the most bytes at the end of what was read that can be the beginning of a placeholder
	read  []byte // not yet exchanged
	ready []byte
	err   error
}

func (b *exchangedBody) Read(p []byte) (int, error) {
	var buf [16 << 10]byte
	for len(b.ready) == 0 && b.err == nil {
		var n int
		n, b.err = b.from.Read(buf[:])
		b.read = append(b.read, buf[:n]...)
		if b.err != nil && !errors.Is(b.err, io.EOF) {
			break
		}
		text, err := b.e.replaceInBody(b.read)
		if err != nil {
			b.err = err
			break
		}
		end := len(text)
		if b.err == nil {
			end = max(0, end-b.keep)
		}
		b.ready, b.read = text[:end], slices.Clone(text[end:])
	}
	n := copy(p, b.ready)
	b.ready = b.ready[n:]
	if len(b.ready) > 0 {
		return n, nil
	}
	return n, b.err
}

func (b *exchangedBody) Close() error { return b.from.Close() }

func (e *Exchange) replaceInBody(text []byte) ([]byte, error) {
	for _, b := range e.bound {
		if !b.Body || !bytes.Contains(text, []byte(b.Placeholder)) {
			continue
		}
		if b.Problem != "" {
			return nil, &MissingError{b.Name, b.Problem}
		}
		text = bytes.ReplaceAll(text, []byte(b.Placeholder), []byte(b.Value.Reveal()))
	}
	return text, nil
}
