package fake

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// socketsDir is the directory for the sockets of VMs with ExternalNet. They are not in
// the VMs' directories, whose names are too long for a socket's path.
const socketsDir = ".nets"

// NetSockets implements vm.Driver.
func (d *Driver) NetSockets(name string) (vm.NetSockets, error) {
	if _, err := d.machine(name); err != nil {
		return vm.NetSockets{}, err
	}
	dir := netSocketsDir(d.dir, name)
	return vm.NetSockets{
		Subnet: netip.MustParsePrefix("192.168.5.0/24"), MAC: "52:55:55:00:00:01", MTU: 1500,
		Stream: filepath.Join(dir, "qemu"), Datagram: filepath.Join(dir, "fd"), API: filepath.Join(dir, "ep"),
	}, nil
}

func netSocketsDir(home, name string) string {
	sum := sha256.Sum256([]byte(name))
	return filepath.Join(home, socketsDir, hex.EncodeToString(sum[:4]))
}

// connectCard connects the card of a VM with ExternalNet; it sends nothing. Like QEMU,
// the VM cannot start without a far end, and continues when the far end goes away.
func (g *guest) connectCard(ctx context.Context) (disconnect func(), err error) {
	if !g.spec.ExternalNet {
		return func() {}, nil
	}
	c, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(netSocketsDir(filepath.Dir(g.dir), g.name), "qemu"))
	if err != nil {
		return nil, fmt.Errorf("connect the network card: %w", err)
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		_, _ = io.Copy(io.Discard, c) // ends with the far end; the guest continues
	}()
	return func() {
		_ = c.Close()
		<-drained
	}, nil
}
