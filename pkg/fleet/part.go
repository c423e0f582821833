package fleet

import (
	"context"
	"log/slog"
	"maps"
	"runtime"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Part is the part that this host has in its cluster. It runs in serve.
type Part struct {
	State   cluster.State
	Dir     string // of State
	Tasks   *task.Manager
	Log     *slog.Logger
	Version string
	Accel   string // of the VMs
	Images  func() []string

	node  *cluster.Node
	ready chan struct{} // closed once node is set
	asked asked
}

// NewPart returns the part of a host that belongs to a cluster. The caller sets the other fields.
func NewPart(dir string, s cluster.State) *Part {
	return &Part{State: s, Dir: dir, ready: make(chan struct{})}
}

// nodeWait is how long an operation waits for a cluster that has not answered since serve started.
const nodeWait = 10 * time.Second

// Node returns this host as a part of its cluster. If the cluster has not answered since serve started,
// it waits a while, and then returns an error.
func (p *Part) Node(ctx context.Context) (*cluster.Node, error) {
	select {
	case <-p.ready:
		return p.node, nil
	case <-time.After(nodeWait):
	case <-ctx.Done():
	}
	return nil, fail.New(fail.Host, "the cluster %s has not answered since serve started", p.State.Cluster).
		WithHint("agent-sessionizer cluster list # again later, and on a core")
}

// Ready returns a channel that is closed once the cluster has answered.
func (p *Part) Ready() <-chan struct{} { return p.ready }

// patience is how long a cluster may take to answer before that is worth a warning.
const patience = 15 * time.Second

// start connects this host to its cluster. It waits until the cluster answers or ctx ends.
func (p *Part) start(ctx context.Context) (*cluster.Node, error) {
	defer time.AfterFunc(patience, func() {
		p.Log.WarnContext(ctx, "the cluster does not answer; serve goes on without it", "cluster", p.State.Cluster, "addresses", p.State.Addrs)
	}).Stop()
	return cluster.Start(ctx, p.Dir, p.Log)
}

// Serve does this host's part until ctx ends.
func (p *Part) Serve(ctx context.Context) {
	n, err := p.start(ctx)
	for ; err != nil; n, err = p.start(ctx) {
		if ctx.Err() != nil {
			return
		}
		p.Log.ErrorContext(ctx, "failed to start this host's part in its cluster", "error", err)
		pause(ctx, restart)
	}
	defer n.Close()
	p.node = n
	close(p.ready)
	p.Log.InfoContext(ctx, "connected to the cluster", "cluster", p.State.Cluster, "host", p.State.Name)
	st := p.sessions().Store
	host := Host{
		Tasks: &Tasks{Name: p.State.Name, Tasks: n.Tasks, Entries: n.Entries, Files: n.Files, Queue: n.Queue, Store: st, Log: p.Log, Want: p.want, Busy: p.busy, Outputs: p.outputs},
		Hosts: n.Hosts, Core: p.State.Role.Allows(cluster.CoreOf), Log: p.Log,
		Describe: p.describe, Wake: p.Tasks.Schedule, Abandon: p.abandon,
		Leased: func(l store.Lease) error {
			return gateway.WriteTerm(p.sessions().Config.Paths.Term(), gateway.Term{Incarnation: l.Incarnation, Boot: l.Boot, Until: l.Until})
		},
	}
	var all sync.WaitGroup
	all.Go(func() {
		for ctx.Err() == nil {
			if err := n.Serve(ctx); err != nil && ctx.Err() == nil {
				p.Log.ErrorContext(ctx, "failed to follow the cluster", "error", err)
				pause(ctx, retry)
			}
		}
	})
	all.Go(func() { host.Serve(ctx) })
	p.exchangeSecrets(ctx, &all, &Secrets{
		Tasks: host.Tasks, Exchange: n.Secrets, Audit: p.sessions().Audit,
		Resolve: func(ctx context.Context, refs []secret.Ref) (map[string]secret.Value, error) {
			return secret.ResolveInChild(ctx, p.sessions().Self, refs)
		},
	})
	all.Wait()
}

// exchangeSecrets gives secrets to other hosts, and gets secrets for the keepers of this host, until ctx
// ends.
func (p *Part) exchangeSecrets(ctx context.Context, all *sync.WaitGroup, x *Secrets) {
	do := map[string]func() error{
		"answer keepers": func() error {
			return session.ServeSecrets(ctx, p.sessions().Config.Paths.SecretsSocket(), p.Log, x.Get)
		},
	}
	if p.State.Role.Allows(cluster.Member) { // others submit no tasks
		do["answer other hosts"] = func() error { return x.Exchange.Answer(ctx, x.Give) }
	}
	for what, f := range do {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := f(); err != nil && ctx.Err() == nil {
					p.Log.ErrorContext(ctx, "failed to "+what+" that need secrets", "error", err)
					pause(ctx, restart)
				}
			}
		})
	}
}

func (p *Part) sessions() *session.Manager { return p.Tasks.Sessions }

// describe says what this host is and has free.
func (p *Part) describe(ctx context.Context) (cluster.Host, error) {
	c := p.sessions().Config
	n, err := p.Node(ctx)
	if err != nil {
		return cluster.Host{}, err
	}
	is := cluster.Host{
		Name: p.State.Name, Drained: n.Drained(), Version: p.Version, Arch: runtime.GOARCH, Accel: p.Accel,
		Slots: c.Tasks.Slots, FreeSlots: c.Tasks.Slots, Labels: map[string]string{hostLabel: p.State.Name}, Images: p.Images(),
	}
	maps.Copy(is.Labels, c.Tasks.Labels)
	counts, err := p.sessions().Store.TaskCounts(ctx)
	if err != nil {
		return is, err
	}
	for phase, some := range counts {
		if !task.Phase(phase).Over() {
			is.FreeSlots -= some
		}
	}
	is.FreeSlots = max(0, is.FreeSlots)
	free, err := p.sessions().Capacity(ctx)
	if err != nil {
		return is, err
	}
	is.FreeMemory, is.FreeDisk = free.Free()
	return is, nil
}

// want records what a user of another host wants of a task.
func (p *Part) want(ctx context.Context, id string, desired task.DesiredPhase) error {
	t, err := p.Tasks.Get(ctx, id)
	if err != nil {
		return err
	}
	_, err = p.Tasks.SetDesired(ctx, t, desired, task.Client{Actor: "cluster"})
	return err
}

// busy reports whether a session of the task exists on this host.
func (p *Part) busy(ctx context.Context, id string) (bool, error) {
	all, err := p.of(ctx, id)
	return len(all) > 0, err
}

// of returns the sessions that the task has on this host.
func (p *Part) of(ctx context.Context, id string) (found []store.Session, err error) {
	all, err := p.sessions().Store.Sessions(ctx, false)
	for _, s := range all {
		if s.Task == id {
			found = append(found, s)
		}
	}
	return found, err
}

// abandon removes the VMs of tasks that this host no longer has.
func (p *Part) abandon(ctx context.Context, tasks []string) error {
	for _, id := range tasks {
		all, err := p.of(ctx, id)
		if err != nil {
			return err
		}
		for _, row := range all {
			s, err := p.sessions().Get(ctx, row.ID)
			if err != nil {
				return err
			}
			if _, err := p.sessions().SetDesired(ctx, s, session.Gone); err != nil {
				return err
			}
		}
	}
	return nil
}
