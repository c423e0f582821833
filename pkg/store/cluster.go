package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
)

// Every host of a cluster has the rows and events of all tasks of the cluster: its own, and replicas
// of the others'. Nothing here writes to a replica but Replicate, with what the cluster's log has.
//
// A task that this host has claimed is a row like any other. In addition, its events count, and are
// shown, only once they are in the cluster's log: if another host takes the task over, it continues
// from there. And nothing is written for it after the host's lease has ended.

// Waiting is the Host of a task that no host of the cluster has yet.
const Waiting = "*"

// ErrFenced is returned, wrapped, by writes for a task of a cluster while this host has no lease.
var ErrFenced = errors.New("this host has lost touch with its cluster")

// ErrElsewhere is returned, wrapped, by writes for a task that another host of the cluster has, or
// none yet.
var ErrElsewhere = errors.New("another host of the cluster decides about it")

// Claim is what this host knows about the log of a task of its cluster.
type Claim struct {
	Task     string
	Fence    uint64 // of this host's claim of the task, in the cluster's log; 0 without one
	Revision uint64 // of the latest entry of the task that this host knows; 0 before the first
	Shipped  int64  // events up to this one are in the log
	Settled  bool   // this host has nothing more to write to the log

	Submitted bool // a user of this host submitted it; set by CreateTask only, whatever the log has
}

// shown limits the events that are read of the subject ?1.
const shown = `coalesce((SELECT shipped FROM cluster_tasks WHERE task = ?1), 9223372036854775807)`

// fenced returns ErrFenced or ErrElsewhere, wrapped, if the subject is a task of a cluster that this
// host may not write for now.
func fenced(ctx context.Context, q queryer, subject string) error {
	var fence uint64
	var boot sql.NullString
	var until sql.NullInt64
	err := q.QueryRowContext(ctx, `SELECT c.fence, h.boot, h.until FROM cluster_tasks c LEFT JOIN cluster_host h ON h.one = 1 WHERE c.task = ? AND (c.settled = 0 OR c.fence = 0)`, subject).
		Scan(&fence, &boot, &until)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	if fence == 0 {
		return fail.New(fail.Conflict, "write for task %s: %w", subject, ErrElsewhere)
	}
	if l := (Lease{Boot: boot.String, Until: time.Duration(until.Int64)}); !l.Valid(0) {
		return fail.New(fail.Host, "write for task %s: %w", subject, ErrFenced).WithHint("agent-sessionizer cluster show")
	}
	return nil
}

// CheckFence returns ErrFenced or ErrElsewhere, wrapped, if the task is one of a cluster that this
// host may not work on now.
func (s *Store) CheckFence(ctx context.Context, task string) error {
	return s.db.retryBusy(ctx, func() error { return fenced(ctx, s.db.sql, task) })
}

// Incarnation returns this host's incarnation in its cluster. The first call makes one.
func (s *Store) Incarnation(ctx context.Context) (is string, err error) {
	if l, err := s.Lease(ctx); err != nil || l.Incarnation != "" { // without the lock of writers
		return l.Incarnation, err
	}
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO cluster_host (one, incarnation) VALUES (1, ?) ON CONFLICT DO NOTHING`, ids.New()); err != nil {
			return err
		}
		return tx.QueryRowContext(ctx, `SELECT incarnation FROM cluster_host`).Scan(&is)
	})
	return is, err
}

// Reincarnate gives up all claims of this host, and begins another incarnation. It returns the tasks
// that the host had claimed.
func (s *Store) Reincarnate(ctx context.Context) (lost []string, err error) {
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		lost = nil
		claims, err := unsettled(ctx, tx)
		if err != nil {
			return err
		}
		for _, c := range claims {
			if c.Fence == 0 {
				continue
			}
			if err := disown(ctx, tx, c); err != nil {
				return err
			}
			lost = append(lost, c.Task)
		}
		_, err = tx.ExecContext(ctx, `UPDATE cluster_host SET incarnation = ?, until = 0`, ids.New())
		return err
	})
	return lost, err
}

// Lease is until when this host may write for tasks of its cluster.
type Lease struct {
	Incarnation string
	Boot        string        // id of the boot that Until counts from
	Until       time.Duration // on bootclock
}

// StopAfter is how long after the end of its lease a host stops the VMs of its tasks. Their guests send
// nothing from the end of the lease on; until then, they may not notice a short interruption.
const StopAfter = 15 * time.Second

// Left returns how long the lease is still valid, which is negative after its end. It returns false if
// the host got no lease since it booted.
func (l Lease) Left() (time.Duration, bool) {
	boot, err := bootclock.ID()
	return l.Until - bootclock.Now(), err == nil && l.Boot == boot && l.Until > 0
}

// Valid reports whether the lease, extended by a time, has not ended.
func (l Lease) Valid(extended time.Duration) bool {
	left, ok := l.Left()
	return ok && left+extended > 0
}

// Lease returns this host's lease, which is the zero Lease if it belongs to no cluster.
func (s *Store) Lease(ctx context.Context) (l Lease, err error) {
	err = s.db.retryBusy(ctx, func() error {
		var until int64
		err := s.db.sql.QueryRowContext(ctx, `SELECT incarnation, boot, until FROM cluster_host`).Scan(&l.Incarnation, &l.Boot, &until)
		if errors.Is(err, sql.ErrNoRows) {
			err = nil
		}
		l.Until = time.Duration(until)
		return err
	})
	return l, err
}

// SetLease records until when this host may write for tasks of its cluster, as a time of
// bootclock in this boot. It returns ErrStale, wrapped, if the host has another incarnation.
func (s *Store) SetLease(ctx context.Context, incarnation string, until time.Duration) error {
	boot, err := bootclock.ID()
	if err != nil {
		return err
	}
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		r, err := tx.ExecContext(ctx, `UPDATE cluster_host SET boot = ?, until = ? WHERE incarnation = ?`, boot, int64(until), incarnation)
		if err != nil {
			return err
		}
		if n, err := r.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("the lease of this host: %w", ErrStale))
		}
		return nil
	})
}

// Position returns how far this host has read the cluster's log of tasks.
func (s *Store) Position(ctx context.Context) (seq uint64, err error) {
	err = s.db.retryBusy(ctx, func() error {
		err := s.db.sql.QueryRowContext(ctx, `SELECT position FROM cluster_host`).Scan(&seq)
		if errors.Is(err, sql.ErrNoRows) {
			err = nil
		}
		return err
	})
	return seq, err
}

// Replica is a task after an entry of the cluster's log.
type Replica struct {
	Task     Task    // its Host must not be ""; Claims says which tasks are this host's
	Text     []byte  // what was submitted; nil except in the first entry
	Events   []Event // of the entry
	Newest   int64   // sequence of the task's newest event in the log
	Revision uint64  // of the entry
	Fence    uint64  // of this host's own claim, if the entry is that claim
	Files    string  // where the cluster has the task's files; "" if it has none yet
}

// Replicate stores tasks as the cluster's log has them up to a position. Entries that were stored
// before, and those of tasks that this host has claimed, are ignored.
func (s *Store) Replicate(ctx context.Context, all []Replica, position uint64) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		for _, r := range all {
			if err := replicate(ctx, tx, r); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, `UPDATE cluster_host SET position = max(position, ?)`, position)
		return err
	})
}

func replicate(ctx context.Context, tx *sql.Tx, r Replica) error {
	was, err := claim(ctx, tx, r.Task.ID)
	known := err == nil
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if known && (was.Fence != 0 && !was.Settled || r.Revision <= was.Revision) {
		return nil
	}
	if known {
		if err := r.Task.save(ctx, tx); err != nil {
			return err
		}
	} else {
		is, err := subjectExists(ctx, tx, r.Task.ID)
		if err != nil || is {
			return err // a task of this host alone: another host made up its id
		}
		if err := insertTask(ctx, tx, r.Task, r.Text); err != nil {
			return err
		}
	}
	if r.Fence != 0 {
		r.Task.Host = ""
	}
	if _, err := tx.ExecContext(ctx, `UPDATE tasks SET host = ? WHERE id = ?`, r.Task.Host, r.Task.ID); err != nil {
		return err
	}
	for _, ev := range r.Events {
		// An outgoing task has its first event.
		if _, err := tx.ExecContext(ctx, `INSERT INTO events (subject, seq, at, kind, data) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			r.Task.ID, ev.Seq, ev.At.UnixMilli(), ev.Kind, string(ev.Data)); err != nil {
			return fmt.Errorf("store event %d of task %s: %w", ev.Seq, r.Task.ID, err)
		}
	}
	if err := putClaim(ctx, tx, Claim{Task: r.Task.ID, Fence: r.Fence, Revision: r.Revision, Shipped: r.Newest, Settled: r.Fence == 0}); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `UPDATE cluster_tasks SET files = ? WHERE task = ?`, r.Files, r.Task.ID)
	return err
}

// TaskFiles returns where the cluster has the files of a task; "" if it has none.
func (s *Store) TaskFiles(ctx context.Context, task string) (files string, err error) {
	err = s.db.retryBusy(ctx, func() error {
		err := s.db.sql.QueryRowContext(ctx, `SELECT files FROM cluster_tasks WHERE task = ?`, task).Scan(&files)
		if errors.Is(err, sql.ErrNoRows) {
			err = nil
		}
		return err
	})
	return files, err
}

func putClaim(ctx context.Context, tx *sql.Tx, c Claim) error {
	_, err := tx.ExecContext(ctx, `INSERT INTO cluster_tasks (`+claimColumns+`) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (task)
		DO UPDATE SET fence = excluded.fence, revision = excluded.revision, shipped = excluded.shipped, settled = excluded.settled`,
		c.Task, c.Fence, c.Revision, c.Shipped, c.Settled, c.Submitted)
	return err
}

const claimColumns = `task, fence, revision, shipped, settled, submitted`

func claim(ctx context.Context, q queryer, task string) (Claim, error) {
	return scanClaim(q.QueryRowContext(ctx, `SELECT `+claimColumns+` FROM cluster_tasks WHERE task = ?`, task))
}

func scanClaim(row scanner) (c Claim, err error) {
	err = row.Scan(&c.Task, &c.Fence, &c.Revision, &c.Shipped, &c.Settled, &c.Submitted)
	return c, err
}

func unsettled(ctx context.Context, q queryer) ([]Claim, error) {
	return collect(ctx, q, scanClaim, `SELECT `+claimColumns+` FROM cluster_tasks INDEXED BY cluster_work WHERE settled = 0`)
}

// Claim returns what this host knows about the log of a task; false if the task is none of a
// cluster.
func (s *Store) Claim(ctx context.Context, task string) (c Claim, is bool, err error) {
	err = s.db.retryBusy(ctx, func() error {
		c, err = claim(ctx, s.db.sql, task)
		is = err == nil
		if errors.Is(err, sql.ErrNoRows) {
			err = nil
		}
		return err
	})
	return c, is, err
}

// TasksElsewhere returns the tasks in some phases that other hosts of the cluster have, by host, as far as
// this host knows. Those of this host's earlier incarnations are among them.
func (s *Store) TasksElsewhere(ctx context.Context, phases []string) (by map[string][]string, err error) {
	type row struct{ id, host string }
	err = s.db.retryBusy(ctx, func() error {
		rows, err := collect(ctx, s.db.sql, func(r scanner) (is row, err error) {
			err = r.Scan(&is.id, &is.host)
			return is, err
		}, `SELECT id, host FROM tasks INDEXED BY tasks_by_phase WHERE phase IN (SELECT value FROM json_each(?)) AND host NOT IN ('', ?)`, list(phases), Waiting)
		by = map[string][]string{}
		for _, r := range rows {
			by[r.host] = append(by[r.host], r.id)
		}
		return err
	})
	return by, err
}

// Unsettled returns the tasks for which this host has something to write to the cluster's log: those
// that it has claimed and that have not ended, and those that it has accepted and not sent yet.
func (s *Store) Unsettled(ctx context.Context) (all []Claim, err error) {
	err = s.db.retryBusy(ctx, func() error {
		all, err = unsettled(ctx, s.db.sql)
		return err
	})
	return all, err
}

// Unshipped returns the next events of a task that are not in the cluster's log, up to a number
// of bytes, with the task as it is after the last of all events.
func (s *Store) Unshipped(ctx context.Context, task string, bytes int) (c Claim, row Task, evs []Event, err error) {
	err = s.db.retryBusy(ctx, func() error {
		tx, err := s.db.sql.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
		if err != nil {
			return err
		}
		defer tx.Rollback() //nolint:errcheck // it only read
		if c, err = claim(ctx, tx, task); err != nil {
			return err
		}
		if err = row.load(ctx, tx, task); err != nil {
			return err
		}
		evs, err = storedEvents(ctx, tx, task, c.Shipped, followEvents, bytes)
		return err
	})
	if errors.Is(err, sql.ErrNoRows) {
		err = fail.New(fail.NotFound, "this host has no claim of task %s", task)
	}
	return c, row, evs, err
}

// WaitShipped waits until the events that a task has now are in the cluster's log. For a task that
// belongs to no cluster, it returns at once. The error is ErrFenced, wrapped, once this host may
// write no more for the task.
func (s *Store) WaitShipped(ctx context.Context, task string) error {
	w := s.Watch()
	defer w.Close()
	for want := int64(-1); ; {
		changed := w.Changed()
		var c Claim
		err := s.db.retryBusy(ctx, func() (err error) {
			if c, err = claim(ctx, s.db.sql, task); err != nil {
				return err
			}
			if want < 0 {
				if err := s.db.sql.QueryRowContext(ctx, `SELECT coalesce(max(seq), 0) FROM events WHERE subject = ?`, task).Scan(&want); err != nil {
					return err
				}
			}
			return fenced(ctx, s.db.sql, task)
		})
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return nil
		case err != nil:
			return err
		case c.Shipped >= want:
			return nil
		}
		select {
		case <-changed:
		case <-time.After(time.Second): // the lease may have ended
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Ship records that the cluster's log of a task continues up to a revision, and has its events up to
// shipped. It returns ErrStale, wrapped, if the claim was changed since it was read as c.
func (s *Store) Ship(ctx context.Context, c Claim, revision uint64, shipped int64) error {
	return s.changeClaim(ctx, c, `revision = ?, shipped = ?`, revision, shipped)
}

// Settle records that the task has ended, and that this host has nothing more to write for it.
// It returns ErrStale, wrapped, if the claim was changed since it was read as c.
func (s *Store) Settle(ctx context.Context, c Claim) error {
	return s.changeClaim(ctx, c, `settled = 1`)
}

func (s *Store) changeClaim(ctx context.Context, c Claim, set string, args ...any) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		r, err := tx.ExecContext(ctx, `UPDATE cluster_tasks SET `+set+` WHERE task = ? AND fence = ? AND revision = ? AND shipped = ?`,
			append(args, c.Task, c.Fence, c.Revision, c.Shipped)...)
		if err != nil {
			return err
		}
		if n, err := r.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("the claim of task %s: %w", c.Task, ErrStale))
		}
		return nil
	})
}

// Disown makes a task that is no longer this host's a replica. Its events that are not in the
// cluster's log are removed.
func (s *Store) Disown(ctx context.Context, c Claim) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		was, err := claim(ctx, tx, c.Task)
		if errors.Is(err, sql.ErrNoRows) || err == nil && was.Fence != c.Fence {
			return nil
		}
		if err != nil {
			return err
		}
		return disown(ctx, tx, was)
	})
}

func disown(ctx context.Context, tx *sql.Tx, c Claim) error {
	for _, q := range []struct {
		text string
		args []any
	}{
		{`UPDATE tasks SET host = ? WHERE id = ?`, []any{Waiting, c.Task}},
		{`DELETE FROM events WHERE subject = ? AND seq > ?`, []any{c.Task, c.Shipped}},
	} {
		if _, err := tx.ExecContext(ctx, q.text, q.args...); err != nil {
			return fmt.Errorf("give up task %s: %w", c.Task, err)
		}
	}
	c.Fence, c.Settled = 0, true
	return putClaim(ctx, tx, c)
}

// Wish is what a user of this host wants of a task that another host has.
type Wish struct{ Task, Desired string }

// AddWish records a wish, until Fulfil. A later wish for the same task replaces an earlier one.
func (s *Store) AddWish(ctx context.Context, w Wish) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO cluster_wishes (task, desired) VALUES (?, ?)`, w.Task, w.Desired)
		return err
	})
}

// Wishes returns the wishes that the cluster's log does not have yet.
func (s *Store) Wishes(ctx context.Context) (all []Wish, err error) {
	err = s.db.retryBusy(ctx, func() error {
		all, err = collect(ctx, s.db.sql, func(row scanner) (w Wish, err error) {
			err = row.Scan(&w.Task, &w.Desired)
			return w, err
		}, `SELECT task, desired FROM cluster_wishes`)
		return err
	})
	return all, err
}

// Fulfil removes a wish that is in the cluster's log.
func (s *Store) Fulfil(ctx context.Context, w Wish) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM cluster_wishes WHERE task = ? AND desired = ?`, w.Task, w.Desired)
		return err
	})
}
