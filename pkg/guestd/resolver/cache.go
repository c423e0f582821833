package resolver

import (
	"slices"
	"sync"
	"time"
)

const (
	maxCached        = 16 << 10 // answers, of which a list of ten thousand names needs one each
	maxCachedRecords = 16       // of one answer that is kept
)

// cache remembers what the network said, for as long as it said. Nothing that
// was decided is in it: every question meets the policy of its own moment. Nor
// is a name that does not exist, which may have been allowed since.
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

// get returns an answer with what is left of its time. Its records are others'
// too: they are read only.
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

// put keeps an answer. When there is no room, another goes, whichever it is.
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
