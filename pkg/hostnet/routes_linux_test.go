package hostnet

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// attr returns a padded netlink attribute.
func attr(kind byte, value ...byte) []byte {
	b := append([]byte{byte(4 + len(value)), 0, kind, 0}, value...)
	return append(b, make([]byte, align(len(b))-len(b))...)
}

// message returns a netlink message of a little-endian machine.
func message(kind byte, data ...byte) []byte {
	b := append([]byte{byte(16 + len(data)), 0, 0, 0, kind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, data...)
	return append(b, make([]byte, align(len(b))-len(b))...)
}

func rtmsg(family, bits, table, kind byte, attrs ...[]byte) []byte {
	b := []byte{family, bits, 0, 0, table, 0, 0, kind, 0, 0, 0, 0}
	return append(b, slices.Concat(attrs...)...)
}

var done = message(unix.NLMSG_DONE, 0, 0, 0, 0)

func TestParseRoutes(t *testing.T) {
	net24 := attr(unix.RTA_DST, 203, 0, 113, 0)
	one, two := attr(unix.RTA_OIF, 1, 0, 0, 0), attr(unix.RTA_GATEWAY, 198, 51, 100, 2)
	nexthop := func(device byte, attrs ...[]byte) []byte {
		b := append([]byte{0, 0, 0, 0, device, 0, 0, 0}, slices.Concat(attrs...)...)
		b[0] = byte(len(b))
		return b
	}
	both := attr(unix.RTA_MULTIPATH, append(nexthop(1, two), nexthop(2)...)...)
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"default":                               {rtmsg(unix.AF_INET, 0, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, two, one), "0.0.0.0/0 c6336402 dev 01000000\n"},
		"network":                               {rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, net24, one), "203.0.113.0/24  dev 01000000\n"},
		"of another table":                      {rtmsg(unix.AF_INET, 24, 99, unix.RTN_UNICAST, net24, one), "203.0.113.0/24  dev 01000000\n"},
		"IPv6":                                  {rtmsg(unix.AF_INET6, 0, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, one), "::/0  dev 01000000\n"},
		"several hops":                          {rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, net24, both), "203.0.113.0/24 c6336402 dev 01000000\n203.0.113.0/24  dev 02000000\n"},
		"via another family":                    {rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, net24, attr(unix.RTA_VIA, 10, 0, 9), one), "203.0.113.0/24 0a0009 dev 01000000\n"},
		"own":                                   {rtmsg(unix.AF_INET, 24, unix.RT_TABLE_LOCAL, unix.RTN_LOCAL, net24, one), "203.0.113.0/24  dev 01000000\n"},
		"broadcast":                             {rtmsg(unix.AF_INET, 24, unix.RT_TABLE_LOCAL, unix.RTN_BROADCAST, net24, one), "203.0.113.0/24  dev 01000000\n"},
		"anycast":                               {rtmsg(unix.AF_INET, 24, unix.RT_TABLE_LOCAL, unix.RTN_ANYCAST, net24, one), "203.0.113.0/24  dev 01000000\n"},
		"own in a table of a transparent proxy": {rtmsg(unix.AF_INET, 24, 99, unix.RTN_LOCAL, net24, one), ""},
		"unreachable":                           {rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNREACHABLE, net24), ""},
		"multicast":                             {rtmsg(unix.AF_INET6, 8, unix.RT_TABLE_LOCAL, unix.RTN_MULTICAST, one), ""},
		"of another family":                     {rtmsg(unix.AF_MPLS, 20, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, one), ""},
	} {
		routes, err := parseRoutes(append(message(unix.RTM_NEWROUTE, c.data...), done...))
		got := ""
		for _, r := range routes {
			got += r.To.String() + " " + r.Hop + "\n"
		}
		if err != nil || got != c.want {
			t.Errorf("%s: parseRoutes() = %q, %v, want %q", name, got, err, c.want)
		}
	}
}

// TestParseRoutesRefuses checks that a partial table is refused, because a network that
// is missing in it could be reached.
func TestParseRoutesRefuses(t *testing.T) {
	good := rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, attr(unix.RTA_DST, 203, 0, 113, 0))
	for name, dump := range map[string][]byte{
		"nothing":             nil,
		"no end":              message(unix.RTM_NEWROUTE, good...),
		"an error":            append(message(unix.NLMSG_ERROR, 1, 0, 0, 0), done...),
		"cut":                 message(unix.RTM_NEWROUTE, good...)[:20],
		"short":               append(message(unix.RTM_NEWROUTE, good[:8]...), done...),
		"a mask too long":     append(message(unix.RTM_NEWROUTE, rtmsg(unix.AF_INET, 33, unix.RT_TABLE_MAIN, unix.RTN_UNICAST)...), done...),
		"an address cut":      append(message(unix.RTM_NEWROUTE, rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, attr(unix.RTA_DST, 203, 0))...), done...),
		"of the other family": append(message(unix.RTM_NEWROUTE, rtmsg(unix.AF_INET6, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, attr(unix.RTA_DST, 203, 0, 113, 0))...), done...),
		"hops of no length":   append(message(unix.RTM_NEWROUTE, rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, attr(unix.RTA_MULTIPATH, make([]byte, 8)...))...), done...),
		"hops too long":       append(message(unix.RTM_NEWROUTE, rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, attr(unix.RTA_MULTIPATH, 99, 0, 0, 0, 1, 0, 0, 0))...), done...),
		"a hop's attribute":   append(message(unix.RTM_NEWROUTE, rtmsg(unix.AF_INET, 24, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, attr(unix.RTA_MULTIPATH, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 5, 0))...), done...),
	} {
		if routes, err := parseRoutes(dump); err == nil {
			t.Errorf("%s: parseRoutes() = %v, want an error", name, routes)
		}
	}
}
