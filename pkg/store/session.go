package store

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Session is a row. Times are UTC with millisecond resolution.
type Session struct {
	ID             string
	Name           string // the VM's name, unique forever
	RepoKey        string // identity of the repository
	Label          string // unique among the sessions of a repository that are not gone and belong to no task; never changes
	Repo           string // as shown to users
	Task           string // id of the task that owns the session, "" for a person's; never changes
	Phase          string
	Desired        string // the desired phase
	CreatedAt      time.Time
	StateChangedAt time.Time
	ErrorCode      string // of the last failure, "" when the last operation succeeded
	ErrorMessage   string
	ErrorHint      string
	Spec           json.RawMessage // what was asked for; never changes
	Status         json.RawMessage // the session's status; written by the keeper and by commands
	TokenSHA256    string          // hex; "" once revoked

	Used UsageSum // of models
}

// SetError records the parts of an error on the row; empty strings clear it.
func (s *Session) SetError(code, message, hint string) {
	s.ErrorCode, s.ErrorMessage, s.ErrorHint = code, message, hint
}

func (s *Session) title() string                { return "session " + s.Name }
func (s *Session) state() (*string, *time.Time) { return &s.Phase, &s.StateChangedAt }

const sessionColumns = `id, name, repo_key, label, repo, task, phase, desired, created_at, state_changed_at, error_code, error_message, error_hint, spec, status, token_sha256,
	(SELECT COUNT(*) FROM usage WHERE session = sessions.id), COALESCE((SELECT SUM(tokens) FROM usage WHERE session = sessions.id), 0),
	COALESCE((SELECT SUM(cost) FROM usage WHERE session = sessions.id), 0)`

func scanSession(row scanner) (Session, error) {
	var s Session
	var created, changed int64
	var spec, status string
	err := row.Scan(&s.ID, &s.Name, &s.RepoKey, &s.Label, &s.Repo, &s.Task, &s.Phase, &s.Desired, &created, &changed,
		&s.ErrorCode, &s.ErrorMessage, &s.ErrorHint, &spec, &status, &s.TokenSHA256, &s.Used.Requests, &s.Used.Tokens, &s.Used.Cost)
	s.CreatedAt, s.StateChangedAt = moment(created), moment(changed)
	s.Spec, s.Status = json.RawMessage(spec), json.RawMessage(status)
	return s, err
}

func (s *Session) load(ctx context.Context, q queryer, id string) (err error) {
	*s, err = scanSession(q.QueryRowContext(ctx, `SELECT `+sessionColumns+` FROM sessions WHERE id = ?`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return fail.New(fail.NotFound, "no session %s", id)
	}
	return err
}

func (s *Session) save(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, `UPDATE sessions SET phase = ?, desired = ?, state_changed_at = ?, error_code = ?, error_message = ?, error_hint = ?, status = ?, token_sha256 = ? WHERE id = ?`,
		s.Phase, s.Desired, s.StateChangedAt.UnixMilli(), s.ErrorCode, s.ErrorMessage, s.ErrorHint, string(s.Status), s.TokenSHA256, s.ID)
	return err
}

// Session returns one row, or fail.NotFound when it does not exist.
func (s *Store) Session(ctx context.Context, id string) (row Session, err error) {
	err = s.db.retryBusy(ctx, func() error { return row.load(ctx, s.db.sql, id) })
	return row, err
}

// Sessions returns the rows whose phase is not gone, oldest first; with gone, all
// rows.
func (s *Store) Sessions(ctx context.Context, gone bool) (rows []Session, err error) {
	err = s.db.retryBusy(ctx, func() error {
		rows, err = sessions(ctx, s.db.sql, gone)
		return err
	})
	return rows, err
}

func sessions(ctx context.Context, q queryer, gone bool) ([]Session, error) {
	return collect(ctx, q, scanSession, sessionsQuery(gone))
}

// sessionsQuery reads the live sessions by their index: these are few, while every
// task and every repository leaves rows that are gone.
func sessionsQuery(gone bool) string {
	where := ` WHERE phase <> 'gone'`
	if gone {
		where = ``
	}
	return `SELECT ` + sessionColumns + ` FROM sessions` + where + ` ORDER BY created_at, id`
}

// Create inserts n with ev as its first event, unless a matching session exists that
// is not gone; that one is then returned instead. If n has a task, the task's session
// matches. Otherwise a session with the same RepoKey and Label and no task does. A session with
// the same id matches in any case, even if it is gone. admit sees the
// other sessions in the same transaction and may refuse; it must be quick and must
// not use the store.
func (s *Store) Create(ctx context.Context, n Session, ev Event, admit func(others []Session) error) (row Session, created bool, err error) {
	same, of := `task = '' AND repo_key = ? AND label = ?`, []any{n.RepoKey, n.Label}
	if n.Task != "" {
		same, of = `task <> '' AND task = ?`, []any{n.Task} // the redundant condition makes SQLite use the index
	}
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		created = false // this function may run a second time
		if err = row.load(ctx, tx, n.ID); fail.CodeOf(err) != fail.NotFound {
			return err
		}
		row, err = scanSession(tx.QueryRowContext(ctx, `SELECT `+sessionColumns+` FROM sessions WHERE phase <> 'gone' AND `+same, of...))
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		if err := unused(ctx, tx, n.ID); err != nil {
			return err
		}
		others, err := sessions(ctx, tx, false)
		if err != nil {
			return err
		}
		if err := admit(others); err != nil {
			return err
		}
		made := now().UnixMilli()
		if _, err := tx.ExecContext(ctx, `INSERT INTO sessions (id, name, repo_key, label, repo, task, phase, desired, created_at, state_changed_at, spec, status, token_sha256)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			n.ID, n.Name, n.RepoKey, n.Label, n.Repo, n.Task, n.Phase, n.Desired, made, made, string(n.Spec), cmp.Or(string(n.Status), "{}"), n.TokenSHA256); err != nil {
			return fmt.Errorf("insert session %s: %w", n.ID, err)
		}
		if err := appendEvents(ctx, tx, n.ID, []Event{ev}); err != nil {
			return err
		}
		created = true
		return row.load(ctx, tx, n.ID)
	})
	return row, created && err == nil, err
}

// Update changes a row; no other function does. f gets the current row, changes its mutable
// fields (Phase, Desired, error, Status, TokenSHA256) and returns the event that
// describes the change, all in one transaction. A zero Event is not appended. f must
// be quick, must not use the store, and may run more than once.
func (s *Store) Update(ctx context.Context, id string, f func(*Session) (Event, error)) (Session, error) {
	return update(ctx, s, id, func(row *Session) ([]Event, error) {
		ev, err := f(row)
		return eventList(ev), err
	})
}

// Advance moves a session from one phase to another and appends the event: it
// compares, sets and appends in one transaction. change may adjust the row further
// and may be nil. Advance returns ErrStale when the session is no longer in from.
func (s *Store) Advance(ctx context.Context, id, from, to string, ev Event, change func(*Session)) (Session, error) {
	return update(ctx, s, id, advance(from, to, ev, change))
}
