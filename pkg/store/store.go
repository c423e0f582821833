// Package store is the source of truth: it holds sessions, tasks and their events in
// one SQLite file, and the advisory locks that show which of them have a living
// keeper.
//
// It knows rows, not their meaning: the packages session and task define the phases
// and their transitions. It never holds a transaction across other work. The clock
// may jump, so times are only displayed and never define an order: events are ordered
// by sequence number, and tasks by their creation.
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
	db       *database
	notifier notifier
}

// database is the open file. It runs transactions, and explains why they fail.
type database struct {
	sql    *sql.DB
	path   string
	busy   time.Duration // how long a writer waits for others
	writes groupCommit
}

const (
	// busyTimeout is how long one writer waits for another's transaction.
	busyTimeout = 20 * time.Second
	// busyStep is the part of busyTimeout that SQLite itself waits. SQLite does not
	// notice the end of a context, so the store waits in steps.
	busyStep = 500 * time.Millisecond
	// connections limits the memory that many readers cost in one process: each has a
	// page cache.
	connections = 8
)

// Open opens the database at path, creates it when it is missing, and brings its
// schema up to date.
func Open(ctx context.Context, path string) (*Store, error) { return open(ctx, path, busyTimeout) }

func open(ctx context.Context, path string, busy time.Duration) (*Store, error) {
	if err := privateDir(filepath.Dir(path)); err != nil {
		return nil, err
	}
	// synchronous(FULL): an acknowledged write survives a power cut. immediate: a
	// transaction that reads and then writes must not be locked out between the two.
	q := url.Values{
		"_pragma": {fmt.Sprintf("busy_timeout(%d)", min(busy, busyStep).Milliseconds()), "journal_mode(WAL)", "synchronous(FULL)"},
		"_txlock": {"immediate"},
	}
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String())
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", path, err)
	}
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections) // opening a connection costs more than most of its uses
	db.SetConnMaxIdleTime(time.Minute)
	d := &database{sql: db, path: path, busy: busy, writes: groupCommit{turn: make(chan struct{}, 1)}}
	if err := d.migrate(ctx); err != nil {
		_ = db.Close()
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = db.Close()
		return nil, fail.New(fail.Host, "protect store: %w", err).WithHint("ls -l %s", path)
	}
	return &Store{db: d}, nil
}

// privateDir creates dir, accessible only to its owner. This also protects the files
// next to the database, which SQLite creates at any time with the umask's mode.
func privateDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fail.New(fail.Host, "create state directory: %w", err).WithHint("ls -ld %s", filepath.Dir(dir))
	}
	fi, err := os.Stat(dir)
	if err == nil && fi.Mode().Perm()&0o077 != 0 {
		err = os.Chmod(dir, 0o700)
	}
	if err != nil {
		return fail.New(fail.Host, "protect state directory: %w", err).WithHint("ls -ld %s", dir)
	}
	return nil
}

// Close releases the database.
func (s *Store) Close() error { return s.db.sql.Close() }

// migrate brings the schema up to date, completely or not at all. Processes that open
// the file meanwhile wait.
func (d *database) migrate(ctx context.Context) error {
	var have int
	version := func(q queryer) error { return q.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&have) }
	// First without the writers' lock, because its holder may be stopped.
	if err := d.retryBusy(ctx, func() error { return version(d.sql) }); err != nil || have == len(schema) {
		return err
	}
	return d.tx(ctx, func(tx *sql.Tx) error {
		if err := version(tx); err != nil {
			return err
		}
		if have > len(schema) {
			return fail.New(fail.Host, "the store was written by a newer version of agent-sessionizer (schema %d, this version supports %d)", have, len(schema)).
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

// retryBusy calls f, and repeats it while the file is busy. For writers the file is
// busy while another process writes, for readers a moment after a crash. The very
// first openers' change to WAL mode does not wait for others as transactions do.
func (d *database) retryBusy(ctx context.Context, f func() error) error {
	for end := time.Now().Add(d.busy); ; {
		err := f()
		e, ok := errors.AsType[*sqlite.Error](err)
		if !ok || e.Code()&0xff != sqlitelib.SQLITE_BUSY || time.Now().After(end) {
			return d.explain(ctx, err)
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("store %s: %w", d.path, ctx.Err())
		}
	}
}

// explain adds hints to the file errors that a user can fix, and replaces SQLite's
// "interrupted" with its reason.
func (d *database) explain(ctx context.Context, err error) error {
	e, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		return err
	}
	dir := filepath.Dir(d.path)
	switch e.Code() & 0xff {
	case sqlitelib.SQLITE_INTERRUPT:
		if ctx.Err() != nil {
			return fmt.Errorf("store %s: %w", d.path, ctx.Err())
		}
	case sqlitelib.SQLITE_FULL:
		return fail.New(fail.Host, "no disk space for the store %s: %w", d.path, err).WithHint("df -h %s", dir)
	case sqlitelib.SQLITE_IOERR:
		// A full disk or a quota can also appear as this error, through mmap or
		// EFBIG.
		return fail.New(fail.Host, "the store %s cannot be read or written: %w", d.path, err).WithHint("df -h %s", dir)
	case sqlitelib.SQLITE_NOTADB, sqlitelib.SQLITE_CORRUPT:
		// Move all of its files together: a log that outlives its database would be
		// replayed into the next one.
		return fail.New(fail.Host, "the store %s is damaged: %w", d.path, err).
			WithHint("mkdir %[1]s.damaged && mv %[1]s %[1]s-* %[1]s.damaged/", d.path)
	case sqlitelib.SQLITE_READONLY, sqlitelib.SQLITE_CANTOPEN, sqlitelib.SQLITE_PERM:
		return fail.New(fail.Host, "the store %s cannot be written: %w", d.path, err).WithHint("ls -la %s", dir)
	case sqlitelib.SQLITE_BUSY, sqlitelib.SQLITE_LOCKED:
		return d.taken(err)
	}
	return fmt.Errorf("store %s: %w", d.path, err)
}

// Full reports whether err is the store's error for a full disk.
func Full(err error) bool {
	e, ok := errors.AsType[*sqlite.Error](err)
	return ok && (e.Code()&0xff == sqlitelib.SQLITE_FULL || e.Code()&0xff == sqlitelib.SQLITE_IOERR)
}

func (d *database) taken(err error) error {
	return fail.New(fail.Conflict, "the store %s is locked by another process: %w", d.path, err).WithHint("fuser -v %s", d.path)
}
