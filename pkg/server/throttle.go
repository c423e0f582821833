package server

import (
	"sync"
	"time"
)

// throttle bounds how often something may happen per address. It remembers a
// bounded number of addresses: a flood of new ones makes it forget old ones,
// and all of them together are bounded by the connections that serve accepts.
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

// allow counts one for addr, and says whether it is within the bound; if not,
// how long until it is again.
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

// places bounds how many of something there are at a time, of one client and of all.
type places struct {
	each, all int

	mu    sync.Mutex
	taken map[string]int
	sum   int
}

// take takes a place, which is to be given back; ok is false when there is none.
func (p *places) take(who string) (back func(), ok bool) {
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
