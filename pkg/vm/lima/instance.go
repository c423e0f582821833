package lima

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gofrs/flock"
	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// These are our own files in Lima's instance directory.
const (
	metaFile     = "agent-sessionizer.json"          // what Inspect reads; a directory without it is incomplete
	endpointFile = "agent-sessionizer-endpoint.json" // of the current run; the host agent removes it when it starts
	disksFile    = "agent-sessionizer-disks"         // exists once disks and kernel are complete
	lockFile     = "agent-sessionizer.lock"          // held by the host agent while it is alive
)

// maxSocketPath is macOS's limit, applied everywhere so that names are equally valid
// on all hosts.
const maxSocketPath = 104

// meta is what Inspect reports about a VM without asking Lima, whose own inspection
// parses YAML three times and dials sockets.
type meta struct {
	Arch        string `json:"arch"`
	VMType      string `json:"vm_type"`
	CPUs        int    `json:"cpus"`
	Memory      int64  `json:"memory"`
	Disk        int64  `json:"disk"`
	User        string `json:"user"`
	ExternalNet bool   `json:"external_net,omitempty"`
}

// dir returns the VM's directory, or an error for an invalid name.
func (d *Driver) dir(name string) (string, error) {
	if err := store.ValidateInstName(name); err != nil {
		return "", fail.New(fail.Usage, "%w", err)
	}
	dir := filepath.Join(d.home, name)
	if sock := filepath.Join(dir, filenames.LongestSock); len(sock) >= maxSocketPath {
		return "", fail.New(fail.Host, "VM %s: its socket paths below %s would have %d bytes; the system allows %d", name, d.home, len(sock), maxSocketPath-1).
			WithHint("export AGENT_SESSIONIZER_LIMA_HOME=/a/shorter/directory")
	}
	return dir, nil
}

// Create implements vm.Driver. The directory appears complete, by a rename.
func (d *Driver) Create(ctx context.Context, s vm.Spec) error {
	dir, err := d.dir(s.Name)
	if err != nil {
		return err
	}
	if _, err := readMeta(dir); err == nil {
		return nil
	}
	label, template := "template", s.Template
	if template == nil {
		label, template = "lima/agent-sandbox.yaml", d.template
	}
	if s.Image.Kernel != "" {
		accel, err := d.accel.find(ctx, s.Image.Arch)
		if err != nil {
			return err
		}
		if accel.Name == "tcg" {
			s.Image.Cmdline = addArgs(s.Image.Cmdline, emulatedArgs)
		}
	}
	manager := d.vmType(s.Image.Arch)
	y, err := render(s, manager, label, template)
	if err != nil {
		return err
	}
	if s.ExternalNet {
		if err := connect(s.Name); err != nil {
			return err
		}
	}
	if err := validate(y, filepath.Join(dir, filenames.LimaYAML), label); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := d.remove(ctx, s.Name, dir); err != nil { // left half made by something other than our rename
		return err
	}
	m := meta{Arch: s.Image.Arch, VMType: manager, CPUs: s.CPUs, Memory: s.Memory, Disk: s.Disk, User: s.User, ExternalNet: s.ExternalNet}
	var f *fork
	if s.Image.State != "" {
		f = &fork{State: s.Image.State, Disk: s.Disk, User: s.User, AuthorizedKey: s.AuthorizedKey}
	}
	if err := d.make(s.Name, dir, y, m, f, nil); err != nil {
		return fmt.Errorf("create VM %s: %w", s.Name, explainOS(err))
	}
	return nil
}

// validate applies Lima's own checks to the configuration.
func validate(yaml []byte, path, label string) error {
	return catchFatal("validate the VM's configuration", func() error {
		y, err := limayaml.Load(yaml, path)
		if err == nil {
			err = limayaml.Validate(y, false)
		}
		if err != nil {
			return fail.New(fail.Usage, "%s: %w", label, err)
		}
		return nil
	})
}

// make does what Lima's instance.Create does, but atomically: it makes a directory
// beside the final one and renames it once it is on disk. fill, which may be nil, adds files.
func (d *Driver) make(name, dir string, yaml []byte, m meta, f *fork, fill func(tmp string) error) error {
	tmp, err := os.MkdirTemp(d.home, asidePrefix(name)+"new-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp) // no longer exists if all went well
	if fill != nil {
		if err := fill(tmp); err != nil {
			return err
		}
	}
	files := map[string][]byte{filenames.LimaYAML: yaml, filenames.LimaVersion: []byte(limaVersion)}
	if files[metaFile], err = json.Marshal(m); err != nil {
		return err
	}
	if f != nil {
		if files[forkFile], err = json.Marshal(f); err != nil {
			return err
		}
	}
	for file, data := range files {
		if err := atomicfile.Write(filepath.Join(tmp, file), data, 0o600); err != nil {
			return err
		}
	}
	return os.Rename(tmp, dir)
}

// Delete implements vm.Driver.
func (d *Driver) Delete(ctx context.Context, name string) error {
	dir, err := d.dir(name)
	if err != nil {
		return err
	}
	m, err := readMeta(dir)
	if err := d.remove(ctx, name, dir); err != nil {
		return err
	}
	if err != nil || !m.ExternalNet {
		return nil //nolint:nilerr // it was half made or never existed
	}
	return d.publish()
}

// remove kills what runs for the VM. Then it renames the VM's directory and removes
// it.
func (d *Driver) remove(ctx context.Context, name, dir string) error {
	if err := kill(ctx, dir); err != nil {
		return fmt.Errorf("delete VM %s: %w", name, err)
	}
	gone := filepath.Join(d.home, fmt.Sprintf("%sold-%d", asidePrefix(name), time.Now().UnixNano()))
	if err := os.Rename(dir, gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete VM %s: %w", name, err)
	}
	if err := os.RemoveAll(filepath.Join(d.home, filenames.NetworksDir, network(name))); err != nil {
		return fmt.Errorf("delete VM %s: %w", name, err)
	}
	left, err := filepath.Glob(filepath.Join(d.home, asidePrefix(name)+"*"))
	if err != nil {
		return err
	}
	for _, l := range left { // including leftovers of earlier, interrupted calls
		if err := os.RemoveAll(l); err != nil {
			return fmt.Errorf("delete VM %s: %w", name, err)
		}
	}
	return nil
}

// asidePrefix returns the prefix for directories that are being created or removed.
// Lima ignores names with a leading dot, and no VM's name contains "~".
func asidePrefix(name string) string { return "." + name + "~" }

func readMeta(dir string) (meta, error) {
	var m meta
	b, err := os.ReadFile(filepath.Join(dir, metaFile))
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("%s: %w", metaFile, err)
	}
	return m, nil
}

func readEndpoint(dir string) (vm.Endpoint, error) {
	var e vm.Endpoint
	b, err := os.ReadFile(filepath.Join(dir, endpointFile))
	if err != nil {
		return e, err
	}
	err = json.Unmarshal(b, &e)
	return e, err
}

// ensureUserKey makes the key pair that Lima puts into every VM. Lima checks for it
// before taking a lock and not again afterwards. So if several VMs are created at
// once in a new home, all but one would fail.
func (d *Driver) ensureUserKey() error {
	dir := filepath.Join(d.home, filenames.ConfigDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	private := filepath.Join(dir, filenames.UserPrivateKey)
	if _, err := os.Stat(private); err == nil {
		return nil
	}
	lock := flock.New(filepath.Join(dir, "."+filenames.UserPrivateKey+".lock"))
	if err := lock.Lock(); err != nil {
		return err
	}
	defer lock.Close()
	if _, err := os.Stat(private); err == nil {
		return nil
	}
	key, authorized, err := ssh.NewKey()
	if err != nil {
		return err
	}
	// Write the private half last: its presence means that both exist.
	if err := atomicfile.Write(filepath.Join(dir, filenames.UserPublicKey), []byte(authorized+" lima\n"), 0o600); err != nil {
		return err
	}
	return atomicfile.Write(private, key, 0o600)
}

// releaseDisks drops the locks on shared disks of the VM in dir. Lima forgets them when a VM ends
// before Lima has logged in to it.
func releaseDisks(dir string) error {
	links, err := filepath.Glob(filepath.Join(filepath.Dir(dir), filenames.DisksDir, "*", filenames.InUseBy))
	if err != nil {
		return err
	}
	for _, l := range links {
		holder, err := os.Readlink(l)
		if err != nil || strings.TrimSuffix(holder, "/") != dir {
			continue
		}
		if err := os.Remove(l); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("release a disk: %w", err)
		}
	}
	return nil
}
