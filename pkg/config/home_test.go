package config_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
)

func TestDotfiles(t *testing.T) {
	f := newFiles(t)
	if got := f.load().Dotfiles; got != "" {
		t.Errorf("without any: %q", got)
	}
	f.user("dotfiles", "a file")
	if got := f.load().Dotfiles; got != "" {
		t.Errorf("with a file of that name: %q", got)
	}
	if err := os.Remove(filepath.Join(f.paths.Config, "dotfiles")); err != nil {
		t.Fatal(err)
	}
	f.user("dotfiles/.zshrc", "")
	if got := f.load().Dotfiles; got != filepath.Join(f.paths.Config, "dotfiles") {
		t.Errorf("by default: %q", got)
	}
	dir, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		"~/dot/": filepath.Join(dir, "dot"), "~/": dir, "/else/../where": "/where", `""`: filepath.Join(f.paths.Config, "dotfiles"), "": filepath.Join(f.paths.Config, "dotfiles"),
	} {
		f.user("config.yaml", "dotfiles: "+text+"\n")
		if got := f.load().Dotfiles; got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestOriginsOfHome(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", "dotfiles: /mine\nlimits: {saved_home: 1GiB}\npersist: [.a]\nrepos:\n  o/r:\n    persist: [.b]\n")
	got := listedValue(t, f, "github.com/o/r", "")
	for _, want := range []string{
		"dotfiles=/mine  user ~/config.yaml:1", "limits.saved_home=1GiB  user ~/config.yaml:2", "persist=[.b]  user ~/config.yaml:6",
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
}

// TestDotfilesAreTheUsers checks that only the user's settings can name the dotfiles,
// because they are copied into every session. The system's file, a repository's file and a
// profile cannot.
func TestDotfilesAreTheUsers(t *testing.T) {
	for text, want := range map[string]string{
		"dotfiles: dot": "absolute", "dotfiles: ~other/x": "absolute", "dotfiles: [a]": "must be a path",
		"profiles: {p: {dotfiles: /x}}": "dotfiles", "repos: {o/r: {dotfiles: /x}}": "dotfiles",
	} {
		f := newFiles(t)
		f.user("config.yaml", text)
		if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	f := newFiles(t)
	f.system("config.yaml", "dotfiles: /root\n")
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), filepath.Join(f.paths.Config, "config.yaml")) {
		t.Errorf("the system's: %v", err)
	}
	for _, text := range []string{"dotfiles: /home/me", "persist: [.zsh_history]", "persist: agent"} {
		if _, err := config.ParseProject("o/r:"+config.ProjectFile, []byte(text)); fail.CodeOf(err) != fail.Usage {
			t.Errorf("a repository's own %q: %v", text, err)
		}
	}
}

func TestPersist(t *testing.T) {
	f := newFiles(t)
	if set := settings(t, f.load(), "github.com/o/r", ""); set.Persist != nil || f.load().Limits.SavedHome != 256<<20 {
		t.Errorf("by default: %v, %v", set.Persist, f.load().Limits.SavedHome)
	}
	f.system("config.yaml", "persist: [.system]\n")
	f.user("config.yaml", `persist: agent
limits: {saved_home: 1GiB}
profiles:
  some: {persist: [.zsh_history, '.config/*/x', agent]}
  none: {persist: []}
repos:
  o/own: {persist: .own}
  o/profile: {profile: some}
  o/both: {profile: some, persist: []}
`)
	c := f.load()
	if c.Limits.SavedHome != 1<<30 {
		t.Error(c.Limits.SavedHome)
	}
	for _, x := range []struct {
		repo    config.RepoKey
		profile string
		want    []string
	}{
		{"github.com/o/r", "", homearchive.Agents()},
		{"github.com/o/r", "some", append([]string{".zsh_history", ".config/*/x"}, homearchive.Agents()...)},
		{"github.com/o/r", "none", nil},
		{"github.com/o/own", "", []string{".own"}},
		{"github.com/o/own", "some", []string{".own"}},
		{"github.com/o/profile", "", append([]string{".zsh_history", ".config/*/x"}, homearchive.Agents()...)},
		{"github.com/o/both", "", nil},
	} {
		if got := settings(t, c, x.repo, x.profile).Persist; !slices.Equal([]string(got), x.want) {
			t.Errorf("%s %s: %q, want %q", x.repo, x.profile, got, x.want)
		}
	}
	for text, want := range map[string]string{
		"persist: [.zsh_history,\n  /etc/passwd]": "config.yaml:2: ", "persist: [../x]": "below", "persist: .": "below", "persist: [.netrc]": "never saved",
		"persist: [.ssh/id_ed25519]": "never saved", "persist: [[a]]": "must be a path like", "persist: {a: b}": "must be a path like", "persist: ['[a']": "without a matching ]",
		"persist: [" + strings.Repeat("a,", 65) + "]": "at most 64", "limits: {saved_home: a lot}": "8GiB",
	} {
		f.user("config.yaml", text)
		if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v", text, err)
		}
	}
}
