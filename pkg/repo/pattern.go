package repo

import (
	"regexp"
	"sync"
)

// pattern is a regular expression that is compiled when it is first used. All
// of them together are a tenth of the time in which a command starts, and most
// commands use none.
type pattern func() *regexp.Regexp

func lazily(expr string) pattern {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}

// MatchString is that of the regular expression.
func (p pattern) MatchString(s string) bool { return p().MatchString(s) }
