package picker

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// A row's key says what the row is. It is what fzf follows when rows come and
// go, and all of a row that fzf hands to a shell, so it is made of harmless
// characters, whatever the row is called:
//
//	s:ID      a session
//	r:BASE64  a repository, by what `open` is given
//	-         the line between them
const lineKey = "-"

func sessionKey(id string) string { return "s:" + id }

func repositoryKey(open string) string {
	return "r:" + base64.RawURLEncoding.EncodeToString([]byte(open))
}

// Target is what a key stands for: a session or a repository.
type Target struct {
	Session string // its id
	Repo    string // as `open` takes it
}

// Open is what `open` is given.
func (t Target) Open() string {
	if t.Session != "" {
		return t.Session
	}
	return t.Repo
}

// ParseKey reads a row's key; ok is false for the line and for anything else.
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

// Typed is the repository that a text means which is on no row: owner/repo, a
// git URL or a path. ok is false when it looks like none.
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
