package resolver

import (
	"net/netip"
	"sync"
	"time"
)

const (
	rate       = 2000.0 // queries per second and source
	burst      = 4000.0
	maxSources = 1024
)

// limiter is a token bucket per source address. The limit is generous: its purpose
// is that one container in a loop does not starve the others.
type limiter struct {
	now func() time.Time

	mu      sync.Mutex
	sources map[netip.Addr]*bucket
}

type bucket struct {
	tokens float64
	at     time.Time
}

func newLimiter(now func() time.Time) *limiter {
	return &limiter{now: now, sources: map[netip.Addr]*bucket{}}
}

func (l *limiter) allow(from netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	b := l.sources[from]
	if b == nil {
		if len(l.sources) >= maxSources {
			clear(l.sources)
		}
		b = &bucket{tokens: burst, at: now}
		l.sources[from] = b
	}
	b.tokens = min(burst, b.tokens+rate*now.Sub(b.at).Seconds())
	b.at = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// giveBack undoes an allow, for a query that will be counted again.
func (l *limiter) giveBack(from netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.sources[from]; b != nil {
		b.tokens = min(burst, b.tokens+1)
	}
}
