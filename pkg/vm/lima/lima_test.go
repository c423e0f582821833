package lima

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/opencontainers/go-digest"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Lima's packages panic at init without a home or a known user.
func TestEmptyEnvironment(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run=^$")
	cmd.Env = []string{}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("program with an empty environment = %v, want nil\n%s", err, out)
	}
}

func TestNewRefusesPathsQEMUCannotTake(t *testing.T) {
	base := t.TempDir()
	for _, name := range []string{"with blank", "with,comma", `with"quote`} {
		if _, err := New(Options{Home: filepath.Join(base, name), Self: "/bin/true", CacheDir: base}); fail.CodeOf(err) != fail.Host {
			t.Errorf("New with home %q = %v, want code %v", name, err, fail.Host)
		}
	}
	if _, err := New(Options{Home: "relative", Self: "/bin/true", CacheDir: base}); err == nil {
		t.Error("New with a relative home = nil, want an error")
	}
}

func TestCreateInspectDelete(t *testing.T) {
	d := newDriver(t)
	ctx := t.Context()
	if _, err := d.Inspect(ctx, "one"); !errors.Is(err, vm.ErrNotFound) || fail.CodeOf(err) != fail.NotFound {
		t.Fatalf("Inspect of an unknown VM = %v (code %v), want %v", err, fail.CodeOf(err), vm.ErrNotFound)
	}
	if _, err := d.Start(ctx, "one", nil); !errors.Is(err, vm.ErrNotFound) {
		t.Fatalf("Start of an unknown VM = %v, want %v", err, vm.ErrNotFound)
	}
	if err := d.Stop(ctx, "one", nil, 0); !errors.Is(err, vm.ErrNotFound) {
		t.Fatalf("Stop of an unknown VM = %v, want %v", err, vm.ErrNotFound)
	}
	if err := d.Delete(ctx, "one"); err != nil {
		t.Fatalf("Delete of an unknown VM = %v, want nil", err)
	}
	s := testSpec("one")
	if err := d.Create(ctx, s); err != nil {
		t.Fatal(err)
	}
	s.CPUs = 7
	if err := d.Create(ctx, s); err != nil {
		t.Fatal(err)
	}
	m, err := d.Inspect(ctx, "one")
	if err != nil || m.State != vm.Stopped || m.CPUs != 2 || m.Memory != 1<<30 || m.Disk != 4<<30 || m.Arch != hostArch() {
		t.Fatalf("Inspect(one) = %+v, %v, want stopped, 2 CPUs, 1 GiB of memory, 4 GiB of disk, %s", m, err, hostArch())
	}

	// What kill -9 in an older version, or a broken disk, may have left.
	half := filepath.Join(d.home, "half")
	if err := os.MkdirAll(half, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(half, "lima.yaml"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	aside := filepath.Join(d.home, asidePrefix("half")+"new-1")
	if err := os.MkdirAll(aside, 0o700); err != nil {
		t.Fatal(err)
	}
	ms, err := d.List(ctx)
	if err != nil || len(ms) != 2 || ms[0].Name != "half" || ms[0].State != vm.Broken || ms[0].Reason == "" || ms[1].Name != "one" {
		t.Fatalf("List = %+v, %v, want half, broken with a reason, and one", ms, err)
	}
	if err := d.Create(ctx, testSpec("half")); err != nil {
		t.Fatal(err)
	}
	if m, err := d.Inspect(ctx, "half"); err != nil || m.State != vm.Stopped {
		t.Fatalf("Inspect(half) = %+v, %v, want %s", m, err, vm.Stopped)
	}
	if _, err := os.Stat(aside); err == nil {
		t.Error("directory of the interrupted Create exists, want it removed")
	}
	for range 2 {
		if err := d.Delete(ctx, "half"); err != nil {
			t.Fatal(err)
		}
	}
	if ms, err := d.List(ctx); err != nil || len(ms) != 1 {
		t.Fatalf("List after Delete = %+v, %v, want 1", ms, err)
	}
}

func TestDownload(t *testing.T) {
	d := newDriver(t)
	content := strings.Repeat("image", 1000)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, content) }))
	defer srv.Close()
	f := limayaml.File{Location: srv.URL + "/disk.raw", Arch: hostArch(), Digest: digest.NewDigestFromBytes(digest.SHA256, sum(content))}
	var mu sync.Mutex
	var said []string
	p := func(msg string) { mu.Lock(); defer mu.Unlock(); said = append(said, msg) }
	dest := filepath.Join(t.TempDir(), "basedisk")
	if err := d.images.placeDisk(t.Context(), f, dest, p); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(dest); err != nil || string(b) != content {
		t.Fatalf("downloaded disk = %d bytes, %v, want %d", len(b), err, len(content))
	}
	if len(said) == 0 || !strings.Contains(said[0], "downloading") {
		t.Errorf("progress = %q, want \"downloading\" first", said)
	}
	f.Location = srv.URL + "/other.raw"
	f.Digest = digest.NewDigestFromBytes(digest.SHA256, sum("other"))
	if err := d.images.placeDisk(t.Context(), f, dest+"2", nil); err == nil || !strings.Contains(err.Error(), "digest") {
		t.Fatalf("placeDisk of wrong content = %v, want \"digest\"", err)
	}

	local := limayaml.File{Location: dest, Digest: f.Digest}
	if err := d.images.placeDisk(t.Context(), local, dest+"3", nil); err == nil {
		t.Fatal("placeDisk of a local image with a wrong digest = nil, want an error")
	}
	local.Digest = digest.NewDigestFromBytes(digest.SHA256, sum(content))
	if err := d.images.placeDisk(t.Context(), local, dest+"3", nil); err != nil {
		t.Fatal(err)
	}
	local.Location += "-missing"
	if err := d.images.placeDisk(t.Context(), local, dest+"4", nil); fail.CodeOf(err) != fail.NotFound {
		t.Fatalf("placeDisk of a missing image = %v, want code %v", err, fail.NotFound)
	}
}

func sum(s string) []byte { h := sha256.Sum256([]byte(s)); return h[:] }

// only returns a PATH with just these programs.
func only(t *testing.T, programs ...string) {
	t.Helper()
	dir := t.TempDir()
	for _, p := range programs {
		full, err := exec.LookPath(p)
		if err != nil {
			t.Fatalf("%v; apt-get install qemu-system-x86 qemu-utils openssh-client", err)
		}
		if err := os.Symlink(full, filepath.Join(dir, p)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
}

// A VM that cannot start reports why, and leaves nothing running.
func TestStartExplains(t *testing.T) {
	images := t.TempDir()
	raw := filepath.Join(images, "raw")
	if err := os.WriteFile(raw, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(images, "bad.qcow2")
	if err := os.WriteFile(bad, []byte("QFI\xfb\x00\x00\x00\x09"+strings.Repeat("\x00", 512)), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		programs []string
		image    string
		code     fail.Code
		says     string
		hint     string
	}{
		"no-image":   {[]string{"qemu-img", "qemu-system-" + hostArch(), "ssh", "ssh-keygen"}, images + "/none", fail.NotFound, "no such file", "image build"},
		"bad-image":  {[]string{"qemu-img", "qemu-system-" + hostArch(), "ssh", "ssh-keygen"}, bad, fail.Failure, "image is unusable", "image build"},
		"no-qemu":    {[]string{"qemu-img", "ssh", "ssh-keygen"}, raw, fail.Host, "QEMU is missing", "install"},
		"no-qemuimg": {[]string{"qemu-system-" + hostArch(), "ssh", "ssh-keygen"}, raw, fail.Host, "qemu-img is missing", "install"},
		"no-ssh":     {[]string{"qemu-img", "qemu-system-" + hostArch()}, raw, fail.Host, "SSH client is missing", "install"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDriver(t)
			t.Setenv(accelEnv, "tcg")
			only(t, c.programs...)
			s := testSpec(name)
			s.Image = vm.Image{Arch: hostArch(), Location: c.image}
			s.Template = []byte("firmware: {legacyBIOS: true}\n")
			if err := d.Create(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			for range 2 { // the second start finds what the first left
				_, err := d.Start(t.Context(), name, nil)
				if err == nil || fail.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.says) || !strings.Contains(fail.HintOf(err), c.hint) {
					t.Fatalf("Start = %v (code %v, hint %q), want %q (code %v, hint %q)", err, fail.CodeOf(err), fail.HintOf(err), c.says, c.code, c.hint)
				}
			}
			if left, err := family(filepath.Join(d.home, name)); err != nil || len(left) > 0 {
				t.Fatalf("processes after a failed Start = %v, %v, want none", left, err)
			}
		})
	}
}

func TestImageThatIsGone(t *testing.T) {
	d := newDriver(t)
	image := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(image, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	s := testSpec("gone")
	s.Image = vm.Image{Arch: hostArch(), Location: image}
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(d.home, "gone")
	if err := d.prepare(t.Context(), "gone", dir, meta{}, nil); err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(dir, "diffdisk")
	grown, err := os.OpenFile(disk, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer grown.Close()
	if _, err := grown.WriteString("work"); err != nil {
		t.Fatal(err)
	}
	content := func() string {
		t.Helper()
		b, err := os.ReadFile(disk)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if err := d.prepare(t.Context(), "gone", dir, meta{}, nil); err != nil || !strings.HasSuffix(content(), "work") {
		t.Fatalf("prepare with complete disks = %v, old disk kept: %t, want nil, true", err, strings.HasSuffix(content(), "work"))
	}
	if err := os.Remove(filepath.Join(dir, disksFile)); err != nil { // as if killed before the disks were complete
		t.Fatal(err)
	}
	if err := d.prepare(t.Context(), "gone", dir, meta{}, nil); err != nil || strings.HasSuffix(content(), "work") {
		t.Fatalf("prepare with incomplete disks = %v, old disk kept: %t, want nil, false", err, strings.HasSuffix(content(), "work"))
	}
	if err := os.Remove(image); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), "gone", nil); fail.CodeOf(err) != fail.NotFound || fail.HintOf(err) == "" {
		t.Fatalf("Start without the image = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.NotFound)
	}
}

func TestExplain(t *testing.T) {
	plain := errors.New("x")
	if err := explain("nothing known", plain); !errors.Is(err, plain) || fail.HintOf(err) != "" {
		t.Errorf("explain(nothing known) = %v (hint %q), want %v without a hint", err, fail.HintOf(err), plain)
	}
	if err := explain("qemu-system-x86_64: -netdev user: Could not set up host forwarding rule 'tcp:127.0.0.1:1-:22'", plain); !errors.Is(err, errPortTaken) {
		t.Errorf("explain of a used port = %v, want %v", err, errPortTaken)
	}
	if err := explain("qemu-img: /x: No space left on device", plain); fail.CodeOf(err) != fail.Host || !errors.Is(err, plain) {
		t.Errorf("explain of a full disk = %v (code %v), want %v with code %v", err, fail.CodeOf(err), plain, fail.Host)
	}
}

// TestExplainVirtualization checks the errors of Virtualization.framework, as the host agent logs
// them.
func TestExplainVirtualization(t *testing.T) {
	for message, c := range map[string]struct{ says, hint string }{
		"The process doesn’t have the “com.apple.security.virtualization” entitlement.": {"not signed with the entitlement", "codesign"},
		"Virtualization is not available on this hardware.":                             {"cannot run VMs", ""},
	} {
		dir := t.TempDir()
		line := `agent-sessionizer: Error Domain=VZErrorDomain Code=2 Description="Invalid virtual machine configuration. ` + message + "\" UserInfo={\n"
		if err := os.WriteFile(filepath.Join(dir, "ha.stderr.log"), []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
		err := explain(agentLog(dir), errors.New("x"))
		if fail.CodeOf(err) != fail.Host || !strings.Contains(err.Error(), c.says) || !strings.Contains(fail.HintOf(err), c.hint) {
			t.Errorf("explain(%q) = %v (code %v, hint %q), want %q (code %v, hint %q)", message, err, fail.CodeOf(err), fail.HintOf(err), c.says, fail.Host, c.hint)
		}
	}
}

func TestCheckNamesWhatIsMissing(t *testing.T) {
	d := newDriver(t)
	only(t)
	missing := ""
	for _, err := range d.Check(t.Context(), hostArch()) {
		if fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "" {
			t.Errorf("Check = %v (code %v, hint %q), want code %v with a hint", err, fail.CodeOf(err), fail.HintOf(err), fail.Host)
		}
		missing += err.Error() + "\n"
	}
	for _, exe := range []string{"qemu-system-" + hostArch(), "qemu-img", "ssh ", "ssh-keygen"} {
		if !strings.Contains(missing, exe) {
			t.Errorf("Check = %s, want %s named", missing, exe)
		}
	}
}

// TestCheckForeignArchitecture checks that the programs for another architecture are required only
// for its VMs, and that the hints name the packages that contain them.
func TestCheckForeignArchitecture(t *testing.T) {
	if hostArch() != vm.X8664 || runtime.GOOS != "linux" {
		t.Skip("the packages are those for aarch64 on another host")
	}
	d := newDriver(t)
	only(t, "qemu-system-x86_64", "qemu-img", "ssh", "ssh-keygen")
	if problems := d.Check(t.Context(), vm.X8664); len(problems) > 0 {
		t.Errorf("Check(x86_64) = %v, want nothing missing", problems)
	}
	problems := d.Check(t.Context(), vm.AArch64)
	if len(problems) != 1 || fail.CodeOf(problems[0]) != fail.Host || fail.HintOf(problems[0]) != "apt-get install -y qemu-system-arm" {
		t.Errorf("Check(aarch64) = %v, want one problem, and qemu-system-arm in its hint", problems)
	}
	if err := os.Symlink("qemu-system-x86_64", filepath.Join(os.Getenv("PATH"), "qemu-system-aarch64")); err != nil {
		t.Fatal(err)
	}
	for _, err := range d.Check(t.Context(), vm.AArch64) { // unless this host has the firmware
		if fail.HintOf(err) != "apt-get install -y qemu-efi-aarch64" {
			t.Errorf("Check(aarch64) = %v (hint %q), want only the firmware missing", err, fail.HintOf(err))
		}
	}
}

func TestDiskSmallerThanTheImage(t *testing.T) {
	base := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(base, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(base, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := fits(base, 1<<20); err != nil {
		t.Errorf("fits, just as large, = %v, want nil", err)
	}
	if err := fits(base, 1<<20-1); fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "" {
		t.Errorf("fits, one byte short, = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.Usage)
	}
}
