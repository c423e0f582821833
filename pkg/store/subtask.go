package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// Kin is a subtask, as far as the limits of its tree depend on it.
type Kin struct {
	ID, Parent, Phase string
	CreatedAt         time.Time
}

// Family is what the admission of a subtask depends on.
type Family struct {
	Parent, ParentDesired string // phase and desired phase of the parent
	Kin                   []Kin  // all subtasks of the tree that were ever created, oldest first
}

// CreateSubtask works like CreateTask for a task with a parent. admit decides in the same
// transaction, so no two submissions can both get the last place of a tree. It must be
// quick, must not use the store, and may run more than once. The parent gets the event
// note.
func (s *Store) CreateSubtask(ctx context.Context, n Task, text []byte, ev, note Event, admit func(Family) error) (Task, error) {
	return s.createTask(ctx, n, text, ev, func(tx *sql.Tx) error {
		f, err := family(ctx, tx, n.Parent, n.Root)
		if err != nil {
			return err
		}
		if err := admit(f); err != nil {
			return err
		}
		return appendEvents(ctx, tx, n.Parent, []Event{note})
	})
}

// Family returns what the admission of a subtask of parent depends on.
func (s *Store) Family(ctx context.Context, parent, root string) (f Family, err error) {
	err = s.db.retryBusy(ctx, func() error {
		f, err = family(ctx, s.db.sql, parent, root)
		return err
	})
	return f, err
}

func family(ctx context.Context, q queryer, parent, root string) (f Family, err error) {
	err = q.QueryRowContext(ctx, `SELECT phase, desired FROM tasks WHERE id = ?1 UNION ALL SELECT phase, desired FROM sessions WHERE id = ?1`, parent).
		Scan(&f.Parent, &f.ParentDesired)
	if err != nil {
		return f, fmt.Errorf("read parent %s: %w", parent, err)
	}
	f.Kin, err = collect(ctx, q, scanKin, `SELECT id, parent, phase, created_at FROM tasks INDEXED BY tasks_by_root WHERE root = ? AND root <> '' ORDER BY num`, root)
	return f, err
}

func scanKin(row scanner) (k Kin, err error) {
	var created int64
	err = row.Scan(&k.ID, &k.Parent, &k.Phase, &created)
	k.CreatedAt = moment(created)
	return k, err
}

// Kin returns all subtasks of a tree, oldest first.
func (s *Store) Kin(ctx context.Context, root string) (all []Kin, err error) {
	err = s.db.retryBusy(ctx, func() error {
		all, err = collect(ctx, s.db.sql, scanKin, `SELECT id, parent, phase, created_at FROM tasks INDEXED BY tasks_by_root WHERE root = ? AND root <> '' ORDER BY num`, root)
		return err
	})
	return all, err
}

// Subtasks returns the subtasks in any of these phases, oldest first.
func (s *Store) Subtasks(ctx context.Context, phases []string) (rows []Task, err error) {
	err = s.db.retryBusy(ctx, func() error {
		rows, err = collect(ctx, s.db.sql, scanTask, `SELECT `+taskColumns+` FROM tasks INDEXED BY subtask_queue
			WHERE phase IN (SELECT value FROM json_each(?)) AND parent <> '' AND host = '' ORDER BY num`, list(phases))
		return err
	})
	return rows, err
}
