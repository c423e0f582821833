package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
)

func TestDotfiles(t *testing.T) {
	f := newFiles(t)
	if got := f.load().Dotfiles; got != "" {
		t.Errorf("Dotfiles without a directory = %q, want none", got)
	}
	f.user("dotfiles", "a file")
	if got := f.load().Dotfiles; got != "" {
		t.Errorf("Dotfiles with a file of that name = %q, want none", got)
	}
	if err := os.Remove(filepath.Join(f.paths.Config, "dotfiles")); err != nil {
		t.Fatal(err)
	}
	f.user("dotfiles/.zshrc", "")
	if got, want := f.load().Dotfiles, filepath.Join(f.paths.Config, "dotfiles"); got != want {
		t.Errorf("Dotfiles with a directory = %q, want %q", got, want)
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
			t.Errorf("Dotfiles with the setting %q = %q, want %q", text, got, want)
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
			t.Errorf("listed values lack %q:\n%s", want, got)
		}
	}
}

// TestDotfilesAreTheUsers checks that only the user's settings can name the dotfiles,
// because they are copied into every session. The system's file, a repository's file and a
// profile cannot.
func TestDotfilesAreTheUsers(t *testing.T) {
	for text, want := range map[string]string{
		"dotfiles: dot": "absolute", "dotfiles: ~other/x": "absolute", "dotfiles: [a]": "must be an absolute path",
		"profiles: {p: {dotfiles: /x}}": "dotfiles", "repos: {o/r: {dotfiles: /x}}": "dotfiles",
	} {
		f := newFiles(t)
		f.user("config.yaml", text)
		if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), want) {
			t.Errorf("Load of %q: error %v, want a usage error with %q", text, err, want)
		}
	}
	f := newFiles(t)
	f.system("config.yaml", "dotfiles: /root\n")
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), filepath.Join(f.paths.Config, "config.yaml")) {
		t.Errorf("Load with dotfiles of the system: error %v, want a usage error that names the user's config.yaml", err)
	}
	for _, text := range []string{"dotfiles: /home/me", "persist: [.zsh_history]", "persist: agent"} {
		if _, err := config.ParseProject("o/r:"+config.ProjectFile, []byte(text)); fail.CodeOf(err) != fail.Usage {
			t.Errorf("ParseProject(%q): error %v, want a usage error", text, err)
		}
	}
}

func TestPersist(t *testing.T) {
	f := newFiles(t)
	if set := settings(t, f.load(), "github.com/o/r", ""); set.Persist != nil || f.load().Limits.SavedHome != 256<<20 {
		t.Errorf("by default: Persist %v, Limits.SavedHome %v, want nil, 256MiB", set.Persist, f.load().Limits.SavedHome)
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
	if got := c.Limits.SavedHome; got != 1<<30 {
		t.Errorf("Limits.SavedHome = %v, want 1GiB", got)
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
		got := settings(t, c, x.repo, x.profile).Persist
		if diff := cmp.Diff(x.want, []string(got), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("Persist of %s with profile %q mismatch (-want +got):\n%s", x.repo, x.profile, diff)
		}
	}
	for text, want := range map[string]string{
		"persist: [.zsh_history,\n  /etc/passwd]": "config.yaml:2:3: ", "persist: [../x]": "below", "persist: .": "below", "persist: [.netrc]": "never saved",
		"persist: [.ssh/id_ed25519]": "never saved", "persist: [[a]]": "must be a path like", "persist: {a: b}": "must be a path like", "persist: ['[a']": "without a matching ]",
		"persist: [" + strings.Repeat("a,", 65) + "]": "at most 64", "limits: {saved_home: a lot}": "512MiB or 8G",
	} {
		f.user("config.yaml", text)
		if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), want) {
			t.Errorf("Load of %.60q: error %v, want a usage error with %q", text, err, want)
		}
	}
}
