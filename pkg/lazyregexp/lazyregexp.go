// Package lazyregexp compiles regular expressions when they are first used. Every command
// would otherwise compile all of them before main, and most commands use none.
//
// A package-level variable holds a Regexp of this package. Code that compiles an expression
// inside a function uses package regexp.
package lazyregexp

import (
	"os"
	"regexp"
	"strings"
	"sync"
)

// Regexp is a regular expression. Several goroutines may use it at once.
type Regexp struct {
	expr string
	once sync.Once
	re   *regexp.Regexp
}

// inTest is true in a test binary, where New compiles immediately. So the tests of a package
// find an expression that is wrong, even if they do not use it.
var inTest = len(os.Args) > 0 && strings.HasSuffix(os.Args[0], ".test")

// New returns the regular expression expr. If expr is wrong, its first use panics.
func New(expr string) *Regexp {
	r := &Regexp{expr: expr}
	if inTest {
		r.compiled()
	}
	return r
}

func (r *Regexp) compiled() *regexp.Regexp {
	r.once.Do(func() { r.re = regexp.MustCompile(r.expr) })
	return r.re
}

// The methods are those of regexp.Regexp that the program uses.

// FindAllStringSubmatch calls the method of the regular expression.
func (r *Regexp) FindAllStringSubmatch(s string, n int) [][]string {
	return r.compiled().FindAllStringSubmatch(s, n)
}

// FindAllStringSubmatchIndex calls the method of the regular expression.
func (r *Regexp) FindAllStringSubmatchIndex(s string, n int) [][]int {
	return r.compiled().FindAllStringSubmatchIndex(s, n)
}

// FindStringSubmatch calls the method of the regular expression.
func (r *Regexp) FindStringSubmatch(s string) []string { return r.compiled().FindStringSubmatch(s) }

// FindSubmatch calls the method of the regular expression.
func (r *Regexp) FindSubmatch(b []byte) [][]byte { return r.compiled().FindSubmatch(b) }

// Match calls the method of the regular expression.
func (r *Regexp) Match(b []byte) bool { return r.compiled().Match(b) }

// MatchString calls the method of the regular expression.
func (r *Regexp) MatchString(s string) bool { return r.compiled().MatchString(s) }

// ReplaceAllString calls the method of the regular expression.
func (r *Regexp) ReplaceAllString(src, repl string) string {
	return r.compiled().ReplaceAllString(src, repl)
}
