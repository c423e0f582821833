package policy

import (
	"net/netip"
	"slices"
)

// blockedRange is a part of the address space that no session can reach without an
// opt-in per address and port.
type blockedRange struct {
	prefix netip.Prefix
	what   string
}

// blocked returns the ranges. 198.18.0.0/15 is missing on purpose, because the gateway
// answers DNS questions with addresses from it. The documentation ranges are also
// missing, because they belong to no network.
func blocked() []blockedRange {
	v4 := []blockedRange{
		{netip.MustParsePrefix("0.0.0.0/8"), "this host"},
		{netip.MustParsePrefix("10.0.0.0/8"), "private network"},
		{netip.MustParsePrefix("100.64.0.0/10"), "carrier's private network"},
		{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
		{netip.MustParsePrefix("168.63.129.16/32"), "cloud metadata"},
		{netip.MustParsePrefix("169.254.0.0/16"), "link-local and cloud metadata"},
		{netip.MustParsePrefix("172.16.0.0/12"), "private network"},
		{netip.MustParsePrefix("192.0.0.0/24"), "protocol assignments and cloud metadata"},
		{netip.MustParsePrefix("192.168.0.0/16"), "private network"},
		{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
		{netip.MustParsePrefix("240.0.0.0/4"), "reserved"},
	}
	all := slices.Clone(v4)
	all = append(all,
		blockedRange{netip.MustParsePrefix("::/96"), "loopback and IPv4-compatible"},
		blockedRange{netip.MustParsePrefix("::ffff:0:0/96"), "IPv4-mapped"},
		blockedRange{netip.MustParsePrefix("::ffff:0:0:0/96"), "IPv4-translated"},
		blockedRange{netip.MustParsePrefix("64:ff9b:1::/48"), "local NAT64"},
		blockedRange{netip.MustParsePrefix("100::/64"), "discard"},
		blockedRange{netip.MustParsePrefix("2001::/32"), "Teredo"},
		blockedRange{netip.MustParsePrefix("2002::/16"), "6to4"},
		blockedRange{netip.MustParsePrefix("fc00::/7"), "private network"},
		blockedRange{netip.MustParsePrefix("fe80::/10"), "link-local"},
		blockedRange{netip.MustParsePrefix("fec0::/10"), "site-local"},
		blockedRange{netip.MustParsePrefix("ff00::/8"), "multicast"},
	)
	// The well-known NAT64 prefix carries an IPv4 address in its last 32 bits.
	for _, r := range v4 {
		a := netip.MustParseAddr("64:ff9b::").As16()
		b := r.prefix.Addr().As4()
		copy(a[12:], b[:])
		all = append(all, blockedRange{netip.PrefixFrom(netip.AddrFrom16(a), 96+r.prefix.Bits()), r.what})
	}
	return all
}

// table is built once and never modified.
var table = blocked()

// Blocked returns the ranges that are always blocked, for a packet filter.
func Blocked() []netip.Prefix {
	prefixes := make([]netip.Prefix, len(table))
	for i, r := range table {
		prefixes[i] = r.prefix
	}
	return prefixes
}

// BlockedReason returns why an address can never be reached, or "" if it may be
// reachable.
func BlockedReason(addr netip.Addr) string {
	if !addr.IsValid() {
		return "not an address"
	}
	addr = addr.Unmap().WithZone("")
	i := slices.IndexFunc(table, func(r blockedRange) bool { return r.prefix.Contains(addr) })
	if i < 0 {
		return ""
	}
	return "blocked address (" + table[i].what + ")"
}
