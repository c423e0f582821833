package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Usage is one use of a model. First its bound is reserved, and later it is settled with
// what the provider reported. A row that is never settled keeps its bound, so that the sum
// is never less than what was used.
type Usage struct {
	Session string    `json:"session"` // id
	Request string    `json:"request"` // id within the session
	At      time.Time `json:"at"`
	RepoKey string    `json:"repo_key"`
	Task    string    `json:"task,omitempty"` // id
	Tree    string    `json:"tree"`           // ids of the tasks or sessions above it, and of its own, each followed by a slash
	Model   string    `json:"model"`

	Input        int64 `json:"input"` // tokens
	CacheRead    int64 `json:"cache_read"`
	CacheWrite   int64 `json:"cache_write"`
	CacheWrite1h int64 `json:"cache_write_1h"`
	Output       int64 `json:"output"`
	Cost         int64 `json:"cost"` // billionths of a US dollar
	Settled      bool  `json:"settled"`
}

func (u Usage) tokens() int64 {
	return u.Input + u.CacheRead + u.CacheWrite + u.CacheWrite1h + u.Output
}

// UsageSum is the sum of some uses.
type UsageSum struct {
	Of       string `json:"of,omitempty"` // what the uses have in common
	Requests int64  `json:"requests"`
	Tokens   int64  `json:"tokens"`
	Cost     int64  `json:"cost"` // billionths of a US dollar
}

// UsageLimit bounds the sum of uses. Zero values do not restrict.
type UsageLimit struct {
	Name    string
	Session string    // of one session
	Tree    string    // of a task or session and everything below it
	Since   time.Time // from then on
	Tokens  int64
	Cost    int64 // billionths of a US dollar
}

// Percent returns how much of the limit a sum is, rounded down.
func (l UsageLimit) Percent(sum UsageSum) int64 {
	var percent int64
	if l.Tokens > 0 {
		percent = sum.Tokens * 100 / l.Tokens
	}
	if l.Cost > 0 {
		percent = max(percent, int64(float64(sum.Cost)*100/float64(l.Cost)))
	}
	return percent
}

// pending is how long a use can still be settled. Later its bound counts as used.
const pending = 15 * time.Minute

// OverLimitError is returned when a limit is reached.
type OverLimitError struct {
	Limit UsageLimit
	Used  UsageSum
	// Whether the limit is only reached with the bounds of uses that are not settled yet, so that
	// another try can succeed later.
	Pending bool
}

func (e *OverLimitError) Error() string { return "the limit of the " + e.Limit.Name + " is reached" }

// ReserveUsage adds a use, with its bound, unless a limit is reached. Uses that are not settled
// count with their bounds, so that of several at once only one can be the last. It adds a use
// only once.
func (s *Store) ReserveUsage(ctx context.Context, u Usage, limits []UsageLimit) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		var one int
		err := tx.QueryRowContext(ctx, `SELECT 1 FROM usage WHERE session = ? AND request = ?`, u.Session, u.Request).Scan(&one)
		if !errors.Is(err, sql.ErrNoRows) {
			if err != nil {
				return fmt.Errorf("reserve usage: %w", err)
			}
			return nil
		}
		for _, l := range limits {
			used, all, err := sumUsage(ctx, tx, l, u.At)
			if err != nil {
				return err
			}
			if l.Percent(all) >= 100 {
				return &OverLimitError{Limit: l, Used: used, Pending: l.Percent(used) < 100}
			}
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO usage (session, request, at, repo_key, task, tree, model, input, cache_read, cache_write, cache_write_1h, output, tokens, cost, settled)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)`,
			u.Session, u.Request, u.At.UnixMilli(), u.RepoKey, u.Task, u.Tree, u.Model, u.Input, u.CacheRead, u.CacheWrite, u.CacheWrite1h, u.Output, u.tokens(), u.Cost)
		if err != nil {
			return fmt.Errorf("reserve usage: %w", err)
		}
		return nil
	})
}

// SettleUsage replaces the bound of a use by what was used. Only the first call for a use has an
// effect. If a limit passes one of the percentages by that, the session gets the event that note
// returns.
func (s *Store) SettleUsage(ctx context.Context, u Usage, limits []UsageLimit, percentages []int64, note func(l UsageLimit, used UsageSum, percent int64) Event) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		before := make([]UsageSum, len(limits))
		for i, l := range limits {
			var err error
			if before[i], _, err = sumUsage(ctx, tx, l, time.Now()); err != nil {
				return err
			}
		}
		done, err := tx.ExecContext(ctx, `UPDATE usage SET model = ?, input = ?, cache_read = ?, cache_write = ?, cache_write_1h = ?, output = ?, tokens = ?, cost = ?, settled = 1
			WHERE session = ? AND request = ? AND settled = 0`,
			u.Model, u.Input, u.CacheRead, u.CacheWrite, u.CacheWrite1h, u.Output, u.tokens(), u.Cost, u.Session, u.Request)
		if err != nil {
			return fmt.Errorf("settle usage: %w", err)
		}
		if n, err := done.RowsAffected(); err != nil || n == 0 {
			return err
		}
		var events []Event
		for i, l := range limits {
			used, _, err := sumUsage(ctx, tx, l, time.Now())
			if err != nil {
				return err
			}
			for _, percent := range percentages {
				if l.Percent(before[i]) < percent && l.Percent(used) >= percent {
					events = append(events, note(l, used, percent))
				}
			}
		}
		return appendEvents(ctx, tx, u.Session, events)
	})
}

// AbandonUsage settles all uses of a session with their bounds. Nothing will report what they
// used.
func (s *Store) AbandonUsage(ctx context.Context, session string) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `UPDATE usage SET settled = 1 WHERE session = ? AND settled = 0`, session); err != nil {
			return fmt.Errorf("settle usage: %w", err)
		}
		return nil
	})
}

// sumUsage returns the sum of what was used for sure, and that of all uses.
func sumUsage(ctx context.Context, q queryer, l UsageLimit, at time.Time) (used, all UsageSum, err error) {
	query := `SELECT COUNT(*), COALESCE(SUM(tokens), 0), COALESCE(SUM(cost), 0),
			COALESCE(SUM(f), 0), COALESCE(SUM(f * tokens), 0), COALESCE(SUM(f * cost), 0)
		FROM (SELECT *, (settled = 1 OR at < ?) AS f FROM usage WHERE at >= ?`
	args := []any{at.Add(-pending).UnixMilli(), int64(0)}
	if !l.Since.IsZero() {
		args[1] = l.Since.UnixMilli()
	}
	if l.Session != "" {
		query, args = query+` AND session = ?`, append(args, l.Session)
	}
	if l.Tree != "" {
		query, args = query+` AND tree >= ? AND tree < ?`, append(args, l.Tree, l.Tree+"\U0010ffff")
	}
	err = q.QueryRowContext(ctx, query+`)`, args...).Scan(&all.Requests, &all.Tokens, &all.Cost, &used.Requests, &used.Tokens, &used.Cost)
	if err != nil {
		err = fmt.Errorf("sum usage: %w", err)
	}
	return used, all, err
}

// UsageQuery selects uses. Zero values do not restrict.
type UsageQuery struct {
	Since   time.Time
	Session string // id
	Repo    string // key
	Task    string // id
}

// UsageSums returns the sums of uses by session, repo, task, model or day (of this host's clock),
// the most expensive first.
func (s *Store) UsageSums(ctx context.Context, by string, which UsageQuery) (sums []UsageSum, err error) {
	column := map[string]string{
		"session": "session", "repo": "repo_key", "task": "task", "model": "model",
		"day": "strftime('%Y-%m-%d', at / 1000, 'unixepoch', 'localtime')",
	}[by]
	if column == "" {
		return nil, fail.New(fail.Usage, "usage by %q is unknown; use session, repo, task, model or day", by)
	}
	query, args := `SELECT `+column+`, COUNT(*), SUM(tokens), SUM(cost) FROM usage WHERE at >= ?`, []any{int64(0)}
	if !which.Since.IsZero() {
		args[0] = which.Since.UnixMilli()
	}
	for _, f := range [][2]string{{"session", which.Session}, {"repo_key", which.Repo}, {"task", which.Task}} {
		if f[1] != "" {
			query, args = query+` AND `+f[0]+` = ?`, append(args, f[1])
		}
	}
	err = s.db.retryBusy(ctx, func() error {
		sums = sums[:0]
		rows, err := s.db.sql.QueryContext(ctx, query+` GROUP BY 1 ORDER BY 4 DESC, 1`, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var sum UsageSum
			if err := rows.Scan(&sum.Of, &sum.Requests, &sum.Tokens, &sum.Cost); err != nil {
				return err
			}
			sums = append(sums, sum)
		}
		return rows.Err()
	})
	return sums, err
}
