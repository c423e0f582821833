//go:build bench

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima"
	"github.com/agent-sessionizer/agent-sessionizer/test/bench/load"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

const (
	vmTime = 2 * time.Second  // for each figure
	boot   = 15 * time.Minute // limit for an emulated guest on a busy machine
)

// slirpResolver is slirp's resolver, in the network that Lima gives it.
var slirpResolver = netip.MustParseAddrPort("192.168.5.3:53")

// open removes what the product puts into a guest, and starts nothing: the network is
// measured, not the guest firewall in front of it.
const open = `cloud-init status --wait >/dev/null
sudo sh -ec '
systemctl stop --quiet agent-guest.service docker.socket docker.service containerd.service 2>/dev/null || true
for tables in iptables ip6tables; do
	for table in filter nat mangle raw; do $tables -t $table -F; $tables -t $table -X; done
	for chain in INPUT OUTPUT FORWARD; do $tables -P $chain ACCEPT; done
done'
cat /sys/class/net/e*/mtu`

// guest is a VM on the network of one contender.
type guest struct {
	client   *ssh.Client
	resolver netip.AddrPort
	pid      int // of its network's process, 0 when that is QEMU
	idle     memory
}

// TestNetworkWithVM measures from real guests, one on each network. They all run
// throughout, so that each has its turn within the same minute; the others idle
// meanwhile.
func TestNetworkWithVM(t *testing.T) {
	contenders := []string{ours, stock, slirp}
	table := results.table(table{title: titleVM, columns: contenders, rows: vmFigures()})
	home, err := os.MkdirTemp("", "b") // short, because of the sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	driver, err := lima.New(lima.Options{Home: filepath.Join(home, "l"), Self: realvm.Binary(), CacheDir: filepath.Join(home, "c")})
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(home, "client")
	if err := realvm.Build(t.Context(), program, "./client", "-ldflags=-s -w"); err != nil {
		t.Fatal(err)
	}
	guests := map[string]*guest{}
	for _, c := range contenders { // one after the other, because a boot takes much processor time
		guests[c] = bootGuest(t, driver, filepath.Join(home, c[:2]), program, c)
	}
	for range runs() {
		for _, c := range contenders {
			t.Run(c, func(t *testing.T) { table.add(c, guests[c].measure(t, c)) })
		}
	}
	table.done(t, runs(), contenders...)
}

func bootGuest(t *testing.T, d vm.Driver, dir, program, contender string) *guest {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	g := &guest{resolver: slirpResolver}
	name := "bench-" + contender[:2]
	key, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), name); err != nil {
			t.Error(err)
		}
	})
	if err := d.Create(t.Context(), vm.Spec{
		Name: name, CPUs: 1, Memory: 1 << 30, Disk: 8 << 30, User: guestclient.User, AuthorizedKey: public,
		Image: realvm.Image(t), Boot: guestclient.BootScript(), ExternalNet: contender != slirp,
	}); err != nil {
		t.Fatal(err)
	}
	if contender != slirp {
		w, err := d.NetSockets(name)
		if err != nil {
			t.Fatal(err)
		}
		network := ourNetwork
		if contender == stock {
			network = theStockNetwork
		}
		g.pid, g.resolver = network(t, dir, w), resolver(w)
		if g.idle, err = memoryOf(g.pid); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), boot)
	defer cancel()
	began := time.Now()
	at, err := d.Start(ctx, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s booted in %v", contender, time.Since(began).Round(time.Second))
	if g.client, err = ssh.Dial(ctx, ssh.Target{Addr: at.Addr, User: at.User, Key: key, HostKey: at.HostKey}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = g.client.Close() }) // the guest may have closed it
	t.Logf("its MTU is %s", bytes.TrimSpace(g.run(t, open)))
	if err := g.client.CopyTo(ctx, program, "/tmp/client", nil); err != nil {
		t.Fatal(err)
	}
	g.run(t, "chmod 755 /tmp/client")
	return g
}

func (g *guest) run(t *testing.T, command string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), boot)
	defer cancel()
	out, err := g.client.Output(ctx, command, nil, 1<<20)
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return out
}

func (g *guest) measure(t *testing.T, contender string) sample {
	t.Helper()
	stop := func() memory { return memory{} }
	if g.pid != 0 {
		_, stop = watch(t, g.pid)
	}
	out := g.run(t, strings.Join([]string{"/tmp/client", g.resolver.String(), vmTime.String(), giveUp(contender).String()}, " "))
	peak := stop()
	var r load.Result
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatal(err)
	}
	judge(t, contender, r)
	if g.pid == 0 {
		return networkSample(r, nil, nil)
	}
	return networkSample(r, &g.idle, &peak)
}

// vmFigures returns the figures of a network, and the benefit of a large MTU.
func vmFigures() []row {
	rows := figures("vm", []string{ours}, []string{stock, slirp})
	twice := row{
		name: rowDown, unit: "Mbit/s", whole: true, hope: "≥ 2 × slirp",
		comparisons: []comparison{{key: "vm_download_twice_slirp", mine: ours, other: slirp, aim: aim{atLeast, 2}}},
	}
	return slices.Insert(rows, 2, twice)
}
