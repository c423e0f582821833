package attach

import "sync"

// copier hands copies to a function that may be slow, one at a time, off the
// path of the output. A copy that comes while one waits replaces it: a guest
// cannot make them pile up.
type copier struct {
	f    func([]byte)
	next chan []byte
	done sync.WaitGroup
}

func newCopier(f func([]byte)) *copier {
	c := &copier{f: f, next: make(chan []byte, 1)}
	c.done.Go(func() {
		for data := range c.next {
			f(data) // is not nil: otherwise nothing is offered
		}
	})
	return c
}

// offer is the function for a filter, nil when there is no taker. It must be
// called by one goroutine at a time.
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

// stop lets what waits be copied and returns after it.
func (c *copier) stop() {
	close(c.next)
	c.done.Wait()
}
