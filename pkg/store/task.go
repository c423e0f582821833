package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Task is a row. Times are UTC with millisecond resolution.
type Task struct {
	ID             string
	Name           string // as in its manifest; not unique
	Phase          string
	Desired        string // the desired state
	Priority       int    // in the queue, highest first; never changes
	SessionID      string // the session it runs in, "" before it has one
	Parent         string // for a subtask, the task or session that submitted it; never changes
	Root           string // the task or session at the top of a subtask's tree; never changes
	Depth          int    // 1 for a subtask of the root; never changes
	Host           string // of the cluster, that has the task: "" for this one, Waiting for none yet
	CreatedAt      time.Time
	StateChangedAt time.Time
	ErrorCode      string // "" when nothing failed
	ErrorMessage   string
	ErrorHint      string
	Labels         map[string]string // never change
	Status         json.RawMessage   // the task's status
	Manifest       json.RawMessage   // what was asked for; never changes
}

// SetError records the parts of an error on the row; empty strings clear it.
func (t *Task) SetError(code, message, hint string) {
	t.ErrorCode, t.ErrorMessage, t.ErrorHint = code, message, hint
}

func (t *Task) title() string                { return "task " + t.ID }
func (t *Task) state() (*string, *time.Time) { return &t.Phase, &t.StateChangedAt }

const taskColumns = `num, id, name, phase, desired, priority, session, created_at, state_changed_at, error_code, error_message, error_hint, labels, status, manifest, parent, root, depth, host`

func scanTask(row scanner) (Task, error) {
	var t Task
	var num, created, changed int64
	var labels, status, manifest string
	err := row.Scan(&num, &t.ID, &t.Name, &t.Phase, &t.Desired, &t.Priority, &t.SessionID, &created, &changed,
		&t.ErrorCode, &t.ErrorMessage, &t.ErrorHint, &labels, &status, &manifest, &t.Parent, &t.Root, &t.Depth, &t.Host)
	if err != nil {
		return Task{}, err
	}
	t.CreatedAt, t.StateChangedAt = moment(created), moment(changed)
	t.Status, t.Manifest = json.RawMessage(status), json.RawMessage(manifest)
	if err := json.Unmarshal([]byte(labels), &t.Labels); err != nil {
		return Task{}, fmt.Errorf("read labels of task %s: %w", t.ID, err)
	}
	return t, nil
}

func (t *Task) load(ctx context.Context, q queryer, id string) (err error) {
	*t, err = scanTask(q.QueryRowContext(ctx, `SELECT `+taskColumns+` FROM tasks WHERE id = ?`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return fail.New(fail.NotFound, "no task %s", id)
	}
	return err
}

func (t *Task) save(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, `UPDATE tasks SET phase = ?, desired = ?, session = ?, state_changed_at = ?, error_code = ?, error_message = ?, error_hint = ?, status = ? WHERE id = ?`,
		t.Phase, t.Desired, t.SessionID, t.StateChangedAt.UnixMilli(), t.ErrorCode, t.ErrorMessage, t.ErrorHint, string(t.Status), t.ID)
	return err
}

// CreateTask inserts n with ev as its first event, and text as what was submitted;
// text may be nil. The store sets the times.
func (s *Store) CreateTask(ctx context.Context, n Task, text []byte, ev Event) (Task, error) {
	return s.createTask(ctx, n, text, ev, func(*sql.Tx) error { return nil })
}

func (s *Store) createTask(ctx context.Context, n Task, text []byte, ev Event, admit func(*sql.Tx) error) (row Task, err error) {
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		if err := unused(ctx, tx, n.ID); err != nil {
			return err
		}
		if err := admit(tx); err != nil {
			return err
		}
		n.CreatedAt = now()
		n.StateChangedAt = n.CreatedAt
		if err := insertTask(ctx, tx, n, text); err != nil {
			return err
		}
		if err := appendEvents(ctx, tx, n.ID, []Event{ev}); err != nil {
			return err
		}
		if n.Host != "" {
			if err := putClaim(ctx, tx, Claim{Task: n.ID, Submitted: true}); err != nil {
				return err
			}
		}
		return row.load(ctx, tx, n.ID)
	})
	return row, err
}

// insertTask adds the row of a task, its labels, and what was submitted.
func insertTask(ctx context.Context, tx *sql.Tx, n Task, text []byte) error {
	labels, err := json.Marshal(n.Labels)
	if err != nil {
		return err
	}
	if n.Status == nil {
		n.Status = json.RawMessage("{}")
	}
	res, err := tx.ExecContext(ctx, `INSERT INTO tasks (`+taskColumns+`) VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		n.ID, n.Name, n.Phase, n.Desired, n.Priority, n.SessionID, n.CreatedAt.UnixMilli(), n.StateChangedAt.UnixMilli(),
		n.ErrorCode, n.ErrorMessage, n.ErrorHint, string(labels), string(n.Status), string(n.Manifest), n.Parent, n.Root, n.Depth, n.Host)
	if err != nil {
		return fmt.Errorf("insert task %s: %w", n.ID, err)
	}
	num, err := res.LastInsertId()
	if err != nil {
		return err
	}
	for key, value := range n.Labels {
		if _, err := tx.ExecContext(ctx, `INSERT INTO task_labels (key, value, task) VALUES (?, ?, ?)`, key, value, num); err != nil {
			return fmt.Errorf("label task %s: %w", n.ID, err)
		}
	}
	if text != nil {
		if _, err := tx.ExecContext(ctx, `INSERT INTO task_texts (task, text) VALUES (?, ?)`, n.ID, text); err != nil {
			return fmt.Errorf("store text of task %s: %w", n.ID, err)
		}
	}
	return nil
}

// TaskText returns the submitted text as it was written, or nil when none was.
func (s *Store) TaskText(ctx context.Context, id string) (text []byte, err error) {
	err = s.db.retryBusy(ctx, func() error {
		err := s.db.sql.QueryRowContext(ctx, `SELECT text FROM task_texts WHERE task = ?`, id).Scan(&text)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		return err
	})
	return text, err
}

// Task returns one row, or fail.NotFound when it does not exist.
func (s *Store) Task(ctx context.Context, id string) (row Task, err error) {
	err = s.db.retryBusy(ctx, func() error { return row.load(ctx, s.db.sql, id) })
	return row, err
}

// UpdateTask does for tasks what Update does for sessions: f may change Phase, Desired,
// SessionID, error and Status. It returns any number of events.
func (s *Store) UpdateTask(ctx context.Context, id string, f func(*Task) ([]Event, error)) (Task, error) {
	return update(ctx, s, id, f)
}

// AdvanceTask does for tasks what Advance does for sessions.
func (s *Store) AdvanceTask(ctx context.Context, id, from, to string, ev Event, change func(*Task)) (Task, error) {
	return update(ctx, s, id, advance(from, to, ev, change))
}

// TaskFilter selects tasks; all of its nonzero fields must match.
type TaskFilter struct {
	Phases      []string // any of these
	Name        string
	IDPrefix    string
	Label       Label
	Here        bool   // only those that this host has
	OldestFirst bool   // instead of newest first
	After       string // id of a task: only those that come after it, for the next page
	Limit       int    // 0 means all
}

// Label is one of a task's labels. Without a key it matches every task.
type Label struct{ Key, Value string }

// Tasks returns the tasks that match the filter, in the order of their creation.
func (s *Store) Tasks(ctx context.Context, f TaskFilter) (rows []Task, err error) {
	err = s.db.retryBusy(ctx, func() error {
		after := int64(math.MaxInt64)
		if f.OldestFirst {
			after = 0
		}
		if f.After != "" {
			err := s.db.sql.QueryRowContext(ctx, `SELECT num FROM tasks WHERE id = ?`, f.After).Scan(&after)
			if errors.Is(err, sql.ErrNoRows) {
				return fail.New(fail.NotFound, "no task %s", f.After)
			}
			if err != nil {
				return err
			}
		}
		query, args := f.query(after)
		rows, err = collect(ctx, s.db.sql, scanTask, query, args...)
		return err
	})
	return rows, err
}

// query returns the statement for the tasks that come after the one with that num. It
// names the index to use: SQLite has no statistics here and may consider sorting all
// rows cheaper. So the statement reads only the rows it returns, and those that match
// its first condition but not another.
func (f TaskFilter) query(after int64) (query string, args []any) {
	type condition struct {
		from, num string // where to read when this is the first condition
		where     string
		args      []any
	}
	var all []condition
	if f.Label.Key != "" {
		all = append(all, condition{`task_labels CROSS JOIN tasks ON num = task`, `task`, `key = ? AND value = ?`, []any{f.Label.Key, f.Label.Value}})
	}
	if f.IDPrefix != "" {
		all = append(all, condition{`tasks INDEXED BY tasks_by_id`, `num`, `id >= ? AND id < ?`, []any{f.IDPrefix, f.IDPrefix + "\U0010ffff"}})
	}
	if f.Name != "" {
		all = append(all, condition{`tasks INDEXED BY tasks_by_name`, `num`, `name = ?`, []any{f.Name}})
	}
	var ways []condition // merged into one result
	phases := slices.Compact(slices.Sorted(slices.Values(f.Phases)))
	switch {
	case len(all) > 0:
		if len(phases) > 0 {
			all = append(all, condition{where: `phase IN (SELECT value FROM json_each(?))`, args: []any{list(phases)}})
		}
		ways, all = all[:1], all[1:]
	case len(phases) > 0:
		for _, phase := range phases {
			if f.Here {
				ways = append(ways, condition{`tasks INDEXED BY tasks_here`, `num`, `phase = ? AND host = ''`, []any{phase}})
			} else {
				ways = append(ways, condition{`tasks INDEXED BY tasks_by_phase`, `num`, `phase = ?`, []any{phase}})
			}
		}
	default:
		ways = []condition{{`tasks NOT INDEXED`, `num`, `true`, nil}}
	}
	if f.Here {
		all = append(all, condition{where: `host = ''`})
	}

	beyond, order := ` < ?`, ` DESC`
	if f.OldestFirst {
		beyond, order = ` > ?`, ` ASC`
	}
	var arms []string
	for _, w := range ways {
		arm := `SELECT ` + taskColumns + ` FROM ` + w.from + ` WHERE ` + w.where + ` AND ` + w.num + beyond
		args = append(append(args, w.args...), after)
		for _, c := range all {
			arm, args = arm+` AND `+c.where, append(args, c.args...)
		}
		arms = append(arms, arm)
	}
	limit := f.Limit
	if limit <= 0 {
		limit = -1
	}
	return strings.Join(arms, ` UNION ALL `) + ` ORDER BY ` + ways[0].num + order + ` LIMIT ?`, append(args, limit)
}

// list returns a JSON list for json_each.
func list(all []string) string {
	b, err := json.Marshal(all)
	if err != nil {
		panic(err) // strings can always be encoded
	}
	return string(b)
}

// TaskCounts returns how many of this host's tasks are in each phase that has any.
func (s *Store) TaskCounts(ctx context.Context) (counts map[string]int, err error) {
	type count struct {
		phase string
		n     int
	}
	err = s.db.retryBusy(ctx, func() error {
		all, err := collect(ctx, s.db.sql, func(row scanner) (c count, err error) {
			err = row.Scan(&c.phase, &c.n)
			return c, err
		}, `SELECT phase, count(*) FROM tasks INDEXED BY tasks_here WHERE host = '' GROUP BY phase`)
		counts = make(map[string]int, len(all))
		for _, c := range all {
			counts[c.phase] = c.n
		}
		return err
	})
	return counts, err
}

// Queue says which tasks wait, and which tasks hold the slots that these wait for.
type Queue struct {
	Waiting string   // the phase
	Active  []string // the phases
}

// Admission is a task that may start.
type Admission struct {
	ID    string
	To    string // the phase that it goes to
	Event Event  // describes the change
}

// Admit lets decide choose which waiting tasks start, and moves them, in one
// transaction: no two processes can give away the same free slot. active are the
// tasks that hold a slot, oldest first. waiting yields subtasks before other tasks, each
// with the highest priority first, and the oldest first within a priority; it is read
// only as far as decide iterates.
// decide must be quick, must not use the store, and may run more than once. Admit
// returns the ids of the admitted tasks.
func (s *Store) Admit(ctx context.Context, q Queue, decide func(active []Task, waiting iter.Seq[Task]) ([]Admission, error)) (admitted []string, err error) {
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		admitted = nil
		active, err := collect(ctx, tx, scanTask, activeQuery, list(q.Active))
		if err != nil {
			return err
		}
		var trouble error
		next, err := decide(active, func(yield func(Task) bool) { trouble = walkQueue(ctx, tx, q.Waiting, yield) })
		if trouble != nil {
			return trouble
		}
		if err != nil {
			return err
		}
		for _, a := range next {
			var t Task
			if err := t.load(ctx, tx, a.ID); err != nil {
				return err
			}
			if err := change(ctx, tx, a.ID, &t, advance[Task](q.Waiting, a.To, a.Event, nil)); err != nil {
				return err
			}
			admitted = append(admitted, a.ID)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return admitted, nil
}

const (
	activeQuery = `SELECT ` + taskColumns + ` FROM tasks INDEXED BY tasks_here WHERE phase IN (SELECT value FROM json_each(?)) AND host = '' ORDER BY num`
	queueQuery  = `SELECT ` + taskColumns + ` FROM tasks INDEXED BY task_queue WHERE phase = ? AND host = '' AND parent = '' ORDER BY priority DESC, num`
	// subtaskQuery selects the subtasks of the queue.
	subtaskQuery = `SELECT ` + taskColumns + ` FROM tasks INDEXED BY subtask_queue WHERE phase = ? AND parent <> '' AND host = '' ORDER BY priority DESC, num`
)

// walkQueue yields the tasks that wait in phase, in the queue's order.
func walkQueue(ctx context.Context, q queryer, phase string, yield func(Task) bool) error {
	more := true
	for _, query := range []string{subtaskQuery, queueQuery} {
		if err := walk(ctx, q, query, phase, func(t Task) bool { more = yield(t); return more }); err != nil || !more {
			return err
		}
	}
	return nil
}

func walk(ctx context.Context, q queryer, query, phase string, yield func(Task) bool) error {
	rows, err := q.QueryContext(ctx, query, phase)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		t, err := scanTask(rows)
		if err != nil {
			return err
		}
		if !yield(t) {
			return nil
		}
	}
	return rows.Err()
}
