package netguard

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

func put(t *testing.T, g sys.Guest, path, text string) {
	t.Helper()
	if err := sys.WriteFile(g.Path(path), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestUpstreamIsLearned(t *testing.T) {
	g := sys.Guest{Root: t.TempDir()}
	check := func(want string) {
		t.Helper()
		if got := fmt.Sprint(upstream(g)); got != want {
			t.Errorf("upstream() = %s, want %s", got, want)
		}
	}
	check("[]")
	put(t, g, "/etc/resolv.conf", "# by cloud-init\nsearch x\nnameserver 127.0.0.53\nnameserver 192.168.5.3\nnameserver fe80::1%eth0\nnameserver junk\n")
	check("[192.168.5.3:53]")
	// After our file is in place, the previous content is remembered.
	for range 2 {
		if err := pointHere(g); err != nil {
			t.Fatal(err)
		}
	}
	if got := g.Text("/etc/resolv.conf"); got != ourResolvConf {
		t.Errorf("resolv.conf = %q, want %q", got, ourResolvConf)
	}
	check("[192.168.5.3:53]")
	put(t, g, "/var/lib/dhcp/dhclient.eth0.leases", "lease {\n  option domain-name-servers 10.0.0.1;\n}\nlease {\n  option domain-name-servers 10.0.0.2, 10.0.0.3;\n}\n")
	check("[10.0.0.2:53 10.0.0.3:53]")
	put(t, g, "/run/systemd/netif/leases/2", "ADDRESS=192.168.5.15\nDNS=192.168.5.4 192.168.5.5\n")
	check("[192.168.5.4:53 192.168.5.5:53]")
	put(t, g, "/etc/agent-guest/upstream", "# mine\n9.9.9.9:5353\n127.0.0.1\n")
	check("[9.9.9.9:53]") // the firewall opens only port 53, and loopback addresses are skipped
}

func TestResolvConfReplacesTheStubsLink(t *testing.T) {
	g := sys.Guest{Root: t.TempDir()}
	put(t, g, "/run/systemd/resolve/stub-resolv.conf", "nameserver 127.0.0.53\n")
	if err := os.MkdirAll(g.Path("/etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../run/systemd/resolve/stub-resolv.conf", g.Path("/etc/resolv.conf")); err != nil {
		t.Fatal(err)
	}
	if err := pointHere(g); err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(g.Path("/etc/resolv.conf"))
	if err != nil || !info.Mode().IsRegular() {
		t.Errorf("Lstat(resolv.conf) = %v, %v, want a regular file", info, err)
	}
	if got, want := g.Text("/run/systemd/resolve/stub-resolv.conf"), "nameserver 127.0.0.53\n"; got != want {
		t.Errorf("stub-resolv.conf = %q, want %q", got, want)
	}
}

func TestQueryLogIsBounded(t *testing.T) {
	dir := t.TempDir()
	l, err := openLog(dir)
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("a", 250)
	for range 3 * logBytes / 5000 {
		l.add(guestproto.Query{Name: long, Reason: strings.Repeat("r", 1000), Answer: []string{strings.Repeat("x", 4000)}})
	}
	if _, err := l.status(); err != nil {
		t.Fatal(err)
	}
	if err := l.close(); err != nil {
		t.Fatal(err)
	}
	older, newer := logFiles(dir)
	for _, path := range []string{older, newer} {
		info, err := os.Stat(path)
		if err != nil {
			t.Error(err)
		} else if info.Size() > logBytes {
			t.Errorf("%s has %d bytes, want at most %d", filepath.Base(path), info.Size(), logBytes)
		}
	}
	again, err := openLog(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer again.close()
	if got, _ := again.status(); got.LastSeq != 3*logBytes/5000 {
		t.Errorf("LastSeq of a log that was opened again = %d, want %d", got.LastSeq, 3*logBytes/5000)
	}
}
