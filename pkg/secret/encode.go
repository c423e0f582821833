package secret

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// encoded is what Encode returns: values as base64, and errors of the other secrets. Failure is about
// all of them.
type encoded struct {
	Values  map[string][]byte  `json:"values,omitempty"`
	Failed  map[string]failure `json:"failed,omitempty"`
	Failure *failure           `json:"failure,omitempty"`
}

type failure struct {
	Code  fail.Code `json:"code"`
	Error string    `json:"error"`
	Hint  string    `json:"hint,omitempty"`
}

func failureOf(err error) failure {
	return failure{Code: fail.CodeOf(err), Error: err.Error(), Hint: fail.HintOf(err)}
}

func (f failure) err() error {
	return fail.New(f.Code, "%s", termtext.Line(f.Error)).WithHint("%s", termtext.Line(f.Hint))
}

// Encode returns what Resolve returned, for another process that waits for it. The text contains the
// values: it must be encrypted wherever others could read it.
func Encode(values map[string]Value, err error) ([]byte, error) {
	e := encoded{Values: map[string][]byte{}, Failed: map[string]failure{}}
	for name, v := range values {
		e.Values[name] = []byte(v.Reveal())
	}
	if failed, ok := errors.AsType[Unresolved](err); ok {
		for name, err := range failed {
			e.Failed[name] = failureOf(err)
		}
	} else if err != nil {
		f := failureOf(err)
		e.Failure = &f
	}
	return json.Marshal(e)
}

// Decode returns what was given to Encode, but only of these secrets.
func Decode(text []byte, refs []Ref) (map[string]Value, error) {
	var e encoded
	if json.Unmarshal(text, &e) != nil { // its error may quote a value
		return nil, fmt.Errorf("read secrets: %w", errInvalid)
	}
	if e.Failure != nil {
		return nil, e.Failure.err()
	}
	values := make(map[string]Value, len(refs))
	failed := Unresolved{}
	for _, ref := range refs {
		if v, ok := e.Values[ref.Name]; ok {
			s, err := clean(ref, string(v))
			if err != nil {
				failed[ref.Name] = err
				continue
			}
			values[ref.Name] = NewValue(s)
		} else if f, ok := e.Failed[ref.Name]; ok {
			failed[ref.Name] = f.err()
		} else {
			failed[ref.Name] = problem(ref, "no value was returned")
		}
	}
	return values, failed.orNil()
}

var errInvalid = errors.New("the encoding is invalid")
