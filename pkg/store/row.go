package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// ErrStale is returned, wrapped with what changed, when the row is no longer in the
// phase that the caller saw.
var ErrStale = errors.New("another process changed it")

// record is a row with a phase: a session or a task. It covers what both have in
// common.
type record[R any] interface {
	*R
	load(ctx context.Context, q queryer, id string) error // fail.NotFound when the row does not exist
	save(ctx context.Context, tx *sql.Tx) error           // writes the mutable columns
	state() (phase *string, since *time.Time)
	title() string
}

// update passes the current row to f, which changes it and returns the events that
// describe the change. It stores both.
func update[R any, P record[R]](ctx context.Context, s *Store, id string, f func(P) ([]Event, error)) (R, error) {
	var row R
	err := s.db.tx(ctx, func(tx *sql.Tx) error {
		row = *new(R)
		if err := P(&row).load(ctx, tx, id); err != nil {
			return err
		}
		return change(ctx, tx, id, P(&row), f)
	})
	return row, err
}

// change does the work of update within its transaction.
func change[R any, P record[R]](ctx context.Context, tx *sql.Tx, id string, row P, f func(P) ([]Event, error)) error {
	phase, since := row.state()
	before := *phase
	evs, err := f(row)
	if err != nil {
		return err
	}
	if err := fenced(ctx, tx, id); err != nil {
		return err
	}
	if *phase != before {
		*since = now()
	}
	if err := row.save(ctx, tx); err != nil {
		return fmt.Errorf("update %s: %w", row.title(), err)
	}
	return appendEvents(ctx, tx, id, evs)
}

// advance returns the f for a change from one phase to another.
func advance[R any, P record[R]](from, to string, ev Event, adjust func(P)) func(P) ([]Event, error) {
	return func(row P) ([]Event, error) {
		phase, _ := row.state()
		if *phase != from {
			return nil, fmt.Errorf("%s is %s, not %s: %w", row.title(), *phase, from, ErrStale)
		}
		*phase = to
		if adjust != nil {
			adjust(row)
		}
		return eventList(ev), nil
	}
}

// eventList returns a list of ev, or an empty list for the zero Event.
func eventList(ev Event) []Event {
	if ev.Kind == "" {
		return nil
	}
	return []Event{ev}
}

// now returns the current time at the precision of the rows.
func now() time.Time { return time.Now().UTC().Truncate(time.Millisecond) }

func moment(ms int64) time.Time { return time.UnixMilli(ms).UTC() }

type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

type scanner interface{ Scan(...any) error }

// collect reads all rows of a query.
func collect[R any](ctx context.Context, q queryer, scan func(scanner) (R, error), query string, args ...any) ([]R, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	out := []R{}
	for rows.Next() {
		row, err := scan(rows)
		if err != nil {
			return nil, err
		}
		out = append(out, row)
	}
	return out, rows.Err()
}

// subjectExists reports whether id belongs to a session or a task.
func subjectExists(ctx context.Context, q queryer, id string) (is bool, err error) {
	err = q.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM sessions WHERE id = ?1 UNION ALL SELECT 1 FROM tasks WHERE id = ?1)`, id).Scan(&is)
	return is, err
}

// unused refuses an id that a session or a task already has, because their events
// would mix.
func unused(ctx context.Context, q queryer, id string) error {
	is, err := subjectExists(ctx, q, id)
	if err == nil && is {
		return fail.New(fail.Conflict, "id %s is in use", id)
	}
	return err
}
