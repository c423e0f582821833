package store

import (
	"context"
	"database/sql"
	"time"
)

// ClusterStatus is what this host has to send to its cluster, and what it knows of the cluster's tasks.
type ClusterStatus struct {
	Position  uint64 // how far this host has read the cluster's log of tasks
	Unsettled int    // tasks for which Unsettled returns a claim
	Wishes    int    // that the log does not have yet

	Unsent       int       // events that the log does not have yet
	OldestUnsent time.Time // zero if there are none

	Phases        map[string]int // tasks of the cluster in each of the phases that has any
	Waiting       int            // of these, the tasks that no host has
	OldestWaiting time.Time      // when the first of them began to wait; zero if there are none
}

// ClusterStatus counts what is left to do for the cluster, and its tasks in some phases.
func (s *Store) ClusterStatus(ctx context.Context, phases []string) (c ClusterStatus, err error) {
	if c.Position, err = s.Position(ctx); err != nil {
		return c, err
	}
	type row struct {
		phase   string
		waiting bool
		n       int
		since   int64
	}
	err = s.db.retryBusy(ctx, func() error {
		var oldest sql.NullInt64
		if err := s.db.sql.QueryRowContext(ctx, `SELECT
			(SELECT count(*) FROM cluster_tasks INDEXED BY cluster_work WHERE settled = 0), (SELECT count(*) FROM cluster_wishes), count(*), min(e.at)
			FROM cluster_tasks c INDEXED BY cluster_work JOIN events e ON e.subject = c.task AND e.seq > c.shipped WHERE c.settled = 0`).
			Scan(&c.Unsettled, &c.Wishes, &c.Unsent, &oldest); err != nil {
			return err
		}
		c.OldestUnsent = timeOf(oldest)
		// Of all tasks that a host has ever had, few have not ended.
		rows, err := collect(ctx, s.db.sql, func(r scanner) (is row, err error) {
			err = r.Scan(&is.phase, &is.waiting, &is.n, &is.since)
			return is, err
		}, `SELECT phase, host = ?, count(*), min(state_changed_at) FROM tasks INDEXED BY tasks_by_phase JOIN cluster_tasks ON task = id
			WHERE phase IN (SELECT value FROM json_each(?)) GROUP BY 1, 2`, Waiting, list(phases))
		if err != nil {
			return err
		}
		c.Phases, c.Waiting, oldest = map[string]int{}, 0, sql.NullInt64{}
		for _, is := range rows {
			c.Phases[is.phase] += is.n
			if !is.waiting {
				continue
			}
			c.Waiting += is.n
			if !oldest.Valid || is.since < oldest.Int64 {
				oldest = sql.NullInt64{Int64: is.since, Valid: true}
			}
		}
		c.OldestWaiting = timeOf(oldest)
		return nil
	})
	return c, err
}

func timeOf(ms sql.NullInt64) (t time.Time) {
	if ms.Valid {
		t = time.UnixMilli(ms.Int64).UTC()
	}
	return t
}
