package server

import (
	"sync"
	"time"
)

// throttle bounds the rate of events per address. It remembers a bounded number of
// addresses and forgets old ones during a flood of new ones. The total rate is
// bounded by the number of connections that serve accepts.
type throttle struct {
	most int
	per  time.Duration

	mu  sync.Mutex
	who map[string]*window
}

type window struct {
	began time.Time
	n     int
}

const maxAddresses = 4096

// allow counts an event for addr and reports whether it is within the bound. If
// not, wait is the time until events are allowed again.
func (t *throttle) allow(addr string, now time.Time) (ok bool, wait time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.who == nil {
		t.who = map[string]*window{}
	}
	w := t.who[addr]
	if w == nil || now.Sub(w.began) >= t.per {
		if len(t.who) >= maxAddresses {
			t.forget(now)
		}
		w = &window{began: now}
		t.who[addr] = w
	}
	w.n++
	return w.n <= t.most, t.per - now.Sub(w.began)
}

func (t *throttle) forget(now time.Time) {
	for addr, w := range t.who {
		if now.Sub(w.began) >= t.per || len(t.who) >= maxAddresses {
			delete(t.who, addr)
		}
	}
}

// slots bounds the number of concurrent uses, per client and in total.
type slots struct {
	each, all int

	mu    sync.Mutex
	taken map[string]int
	sum   int
}

// acquire reserves a slot; the caller must call back to release it. ok is false if
// there is no free slot.
func (p *slots) acquire(who string) (back func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sum >= p.all || p.taken[who] >= p.each {
		return nil, false
	}
	if p.taken == nil {
		p.taken = map[string]int{}
	}
	p.taken[who]++
	p.sum++
	return sync.OnceFunc(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.sum--
		if p.taken[who]--; p.taken[who] == 0 {
			delete(p.taken, who)
		}
	}), true
}
