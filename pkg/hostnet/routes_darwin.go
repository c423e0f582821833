package hostnet

import (
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/net/route"
)

// readRoutes reads the routing tables of both address families.
func readRoutes() ([]Route, error) {
	dump, err := route.FetchRIB(syscall.AF_UNSPEC, route.RIBTypeRoute, 0)
	if err != nil {
		return nil, err
	}
	messages, err := route.ParseRIB(route.RIBTypeRoute, dump)
	if err != nil {
		return nil, err
	}
	var routes []Route
	for _, m := range messages {
		m, ok := m.(*route.RouteMessage)
		if !ok || m.Flags&syscall.RTF_UP == 0 || m.Flags&(syscall.RTF_REJECT|syscall.RTF_BLACKHOLE|syscall.RTF_MULTICAST) != 0 {
			continue
		}
		if to, ok := destination(m); ok {
			hop := ""
			if len(m.Addrs) > syscall.RTAX_GATEWAY {
				hop = ipOf(m.Addrs[syscall.RTAX_GATEWAY]).String()
			}
			routes = append(routes, Route{To: to, Hop: fmt.Sprintf("%s dev %d", hop, m.Index)})
		}
	}
	return routes, nil
}

// destination returns the destination of a route.
func destination(m *route.RouteMessage) (netip.Prefix, bool) {
	if len(m.Addrs) <= syscall.RTAX_DST {
		return netip.Prefix{}, false
	}
	ip := ipOf(m.Addrs[syscall.RTAX_DST])
	if ip == nil {
		return netip.Prefix{}, false
	}
	if m.Flags&syscall.RTF_HOST != 0 {
		return prefix(ip, net.CIDRMask(len(ip)*8, len(ip)*8))
	}
	mask := net.CIDRMask(0, len(ip)*8)
	if len(m.Addrs) > syscall.RTAX_NETMASK {
		switch a := m.Addrs[syscall.RTAX_NETMASK].(type) {
		case *route.Inet4Addr:
			mask = net.IPMask(a.IP[:])
		case *route.Inet6Addr:
			mask = net.IPMask(a.IP[:])
		}
	}
	return prefix(ip, mask)
}

// ipOf returns the bytes of an IP address, and nil for any other kind of address.
func ipOf(a route.Addr) net.IP {
	switch a := a.(type) {
	case *route.Inet4Addr:
		return a.IP[:]
	case *route.Inet6Addr:
		return a.IP[:]
	}
	return nil
}
