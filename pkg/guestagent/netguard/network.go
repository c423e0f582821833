package netguard

import (
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const maxUpstream = 4

// readNetwork reads the network state that the rules depend on. All of it comes from the
// kernel or from files that only root can write.
func readNetwork(g sys.Guest) (rules.Network, []netip.AddrPort) {
	servers := upstream(g)
	n := rules.Network{Gateways: Gateways(), IPv6: globalIPv6()}
	for _, s := range servers {
		n.Upstream = append(n.Upstream, s.Addr())
	}
	return n, servers
}

// Gateways returns the next hops of the IPv4 default routes.
func Gateways() []netip.Addr {
	var found []netip.Addr
	for line := range strings.Lines(sys.Text("/proc/net/route")) {
		f := strings.Fields(line)
		if len(f) < 8 || f[1] != "00000000" || f[7] != "00000000" {
			continue
		}
		if a := kernelAddr(f[2]); a.Is4() && !a.IsUnspecified() && !slices.Contains(found, a) {
			found = append(found, a)
		}
	}
	return found
}

// host returns the host's address as seen from the guest.
func host() (netip.Addr, bool) {
	found := Gateways()
	if len(found) == 0 {
		return netip.Addr{}, false
	}
	return found[0], true
}

// globalIPv6 reports whether the guest has a global IPv6 address.
func globalIPv6() bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	internet := netip.MustParsePrefix("2000::/3")
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		p, err := netip.ParsePrefix(a.String())
		return err == nil && internet.Contains(p.Addr()) && policy.BlockedReason(p.Addr()) == ""
	})
}

// upstream returns the network's resolvers from the first source that names any:
// the override file, then the files of this image's DHCP client, then the
// resolv.conf that ours replaced.
func upstream(g sys.Guest) []netip.AddrPort {
	if own := parseServers(g.Text(upstreams), "", g.Fake); len(own) > 0 {
		return own
	}
	for _, source := range []struct{ pattern, keyword string }{
		{"/run/systemd/netif/leases/*", "DNS="},
		{"/run/systemd/resolve/resolv.conf", "nameserver"},
		{"/var/lib/dhcp/*.leases", "option domain-name-servers"},
		{"/var/lib/dhcpcd/*.lease4", "nameserver"},
		{"/run/NetworkManager/no-stub-resolv.conf", "nameserver"},
		{"/run/resolvconf/interface/*", "nameserver"},
		{"/etc/resolv.conf", "nameserver"},
		{resolvOld, "nameserver"},
	} {
		paths, err := filepath.Glob(g.Path(source.pattern))
		if err != nil {
			continue
		}
		var text strings.Builder
		for _, p := range paths {
			text.WriteString(sys.Text(p) + "\n")
		}
		if found := parseServers(text.String(), source.keyword, g.Fake); len(found) > 0 {
			return found
		}
	}
	return nil
}

// parseServers reads the addresses after a keyword at the start of a line. For
// "option" lines the last line wins, because lease files grow at their end. It
// skips loopback addresses, because they belong to a local stub, which would send
// the query back to the daemon. Only a fake guest may use them.
func parseServers(text, keyword string, loopback bool) []netip.AddrPort {
	var found []netip.AddrPort
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		rest, ok := strings.CutPrefix(line, keyword)
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		var these []netip.AddrPort
		for _, word := range strings.FieldsFunc(rest, func(r rune) bool { return strings.ContainsRune(" \t,;", r) }) {
			s, err := netip.ParseAddrPort(word)
			if err != nil {
				a, err := netip.ParseAddr(word)
				if err != nil {
					continue
				}
				s = netip.AddrPortFrom(a, 53)
			}
			a := s.Addr()
			if s.Port() == 0 || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() && !loopback {
				continue
			}
			if !loopback {
				s = netip.AddrPortFrom(a.Unmap(), 53) // the only port that the firewall opens
			}
			these = append(these, s)
		}
		switch {
		case len(these) == 0:
		case strings.HasPrefix(keyword, "option"):
			found = these
		default:
			found = append(found, these...)
		}
	}
	return found[:min(len(found), maxUpstream)]
}
