//go:build bench

package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/test/bench/load"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

const (
	listed     = 10_000 // names on the list
	unlisted   = 100
	dnsTime    = 1500 * time.Millisecond
	dnsWorkers = 32

	guestProxy    = "agent-guest"
	dnsmasq       = "dnsmasq, same job"    // logs questions, and caches every name of the list
	dnsmasqSilent = "dnsmasq, no log"      // caches as much
	dnsmasqPlain  = "dnsmasq, as it comes" // no log, and its own default of 150 names

	rowListed      = "listed names, answers/s"
	rowListedP99   = "listed names, p99 in ms"
	rowUnlisted    = "other names, answers/s"
	rowUnlistedP99 = "other names, p99 in ms"
)

// TestDNS measures the guest's own DNS proxy, run as in a guest, and compares it with
// dnsmasq with the same list and the same upstream resolver.
func TestDNS(t *testing.T) {
	if _, err := exec.LookPath("dnsmasq"); err != nil {
		t.Fatal("dnsmasq is missing: make bench installs it; or: sudo apt-get install dnsmasq-base")
	}
	upstream, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go serveDNS(upstream)
	t.Cleanup(func() { upstream.Close() })
	var on, off []string
	for i := range listed {
		on = append(on, fmt.Sprintf("host%d.%s", i, strings.TrimSuffix(load.Zone, ".")))
	}
	for i := range unlisted {
		off = append(off, fmt.Sprintf("host%d.elsewhere.example", i))
	}
	behind := netip.MustParseAddrPort(upstream.LocalAddr().String())
	contenders := []string{guestProxy, dnsmasq, dnsmasqSilent, dnsmasqPlain}
	at := map[string]netip.AddrPort{
		guestProxy:    guestDNS(t, on, behind),
		dnsmasq:       theirDNS(t, on, behind, listed, true),
		dnsmasqSilent: theirDNS(t, on, behind, listed, false),
		dnsmasqPlain:  theirDNS(t, on, behind, 150, false),
	}
	// Ask for every name once before measuring: the guest's proxy then identifies the
	// program that asks for denied names, and both fill their caches.
	for _, c := range contenders {
		question(t, sample{}, load.Asking{Names: on, Rcode: dns.RcodeSuccess}, at[c], rowListed, rowListedP99)
		question(t, sample{}, load.Asking{Names: off, Rcode: dns.RcodeNameError}, at[c], rowUnlisted, rowUnlistedP99)
	}
	table := results.table(table{title: titleDNS, columns: contenders, rows: dnsFigures()})
	for range runs() {
		for _, c := range contenders {
			t.Run(c, func(t *testing.T) {
				s := sample{}
				question(t, s, load.Asking{Names: on, Rcode: dns.RcodeSuccess}, at[c], rowListed, rowListedP99)
				question(t, s, load.Asking{Names: off, Rcode: dns.RcodeNameError}, at[c], rowUnlisted, rowUnlistedP99)
				t.Log(c, s)
				table.add(c, s)
			})
		}
	}
	table.done(t, runs(), contenders...)
}

func dnsFigures() []row {
	against := func(key string, goal aim) []comparison {
		return []comparison{{key: key, mine: guestProxy, other: dnsmasq, aim: goal}}
	}
	return []row{
		{name: rowListed, unit: "1/s", whole: true, hope: "≥ the same job", comparisons: against("dns_listed_rate", aim{atLeast, 1})},
		{name: rowListedP99, unit: "ms", hope: "≤ the same job", comparisons: against("dns_listed_p99", aim{atMost, 1})},
		{name: rowUnlisted, unit: "1/s", whole: true, hope: "≥ the same job", comparisons: against("dns_other_rate", aim{atLeast, 1})},
		{name: rowUnlistedP99, unit: "ms", hope: "≤ the same job", comparisons: against("dns_other_p99", aim{atMost, 1})},
	}
}

// question asks from many sources, because the guest's proxy gives each source only
// its share of time.
func question(t *testing.T, s sample, a load.Asking, at netip.AddrPort, rate, p99 string) {
	t.Helper()
	a.Workers, a.Time = dnsWorkers, dnsTime
	a.Dial = func(worker int) (net.Conn, error) {
		return net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 1, byte(worker))}, net.UDPAddrFromAddrPort(at))
	}
	got, err := load.Ask(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	if got.Lost > 0 {
		t.Logf("%d questions were not answered", got.Lost)
	}
	slices.Sort(got.Took)
	s[rate] = got.Rate
	s[p99] = got.Took[len(got.Took)*99/100].Seconds() * 1000
}

// guestDNS runs the daemon as in a guest, except for the packet filter.
func guestDNS(t *testing.T, names []string, behind netip.AddrPort) netip.AddrPort {
	t.Helper()
	root := t.TempDir()
	p := policy.Default()
	p.Enforced = true // as shipped: denials are reported to the host
	for _, n := range names {
		p.Names = append(p.Names, policy.Rule{Pattern: n, Source: "bench"})
	}
	b, err := policy.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"policy.json": b, "upstream": []byte(behind.String() + "\n")} {
		path := filepath.Join(root, "etc", "agent-guest", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program := filepath.Join(root, "agent-guest")
	if err := realvm.Build(t.Context(), program, "../../cmd/agent-guest", "-ldflags=-s -w"); err != nil {
		t.Fatal(err)
	}
	guest := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program, args...)
		cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+root)
		return cmd
	}
	daemon := guest("daemon")
	daemon.Stdout, daemon.Stderr = os.Stdout, os.Stderr
	daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	start(t, daemon)
	var at netip.AddrPort
	waitFor(t, "the guest's daemon", func() bool {
		var st guestproto.Status
		out, err := guest("status").Output()
		if err != nil || json.Unmarshal(out, &st) != nil {
			return false
		}
		at, err = netip.ParseAddrPort(st.DNS.Listen)
		return err == nil && st.Policy.Names == len(names)
	})
	return at
}

// theirDNS runs dnsmasq: it resolves listed names; others do not exist.
func theirDNS(t *testing.T, names []string, behind netip.AddrPort, cache int, log bool) netip.AddrPort {
	t.Helper()
	free, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(free.LocalAddr().String())
	free.Close()
	var b strings.Builder
	fmt.Fprintf(&b, "port=%d\nlisten-address=%s\nbind-interfaces\nno-resolv\nno-hosts\ncache-size=%d\naddress=/#/\n", at.Port(), at.Addr(), cache)
	if log {
		fmt.Fprintf(&b, "log-queries\nlog-facility=%s\n", filepath.Join(t.TempDir(), "log"))
	}
	for _, n := range names {
		fmt.Fprintf(&b, "server=/%s/%s#%d\n", n, behind.Addr(), behind.Port())
	}
	file := filepath.Join(t.TempDir(), "dnsmasq.conf")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "dnsmasq", "--keep-in-foreground", "--pid-file=", "--user=root", "--conf-file="+file)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	start(t, cmd)
	waitFor(t, "dnsmasq", func() bool {
		m := new(dns.Msg)
		m.SetQuestion(names[0]+".", dns.TypeA)
		reply, err := dns.Exchange(m, at.String())
		return err == nil && reply.Rcode == dns.RcodeSuccess
	})
	return at
}
