//go:build bench

package bench

import (
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/bench/load"
	"github.com/agent-sessionizer/agent-sessionizer/test/gatewaytest"
)

const stackTime = 1500 * time.Millisecond // for each figure

// TestNetworkWithoutVM measures with a user-space guest in this process, which takes
// QEMU's place on the link.
func TestNetworkWithoutVM(t *testing.T) {
	contenders := []string{ours1500, ours65520, stock}
	table := results.table(table{title: titleStack, columns: contenders, rows: figures("stack", contenders[:2], contenders[2:])})
	for range runs() {
		for _, contender := range contenders {
			t.Run(contender, func(t *testing.T) { table.add(contender, onStack(t, contender)) })
		}
	}
	table.done(t, runs(), contenders...)
}

func onStack(t *testing.T, contender string) sample {
	t.Helper()
	dir, err := os.MkdirTemp("", "b") // short, because of the sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := vm.NetSockets{
		Subnet: netip.MustParsePrefix("192.168.5.0/24"), MAC: "52:55:55:00:00:01", MTU: 1500,
		Stream: filepath.Join(dir, "s", "qemu"), Datagram: filepath.Join(dir, "s", "fd"), API: filepath.Join(dir, "s", "ep"),
	}
	if contender == ours65520 {
		w.MTU = 65520
	}
	network := ourNetwork
	if contender == stock {
		network = theStockNetwork
	}
	pid := network(t, dir, w)
	cable, err := net.Dial("unix", w.Stream)
	if err != nil {
		t.Fatal(err)
	}
	mac, err := net.ParseMAC(w.MAC)
	if err != nil {
		t.Fatal(err)
	}
	guest, err := gatewaytest.New(cable, true, gatewaytest.Options{
		Addr: netip.MustParseAddr("192.168.5.15"), Gateway: resolver(w).Addr(), Bits: w.Subnet.Bits(), MAC: mac, MTU: w.MTU,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(guest.Close)
	n := load.Network{Resolver: resolver(w), GiveUp: giveUp(contender), Dial: func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
		if network == "udp" {
			return guest.DialUDP(to)
		}
		return guest.Dial(ctx, to)
	}}
	idle, stop := watch(t, pid)
	r, err := n.Run(t.Context(), stackTime)
	peak := stop()
	if err != nil {
		t.Fatal(err)
	}
	judge(t, contender, r)
	return networkSample(r, &idle, &peak)
}
