package session

import (
	"context"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// maxResults limits the results of a session. The oldest are dropped.
const maxResults = 20

// RecordResult records how a command in the guest ended, and on which commit it ran. It replaces an earlier
// result of the same name.
func (m *Manager) RecordResult(ctx context.Context, s Session, g repo.Guest, r lifecycle.Result) (Session, error) {
	work, err := Work{Sessions: m}.Unsaved(ctx, s, g)
	if err != nil {
		return s, err
	}
	r.Commit, r.Uncommitted, r.At = work.Head, work.Dirty+work.Untracked > 0, time.Now().UTC()
	return m.updateStatus(ctx, s.ID, store.NewEvent(EventResult, r), func(f *Status) {
		f.Results = slices.DeleteFunc(f.Results, func(old lifecycle.Result) bool { return old.Name == r.Name })
		f.Results = append(f.Results, r)
		f.Results = f.Results[max(0, len(f.Results)-maxResults):]
	})
}
