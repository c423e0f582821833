// Package netguard keeps the network of a guest within its policy, from inside: it owns the
// packet filter and the DNS proxy, their daemon and systemd unit, the query log and the
// lockdown. It never allows what the policy does not; root in the guest can remove it.
package netguard

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/resolver"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/secrets"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// recheckEvery is how often the daemon compares the machine with its desired state.
const recheckEvery = 3 * time.Second

// gcPercent is how much garbage the daemon accumulates before a collection, in
// percent of the live heap. With ten thousand names this is up to 40 MB.
const gcPercent = 800

// daemon enforces the policy. Its parts are replaced, never changed, so that the
// proxy decides without a lock.
type daemon struct {
	guest   sys.Guest
	version string
	started time.Time
	log     *queryLog
	proxy   *resolver.Proxy
	fw      firewall

	policy  atomic.Pointer[policy.Policy]
	servers atomic.Pointer[[]netip.AddrPort]

	mu      sync.Mutex // guards the fields below and serializes reloads
	network rules.Network
	digest  string
	trouble map[string]error // last error of each part
	bound   map[string]string
	serving sync.WaitGroup
}

// Daemon runs until ctx ends. The rules stay in the kernel after it returns. Daemon
// calls ready when the firewall is active; a value on reload makes it read the
// policy again.
func Daemon(ctx context.Context, g sys.Guest, version string, reload <-chan os.Signal, ready func()) error {
	if err := g.NeedRoot("daemon"); err != nil {
		return err
	}
	if err := os.MkdirAll(g.Path(stateDir), 0o755); err != nil {
		return err
	}
	// The live heap is a few megabytes. At the default setting the garbage
	// collector would run ten times a second under load and delay DNS queries.
	debug.SetGCPercent(gcPercent)
	unlock, err := lockFile(filepath.Join(g.Path(stateDir), "daemon.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	log, err := openLog(g.Path(stateDir))
	if err != nil {
		return err
	}
	d := &daemon{
		guest: g, version: version, started: time.Now().UTC(), log: log, fw: firewall{fake: g.Fake},
		trouble: map[string]error{}, bound: map[string]string{},
	}
	d.servers.Store(&[]netip.AddrPort{})
	upstream := &resolver.Upstream{Servers: func() []netip.AddrPort { return *d.servers.Load() }}
	if !g.Fake {
		upstream.Dialer = net.Dialer{Control: markSocket}
	}
	d.proxy = &resolver.Proxy{Policy: d.policy.Load, Upstream: upstream, Log: log.add, Who: newDNSClients().programOf, Host: host}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A bad policy must not keep the lockdown from loading; the status shows the
	// error.
	if err := d.reload(ctx); err != nil {
		slog.Error("policy reload failed", "error", err)
	}
	d.reconcile(ctx)
	control, err := d.listenControl(cancel)
	if err != nil {
		return err
	}
	if d.isFirewallLoaded() {
		ready()
	}
	d.loop(ctx, reload, ready)
	err = control()
	cancel()
	d.serving.Wait()
	d.proxy.Wait()
	return errors.Join(err, log.close())
}

// loop keeps the machine in its desired state until ctx ends.
func (d *daemon) loop(ctx context.Context, reload <-chan os.Signal, ready func()) {
	tick := time.NewTicker(recheckEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-reload:
			if err := d.reload(ctx); err != nil {
				slog.Error("policy reload failed", "error", err)
			}
		case <-tick.C:
			if _, err := os.Stat(d.guest.Path(stateDir)); d.guest.Fake && errors.Is(err, fs.ErrNotExist) {
				return // the fake guest was removed
			}
			d.reconcile(ctx)
			if d.isFirewallLoaded() {
				ready() // repeated calls are harmless
			}
		}
	}
}

// reload applies the policy file. If the file is bad, the previous policy stays in
// force and reload returns the error.
func (d *daemon) reload(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	data, err := os.ReadFile(d.guest.Path(policyIn))
	if errors.Is(err, fs.ErrNotExist) && d.policy.Load() == nil {
		d.network = d.readNetwork()
		return d.fw.load(ctx, nil, d.network)
	}
	var p *policy.Policy
	if err == nil {
		p, err = policy.Unmarshal(data)
	}
	d.trouble["policy"] = err
	if err != nil {
		if d.policy.Load() == nil {
			err = errors.Join(err, d.fw.load(ctx, nil, d.network))
		}
		return err
	}
	sum := sha256.Sum256(data)
	d.digest = hex.EncodeToString(sum[:])
	d.policy.Store(p)
	d.network = d.readNetwork()
	return d.fw.load(ctx, p, d.network)
}

func (d *daemon) readNetwork() rules.Network {
	n, servers := readNetwork(d.guest)
	d.servers.Store(&servers)
	return n
}

// reconcile brings the machine to its desired state. Each step runs at every tick, and
// so repairs what other programs changed.
func (d *daemon) reconcile(ctx context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := d.readNetwork(); !reflect.DeepEqual(n, d.network) {
		d.network = n
		d.recordState("firewall", d.fw.load(ctx, d.policy.Load(), n))
	} else {
		d.recordState("firewall", d.fw.check(ctx))
	}
	d.recordState("dns", d.bind(ctx))
	if !d.guest.Fake {
		d.recordState("resolv.conf", pointHere(d.guest))
	}
	d.recordState("secrets", secrets.MakeDir(d.guest))
}

// recordState records the state of a part and logs changes.
func (d *daemon) recordState(part string, err error) {
	if before := d.trouble[part]; err != nil && (before == nil || before.Error() != err.Error()) {
		slog.Error("component failed", "part", part, "error", err)
	}
	d.trouble[part] = err
}

// bind serves DNS on every address that is not yet served.
func (d *daemon) bind(ctx context.Context) error {
	redirected := fmt.Sprint(":", rules.RedirectPort)
	wanted := []struct {
		family, addr string
		optional     bool
	}{
		{"4", "127.0.0.1:53", false},
		{"4", "0.0.0.0" + redirected, false},
		{"6", "[::1]:53", !kernelIPv6()},
		{"6", "[::]" + redirected, !kernelIPv6()},
	}
	if d.guest.Fake {
		wanted = wanted[:1]
		wanted[0].addr = "127.0.0.1:0"
	}
	var errs []error
	for _, w := range wanted {
		if d.bound[w.addr] != "" || w.optional {
			continue
		}
		b, err := resolver.Bind(ctx, w.family, w.addr)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		d.bound[w.addr] = b.Addr()
		d.serving.Go(func() {
			if err := b.Serve(ctx, d.proxy); err != nil {
				slog.Error("DNS server failed", "addr", w.addr, "error", err)
			}
			d.mu.Lock()
			defer d.mu.Unlock()
			delete(d.bound, w.addr)
		})
	}
	return errors.Join(errs...)
}

func (d *daemon) isFirewallLoaded() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.trouble["firewall"] == nil
}

// status returns the daemon's current status.
func (d *daemon) status(ctx context.Context) guestproto.Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := guestproto.Status{Version: guestproto.Version, Program: d.version, Started: d.started}
	var errLog error
	s.Counters, errLog = d.log.status()
	s.Firewall, s.Counters.Dropped = d.fw.status(ctx)
	s.Firewall.IPv6 = d.network.IPv6
	if p := d.policy.Load(); p != nil {
		s.Policy = guestproto.Policy{Mode: string(p.Mode), Names: len(p.Names), Digest: d.digest}
	}
	for _, key := range []string{"127.0.0.1:53", "127.0.0.1:0"} {
		if addr := d.bound[key]; addr != "" {
			s.DNS.Listen = addr
		}
	}
	for _, server := range *d.servers.Load() {
		s.DNS.Upstream = append(s.DNS.Upstream, server.String())
	}
	if err := errors.Join(d.trouble["policy"], d.trouble["dns"], d.trouble["resolv.conf"], errLog); err != nil {
		s.DNS.Error = sys.OneLine(err)
	}
	s.DNS.Upstream = slices.Clip(s.DNS.Upstream)
	return s
}

// lockFile takes a lock that the kernel releases with the process, so that only one
// daemon runs.
func lockFile(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another agent-guest daemon is running: %w", err), f.Close())
	}
	// Closing the file releases the lock; no written data can be lost.
	return func() { _ = f.Close() }, nil
}
