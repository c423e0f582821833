package config_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// The least and the greatest value of each setting is accepted; one less or more is not.
func TestBoundsOfValues(t *testing.T) {
	for _, c := range []struct {
		text string
		want string // of the error, "" for none
		ok   func(*config.Config) bool
	}{
		{"", "", func(c *config.Config) bool {
			return c.Pool == 0 && c.Tasks == config.Tasks{Slots: 2, CleanupTTL: 360 * time.Hour}
		}},
		{"pool: 0", "", func(c *config.Config) bool { return c.Pool == 0 }},
		{"pool: 8", "", func(c *config.Config) bool { return c.Pool == 8 }},
		{"pool: 9", "0 to 8", nil},
		{"pool: -1", "0 to 8", nil},
		{"limits: {running: 1}", "", func(c *config.Config) bool { return c.Limits.Running == 1 }},
		{"limits: {running: -1}", "from 1", nil},
		{"limits: {kept: 1MiB}", "", func(c *config.Config) bool { return c.Limits.Kept == 1<<20 }},
		{"tasks: {slots: 1}", "", func(c *config.Config) bool { return c.Tasks.Slots == 1 }},
		{"tasks: {slots: 7}", "", func(c *config.Config) bool { return c.Tasks.Slots == 7 }},
		{"tasks: {slots: -1}", "from 1", nil},
		{"tasks: {cleanup_ttl: 1h}", "", func(c *config.Config) bool { return c.Tasks.CleanupTTL == time.Hour }},
		{"tasks: {cleanup_ttl: 59m}", "at least 1h", nil},
		{"audit: {retention: 1d}", "", func(c *config.Config) bool { return c.Audit.Retention == config.Duration(24*time.Hour) }},
		{"audit: {retention: 12d}", "", func(c *config.Config) bool { return c.Audit.Retention == config.Duration(12*24*time.Hour) }},
		{"audit: {retention: 65535d}", "", func(c *config.Config) bool { return c.Audit.Retention == config.Duration(65535*24*time.Hour) }},
		{"audit: {retention: 65536d}", "36h or 90d", nil},
		{"audit: {retention: 1ad}", "36h or 90d", nil},
		{"network: {ports: [1, 65535]}", "", nil},
		{"network: {ports: [65536]}", "65536", nil},
		{"network: {ports: x}", "a list is wanted", nil},
		{"limits: x", "a mapping", nil},
		{"limits: {running: []}", "a number is wanted", nil},
	} {
		f := newFiles(t)
		f.user("config.yaml", c.text+"\n")
		got, err := config.Load(f.paths, f.ship)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%q: got %v", c.text, err)
		case c.want != "" && (fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%q: got %v, want %q in it", c.text, err, c.want)
		case c.ok != nil && !c.ok(got):
			t.Errorf("%q: got pool %d, %+v, %+v, %+v", c.text, got.Pool, got.Limits, got.Tasks, got.Audit)
		}
	}
}

// The environment sets what a file sets.
func TestSlotsOfTheEnvironment(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", "tasks: {slots: 7}\n")
	t.Setenv("AGENT_SESSIONIZER_TASKS_SLOTS", "3")
	if got := f.load().Tasks.Slots; got != 3 {
		t.Errorf("got %d slots, want 3", got)
	}
}

func TestParseRepoKey(t *testing.T) {
	for text, want := range map[string]config.RepoKey{
		"o/r": "github.com/o/r", "O/R": "github.com/o/r", "Git.Example.org/O/R": "git.example.org/O/R", "local:/a/b": "local:/a/b",
		"": "", "o": "", "/o/r": "", "o/": "", "o//r": "", "o/.": "", "o/..": "", "./r": "", "../r": "", "o /r": "", "me@o/r": "", `o\r/x`: "",
	} {
		if got, ok := config.ParseRepoKey(text); got != want || ok != (want != "") {
			t.Errorf("%q: got %q, %t; want %q", text, got, ok, want)
		}
	}
	for _, text := range []string{"local:a", "local:/a/../b", "local:/a/"} {
		if got, ok := config.ParseRepoKey(text); ok {
			t.Errorf("%q: got %q", text, got)
		}
	}
}

// Every entry of a long file has its line, also one that an alias brings.
func TestOriginsOfALongFile(t *testing.T) {
	f := newFiles(t)
	var b strings.Builder
	b.WriteString("profiles:\n  a: {network: &a {mode: open}}\n  b:\n    network:\n      <<: *a\nsecrets:\n")
	for i := range 150 {
		fmt.Fprintf(&b, "  S%03d: env:X\n", i)
	}
	f.user("config.yaml", b.String())
	got := said(t, f, "github.com/o/r", "b")
	for _, want := range []string{
		"network.mode=open  user ~/config.yaml:2\n",
		"secrets.S000=env:X  user ~/config.yaml:7\n",
		"secrets.S149=env:X  user ~/config.yaml:156\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

func TestDirectoryWithoutHome(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", "log: {file: ~/log}\n")
	t.Setenv("HOME", "")
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "HOME is not set") {
		t.Errorf("got %v, want that HOME is not set", err)
	}
}
