package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
)

// groupCommit implements group commit for the waiting writers of this process. One writer
// leads. Writers of several processes compete for SQLite's lock, in no fair order.
// Once the leader has that lock, it takes all writers that wait by then: one
// transaction, and one wait for the disk, serves them all.
type groupCommit struct {
	turn    chan struct{} // held by the leader
	mu      sync.Mutex
	waiting []*write
}

// write is one writer's request.
type write struct {
	ctx  context.Context
	f    func(*sql.Tx) error
	err  error
	done chan struct{} // closed when the write is on disk, or has failed with err
}

func (one *write) end(err error) {
	one.err = err
	close(one.done)
}

// atOnce is how many writes may share a transaction: other processes write too.
const atOnce = 64

func (w *groupCommit) join(one *write) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waiting = append(w.waiting, one)
}

// leave removes one from the queue and reports whether it was still waiting.
func (w *groupCommit) leave(one *write) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.Index(w.waiting, one)
	if i >= 0 {
		w.waiting = slices.Delete(w.waiting, i, i+1)
	}
	return i >= 0
}

// drain removes the writes that have waited longest from the queue and returns them.
func (w *groupCommit) drain() []*write {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := min(len(w.waiting), atOnce)
	taken := slices.Clone(w.waiting[:n])
	w.waiting = slices.Delete(w.waiting, 0, n)
	return taken
}

// tx runs f in a write transaction that others may share. If f fails, nothing of it
// is written; the failure of another write does not affect f. tx may run f more than
// once.
func (d *database) tx(ctx context.Context, f func(*sql.Tx) error) error {
	one := &write{ctx: ctx, f: f, done: make(chan struct{})}
	d.writes.join(one)
	late := time.NewTimer(d.busy)
	defer late.Stop()
	for {
		var cause error
		select {
		case <-one.done:
			return one.err
		case d.writes.turn <- struct{}{}:
			cause = d.commitGroup(one)
			<-d.writes.turn
		case <-late.C:
			cause = d.taken(errors.New("it belongs to this process"))
		case <-ctx.Done():
			cause = fmt.Errorf("store %s: %w", d.path, ctx.Err())
		}
		if cause == nil {
			continue // it is done, or belongs to the next group
		}
		if d.writes.leave(one) {
			return cause
		}
		<-one.done // it is being written, and will be answered
		return one.err
	}
}

// commitGroup writes what waits. It returns an error only if it could not begin a
// transaction. one is among the waiting writes until it is done.
func (d *database) commitGroup(one *write) error {
	select {
	case <-one.done:
		return nil
	default:
	}
	tx, err := d.begin(one.ctx)
	if err != nil {
		return err
	}
	all := d.writes.drain()
	if len(all) == 1 {
		all[0].end(d.explain(all[0].ctx, finishTx(tx, all[0].f)))
		return nil
	}
	if d.commitAll(tx, all) {
		return nil
	}
	for _, each := range all {
		each.end(d.commitOne(each))
	}
	return nil
}

// begin waits for other processes. The transaction does not end with ctx, because
// other writes may share it.
func (d *database) begin(ctx context.Context) (tx *sql.Tx, err error) {
	err = d.retryBusy(ctx, func() error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		tx, err = d.sql.BeginTx(context.WithoutCancel(ctx), nil)
		return err
	})
	return tx, err
}

func (d *database) commitOne(one *write) error {
	tx, err := d.begin(one.ctx)
	if err != nil {
		return err
	}
	return d.explain(one.ctx, finishTx(tx, one.f))
}

// finishTx runs f and ends the transaction.
func finishTx(tx *sql.Tx, f func(*sql.Tx) error) error {
	if err := f(tx); err != nil {
		_ = tx.Rollback() // the error of f is the one that matters
		return err
	}
	return commit(tx)
}

func commit(tx *sql.Tx) error {
	crash.Here(crash.BeforeCommit)
	err := tx.Commit()
	crash.Here(crash.AfterCommit)
	return err
}

// commitAll writes all in one transaction, each under its own savepoint. It reports
// false, and has written nothing, when SQLite gave up the whole transaction because
// of one write: on a full disk, or when a context ended within a statement.
func (d *database) commitAll(tx *sql.Tx, all []*write) bool {
	ctx := context.WithoutCancel(all[0].ctx)
	errs := make([]error, len(all))
	for i, one := range all {
		_, err := tx.ExecContext(ctx, `SAVEPOINT one`)
		if err == nil {
			if errs[i] = one.f(tx); errs[i] != nil {
				_, err = tx.ExecContext(ctx, `ROLLBACK TO one`)
			}
		}
		if err == nil {
			_, err = tx.ExecContext(ctx, `RELEASE one`)
		}
		if err != nil {
			_ = tx.Rollback() // SQLite has ended it already
			return false
		}
	}
	err := commit(tx)
	for i, one := range all {
		if errs[i] == nil {
			errs[i] = err
		}
		one.end(d.explain(one.ctx, errs[i]))
	}
	return true
}
