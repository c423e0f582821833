//go:build !linux

package guestd

import (
	"sync"
	"time"
)

// notice says to look, ten times a second: only fake guests are here.
func (t task) notice() (stirred <-chan struct{}, stop func(), err error) {
	said, done := make(chan struct{}, 1), make(chan struct{})
	var ticking sync.WaitGroup
	ticking.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				select {
				case said <- struct{}{}:
				default:
				}
			case <-done:
				return
			}
		}
	})
	return said, func() { close(done); ticking.Wait() }, nil
}
