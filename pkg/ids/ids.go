// Package ids makes and checks the random ids of sessions, tasks and commands.
package ids

import (
	"crypto/rand"
	"encoding/hex"
	"strings"
)

// length is the number of digits of an id.
const length = 12

// New returns a new id: 12 hex digits.
func New() string { return Hex(length / 2) }

// Hex returns that many random bytes in hex digits.
func Hex(bytes int) string {
	b := make([]byte, bytes)
	_, _ = rand.Read(b) // crypto/rand documents that it never fails
	return hex.EncodeToString(b)
}

// Valid reports whether text has the form of an id. The id may be unknown.
func Valid(text string) bool { return len(text) == length && IsHex(text) }

// IsHex reports whether text has only hex digits, in lower case.
func IsHex(text string) bool { return strings.Trim(text, "0123456789abcdef") == "" }
