package app

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// Repos returns the repositories in the user's repos.txt, or in the shipped one if the user
// has none.
func Repos(a *App) ([]string, error) {
	cfg, err := a.Settings()
	if err != nil {
		return nil, err
	}
	file := filepath.Join(cfg.Paths.Config, "repos.txt")
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		text, err = sessionizer.Config.ReadFile("config/repos.txt")
	}
	if err != nil {
		return nil, fail.New(fail.Usage, "read repos.txt: %w", err)
	}
	return ParseRepos(file, text, false)
}

// ParseRepos parses repos.txt. Paths must be absolute, because a line must mean the same
// wherever the picker is started. Other text that is not a repository is an error only if
// strict is set: the picker lists it, and open reports what is wrong.
func ParseRepos(file string, text []byte, strict bool) ([]string, error) {
	var all []string
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		var wrong string
		switch absolute := filepath.IsAbs(line) || strings.HasPrefix(line, "~/"); {
		case line == "":
			continue
		case strings.HasPrefix(line, "."):
			wrong = "must be an absolute path or start with ~/, got a relative path"
		case strict && !absolute && repo.KeyOf(line) == "":
			wrong = "must be owner/repo, a git URL or an absolute path"
		}
		if wrong != "" {
			return nil, fail.New(fail.Usage, "%s:%d: %q %s", file, n, line, wrong).WithHint("agent-sessionizer config edit repos.txt")
		}
		all = append(all, line)
	}
	return all, nil
}
