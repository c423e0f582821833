package lima

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lima-vm/lima/pkg/networks"
	"github.com/lima-vm/lima/pkg/store"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestExternalNet(t *testing.T) {
	d := newDriver(t)
	s := testSpec("agent-some-organization-a-repository-with-a-name-0a1b2c")
	s.ExternalNet = true
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	w, err := d.NetSockets(s.Name)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := d.NetSockets(s.Name); err != nil || again != w {
		t.Errorf("second NetSockets = %+v, %v, want %+v", again, err, w)
	}
	for _, path := range []string{w.Stream, w.Datagram, w.API} {
		if len(path) >= maxSocketPath || !strings.HasPrefix(path, d.home) {
			t.Errorf("socket path = %s, want below %s, shorter than %d bytes", path, d.home, maxSocketPath)
		}
	}
	if other, err := d.NetSockets("another"); err != nil || other.Stream == w.Stream || other.MAC == w.MAC {
		t.Errorf("NetSockets(another) = %+v, %v, want another socket and another MAC than %+v", other, err, w)
	}

	// If the network is not served, the start fails instead of using Lima's open
	// network.
	if err := d.served(t.Context(), s.Name, meta{ExternalNet: true}); fail.CodeOf(err) != fail.Policy {
		t.Errorf("served without a gateway = %v, want code %v", err, fail.Policy)
	}
	if err := os.MkdirAll(filepath.Dir(w.API), 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", w.API)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := d.served(t.Context(), s.Name, meta{ExternalNet: true}); err != nil {
		t.Error(err)
	}
	b, err := os.ReadFile(filepath.Join(d.home, filenames.ConfigDir, filenames.NetworksConfig))
	if err != nil || !strings.Contains(string(b), network(s.Name)) {
		t.Errorf("networks.yaml = %q, %v, want network %s", b, err, network(s.Name))
	}

	dir := filepath.Join(d.home, s.Name)
	if err := verifyNetwork(s.Name, dir); err != nil {
		t.Errorf("verifyNetwork with the VM as created = %v, want nil", err)
	}
	// However Lima's view is changed, the host agent notices.
	inst, err := store.Inspect(s.Name)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := networks.LoadConfig()
	if err != nil {
		t.Fatal(err)
	}
	delete(cfg.Networks, network(s.Name))
	if err := checkExternalNet(inst, true); fail.CodeOf(err) != fail.Policy {
		t.Errorf("checkExternalNet of a network unknown to Lima = %v, want code %v", err, fail.Policy)
	}
	if err := connect(s.Name); err != nil {
		t.Fatal(err)
	}
	if err := checkExternalNet(inst, false); fail.CodeOf(err) != fail.Policy {
		t.Errorf("checkExternalNet of a network the VM was created without = %v, want code %v", err, fail.Policy)
	}
	path := filepath.Join(dir, filenames.LimaYAML)
	yaml, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for what, edit := range map[string]string{
		"no network":      strings.ReplaceAll(string(yaml), "- lima: "+network(s.Name), ""),
		"a second one":    strings.ReplaceAll(string(yaml), "- lima: "+network(s.Name), "- lima: "+network(s.Name)+"\n- lima: user-v2"),
		"another network": strings.ReplaceAll(string(yaml), network(s.Name), "user-v2"),
	} {
		if edit == string(yaml) {
			t.Fatalf("lima.yaml = %s, want it to name the network", yaml)
		}
		if err := os.WriteFile(path, []byte(edit), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := verifyNetwork(s.Name, dir); fail.CodeOf(err) != fail.Policy {
			t.Errorf("verifyNetwork with %s in lima.yaml = %v, want code %v", what, err, fail.Policy)
		}
	}

	if err := d.Delete(t.Context(), s.Name); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Dir(w.Stream)); !os.IsNotExist(err) {
		t.Errorf("directory of the sockets: %v, want it removed", err)
	}
}
