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
//	s:ID       a session
//	s:HOST:ID  a session on another host of the cluster
//	r:BASE64   a repository, by the argument for `open`
//	-          the separator line
const lineKey = "-"

func sessionKey(host, id string) string { return "s:" + onHost(host, id) }

// onHost returns a session's name or id as commands take it. host is "" for this one.
func onHost(host, what string) string {
	if host == "" {
		return what
	}
	return host + ":" + what
}

func repositoryKey(open string) string {
	return "r:" + base64.RawURLEncoding.EncodeToString([]byte(open))
}

// Target is what a key identifies: a session or a repository.
type Target struct {
	Session string // session id
	Host    string // of the session in the cluster, "" for this one
	Repo    string // in the form that `open` accepts
}

// Open returns the argument for `open`.
func (t Target) Open() string {
	if t.Session != "" {
		return onHost(t.Host, t.Session)
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
		if host, id, ok := strings.Cut(rest, ":"); ok {
			t.Host, t.Session = host, id
		}
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
