package fleet

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Health is the state of the cluster, as this host sees it.
type Health struct {
	Lease store.Lease
	Store store.ClusterStatus

	Answered bool // the cluster answered all that Cluster and Hosts consist of
	Cluster  cluster.Health
	Hosts    []HostView // on a core: only there reading them is cheap
}

// These are the limits of what Health asks the cluster.
const (
	healthTimeout = 2 * time.Second  // for all answers
	healthEvery   = 10 * time.Second // how often they are asked for, at most
)

// asked holds the latest answers of the cluster.
type asked struct {
	mu sync.Mutex // held while the cluster is asked
	at time.Duration
	Health
}

// Health returns the state of the cluster. It waits up to healthTimeout for the cluster, and less than
// that if it asked it recently. An error is one of this host's store.
func (p *Part) Health(ctx context.Context) (Health, error) {
	h := p.ask(ctx)
	st := p.sessions().Store
	var err1, err2 error
	h.Lease, err1 = st.Lease(ctx)
	h.Store, err2 = st.ClusterStatus(ctx, task.Unended())
	return h, errors.Join(err1, err2)
}

// ask returns the cluster's answers, which may be healthEvery old.
func (p *Part) ask(ctx context.Context) Health {
	p.asked.mu.Lock()
	defer p.asked.mu.Unlock()
	now := bootclock.Now()
	if p.asked.at != 0 && now-p.asked.at < healthEvery {
		return p.asked.Health
	}
	select {
	case <-p.ready:
	default: // no connection since serve started
		return Health{}
	}
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	var h Health
	var err1, err2 error
	var asking sync.WaitGroup
	asking.Go(func() { h.Cluster, err1 = p.node.Health(ctx) })
	if p.State.Role.Allows(cluster.CoreOf) {
		asking.Go(func() { h.Hosts, err2 = p.Hosts(ctx) })
	}
	asking.Wait()
	if err := errors.Join(err1, err2); err != nil {
		p.Log.DebugContext(ctx, "the cluster did not answer for the metrics", "error", err)
	}
	h.Answered = err1 == nil && err2 == nil
	p.asked.Health, p.asked.at = h, now
	return h
}
