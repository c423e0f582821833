package store

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"
)

// Schema is the list of statements that versions have appended.
var Schema = schema

// These are the statements whose cost must not grow with the store.
var (
	ActiveQuery   = activeQuery
	QueueQuery    = queueQuery
	SessionsQuery = sessionsQuery(false)
)

// FollowBytes is the most that a follower holds at a time, including an oversized
// last event.
const FollowBytes = followBytes + maxEvent

// OpenBusy works like Open, with another busy timeout.
func OpenBusy(ctx context.Context, path string, busy time.Duration) (*Store, error) {
	return open(ctx, path, busy)
}

// Plan returns how SQLite executes a query, one step per line.
func (s *Store) Plan(ctx context.Context, query string, args ...any) (string, error) {
	steps, err := collect(ctx, s.db.sql, func(row scanner) (string, error) {
		var id, parent, unused int
		var detail string
		err := row.Scan(&id, &parent, &unused, &detail)
		return detail, err
	}, `EXPLAIN QUERY PLAN `+query, args...)
	return strings.Join(steps, "\n"), err
}

// PlanTasks returns the plan of Tasks.
func (s *Store) PlanTasks(ctx context.Context, f TaskFilter) (string, error) {
	query, args := f.query(5000)
	plan, err := s.Plan(ctx, query, args...)
	if err != nil {
		err = fmt.Errorf("%s: %w", query, err)
	}
	return plan, err
}

// Batch returns what a follower reads at a time.
func (s *Store) Batch(ctx context.Context, subject string, after int64) ([]Event, error) {
	return s.events(ctx, subject, after, followEvents, followBytes)
}

// Watched returns how many subjects are watched, and whether a watcher runs.
func (s *Store) Watched() (subjects int, running bool) {
	s.notifier.mu.Lock()
	defer s.notifier.mu.Unlock()
	if s.notifier.done != nil {
		select {
		case <-s.notifier.done:
		default:
			running = true
		}
	}
	return len(s.notifier.topics), running
}

// Connections returns how many connections are in use.
func (s *Store) Connections() int { return s.db.sql.Stats().InUse }

// Waiting returns how many writers of this process wait.
func (s *Store) Waiting() int {
	s.db.writes.mu.Lock()
	defer s.db.writes.mu.Unlock()
	return len(s.db.writes.waiting)
}

// Tx runs one write.
func (s *Store) Tx(ctx context.Context, f func(*sql.Tx) error) error { return s.db.tx(ctx, f) }

// Pragmas returns a pragma's value on each of the connections that a store has.
func (s *Store) Pragmas(ctx context.Context, name string) (values []string, err error) {
	for range connections {
		c, err := s.db.sql.Conn(ctx)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		var value string
		if err := c.QueryRowContext(ctx, `PRAGMA `+name).Scan(&value); err != nil {
			return nil, err
		}
		values = append(values, value)
	}
	return values, nil
}
