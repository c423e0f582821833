package session

import (
	"context"
	"slices"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Recent returns at most n of the latest sessions that are gone, one for each
// repository, the latest first.
func (m *Manager) Recent(ctx context.Context, n int) ([]Session, error) {
	rows, err := m.Store.Sessions(ctx, true)
	if err != nil {
		return nil, err
	}
	slices.Reverse(rows) // the store returns them in the order of creation
	slices.SortStableFunc(rows, func(a, b store.Session) int { return b.StateChangedAt.Compare(a.StateChangedAt) })
	var out []Session
	seen := map[string]bool{}
	for _, row := range rows {
		if len(out) == n {
			break
		}
		if Phase(row.Phase) != Gone || seen[row.RepoKey] {
			continue
		}
		s, err := read(row, nil)
		if err != nil {
			return nil, err
		}
		seen[row.RepoKey] = true
		out = append(out, s)
	}
	return out, nil
}
