package task

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

func TestParsePermission(t *testing.T) {
	p, err := ParsePermission([]string{"Acme/App", "acme/*", "git.example.org/team/app", "https://git.example.org/team/*", "git@git.example.org:other/app.git", "*"}, []string{"small"})
	want := Permission{
		Repositories: []string{"github.com/acme/app", "github.com/acme/*", "git.example.org/team/app", "git.example.org/team/*", "git.example.org/other/app", "*"},
		Profiles:     []string{"small"},
	}
	if diff := cmp.Diff(want, p); err != nil || diff != "" {
		t.Errorf("ParsePermission = %v, mismatch (-want +got):\n%s", err, diff)
	}
	for _, text := range []string{"", "acme", "/srv/app", "./app", "file:///srv/app", "acme/*/x", "*/app", "a*/b", "**", "/*", "acme/app/*/*"} {
		if p, err := ParsePermission([]string{text}, nil); fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "" {
			t.Errorf("ParsePermission(%q) = %v, %v, want code %v with a hint", text, p, err, fail.Usage)
		}
	}
}

func TestPermissionAllows(t *testing.T) {
	for pattern, keys := range map[string]map[string]bool{
		"github.com/acme/app": {"github.com/acme/app": true, "github.com/acme/app2": false, "github.com/acme": false, "evil.example/github.com/acme/app": false},
		"github.com/acme/*":   {"github.com/acme/app": true, "github.com/acme2/app": false, "github.com/acme": false},
		"*":                   {"evil.example/a/b": true},
	} {
		for key, want := range keys {
			if got := (Permission{Repositories: []string{pattern}}).allows(key); got != want {
				t.Errorf("Permission{%s}.allows(%s) = %t, want %t", pattern, key, got, want)
			}
		}
	}
	if (Permission{}).allows("github.com/acme/app") {
		t.Error("allows of the zero value = true, want false")
	}
}

// A task that a client submitted has a session that is restricted in every respect.
func TestRestrictedTaskHasARestrictedSession(t *testing.T) {
	m := newManager(t, 1, 10)
	var checked []string
	m.CheckPublic = func(_ context.Context, ref repo.Ref) error {
		checked = append(checked, ref.Key)
		return nil
	}
	asked, _, err := manifest.Parse("m", []byte(`{"version": "1", "kind": "Task", "repository": {"url": "acme/app"}, "agent": {"kind": "command", "command": ["true"]}}`), "")
	if err != nil {
		t.Fatal(err)
	}
	may := Permission{Repositories: []string{"github.com/acme/app"}}
	for _, c := range []struct {
		o    Submission
		want bool
	}{{Submission{Permission: &may}, true}, {Submission{}, false}} {
		task, _, err := m.Submit(t.Context(), asked, c.o)
		if err != nil {
			t.Fatal(err)
		}
		s, err := NewWorker(m, nil, slog.New(slog.DiscardHandler), nil).vm.open(t.Context(), task)
		if err != nil || s.Spec.Restricted != c.want || s.Spec.Repo.PublicOnly != c.want {
			t.Errorf("restricted %t, public only %t, want %t: %v", s.Spec.Restricted, s.Spec.Repo.PublicOnly, c.want, err)
		}
	}
	if !slices.Equal(checked, []string{"github.com/acme/app"}) {
		t.Errorf("repositories checked = %q, want github.com/acme/app alone", checked)
	}
	m.CheckPublic = func(context.Context, repo.Ref) error { return errors.New("it is not") }
	if _, _, err := m.Submit(t.Context(), asked, Submission{Permission: &may}); !errors.Is(err, ErrNotPermitted) || fail.CodeOf(err) != fail.Policy {
		t.Errorf("Submit without permission = %v, want %v with code %v", err, ErrNotPermitted, fail.Policy)
	}
}

// A client below admin changes the tasks that it submitted, and no others.
func TestClientsChangeTheirOwnTasksOnly(t *testing.T) {
	m := newManager(t, 1, 10)
	m.CheckPublic = func(context.Context, repo.Ref) error { return nil }
	asked, _, err := manifest.Parse("m", []byte(`{"version": "1", "kind": "Task", "repository": {"url": "acme/app"}, "agent": {"kind": "command", "command": ["true"]}}`), "")
	if err != nil {
		t.Fatal(err)
	}
	may := &Permission{Repositories: []string{"github.com/acme/app"}}
	ci, team, user := Client{"token:ci", may}, Client{"token:team", may}, Client{Actor: "user:me"}
	for _, c := range []struct {
		owner, by Client
		ok        bool
	}{{ci, ci, true}, {ci, user, true}, {user, user, true}, {ci, team, false}, {user, ci, false}, {ci, Client{Permission: may}, false}} {
		task, _, err := m.Submit(t.Context(), asked, Submission{Actor: c.owner.Actor, Permission: c.owner.Permission})
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string, err error) {
			t.Helper()
			if (err == nil) != c.ok || err != nil && (!errors.Is(err, ErrNotPermitted) || fail.CodeOf(err) != fail.Policy) {
				t.Errorf("%s by %q of a task of %q = %v, want success: %t", what, c.by.Actor, c.owner.Actor, err, c.ok)
			}
		}
		for _, desired := range []DesiredPhase{Cancel, Destroyed} {
			_, err := m.SetDesired(t.Context(), task, desired, c.by)
			check(string(desired), err)
		}
		after, err := m.Get(t.Context(), task.ID)
		if err != nil || (after.Desired != Run) != c.ok {
			t.Errorf("desired phase after %q changed a task of %q = %s, %v, want a change: %t", c.by.Actor, c.owner.Actor, after.Desired, err, c.ok)
		}
		if after, err = m.SetDesired(t.Context(), task, Cancel, user); err != nil {
			t.Fatal(err)
		}
		_, _, err = m.Retry(t.Context(), after, Submission{Actor: c.by.Actor, Permission: c.by.Permission})
		check("retry", err)
	}
}
