package store_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"

	sqlite "modernc.org/sqlite"
)

// failCommits makes every commit of this process fail until the test ends.
func failCommits(t *testing.T) (stop func()) {
	t.Helper()
	commitFails.Store(true)
	stop = func() { commitFails.Store(false) }
	t.Cleanup(stop)
	return stop
}

var commitFails atomic.Bool

// hookCommits prepares all connections of this process for failCommits.
func hookCommits() {
	sqlite.RegisterConnectionHook(func(c sqlite.ExecQuerierContext, _ string) error {
		c.(sqlite.HookRegisterer).RegisterCommitHook(func() int32 {
			if commitFails.Load() {
				return 1
			}
			return 0
		})
		return nil
	})
}

// A failed commit fails each write in it, and no later one.
func TestFailedCommit(t *testing.T) {
	for _, writers := range []int{1, 5} {
		t.Run(fmt.Sprint(writers), func(t *testing.T) {
			_, path := withSession(t)
			s := openBusy(t, path, 24*time.Hour)
			release := heldUp(t, path)
			errs := make(chan error, writers)
			for i := range writers {
				go func() { errs <- s.Append(context.Background(), "one", event("x", i)) }()
			}
			for s.Waiting() != writers {
				time.Sleep(time.Millisecond)
			}
			stop := failCommits(t)
			release()
			for range writers {
				if err := <-errs; err == nil {
					t.Error("write of the failed commit = nil, want its error")
				}
			}
			stop()
			if n := lastSeq(t, s, "one"); n != 1 {
				t.Errorf("last event of session one = %d, want 1", n)
			}
			if _, err := increment(t.Context(), s, "one"); err != nil {
				t.Errorf("write after the failed commit = %v, want nil", err)
			}
			finishTx(t, s)
		})
	}
}

// Every operation that writes returns the failure of its commit.
func TestFailedCommitOfEachOperation(t *testing.T) {
	s, path := numbered(t, 5, 0)
	mustTask(t, s, task("t"))
	raw(t, path, `UPDATE events SET at = 0`)
	before, err := s.Session(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	stop := failCommits(t)
	other := row("two")
	other.RepoKey = "github.com/o/other"
	for name, f := range map[string]func() error{
		"Create":     func() error { _, _, err := s.Create(t.Context(), other, event("made", 0), admitAll); return err },
		"CreateTask": func() error { _, err := s.CreateTask(t.Context(), task("u"), nil, phase("", "PENDING")); return err },
		"Update":     func() error { _, err := increment(t.Context(), s, "one"); return err },
		"Advance": func() error {
			_, err := s.Advance(t.Context(), "one", "creating", "ready", event("x", 1), nil)
			return err
		},
		"Append": func() error { return s.Append(t.Context(), "one", event("x", 1)) },
		"Admit":  func() error { _, err := s.Admit(t.Context(), testQueue, slots(1)); return err },
		"Prune": func() error {
			n, bytes, err := s.PruneEvents(t.Context(), time.Now(), never, false)
			if n != 0 || bytes != 0 {
				t.Errorf("PruneEvents of a failed commit = %d events, %d bytes, want 0, 0", n, bytes)
			}
			return err
		},
	} {
		if err := f(); err == nil {
			t.Errorf("%s with a failed commit = nil, want its error", name)
		}
	}
	stop()
	if after, err := s.Session(t.Context(), "one"); err != nil || after.Phase != before.Phase || string(after.Status) != string(before.Status) {
		t.Errorf("Session(one) = %+v, %v, want %+v", after, err, before)
	}
	if _, err := s.Session(t.Context(), "two"); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("Session(two), not created, = %v, want %v", err, fail.NotFound)
	}
	if tasks, err := s.Tasks(t.Context(), store.TaskFilter{}); err != nil || len(tasks) != 1 || tasks[0].Phase != "PENDING" {
		t.Errorf("Tasks = %+v, %v, want 1 task, PENDING", tasks, err)
	}
	if oldest, newest, err := s.EventRange(t.Context(), "one"); err != nil || oldest != 1 || newest != 5 {
		t.Errorf("EventRange(one) = %d, %d, %v, want 1, 5, nil", oldest, newest, err)
	}
}

// Acknowledged writes survive a power cut: on every connection, a commit waits for
// the disk. No test can cut the power, so this one checks the settings.
func TestEveryConnectionIsDurable(t *testing.T) {
	s, _ := withSession(t)
	for name, want := range map[string]string{"synchronous": "2", "journal_mode": "wal"} {
		got, err := s.Pragmas(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) < 2 || slices.ContainsFunc(got, func(v string) bool { return v != want }) {
			t.Errorf("%s of the connections = %q, want %s of each", name, got, want)
		}
	}
}

// A waiting writer notices the end of its context, however long the store may be
// busy: SQLite itself waits only briefly.
func TestSQLiteWaitsInSteps(t *testing.T) {
	_, path := withSession(t)
	for busy, want := range map[time.Duration]string{24 * time.Hour: "500", 30 * time.Millisecond: "30"} {
		got, err := openBusy(t, path, busy).Pragmas(t.Context(), "busy_timeout")
		if err != nil || got[0] != want {
			t.Errorf("busy_timeout for %s = %q, %v, want %s ms", busy, got, err, want)
		}
	}
}

// A store that a newer version wrote stays unchanged, and the hint says what to do.
func TestNewerSchemaIsLeftAlone(t *testing.T) {
	_, path := withSession(t)
	raw(t, path, "PRAGMA user_version = 99")
	checkpoint(t, path)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(t.Context(), path); fail.CodeOf(err) != fail.Host || fail.HintOf(err) != "install the newer version" {
		t.Errorf("Open of a newer schema = %v (hint %q), want code %v, hint \"install the newer version\"", err, fail.HintOf(err), fail.Host)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("file of the newer schema after Open = %d bytes, %v, want it unchanged, %d bytes", len(after), err, len(before))
	}
}

// A failed migration leaves the old version and returns an error.
func TestFailedMigration(t *testing.T) {
	path := version1(t, 3)
	stop := failCommits(t)
	if _, err := store.Open(t.Context(), path); err == nil {
		t.Fatal("Open with a failed commit = nil, want its error")
	}
	stop()
	raw(t, path, `SELECT max(session) FROM events`) // fails unless the schema is version 1
	isVersion2(t, path, 3)
}

// After its context ended, each operation fails with the context's error.
func TestEndedContext(t *testing.T) {
	s, _ := withSession(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, f := range map[string]func() error{
		"read":  func() error { _, err := s.Session(ctx, "one"); return err },
		"write": func() error { return s.Append(ctx, "one", event("x", 1)) },
	} {
		if err := f(); !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "interrupted") {
			t.Errorf("%s with a cancelled context = %v, want %v, without \"interrupted\"", name, err, context.Canceled)
		}
	}
	finishTx(t, s)
}
