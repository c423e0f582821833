package gateway

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	maxLookups   = 64 // of the host's resolver, at one time
	maxAddresses = 16 // of one name that are tried
	lookupTime   = 15 * time.Second
	resolvedTime = 20 * time.Second // an answer is used again
	maxResolved  = 1024
	ownTime      = time.Second // the host's own addresses are believed
)

func hostResolver(ctx context.Context, name string) ([]netip.Addr, error) {
	// The root dot keeps search domains out.
	return new(net.Resolver).LookupNetIP(ctx, "ip", name+".")
}

// resolvedNames keeps the host's answers for a moment.
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

// lookup asks the host's resolver, once for all that wait for the same name.
func (g *Gateway) lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	if addrs, ok := g.resolved.get(name); ok {
		return addrs, nil
	}
	answer := g.lookups.DoChan(name, func() (any, error) {
		// It outlives the connection that asked first, not the gateway.
		ctx, cancel := context.WithTimeout(g.ctx, lookupTime)
		defer cancel()
		if err := g.asking.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		defer g.asking.Release(1)
		addrs, err := g.resolve(ctx, name)
		if err != nil {
			return nil, err
		}
		addrs = usable(addrs)
		g.resolved.put(name, addrs)
		return addrs, nil
	})
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case r := <-answer:
		addrs, ok := r.Val.([]netip.Addr)
		switch {
		case r.Err != nil:
			return nil, fmt.Errorf("resolve: %w", r.Err)
		case !ok || len(addrs) == 0:
			return nil, fmt.Errorf("resolve: %s has no address", name)
		}
		return addrs, nil
	}
}

// usable puts addresses in the order in which they are tried: the resolver's,
// but the families in turn, so that one that does not work costs one try.
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

// ownAddresses are the host's, which no name may lead to.
type ownAddresses struct {
	mu    sync.Mutex
	addrs []netip.Addr
	err   error
	until time.Time
}

// isOwn says whether an address is the host's own. If that cannot be found out,
// every address is.
func (g *Gateway) isOwn(addr netip.Addr) bool {
	o := &g.own
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := time.Now(); !now.Before(o.until) {
		o.addrs, o.err = g.hostAddrs()
		o.until = now.Add(ownTime)
	}
	addr = inner(addr)
	return o.err != nil || slices.ContainsFunc(o.addrs, func(a netip.Addr) bool { return inner(a) == addr })
}

var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// inner is the address that an address leads to in the end.
func inner(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if nat64.Contains(a) {
		b := a.As16()
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return a
}

func interfaceAddrs() ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				addrs = append(addrs, addr.Unmap())
			}
		}
	}
	return addrs, nil
}
