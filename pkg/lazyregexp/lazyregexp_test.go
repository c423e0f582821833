package lazyregexp

import (
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The program compiles an expression when it is first used, and only once.
func TestCompiledWhenUsed(t *testing.T) {
	inTest = false
	defer func() { inTest = true }()
	r := New(`(\w)=(\d+)`)
	if r.re != nil {
		t.Error("New compiled the expression, want that of the first use")
	}
	var users sync.WaitGroup
	for range 8 {
		users.Go(func() {
			if !r.MatchString("a=1") {
				t.Error("MatchString(a=1) = false, want true")
			}
		})
	}
	users.Wait()
	first := r.re
	if r.MatchString("a"); first == nil || r.re != first {
		t.Errorf("second use compiled the expression to %v, want %v of the first", r.re, first)
	}
}

// In a test, New panics if an expression is wrong. In the program, its first use does.
func TestWrongExpression(t *testing.T) {
	panics := func(what string, f func()) {
		t.Helper()
		defer func() {
			if text, _ := recover().(string); !strings.Contains(text, "missing closing )") {
				t.Errorf("%s panics with %q, want the compiler's error", what, text)
			}
		}()
		f()
	}
	panics("New", func() { New("(") })
	inTest = false
	defer func() { inTest = true }()
	r := New("(")
	panics("MatchString", func() { r.MatchString("") })
}

// Each method returns what that of regexp.Regexp returns.
func TestMethods(t *testing.T) {
	const expr, text = `(\w)=(\d+)`, "a=1 b=22"
	lazy, want := New(expr), regexp.MustCompile(expr)
	for name, pair := range map[string][2]any{
		"FindAllStringSubmatch":      {lazy.FindAllStringSubmatch(text, -1), want.FindAllStringSubmatch(text, -1)},
		"FindAllStringSubmatchIndex": {lazy.FindAllStringSubmatchIndex(text, 1), want.FindAllStringSubmatchIndex(text, 1)},
		"FindStringSubmatch":         {lazy.FindStringSubmatch(text), want.FindStringSubmatch(text)},
		"FindSubmatch":               {lazy.FindSubmatch([]byte(text)), want.FindSubmatch([]byte(text))},
		"Match":                      {lazy.Match([]byte(text)), true},
		"MatchString":                {lazy.MatchString("none"), false},
		"ReplaceAllString":           {lazy.ReplaceAllString(text, "$2"), "1 22"},
	} {
		if diff := cmp.Diff(pair[1], pair[0]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
