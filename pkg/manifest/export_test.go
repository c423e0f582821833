package manifest

import (
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Diff returns the differences between two tasks except for where they were parsed
// from.
func Diff(want, got *Task) string {
	return cmp.Diff(want, got, cmpopts.IgnoreUnexported(Task{}))
}
