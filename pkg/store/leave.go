package store

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// LeaveCluster makes the store that of a host without a cluster. Tasks of other hosts are forgotten
// unless they are in one of the phases over. If this host has tasks of the cluster, or accepted
// some that the cluster may not have, nothing changes, unless force is set: then these become its own.
func (s *Store) LeaveCluster(ctx context.Context, over []string, force bool) error {
	return s.db.tx(ctx, func(tx *sql.Tx) error {
		active := 0
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM cluster_tasks WHERE settled = 0`).Scan(&active); err != nil {
			return err
		}
		if active > 0 && !force {
			return fail.New(fail.Conflict, "%d tasks of the cluster have not ended on this host, or the cluster may not have them yet", active).
				WithHint("agent-sessionizer cluster leave --help # --force")
		}
		const foreign = `(SELECT id FROM tasks WHERE host <> '' AND phase NOT IN (SELECT value FROM json_each(?)))`
		for _, q := range []struct {
			text string
			args []any
		}{
			{`UPDATE tasks SET host = '' WHERE id IN (SELECT task FROM cluster_tasks WHERE settled = 0)`, nil},
			{`DELETE FROM task_labels WHERE task IN (SELECT num FROM tasks WHERE id IN ` + foreign + `)`, []any{list(over)}},
			{`DELETE FROM task_texts WHERE task IN ` + foreign, []any{list(over)}},
			{`DELETE FROM events WHERE subject IN ` + foreign, []any{list(over)}},
			{`DELETE FROM tasks WHERE id IN ` + foreign, []any{list(over)}},
			{`DELETE FROM cluster_tasks`, nil},
			{`DELETE FROM cluster_wishes`, nil},
			{`DELETE FROM cluster_host`, nil},
		} {
			if _, err := tx.ExecContext(ctx, q.text, q.args...); err != nil {
				return fmt.Errorf("leave the cluster: %w", err)
			}
		}
		return nil
	})
}
