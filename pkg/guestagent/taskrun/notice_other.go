//go:build !linux

package taskrun

import (
	"sync"
	"time"
)

// notice asks the watcher to look ten times a second. That is good enough here,
// where only fake guests run.
func (t Attempt) notice() (stirred <-chan struct{}, stop func(), err error) {
	changed, done := make(chan struct{}, 1), make(chan struct{})
	var ticking sync.WaitGroup
	ticking.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				select {
				case changed <- struct{}{}:
				default:
				}
			case <-done:
				return
			}
		}
	})
	return changed, func() { close(done); ticking.Wait() }, nil
}
