package resolver

import (
	"slices"
	"sync"
	"time"
)

const (
	maxCached        = 16 << 10 // answers; a list of ten thousand names needs one each
	maxCachedRecords = 16       // records per cached answer
)

// cache holds the network's answers until they expire. It holds no decisions: every
// query is checked against the current policy. Nor does it hold negative answers,
// because the name may have been allowed since.
type cache struct {
	now func() time.Time

	mu      sync.Mutex
	answers map[cacheKey]cached
}

type cacheKey struct {
	name  string
	qtype uint16
}

type cached struct {
	answer
	until time.Time
}

func newCache(now func() time.Time) *cache {
	return &cache{now: now, answers: map[cacheKey]cached{}}
}

// get returns an answer with its remaining time to live. The records are shared and
// must not be modified.
func (c *cache) get(name string, qtype uint16) (answer, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := cacheKey{name, qtype}
	found, ok := c.answers[key]
	if !ok {
		return answer{}, false
	}
	left := found.until.Sub(c.now())
	if left <= 0 {
		delete(c.answers, key)
		return answer{}, false
	}
	found.ttl = uint32((left + time.Second - 1) / time.Second)
	return found.answer, true
}

// put stores an answer. If the cache is full, it evicts an arbitrary one.
func (c *cache) put(name string, qtype uint16, a answer) {
	if len(a.records) == 0 || len(a.records) > maxCachedRecords || a.ttl == 0 {
		return
	}
	a.records = slices.Clip(a.records)
	c.mu.Lock()
	defer c.mu.Unlock()
	key := cacheKey{name, qtype}
	if _, ok := c.answers[key]; !ok && len(c.answers) >= maxCached {
		for other := range c.answers {
			delete(c.answers, other)
			break
		}
	}
	c.answers[key] = cached{a, c.now().Add(time.Duration(min(a.ttl, maxTTL)) * time.Second)}
}
