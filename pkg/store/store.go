// Package store is the truth: sessions and their events in one SQLite file,
// and the advisory locks that say which session has a living keeper.
//
// It knows rows, not meaning: what a phase is and which one may follow which
// belongs to the package session. It never holds a transaction across work.
package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"

	sqlite "modernc.org/sqlite"
	sqlitelib "modernc.org/sqlite/lib"
)

// ErrStale is returned, wrapped, by Advance when the row is no longer in the
// phase that the caller saw.
var ErrStale = errors.New("session changed meanwhile")

// Store is safe for concurrent use by goroutines and by processes.
type Store struct {
	db   *sql.DB
	path string
}

// The schema only ever grows: a statement here must not change once released,
// a new version appends one. The pragma user_version counts those applied.
var schema = []string{
	`CREATE TABLE sessions (
		id               TEXT PRIMARY KEY,
		name             TEXT NOT NULL UNIQUE,
		repo_key         TEXT NOT NULL,
		repo             TEXT NOT NULL,
		phase            TEXT NOT NULL,
		want             TEXT NOT NULL,
		created_at       INTEGER NOT NULL,
		state_changed_at INTEGER NOT NULL,
		error_code       TEXT NOT NULL DEFAULT '',
		error_message    TEXT NOT NULL DEFAULT '',
		error_hint       TEXT NOT NULL DEFAULT '',
		spec             TEXT NOT NULL,
		facts            TEXT NOT NULL DEFAULT '{}',
		token_sha256     TEXT NOT NULL DEFAULT ''
	) STRICT;
	CREATE UNIQUE INDEX one_session_per_repo ON sessions(repo_key) WHERE phase <> 'gone';
	CREATE TABLE events (
		session TEXT NOT NULL REFERENCES sessions(id),
		seq     INTEGER NOT NULL,
		at      INTEGER NOT NULL,
		kind    TEXT NOT NULL,
		data    TEXT NOT NULL,
		PRIMARY KEY (session, seq)
	) STRICT, WITHOUT ROWID;`,
}

// busyTimeout is how long one process waits for another's transaction.
const busyTimeout = 20 * time.Second

// Open opens the database at path and makes it when it is missing.
func Open(ctx context.Context, path string) (*Store, error) {
	if err := privateDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	// FULL: an intent that was acknowledged survives a power cut. immediate:
	// a transaction that reads and then writes must not find itself locked out.
	q := url.Values{
		"_pragma": {fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()), "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)"},
		"_txlock": {"immediate"},
	}
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String())
	if err != nil {
		return nil, fmt.Errorf("open the store %s: %w", path, err)
	}
	s := &Store{db: db, path: path}
	if err := s.prepare(ctx); err != nil {
		_ = db.Close()
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = db.Close()
		return nil, fail.New(fail.Host, "protect the store: %w", err).WithHint("ls -l %s", path)
	}
	return s, nil
}

// privateDir makes dir, for its owner only. That covers the files next to the
// database too: SQLite makes them when it likes, with the umask's mode.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fail.New(fail.Host, "make the state directory: %w", err).WithHint("ls -ld %s", filepath.Dir(dir))
	}
	fi, err := os.Stat(dir)
	if err == nil && fi.Mode().Perm()&0o077 != 0 {
		err = os.Chmod(dir, 0o700)
	}
	if err != nil {
		return fail.New(fail.Host, "protect the state directory: %w", err).WithHint("ls -ld %s", dir)
	}
	return nil
}

// Close releases the database.
func (s *Store) Close() error { return s.db.Close() }

// prepare is migrate, again while the file is busy: the change to WAL that the
// very first openers make does not wait for the others as transactions do.
func (s *Store) prepare(ctx context.Context) error {
	for end := time.Now().Add(busyTimeout); ; {
		err := s.migrate(ctx)
		e, ok := errors.AsType[*sqlite.Error](err)
		if !ok || e.Code()&0xff != sqlitelib.SQLITE_BUSY || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Store) migrate(ctx context.Context) error {
	var have int
	err := s.db.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&have)
	if err != nil || have == len(schema) {
		return s.explain(ctx, err) // without the lock of writers, one of whom may be stopped
	}
	return s.tx(ctx, func(tx *sql.Tx) error {
		var have int
		if err := tx.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&have); err != nil {
			return err
		}
		if have > len(schema) {
			return fail.New(fail.Host, "the store was written by a newer version of agent-sessionizer (schema %d, this one knows %d)", have, len(schema)).
				WithHint("install the newer version")
		}
		for _, stmt := range schema[have:] {
			if _, err := tx.ExecContext(ctx, stmt); err != nil {
				return err
			}
		}
		if have == len(schema) {
			return nil
		}
		_, err := tx.ExecContext(ctx, fmt.Sprintf(`PRAGMA user_version = %d`, len(schema)))
		return err
	})
}

func (s *Store) tx(ctx context.Context, f func(*sql.Tx) error) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return s.explain(ctx, err)
	}
	if err := f(tx); err != nil {
		_ = tx.Rollback() // the error that matters is f's
		return s.explain(ctx, err)
	}
	return s.explain(ctx, tx.Commit())
}

// explain turns the file-level errors a user can do something about into hints,
// and SQLite's "interrupted" into the reason for it.
func (s *Store) explain(ctx context.Context, err error) error {
	e, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		return err
	}
	dir := filepath.Dir(s.path)
	switch e.Code() & 0xff {
	case sqlitelib.SQLITE_INTERRUPT:
		if ctx.Err() != nil {
			return fmt.Errorf("store %s: %w", s.path, ctx.Err())
		}
	case sqlitelib.SQLITE_FULL:
		return fail.New(fail.Host, "no disk space for the store %s: %w", s.path, err).WithHint("df -h %s", dir)
	case sqlitelib.SQLITE_IOERR:
		// Also what a full disk or a quota looks like, by way of mmap or EFBIG.
		return fail.New(fail.Host, "the store %s cannot be read or written: %w", s.path, err).WithHint("df -h %s", dir)
	case sqlitelib.SQLITE_NOTADB, sqlitelib.SQLITE_CORRUPT:
		// All of its files together: a log that outlives its database would be
		// played back into the next one.
		return fail.New(fail.Host, "the store %s is damaged: %w", s.path, err).
			WithHint("mkdir %[1]s.damaged && mv %[1]s %[1]s-* %[1]s.damaged/", s.path)
	case sqlitelib.SQLITE_READONLY, sqlitelib.SQLITE_CANTOPEN, sqlitelib.SQLITE_PERM:
		return fail.New(fail.Host, "the store %s cannot be written: %w", s.path, err).WithHint("ls -la %s", dir)
	case sqlitelib.SQLITE_BUSY, sqlitelib.SQLITE_LOCKED:
		return fail.New(fail.Conflict, "the store %s is held by another process: %w", s.path, err).WithHint("fuser -v %s", s.path)
	}
	return fmt.Errorf("store %s: %w", s.path, err)
}

// Session is a row. Times are UTC with millisecond resolution.
type Session struct {
	ID             string
	Name           string // the VM's name, unique for ever
	RepoKey        string // identity of the repository; unique among sessions that are not gone
	Repo           string // as shown to people
	Phase          string
	Want           string // the phase that was last asked for
	CreatedAt      time.Time
	StateChangedAt time.Time
	ErrorCode      string // of the last failure, "" when the last thing succeeded
	ErrorMessage   string
	ErrorHint      string
	Spec           json.RawMessage // what was asked for; never changes
	Facts          json.RawMessage // what became of it; written by the keeper and by intents
	TokenSHA256    string          // hex; "" once revoked
}

const sessionColumns = `id, name, repo_key, repo, phase, want, created_at, state_changed_at, error_code, error_message, error_hint, spec, facts, token_sha256`

func scanSession(row interface{ Scan(...any) error }) (Session, error) {
	var s Session
	var created, changed int64
	var spec, facts string
	err := row.Scan(&s.ID, &s.Name, &s.RepoKey, &s.Repo, &s.Phase, &s.Want, &created, &changed,
		&s.ErrorCode, &s.ErrorMessage, &s.ErrorHint, &spec, &facts, &s.TokenSHA256)
	s.CreatedAt, s.StateChangedAt = time.UnixMilli(created).UTC(), time.UnixMilli(changed).UTC()
	s.Spec, s.Facts = json.RawMessage(spec), json.RawMessage(facts)
	return s, err
}

// Session returns one row; fail.NotFound when there is none.
func (s *Store) Session(ctx context.Context, id string) (Session, error) {
	row, err := session(ctx, s.db, id)
	return row, s.explain(ctx, err)
}

type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func session(ctx context.Context, q queryer, id string) (Session, error) {
	row, err := scanSession(q.QueryRowContext(ctx, `SELECT `+sessionColumns+` FROM sessions WHERE id = ?`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return Session{}, fail.New(fail.NotFound, "no session %s", id)
	}
	return row, err
}

// Sessions returns the rows whose phase is not gone, oldest first; with gone, all rows.
func (s *Store) Sessions(ctx context.Context, gone bool) ([]Session, error) {
	rows, err := sessions(ctx, s.db, gone)
	return rows, s.explain(ctx, err)
}

func sessions(ctx context.Context, q queryer, gone bool) ([]Session, error) {
	rows, err := q.QueryContext(ctx, `SELECT `+sessionColumns+` FROM sessions WHERE ? OR phase <> 'gone' ORDER BY created_at, id`, gone)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := []Session{}
	for rows.Next() {
		row, err := scanSession(rows)
		if err != nil {
			return nil, err
		}
		out = append(out, row)
	}
	return out, rows.Err()
}

// Create inserts n, with ev as its first event, unless a session that is not
// gone has the same RepoKey, which is then returned instead. admit sees the
// other sessions in the same transaction and may refuse; it must be quick and
// must not use the store.
func (s *Store) Create(ctx context.Context, n Session, ev Event, admit func(others []Session) error) (row Session, created bool, err error) {
	err = s.tx(ctx, func(tx *sql.Tx) error {
		row, err = scanSession(tx.QueryRowContext(ctx, `SELECT `+sessionColumns+` FROM sessions WHERE repo_key = ? AND phase <> 'gone'`, n.RepoKey))
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		others, err := sessions(ctx, tx, false)
		if err != nil {
			return err
		}
		if err := admit(others); err != nil {
			return err
		}
		now := time.Now().UnixMilli()
		if _, err := tx.ExecContext(ctx, `INSERT INTO sessions (id, name, repo_key, repo, phase, want, created_at, state_changed_at, spec, token_sha256)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			n.ID, n.Name, n.RepoKey, n.Repo, n.Phase, n.Want, now, now, string(n.Spec), n.TokenSHA256); err != nil {
			return fmt.Errorf("insert session %s: %w", n.ID, err)
		}
		if err := appendEvent(ctx, tx, n.ID, ev); err != nil {
			return err
		}
		created = true
		row, err = session(ctx, tx, n.ID)
		return err
	})
	return row, created && err == nil, err
}

// SetError records err's parts on the row; empty strings clear it.
func (s *Session) SetError(code, message, hint string) {
	s.ErrorCode, s.ErrorMessage, s.ErrorHint = code, message, hint
}

// Update is the one way a row changes: f gets the current row, changes what may
// change (Phase, Want, error, Facts, TokenSHA256) and returns the event that
// tells of it, all in one transaction. A zero Event is not appended. f must be
// quick, must not use the store, and may run more than once.
func (s *Store) Update(ctx context.Context, id string, f func(*Session) (Event, error)) (Session, error) {
	var row Session
	err := s.tx(ctx, func(tx *sql.Tx) error {
		var err error
		if row, err = session(ctx, tx, id); err != nil {
			return err
		}
		phase := row.Phase
		ev, err := f(&row)
		if err != nil {
			return err
		}
		if row.Phase != phase {
			row.StateChangedAt = time.Now().UTC()
		}
		if _, err := tx.ExecContext(ctx, `UPDATE sessions SET phase = ?, want = ?, state_changed_at = ?, error_code = ?, error_message = ?, error_hint = ?, facts = ?, token_sha256 = ? WHERE id = ?`,
			row.Phase, row.Want, row.StateChangedAt.UnixMilli(), row.ErrorCode, row.ErrorMessage, row.ErrorHint, string(row.Facts), row.TokenSHA256, id); err != nil {
			return fmt.Errorf("update session %s: %w", id, err)
		}
		if ev.Kind == "" {
			return nil
		}
		return appendEvent(ctx, tx, id, ev)
	})
	return row, err
}

// Advance moves a session from one phase to another and appends the event:
// compare, set and append in one transaction. change may adjust the row
// further and may be nil. ErrStale when the session is no longer in from.
func (s *Store) Advance(ctx context.Context, id, from, to string, ev Event, change func(*Session)) (Session, error) {
	return s.Update(ctx, id, func(row *Session) (Event, error) {
		if row.Phase != from {
			return Event{}, fmt.Errorf("session %s is %s, not %s: %w", row.Name, row.Phase, from, ErrStale)
		}
		row.Phase = to
		if change != nil {
			change(row)
		}
		return ev, nil
	})
}
