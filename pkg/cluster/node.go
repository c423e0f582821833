package cluster

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Limits of what a cluster keeps.
const (
	storeSize = 64 << 30 // of all streams of a core, in bytes
	logSize   = 16 << 30 // of the log of tasks
	fileSize  = 40 << 30 // of artifacts and logs
	entrySize = 4 << 30  // of what is too large for the log of tasks
	fileTime  = 30 * 24 * time.Hour
	copies    = 3 // of each stream, once there are that many cores
)

// Node is this host as a part of its cluster.
type Node struct {
	State State

	Tasks   *TaskLog
	Hosts   *Hosts
	Queue   *Queue
	Members *Members
	Files   *Files
	Entries *Files
	Tunnels *Tunnels
	Secrets *Exchange

	dir     string
	log     *slog.Logger
	keys    *Keys
	nc      *nats.Conn
	core    *Core
	witness *Core
	spread  bool // an external NATS cluster has as many copies of the streams as it can

	mu      sync.Mutex
	members map[string]Membership // by nkey
	seen    uint64                // sequence number of the latest change among members
	peers   map[*peer]bool        // connections to and from other hosts
}

// Start connects this host to its cluster, and starts its server if it is a core. It returns once
// the cluster answers, or with an error when ctx ends.
func Start(ctx context.Context, dir string, log *slog.Logger) (*Node, error) {
	s, err := LoadState(dir)
	if err != nil {
		return nil, err
	}
	n := &Node{State: s, dir: dir, log: log, members: map[string]Membership{}, peers: map[*peer]bool{}}
	if err := n.start(ctx); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

func (n *Node) start(ctx context.Context) (err error) {
	if n.keys, err = n.State.Keys(); err != nil {
		return err
	}
	if n.State.Role.Allows(CoreOf) {
		if err := n.startCore(ctx); err != nil {
			return err
		}
		n.nc, err = n.core.Connect()
	} else {
		n.nc, err = n.connect()
	}
	if err != nil {
		return fail.New(fail.Host, "connect to the cluster: %w", err)
	}
	return n.open(ctx)
}

// connect logs in to the cores over the network. It goes on trying in the background.
func (n *Node) connect() (*nats.Conn, error) {
	known, err := loadMembers(n.dir)
	if err != nil {
		return nil, err
	}
	for _, m := range known {
		n.members[m.Nkey] = m
	}
	opts, err := n.keys.loginTo([]byte(n.State.Authority), n.trustCore)
	if err != nil {
		return nil, err
	}
	opts = append(opts, nats.Name(n.State.Name), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true), nats.ReconnectWait(time.Second),
		nats.IgnoreAuthErrorAbort(), // a host that has just joined is not known to all cores yet
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			n.log.Warn("the cluster refused a message", "error", err)
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				n.log.Warn("lost the connection to the cluster", "error", err)
			}
		}))
	return nats.Connect(strings.Join(urls(n.State.Addrs), ","), opts...)
}

// trustCore refuses a core that was removed, as far as this host knows.
func (n *Node) trustCore(i Identity) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if m, known := n.members[i.Nkey]; known && !m.Removed.IsZero() {
		return fail.New(fail.Policy, "host %s was removed from the cluster", i.Name)
	}
	return nil
}

// leaveRemoved connects to another core if the present one was removed.
func (n *Node) leaveRemoved() error {
	s, err := n.nc.TLSConnectionState()
	if err != nil || len(s.PeerCertificates) == 0 {
		return nil //nolint:nilerr // there is no connection
	}
	a, err := n.State.authority()
	if err != nil {
		return err
	}
	if i, err := identify(s.PeerCertificates[0], a.cert); err == nil && n.trustCore(i) == nil {
		return nil
	}
	return n.nc.ForceReconnect()
}

// startCore starts this host's server, with those members that it knew when it ended: a core that
// cannot read the list yet must let in those who make up the majority.
func (n *Node) startCore(ctx context.Context) error {
	own, err := n.State.membership(n.keys)
	if err != nil {
		return err
	}
	known, err := loadMembers(n.dir)
	if err != nil {
		return err
	}
	o := CoreOptions{
		Cluster: n.State.Cluster, Name: n.State.Name, Dir: filepath.Join(n.dir, "streams"), Store: storeSize, Listen: n.State.Listen, Route: n.State.Route,
		Log: n.log, Keys: n.keys, Certificate: []byte(n.State.Certificate), Authority: []byte(n.State.Authority), Members: []Membership{own}, External: n.State.External,
	}
	for _, m := range known {
		if m.Name == own.Name {
			continue
		}
		o.Members = append(o.Members, m)
		if m.Route != "" && m.Removed.IsZero() {
			o.Peers = append(o.Peers, m.Route)
		}
	}
	if n.State.Witness != "" {
		n.core, n.witness, err = StartFirst(ctx, o, n.State.Witness)
		return err
	}
	n.core, err = StartCore(ctx, o)
	return err
}

// open opens the streams. It waits for a leader.
func (n *Node) open(ctx context.Context) error {
	js, err := jetstream.New(n.nc)
	if err != nil {
		return err
	}
	authority, err := n.State.authority()
	if err != nil {
		return err
	}
	host, replicas := n.State.Name, 1
	if n.State.External != nil {
		replicas = ofOthers
	}
	for _, f := range []func(context.Context) error{
		func(ctx context.Context) (err error) {
			n.Members, err = OpenMembers(ctx, js, host, replicas, authority)
			return
		},
		func(ctx context.Context) (err error) { n.Hosts, err = OpenHosts(ctx, js, host, replicas); return },
		func(ctx context.Context) (err error) {
			n.Tasks, err = OpenTaskLog(ctx, js, host, replicas, logSize)
			return
		},
		func(ctx context.Context) (err error) { n.Queue, err = OpenQueue(ctx, js, replicas); return },
		func(ctx context.Context) (err error) {
			n.Files, err = OpenFiles(ctx, js, n.keys, replicas, fileSize, fileTime)
			return
		},
		func(ctx context.Context) (err error) {
			n.Entries, err = OpenEntries(ctx, js, replicas, entrySize)
			return
		},
	} {
		if err := patiently(ctx, f); err != nil {
			return err
		}
	}
	if n.Tunnels, err = NewTunnels(n.nc, host); err != nil {
		return err
	}
	n.Secrets = &Exchange{Conn: n.nc, Host: host, Keys: n.keys, Authority: []byte(n.State.Authority), Members: n.Members}
	if n.core == nil {
		return patiently(ctx, n.refresh)
	}
	own, err := n.State.membership(n.keys)
	if err != nil {
		return err
	}
	if err := n.Members.Add(ctx, own); err != nil && !errors.Is(err, ErrConflict) {
		return err
	}
	return patiently(ctx, n.refresh)
}

// patiently repeats f until it succeeds or ctx ends: a cluster that has just started has no leader.
func patiently(ctx context.Context, f func(context.Context) error) error {
	for {
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		err := f(try)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(tryPause):
		case <-ctx.Done():
			return fail.New(fail.Host, "the cluster does not answer: %w", err).WithHint("agent-sessionizer cluster show")
		}
	}
}

// Close ends this host's part.
func (n *Node) Close() {
	if n.Tunnels != nil {
		_ = n.Tunnels.Close() // with the connection
	}
	if n.nc != nil {
		n.nc.Close()
	}
	for _, c := range []*Core{n.core, n.witness} {
		if c != nil {
			c.Stop()
		}
	}
}

// refreshEvery is how often a node asks for changes of the members, in addition to each change that it
// is notified of: an invitation expires without one.
const refreshEvery = 15 * time.Second

// Serve does this host's part until ctx ends: it follows the members, and on a core admits invited
// hosts and lets the cluster grow.
func (n *Node) Serve(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	if n.core != nil && n.State.Signing != "" {
		a, err := DecodeAuthority([]byte(n.State.Signing))
		if err != nil {
			return err
		}
		admitter := Admitter{Cluster: n.State.Cluster, Members: n.Members, Authority: a, Addrs: n.coreAddrs, External: n.State.External != nil}
		all.Go(func() {
			if err := admitter.Serve(ctx, n.nc); err != nil {
				n.log.ErrorContext(ctx, "failed to admit hosts", "error", err)
			}
		})
	}
	var changed <-chan struct{}
	if err := patiently(ctx, func(try context.Context) (err error) {
		changed, err = n.Members.watch(ctx, try, n.core != nil)
		return err
	}); err != nil {
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the end, not an error
		}
		return err
	}
	tick := time.NewTicker(refreshEvery)
	defer tick.Stop()
	answered := time.Now()
	for {
		err := n.refresh(ctx)
		if err != nil && ctx.Err() == nil {
			n.log.WarnContext(ctx, "failed to read the members of the cluster", "error", err)
		}
		if err == nil {
			answered = time.Now()
		} else if n.core == nil && time.Since(answered) > LeaseFor { // perhaps another core answers: this one may have been removed
			answered = time.Now()
			_ = n.nc.ForceReconnect() // it is tried again
		}
		if err := n.restartFailed(ctx); err != nil && ctx.Err() == nil {
			n.log.ErrorContext(ctx, "failed to start the cluster's server again; it is tried again", "error", err)
		}
		if err := n.tidy(ctx); err != nil && ctx.Err() == nil {
			n.log.WarnContext(ctx, "failed to tidy the streams of the cluster; it is tried again", "error", err)
		}
		if err := n.grow(ctx); err != nil && ctx.Err() == nil {
			n.log.WarnContext(ctx, "failed to spread the cluster over its cores; it is tried again", "error", err)
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// restartFailed starts the servers of a core again that could not write to a full disk, once it has space.
func (n *Node) restartFailed(ctx context.Context) (err error) {
	for _, c := range []*Core{n.core, n.witness} {
		if c != nil && c.Failed() {
			err = errors.Join(err, c.Restart(ctx))
		}
	}
	return err
}

// refresh reads the members, and acts on what changed.
func (n *Node) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*tryTimeout)
	defer cancel()
	newest, err := n.Members.members.newest(ctx)
	if err != nil {
		return err
	}
	n.mu.Lock()
	by, seen := maps.Clone(n.members), n.seen
	n.mu.Unlock()
	if newest != seen { // otherwise all hosts read all members again and again
		if err := n.Members.changed(ctx, seen, by); err != nil {
			return err
		}
	}
	members := slices.SortedFunc(maps.Values(by), func(a, b Membership) int { return cmp.Compare(a.Seq, b.Seq) })
	var addrs []string
	for _, m := range members {
		if m.Addr != "" && m.Removed.IsZero() {
			addrs = append(addrs, m.Addr)
		}
	}
	n.mu.Lock()
	n.members = by
	if len(addrs) > 0 {
		n.State.Addrs = addrs
	}
	n.mu.Unlock()
	n.closeRemoved()
	if err := n.apply(ctx, members, newest != seen); err != nil || newest == seen {
		return err
	}
	if err := errors.Join(n.State.Save(n.dir), saveMembers(n.dir, members)); err != nil {
		return err // it is tried again: the disk may be full
	}
	n.mu.Lock()
	n.seen = newest
	n.mu.Unlock()
	return nil
}

// apply lets the members in on a core, and makes other hosts use the present cores.
func (n *Node) apply(ctx context.Context, members []Membership, changed bool) (err error) {
	if n.core == nil {
		if changed {
			err = n.nc.SetServerPool(urls(n.State.Addrs))
		}
		return errors.Join(err, n.leaveRemoved())
	}
	invitations, err := n.Members.Invitations(ctx)
	if err != nil {
		return err
	}
	return errors.Join(n.core.Authorize(members, invitations), n.authorizeWitness(members))
}

func (n *Node) authorizeWitness(members []Membership) error {
	if n.witness == nil {
		return nil
	}
	return n.witness.Authorize(members, nil)
}

// tidy removes from the streams what does not belong there, once they fill up. Cores do it.
func (n *Node) tidy(ctx context.Context) error {
	if n.core == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, growTimeout)
	defer cancel()
	known := func(name string) bool {
		if _, is := n.Member(name); is {
			return true
		}
		_, err := n.Members.Get(ctx, name) // it may have just joined
		return !errors.Is(err, ErrNone)
	}
	return errors.Join(n.Members.tidy(ctx), n.Queue.tidy(ctx), n.Hosts.tidy(ctx, known))
}

// Drained reports whether this host is to take no more tasks.
func (n *Node) Drained() bool {
	m, _ := n.Member(n.State.Name)
	return m.Drained
}

// Member returns the member of that name, as this host knows it now; false if no host has or had it.
func (n *Node) Member(name string) (Membership, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, m := range n.members {
		if m.Name == name {
			return m, true
		}
	}
	return Membership{}, false
}

// coreAddrs returns the addresses at which hosts reach the cores.
func (n *Node) coreAddrs(context.Context) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.State.Addrs), nil
}

// Allow decides about another host at the other end of a tunnel.
func (n *Node) Allow(i Identity) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.allow(i)
}

// allow does what Allow does. The caller holds mu.
func (n *Node) allow(i Identity) error {
	if m, ok := n.members[i.Nkey]; !ok || !m.Removed.IsZero() || m.Name != i.Name || m.Role != i.Role {
		return fail.New(fail.Policy, "host %s is not a member of the cluster", i.Name)
	}
	return nil
}
