package attach

import "sync"

// copier passes clipboard copies to a function that may be slow, one at a time and without
// blocking the guest's output. A new copy replaces one that is still waiting, so that a
// guest cannot make them pile up.
type copier struct {
	f    func([]byte)
	next chan []byte
	done sync.WaitGroup
}

func newCopier(f func([]byte)) *copier {
	c := &copier{f: f, next: make(chan []byte, 1)}
	c.done.Go(func() {
		for data := range c.next {
			f(data) // f is not nil here: without it, nothing is offered
		}
	})
	return c
}

// offer returns the function that a filter calls with each copy, or nil if no function
// takes them. Only one goroutine at a time may call it.
func (c *copier) offer() func([]byte) {
	if c.f == nil {
		return nil
	}
	return func(data []byte) {
		for {
			select {
			case c.next <- data:
				return
			default:
			}
			select {
			case <-c.next:
			default:
			}
		}
	}
}

// stop delivers the waiting copy, if any, and returns when that is done.
func (c *copier) stop() {
	close(c.next)
	c.done.Wait()
}
