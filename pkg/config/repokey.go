package config

import (
	"fmt"
	"path/filepath"
	"strings"
)

// RepoKey is a repository's identity, in the form of repo.Ref: "github.com/owner/repo" or
// "local:/abs/path". In files, owner/repo is short for the former only. A repository of the
// same name on another host can have another owner, who must not get its secrets.
type RepoKey string

// Set parses owner/repo, host/owner/repo or local:/abs/path.
func (k *RepoKey) Set(text string) error {
	key, ok := ParseRepoKey(text)
	if !ok {
		return fmt.Errorf("must be owner/repo (on github.com), host/owner/repo or local:/absolute/path, got %q", text)
	}
	*k = key
	return nil
}

// ParseRepoKey parses the syntax used in files, and reports whether text is valid.
func ParseRepoKey(text string) (key RepoKey, ok bool) {
	if path, ok := strings.CutPrefix(text, "local:"); ok {
		return RepoKey(text), filepath.IsAbs(path) && filepath.Clean(path) == path
	}
	parts := strings.Split(text, "/")
	for _, p := range parts {
		if p == "" || p == "." || p == ".." || strings.ContainsAny(p, " @\\") {
			return "", false
		}
	}
	// GitHub owners never contain a dot; hosts on the internet always do.
	if len(parts) == 2 && !strings.ContainsAny(parts[0], ".:") {
		parts = append([]string{"github.com"}, parts...)
	}
	if len(parts) < 2 {
		return "", false
	}
	parts[0] = strings.ToLower(parts[0])
	name := strings.Join(parts, "/")
	switch parts[0] {
	case "github.com", "gitlab.com", "bitbucket.org": // where names are case-insensitive, see repo.Ref
		name = strings.ToLower(name)
	}
	return RepoKey(name), true
}
