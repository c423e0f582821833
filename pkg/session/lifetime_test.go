package session

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestSpend(t *testing.T) {
	const hour = config.TTL(time.Hour)
	lease, idle := []Limit{LimitLease}, []Limit{LimitIdle}
	for name, c := range map[string]struct {
		set           config.Lifetime
		before        Lifetime
		passed        time.Duration
		left          time.Duration
		reached, near []Limit
	}{
		"no limits":        {config.Lifetime{Lease: -1, IdleTTL: -1}, Lifetime{Lease: 7, Idle: 1e18}, time.Hour, 0, nil, nil},
		"unset limits":     {config.Lifetime{}, Lifetime{Idle: 1e18}, time.Hour, 0, nil, nil},
		"first count":      {config.Lifetime{Lease: hour}, Lifetime{}, time.Minute, 59 * time.Minute, nil, nil},
		"almost over":      {config.Lifetime{Lease: hour}, Lifetime{Lease: 11 * time.Minute}, time.Minute, 10 * time.Minute, nil, lease},
		"over":             {config.Lifetime{Lease: hour}, Lifetime{Lease: time.Minute}, time.Minute, -1, lease, nil},
		"stays over":       {config.Lifetime{Lease: hour}, Lifetime{Lease: -1}, 0, -1, lease, nil},
		"a long renewal":   {config.Lifetime{Lease: hour}, Lifetime{Lease: 4 * time.Hour}, time.Hour, 3 * time.Hour, nil, nil},
		"idle for a while": {config.Lifetime{IdleTTL: hour}, Lifetime{Idle: 49 * time.Minute}, 0, 0, nil, nil},
		"almost too long":  {config.Lifetime{IdleTTL: hour}, Lifetime{Idle: 50 * time.Minute}, 0, 0, nil, idle},
		"idle too long":    {config.Lifetime{IdleTTL: hour}, Lifetime{Idle: time.Hour}, 0, 0, idle, nil},
		"a short limit":    {config.Lifetime{IdleTTL: config.TTL(4 * time.Second)}, Lifetime{Idle: 3 * time.Second}, 0, 0, nil, idle},
	} {
		l := c.before
		reached, near := l.spend(c.set, c.passed)
		if l.Lease != c.left || !slices.Equal(reached, c.reached) || !slices.Equal(near, c.near) {
			t.Errorf("%s: spend(%v) leaves %v, reached %v, near %v, want %v, %v, %v", name, c.passed, l.Lease, reached, near, c.left, c.reached, c.near)
		}
	}
}

// lifetimeOf returns a manager with those settings.
func lifetimeOf(t *testing.T, text string) *Manager {
	t.Helper()
	m := newManager(t)
	if err := os.MkdirAll(m.Config.Paths.Config, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.Config.Paths.Config, "config.yaml"), []byte("lifetime: "+text+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := m.Config.Reload()
	if err != nil {
		t.Fatal(err)
	}
	m.Config = cfg
	return m
}

const lifeID = "0123456789ab"

func (l *lifetimeWatch) status(t *testing.T) (Session, Lifetime) {
	t.Helper()
	s, err := l.w.Sessions.Get(t.Context(), l.id)
	if err != nil {
		t.Fatal(err)
	}
	return s, s.Status.Lifetime
}

func newLifetimeWatch(t *testing.T, settings string) (l *lifetimeWatch, noted *[]string) {
	t.Helper()
	m := lifetimeOf(t, settings)
	put(t, m, lifeID, "o/r", Ready, Ready, Status{})
	noted = new([]string)
	w := newWorker(t, driver{})
	w.Sessions = m
	w.Lifetime = func(ctx context.Context, _ Session, text string) {
		if ctx.Err() != nil {
			t.Errorf("context of a notification = %v, want one that goes on", ctx.Err())
		}
		if text != "" {
			*noted = append(*noted, text)
		}
	}
	return &lifetimeWatch{w: w, id: lifeID, use: &usage{}, conn: func() *ssh.Client { return nil }}, noted
}

func (l *lifetimeWatch) pass(t *testing.T, times int, passed time.Duration) {
	t.Helper()
	for range times {
		if err := l.look(t.Context(), l.w.Sessions.Config, passed); err != nil {
			t.Fatalf("look = %v, want nil", err)
		}
	}
}

func TestLeaseEnds(t *testing.T) {
	l, noted := newLifetimeWatch(t, "{lease: 1h}")
	l.pass(t, 49, time.Minute)
	if s, life := l.status(t); s.Desired != Ready || len(*noted) != 0 || life.Lease != 11*time.Minute {
		t.Fatalf("after 49 of 60 minutes: desired %s, lease %v, noted %q, want ready, 11m, nothing", s.Desired, life.Lease, *noted)
	}
	l.pass(t, 5, time.Minute)
	if s, life := l.status(t); s.Desired != Ready || len(*noted) != 1 || !slices.Equal(s.View().Ending, []Limit{LimitLease}) {
		t.Fatalf("after 54 of 60 minutes: desired %s, lifetime %+v, noted %q, want ready and one warning", s.Desired, life, *noted)
	}
	s, _ := l.status(t)
	if s, err := l.w.Sessions.Renew(t.Context(), s, 30*time.Minute); err != nil || s.Status.Lifetime.Lease != 30*time.Minute || len(s.View().Ending) != 0 {
		t.Fatalf("Renew(30m) = %+v, %v, want 30m left and no warning", s.Status.Lifetime, err)
	}
	if s, err := l.w.Sessions.Renew(t.Context(), s, time.Minute); err != nil || s.Status.Lifetime.Lease != 30*time.Minute {
		t.Errorf("Renew(1m) with 30m left = %v, %v, want that it is not shortened", s.Status.Lifetime.Lease, err)
	}
	l.pass(t, 29, time.Minute)
	if s, _ := l.status(t); s.Desired != Ready {
		t.Fatalf("after 29 of 30 minutes: desired %s, want ready", s.Desired)
	}
	l.pass(t, 2, time.Minute)
	s, life := l.status(t)
	if s.Desired != Stopped || life.Ended != LimitLease || len(*noted) != 3 {
		t.Errorf("after 31 of 30 minutes: desired %s, lifetime %+v, noted %q, want stopped for its lease, two warnings and the end", s.Desired, life, *noted)
	}
	if _, err := l.w.Sessions.Renew(t.Context(), s, time.Hour); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Renew after the end = %v, want %v", err, fail.Conflict)
	}
}

// A keeper that did not run for a while must still warn first.
func TestNoEndWithoutWarning(t *testing.T) {
	l, noted := newLifetimeWatch(t, "{lease: 1h, idle_ttl: 1h}")
	l.pass(t, 1, 3*time.Hour)
	if s, life := l.status(t); s.Desired != Ready || len(*noted) != 2 {
		t.Fatalf("after a leap: desired %s, lifetime %+v, noted %q, want ready and two warnings", s.Desired, life, *noted)
	}
	l.pass(t, 1, time.Second)
	if s, _ := l.status(t); s.Desired != Stopped {
		t.Errorf("after the warning: desired %s, want stopped", s.Desired)
	}
}

func TestIdle(t *testing.T) {
	for name, use := range map[string]func(l *lifetimeWatch) error{
		"a published port": func(l *lifetimeWatch) error { l.use.sign(); return nil },
		"a visit": func(l *lifetimeWatch) error {
			s, err := l.w.Sessions.Get(t.Context(), l.id)
			return errors.Join(err, l.w.Sessions.MarkVisited(t.Context(), s))
		},
		"open without attaching": func(l *lifetimeWatch) error {
			s, err := l.w.Sessions.Get(t.Context(), l.id)
			_, err2 := l.w.Sessions.MarkUsed(t.Context(), s)
			return errors.Join(err, err2)
		},
		"a working agent": func(l *lifetimeWatch) error {
			_, err := l.w.Sessions.updateStatus(t.Context(), l.id, store.Event{}, func(f *Status) { f.Attention = &Attention{State: guestproto.AgentWorking} })
			return err
		},
		"a task": func(l *lifetimeWatch) error {
			l.w.HasTasks = func(context.Context, string) (bool, error) { return true, nil }
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, noted := newLifetimeWatch(t, "{idle_ttl: 1h}")
			l.pass(t, 58, time.Minute)
			if len(*noted) != 1 {
				t.Fatalf("noted after 58 of 60 minutes = %q, want one warning", *noted)
			}
			if err := use(l); err != nil {
				t.Fatal(err)
			}
			l.pass(t, 5, time.Minute)
			if s, _ := l.status(t); s.Desired != Ready || len(s.View().Ending) != 0 {
				t.Errorf("after use: desired %s, ending %v, want ready and no warning", s.Desired, s.View().Ending)
			}
		})
	}
	l, _ := newLifetimeWatch(t, "{idle_ttl: 1h}")
	l.pass(t, 61, time.Minute)
	if s, life := l.status(t); s.Desired != Stopped || life.Ended != LimitIdle {
		t.Errorf("after an hour without use: desired %s, lifetime %+v, want stopped for being idle", s.Desired, life)
	}
}

// A profile that no longer exists must not remove the limits.
func TestLifetimeOfARemovedProfile(t *testing.T) {
	l, _ := newLifetimeWatch(t, "{lease: 1h}")
	l.pass(t, 1, time.Minute)
	missing := lifetimeOf(t, "{lease: none}\nprofile: missing")
	for range 200 {
		if err := l.look(t.Context(), missing.Config, time.Minute); err == nil {
			t.Fatal("look with settings that have an error = nil, want the error")
		}
	}
	if s, _ := l.status(t); s.Desired != Stopped {
		t.Errorf("desired phase after the last known lease = %s, want stopped", s.Desired)
	}
}

func TestCleanUp(t *testing.T) {
	clean := &repo.WorkState{}
	none := func() (string, error) { return "", nil }
	base := &repo.Base{Commit: "1111111111111111111111111111111111111111"}
	for name, c := range map[string]struct {
		settings string
		status   Status
		phase    Phase
		tasks    func() (string, error)
		kept     string
		gone     bool
	}{
		"nothing of its own":             {"{cleanup_ttl: 1h}", Status{Base: base, Work: clean, Saved: &Saved{}}, Stopped, none, "", true},
		"never cloned":                   {"{cleanup_ttl: 1h}", Status{}, Stopped, none, "", true},
		"no limit":                       {"{cleanup_ttl: none}", Status{Base: base, Work: clean}, Stopped, none, "", false},
		"not over":                       {"{cleanup_ttl: 10d}", Status{Base: base, Work: clean}, Stopped, none, "", false},
		"unknown work":                   {"{cleanup_ttl: 1h}", Status{Base: base}, Stopped, none, "its unsaved work is unknown, because it did not stop cleanly", false},
		"unsaved work":                   {"{cleanup_ttl: 1h}", Status{Base: base, Work: &repo.WorkState{Untracked: 2}}, Stopped, none, "2 untracked files would be lost", false},
		"commits that no repository has": {"{cleanup_ttl: 1h}", Status{Base: base, Work: clean, Saved: &Saved{Commits: []string{base.Commit}}}, Stopped, none, "this host does not have all its commits", false},
		"not fetched":                    {"{cleanup_ttl: 1h}", Status{Base: base, Work: clean}, Stopped, none, "its commits were not fetched at the stop", false},
		"too many branches":              {"{cleanup_ttl: 1h}", Status{Base: base, Work: clean, Saved: &Saved{Commits: make([]string, maxSaved+1)}}, Stopped, none, "it has too many branches to check", false},
		"a task":                         {"{cleanup_ttl: 1h}", Status{Base: base, Work: clean}, Stopped, func() (string, error) { return "task 1 has not ended", nil }, "task 1 has not ended", false},
		"running":                        {"{cleanup_ttl: 1h}", Status{Base: base, Work: clean}, Ready, none, "", false},
		"broken":                         {"{cleanup_ttl: 1h}", Status{Base: base, Work: clean}, Broken, none, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			m := lifetimeOf(t, c.settings)
			c.status.Lifetime = Lifetime{Stopped: 2 * time.Hour, Counted: time.Now().Add(time.Minute)}
			put(t, m, lifeID, "o/r", c.phase, c.phase, c.status)
			for _, dry := range []bool{true, false} {
				done, err := m.CleanUp(t.Context(), lifeID, dry, c.tasks)
				if err != nil || done.Kept != c.kept || done.Due != (c.gone || c.kept != "") {
					t.Errorf("CleanUp(dry %t) = %+v, %v, want due %t, kept %q", dry, done, err, c.gone || c.kept != "", c.kept)
				}
				s, err := m.Get(t.Context(), lifeID)
				if want := c.gone && !dry; err != nil || (s.Desired == Gone) != want {
					t.Errorf("desired phase after CleanUp(dry %t) = %s, %v, want gone %t", dry, s.Desired, err, want)
				}
			}
		})
	}
}

// A clock that leaps must not remove anything, and a session that is opened in the meantime stays.
func TestCleanUpIsSlow(t *testing.T) {
	m := lifetimeOf(t, "{cleanup_ttl: 5h}")
	put(t, m, lifeID, "o/r", Stopped, Stopped, Status{Lifetime: Lifetime{Counted: time.Now().Add(-1000 * time.Hour)}})
	long := func() {
		if _, err := m.updateStatus(t.Context(), lifeID, store.Event{}, func(f *Status) { f.Lifetime.Counted = time.Now().Add(1000 * time.Hour) }); err != nil {
			t.Fatal(err)
		}
	}
	long()
	for range 3 {
		if done, err := m.CleanUp(t.Context(), lifeID, false, func() (string, error) { return "", nil }); err != nil || done.Due {
			t.Fatalf("CleanUp after a leap of the clock = %+v, %v, want not due", done, err)
		}
		long()
	}
	if _, err := m.updateStatus(t.Context(), lifeID, store.Event{}, func(f *Status) { f.Lifetime.Stopped, f.Lifetime.Counted = 6*time.Hour, time.Now().Add(time.Minute) }); err != nil {
		t.Fatal(err)
	}
	opened := func() (string, error) { // in the moment of the decision
		s, err := m.Get(t.Context(), lifeID)
		if err == nil {
			_, err = m.SetDesired(t.Context(), s, Ready)
		}
		return "", err
	}
	if done, err := m.CleanUp(t.Context(), lifeID, false, opened); err != nil || done.Due {
		t.Errorf("CleanUp of a session that was opened = %+v, %v, want nothing done", done, err)
	}
	if s, err := m.Get(t.Context(), lifeID); err != nil || s.Desired != Ready {
		t.Errorf("desired phase = %s, %v, want ready", s.Desired, err)
	}
}
