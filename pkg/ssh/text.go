package ssh

import (
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// briefLen bounds guest text that becomes part of an error, in bytes.
const briefLen = 300

// brief returns guest text as one line, cut to a length that suits an error
// message.
func brief(s string) string {
	return termtext.Brief(termtext.Line(termtext.Head(s, 16*briefLen)), briefLen)
}

// Quote returns arguments as one POSIX shell command line. No other code in the
// program quotes for a shell.
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

// special reports whether a character may have a meaning for the shell. "=" and "~"
// do in the first word, so they are quoted everywhere.
func special(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return false
	}
	return !strings.ContainsRune("_-./:,@+%", r)
}
