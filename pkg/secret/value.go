// Package secret manages credentials on the host: their sources (references), their
// resolution (once, late, in a child process), a type that carries them without
// ever printing them, and the Redactor that removes them from the process's output.
//
// It never writes a value to a file, a command line, a log or an error. It never
// delivers one either: that is the responsibility of package session.
package secret

import (
	"fmt"
	"io"
	"log/slog"
)

const redacted = "[redacted]"

// Value is a secret. Every way of printing it yields "[redacted]"; only Reveal
// returns its content. The zero Value is the empty secret.
type Value struct {
	// A pointer, because fmt does not call the methods of a Value in another
	// struct's unexported field. It would print a plain string there.
	p *string
}

// NewValue returns a Value with the content s.
func NewValue(s string) Value { return Value{&s} }

// Reveal returns the content.
func (v Value) Reveal() string {
	if v.p == nil {
		return ""
	}
	return *v.p
}

// Len returns the length of the content in bytes.
func (v Value) Len() int { return len(v.Reveal()) }

func (Value) String() string                { return redacted }
func (Value) GoString() string              { return redacted }
func (Value) LogValue() slog.Value          { return slog.StringValue(redacted) }
func (Value) MarshalJSON() ([]byte, error)  { return []byte(`"` + redacted + `"`), nil }
func (Value) MarshalText() ([]byte, error)  { return []byte(redacted), nil }
func (Value) Format(s fmt.State, verb rune) { _, _ = io.WriteString(s, redacted) }
