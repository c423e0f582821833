package session

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// localGuest is a repo.Guest that runs its commands on this machine.
type localGuest struct{}

func (localGuest) Run(ctx context.Context, cmd string, st ssh.IO) error {
	c := exec.CommandContext(ctx, "sh", "-c", cmd)
	c.Env = append(c.Environ(), "TMPDIR=/tmp") // not the host's
	c.Stdin, c.Stdout, c.Stderr = st.Stdin, st.Stdout, st.Stderr
	return c.Run()
}

func (g localGuest) Output(ctx context.Context, cmd string, stdin io.Reader, _ int64) ([]byte, error) {
	var out bytes.Buffer
	err := g.Run(ctx, cmd, ssh.IO{Stdin: stdin, Stdout: &out})
	return out.Bytes(), err
}

// TestGuestCannotFillTheStoreByFetches checks that a fetch that the guest asked for adds an event
// only within the session's budget.
func TestGuestCannotFillTheStoreByFetches(t *testing.T) {
	m := newManager(t)
	dir, mirror := t.TempDir(), t.TempDir()
	for _, args := range [][]string{
		{"init", "--quiet", dir},
		{"init", "--quiet", "--bare", mirror},
		{"-C", dir, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "--allow-empty", "-m", "a"},
	} {
		if out, err := exec.Command("git", args...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	head, err := exec.Command("git", "-C", dir, "rev-parse", "HEAD").Output()
	if err != nil {
		t.Fatal(err)
	}
	s := put(t, m, "aaaaaaaaaaaa", "acme/app", Ready, Ready, Status{
		Dir: dir, Target: repo.Target{Mirror: mirror}, Base: &repo.Base{Commit: strings.TrimSpace(string(head))},
		Events: store.Budget{Bytes: store.MaxGuestEvents, Dropped: 1},
	})
	for _, c := range []struct {
		byGuest bool
		want    int
	}{{true, 0}, {false, 1}} {
		before, err1 := m.Store.Events(t.Context(), s.ID, store.Oldest, 100)
		_, err2 := Work{Sessions: m, ByGuest: c.byGuest}.Fetch(t.Context(), s, localGuest{}, "", repo.FetchOptions{})
		after, err3 := m.Store.Events(t.Context(), s.ID, store.Oldest, 100)
		if err1 != nil || err2 != nil || err3 != nil || len(after)-len(before) != c.want {
			t.Errorf("Fetch by the guest: %t = %v, %v, %v and %d events, want %d", c.byGuest, err1, err2, err3, len(after)-len(before), c.want)
		}
	}
}

// TestGuestCannotFillTheDiskByFetches checks that the bytes of all fetches that the guest asked
// for are counted and limited, and those of its user are not.
func TestGuestCannotFillTheDiskByFetches(t *testing.T) {
	m := newManager(t)
	dir, mirror := t.TempDir(), t.TempDir()
	git := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("git", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	commit := func() {
		git("-C", dir, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "--allow-empty", "-m", "a")
	}
	git("init", "--quiet", dir)
	git("init", "--quiet", "--bare", mirror)
	commit()
	s := put(t, m, "aaaaaaaaaaaa", "acme/app", Ready, Ready, Status{
		Dir: dir, Target: repo.Target{Mirror: mirror}, Base: &repo.Base{Commit: git("-C", dir, "rev-parse", "HEAD")},
		GuestFetched: guestFetches - 1000,
	})
	t.Setenv("TMPDIR", filepath.Join(mirror, "missing"))         // prune would not remove the files of a killed fetch there
	m.Config.Paths.Cache = filepath.Join(t.TempDir(), "removed") // while the session ran
	fetch := func(byGuest bool) error {
		t.Helper()
		commit()
		s, err := m.Get(t.Context(), s.ID)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Work{Sessions: m, ByGuest: byGuest}.Fetch(t.Context(), s, localGuest{}, "", repo.FetchOptions{})
		return err
	}
	fetches := 0
	for fetch(true) == nil {
		if fetches++; fetches > 20 {
			t.Fatal("the guest's fetches never end, want a limit")
		}
	}
	if err := fetch(true); fetches == 0 || fail.CodeOf(err) != fail.Conflict {
		t.Errorf("fetch number %d of the guest = %v, want %v", fetches+2, err, fail.Conflict)
	}
	if err := fetch(false); err != nil {
		t.Errorf("the user's fetch = %v, want success", err)
	}
	// A fetch that fails after the commits have been received counts, too.
	if _, err := m.updateStatus(t.Context(), s.ID, store.Event{}, func(f *Status) { f.GuestFetched = 0 }); err != nil {
		t.Fatal(err)
	}
	commit()
	for i := range 3 {
		git("-C", dir, "branch", fmt.Sprint("b", i))
	}
	_, err := Work{Sessions: m, ByGuest: true}.Fetch(t.Context(), s, localGuest{}, "", repo.FetchOptions{MaxRefs: 1})
	if now, gerr := m.Get(t.Context(), s.ID); err == nil || gerr != nil || now.Status.GuestFetched == 0 {
		t.Errorf("Fetch of too many references = %v, %d bytes counted, %v, want an error, and the bytes", err, now.Status.GuestFetched, gerr)
	}
}
