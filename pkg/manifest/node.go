package manifest

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Bounds of the input, far above what a manifest needs.
const (
	maxDepth    = 20
	maxNodes    = 10_000
	maxProblems = 20
)

// Problem is one error in a manifest.
type Problem struct {
	Line   int    `json:"line"`            // from 1
	Column int    `json:"column"`          // from 1, in characters
	Field  string `json:"field,omitempty"` // lifecycle.timeout, secrets[0].name; "" if it concerns no field
	Text   string `json:"text"`            // what is wrong, and what to do
}

// Error holds all problems of a manifest. Parse's errors wrap one.
type Error struct {
	Name     string // of the manifest; "" if lines mean nothing
	Problems []Problem
	More     int // number of problems that are not listed
}

func (e *Error) Error() string {
	lines := make([]string, len(e.Problems), len(e.Problems)+1)
	for i, p := range e.Problems {
		lines[i] = p.format(e.Name)
	}
	if e.More > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", e.More))
	}
	return strings.Join(lines, "\n")
}

// format formats the problem on one line, with its position in the manifest of that name.
func (p Problem) format(name string) string {
	line := p.Text
	if p.Field != "" {
		line = p.Field + " " + line
	}
	if name != "" {
		line = fmt.Sprintf("%s:%d:%d: %s", name, p.Line, p.Column, line)
	}
	return line
}

// source records where the fields of a parsed manifest are.
type source struct {
	name   string
	fields map[string]*node // "" is the whole manifest
}

// Fault is an error in a field of a manifest that Parse cannot detect, such as a
// profile that the host does not have or a secret's file that does not exist.
type Fault struct {
	Field string // as in Problem
	Err   error
}

// Refuse reports faults in the same form as Parse reports its own problems, each with
// its line if t was parsed. It returns nil if there are none. The error has the code
// and hint of the first fault.
func (t *Task) Refuse(faults ...Fault) error {
	if len(faults) == 0 {
		return nil
	}
	var p problems
	from := source{fields: map[string]*node{"": {line: 1, col: 1}}}
	if t.source != nil {
		from = *t.source
	}
	for _, f := range faults {
		at := f.Field
		for from.fields[at] == nil { // the nearest enclosing field that was written
			at = at[:max(strings.LastIndexByte(at, '.'), 0)]
		}
		p.add(from.fields[at], f.Field, "is refused: %v", f.Err)
	}
	err := fail.New(fail.CodeOf(faults[0].Err), "%w", p.sorted(from.name))
	if hint := fail.HintOf(faults[0].Err); hint != "" {
		err = err.WithHint("%s", hint)
	}
	return err
}

// problems collects problems up to a bound.
type problems struct {
	list []Problem
	more int
}

func (p *problems) full() bool { return len(p.list) >= maxProblems }

func (p *problems) add(n *node, field, format string, args ...any) {
	if p.full() {
		p.more++
		return
	}
	p.list = append(p.list, Problem{Line: n.line, Column: n.col, Field: field, Text: fmt.Sprintf(format, args...)})
}

// err returns all problems as an error, or nil if there are none.
func (p *problems) err(name string) error {
	if len(p.list) == 0 {
		return nil
	}
	return fail.New(fail.Usage, "%w", p.sorted(name)).
		WithHint("agent-sessionizer task schema # every key, its default and its bounds")
}

// sorted returns all problems in the order of the lines.
func (p *problems) sorted(name string) *Error {
	slices.SortStableFunc(p.list, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return &Error{Name: name, Problems: p.list, More: p.more}
}

// kind is the type of a node.
type kind int

const (
	null kind = iota
	boolean
	integer
	fraction
	text
	list
	object
)

func (k kind) String() string {
	return [...]string{"nothing", "a boolean", "a number", "a fraction", "a string", "a list", "an object"}[k]
}

// node is a value in a manifest with its position, whether it was written as YAML or as
// JSON.
type node struct {
	line, col int
	kind      kind
	text      string  // of a scalar: as it was written, without quotes
	items     []*node // of a list, or the values of an object
	keys      []*node // of an object, one for each of items
}

// readNodes parses the text into nodes. It returns nil if that fails.
func readNodes(data []byte, p *problems) *node {
	if len(data) > MaxBytes {
		p.add(&node{line: 1, col: 1}, "", "the manifest is larger than 1 MiB; put long texts into a file of the repository")
		return nil
	}
	data = bytes.TrimPrefix(data, []byte("\ufeff")) // the byte order mark of some editors
	if !readable(data, p) {
		return nil
	}
	n, ok := readJSON(data, p)
	if !ok {
		n = readYAML(data, p)
	}
	if n != nil && n.kind == null {
		p.add(n, "", "the manifest is empty")
		return nil
	}
	return n
}

// readable refuses bytes that no manifest needs and that a terminal or an editor would
// not show, so that people see exactly what is read.
func readable(data []byte, p *problems) bool {
	at := cursor{data: data}
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			p.add(at.node(i), "", "the manifest is not UTF-8; save the file as UTF-8")
			return false
		case r == '\ufeff' || isControl(r) && r != '\n' && r != '\t' && r != '\r':
			p.add(at.node(i), "", "the manifest contains an invisible character, U+%04X; remove it", r)
			return false
		}
		i += size
	}
	return true
}

func isControl(r rune) bool { return r < ' ' || r >= 0x7f && r < 0xa0 }

// cursor computes line and column for increasing offsets.
type cursor struct {
	data      []byte
	offset    int
	line, col int // of offset, from 0
}

// node returns an empty node positioned at the offset.
func (c *cursor) node(offset int) *node {
	passed := c.data[c.offset:offset]
	if i := bytes.LastIndexByte(passed, '\n'); i >= 0 {
		c.line += bytes.Count(passed, []byte{'\n'})
		c.col, passed = 0, passed[i+1:]
	}
	c.col += utf8.RuneCount(passed)
	c.offset = offset
	return &node{line: c.line + 1, col: c.col + 1}
}
