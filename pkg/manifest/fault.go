package manifest

import (
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// source records where the fields of a parsed manifest are.
type source struct {
	name   string
	fields map[string]*strictyaml.Node // "" is the whole manifest
}

// Fault is an error in a field of a manifest that Parse cannot detect, such as a
// profile that the host does not have or a secret's file that does not exist.
type Fault struct {
	Field string // as in strictyaml.Problem
	Err   error
}

// Refuse reports faults in the same form as Parse reports its own problems, each with
// its line if t was parsed. It returns nil if there are none. The error has the code
// and hint of the first fault.
func (t *Task) Refuse(faults ...Fault) error {
	if len(faults) == 0 {
		return nil
	}
	var p strictyaml.Problems
	from := source{fields: map[string]*strictyaml.Node{"": {Line: 1, Col: 1}}}
	if t.source != nil {
		from = *t.source
	}
	for _, f := range faults {
		at := f.Field
		for from.fields[at] == nil { // the nearest enclosing field that was written
			at = at[:max(strings.LastIndexByte(at, '.'), 0)]
		}
		p.Add(from.fields[at], f.Field, "is refused: %v", f.Err)
	}
	err := fail.New(fail.CodeOf(faults[0].Err), "%w", p.Err(from.name))
	if hint := fail.HintOf(faults[0].Err); hint != "" {
		err = err.WithHint("%s", hint)
	}
	return err
}
