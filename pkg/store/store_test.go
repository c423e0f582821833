package store_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestSchemaMadeByManyAtOnce(t *testing.T) {
	for range 3 {
		path := filepath.Join(t.TempDir(), "state", "store.db")
		var ps []*process
		for range 4 {
			ps = append(ps, spawn(t, "open", path))
		}
		for _, p := range ps {
			p.shoot(t)
		}
		for _, p := range ps {
			if out, err := p.finish(); err != nil {
				t.Fatalf("child: %v, output %q", err, out)
			}
		}
	}
}

func TestManyProcessesLoseNothing(t *testing.T) {
	s, path := withSession(t)
	var ps []*process
	for range 8 {
		ps = append(ps, spawn(t, "count 100", path))
	}
	for _, p := range ps {
		p.shoot(t)
	}
	for _, p := range ps {
		if out, err := p.finish(); err != nil {
			t.Errorf("child: %v, last line %q", err, out[len(out)-1])
		}
	}
	if n := finishTx(t, s); n != 800 {
		t.Fatalf("transactions stored = %d, want 800", n)
	}
}

// Acknowledged writes survive kill -9, and an unacknowledged write exists completely or
// not at all.
func TestKillLeavesNoHalfTransaction(t *testing.T) {
	s, path := withSession(t)
	for round := range 15 {
		before := finishTx(t, s)
		p := spawn(t, "count 1000000", path)
		p.shoot(t)
		told := 0
		for told <= round*3 && p.out.Scan() { // kill at different points
			told++
		}
		if err := p.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		rest, _ := p.finish()
		if n := finishTx(t, s); n < before+told+len(rest) || n > before+told+len(rest)+1 {
			t.Fatalf("round %d: transactions stored = %d, want %d or one more (%d before, %d acknowledged)", round, n, before+told+len(rest), before, told+len(rest))
		}
	}
}

func TestAdvance(t *testing.T) {
	s, _ := withSession(t)
	before, err := s.Session(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Advance(t.Context(), "one", "creating", "ready", event("phase", 1), func(r *store.Session) { r.SetError("HOST", "m", "h") })
	if err != nil || got.Phase != "ready" || got.ErrorMessage != "m" || got.StateChangedAt.Before(before.StateChangedAt) {
		t.Fatalf("Advance(one) = %+v, %v, want phase ready, error m, a later change", got, err)
	}
	stored, err := s.Session(t.Context(), "one")
	if err != nil || stored.Phase != "ready" || stored.ErrorCode != "HOST" || stored.ErrorHint != "h" || stored.CreatedAt != before.CreatedAt {
		t.Fatalf("Session(one) = %+v, %v, want phase ready, error HOST with hint h, CreatedAt %v", stored, err, before.CreatedAt)
	}

	_, err = s.Advance(t.Context(), "one", "creating", "broken", event("phase", 2), func(*store.Session) { t.Errorf("stale row was passed to change, want %v before", store.ErrStale) })
	if !errors.Is(err, store.ErrStale) {
		t.Fatalf("Advance from a stale phase = %v, want %v", err, store.ErrStale)
	}
	if after, err := s.Session(t.Context(), "one"); err != nil || after.Phase != "ready" || !after.StateChangedAt.Equal(stored.StateChangedAt) {
		t.Fatalf("Session(one) after a stale Advance = %+v, %v, want %+v", after, err, stored)
	}
	if seq := lastSeq(t, s, "one"); seq != 2 {
		t.Fatalf("last event of session one = %d, want 2", seq)
	}

	if _, err := s.Advance(t.Context(), "two", "creating", "ready", event("phase", 1), nil); fail.CodeOf(err) != fail.NotFound {
		t.Fatalf("Advance of an unknown session = %v, want %v", err, fail.NotFound)
	}
}

func TestCreateMakesExactlyOne(t *testing.T) {
	s, path := newStore(t)
	var ps []*process
	for range 5 {
		ps = append(ps, spawn(t, "create", path))
	}
	var made atomic.Int32
	var wg sync.WaitGroup
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		wg.Go(func() {
			got, created, err := s.Create(t.Context(), row(id), event("made", 0), admitAll)
			if err != nil || created != (got.ID == id) {
				t.Errorf("Create(%s) = session %s, %t, %v, want created only with that id", id, got.ID, created, err)
			}
			if created {
				made.Add(1)
			}
		})
	}
	for _, p := range ps {
		p.shoot(t)
	}
	for _, p := range ps {
		out, err := p.finish()
		if err != nil {
			t.Errorf("child: %v, output %q", err, out)
		} else if out[0] == "created true" {
			made.Add(1)
		}
	}
	wg.Wait()
	rows, err := s.Sessions(t.Context(), true)
	if err != nil || len(rows) != 1 || made.Load() != 1 {
		t.Fatalf("sessions = %d, %v, created %d, want 1, 1", len(rows), err, made.Load())
	}

	// A session that is gone allows the next one, and keeps its row.
	if _, err := s.Advance(t.Context(), rows[0].ID, "creating", "gone", event("phase", 1), nil); err != nil {
		t.Fatal(err)
	}
	if got, created, err := s.Create(t.Context(), row("next"), event("made", 0), admitAll); err != nil || !created || string(got.Status) != "{}" {
		t.Fatalf("Create(next) = %+v, %t, %v, want a new session with status {}", got, created, err)
	}
	alive, err := s.Sessions(t.Context(), false)
	if err != nil || len(alive) != 1 || alive[0].ID != "next" {
		t.Fatalf("Sessions(false) = %+v, %v, want next alone", alive, err)
	}
	if all, err := s.Sessions(t.Context(), true); err != nil || len(all) != 2 {
		t.Fatalf("Sessions(true) = %+v, %v, want 2", all, err)
	}
}

// A repository has one live session per label.
func TestCreateByLabel(t *testing.T) {
	s, _ := withSession(t)
	for _, c := range []struct {
		id, label, want string
		created         bool
	}{{"two", "fix", "two", true}, {"three", "fix", "two", false}, {"four", "", "one", false}, {"five", "Fix", "five", true}} {
		n := row(c.id)
		n.Label = c.label
		if got, created, err := s.Create(t.Context(), n, event("made", 0), admitAll); err != nil || created != c.created || got.ID != c.want || got.Label != c.label {
			t.Errorf("Create with label %q = %s (label %q), %t, %v, want %s, %t", c.label, got.ID, got.Label, created, err, c.want, c.created)
		}
	}
}

func TestRefusedCreateWritesNothing(t *testing.T) {
	s, _ := withSession(t)
	no := fail.New(fail.Conflict, "full")
	other := row("two")
	other.RepoKey = "github.com/o/other"
	_, created, err := s.Create(t.Context(), other, event("made", 0), func(others []store.Session) error {
		if len(others) != 1 || others[0].ID != "one" {
			t.Errorf("sessions passed to admit = %+v, want one alone", others)
		}
		return no
	})
	if created || !errors.Is(err, no) {
		t.Fatalf("refused Create = %t, %v, want false, %v", created, err, no)
	}
	if rows, err := s.Sessions(t.Context(), true); err != nil || len(rows) != 1 {
		t.Fatalf("Sessions after a refused Create = %+v, %v, want 1", rows, err)
	}
	if seq := lastSeq(t, s, "two"); seq != 0 {
		t.Fatalf("last event of the refused session = %d, want 0", seq)
	}

	// If an event is refused, its row is not inserted either.
	if _, created, err := s.Create(t.Context(), other, store.Event{Kind: "big", Data: make([]byte, 64<<10+1)}, admitAll); err == nil || created {
		t.Fatalf("Create with an oversized event = %t, %v, want false, an error", created, err)
	}
	if _, err := s.Session(t.Context(), "two"); fail.CodeOf(err) != fail.NotFound {
		t.Fatalf("Session(two), refused, = %v, want %v", err, fail.NotFound)
	}
}

func TestEventBound(t *testing.T) {
	s, _ := withSession(t)
	data := func(n int) []byte { return []byte(`"` + strings.Repeat("x", n-2) + `"`) }
	if err := s.Append(t.Context(), "one", store.Event{Kind: "most", Data: data(64 << 10)}); err != nil {
		t.Fatal(err)
	}
	if err := s.Append(t.Context(), "one", store.Event{Kind: "more", Data: data(64<<10 + 1)}); err == nil || !strings.Contains(err.Error(), "over the limit") {
		t.Fatalf("Append of an oversized event = %v, want \"over the limit\"", err)
	}
	_, err := s.Update(t.Context(), "one", func(r *store.Session) (store.Event, error) {
		r.Phase = "ready"
		return store.Event{Kind: "more", Data: data(64<<10 + 1)}, nil
	})
	if err == nil {
		t.Fatal("Advance with an oversized event = nil, want an error")
	}
	if r, err := s.Session(t.Context(), "one"); err != nil || r.Phase != "creating" {
		t.Fatalf("Session(one) = %+v, %v, want phase creating", r, err)
	}
	if err := s.Append(t.Context(), "nobody", event("x", 0)); err == nil {
		t.Fatal("Append to an unknown session = nil, want an error")
	}
}

func TestFollow(t *testing.T) {
	s, path := withSession(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	p := spawn(t, "count 300", path)
	p.shoot(t)
	want := int64(1) // after the first event
	for ev, err := range s.Follow(ctx, "one", 1) {
		if err != nil {
			t.Fatal(err)
		}
		if want++; ev.Seq != want {
			t.Fatalf("followed event = %d, want %d", ev.Seq, want)
		}
		if want == 301 {
			break
		}
	}
	if out, err := p.finish(); err != nil {
		t.Fatalf("child: %v, output %q", err, out)
	}

	cancel() // the end is reported once, as the context's error
	ends := 0
	for _, err := range s.Follow(ctx, "one", 301) {
		if ends++; !errors.Is(err, context.Canceled) {
			t.Fatalf("end of Follow = %v, want %v", err, context.Canceled)
		}
	}
	if ends != 1 {
		t.Fatalf("errors from Follow = %d, want 1", ends)
	}
}

func TestDamagedStore(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "store.db")
	junk := strings.Repeat("this is not a database\n", 500)
	if err := os.WriteFile(path, []byte(junk), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := store.Open(t.Context(), path)
	hostError(t, err)
	if kept, err := os.ReadFile(path); err != nil || string(kept) != junk {
		t.Fatalf("damaged file after Open = %q, %v, want it unchanged", kept, err)
	}
}

// Overwritten pages are detected when they are read, long after Open.
func TestStoreDamagedInside(t *testing.T) {
	s, path := withSession(t)
	for range 200 {
		if _, err := increment(t.Context(), s, "one"); err != nil {
			t.Fatal(err)
		}
	}
	checkpoint(t, path)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	const page = 4096
	for _, n := range roots(t, path) {
		if _, err := f.WriteAt([]byte(strings.Repeat("garbage!", page/8)), (n-1)*page); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, path)
	_, err = s.Events(t.Context(), "one", 0, 1000)
	hostError(t, err)
	_, err = s.Sessions(t.Context(), true)
	hostError(t, err)
	_, err = increment(t.Context(), s, "one")
	hostError(t, err)
	if !strings.Contains(fail.HintOf(err), path+"-*") {
		t.Fatalf("hint for a damaged store = %q, want it to contain %q", fail.HintOf(err), path+"-*")
	}
}

// checkpoint moves everything from the log into the database file.
func checkpoint(t testing.TB, path string) {
	t.Helper()
	raw(t, path, "PRAGMA wal_checkpoint(TRUNCATE)")
}

// roots returns the first pages of all tables and indexes. The schema itself is elsewhere.
func roots(t *testing.T, path string) (pages []int64) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.QueryContext(t.Context(), "SELECT rootpage FROM sqlite_master WHERE rootpage > 1")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var n int64
		if err := rows.Scan(&n); err != nil {
			t.Fatal(err)
		}
		pages = append(pages, n)
	}
	if err := rows.Err(); err != nil || len(pages) == 0 {
		t.Fatalf("pages of tables = %v, %v, want some", pages, err)
	}
	return pages
}

func raw(t testing.TB, path, stmt string) {
	t.Helper()
	if err := execute(t.Context(), path, stmt); err != nil {
		t.Fatal(err)
	}
}

func execute(ctx context.Context, path, stmt string) error {
	db, err := sql.Open("sqlite", path)
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = db.ExecContext(ctx, stmt)
	return err
}

// A process that is stopped within a transaction blocks only writers.
func TestReadersNeedNoWriter(t *testing.T) {
	s, path := withSession(t)
	_, err := s.Update(t.Context(), "one", func(row *store.Session) (store.Event, error) {
		row.Desired = "changed"
		seen, err := reopen(t, path).Session(t.Context(), "one")
		if err != nil || seen.Desired == "changed" {
			t.Errorf("Session(one) during a write: desired phase = %q, %v, want the committed one", seen.Desired, err)
		}
		return store.Event{}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestNewerSchema(t *testing.T) {
	s, path := withSession(t)
	raw(t, path, "PRAGMA user_version = 99")
	_, err := store.Open(t.Context(), path)
	hostError(t, err)
	if !strings.Contains(err.Error(), "newer version") {
		t.Fatalf("Open of a newer schema = %v, want \"newer version\"", err)
	}
	finishTx(t, s)
}

func TestUnwritableStore(t *testing.T) {
	t.Run("directory", func(t *testing.T) {
		dir := t.TempDir()
		file := filepath.Join(dir, "file")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := store.Open(t.Context(), filepath.Join(file, "state", "store.db"))
		hostError(t, err)
	})
	t.Run("is a directory", func(t *testing.T) {
		_, err := store.Open(t.Context(), t.TempDir())
		hostError(t, err)
	})
	// Root may write anywhere, so a child process without root tries.
	t.Run("file of another user", func(t *testing.T) {
		s, path := withSession(t)
		for dir := filepath.Dir(path); dir != filepath.Dir(os.TempDir()) && dir != "/"; dir = filepath.Dir(dir) {
			if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm()&0o055 == 0o055 {
				break
			} else if err := os.Chmod(dir, 0o555); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(path, 0o444); err != nil {
			t.Fatal(err)
		}
		p := spawn(t, "unprivileged", path)
		p.shoot(t)
		out, err := p.finish()
		if err == nil || len(out) != 1 || !strings.HasPrefix(out[0], "error 5 ") || strings.HasPrefix(out[0], `error 5 "" `) {
			t.Fatalf("child with an unwritable store = %v, output %q, want one line: error 5 with a hint", err, out)
		}
		if err := os.Chmod(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		finishTx(t, s)
	})
}

func TestFullDisk(t *testing.T) {
	s, path := withSession(t)
	for range 20 {
		if _, err := increment(t.Context(), s, "one"); err != nil {
			t.Fatal(err)
		}
	}
	p := spawn(t, "small-files 600000", path)
	p.shoot(t)
	out, err := p.finish()
	if err == nil || len(out) < 2 {
		t.Fatalf("child on a full disk = nil or %d lines, want an error after some lines", len(out))
	}
	if last := out[len(out)-1]; !strings.HasPrefix(last, "error 5 \"df -h ") {
		t.Fatalf("last line of the child on a full disk = %q, want error 5 with hint \"df -h …\"", last)
	}
	if n := finishTx(t, s); n != 20+len(out)-1 {
		t.Fatalf("transactions stored after the disk was full = %d, want the %d acknowledged ones", n-20, len(out)-1)
	}
	// Once space is available again, work continues.
	if _, err := increment(t.Context(), s, "one"); err != nil {
		t.Fatal(err)
	}
	finishTx(t, s)
}

func TestOnlyTheOwnerReads(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "store.db")
	reopen(t, path)
	for name, want := range map[string]os.FileMode{dir: 0o700, path: 0o600} {
		if fi, err := os.Stat(name); err != nil || fi.Mode().Perm() != want {
			t.Errorf("mode of %s = %v, %v, want %v", name, fi.Mode(), err, want)
		}
	}
}

// A path with characters that are special to SQLite and URLs is still a path.
func TestOddPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a b?mode=memory#%20&ü", "store.db")
	s := reopen(t, path)
	if _, _, err := s.Create(t.Context(), row("one"), event("made", 0), admitAll); err != nil {
		t.Fatal(err)
	}
	finishTx(t, reopen(t, path))
}

// lastSeq returns the sequence number of a session's newest event, or 0 when it has
// none.
func lastSeq(t *testing.T, s *store.Store, id string) int64 {
	t.Helper()
	evs, err := s.Events(t.Context(), id, 0, 100_000)
	if err != nil {
		t.Fatal(err)
	}
	if len(evs) == 0 {
		return 0
	}
	return evs[len(evs)-1].Seq
}
