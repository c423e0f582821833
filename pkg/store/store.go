// Package store is the truth: sessions, tasks and their events in one SQLite
// file, and the advisory locks that say which of them has a living keeper.
//
// It knows rows, not meaning: what a phase is and which one may follow which
// belongs to the packages session and task. It never holds a transaction across
// work. The clock may jump: times are told, and order nothing. Events are in the
// order of their sequence, tasks in that of their making.
package store

import (
	"context"
	"database/sql"
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

// Store is safe for concurrent use by goroutines and by processes.
type Store struct {
	db     *sql.DB
	path   string
	busy   time.Duration // how long a writer waits for others
	writes writes
	feed   feed
}

const (
	// busyTimeout is how long one writer waits for another's transaction.
	busyTimeout = 20 * time.Second
	// busyStep is the part of it that SQLite waits by itself. It does not see that
	// a context ends, so it waits in steps.
	busyStep = 500 * time.Millisecond
	// connections bounds what many readers cost in one process: a page cache each.
	connections = 8
)

// Open opens the database at path, makes it when it is missing, and brings its
// schema up to date.
func Open(ctx context.Context, path string) (*Store, error) { return open(ctx, path, busyTimeout) }

func open(ctx context.Context, path string, busy time.Duration) (*Store, error) {
	if err := privateDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	// FULL: an intent that was acknowledged survives a power cut. immediate:
	// a transaction that reads and then writes must not find itself locked out.
	q := url.Values{
		"_pragma": {fmt.Sprintf("busy_timeout(%d)", min(busy, busyStep).Milliseconds()), "journal_mode(WAL)", "synchronous(FULL)"},
		"_txlock": {"immediate"},
	}
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String())
	if err != nil {
		return nil, fmt.Errorf("open the store %s: %w", path, err)
	}
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections) // to open one costs more than most of what it is for
	db.SetConnMaxIdleTime(time.Minute)
	s := &Store{db: db, path: path, busy: busy, writes: writes{turn: make(chan struct{}, 1)}}
	if err := s.migrate(ctx); err != nil {
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

// migrate brings the schema up to date: all that is missing, or nothing. Those
// who open the file meanwhile wait.
func (s *Store) migrate(ctx context.Context) error {
	var have int
	version := func(q queryer) error { return q.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&have) }
	// Without the lock of writers first, one of whom may be stopped.
	if err := s.patiently(ctx, func() error { return version(s.db) }); err != nil || have == len(schema) {
		return err
	}
	return s.tx(ctx, func(tx *sql.Tx) error {
		if err := version(tx); err != nil {
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

// patiently calls f, and again while the file is busy: for writers that is while
// another process writes, for readers a moment after a crash. The change to WAL
// by the very first openers does not wait for the others as transactions do.
func (s *Store) patiently(ctx context.Context, f func() error) error {
	for end := time.Now().Add(s.busy); ; {
		err := f()
		e, ok := errors.AsType[*sqlite.Error](err)
		if !ok || e.Code()&0xff != sqlitelib.SQLITE_BUSY || time.Now().After(end) {
			return s.explain(ctx, err)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("store %s: %w", s.path, ctx.Err())
		}
	}
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
		return s.taken(err)
	}
	return fmt.Errorf("store %s: %w", s.path, err)
}

// Full reports whether err is the store's, for want of room on its disk.
func Full(err error) bool {
	e, ok := errors.AsType[*sqlite.Error](err)
	return ok && (e.Code()&0xff == sqlitelib.SQLITE_FULL || e.Code()&0xff == sqlitelib.SQLITE_IOERR)
}

func (s *Store) taken(err error) error {
	return fail.New(fail.Conflict, "the store %s is held by another writer: %w", s.path, err).WithHint("fuser -v %s", s.path)
}
