package fleet

import (
	"context"
	"time"
)

// Digest is digest, for tests.
var Digest = digest

// Missing is missing, for tests.
func (f *Tasks) Missing(ctx context.Context) (map[string]int, error) { return f.missing(ctx) }

// Wishes is wishes, for tests.
func (h *Host) Wishes(ctx context.Context) error { return h.wishes(ctx) }

// Overdue is incomplete.overdue, for tests.
func (f *Tasks) Overdue(seq uint64, now time.Time) bool { return f.incomplete.overdue(seq, now) }
