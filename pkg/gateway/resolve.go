package gateway

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/hostnet"
)

const (
	maxLookups   = 64 // concurrent queries to the host's resolver
	maxAddresses = 16 // addresses of one name that are tried
	lookupTime   = 15 * time.Second
	resolvedTime = 20 * time.Second // how long an answer is reused
	maxResolved  = 1024
	networksTime = time.Second // how long the list of the host's networks is reused
)

func hostResolver(ctx context.Context, name string) ([]netip.Addr, error) {
	// The trailing dot disables search domains.
	return new(net.Resolver).LookupNetIP(ctx, "ip", name+".")
}

// resolvedNames caches the host's answers for resolvedTime.
type resolvedNames struct {
	mu sync.Mutex
	m  map[string]resolvedName
}

type resolvedName struct {
	addrs []netip.Addr
	until time.Time
}

func (r *resolvedNames) get(name string) ([]netip.Addr, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.m[name]
	return e.addrs, ok && time.Now().Before(e.until)
}

func (r *resolvedNames) put(name string, addrs []netip.Addr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.m == nil || len(r.m) >= maxResolved {
		r.m = map[string]resolvedName{}
	}
	r.m[name] = resolvedName{addrs, time.Now().Add(resolvedTime)}
}

// resolver resolves names on the host.
type resolver struct {
	ctx      context.Context // of the gateway
	resolve  func(ctx context.Context, name string) ([]netip.Addr, error)
	lookups  singleflight.Group
	resolved resolvedNames
	asking   *semaphore.Weighted
}

// lookup asks the host's resolver, once for all concurrent callers that need the same
// name.
func (r *resolver) lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	if addrs, ok := r.resolved.get(name); ok {
		return addrs, nil
	}
	answer := r.lookups.DoChan(name, func() (any, error) {
		// The query may outlive the connection that asked first, but not the gateway.
		ctx, cancel := context.WithTimeout(r.ctx, lookupTime)
		defer cancel()
		if err := r.asking.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		defer r.asking.Release(1)
		addrs, err := r.resolve(ctx, name)
		if err != nil {
			return nil, err
		}
		addrs = usable(addrs)
		r.resolved.put(name, addrs)
		return addrs, nil
	})
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case a := <-answer:
		addrs, ok := a.Val.([]netip.Addr)
		switch {
		case a.Err != nil:
			return nil, fmt.Errorf("resolve: %w", a.Err)
		case !ok || len(addrs) == 0:
			return nil, fmt.Errorf("resolve: %s has no address", name)
		}
		return addrs, nil
	}
}

// usable sorts addresses into the order in which they are tried. It keeps the
// resolver's order but alternates between the address families, so that a family that
// does not work costs one attempt.
func usable(addrs []netip.Addr) []netip.Addr {
	var first, second, all []netip.Addr
	for _, a := range addrs {
		if a = a.Unmap(); !a.IsValid() || slices.Contains(all, a) {
			continue
		}
		all = append(all, a)
		if a.Is4() == all[0].Is4() {
			first = append(first, a)
		} else {
			second = append(second, a)
		}
	}
	all = all[:0]
	for i := range max(len(first), len(second)) {
		if i < len(first) {
			all = append(all, first[i])
		}
		if i < len(second) {
			all = append(all, second[i])
		}
	}
	return all[:min(len(all), maxAddresses)]
}

// hostNetworks caches the host's networks for networksTime. Reading them for every
// connection would let a guest keep the host busy.
type hostNetworks struct {
	read  func() (*hostnet.Networks, error)
	mu    sync.Mutex
	now   *hostnet.Networks
	err   error
	until time.Time
}

// find returns why an address belongs to the host or to its local networks, and
// "" when it does not. If the networks cannot be read, every address counts as one of
// the host's.
func (n *hostNetworks) find(addr netip.Addr) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if now := time.Now(); !now.Before(n.until) {
		n.now, n.err = n.read()
		n.until = time.Now().Add(networksTime)
	}
	if n.err != nil {
		return "could not verify that it is outside the host's networks: " + n.err.Error()
	}
	return n.now.Find(addr)
}
