package store_test

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// version1 returns a store as the first version left it: session a, which exists, and
// b, which is gone, each with events 1 to n.
func version1(t *testing.T, n int) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "store.db")
	raw(t, path, `PRAGMA journal_mode = WAL; PRAGMA foreign_keys = 1; `+store.Schema[0]+`; PRAGMA user_version = 1;
		INSERT INTO sessions (id, name, repo_key, repo, phase, desired, created_at, state_changed_at, error_code, error_message, error_hint, spec, status, token_sha256) VALUES
			('a', 'agent-a', 'github.com/o/r', 'o/r', 'ready', 'ready', 1000, 2000, '', '', '', '{"s":1}', '{"n":1}', 'token'),
			('b', 'agent-b', 'github.com/o/r', 'o/r', 'gone', 'gone', 500, 600, 'HOST', 'message', 'hint', '{"s":2}', '{"n":2}', '');`+
		fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d)
			INSERT INTO events (session, seq, at, kind, data) SELECT id, i, 1000 + i, 'step', json_object('of', id, 'n', i) FROM n, sessions`, n))
	return path
}

func isVersion2(t *testing.T, path string, n int) {
	t.Helper()
	s := reopen(t, path)
	rows, err := s.Sessions(t.Context(), true)
	if err != nil {
		t.Fatal(err)
	}
	want := []store.Session{
		{
			ID: "b", Name: "agent-b", RepoKey: "github.com/o/r", Repo: "o/r", Phase: "gone", Desired: "gone",
			CreatedAt: time.UnixMilli(500), StateChangedAt: time.UnixMilli(600), ErrorCode: "HOST", ErrorMessage: "message", ErrorHint: "hint",
			Spec: json.RawMessage(`{"s":2}`), Status: json.RawMessage(`{"n":2}`),
		},
		{
			ID: "a", Name: "agent-a", RepoKey: "github.com/o/r", Repo: "o/r", Phase: "ready", Desired: "ready",
			CreatedAt: time.UnixMilli(1000), StateChangedAt: time.UnixMilli(2000),
			Spec: json.RawMessage(`{"s":1}`), Status: json.RawMessage(`{"n":1}`), TokenSHA256: "token",
		},
	}
	if diff := cmp.Diff(want, rows); diff != "" {
		t.Errorf("migrated sessions mismatch (-want +got):\n%s", diff)
	}
	for _, id := range []string{"a", "b"} {
		evs, err := s.Events(t.Context(), id, 0, n+1)
		if err != nil || len(evs) != n {
			t.Fatalf("Events(%s) of the migrated store = %d events, %v, want %d", id, len(evs), err, n)
		}
		for i, ev := range evs {
			if ev.Seq != int64(i+1) || ev.Subject != id || ev.At.UnixMilli() != int64(1001+i) || ev.Kind != "step" || string(ev.Data) != fmt.Sprintf(`{"of":%q,"n":%d}`, id, i+1) {
				t.Fatalf("migrated event %d of %s = %+v, data %s, want it unchanged", i+1, id, ev, ev.Data)
			}
		}
	}
	if got, created, err := s.Create(t.Context(), row("c"), event("made", 0), admitAll); err != nil || created || got.ID != "a" {
		t.Fatalf("Create for a repository with session a = %+v, %t, %v, want a, false, nil", got, created, err)
	}
}

func TestStoreOfVersion1(t *testing.T) {
	path := version1(t, 100)
	isVersion2(t, path, 100)
	// The schema equals that of a new store.
	_, fresh := newStore(t)
	if diff := cmp.Diff(schemaOf(t, fresh), schemaOf(t, path)); diff != "" {
		t.Errorf("schema of the migrated store mismatch (-want +got):\n%s", diff)
	}
	s := reopen(t, path)
	if err := s.Append(t.Context(), "b", event("more", 1)); err != nil || lastSeq(t, s, "b") != 101 {
		t.Fatalf("Append(b) after migrating = %v, last event %d, want nil, 101", err, lastSeq(t, s, "b"))
	}
	if row := mustTask(t, s, task("t")); row.Phase != "PENDING" {
		t.Fatalf("task created after migrating = %+v, want phase PENDING", row)
	}
}

func schemaOf(t *testing.T, path string) (all []string) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.QueryContext(t.Context(), `SELECT coalesce(sql, name) FROM sqlite_schema ORDER BY type, name`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		all = append(all, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

func TestMigratedByManyAtOnce(t *testing.T) {
	for range 3 {
		path := version1(t, 200)
		var ps []*process
		for range 3 {
			ps = append(ps, spawn(t, "open", path))
		}
		for _, p := range ps {
			p.shoot(t)
		}
		for _, p := range ps {
			if out, err := p.finish(); err != nil {
				t.Fatalf("migrating child: %v, output %q", err, out)
			}
		}
		isVersion2(t, path, 200)
	}
}

// A process killed during migration leaves the old version with all its content.
func TestKillWhileMigrating(t *testing.T) {
	const n = 100 // events of each session, migrated one by one; then the two sessions, and the commit
	for _, step := range []int{1, 2, n, 2*n - 1, 2 * n, 2*n + 1, 2*n + 2, 2*n + 3} {
		path := version1(t, n)
		p := spawn(t, fmt.Sprint("open 0 ", step), path)
		p.shoot(t)
		out, err := p.finish()
		if status, ok := p.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
			t.Fatalf("child before step %d = %v, output %q, want it killed", step, err, out)
		}
		raw(t, path, `SELECT max(session) FROM events`) // fails unless the schema is version 1
		isVersion2(t, path, n)
	}
	p := spawn(t, fmt.Sprint("open 0 ", 2*n+4), version1(t, n))
	p.shoot(t)
	if out, err := p.finish(); err != nil {
		t.Fatalf("migrating child at the end = %v, output %q, want nil: there are more steps than were tried", err, out)
	}
}
