package repo

import (
	"regexp"
	"sync"
)

// pattern is a regular expression that is compiled on first use. Compiling all of
// them takes a tenth of a command's start-up time, and most commands use none.
type pattern func() *regexp.Regexp

func lazily(expr string) pattern {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}

// MatchString calls the method of the regular expression.
func (p pattern) MatchString(s string) bool { return p().MatchString(s) }
