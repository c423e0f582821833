package secret

import (
	"bytes"
	"io"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/plain"
)

// minRedact is the shortest value that is looked for: redacting shorter ones
// would mangle ordinary text ("yes", "8080") and hide nothing.
const minRedact = 6

// Redactor replaces secrets in output by "[redacted]", in the forms in which
// programs print them (see forms): plain, JSON, URL, shell, hex, base64, and
// line by line when they have several. It cannot see a value that a program
// cut up, compressed or encrypted: it catches accidents, not malice.
//
// A nil Redactor and the zero Redactor redact nothing. Safe for concurrent use.
type Redactor struct {
	mu    sync.RWMutex
	added []string // forms of what Add was given
	guest []string // of what SetGuest was given last
	set   patterns // of both
}

// NewRedactor looks for values.
func NewRedactor(values ...Value) *Redactor {
	r := &Redactor{}
	r.Add(values...)
	return r
}

// Add looks for more values, in everything that is written from now on.
func (r *Redactor) Add(values ...Value) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.added = compile(slices.Concat(r.added, formsOf(values))).sorted
	r.set = compile(slices.Concat(r.added, r.guest))
}

// SetGuest looks for the values that a guest says it has, in place of those that it
// said before: a guest that names others each time must not fill the memory.
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

// String is s without secrets.
func (r *Redactor) String(s string) string {
	var out bytes.Buffer
	st := stream{}
	st.feed(&out, r.patterns(), []byte(s), true)
	return out.String()
}

// Line is one harmless line of s without secrets, of at most a number of bytes.
func (r *Redactor) Line(s string, most int) string {
	s = plain.Line(r.String(plain.Head(s, 16*most)))
	return plain.Brief(r.String(s), most) // what stood in the middle of a secret may be gone
}

// Writer redacts a stream, also where a secret is split over writes. It holds
// back the end of what was written only while that may be the start of a secret;
// Close lets it go. Close does not close w.
func (r *Redactor) Writer(w io.Writer) *Writer { return &Writer{r: r, w: w} }

// Mask is Writer for a stream whose length counts: it writes a "*" for each byte
// of a secret.
func (r *Redactor) Mask(w io.Writer) *Writer { return &Writer{r: r, w: w, st: stream{mask: true}} }

// Writer is a redacted stream. Safe for concurrent use.
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

// Close writes what was held back.
func (w *Writer) Close() error { return w.push(nil, true) }

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

// stream redacts bytes as they come. Every byte that any match covers is
// hidden, so overlapping secrets leave no rest, and how the bytes were cut into
// writes makes no difference.
type stream struct {
	held    []byte // not decided yet: the start of a pattern, perhaps
	covered int    // how many of the bytes to come a match covers already
	hiding  bool   // the byte before was hidden: its marker is written
	mask    bool   // each byte has a marker of its own
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

// patterns is what to look for, indexed for a quick no.
type patterns struct {
	sorted []string                     // all, without duplicates
	byKey  map[[minRedact]byte][]string // by the first bytes, longest first
	first  *[256]bool                   // the first bytes that occur
}

func compile(all []string) patterns {
	slices.Sort(all)
	all = slices.Compact(all)
	p := patterns{sorted: all, byKey: make(map[[minRedact]byte][]string, len(all)), first: new([256]bool)}
	for _, s := range all {
		k := [minRedact]byte([]byte(s[:minRedact]))
		p.byKey[k] = append(p.byKey[k], s)
		p.first[s[0]] = true
	}
	for _, l := range p.byKey {
		slices.SortFunc(l, func(a, b string) int { return len(b) - len(a) })
	}
	return p
}

// plain is how many bytes at the start of b are the start of no pattern.
func (p patterns) plain(b []byte) int {
	if p.first == nil {
		return len(b)
	}
	n := 0
	for n < len(b) && !p.first[b[n]] {
		n++
	}
	return n
}

// longest is the length of the longest pattern at the start of b, 0 for none.
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

// startsWith says whether a pattern goes on where b ends.
func (p patterns) startsWith(b []byte) bool {
	if len(b) >= maxPattern { // no pattern is longer; to copy all of b would cost much
		return false
	}
	s := string(b)
	// b itself may be a pattern; a longer one that starts with it comes right after.
	i := sort.Search(len(p.sorted), func(i int) bool { return p.sorted[i] > s })
	return i < len(p.sorted) && strings.HasPrefix(p.sorted[i], s)
}
