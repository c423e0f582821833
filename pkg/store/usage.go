package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
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
	Session string    // of one session
	Since   time.Time // from then on
	Tokens  int64
	Cost    int64 // billionths of a US dollar
}

// OverLimitError is returned when a limit is reached.
type OverLimitError struct {
	Limit int // its index
	Used  UsageSum
}

func (e *OverLimitError) Error() string { return "the usage limit is reached" }

// ReserveUsage adds a use unless a limit is reached already, and returns the sum with it for each
// limit. Uses that are not settled count with their bounds, so that of several at once only one
// can be the last. It adds a use only once.
func (s *Store) ReserveUsage(ctx context.Context, u Usage, limits []UsageLimit) (sums []UsageSum, err error) {
	err = s.db.tx(ctx, func(tx *sql.Tx) error {
		sums = sums[:0]
		var one int
		err := tx.QueryRowContext(ctx, `SELECT 1 FROM usage WHERE session = ? AND request = ?`, u.Session, u.Request).Scan(&one)
		known := err == nil
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return fmt.Errorf("reserve usage: %w", err)
		}
		for i, l := range limits {
			sum, err := sumUsage(ctx, tx, l)
			if err != nil {
				return err
			}
			if !known {
				if l.Tokens > 0 && sum.Tokens >= l.Tokens || l.Cost > 0 && sum.Cost >= l.Cost {
					return &OverLimitError{Limit: i, Used: sum}
				}
				sum.Requests, sum.Tokens, sum.Cost = sum.Requests+1, sum.Tokens+u.tokens(), sum.Cost+u.Cost
			}
			sums = append(sums, sum)
		}
		if known {
			return nil
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO usage (session, request, at, repo_key, task, model, input, cache_read, cache_write, cache_write_1h, output, tokens, cost, settled)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)`,
			u.Session, u.Request, u.At.UnixMilli(), u.RepoKey, u.Task, u.Model, u.Input, u.CacheRead, u.CacheWrite, u.CacheWrite1h, u.Output, u.tokens(), u.Cost)
		if err != nil {
			return fmt.Errorf("reserve usage: %w", err)
		}
		return nil
	})
	return sums, err
}

// SettleUsage replaces the bound of a use by what was used. Only the first call for a use has an
// effect.
func (s *Store) SettleUsage(ctx context.Context, u Usage) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE usage SET model = ?, input = ?, cache_read = ?, cache_write = ?, cache_write_1h = ?, output = ?, tokens = ?, cost = ?, settled = 1
			WHERE session = ? AND request = ? AND settled = 0`,
			u.Model, u.Input, u.CacheRead, u.CacheWrite, u.CacheWrite1h, u.Output, u.tokens(), u.Cost, u.Session, u.Request)
		if err != nil {
			return fmt.Errorf("settle usage: %w", err)
		}
		return nil
	})
}

func sumUsage(ctx context.Context, q queryer, l UsageLimit) (sum UsageSum, err error) {
	query, args := `SELECT COUNT(*), COALESCE(SUM(tokens), 0), COALESCE(SUM(cost), 0) FROM usage WHERE at >= ?`, []any{int64(0)}
	if !l.Since.IsZero() {
		args[0] = l.Since.UnixMilli()
	}
	if l.Session != "" {
		query, args = query+` AND session = ?`, append(args, l.Session)
	}
	if err := q.QueryRowContext(ctx, query, args...).Scan(&sum.Requests, &sum.Tokens, &sum.Cost); err != nil {
		return sum, fmt.Errorf("sum usage: %w", err)
	}
	return sum, nil
}

// UsageSums returns the sums of all uses since a time by session, repo, task, model or day (of this
// host's clock), the most expensive first.
func (s *Store) UsageSums(ctx context.Context, by string, since time.Time) (sums []UsageSum, err error) {
	column := map[string]string{
		"session": "session", "repo": "repo_key", "task": "task", "model": "model",
		"day": "strftime('%Y-%m-%d', at / 1000, 'unixepoch', 'localtime')",
	}[by]
	if column == "" {
		return nil, fmt.Errorf("sum usage by %q: unknown", by)
	}
	from := int64(0)
	if !since.IsZero() {
		from = since.UnixMilli()
	}
	err = s.db.retryBusy(ctx, func() error {
		sums = sums[:0]
		rows, err := s.db.sql.QueryContext(ctx, `SELECT `+column+`, COUNT(*), SUM(tokens), SUM(cost) FROM usage WHERE at >= ? GROUP BY 1 ORDER BY 4 DESC, 1`, from)
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
