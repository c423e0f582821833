package session

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func request(slug string) Request {
	return Request{Repo: repo.Ref{Key: "github.com/" + slug, Slug: slug}}
}

// woken reports whether a keeper was started for the session, and resets that.
func woken(t *testing.T, m *Manager, id string) bool {
	t.Helper()
	err := os.Remove(filepath.Join(m.Config.Paths.SessionDir(id), "keeper.log"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestOpenTwiceIsOneSession(t *testing.T) {
	m := newManager(t)
	var mu sync.Mutex
	ids := map[string]int{}
	made := 0
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			s, created, _, err := m.Open(t.Context(), request("o/r"))
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			ids[s.ID]++
			if created {
				made++
			}
		})
	}
	wg.Wait()
	if len(ids) != 1 || made != 1 {
		t.Fatalf("Open at the same time = sessions %v, %d created, want 1, 1", ids, made)
	}
}

func TestOpenRefusedMakesNothing(t *testing.T) {
	m := newManager(t)
	m.Config.Limits.Running = 1
	first, _, _, err := m.Open(t.Context(), request("o/one"))
	if err != nil {
		t.Fatal(err)
	}
	_, _, _, err = m.Open(t.Context(), request("o/two"))
	if fail.CodeOf(err) != fail.Conflict || fail.HintOf(err) != "agent-sessionizer stop "+first.Name {
		t.Fatalf("Open over the limit = %v (hint %q), want code %v, a hint to stop %s", err, fail.HintOf(err), fail.Conflict, first.Name)
	}
	if all, err := m.Store.Sessions(t.Context(), true); err != nil || len(all) != 1 {
		t.Fatalf("sessions after a refused Open = %v, %v, want 1", all, err)
	}
	if _, created, _, err := m.Open(t.Context(), request("o/one")); err != nil || created {
		t.Fatalf("Open of an existing session at the limit = created %t, %v, want false, nil", created, err)
	}
}

func TestFind(t *testing.T) {
	m := newManager(t)
	a := put(t, m, "aaaa11112222", "acme/app", Ready, Ready, Status{})
	b := put(t, m, "aaaa33334444", "other/app", Ready, Ready, Status{})
	c := put(t, m, "cafe00000000", "acme/lib", Ready, Ready, Status{})
	put(t, m, "dddd55556666", "acme/cafe", Ready, Ready, Status{})
	put(t, m, "eeee77778888", "acme/gone", Gone, Gone, Status{})
	for _, f := range []struct {
		what, id  string
		code      fail.Code
		ambiguous []string
	}{
		{what: a.Name, id: a.ID},
		{what: a.ID, id: a.ID},
		{what: "acme/app", id: a.ID},
		{what: "ACME/App", id: a.ID},
		{what: "github.com/other/app", id: b.ID},
		{what: "aaaa1", id: a.ID},
		{what: "app-aaaa33", id: b.ID},
		{what: "lib", id: c.ID},
		{what: "LIB", id: c.ID},
		{what: "cafe0", id: c.ID},
		{what: "acme/cafe", id: "dddd55556666"},
		{what: "app", code: fail.Usage, ambiguous: []string{a.Name, b.Name}},
		{what: "aaaa", code: fail.Usage, ambiguous: []string{a.Name, b.Name}},
		{what: "cafe", code: fail.Usage, ambiguous: []string{c.Name, "agent-acme-cafe-dddd55"}}, // an id or a name
		{what: "aaa", code: fail.NotFound},
		{what: "", code: fail.NotFound},
		{what: "-", code: fail.NotFound},
		{what: ".", code: fail.NotFound},
		{what: "acme", code: fail.NotFound},
		{what: "acme/gone", code: fail.NotFound},
		{what: "eeee77778888", code: fail.NotFound},
	} {
		t.Run(f.what, func(t *testing.T) {
			s, err := m.Find(t.Context(), f.what)
			if f.code == 0 {
				if err != nil || s.ID != f.id {
					t.Fatalf("Find(%q) = %q, %v, want %q, nil", f.what, s.ID, err, f.id)
				}
				return
			}
			if fail.CodeOf(err) != f.code || err == nil || fail.HintOf(err) == "" {
				t.Fatalf("Find(%q) = %q, %v (hint %q), want code %v with a hint", f.what, s.ID, err, fail.HintOf(err), f.code)
			}
			for _, name := range f.ambiguous {
				if !strings.Contains(err.Error(), name) {
					t.Errorf("Find(%q) = %v, want %q among the candidates", f.what, err, name)
				}
			}
		})
	}
	for what, want := range map[string]bool{"acme/gone": true, "eeee77778888": true, "acme/app": false, "nothing": false, "": false} {
		if got, err := m.Ended(t.Context(), what); err != nil || got != want {
			t.Errorf("Ended(%q) = %t, %v, want %t, nil", what, got, err, want)
		}
	}
}

var phases = []Phase{Creating, Ready, Stopping, Stopped, Starting, Broken, Destroying, Gone}

func TestWantFromEveryPhase(t *testing.T) {
	m := newManager(t)
	const no = Phase("conflict")
	n := 0
	for _, c := range []struct {
		from                 Phase
		ready, stopped, gone Phase // the session's next phase
	}{
		{Creating, Creating, Creating, Creating},
		{Ready, Ready, Ready, Ready},
		{Stopping, Stopping, Stopping, Stopping},
		{Stopped, Stopped, Stopped, Stopped},
		{Starting, Starting, Starting, Starting},
		{Broken, Creating, Stopping, Broken}, // a retry of what failed
		{Destroying, no, no, Destroying},
		{Gone, no, no, Gone},
	} {
		for desired, to := range map[Phase]Phase{Ready: c.ready, Stopped: c.stopped, Gone: c.gone} {
			for _, was := range []Phase{Ready, Stopped, Gone} {
				t.Run(string(c.from)+" desired "+string(was)+" to "+string(desired), func(t *testing.T) {
					n++
					slug := "o/r" + string(rune('a'+n%26)) + string(rune('a'+n/26))
					s := put(t, m, slug[2:]+"0123456789", slug, c.from, was, Status{})
					defer func() { // must not affect the admission of other test cases
						if _, err := m.Store.Update(t.Context(), s.ID, func(row *store.Session) (store.Event, error) {
							row.Phase = string(Gone)
							return store.Event{}, nil
						}); err != nil {
							t.Error(err)
						}
					}()
					before := lastSeq(t, m.Store, s.ID)
					got, err := m.SetDesired(t.Context(), s, desired)
					told := changes(t, m, s.ID, before)
					if to == no {
						stored, gerr := m.Get(t.Context(), s.ID)
						if fail.CodeOf(err) != fail.Conflict || fail.HintOf(err) == "" || len(told) != 0 ||
							gerr != nil || stored.Phase != c.from || stored.Desired != was || woken(t, m, s.ID) {
							t.Fatalf("SetDesired = %v (hint %q), %d changes reported, stored phase %s, desired %s, %v, want code %v with a hint, no change", err, fail.HintOf(err), len(told), stored.Phase, stored.Desired, gerr, fail.Conflict)
						}
						return
					}
					if c.from == Gone {
						if err != nil || got.Phase != Gone || len(told) != 0 || woken(t, m, s.ID) {
							t.Fatalf("SetDesired = phase %s, %v, %d changes reported, want %s, nil, none, and no keeper", got.Phase, err, len(told), Gone)
						}
						return
					}
					if err != nil || got.Phase != to || got.Desired != desired {
						t.Fatalf("SetDesired = phase %s, desired %s, %v, want %s, %s", got.Phase, got.Desired, err, to, desired)
					}
					if !woken(t, m, s.ID) {
						t.Error("keeper started = false, want true")
					}
					if to != c.from && (!next.Allow(c.from, to) || got.ErrorCode != "") {
						t.Errorf("transition from %s to %s, error code %q, want one of the table, no old error", c.from, to, got.ErrorCode)
					}
					changed := to != c.from || was != desired
					if changed != (len(told) == 1) || changed && told[0] != (PhaseChange{From: c.from, To: to, Desired: desired}) {
						t.Errorf("changes reported = %+v, want the one from %s to %s if there is one", told, c.from, to)
					}
					// A viewer's events begin with this one.
					if seq, err := m.LastPhaseSeq(t.Context(), s.ID); err != nil || changed && seq != before {
						t.Errorf("LastPhaseSeq = %d, %v, want %d if the phase or the desired phase changed", seq, err, before)
					}
				})
			}
		}
	}
}

func TestBrokenThatWasReadyStarts(t *testing.T) {
	m := newManager(t)
	s := put(t, m, "aaaa11112222", "o/r", Broken, Ready, Status{WasReady: true})
	if s, err := m.SetDesired(t.Context(), s, Ready); err != nil || s.Phase != Starting || s.ErrorMessage != "" {
		t.Fatalf("SetDesired(%s) of a broken session = phase %s, error %q, %v, want %s, no error", Ready, s.Phase, s.ErrorMessage, err, Starting)
	}
}

func TestDesiredPhaseIsAdmitted(t *testing.T) {
	m := newManager(t)
	m.Config.Limits.Running = 1
	runs := put(t, m, "aaaa11112222", "o/runs", Ready, Ready, Status{})
	for i, p := range []Phase{Stopped, Broken} {
		s := put(t, m, []string{"bbbb11112222", "cccc11112222"}[i], "o/"+string(p), p, Stopped, Status{})
		if _, err := m.SetDesired(t.Context(), s, Ready); fail.CodeOf(err) != fail.Conflict || fail.HintOf(err) != "agent-sessionizer stop "+runs.Name {
			t.Errorf("SetDesired(%s) from %s over the limit = %v (hint %q), want code %v, a hint to stop %s", Ready, p, err, fail.HintOf(err), fail.Conflict, runs.Name)
		}
		if got, err := m.Get(t.Context(), s.ID); err != nil || got.Phase != p || got.Desired != Stopped || woken(t, m, s.ID) {
			t.Errorf("session after the refusal = phase %s, desired %s, %v, want %s, %s, no keeper", got.Phase, got.Desired, err, p, Stopped)
		}
		if _, err := m.SetDesired(t.Context(), s, Gone); err != nil { // removing needs no capacity
			t.Errorf("SetDesired(%s) from %s over the limit = %v, want nil", Gone, p, err)
		}
	}
	if _, err := m.SetDesired(t.Context(), runs, Ready); err != nil {
		t.Errorf("SetDesired(%s) of the session that runs = %v, want nil: it must not count against itself", Ready, err)
	}
}

func TestReconcile(t *testing.T) {
	m := newManager(t)
	var all, need []string
	n := 0
	for _, p := range phases {
		for _, desired := range []Phase{Ready, Stopped, Gone} {
			n++
			id := string(rune('a'+n)) + "00011112222"
			put(t, m, id, "o/r"+id[:1], p, desired, Status{})
			all = append(all, id)
			if !AtRest(p, desired) {
				need = append(need, id)
			}
		}
	}
	lock, ok, err := lockfile.Try(m.Config.Paths.SessionLock(need[0]))
	if err != nil || !ok {
		t.Fatalf("Try = %t, %v, want true, nil", ok, err)
	}
	defer lock.Unlock()
	if err := m.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, id := range all {
		if want := slices.Contains(need[1:], id); woken(t, m, id) != want {
			s, err := m.Get(t.Context(), id)
			t.Errorf("keeper of a session in %s, desired %s, started = %t, %v, want %t", s.Phase, s.Desired, !want, err, want)
		}
	}
}

// If one session's keeper cannot start, the others' keepers still do.
func TestReconcileGoesOn(t *testing.T) {
	m := newManager(t)
	put(t, m, "aaaa11112222", "o/bad", Ready, Ready, Status{})
	put(t, m, "bbbb11112222", "o/good", Ready, Ready, Status{})
	if err := os.MkdirAll(filepath.Join(m.Config.Paths.SessionDir("aaaa11112222"), "keeper.log"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.Reconcile(t.Context()); fail.CodeOf(err) != fail.Host {
		t.Errorf("Reconcile = %v, want code %v", err, fail.Host)
	}
	if !woken(t, m, "bbbb11112222") {
		t.Error("keeper of the other session started = false, want true")
	}
}

// owner/repo means github.com. A repository of the same name on another host gets
// neither its session nor its settings.
func TestSameNameOnAnotherHost(t *testing.T) {
	m := newManager(t)
	text := "repos:\n  o/r: {secrets: {T: {from: env:GITHUB, guest: true}}}\n  evil.example/o/r: {secrets: {T: {from: env:EVIL, guest: true}}}\n"
	if err := os.MkdirAll(m.Config.Paths.Config, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.Config.Paths.Config, "config.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := m.Config.Reload()
	if err != nil {
		t.Fatal(err)
	}
	m.Config = cfg
	t.Setenv("GITHUB", "g")
	t.Setenv("EVIL", "e")
	evil, created, _, err := m.Open(t.Context(), Request{Repo: repo.Ref{Key: "evil.example/o/r", Slug: "o/r"}})
	if err != nil || !created {
		t.Fatalf("Open(evil.example/o/r) = created %t, %v, want true, nil", created, err)
	}
	if s, err := m.Find(t.Context(), "o/r"); fail.CodeOf(err) != fail.NotFound {
		t.Fatalf("Find(o/r) with a session of another host only = %q, %v, want %v", s.Name, err, fail.NotFound)
	}
	if set, err := (Net{Sessions: m}).settings(evil); err != nil || set.Secrets["T"].From != "env:EVIL" {
		t.Errorf("secrets of evil.example/o/r = %v, %v, want T=env:EVIL", set.Secrets, err)
	}
	github, created, _, err := m.Open(t.Context(), request("o/r"))
	if err != nil || !created {
		t.Fatalf("Open(o/r) = created %t, %v, want true, nil", created, err)
	}
	if set, err := (Net{Sessions: m}).settings(github); err != nil || set.Secrets["T"].From != "env:GITHUB" {
		t.Errorf("secrets of github.com/o/r = %v, %v, want T=env:GITHUB", set.Secrets, err)
	}
	for what, want := range map[string]string{
		"o/r": github.ID, "O/R": github.ID, "https://github.com/o/r": github.ID,
		"evil.example/o/r": evil.ID, "https://evil.example/o/r.git": evil.ID, "git@evil.example:o/r": evil.ID,
	} {
		if s, err := m.Find(t.Context(), what); err != nil || s.ID != want {
			t.Errorf("Find(%s) = %s, %v, want %s", what, s.ID, err, want)
		}
	}
	if s, err := m.Find(t.Context(), "r"); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Find(r) with two sessions of that name = %q, %v, want code %v", s.Name, err, fail.Usage)
	}
	if github.DisplayName() != "o/r" || evil.DisplayName() != "evil.example/o/r" {
		t.Errorf("DisplayName = %q, %q, want o/r, evil.example/o/r", github.DisplayName(), evil.DisplayName())
	}
}
