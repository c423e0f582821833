package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// A task of a cluster that this host has claimed is a row like any other. In addition, its events
// count, and are shown, only once they are in the cluster's log: if another host takes the task
// over, it continues from there. And nothing is written for it after the host's lease has ended.

// ErrFenced is returned, wrapped, by writes for a task of a cluster while this host has no lease.
var ErrFenced = errors.New("this host has lost touch with its cluster")

// Claim is this host's claim of a task of its cluster.
type Claim struct {
	Task     string
	Fence    uint64 // of the claim, in the cluster's log
	Revision uint64 // of the latest entry of the task that this host knows
	Shipped  int64  // events up to this one are in the log
}

// shown limits the events that are read of the subject ?1.
const shown = `coalesce((SELECT shipped FROM cluster_tasks WHERE task = ?1), 9223372036854775807)`

// fenced returns ErrFenced, wrapped, if the subject is a task of a cluster and the host's lease has
// ended.
func fenced(ctx context.Context, q queryer, subject string) error {
	var boot sql.NullString
	var until sql.NullInt64
	err := q.QueryRowContext(ctx, `SELECT l.boot, l.until FROM cluster_tasks c LEFT JOIN cluster_lease l ON l.one = 1 WHERE c.task = ?`, subject).Scan(&boot, &until)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	id, err := bootclock.ID()
	if err != nil {
		return err
	}
	if boot.String != id || bootclock.Now() >= time.Duration(until.Int64) {
		return fail.New(fail.Host, "write for task %s: %w", subject, ErrFenced).WithHint("agent-sessionizer cluster show")
	}
	return nil
}

// SetLease records until when this host may write for tasks of its cluster, as a time of
// bootclock in this boot.
func (s *Store) SetLease(ctx context.Context, until time.Duration) error {
	boot, err := bootclock.ID()
	if err != nil {
		return err
	}
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO cluster_lease (one, boot, until) VALUES (1, ?, ?) ON CONFLICT (one) DO UPDATE SET boot = excluded.boot, until = excluded.until`, boot, int64(until))
		return err
	})
}

// ImportTask adds a task that this host has claimed, with the events that the cluster's log has of
// it. Repeating it for the same claim changes nothing.
func (s *Store) ImportTask(ctx context.Context, n Task, text []byte, evs []Event, c Claim) error {
	for i, ev := range evs {
		if ev.Seq != int64(i)+1 || len(ev.Data) > maxEvent {
			return fmt.Errorf("import task %s: event %d of the cluster's log has the sequence %d and %d bytes", n.ID, i+1, ev.Seq, len(ev.Data))
		}
	}
	c.Task, c.Shipped = n.ID, int64(len(evs))
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		was, err := claim(ctx, tx, n.ID)
		switch {
		case err == nil && was.Fence == c.Fence:
			return nil
		case err == nil:
			return fail.New(fail.Conflict, "import task %s: this host has an earlier claim of it", n.ID)
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		if err := unused(ctx, tx, n.ID); err != nil {
			return err
		}
		if err := insertTask(ctx, tx, n, text); err != nil {
			return err
		}
		for _, ev := range evs {
			if _, err := tx.ExecContext(ctx, `INSERT INTO events (subject, seq, at, kind, data) VALUES (?, ?, ?, ?, ?)`,
				n.ID, ev.Seq, ev.At.UnixMilli(), ev.Kind, string(ev.Data)); err != nil {
				return fmt.Errorf("import event %d of task %s: %w", ev.Seq, n.ID, err)
			}
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO cluster_tasks (task, fence, revision, shipped) VALUES (?, ?, ?, ?)`, c.Task, c.Fence, c.Revision, c.Shipped)
		return err
	})
}

func claim(ctx context.Context, q queryer, task string) (Claim, error) {
	return scanClaim(q.QueryRowContext(ctx, `SELECT task, fence, revision, shipped FROM cluster_tasks WHERE task = ?`, task))
}

func scanClaim(row scanner) (c Claim, err error) {
	err = row.Scan(&c.Task, &c.Fence, &c.Revision, &c.Shipped)
	return c, err
}

// Claims returns all claims of this host.
func (s *Store) Claims(ctx context.Context) (all []Claim, err error) {
	err = s.db.retryBusy(ctx, func() error {
		all, err = collect(ctx, s.db.sql, scanClaim, `SELECT task, fence, revision, shipped FROM cluster_tasks`)
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
		case errors.Is(err, sql.ErrNoRows) && want >= 0:
			return fail.New(fail.Host, "task %s: %w", task, ErrFenced)
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
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		r, err := tx.ExecContext(ctx, `UPDATE cluster_tasks SET revision = ?, shipped = ? WHERE task = ? AND fence = ? AND revision = ? AND shipped = ?`,
			revision, shipped, c.Task, c.Fence, c.Revision, c.Shipped)
		if err != nil {
			return err
		}
		if n, err := r.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("the claim of task %s: %w", c.Task, ErrStale))
		}
		return nil
	})
}

// DisownTask removes a task that is no longer this host's, with all of its events. The cluster's log
// has those that count.
func (s *Store) DisownTask(ctx context.Context, c Claim) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		was, err := claim(ctx, tx, c.Task)
		if errors.Is(err, sql.ErrNoRows) || err == nil && was.Fence != c.Fence {
			return nil
		}
		if err != nil {
			return err
		}
		for _, q := range []string{
			`DELETE FROM task_labels WHERE task = (SELECT num FROM tasks WHERE id = ?)`, `DELETE FROM tasks WHERE id = ?`,
			`DELETE FROM task_texts WHERE task = ?`, `DELETE FROM events WHERE subject = ?`, `DELETE FROM cluster_tasks WHERE task = ?`,
		} {
			if _, err := tx.ExecContext(ctx, q, c.Task); err != nil {
				return fmt.Errorf("remove task %s: %w", c.Task, err)
			}
		}
		return nil
	})
}
