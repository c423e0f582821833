package recording

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

const (
	searchBlock = 512 << 10 // bytes that a search reads at once; they fit into the processor's cache
	maxTextLine = 64 << 10  // bytes of a line of text, with its time
	maxShown    = 500       // bytes of a matching line in the result

	// MaxQuery limits the text that is searched for.
	MaxQuery = 1000
	// MaxMatches limits the matches of one search.
	MaxMatches = 1000
)

// Query is what a search looks for.
type Query struct {
	Text       string
	Subject    string // id of a session or task; "" for all
	IgnoreCase bool   // of ASCII letters
	Limit      int    // of matches
}

// Match is a line that a terminal has shown.
type Match struct {
	Recording string    `json:"recording" doc:"The id of the recording."`
	Subject   string    `json:"subject" doc:"The id of the session or task."`
	Title     string    `json:"title" doc:"The name of the window."`
	Time      time.Time `json:"time" doc:"When it was shown."`
	Seconds   float64   `json:"seconds" doc:"The same as a position in the recording."`
	Line      string    `json:"line" doc:"The line, without escape sequences. It comes from the guest."`
}

// Search returns the lines that contain a text, the latest first, and whether there may be more.
func (s Store) Search(ctx context.Context, q Query) (matches []Match, more bool, err error) {
	if q.Text == "" || len(q.Text) > MaxQuery || strings.ContainsAny(q.Text, "\t\n") {
		return nil, false, fail.New(fail.Usage, "search text must be one line of 1 to %d bytes without tabs", MaxQuery).WithHint("agent-sessionizer recordings search TEXT")
	}
	all, err := s.List(q.Subject)
	if err != nil {
		return nil, false, err
	}
	files := partsOf(all)
	scan := scanner{needle: []byte(q.Text), fold: q.IgnoreCase, limit: q.Limit}
	if q.IgnoreCase {
		scan.needle = lower(nil, scan.needle)
	}
	scan.rare = rarest(scan.needle)
	var mu sync.Mutex
	next, found := 0, 0
	group, ctx := errgroup.WithContext(ctx)
	for range runtime.GOMAXPROCS(0) {
		group.Go(func() error {
			scan := scan // with buffers of its own
			buf := make([]byte, searchBlock)
			for ctx.Err() == nil {
				mu.Lock()
				i := next
				next++
				enough := found >= q.Limit
				mu.Unlock()
				if enough || i >= len(files) {
					return nil
				}
				hits, err := scan.file(ctx, files[i], buf)
				if err != nil {
					return err
				}
				mu.Lock()
				found += len(hits)
				matches = append(matches, hits...)
				mu.Unlock()
			}
			return context.Cause(ctx)
		})
	}
	if err := group.Wait(); err != nil {
		return nil, false, err
	}
	slices.SortStableFunc(matches, func(a, b Match) int {
		return cmp.Or(b.Time.Compare(a.Time), strings.Compare(a.Recording, b.Recording))
	})
	if len(matches) >= q.Limit {
		matches, more = matches[:q.Limit], true
	}
	return matches, more, nil
}

// searched is a part with the recording that it belongs to.
type searched struct {
	part
	of Recording
}

// partsOf returns the parts of recordings, the last changed first.
func partsOf(all []Recording) (files []searched) {
	for _, r := range all {
		for _, p := range r.parts {
			files = append(files, searched{p, r})
		}
	}
	slices.SortStableFunc(files, func(a, b searched) int { return b.changed.Compare(a.changed) })
	return files
}

// scanner searches files of text.
type scanner struct {
	needle []byte
	fold   bool
	limit  int

	rare   int    // index of the needle's rarest byte
	folded []byte // the block in lower case
}

// file returns the last matches in the text of a part. buf is overwritten.
func (s *scanner) file(ctx context.Context, p searched, buf []byte) (matches []Match, err error) {
	f, err := os.Open(p.part.text())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fail.New(fail.Host, "search recording: %w", err)
	}
	defer f.Close()
	var began time.Time
	kept := 0 // bytes at the start of buf: the beginning of a line
	for ctx.Err() == nil {
		n, err := f.Read(buf[kept:])
		if n == 0 || err != nil {
			if errors.Is(err, io.EOF) || err == nil {
				break
			}
			return nil, fail.New(fail.Host, "search recording: %w", err)
		}
		block := buf[:kept+n]
		end := bytes.LastIndexByte(block, '\n') + 1
		if end == 0 && len(block) == len(buf) {
			kept = 0 // not written by us: no line is that long
			continue
		}
		for line := range s.lines(block[:end]) {
			at, text, ok := parseTextLine(line)
			if !ok {
				continue
			}
			if began.IsZero() {
				h, err := p.header()
				if err != nil {
					return nil, nil //nolint:nilerr // removed meanwhile
				}
				began = time.Unix(h.Timestamp, 0).UTC()
			}
			shown := began.Add(at)
			matches = append(matches, Match{p.of.ID, p.of.Subject, p.of.Title, shown, shown.Sub(p.of.Began).Seconds(), s.excerpt(text)})
		}
		if len(matches) > s.limit {
			matches = matches[len(matches)-s.limit:]
		}
		kept = copy(buf, block[end:])
	}
	return matches, context.Cause(ctx)
}

// lines yields the complete lines of a block whose text contains the needle.
func (s *scanner) lines(block []byte) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		where := block
		if s.fold {
			s.folded = lower(s.folded, block)
			where = s.folded
		}
		for from := 0; ; {
			i := s.index(where[from:])
			if i < 0 {
				return
			}
			i += from
			start := bytes.LastIndexByte(block[:i], '\n') + 1
			end := len(block)
			if n := bytes.IndexByte(block[i:], '\n'); n >= 0 {
				end = i + n
			}
			if bytes.IndexByte(block[start:i], '\t') < 0 { // within the time
				from = i + 1
				continue
			}
			if !yield(block[start:end]) {
				return
			}
			from = end
		}
	}
}

// index works like bytes.Index for the needle. It looks for the needle's rarest byte, which is faster than
// to look for its first, unless even that byte is frequent.
func (s *scanner) index(text []byte) int {
	for at, misses := 0, 0; ; misses++ {
		if misses > 16+at/64 {
			i := bytes.Index(text[at:], s.needle)
			if i >= 0 {
				i += at
			}
			return i
		}
		if at+len(s.needle) > len(text) {
			return -1
		}
		i := bytes.IndexByte(text[at+s.rare:], s.needle[s.rare])
		if i < 0 {
			return -1
		}
		if at += i; bytes.HasPrefix(text[at:], s.needle) {
			return at
		}
		at++
	}
}

// frequent lists bytes by how often they are in the output of programs, the most frequent first. Others are rare.
const frequent = " etaoinsrlcdmpuhg0.1-f_b2/y:k3w4v5687j9x=TSEACINRLDPMOFq\t"

// rarest returns the index of the rarest byte.
func rarest(needle []byte) (at int) {
	rank := func(c byte) int {
		if i := strings.IndexByte(frequent, c); i >= 0 {
			return i
		}
		return len(frequent)
	}
	for i, c := range needle {
		if rank(c) > rank(needle[at]) {
			at = i
		}
	}
	return at
}

// excerpt returns the line, or the part of a long line around the match.
func (s *scanner) excerpt(text []byte) string {
	where := text
	if s.fold {
		where = lower(nil, text)
	}
	if i := bytes.Index(where, s.needle); len(text) > maxShown && i > maxShown/4 {
		text = text[i-maxShown/4:]
	}
	return termtext.Brief(termtext.Line(string(text)), maxShown)
}

// parseTextLine splits a line of text into its time and the text.
func parseTextLine(line []byte) (at time.Duration, text []byte, ok bool) {
	head, text, ok := bytes.Cut(line, []byte("\t"))
	if !ok {
		return 0, nil, false
	}
	ms, err := strconv.ParseInt(string(head), 10, 64)
	if err != nil || ms < 0 || ms > maxPartTime.Milliseconds() {
		return 0, nil, false
	}
	return time.Duration(ms) * time.Millisecond, text, true
}

// lowerCase maps bytes to ASCII letters in lower case. A table takes the same time for all texts.
var lowerCase = func() (table [256]byte) {
	for i := range table {
		table[i] = byte(i)
		if 'A' <= i && i <= 'Z' {
			table[i] += 'a' - 'A'
		}
	}
	return table
}()

// lower returns a text with ASCII letters in lower case, in the memory of to if it fits.
func lower(to, text []byte) []byte {
	to = slices.Grow(to[:0], len(text))[:len(text)]
	for i, c := range text {
		to[i] = lowerCase[c]
	}
	return to
}
