package picker

import (
	"context"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

const (
	// askEvery is the time between two questions to the other hosts.
	askEvery = 3 * time.Second
	// maxOthers limits the rows that other hosts can add.
	maxOthers = 1000
)

// Remote is a session on another host of the cluster.
type Remote struct {
	Host string // lower-case letters, digits and hyphens
	session.View
}

// others are the sessions on other hosts, as these last reported them.
type others struct {
	mu  sync.Mutex
	all []Remote
}

// follow asks again and again, until ctx ends.
func (o *others) follow(ctx context.Context, ask func(context.Context) []Remote) {
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		o.set(ask(ctx))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// set keeps what the picker shows: not the sessions of tasks, and nothing whose id is not one.
func (o *others) set(all []Remote) {
	var shown []Remote
	for _, r := range all {
		if len(shown) < maxOthers && r.Task == "" && ids.Valid(r.ID) {
			shown = append(shown, r)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all = shown
}

func (o *others) get() []Remote {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.all
}
