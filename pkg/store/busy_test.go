package store_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func openBusy(t *testing.T, path string, busy time.Duration) *store.Store {
	t.Helper()
	s, err := store.OpenBusy(t.Context(), path, busy)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// heldUp holds the writers' lock until release, as a process does that is stopped in
// the middle of a transaction.
func heldUp(t *testing.T, path string) (release func()) {
	t.Helper()
	db, err := sql.Open("sqlite", path+"?_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
}

func isBusy(t *testing.T, err error) {
	t.Helper()
	if fail.CodeOf(err) != fail.Conflict || !strings.HasPrefix(fail.HintOf(err), "fuser ") {
		t.Errorf("error of a busy store = %v (code %v, hint %q), want code %v, hint \"fuser …\"", err, fail.CodeOf(err), fail.HintOf(err), fail.Conflict)
	}
}

func TestBusyForTooLong(t *testing.T) {
	_, path := withSession(t)
	s := openBusy(t, path, 30*time.Millisecond)
	mustTask(t, s, task("t"))
	release := heldUp(t, path)
	for range 2 {
		_, err := increment(t.Context(), s, "one")
		isBusy(t, err)
		isBusy(t, s.AppendAll(t.Context(), "t", []store.Event{event("x", 1), event("x", 2)}))
		_, err = s.CreateTask(t.Context(), task("t2"), nil, phase("", "PENDING"))
		isBusy(t, err)
		_, err = s.Admit(t.Context(), testQueue, slots(1))
		isBusy(t, err)
	}
	// Readers and openers are not affected.
	if rows, err := openBusy(t, path, 0).Tasks(t.Context(), store.TaskFilter{}); err != nil || len(rows) != 1 || lastSeq(t, s, "t") != 1 {
		t.Fatalf("Tasks of a busy store = %v, %v, want 1 task with 1 event", rows, err)
	}
	release()
	finishTx(t, s)
	if _, err := s.Admit(t.Context(), testQueue, slots(1)); err != nil {
		t.Fatal(err)
	}
}

// A writer that waits for another process can be cancelled.
func TestCancelWhileBusy(t *testing.T) {
	_, path := withSession(t)
	s := openBusy(t, path, 24*time.Hour)
	release := heldUp(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- s.Append(ctx, "one", event("x", 1)) }()
	go func() { second <- s.Append(ctx, "one", event("x", 2)) }() // one of them waits for the other
	cancel()
	for _, err := range []error{<-first, <-second} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled write = %v, want %v", err, context.Canceled)
		}
	}
	release()
	finishTx(t, s)
}

// A hanging writer in this process has the same effect as one in another process.
func TestBusyWithinOneProcess(t *testing.T) {
	_, path := withSession(t)
	s := openBusy(t, path, 30*time.Millisecond)
	in, out, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := s.Update(context.Background(), "one", func(*store.Session) (store.Event, error) {
			close(in)
			<-out
			return store.Event{}, nil
		})
		done <- err
	}()
	<-in
	isBusy(t, s.Append(t.Context(), "one", event("x", 1)))
	finishTx(t, s)
	close(out)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if _, err := increment(t.Context(), s, "one"); err != nil {
		t.Fatal(err)
	}
	finishTx(t, s)
}

// However many writers of a process wait, its readers still get connections.
func TestManyWritersWait(t *testing.T) {
	_, path := withSession(t)
	s := openBusy(t, path, 24*time.Hour)
	release := heldUp(t, path)
	const writers = 30
	var begun, done sync.WaitGroup
	begun.Add(writers)
	for i := range writers {
		done.Go(func() {
			begun.Done()
			if err := s.Append(t.Context(), "one", event("x", i)); err != nil {
				t.Error(err)
			}
		})
	}
	begun.Wait()
	for range 200 {
		finishTx(t, s)
		if n := s.Connections(); n > 1 {
			t.Errorf("open connections = %d, want at most 1", n)
			break
		}
	}
	release()
	done.Wait()
	if n := lastSeq(t, s, "one"); n != 1+writers {
		t.Errorf("last event of session one = %d, want %d", n, 1+writers)
	}
}
