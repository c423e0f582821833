// Package strictyaml reads YAML and JSON that people write, and reports everything that is
// wrong with a text at once, each problem with its line and column. It never guesses: keys
// that are unknown or written twice, tags, and values of another type are problems.
package strictyaml

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// maxProblems is the number of problems that are listed.
const maxProblems = 20

// Problem is one error in a text.
type Problem struct {
	Line   int    `json:"line"`            // from 1
	Column int    `json:"column"`          // from 1, in characters
	Field  string `json:"field,omitempty"` // lifecycle.timeout, secrets[0].name; "" if it concerns no field
	Text   string `json:"text"`            // what is wrong, and what to do
}

// Format formats the problem on one line, with its position in the text of that name. With
// "" it leaves the position out.
func (p Problem) Format(name string) string {
	line := p.Text
	if p.Field != "" {
		line = p.Field + " " + line
	}
	if name != "" {
		line = fmt.Sprintf("%s:%d:%d: %s", name, p.Line, p.Column, line)
	}
	return line
}

// Error holds all problems of a text.
type Error struct {
	Name     string // of the text; "" if lines mean nothing
	Problems []Problem
	More     int // number of problems that are not listed
}

func (e *Error) Error() string {
	lines := make([]string, len(e.Problems), len(e.Problems)+1)
	for i, p := range e.Problems {
		lines[i] = p.Format(e.Name)
	}
	if e.More > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", e.More))
	}
	return strings.Join(lines, "\n")
}

// Problems collects the problems of one text, up to a bound.
type Problems struct {
	What    string // the text, in errors: "manifest"
	Aliases bool   // whether anchors, aliases and merge keys are allowed
	Quiet   bool   // set in a part that could hold a credential: problems do not repeat the text

	list []Problem
	more int
}

// Full reports whether further problems are only counted.
func (p *Problems) Full() bool { return len(p.list) >= maxProblems }

// Add adds a problem.
func (p *Problems) Add(n *Node, field, format string, args ...any) {
	if p.Full() {
		p.more++
		return
	}
	p.list = append(p.list, Problem{Line: n.Line, Column: n.Col, Field: field, Text: fmt.Sprintf(format, args...)})
}

// Bad adds a problem of a value. The path "" is the whole text.
func (p *Problems) Bad(n *Node, path, format string, args ...any) {
	if path == "" {
		format = "the " + p.What + " " + format
	}
	p.Add(n, path, format, args...)
}

// Err returns all problems in the order of the lines, or nil if there are none.
func (p *Problems) Err(name string) *Error {
	if len(p.list) == 0 {
		return nil
	}
	slices.SortStableFunc(p.list, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return &Error{Name: name, Problems: p.list, More: p.more}
}
