package fleet

import "context"

// Digest is digest, for tests.
var Digest = digest

// Missing is missing, for tests.
func (f *Tasks) Missing(ctx context.Context) (map[string]int, error) { return f.missing(ctx) }
