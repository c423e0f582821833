package manifest

import (
	"fmt"
	"path"
	"strings"
	"unicode"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
)

// rule defines which texts are valid.
type rule struct {
	pattern string              // a regular expression with the same meaning in Go and in JSON Schema
	max     int                 // bytes; 0 if the pattern limits the length
	lines   bool                // may contain several lines, and tabs
	is      string              // describes a valid text, for the error
	wrong   func(string) string // returns other problems, which a schema cannot express

	re *lazyregexp.Regexp
}

const (
	maxPrompt   = 100 << 10 // one argument; Linux accepts 128 KiB
	maxValue    = 32 << 10  // of an environment variable
	maxURL      = 1024
	maxBranch   = 200
	maxPath     = 1024
	maxGlob     = 512
	maxKey      = 4096
	notBlankRE  = `\S`
	hexOfCommit = `^[0-9A-Fa-f]{4,64}$`
)

// rules holds the rules that the tags name.
var rules = withExpressions(map[string]*rule{
	"name":         {pattern: notBlankRE, max: 200, is: "a name that is not blank"},
	"label":        {pattern: `^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$`, is: "a label name: at most 63 letters, digits and . _ - / between them"},
	"label value":  {pattern: `^([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?$`, is: "a label value: at most 63 letters, digits and . _ - between them"},
	"url":          {pattern: `^[^\s-]`, max: maxURL, is: "a repository: owner/repo, a git URL, or a path", wrong: wrongURL},
	"branch":       {pattern: `^[^\s./-]`, max: maxBranch, is: "a branch name", wrong: wrongBranch},
	"commit":       {pattern: hexOfCommit, is: "a commit hash: 4 to 64 hexadecimal digits"},
	"subpath":      {pattern: notBlankRE, max: maxPath, is: "a directory of the repository", wrong: wrongSubpath},
	"prompt":       {pattern: notBlankRE, max: maxPrompt, lines: true, is: "a prompt that is not blank"},
	"model":        {pattern: `^[A-Za-z0-9][A-Za-z0-9._:/@\[\]-]{0,127}$`, is: "a model name"},
	"tool":         {pattern: `^[A-Za-z][A-Za-z0-9_-]{0,127}$`, is: "a tool name, such as Bash or mcp__server__tool"},
	"argument":     {max: maxPrompt, lines: true},
	"variable":     {pattern: `^[A-Za-z_][A-Za-z0-9_]{0,127}$`, is: "the name of an environment variable: at most 128 letters, digits and _"},
	"value":        {max: maxValue, lines: true},
	"word":         {pattern: notBlankRE, max: 100, is: "a name that is not blank"},
	"session":      {pattern: `^[A-Za-z0-9][A-Za-z0-9._/@-]{0,199}$`, is: "a session: its name, its id, the start of its id, or owner/repo@LABEL"},
	"secret name":  {pattern: `^[A-Z_][A-Z0-9_]{0,127}$`, is: "the name of an environment variable: at most 128 capital letters, digits and _"},
	"host":         {pattern: `^(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+$`, max: 253, is: "the name of a host, like api.example.org or *.example.org"},
	"request rule": {pattern: `^(\*|[A-Z,-]+) /\S*$`, max: 1024, is: "METHODS PATH, such as GET,POST /v1/**"},
	"amount":       {pattern: measure.USDPattern, is: "an amount, such as 5 USD"},
	"prefix":       {pattern: `^[A-Za-z0-9._-]{1,64}$`, is: "at most 64 letters, digits and . _ -"},
	"key":          {pattern: notBlankRE, max: maxKey, is: "a key that is not blank"},
	"pattern":      {pattern: `^[^\s/]`, max: maxGlob, is: "a pattern relative to the checkout, such as reports/**/*.json", wrong: wrongPattern},
})

func withExpressions(rules map[string]*rule) map[string]*rule {
	for _, r := range rules {
		r.re = lazyregexp.New(r.pattern)
	}
	return rules
}

// normal returns the text in stored form, with LF line ends.
func (r *rule) normal(s string) string {
	if r.lines {
		return strings.ReplaceAll(s, "\r\n", "\n")
	}
	return s
}

// broken returns what is wrong with a text, or "". It never repeats the text.
func (r *rule) broken(s string) string {
	if r.max > 0 && len(s) > r.max {
		return fmt.Sprintf("must have at most %d bytes, got %d", r.max, len(s))
	}
	hidden := func(c rune) bool {
		if r.lines { // allows all scripts, but nothing that moves a cursor
			return unicode.IsControl(c) && c != '\n' && c != '\t'
		}
		return !unicode.IsPrint(c)
	}
	if i := strings.IndexFunc(s, hidden); i >= 0 {
		for _, c := range s[i:] {
			return fmt.Sprintf("contains an invisible character, U+%04X; remove it", c)
		}
	}
	if !r.re.MatchString(s) {
		return "must be " + r.is
	}
	if r.wrong != nil {
		return r.wrong(s)
	}
	return ""
}

var passwordRE = lazyregexp.New(`^[A-Za-z0-9+.-]+://[^/?#@]*:[^/?#]*@`)

func wrongURL(s string) string {
	switch {
	case passwordRE.MatchString(s):
		return "contains a password, which would be written to disk; keep it in git's credential helper"
	case strings.HasPrefix(s, "~"):
		return "begins with ~, which only a shell expands; write the absolute path"
	}
	return ""
}

// wrongBranch applies git's check-ref-format, and also refuses everything that is
// special to a shell or an option parser.
func wrongBranch(s string) string {
	ok := s != "HEAD" && s != "@" && !strings.HasPrefix(s, "refs/") && !strings.HasSuffix(s, ".") &&
		!strings.Contains(s, "..") && !strings.Contains(s, "@{") && !strings.ContainsAny(s, " ~^:?*[\\$`;|&<>\"'!")
	for part := range strings.SplitSeq(s, "/") {
		ok = ok && part != "" && part[0] != '.' && part[0] != '-' && !strings.HasSuffix(part, ".lock")
	}
	if ok {
		return ""
	}
	return "must be a branch name that git allows, without refs/heads/"
}

func wrongSubpath(s string) string {
	switch {
	case strings.HasPrefix(s, "/"):
		return "begins with /; it must be relative to the root of the repository"
	case hasDots(s):
		return "contains ..; it must not leave the repository"
	case path.Clean(s) == ".git" || strings.HasPrefix(path.Clean(s), ".git/"):
		return "must not be git's own directory"
	}
	return ""
}

func wrongPattern(s string) string {
	if hasDots(s) {
		return "contains ..; it must not leave the checkout"
	}
	if !doublestar.ValidatePattern(s) {
		return "must be a pattern in which every [, { and \\ is complete"
	}
	return ""
}

func hasDots(s string) bool {
	for part := range strings.SplitSeq(s, "/") {
		if part == ".." {
			return true
		}
	}
	return false
}
