package picker

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// lineKey is the key of the separator line. A row's key identifies the row. fzf uses it
// to track rows that are added and removed, and passes only the key of a row to a
// shell. It therefore consists of harmless characters, whatever the row's name is:
//
//	s:ID      a session
//	r:BASE64  a repository, by the argument for `open`
//	-         the separator line
const lineKey = "-"

func sessionKey(id string) string { return "s:" + id }

func repositoryKey(open string) string {
	return "r:" + base64.RawURLEncoding.EncodeToString([]byte(open))
}

// Target is what a key identifies: a session or a repository.
type Target struct {
	Session string // session id
	Repo    string // in the form that `open` accepts
}

// Open returns the argument for `open`.
func (t Target) Open() string {
	if t.Session != "" {
		return t.Session
	}
	return t.Repo
}

// ParseKey parses a row's key. ok is false for the separator line and for anything
// else.
func ParseKey(key string) (t Target, ok bool) {
	kind, rest, _ := strings.Cut(key, ":")
	switch kind {
	case "s":
		t.Session = rest
	case "r":
		open, err := base64.RawURLEncoding.DecodeString(rest)
		if err != nil {
			return Target{}, false
		}
		t.Repo = string(open)
	}
	return t, t.Open() != ""
}

// Typed returns the repository that a typed text names, even if no row shows it:
// owner/repo, a git URL or a path. ok is false if the text names no repository.
func Typed(text string) (open string, ok bool) {
	open = strings.TrimSpace(text)
	if rest, found := strings.CutPrefix(open, "~/"); found || open == "~" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", false
		}
		open = filepath.Join(home, rest)
	}
	cwd, err := os.Getwd()
	if err != nil {
		return "", false
	}
	_, err = repo.Parse(open, cwd)
	return open, err == nil
}
