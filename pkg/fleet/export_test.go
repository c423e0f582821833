package fleet

import (
	"context"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
)

// Digest is digest, for tests.
var Digest = digest

// Missing calls missing, for tests.
func (f *Tasks) Missing(ctx context.Context) (map[string]int, error) { return f.missing(ctx) }

// Wishes calls wishes, for tests.
func (h *Host) Wishes(ctx context.Context) error { return h.wishes(ctx) }

// Overdue calls incomplete.overdue, for tests.
func (f *Tasks) Overdue(seq uint64, now time.Time) bool { return f.incomplete.overdue(seq, now) }

// Sweep calls sweep, for tests.
func (h *Host) Sweep(ctx context.Context, own cluster.Host, lost map[string]uint64) error {
	return h.sweep(ctx, own, lost)
}

// CatchUp stores what the log has of one task, at most some bytes at once.
func (f *Tasks) CatchUp(ctx context.Context, id string, most int) error {
	defer func(was int) { storeMost = was }(storeMost)
	storeMost = most
	return f.catchUp(ctx, id)
}
