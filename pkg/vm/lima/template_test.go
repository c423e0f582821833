package lima

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store"
	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const testKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIObBca+Tj0A9dgN54NRmjkXCXWTmNWLaUOqCznN4MKEp"

func testSpec(name string) vm.Spec {
	return vm.Spec{
		Name: name, CPUs: 2, Memory: 1 << 30, Disk: 4 << 30, User: "agent", AuthorizedKey: testKey,
		Image: vm.Image{Arch: hostArch(), Location: "/images/disk.qcow2", Kernel: "/images/kernel", Initrd: "/images/initrd", Cmdline: "root=/dev/vda"},
	}
}

// TestEmulatedKernelArgs: only a guest that TCG emulates loads programs at fixed
// addresses.
func TestEmulatedKernelArgs(t *testing.T) {
	if newDriver(t).vmType(hostArch()) != limayaml.QEMU {
		t.Skip("QEMU does not run VMs of this host's architecture")
	}
	d := newDriver(t)
	for accel, want := range map[string]string{
		"kvm": "root=/dev/vda no_timer_check panic=1",
		"tcg": "root=/dev/vda norandmaps no_timer_check panic=1",
	} {
		t.Setenv(accelEnv, accel)
		if err := d.Create(t.Context(), testSpec(accel)); err != nil {
			t.Fatal(err)
		}
		inst, err := store.Inspect(accel)
		if err != nil {
			t.Fatal(err)
		}
		if got := inst.Config.Images[0].Kernel.Cmdline; got != want {
			t.Errorf("cmdline under %s = %q, want %q", accel, got, want)
		}
	}
}

func TestTemplateCannotOpenTheVM(t *testing.T) {
	t.Setenv(accelEnv, "kvm")
	d := newDriver(t)
	template, err := os.ReadFile("testdata/greedy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s := testSpec("greedy")
	s.Template = template
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	inst, err := store.Inspect("greedy") // as Lima sees it, with defaults
	if err != nil || len(inst.Errors) > 0 {
		t.Fatalf("store.Inspect = %v, errors %v, want none", err, inst.Errors)
	}
	if err := checkSealed(inst, d.home); err != nil {
		t.Fatal(err)
	}
	y := inst.Config
	if *y.CPUs != 2 || inst.Memory != 1<<30 || inst.Disk != 4<<30 || *y.SSH.LocalPort != 0 {
		t.Errorf("resources = %d CPUs, memory %d, disk %d, port %d, want 2, 1 GiB, 4 GiB, 0", *y.CPUs, inst.Memory, inst.Disk, *y.SSH.LocalPort)
	}
	if *y.User.Name != "agent" || *y.User.UID != 1000 || *y.User.Home != "/home/agent" || *y.User.Shell != "/bin/zsh" {
		t.Errorf("user = %+v, want agent, 1000, /home/agent, /bin/zsh", y.User)
	}
	if len(y.Images) != 1 || y.Images[0].Location != "/images/disk.qcow2" || !*y.Firmware.LegacyBIOS {
		t.Errorf("images = %+v, want /images/disk.qcow2 alone, with legacy BIOS", y.Images)
	}
	if got := y.Images[0].Kernel.Cmdline; got != "root=/dev/vda no_timer_check panic=1" {
		t.Errorf("cmdline = %q, want \"root=/dev/vda no_timer_check panic=1\"", got)
	}
	if len(y.Provision) != 2 || y.Provision[0].Mode != limayaml.ProvisionModeBoot || y.Provision[1].Script != "echo from the template" {
		t.Errorf("provision = %+v, want the boot script and the template's", y.Provision)
	}
	if y.Message != "" {
		t.Errorf("message = %q, want none", y.Message)
	}

	// Configuration that bypasses the template is detected at the start.
	config := filepath.Join(d.home, "_config")
	if err := os.MkdirAll(config, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(config, "override.yaml"), []byte("ssh: {forwardAgent: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), "greedy", nil); fail.CodeOf(err) != fail.Policy || !strings.Contains(fail.HintOf(err), "override.yaml") {
		t.Errorf("Start with agent forwarding in override.yaml = %v (hint %q), want code %v, a hint with override.yaml", err, fail.HintOf(err), fail.Policy)
	}
}

func TestRefusedSpecs(t *testing.T) {
	d := newDriver(t)
	for what, c := range map[string]struct {
		change func(*vm.Spec)
		says   string
	}{
		"template syntax":     {func(s *vm.Spec) { s.Template = []byte("cpus: 2\nmounts: [\n") }, "template:2:"},
		"template type":       {func(s *vm.Spec) { s.Template = []byte("ssh:\n  forwardAgent: maybe\n") }, "template:2:17"},
		"template typo":       {func(s *vm.Spec) { s.Template = []byte("plain: true\nmount: []\n") }, "template:2:1"},
		"template on others":  {func(s *vm.Spec) { s.Template = []byte("base:\n- url: template://default\n") }, "base"},
		"ansible on the host": {func(s *vm.Spec) { s.Template = []byte("provision:\n- mode: ansible\n  playbook: /x.yml\n") }, "provision[0]"},
		"a script of a host":  {func(s *vm.Spec) { s.Template = []byte("provision:\n- file: {url: /etc/passwd}\n") }, "provision[0]"},
		"Lima's validation":   {func(s *vm.Spec) { s.Template = []byte("minimumLimaVersion: 99.0.0\n") }, "99.0.0"},
		"a second network":    {func(s *vm.Spec) { s.Template = []byte("networks:\n- lima: shared\n") }, "networks"},
		"no CPU":              {func(s *vm.Spec) { s.CPUs = 0 }, "got 0"},
		"memory":              {func(s *vm.Spec) { s.Memory = 1 }, "memory"},
		"disk":                {func(s *vm.Spec) { s.Disk = 0 }, "disk"},
		"architecture":        {func(s *vm.Spec) { s.Image.Arch = "vax" }, "vax"},
		"user":                {func(s *vm.Spec) { s.User = "a; rm -rf /" }, "login user"},
		"root":                {func(s *vm.Spec) { s.User = "root" }, "login user"},
		"key":                 {func(s *vm.Spec) { s.AuthorizedKey = "ssh-ed25519 AAAA' >/etc/x" }, "public key"},
		"two keys":            {func(s *vm.Spec) { s.AuthorizedKey = testKey + "\n" + testKey }, "one public key"},
		"key with options":    {func(s *vm.Spec) { s.AuthorizedKey = `command="x" ` + testKey }, "one public key"},
		"plain http":          {func(s *vm.Spec) { s.Image.Location = "http://example.com/x" }, "https"},
		"other scheme": {func(s *vm.Spec) {
			s.Image.Location, s.Image.Digest = "ftp://example.com/x", "sha256:"+strings.Repeat("0", 64)
		}, "https"},
		"no digest":        {func(s *vm.Spec) { s.Image.Location = "https://example.com/x" }, "digest"},
		"bad digest":       {func(s *vm.Spec) { s.Image.Digest = "sha256:12" }, "sha256:…"},
		"remote kernel":    {func(s *vm.Spec) { s.Image.Kernel = "https://example.com/k" }, "kernel"},
		"initrd alone":     {func(s *vm.Spec) { s.Image.Kernel = "" }, "no kernel"},
		"name with a path": {func(s *vm.Spec) { s.Name = "../x" }, "identifier"},
		"Lima's own name":  {func(s *vm.Spec) { s.Name = "_config" }, "identifier"},
	} {
		t.Run(what, func(t *testing.T) {
			s := testSpec("refused")
			c.change(&s)
			err := d.Create(t.Context(), s)
			if fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("Create = %v (code %v), want %q", err, fail.CodeOf(err), c.says)
			}
			if ms, err := d.List(t.Context()); err != nil || len(ms) > 0 {
				t.Fatalf("List after refused specs = %v, %v, want none", ms, err)
			}
		})
	}
}

func TestNameLength(t *testing.T) {
	d := newDriver(t)
	longest := maxSocketPath - 1 - len(d.home) - len("//ssh.sock.1234567890123456")
	s := testSpec(strings.Repeat("a", longest))
	if longest > 76 { // Lima's own limit
		t.Fatalf("longest name = %d bytes with home %s, want at most 76: the test's directory is too short", longest, d.home)
	}
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatalf("Create with a name of %d bytes = %v, want nil", longest, err)
	}
	s.Name += "a"
	if err := d.Create(t.Context(), s); fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "" {
		t.Fatalf("Create with a name of %d bytes = %v (hint %q), want code %v with a hint", longest+1, err, fail.HintOf(err), fail.Host)
	}
}

// The script must reach the guest unchanged: Lima trims lines and expands {{ }}.
func TestBootScriptTravelsUnchanged(t *testing.T) {
	s := testSpec("boot")
	s.Boot = "#!/usr/bin/env bash\ncat <<EOF\n   {{.Name}} 'quoted' \"twice\"\n\n\tEOF\n"
	script, err := bootScript(s)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(script, "\n")
	if len(lines) != 2 || strings.Contains(script, "{{") {
		t.Fatalf("script = %q, want 2 lines without {{", script)
	}
	if !strings.HasSuffix(lines[1], "); /usr/bin/env bash /run/agent-sessionizer-boot") {
		t.Errorf("interpreter = %q, want bash of the decoded script", lines[1])
	}
	encoded := strings.Fields(lines[1])[3]
	if got, err := base64.StdEncoding.DecodeString(encoded); err != nil || string(got) != s.Boot {
		t.Errorf("decoded script = %q, %v, want %q", got, err, s.Boot)
	}
	if _, _, _, _, err := ssh.ParseAuthorizedKey([]byte(testKey)); err != nil {
		t.Fatal(err)
	}
	key, err := base64.StdEncoding.DecodeString(strings.Fields(lines[0])[3])
	if want := "'" + testKey + "' 'cert-authority " + testKey + "' >/etc/ssh/agent-sessionizer/agent\n"; err != nil || !strings.Contains(string(key), want) {
		t.Errorf("decoded key = %q, %v, want %q in it", key, err, want)
	}
}

func TestCmdline(t *testing.T) {
	for in, want := range map[string]string{
		"":                        "no_timer_check panic=1",
		"ro panic=30":             "ro panic=30 no_timer_check",
		"no_timer_check  panic=1": "no_timer_check panic=1",
	} {
		if got := addArgs(in, kernelArgs); got != want {
			t.Errorf("addArgs(%q) = %q, want %q", in, got, want)
		}
	}
}
