// Package plan is what the escape suite's two halves share: the pretend world, and
// the numbered techniques. The attack client in the guest tries them, the test on the
// host judges them. The package contains no code for either.
package plan

import (
	"fmt"
	"strings"
)

// These are the addresses of the pretend world. Every address that is not the host's
// own is answered there, so the list names only the meaningful ones.
const (
	Resolver = "203.0.113.53" // the host's own resolver
	CDN      = "203.0.113.10" // serves allowed and forbidden names alike; if framing is ambiguous it uses Content-Length
	CDN2     = "203.0.113.14" // likewise, but uses Transfer-Encoding
	Wild     = "203.0.113.11" // *.wild.example.org
	SSH      = "203.0.113.22" // ssh.example.com
	DB       = "203.0.113.12" // db.example.com
	Evil     = "203.0.113.66"
	Foreign  = "203.0.113.88" // a foreign resolver
	Evil6    = "2001:db8:66::66"

	HostPublic  = "198.51.100.7" // the host's address toward the world
	HostLAN     = "10.99.0.2"
	HostPublic6 = "2001:db8:1::7"
	LAN         = "10.99.0.5"
	Neighbour   = "198.51.100.66" // in the host's own network, with global addresses
	Neighbour6  = "2001:db8:1::66"
	Routed      = "192.0.2.66" // in a network behind a router other than the internet's
	RoutedNet   = "192.0.2.0/24"

	Guest    = "192.168.5.15"
	Gateway  = "192.168.5.2"
	StockDNS = "192.168.5.3" // of slirp; the egress gateway has its DNS at the gateway's address
)

// These are names. Those of Evil* are on no list.
const (
	Allowed    = "allowed.example.com" // at CDN
	Allowed2   = "te.example.com"      // at CDN2
	AllowedSSH = "ssh.example.com"
	AllowedDB  = "db.example.com" // on port DBPort only
	WildZone   = "wild.example.org"
	Alt        = "alt.example.com"   // at CDN, on AltHTTP and AltTLS only
	Owner      = "owner.example.com" // its owner points it at Evil
	FlipZone   = "flip.example.com"  // answers alternate between public and LAN addresses
	EvilName   = "evil.example.net"
	EvilCDN    = "evil-cdn.example.net" // at CDN and CDN2
	EvilSSH    = "evil-ssh.example.net" // at SSH
	DBPort     = 5432
	AltHTTP    = 8080
	AltTLS     = 8443
)

// These are names of hosts that a secret is bound to. All are at CDN, except ForgeAPI at CDN2.
const (
	Bound    = "bound.example.com" // to which Key is bound; reflects it
	Forge    = "github.com"
	ForgeAPI = "api.github.com"
	Model    = "api.anthropic.com"
	Project  = "acme/widget" // the repository of the sessions
	Other    = "acme/other"
)

// These are the variables of the secrets.
const (
	Key      = "BOUND_KEY"
	ForgeKey = "GITHUB_TOKEN"
	ModelKey = "ANTHROPIC_API_KEY"
)

// Forbidden is a part of paths at Bound: requests for them must not have the secret.
const Forbidden = "/forbidden"

// Services on the host's loopback address that no session may see, and one of the
// second VM.
const (
	HostPort    = 8000
	DockerPort  = 2375
	HostUDPPort = 9999
	GuestPort   = 8099
)

// HighPorts are ports without a rule.
var HighPorts = []int{1337, 10443, 31337, 49152, 61001}

// Fence is the path requested of Allowed after every technique: once the request has
// arrived, everything that the guest sent before it has arrived too.
const Fence = "/fence/"

// A Rebind is an allowed name that resolves to a forbidden address.
type Rebind struct{ Label, Addr string }

// Name returns the name that the guest asks for.
func (r Rebind) Name() string { return "rb-" + r.Label + ".example.com" }

// Rebinds covers every range that is not the public internet, plain and in each form
// that carries an IPv4 address inside an IPv6 one.
var Rebinds = []Rebind{
	{"loopback", "127.0.0.1"},
	{"loopback2", "127.8.9.1"},
	{"this-host", "0.0.0.0"},
	{"10", LAN},
	{"172", "172.16.3.4"},
	{"192", "192.168.77.1"},
	{"cgnat", "100.64.1.1"},
	{"metadata", "169.254.169.254"},
	{"azure", "168.63.129.16"},
	{"oracle", "192.0.0.192"},
	{"class-e", "240.1.2.3"},
	{"multicast", "224.0.0.251"},
	{"broadcast", "255.255.255.255"},
	{"host", HostPublic},
	{"neighbour", Neighbour},
	{"neighbour-v6", Neighbour6},
	{"routed", Routed},
	{"gateway", Gateway},
	{"v6-loopback", "::1"},
	{"v6-any", "::"},
	{"v6-host", HostPublic6},
	{"v6-ula", "fd00::5"},
	{"v6-link", "fe80::5"},
	{"v6-site", "fec0:5::5"},
	{"v6-multicast", "ff02::1"},
	{"mapped", "::ffff:10.99.0.5"},
	{"mapped-lo", "::ffff:127.0.0.1"},
	{"compatible", "::10.99.0.5"},
	{"translated", "::ffff:0:10.99.0.5"},
	{"nat64", "64:ff9b::10.99.0.5"},
	{"nat64-meta", "64:ff9b::169.254.169.254"},
	{"nat64-local", "64:ff9b:1::10.99.0.5"},
	{"6to4", "2002:a63:5::1"},
	{"teredo", "2001:0:a63:5::1"},
}

// AllowedNames returns the rules of the session's allowlist.
func AllowedNames() []string {
	names := []string{
		Allowed, Allowed2, AllowedSSH, fmt.Sprintf("%s:%d", AllowedDB, DBPort),
		fmt.Sprintf("%s:%d,%d", Alt, AltHTTP, AltTLS), Owner,
		"*." + WildZone, "*." + FlipZone, "cdn.example.com", "mixed.example.com", "chain-lan.example.com",
		fmt.Sprintf("%s:80,443,%d", Bound, AltTLS), Forge, ForgeAPI, Model,
	}
	for _, r := range Rebinds {
		names = append(names, r.Name())
	}
	return names
}

// IsAllowed reports whether a rule covers a name.
func IsAllowed(name string) bool {
	for _, rule := range AllowedNames() {
		rule, _, _ = strings.Cut(rule, ":")
		if rest, wild := strings.CutPrefix(rule, "*"); name == rule || wild && strings.HasSuffix(name, rest) {
			return true
		}
	}
	return false
}

// A Technique is one escape attempt. Its number is its place in Techniques, from one.
type Technique struct {
	Name string // of the attack client's function
	What string

	// NoStock says why the technique cannot succeed in a VM without an egress
	// gateway.
	NoStock string
	// Kills says that trying it there ends the VM, so it is not tried.
	Kills bool
	// Found says that it escaped once: the short form tries it, too.
	Found bool
	// Room is the number of requests for which the budget still has room.
	Room int
	// Limit is set for what no gateway can stop: it must work as the words say, and
	// reach only Reach, a part of the judge's name of a place.
	Limit, Reach string
}

// Token returns what a technique carries out; found in a forbidden place, it
// identifies the technique. It is a valid DNS label in lower case, because the case
// of names may be changed on the way.
func Token(number int, stock bool, random string) string {
	side := 'w'
	if stock {
		side = 's'
	}
	return fmt.Sprintf("tk%03d%c%s", number, side, random)
}

// CasedName spells an allowed name so that the case of its letters carries a token's
// bits.
func CasedName(token string) string {
	name := []byte(Allowed)
	h := uint32(2166136261)
	for _, c := range []byte(token) {
		h = (h ^ uint32(c)) * 16777619
	}
	for i, c := range name {
		if c >= 'a' && c <= 'z' && (i == 0 || h>>(i%32)&1 == 1) {
			name[i] = c - 'a' + 'A'
		}
	}
	return string(name)
}
