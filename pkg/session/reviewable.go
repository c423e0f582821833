package session

import (
	"cmp"
	"context"
	"os"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// CopyTo copies the agent's commits that were fetched from a session to a local clone. The session need not
// have a VM any more.
func (w Work) CopyTo(ctx context.Context, s Session, clone string) error {
	from := cmp.Or(s.Status.Target.Mirror, s.Status.Target.Local)
	if from == "" || from == clone {
		return nil
	}
	if _, err := os.Stat(from); err != nil {
		return nil //nolint:nilerr // the clone may have them from an earlier fetch
	}
	t, err := repo.OpenTrees(ctx, clone)
	if err != nil {
		return err
	}
	defer t.Close() //nolint:errcheck // a temporary directory that stays does no harm
	return t.CopyRefs(ctx, from, s.Name)
}
