package store_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Writers that wait for another process are written together when the lock is free.
// Writers that fail or were cancelled do not affect the others.
func TestWritersShareTheirTurn(t *testing.T) {
	errOwn := errors.New("its own")
	for name, spoil := range map[string]func(ctx context.Context, s *store.Store) error{
		"shared": nil,
		"given up by SQLite": func(ctx context.Context, s *store.Store) error {
			return s.Tx(ctx, func(tx *sql.Tx) error {
				_, err := tx.Exec(`ROLLBACK`) // as SQLite itself does when the disk is full
				return errors.Join(errOwn, err)
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			const writers = 20
			_, path := withSession(t)
			s := openBusy(t, path, 24*time.Hour)
			release := heldUp(t, path)
			log, err := os.Stat(path + "-wal")
			if err != nil {
				t.Fatal(err)
			}
			waits := func(n int) {
				t.Helper()
				for end := time.Now().Add(2 * time.Minute); s.Waiting() != n; time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("waiting writers = %d, want %d", s.Waiting(), n)
					}
				}
			}
			var done sync.WaitGroup
			add := func(want error, f func() error) {
				done.Go(func() {
					if err := f(); !errors.Is(err, want) {
						t.Errorf("group commit = %v, want %v", err, want)
					}
				})
			}
			for i := range writers {
				add(nil, func() error { return s.Append(t.Context(), "one", event("x", i)) })
			}
			waits(writers)
			// The first event is already in the transaction when the second is
			// refused; it is rolled back.
			done.Go(func() {
				long := json.RawMessage(`"` + strings.Repeat("x", 1<<20) + `"`)
				if err := s.AppendAll(t.Context(), "one", []store.Event{event("half", 1), {Kind: "long", Data: long}}); err == nil || !strings.Contains(err.Error(), "over the limit") {
					t.Errorf("AppendAll of an oversized event = %v, want \"over the limit\"", err)
				}
			})
			ctx, cancel := context.WithCancel(t.Context())
			left := make(chan error, 1)
			waits(writers + 1)
			go func() { left <- s.Append(ctx, "one", event("left", 1)) }()
			waits(writers + 2)
			if spoil != nil {
				add(errOwn, func() error { return spoil(t.Context(), s) })
				waits(writers + 3)
			}
			cancel()
			if err := <-left; !errors.Is(err, context.Canceled) {
				t.Errorf("write of the cancelled context = %v, want %v", err, context.Canceled)
			}
			release()
			done.Wait()
			if n := lastSeq(t, s, "one"); n != 1+writers {
				t.Errorf("last event of session one = %d, want %d", n, 1+writers)
			}
			evs, err := s.Events(t.Context(), "one", 1, 100)
			if err != nil {
				t.Fatal(err)
			}
			for _, ev := range evs {
				if ev.Kind != "x" {
					t.Errorf("event kind = %q, want \"x\"", ev.Kind)
				}
			}
			// One transaction writes a page once, however many writers change it.
			now, err := os.Stat(path + "-wal")
			if err != nil {
				t.Fatal(err)
			}
			if pages := (now.Size() - log.Size()) / 4096; spoil == nil && pages >= writers {
				t.Errorf("pages written = %d, want fewer than the %d writers", pages, writers)
			}
		})
	}
}
