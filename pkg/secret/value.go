// Package secret owns credentials on the host: where they come from
// (references), how they are fetched (once, late, in a child process), the type
// that carries them without ever printing them, and the Redactor that takes
// them out of whatever leaves the process.
//
// It never writes a value to a file, to a command line, to a log or into an
// error, and it never delivers one: that is the session's business.
package secret

import (
	"fmt"
	"io"
	"log/slog"
)

const redacted = "[redacted]"

// Value is a secret. It prints as "[redacted]" however it is printed; Reveal is
// the only way to its content. The zero Value is the empty secret.
type Value struct {
	// A pointer, because fmt does not call the methods of a Value that sits in
	// another struct's unexported field; it would print a plain string there.
	p *string
}

// NewValue wraps s.
func NewValue(s string) Value { return Value{&s} }

// Reveal is the content.
func (v Value) Reveal() string {
	if v.p == nil {
		return ""
	}
	return *v.p
}

// Len is the length of the content in bytes.
func (v Value) Len() int { return len(v.Reveal()) }

func (Value) String() string                { return redacted }
func (Value) GoString() string              { return redacted }
func (Value) LogValue() slog.Value          { return slog.StringValue(redacted) }
func (Value) MarshalJSON() ([]byte, error)  { return []byte(`"` + redacted + `"`), nil }
func (Value) MarshalText() ([]byte, error)  { return []byte(redacted), nil }
func (Value) Format(s fmt.State, verb rune) { _, _ = io.WriteString(s, redacted) }
