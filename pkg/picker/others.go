package picker

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

const (
	// askEvery is the time between two questions to the other hosts.
	askEvery = 3 * time.Second
	// silentFor is how long the sessions of a host that does not answer stay.
	silentFor = 30 * time.Second
	// maxOthers limits the rows that another host can add.
	maxOthers = 200
)

// Remote is a session on another host of the cluster.
type Remote struct {
	Host string // lower-case letters, digits and hyphens
	session.View
}

// others are the sessions on other hosts, as these last reported them.
type others struct {
	mu    sync.Mutex
	hosts map[string]report
}

// report is what a host reported.
type report struct {
	at       time.Time
	sessions []Remote
}

// follow asks again and again, until ctx ends.
func (o *others) follow(ctx context.Context, ask func(context.Context) map[string][]session.View) {
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		o.set(ask(ctx), time.Now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// set keeps what the picker shows of the hosts that answered: not the sessions of tasks, and nothing whose
// id is not one.
func (o *others) set(answers map[string][]session.View, now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	maps.DeleteFunc(o.hosts, func(_ string, r report) bool { return now.Sub(r.at) > silentFor })
	for host, all := range answers {
		r := report{at: now}
		for _, s := range all {
			if len(r.sessions) < maxOthers && s.Task == "" && ids.Valid(s.ID) {
				r.sessions = append(r.sessions, Remote{host, s})
			}
		}
		o.hosts[host] = r
	}
}

func (o *others) get() (all []Remote) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, host := range slices.Sorted(maps.Keys(o.hosts)) {
		all = append(all, o.hosts[host].sessions...)
	}
	return all
}
