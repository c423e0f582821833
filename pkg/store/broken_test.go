package store_test

import (
	"context"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// operations returns all operations that read or write, by name.
func operations(t *testing.T, s *store.Store) map[string]func() error {
	ctx := t.Context()
	session := row("two")
	session.RepoKey = "github.com/o/other"
	read := func(f store.TaskFilter) func() error {
		return func() error { _, err := s.Tasks(ctx, f); return err }
	}
	prune := func(dry bool) func() error {
		return func() error {
			n, bytes, err := s.PruneEvents(ctx, time.Now().Add(time.Hour), never, dry)
			if err != nil && (n != 0 || bytes != 0) {
				t.Errorf("PruneEvents = %d events, %d bytes, %v, want no count with an error", n, bytes, err)
			}
			return err
		}
	}
	return map[string]func() error{
		"Session":    func() error { _, err := s.Session(ctx, "one"); return err },
		"Sessions":   func() error { _, err := s.Sessions(ctx, true); return err },
		"Create":     func() error { _, _, err := s.Create(ctx, session, event("made", 0), admitAll); return err },
		"Update":     func() error { _, err := increment(ctx, s, "one"); return err },
		"Append":     func() error { return s.Append(ctx, "one", event("x", 1)) },
		"Task":       func() error { _, err := s.Task(ctx, "t"); return err },
		"TaskText":   func() error { _, err := s.TaskText(ctx, "t"); return err },
		"TaskCounts": func() error { _, err := s.TaskCounts(ctx); return err },
		"Tasks":      read(store.TaskFilter{}),
		"TasksAfter": read(store.TaskFilter{After: "t"}),
		"TasksLabel": read(store.TaskFilter{Label: store.Label{Key: "team", Value: "a"}}),
		"CreateTask": func() error { _, err := s.CreateTask(ctx, task("u"), []byte("text"), phase("", "PENDING")); return err },
		"AdvanceTask": func() error {
			_, err := s.AdvanceTask(ctx, "v", "PENDING", "STAGING", event("x", 1), nil)
			return err
		},
		"Admit":      func() error { _, err := s.Admit(ctx, testQueue, slots(1)); return err },
		"Events":     func() error { _, err := s.Events(ctx, "one", 0, 10); return err },
		"EventRange": func() error { _, _, err := s.EventRange(ctx, "one"); return err },
		"Prune":      prune(false),
		"PruneDry":   prune(true),
		"Follow": func() error {
			for _, err := range s.Follow(ctx, "one", 0) {
				return err
			}
			return nil
		},
	}
}

// broken returns a store with a session, two tasks and some events that statements
// then damaged.
func broken(t *testing.T, statements string) *store.Store {
	t.Helper()
	s, path := numbered(t, 3, 0)
	mustTask(t, s, task("t"))
	mustTask(t, s, task("v"))
	raw(t, path, statements)
	return s
}

// A table that cannot be read or written is an error of every operation that needs
// it. The operation neither succeeds nor reports a missing row.
func TestEveryErrorOfSQLiteIsReturned(t *testing.T) {
	writers := "Create Update Append CreateTask AdvanceTask Admit"
	events := "Events EventRange Follow Prune PruneDry " + writers
	for statements, fails := range map[string]string{
		`ALTER TABLE sessions RENAME TO x`:                                "Session Sessions Create Update Append CreateTask",
		`ALTER TABLE tasks RENAME TO x`:                                   "Create Append Task TaskCounts Tasks TasksAfter TasksLabel CreateTask AdvanceTask Admit",
		`ALTER TABLE events RENAME TO x`:                                  events,
		`ALTER TABLE task_labels RENAME TO x`:                             "TasksLabel CreateTask",
		`ALTER TABLE task_texts RENAME TO x`:                              "TaskText CreateTask",
		`UPDATE tasks SET phase = 'RUNNING', labels = 'x' WHERE id = 'v'`: "Tasks TasksLabel AdvanceTask Admit",
		refuse("INSERT", "sessions"):                                      "Create",
		refuse("UPDATE", "sessions"):                                      "Update",
		refuse("INSERT", "tasks"):                                         "CreateTask",
		refuse("UPDATE", "tasks"):                                         "AdvanceTask Admit",
		refuse("INSERT", "task_labels"):                                   "CreateTask",
		refuse("INSERT", "task_texts"):                                    "CreateTask",
		refuse("INSERT", "events"):                                        writers,
		refuse("DELETE", "events"):                                        "Prune",
	} {
		want := strings.Fields(fails)
		all := operations(t, broken(t, statements))
		for _, name := range slices.Sorted(maps.Keys(all)) { // the order puts the removing operations after the reading ones
			err := all[name]()
			if failed := slices.Contains(want, name); (err != nil) != failed || failed && fail.CodeOf(err) == fail.NotFound {
				t.Errorf("%s with %s = %v, want an error: %t, and never NOT_FOUND", name, statements, err, failed)
			}
		}
	}
}

func refuse(verb, table string) string {
	return `CREATE TRIGGER refuse BEFORE ` + verb + ` ON ` + table + ` BEGIN SELECT RAISE(ABORT, 'refused'); END`
}

// A waiting follower learns that the store can no longer be read.
func TestBrokenWhileFollowing(t *testing.T) {
	s, path := numbered(t, 3, 0)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	damaged := make(chan error, 1)
	go func() {
		for _, waits := s.Watched(); !waits; _, waits = s.Watched() {
			time.Sleep(time.Millisecond)
		}
		damaged <- execute(ctx, path, `ALTER TABLE events RENAME TO x`)
	}()
	var last error
	for _, err := range s.Follow(ctx, "one", 2) {
		last = err
	}
	if err := <-damaged; err != nil {
		t.Fatal(err)
	}
	if last == nil || !strings.Contains(last.Error(), "no such table") {
		t.Errorf("end of Follow = %v, want \"no such table\"", last)
	}
}

// Open refuses a store that it cannot read or change.
func TestBrokenAtOpen(t *testing.T) {
	path := version1(t, 3)
	raw(t, path, `DROP TABLE events`) // the migration renames this table
	if _, err := store.Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), "no such table") {
		t.Errorf("Open = %v, want \"no such table\"", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := store.Open(ctx, filepath.Join(t.TempDir(), "store.db")); err == nil {
		t.Error("Open with a cancelled context = nil, want an error")
	}
}
