package hostnet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// readRoutes reads all routing tables over netlink.
func readRoutes() ([]Route, error) {
	dump, err := syscall.NetlinkRIB(unix.RTM_GETROUTE, unix.AF_UNSPEC)
	if err != nil {
		return nil, err
	}
	return parseRoutes(dump)
}

var errRoute = errors.New("not a route message")

func parseRoutes(dump []byte) ([]Route, error) {
	messages, err := syscall.ParseNetlinkMessage(dump)
	if err != nil {
		return nil, err
	}
	var routes []Route
	for _, m := range messages {
		switch m.Header.Type {
		case unix.NLMSG_DONE:
			return routes, nil
		case unix.RTM_NEWROUTE:
			found, err := parseRoute(m)
			if err != nil {
				return nil, err
			}
			routes = append(routes, found...)
		case unix.NLMSG_ERROR:
			return nil, errRoute
		}
	}
	return nil, errors.New("the list of routes is incomplete")
}

// parseRoute returns one Route for every next hop of a route.
func parseRoute(m syscall.NetlinkMessage) ([]Route, error) {
	if len(m.Data) < unix.SizeofRtMsg {
		return nil, errRoute
	}
	family, bits, table, kind := m.Data[0], int(m.Data[1]), m.Data[4], m.Data[7]
	var to netip.Addr
	switch family {
	case unix.AF_INET:
		to = netip.IPv4Unspecified()
	case unix.AF_INET6:
		to = netip.IPv6Unspecified()
	default:
		return nil, nil // multicast and MPLS
	}
	switch {
	case kind == unix.RTN_UNICAST:
	case table == unix.RT_TABLE_LOCAL && (kind == unix.RTN_LOCAL || kind == unix.RTN_BROADCAST || kind == unix.RTN_ANYCAST):
	default:
		return nil, nil // rejects or drops its packets
	}
	attrs, err := syscall.ParseNetlinkRouteAttr(&m)
	if err != nil {
		return nil, err
	}
	// A single hop is in the message itself, several are in a list.
	var gateway, device []byte
	var hops []string
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.RTA_DST:
			addr, ok := netip.AddrFromSlice(a.Value)
			if !ok || addr.BitLen() != to.BitLen() {
				return nil, errRoute
			}
			to = addr
		case unix.RTA_GATEWAY, unix.RTA_VIA:
			gateway = a.Value
		case unix.RTA_OIF:
			device = a.Value
		case unix.RTA_MULTIPATH:
			if hops, err = parseHops(a.Value); err != nil {
				return nil, err
			}
		}
	}
	if hops == nil {
		hops = []string{hop(gateway, device)}
	}
	p, err := to.Prefix(bits)
	if err != nil {
		return nil, err
	}
	routes := make([]Route, len(hops))
	for i := range hops {
		routes[i] = Route{To: p, Hop: hops[i]}
	}
	return routes, nil
}

func hop(gateway, device []byte) string { return fmt.Sprintf("%x dev %x", gateway, device) }

// parseHops reads the hops of a multipath route: a sequence of struct rtnexthop, each
// followed by attributes.
func parseHops(b []byte) ([]string, error) {
	var hops []string
	for len(b) >= unix.SizeofRtNexthop {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofRtNexthop || size > len(b) {
			return nil, errRoute
		}
		var gateway []byte
		for rest := b[unix.SizeofRtNexthop:size]; len(rest) >= unix.SizeofRtAttr; {
			n := int(binary.NativeEndian.Uint16(rest))
			if n < unix.SizeofRtAttr || n > len(rest) {
				return nil, errRoute
			}
			if kind := binary.NativeEndian.Uint16(rest[2:]); kind == unix.RTA_GATEWAY || kind == unix.RTA_VIA {
				gateway = rest[unix.SizeofRtAttr:n]
			}
			rest = rest[min(align(n), len(rest)):]
		}
		hops = append(hops, hop(gateway, b[4:8]))
		b = b[min(align(size), len(b)):]
	}
	return hops, nil
}

// align rounds up to netlink's alignment.
func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }
