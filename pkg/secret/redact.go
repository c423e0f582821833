package secret

import (
	"bytes"
	"io"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// minRedact is the length of the shortest value that is redacted. Redacting shorter
// ones would mangle ordinary text ("yes", "8080") and protect nothing.
const minRedact = 6

// Redactor replaces secrets in output by "[redacted]". It matches the forms in
// which programs print them (see forms): plain, JSON, URL, shell, hex, base64, and
// line by line for multi-line values. It cannot find a value that a program has
// split, compressed or encrypted: it prevents accidents, not malice.
//
// A nil Redactor and the zero Redactor redact nothing. A Redactor is safe for
// concurrent use.
type Redactor struct {
	mu    sync.RWMutex
	added []string // forms of the values passed to Add
	guest []string // forms of the values last passed to SetGuest
	set   patterns // of both
}

// NewRedactor returns a Redactor for values.
func NewRedactor(values ...Value) *Redactor {
	r := &Redactor{}
	r.Add(values...)
	return r
}

// Add adds values, which are redacted in everything written from now on.
func (r *Redactor) Add(values ...Value) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.added = compile(slices.Concat(r.added, formsOf(values))).sorted
	r.set = compile(slices.Concat(r.added, r.guest))
}

// SetGuest sets the values that a guest reports as its secrets, and replaces those
// of the last call. A guest that reports new values each time must not fill the
// memory.
func (r *Redactor) SetGuest(values ...Value) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.guest = formsOf(values)
	r.set = compile(slices.Concat(r.added, r.guest))
}

func formsOf(values []Value) []string {
	var all []string
	for _, v := range values {
		all = append(all, forms(v.Reveal())...)
	}
	return all
}

func (r *Redactor) patterns() patterns {
	if r == nil {
		return patterns{}
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.set
}

// Redact returns s without secrets.
func (r *Redactor) Redact(s string) string {
	var out bytes.Buffer
	st := stream{}
	st.feed(&out, r.patterns(), []byte(s), true)
	return out.String()
}

// Line returns s without secrets as one printable line of at most most bytes.
func (r *Redactor) Line(s string, most int) string {
	s = termtext.Line(r.Redact(termtext.Head(s, 16*most)))
	return termtext.Brief(r.Redact(s), most) // again, because characters inside a secret may have been removed
}

// Writer returns a writer that redacts a stream, including secrets split across
// writes. It holds back the end of the written data only while that may be the
// start of a secret; Close writes it. Close does not close w.
func (r *Redactor) Writer(w io.Writer) *Writer { return &Writer{r: r, w: w} }

// Mask is like Writer, for streams whose length must not change: it writes a "*"
// for each byte of a secret.
func (r *Redactor) Mask(w io.Writer) *Writer { return &Writer{r: r, w: w, st: stream{mask: true}} }

// Writer is a redacted stream. It is safe for concurrent use.
type Writer struct {
	r *Redactor
	w io.Writer

	mu  sync.Mutex
	st  stream
	out bytes.Buffer
}

func (w *Writer) Write(p []byte) (int, error) {
	if err := w.push(p, false); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close writes the data that was held back.
func (w *Writer) Close() error { return w.push(nil, true) }

// Holds reports whether the end of the written data is held back.
func (w *Writer) Holds() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.st.held) > 0
}

func (w *Writer) push(p []byte, last bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.out.Reset()
	w.st.feed(&w.out, w.r.patterns(), p, last)
	if w.out.Len() == 0 {
		return nil
	}
	_, err := w.w.Write(w.out.Bytes())
	return err
}

// stream redacts bytes as they arrive. It hides every byte that any match covers,
// so overlapping secrets leave no rest. How the data is split into writes does not
// matter.
type stream struct {
	held    []byte // undecided: possibly the start of a pattern
	covered int    // number of upcoming bytes that a match already covers
	hiding  bool   // the previous byte was hidden, so the marker is already written
	mask    bool   // write one marker per byte
}

func (s *stream) feed(out *bytes.Buffer, set patterns, p []byte, last bool) {
	data := p
	if len(s.held) > 0 {
		data = slices.Concat(s.held, p)
	}
	i := 0
	for ; i < len(data); i++ {
		if s.covered == 0 {
			if n := set.plain(data[i:]); n > 0 {
				s.hiding = false
				out.Write(data[i : i+n])
				i += n - 1
				continue
			}
		}
		rest := data[i:]
		if !last && set.startsWith(rest) {
			break
		}
		s.covered = max(s.covered, set.longest(rest))
		if s.covered == 0 {
			s.hiding = false
			out.WriteByte(data[i])
			continue
		}
		switch {
		case s.mask:
			out.WriteByte('*')
		case !s.hiding:
			s.hiding = true
			out.WriteString(redacted)
		}
		s.covered--
	}
	s.held = append([]byte(nil), data[i:]...)
}

// patterns is the set of strings to match, indexed so that most bytes are rejected
// quickly.
type patterns struct {
	sorted []string                     // all, without duplicates
	byKey  map[[minRedact]byte][]string // by the first bytes, longest first
	first  *[256]bool                   // the first bytes that occur
	skip   *[skips]uint8                // by two bytes: how far the next start of a pattern is at least
	window int                          // bytes of each pattern that skip considers
}

// skips is the size of a table of the algorithm of Wu and Manber ("A fast algorithm for multi-pattern
// searching", 1994), which reads only every few bytes of a text.
const skips = 1 << 12

const maxWindow = 32 // more hardly makes it faster

func skipKey(a, b byte) int { return (int(a)<<4 ^ int(b)) & (skips - 1) }

func compile(all []string) patterns {
	slices.Sort(all)
	all = slices.Compact(all)
	p := patterns{sorted: all, byKey: make(map[[minRedact]byte][]string, len(all)), first: new([256]bool), skip: new([skips]uint8), window: maxWindow}
	for _, s := range all {
		p.window = min(p.window, len(s))
	}
	for i := range p.skip {
		p.skip[i] = uint8(p.window - 1) //nolint:gosec // at most maxWindow
	}
	for _, s := range all {
		k := [minRedact]byte([]byte(s[:minRedact]))
		p.byKey[k] = append(p.byKey[k], s)
		p.first[s[0]] = true
		for i := 1; i < p.window; i++ {
			at := &p.skip[skipKey(s[i-1], s[i])]
			*at = min(*at, uint8(p.window-1-i)) //nolint:gosec // at most maxWindow
		}
	}
	for _, l := range p.byKey {
		slices.SortFunc(l, func(a, b string) int { return len(b) - len(a) })
	}
	return p
}

// plain returns the number of bytes at the start of b at which no pattern starts.
func (p patterns) plain(b []byte) int {
	if p.first == nil {
		return len(b)
	}
	n := 0
	for n+p.window <= len(b) {
		if skip := p.skip[skipKey(b[n+p.window-2], b[n+p.window-1])]; skip > 0 {
			n += int(skip)
		} else if p.first[b[n]] {
			return n
		} else {
			n++
		}
	}
	for n < len(b) && !p.first[b[n]] {
		n++
	}
	return min(n, len(b))
}

// longest returns the length of the longest pattern at the start of b, 0 for none.
func (p patterns) longest(b []byte) int {
	if len(b) < minRedact {
		return 0
	}
	for _, s := range p.byKey[[minRedact]byte(b[:minRedact])] {
		if len(s) <= len(b) && string(b[:len(s)]) == s {
			return len(s)
		}
	}
	return 0
}

// startsWith reports whether a pattern starts with b and is longer.
func (p patterns) startsWith(b []byte) bool {
	if len(b) >= maxPattern { // no pattern is longer
		return false
	}
	if len(b) >= minRedact {
		return slices.ContainsFunc(p.byKey[[minRedact]byte(b[:minRedact])], func(s string) bool { return len(s) > len(b) && s[:len(b)] == string(b) })
	}
	s := string(b)
	// b itself may be a pattern; a longer one that starts with it follows directly.
	i := sort.Search(len(p.sorted), func(i int) bool { return p.sorted[i] > s })
	return i < len(p.sorted) && strings.HasPrefix(p.sorted[i], s)
}
