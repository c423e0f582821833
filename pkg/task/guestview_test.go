package task

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestGuestView(t *testing.T) {
	for _, c := range []struct{ url, code, text, repository, message string }{
		{"/home/alice/src/app", "HOST", "open /home/alice/x: denied", "app", Hidden},
		{"file:///home/alice/app.git", "FAILURE", "exit status 1", "app", Hidden},
		{"https://github.com/acme/app", "CONFLICT", "the disk of /home/alice/vms is full", "https://github.com/acme/app", "the disk of (a path) is full"},
		{"acme/app", "NOT_FOUND", "no branch x of https://github.com/acme/app", "acme/app", "no branch x of https://github.com/acme/app"},
	} {
		task := Task{Manifest: &manifest.Task{}, Task: store.Task{ErrorCode: c.code, ErrorMessage: c.text, ErrorHint: "ls /home/alice"}}
		task.Manifest.Repository.URL = c.url
		task.Status.Outcome = &Outcome{Result: Failure, Code: c.code, Reason: c.text, Hint: "ls /home/alice"}
		v := task.GuestView()
		if v.Repository != c.repository || v.Error.Message != c.message || v.Error.Hint != "" || v.Outcome.Reason != c.message || v.Outcome.Hint != "" {
			t.Errorf("GuestView of %+v = %q, %+v, %+v", c, v.Repository, v.Error, v.Outcome)
		}
		if task.Status.Outcome.Reason != c.text {
			t.Errorf("GuestView changed the task: %+v", task.Status.Outcome)
		}
	}
}

func TestHidePaths(t *testing.T) {
	for text, want := range map[string]string{
		"open /home/a/b: denied":           "open (a path) denied",
		"local:/home/a":                    "local:(a path)",
		"at 'file:///home/a' and \"/b/c\"": "at '(a path)' and \"(a path)\"",
		"/etc=/x":                          "(a path)",
		"https://example.org/a/b?c=d":      "https://example.org/a/b?c=d",
		"acme/app, 1/2, ssh://git@host/a":  "acme/app, 1/2, ssh://git@host/a",
	} {
		if got := HidePaths(text); got != want {
			t.Errorf("HidePaths(%q) = %q, want %q", text, got, want)
		}
	}
}
