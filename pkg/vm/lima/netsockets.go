package lima

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/goccy/go-yaml"
	"github.com/gofrs/flock"
	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/networks"
	"github.com/lima-vm/lima/pkg/networks/usernet"
	"github.com/lima-vm/lima/pkg/store"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// A VM with ExternalNet has a network of its own in Lima's mode user-v2. The process
// that serves its NetSockets acts as that network's daemon. Lima puts the network's
// name into the socket paths twice, so the name is a short hash.
const (
	netSocketsNetwork = "192.168.5.0/24" // the subnet of QEMU's own user network in Lima: a guest sees no difference
	netmask           = "255.255.255.0"

	// A socket pair carries frames of any size; virtio's own limit is 65535 with the
	// Ethernet header. vz accepts no larger frames than it was configured for, and
	// Lima does not configure a size.
	streamMTU   = 65520
	datagramMTU = 1500
)

// NetSockets implements vm.Driver.
func (d *Driver) NetSockets(name string) (vm.NetSockets, error) {
	dir, err := d.dir(name)
	if err != nil {
		return vm.NetSockets{}, err
	}
	w := vm.NetSockets{Subnet: netip.MustParsePrefix(netSocketsNetwork), MAC: limayaml.MACAddress(dir), MTU: streamMTU}
	if d.vmType(hostArch()) == limayaml.VZ {
		w.MTU = datagramMTU
	}
	for kind, path := range map[usernet.SockType]*string{usernet.QEMUSock: &w.Stream, usernet.FDSock: &w.Datagram, usernet.EndpointSock: &w.API} {
		if *path, err = usernet.Sock(network(name), kind); err != nil {
			return vm.NetSockets{}, fail.New(fail.Host, "VM %s: %w", name, err).WithHint("export AGENT_SESSIONIZER_LIMA_HOME=/a/shorter/directory")
		}
	}
	return w, nil
}

// network returns the name of a VM's own network.
func network(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:4])
}

// connect adds the VM's network to Lima's configuration in this process. Lima reads
// its networks.yaml once per process, perhaps before the VM was created. Because of
// connect, the egress gateway does not depend on the content of any file.
func connect(name string) error {
	cfg, err := networks.LoadConfig()
	if err != nil {
		return fail.New(fail.Host, "read Lima's networks: %w", err)
	}
	cfg.Networks[network(name)] = ourNetwork()
	return nil
}

func ourNetwork() networks.Network {
	base := netip.MustParsePrefix(netSocketsNetwork).Addr().As4()
	return networks.Network{Mode: networks.ModeUserV2, Gateway: net.IPv4(base[0], base[1], base[2], 1), NetMask: net.ParseIP(netmask)}
}

// checkExternalNet checks the network as Lima will use it, in the process that starts the
// VM. Lima falls back to its own, open network when it does not know the one that a
// VM names.
func checkExternalNet(inst *store.Instance, external bool) error {
	n := inst.Config.Networks
	switch {
	case !external && len(n) == 0:
		return nil
	case external && len(n) == 1 && n[0].Lima == network(inst.Name) && limayaml.FirstUsernetIndex(inst.Config) == 0:
		return nil
	}
	return fail.New(fail.Policy, "VM %s: its network differs from the one it was created with, so no gateway would filter it", inst.Name).
		WithHint("rm %s/override.yaml %s/default.yaml # in _config of the VM directory; and undo edits of %s/%s", filenames.ConfigDir, filenames.ConfigDir, inst.Dir, filenames.LimaYAML)
}

// verifyNetwork makes sure that the VM's card ends where the VM was created to have it. It
// runs in the process that runs QEMU, because that process's view of Lima's networks
// decides.
func verifyNetwork(name, dir string) error {
	m, err := readMeta(dir)
	if err != nil {
		return err
	}
	if m.ExternalNet {
		if err := connect(name); err != nil {
			return err
		}
	}
	inst, err := store.Inspect(name)
	if err != nil {
		return err
	}
	if inst.Config == nil {
		return errors.Join(inst.Errors...)
	}
	return checkExternalNet(inst, m.ExternalNet)
}

// publish writes the networks of all VMs with ExternalNet into networks.yaml, so that
// limactl understands our VMs. This program does not read the file.
func (d *Driver) publish() error {
	dir := filepath.Join(d.home, filenames.ConfigDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	lock := flock.New(filepath.Join(dir, "."+filenames.NetworksConfig+".lock"))
	if err := lock.Lock(); err != nil {
		return err
	}
	defer lock.Close()
	path := filepath.Join(dir, filenames.NetworksConfig)
	var cfg networks.Config
	switch b, err := os.ReadFile(path); {
	case errors.Is(err, fs.ErrNotExist):
		if cfg, err = networks.DefaultConfig(); err != nil {
			return err
		}
	case err != nil:
		return err
	default:
		if err := yaml.Unmarshal(b, &cfg); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	ours := ourNetwork()
	kept := map[string]networks.Network{}
	for name, n := range cfg.Networks {
		if n.Mode != ours.Mode || !n.Gateway.Equal(ours.Gateway) {
			kept[name] = n
		}
	}
	entries, err := os.ReadDir(d.home)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if m, err := readMeta(filepath.Join(d.home, e.Name())); err == nil && m.ExternalNet {
			kept[network(e.Name())] = ours
		}
	}
	cfg.Networks = kept
	b, err := yaml.Marshal(cfg)
	if err != nil {
		return err
	}
	return atomicfile.Write(path, b, 0o600)
}

// served refuses to start a VM whose network is not served, with a better reason than
// QEMU would give. It also publishes the network to limactl.
func (d *Driver) served(ctx context.Context, name string, m meta) error {
	if !m.ExternalNet {
		return nil
	}
	w, err := d.NetSockets(name)
	if err != nil {
		return err
	}
	c, err := new(net.Dialer).DialContext(ctx, "unix", w.API)
	if err != nil {
		return fail.New(fail.Policy, "VM %s: no gateway serves its network: %w", name, err)
	}
	if err := c.Close(); err != nil {
		return err
	}
	if err := d.publish(); err != nil {
		return fmt.Errorf("write Lima's networks: %w", explainOS(err))
	}
	return nil
}
