package ssh

import (
	"errors"
	"io"
	"sync/atomic"
)

var errBudget = errors.New("the guest sent too much data")

// budget is a reader of a guest's stream that fails when the guest sends more than
// was allowed.
type budget struct {
	r     io.Reader
	heard func()
	left  atomic.Int64
}

// reset sets how many bytes the guest may send from now on.
func (b *budget) reset(n int64) { b.left.Store(n) }

func (b *budget) isSpent() bool { return b.left.Load() <= 0 }

func (b *budget) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if n > 0 {
		b.heard()
		if b.left.Add(-int64(n)) <= 0 {
			return 0, errBudget
		}
	}
	return n, err
}
