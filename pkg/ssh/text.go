package ssh

import (
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/plain"
)

// briefLen bounds guest text that becomes part of an error, in bytes.
const briefLen = 300

// brief is a line of guest text, cut to what an error message can carry.
func brief(s string) string { return plain.Brief(plain.Line(plain.Head(s, 16*briefLen)), briefLen) }

// Quote makes one POSIX shell command line out of arguments. It is the only
// place where the product quotes for a shell.
func Quote(args ...string) string {
	q := make([]string, len(args))
	for i, a := range args {
		if a != "" && strings.IndexFunc(a, special) < 0 {
			q[i] = a
			continue
		}
		q[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	return strings.Join(q, " ")
}

// special reports what the shell may take to mean something. "=" and "~" do in
// the first word, so they are quoted everywhere.
func special(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return false
	}
	return !strings.ContainsRune("_-./:,@+%", r)
}
