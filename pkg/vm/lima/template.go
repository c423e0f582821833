package lima

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store"
	"github.com/opencontainers/go-digest"
	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	minMemory = 128 << 20
	minDisk   = 64 << 20

	// kernelArgs are for kernels that we load ourselves: the timer check sometimes
	// fails under emulation, and a panicked kernel must not hang.
	kernelArgs = "no_timer_check panic=1"

	// emulatedArgs are also for kernels that we load, under TCG. It finds translated code
	// by its virtual address: where programs load at random addresses, each process
	// translates libc again, and a shell's commands take twice as long.
	emulatedArgs = "norandmaps"
)

var userName = lazyregexp.New(`^[a-z_][a-z0-9_-]{0,31}$`)

// checkSpec refuses specs that Lima would accept and fail on later.
func checkSpec(s vm.Spec) error {
	switch {
	case s.CPUs < 1:
		return fail.New(fail.Usage, "VM %s: CPUs must be at least 1, got %d", s.Name, s.CPUs)
	case s.Memory < minMemory:
		return fail.New(fail.Usage, "VM %s: memory must be at least %d bytes, got %d", s.Name, minMemory, s.Memory)
	case s.Disk < minDisk:
		return fail.New(fail.Usage, "VM %s: disk must be at least %d bytes, got %d", s.Name, minDisk, s.Disk)
	case s.Image.Arch != limayaml.X8664 && s.Image.Arch != limayaml.AARCH64:
		return fail.New(fail.Usage, "VM %s: architecture must be x86_64 or aarch64, got %q", s.Name, s.Image.Arch)
	case !userName.MatchString(s.User) || s.User == "root":
		return fail.New(fail.Usage, "VM %s: %q is not a valid name for the login user", s.Name, s.User)
	case s.Image.Location == "":
		return fail.New(fail.Usage, "VM %s: no image", s.Name)
	case s.Image.Kernel == "" && (s.Image.Initrd != "" || s.Image.Cmdline != ""):
		return fail.New(fail.Usage, "VM %s: the image has an initrd or a command line but no kernel", s.Name)
	}
	if scheme, _, remote := strings.Cut(s.Image.Location, "://"); remote && scheme != "https" && (scheme != "http" || s.Image.Digest == "") {
		return fail.New(fail.Usage, "VM %s: image %q must be a path, an https URL, or an http URL with a digest", s.Name, s.Image.Location)
	}
	if isURL(s.Image.Kernel) || isURL(s.Image.Initrd) {
		return fail.New(fail.Usage, "VM %s: the kernel must be a file, because it has no digest", s.Name)
	}
	if isURL(s.Image.Location) && s.Image.Digest == "" {
		return fail.New(fail.Usage, "VM %s: the image %s needs a digest", s.Name, s.Image.Location)
	}
	if d := digest.Digest(s.Image.Digest); d != "" && d.Validate() != nil {
		return fail.New(fail.Usage, "VM %s: %q must be a digest like sha256:…", s.Name, s.Image.Digest)
	}
	return nil
}

// render makes the lima.yaml for s. The template decides what s and the product's
// rules leave open; label names the template in errors.
func render(s vm.Spec, manager limayaml.VMType, label string, template []byte) ([]byte, error) {
	if err := checkSpec(s); err != nil {
		return nil, err
	}
	y, err := parseTemplate(label, template)
	if err != nil {
		return nil, err
	}
	if err := applySpec(y, s, manager); err != nil {
		return nil, err
	}
	seal(y)
	if s.ExternalNet {
		y.Networks = []limayaml.Network{{Lima: network(s.Name)}}
	}
	return limayaml.Marshal(y, false)
}

// parseTemplate parses a template strictly, unlike Lima: a misspelled key is an error.
func parseTemplate(label string, b []byte) (*limayaml.LimaYAML, error) {
	y, err := parseYAML(label, b)
	if err != nil {
		return nil, err
	}
	for i, p := range y.Provision {
		// Ansible runs on the host, and a file is read from the host.
		if p.Mode == limayaml.ProvisionModeAnsible || p.Playbook != "" || p.File != nil {
			return nil, fail.New(fail.Usage, "%s: provision[%d]: scripts and data must be in the template itself", label, i)
		}
	}
	if len(y.Networks) > 0 {
		return nil, fail.New(fail.Usage, "%s: networks: must be empty, because a second network card would bypass the gateway", label)
	}
	if len(y.Base) > 0 {
		return nil, fail.New(fail.Usage, "%s: base: templates based on others are not supported", label)
	}
	return y, nil
}

func parseYAML(label string, b []byte) (*limayaml.LimaYAML, error) {
	y := new(limayaml.LimaYAML)
	disk := yaml.CustomUnmarshaler(func(dst *limayaml.Disk, b []byte) error { // Lima's short form is a bare name
		if err := yaml.Unmarshal(b, &dst.Name); err == nil {
			return nil
		}
		return yaml.UnmarshalWithOptions(b, dst, yaml.Strict())
	})
	if err := yaml.UnmarshalWithOptions(b, y, yaml.Strict(), disk); err != nil && !errors.Is(err, io.EOF) { // EOF means an empty template
		return nil, templateError(label, err)
	}
	return y, nil
}

func templateError(label string, err error) error {
	if ye, ok := errors.AsType[yaml.Error](err); ok && ye.GetToken() != nil {
		p := ye.GetToken().Position
		return fail.New(fail.Usage, "%s:%d:%d: %s", label, p.Line, p.Column, ye.GetMessage())
	}
	msg, _, _ := strings.Cut(err.Error(), "\n")
	return fail.New(fail.Usage, "%s: %s", label, msg)
}

// applySpec writes the spec over the template.
func applySpec(y *limayaml.LimaYAML, s vm.Spec, manager limayaml.VMType) error {
	y.VMType = &manager
	y.Arch = &s.Image.Arch
	y.CPUs = &s.CPUs
	y.Memory = new(fmt.Sprint(s.Memory))
	y.Disk = new(fmt.Sprint(s.Disk))
	y.User.Name = &s.User
	y.User.Comment = &s.User // otherwise Lima looks up the host's user, which may be unknown
	y.User.UID = new(uint32(1000))
	y.User.Home = new("/home/" + s.User)

	img, err := image(s.Image)
	if err != nil {
		return err
	}
	y.Images = []limayaml.Image{img}
	if img.Kernel != nil {
		y.Firmware.LegacyBIOS = new(true)
	}
	return applyBootScript(y, s)
}

// applyBootScript adds the boot script. It is the first, so that the template's scripts run under
// our rules.
func applyBootScript(y *limayaml.LimaYAML, s vm.Spec) error {
	boot, err := bootScript(s)
	if boot != "" {
		y.Provision = append([]limayaml.Provision{{Mode: limayaml.ProvisionModeBoot, Script: boot}}, y.Provision...)
	}
	return err
}

func image(i vm.Image) (limayaml.Image, error) {
	file := func(loc string) (limayaml.File, error) {
		if loc != "" && !isURL(loc) {
			abs, err := filepath.Abs(loc)
			if err != nil {
				return limayaml.File{}, err
			}
			loc = abs
		}
		return limayaml.File{Location: loc, Arch: i.Arch}, nil
	}
	disk, err1 := file(i.Location)
	kernel, err2 := file(i.Kernel)
	initrd, err3 := file(i.Initrd)
	if err := errors.Join(err1, err2, err3); err != nil {
		return limayaml.Image{}, fmt.Errorf("image path: %w", err)
	}
	disk.Digest = digest.Digest(i.Digest)
	img := limayaml.Image{File: disk}
	if i.Kernel != "" {
		img.Kernel = &limayaml.Kernel{File: kernel, Cmdline: addArgs(i.Cmdline, kernelArgs)}
	}
	if i.Initrd != "" {
		img.Initrd = &initrd
	}
	return img, nil
}

// addArgs adds to a kernel's command line those args that it does not set already.
func addArgs(cmdline, args string) string {
	words := strings.Fields(cmdline)
	have := map[string]bool{}
	for _, w := range words {
		key, _, _ := strings.Cut(w, "=")
		have[key] = true
	}
	for _, w := range strings.Fields(args) {
		if key, _, _ := strings.Cut(w, "="); !have[key] {
			words = append(words, w)
		}
	}
	return strings.Join(words, " ")
}

// seal sets what no template may change: nothing of the host is mounted, copied or
// forwarded into the guest, and nothing of the guest onto the host.
func seal(y *limayaml.LimaYAML) {
	y.Plain = new(true)
	y.Mounts = []limayaml.Mount{}
	y.MountInotify = new(false)
	y.PortForwards = nil
	y.CopyToHost = nil
	y.SSH = limayaml.SSH{
		LocalPort: new(0), LoadDotSSHPubKeys: new(false),
		ForwardAgent: new(false), ForwardX11: new(false), ForwardX11Trusted: new(false),
	}
	y.Containerd = limayaml.Containerd{System: new(false), User: new(false)}
	y.HostResolver = limayaml.HostResolver{Enabled: new(false), IPv6: new(false)}
	y.PropagateProxyEnv = new(false)
	y.CACertificates.Files = nil // they are read on the host
	y.Video = limayaml.Video{Display: new("none")}
	y.Audio = limayaml.Audio{Device: new("")}
	y.Message = "" // a Go template that Lima executes on the host
	y.Probes = nil // plain mode never runs them
}

// checkSealed checks the configuration as Lima will use it: Lima merges
// _config/override.yaml and default.yaml in LIMA_HOME into it after seal.
func checkSealed(inst *store.Instance, home string) error {
	y := inst.Config
	var bad string
	switch {
	case !*y.Plain:
		bad = "plain"
	case len(y.Mounts) > 0:
		bad = "mounts"
	case len(y.PortForwards) > 0:
		bad = "portForwards"
	case len(y.CopyToHost) > 0:
		bad = "copyToHost"
	case *y.SSH.ForwardAgent || *y.SSH.ForwardX11 || *y.SSH.LoadDotSSHPubKeys:
		bad = "ssh"
	case *y.Containerd.System || *y.Containerd.User:
		bad = "containerd"
	case *y.HostResolver.Enabled:
		bad = "hostResolver"
	case *y.PropagateProxyEnv:
		bad = "propagateProxyEnv"
	case *y.Video.Display != "none":
		bad = "video"
	case *y.Audio.Device != "":
		bad = "audio"
	case len(y.CACertificates.Files) > 0:
		bad = "caCerts.files"
	default:
		return nil
	}
	return fail.New(fail.Policy, "VM %s: the setting %q connects the VM to the host", inst.Name, bad).
		WithHint("rm %s/_config/override.yaml %s/_config/default.yaml # and undo edits of %s/lima.yaml", home, home, inst.Dir)
}

// bootScript returns what every boot runs before sshd starts: it allows the caller's
// key and its certificates, then runs the caller's script. Lima trims every line of a boot script, drops
// the empty ones and expands {{ }} in it. Scripts are therefore encoded as base64 and
// run from a file. /run may be mounted noexec, hence the explicit interpreter.
func bootScript(s vm.Spec) (string, error) {
	var out []string
	if s.AuthorizedKey != "" {
		key, _, options, rest, err := ssh.ParseAuthorizedKey([]byte(s.AuthorizedKey))
		if err != nil || len(options) > 0 || len(rest) > 0 {
			return "", fail.New(fail.Usage, "VM %s: the authorized key must be one public key", s.Name)
		}
		authorized := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
		out = append(out, run("key", "/bin/sh", fmt.Sprintf(`
set -eu
umask 022
mkdir -p /etc/ssh/agent-sessionizer /etc/ssh/sshd_config.d
printf '%%s\n' '%s' '%s' >/etc/ssh/agent-sessionizer/%s
printf '%%s\n' 'AuthorizedKeysFile /etc/ssh/agent-sessionizer/%%u .ssh/authorized_keys' >/etc/ssh/sshd_config.d/10-agent-sessionizer.conf
`, authorized, "cert-authority "+authorized, s.User)))
	}
	if s.Boot != "" {
		out = append(out, run("boot", interpreter(s.Boot), s.Boot))
	}
	return strings.Join(out, "\n"), nil
}

// run returns a shell line that unpacks a script and runs it.
func run(name, interpreter, script string) string {
	f := "/run/agent-sessionizer-" + name
	return fmt.Sprintf("(umask 077; echo %s | base64 -d >%s); %s %s",
		base64.StdEncoding.EncodeToString([]byte(script)), f, interpreter, f)
}

var shebang = lazyregexp.New(`^#![ \t]*([\w./ -]+)\n`)

// interpreter returns the interpreter in the script's first line, or /bin/sh.
func interpreter(script string) string {
	if m := shebang.FindStringSubmatch(script); m != nil {
		return strings.TrimSpace(m[1])
	}
	return "/bin/sh"
}

func isURL(s string) bool { return strings.Contains(s, "://") }
