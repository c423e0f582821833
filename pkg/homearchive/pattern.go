package homearchive

import (
	"errors"
	"fmt"
	"path"
	"strings"
)

// Patterns selects the files to save: paths below the home directory, whose parts may
// contain *, ? and […]. A pattern that matches a directory selects everything in it.
type Patterns []string

// Bounds of patterns.
const (
	MaxPatterns = 64
	maxPattern  = 256
)

// Agents returns patterns for the transcripts and settings of Claude Code and Codex.
// They include neither program's login, nor the state that Claude Code stores beside
// them.
func Agents() Patterns {
	return Patterns{
		".claude/projects", ".claude/history.jsonl", ".claude/todos", ".claude/plans",
		".claude/settings.json", ".claude/CLAUDE.md", ".claude/agents", ".claude/commands", ".claude/skills",
		".codex/sessions", ".codex/history.jsonl", ".codex/config.toml", ".codex/AGENTS.md", ".codex/prompts",
	}
}

// CheckPattern returns an error if a pattern is invalid.
func CheckPattern(p string) error {
	_, err := path.Match(p, "")
	switch {
	case len(p) > maxPattern:
		return fmt.Errorf("longer than %d bytes", maxPattern)
	case err != nil:
		return errors.New("a [ without a matching ]")
	case path.IsAbs(p) || strings.HasPrefix(p, "~"):
		return errors.New("must be relative to the guest's home directory, like .claude/projects")
	case !validName(p) || strings.ContainsAny(p, "\r\n"):
		return errors.New("must be a path below the guest's home directory, like .claude/projects")
	}
	for _, place := range credentialPlaces {
		if place.holds == nil && matchesEnd(place.pattern, p) && (place.except == "" || !matchesEnd(place.except, p)) {
			return fmt.Errorf("it %s and is never saved", place.why)
		}
	}
	return nil
}

// match reports whether a pattern matches name, and whether a pattern matches or may
// match something below name.
func (ps Patterns) match(name string) (meant, below bool) {
	parts := strings.Split(name, "/")
	for _, p := range ps {
		want := strings.Split(p, "/")
		n := min(len(parts), len(want))
		ok, err := path.Match(strings.Join(want[:n], "/"), strings.Join(parts[:n], "/"))
		if !ok || err != nil {
			continue
		}
		if len(want) <= len(parts) {
			return true, true
		}
		below = true
	}
	return false, below
}
