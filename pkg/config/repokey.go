package config

import (
	"path/filepath"
	"strings"

	"github.com/goccy/go-yaml/ast"
)

// RepoKey is a repository's identity, as repo.Ref has it: "github.com/owner/repo"
// or "local:/abs/path". In files owner/repo is short for the former, and for
// nothing else: a repository of the same name on another host belongs to
// somebody else, who must not get its secrets.
type RepoKey string

// UnmarshalYAML reads owner/repo, host/owner/repo or local:/abs/path.
func (k *RepoKey) UnmarshalYAML(n ast.Node) error {
	text, ok := scalar(n)
	if !ok {
		return at(n, "owner/repo is wanted here")
	}
	key, ok := ParseRepoKey(text)
	if !ok {
		return at(n, "%q is none of owner/repo (on github.com), host/owner/repo and local:/absolute/path", text)
	}
	*k = key
	return nil
}

// ParseRepoKey reads what may stand in a file; ok is false for anything else.
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
	// GitHub's owners have no dot, hosts of the internet have one.
	if len(parts) == 2 && !strings.ContainsAny(parts[0], ".:") {
		parts = append([]string{"github.com"}, parts...)
	}
	if len(parts) < 2 {
		return "", false
	}
	parts[0] = strings.ToLower(parts[0])
	name := strings.Join(parts, "/")
	switch parts[0] {
	case "github.com", "gitlab.com", "bitbucket.org": // where Owner/Repo is owner/repo, see repo.Ref
		name = strings.ToLower(name)
	}
	return RepoKey(name), true
}
