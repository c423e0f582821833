// Package hostnet finds this host's own addresses and its local networks in its
// interfaces and its routing table. It reads both without special privileges. It
// decides nothing: the gateway and other packages refuse addresses based on what it
// finds.
package hostnet

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
)

// Route is an entry of the host's routing table that does not reject its packets.
type Route struct {
	To  netip.Prefix
	Hop string // the gateway and the interface; routes with an equal hop leave the host the same way
}

// Networks holds the host's own addresses and its local networks at one moment.
type Networks struct {
	own   []netip.Addr
	local []netip.Prefix
}

// Read reads the host's interfaces and routes.
func Read() (*Networks, error) {
	interfaces, err := interfacePrefixes()
	if err != nil {
		return nil, fmt.Errorf("read the host's interfaces: %w", err)
	}
	routes, err := readRoutes()
	if err != nil {
		return nil, fmt.Errorf("read the host's routes: %w", err)
	}
	return New(interfaces, routes), nil
}

// New separates local networks from the routes to the internet. interfaces holds the
// addresses of the host, each with the prefix of its network.
//
// Local networks are the network of every interface, and every destination of a route,
// unless that route belongs to a way to the internet. A next hop is such a way if its
// routes cover at least half of all addresses. A default route does, and so do the
// parts into which VPNs split theirs. If only one default route leads to the internet,
// a further route through its router still names a local network. If there are several
// ways, as beside a VPN, such routes divide the internet between them.
func New(interfaces []netip.Prefix, routes []Route) *Networks {
	n := &Networks{}
	for _, p := range interfaces {
		n.own = append(n.own, p.Addr().Unmap().WithZone(""))
		n.add(p)
	}
	for _, is4 := range []bool{true, false} {
		hops := map[string][]netip.Prefix{}
		for _, r := range routes {
			if r.To.Addr().Is4() == is4 {
				hops[r.Hop] = append(hops[r.Hop], r.To.Masked())
			}
		}
		ways := 0
		for _, to := range hops {
			if coverHalf(to) {
				ways++
			}
		}
		for _, to := range hops {
			parts := slices.DeleteFunc(slices.Clone(to), func(p netip.Prefix) bool { return p.Bits() == 0 })
			isWay := coverHalf(to)
			for _, p := range parts {
				if !isWay || ways == 1 && !coverHalf(parts) && !p.IsSingleIP() {
					n.add(p)
				}
			}
		}
	}
	return n
}

// add adds a local network, unless it covers half of the internet.
func (n *Networks) add(p netip.Prefix) {
	if p = p.Masked(); p.IsValid() && !coverHalf([]netip.Prefix{p}) && !slices.Contains(n.local, p) {
		n.local = append(n.local, p)
	}
}

// global contains all IPv6 addresses of the internet.
var global = netip.MustParsePrefix("2000::/3")

// coverHalf reports whether prefixes of one family cover at least half of all addresses
// of the internet.
func coverHalf(prefixes []netip.Prefix) bool {
	prefixes = slices.Clone(prefixes)
	slices.SortFunc(prefixes, netip.Prefix.Compare) // a network comes before its parts
	var last netip.Prefix
	covered := 0.0
	for _, p := range prefixes {
		whole := 0
		if p.Addr().Is6() {
			whole = global.Bits()
			if !p.Overlaps(global) {
				continue
			}
		}
		if last.IsValid() && last.Overlaps(p) {
			continue
		}
		last = p
		covered += math.Ldexp(1, min(whole-p.Bits(), 0))
	}
	return covered >= 0.5
}

// Find returns why an address belongs to this host or to one of its local networks, and
// "" if it belongs to neither.
func (n *Networks) Find(addr netip.Addr) string {
	addr = inner(addr)
	if slices.ContainsFunc(n.own, func(a netip.Addr) bool { return inner(a) == addr }) {
		return "an address of the host itself"
	}
	if i := slices.IndexFunc(n.local, func(p netip.Prefix) bool { return p.Contains(addr) }); i >= 0 {
		return "an address of the host's local network " + n.local[i].String()
	}
	return ""
}

var nat64 = netip.MustParsePrefix("64:ff9b::/96")

// inner returns the address that packets to an address finally reach: the IPv4 address
// inside a mapped or NAT64 address, otherwise the address itself.
func inner(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if nat64.Contains(a) {
		b := a.As16()
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return a
}

// interfacePrefixes returns the addresses of all interfaces, each with the length of
// its network's prefix.
func interfacePrefixes() ([]netip.Prefix, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var prefixes []netip.Prefix
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if p, ok := prefix(n.IP, n.Mask); ok {
				prefixes = append(prefixes, p)
			}
		}
	}
	return prefixes, nil
}

// prefix combines an address and a mask. It reports false for a mask with holes.
func prefix(ip net.IP, mask net.IPMask) (netip.Prefix, bool) {
	addr, ok := netip.AddrFromSlice(ip)
	addr = addr.Unmap()
	ones, bits := mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(addr, ones-bits+addr.BitLen()), true
}
