package gateway

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// A connection to a name that a person may allow waits before its handshake. The guest sees
// a server that is slow to answer.
const (
	holdTime = 60 * time.Second       // then the connection is refused
	holdPoll = 100 * time.Millisecond // between two looks at the policy
	maxHeld  = 64                     // connections that wait at once
	maxAsked = 8                      // targets that they wait for
)

// Held is a target that connections of the guest wait for.
type Held struct {
	Name  string    `json:"name"`
	Port  uint16    `json:"port"`
	Since time.Time `json:"since"` // of the first connection
	Until time.Time `json:"until"` // when that is refused
	Rule  string    `json:"rule"`
}

// heldTargets counts the connections that wait, by target.
type heldTargets struct {
	mu    sync.Mutex
	total int
	m     map[question]*heldTarget
}

type heldTarget struct {
	Held
	conns int
}

// add registers a connection that waits. It reports false when too many wait.
func (h *heldTargets) add(q question, d decision, now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.m[q]
	if h.total >= maxHeld || t == nil && len(h.m) >= maxAsked {
		return false
	}
	if t == nil {
		t = &heldTarget{Held: Held{Name: q.Name, Port: q.Port, Since: now, Until: now.Add(holdTime), Rule: d.Rule}}
		if h.m == nil {
			h.m = map[question]*heldTarget{}
		}
		h.m[q] = t
	}
	t.conns++
	h.total++
	return true
}

func (h *heldTargets) remove(q question) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.total--
	if t := h.m[q]; t != nil {
		if t.conns--; t.conns == 0 {
			delete(h.m, q)
		}
	}
}

// list returns the targets, the oldest first.
func (h *heldTargets) list() []Held {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []Held
	for _, t := range h.m {
		list = append(list, t.Held)
	}
	slices.SortFunc(list, func(a, b Held) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port))
	})
	return list
}

// hold waits until a person has decided about a target, and returns the decision then. A
// decision is a change of the policy, which all connections to the target see.
func (c *conn) hold(q question, d decision) decision {
	refused := func(reason string) decision {
		return decision{Rule: d.Rule, Source: d.Source, Reason: reason}
	}
	c.setHolding(true)
	defer c.setHolding(false)
	if !c.g.held.add(q, d, time.Now()) {
		return refused("too many connections wait for your approval")
	}
	defer c.g.held.remove(q)
	end := time.NewTimer(holdTime)
	defer end.Stop()
	tick := time.NewTicker(holdPoll)
	defer tick.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return refused("the connection was cut")
		case <-end.C:
			return refused("was not approved in time")
		case <-tick.C:
			if d := c.g.policy.decide(q); !d.Asks {
				return d
			}
		}
	}
}

// setHolding says whether the connection waits, so that a new policy is not asked about it.
func (c *conn) setHolding(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.holding = on
}
