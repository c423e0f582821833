package config_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
)

func TestQuestions(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", `
questions: {allow: read-only}
profiles:
  night: {questions: {deny_after: 10m}}
repos:
  o/r: {questions: {allow: none}}
`)
	c := f.load()
	for _, test := range []struct {
		repo    config.RepoKey
		profile string
		want    config.Questions
	}{
		{"", "", config.Questions{Allow: config.AllowReadOnly}},
		{"", "night", config.Questions{Allow: config.AllowReadOnly, DenyAfter: config.Patience(10 * time.Minute)}},
		{"github.com/o/r", "night", config.Questions{Allow: config.AllowNone, DenyAfter: config.Patience(10 * time.Minute)}},
	} {
		got, err := c.For(test.repo, test.profile)
		if diff := cmp.Diff(test.want, got.Questions); err != nil || diff != "" {
			t.Errorf("questions of %q with profile %q = %v (-want +got):\n%s", test.repo, test.profile, err, diff)
		}
	}
	for _, wrong := range []string{"allow: all", "deny_after: 0s", "deny_after: soon", "deny_after: -1m", "ask: none"} {
		f.user("config.yaml", "questions: {"+wrong+"}\n")
		if _, err := config.Load(f.paths, f.ship); err == nil || !strings.Contains(err.Error(), "config.yaml:1") {
			t.Errorf("questions with %s = %v, want an error with its place", wrong, err)
		}
	}
	for tool, want := range map[string]bool{"Read": true, "Grep": true, "Bash": false, "Write": false, "": false} {
		if got := config.AllowReadOnly.Allows(tool); got != want {
			t.Errorf("AllowReadOnly.Allows(%q) = %v, want %v", tool, got, want)
		}
	}
	if config.AllowNone.Allows("Read") {
		t.Error("AllowNone.Allows(Read) = true, want false")
	}
}
