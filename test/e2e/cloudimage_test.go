//go:build e2e

package e2e

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestCloudImage follows the path of a user with the default settings: the program
// downloads a cloud image, boots it with cloud-init, provisions it and makes a
// golden image and a saved state. One session is a fork and one is a clone. The images
// are kept between runs, until their key or the code that makes them changes.
// TestImageDownload covers downloads that fail.
func TestCloudImage(t *testing.T) {
	long(t)
	b := newBox(t)
	disk := filepath.Join(realvm.CloudImage(), "disk.qcow2")
	begin := time.Now()
	kept := keptImages(t)
	web := newProvisionWeb(t, b, kept)
	t.Logf("%5.1fs web", time.Since(begin).Seconds())
	web.http.HandleFunc(imagesName+"/disk.qcow2", func(w http.ResponseWriter, r *http.Request) { http.ServeFile(w, r, disk) })
	b.Binary = buildWith(t, b.Home, web.versions)
	t.Logf("%5.1fs program", time.Since(begin).Seconds())
	b.trust(web.forge)
	b.Env = append(b.Env, "XDG_DATA_HOME="+kept, "PATH="+filepath.Dir(b.Binary)+":"+os.Getenv("PATH"))
	b.useImage("/disk.qcow2", digestOf(t, disk), web.renderTemplate())

	b.phase(t, "golden image", 25*time.Minute, func(*testing.T, func(string)) { b.Asz(build...) })
	ids := map[string]map[string]string{}
	for _, how := range []string{"warm", "golden"} {
		b.phase(t, "session from "+how, 7*time.Minute, func(t *testing.T, report func(string)) {
			b.Env = append(b.Env, "AGENT_SESSIONIZER_PREPARE="+how)
			b.Repo(how)
			name := b.open("--disk=14GiB", "./"+how)
			from(t, b, name, how)
			ids[name] = who(t, b, name)
			for _, c := range []struct{ what, line string }{
				{"UEFI", "test -d /sys/firmware/efi"},
				{"a grown partition", `[ $(df -BM --output=size / | tail -1 | tr -dc 0-9) -gt 13000 ]`},
				{"AppArmor", "sudo aa-enabled"},
				{"Node through nvm", "readlink -f /usr/local/bin/node | grep -q ^/opt/nvm/ && npm --version"},
				{"a released lazygit", "/usr/local/bin/lazygit --version"},
				{"agents", "claude --version | grep -q 'Claude Code' && codex --version"},
				{"the repository", "git log --oneline | grep -q hello"},
				{"docker", "docker info >/dev/null"},
				{"no failed services", `[ -z "$(systemctl list-units --failed --no-legend)" ]`},
			} {
				testenv.WaitFor(t, c.what+" ("+c.line+")", func() bool { return b.In(name, c.line).Code == 0 })
				report(c.what)
			}
			b.Asz("destroy", "--force", name)
		})
	}
	differ(t, ids)
	if runtime.GOARCH == "amd64" { // arm64 has no BIOS
		b.phase(t, "BIOS", 9*time.Minute, func(t *testing.T, _ func(string)) { bootBIOS(t, b, disk) })
	}
}

// keptImages returns the directory for the images of TestCloudImage, and removes those
// that other code made. The program's own key does not include the code that makes
// images.
func keptImages(t *testing.T) string {
	t.Helper()
	h := sha256.New()
	for _, glob := range []string{"../../pkg/golden/*", "../../pkg/image/*", "cloudimage_test.go", "provisionweb_test.go", "testdata/cloudimage/*"} {
		paths, err := filepath.Glob(glob)
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s = %v, %v, want files", glob, paths, err)
		}
		for _, path := range paths {
			fmt.Fprintln(h, path, digestOf(t, path))
		}
	}
	dir := filepath.Join(realvm.CloudImage(), fmt.Sprintf("images-%.12x", h.Sum(nil)))
	others, err := filepath.Glob(filepath.Join(realvm.CloudImage(), "images-*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, other := range others {
		if other != dir {
			if err := os.RemoveAll(other); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// phase runs a part of a long test as a subtest with a deadline, and ends the test if
// it fails. The lines of its commands are logged with their time.
func (b *box) phase(t *testing.T, name string, limit time.Duration, run func(t *testing.T, report func(line string))) {
	t.Helper()
	ok := t.Run(name, func(t *testing.T) {
		begin := time.Now()
		report := func(line string) { t.Logf("%5.1fs %s", time.Since(begin).Seconds(), line) }
		b.Deadline, b.Progress = begin.Add(limit), report
		defer func() {
			b.Deadline, b.Progress = time.Time{}, nil
			report("end of " + name)
		}()
		run(t, report)
	})
	if !ok {
		t.FailNow()
	}
}

// bootBIOS logs in to the image as the driver boots it when the template asks for a
// BIOS.
func bootBIOS(t *testing.T, b *box, disk string) {
	private, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	d, err := lima.New(lima.Options{
		Home: filepath.Join(b.Home, "bios"), Self: b.Binary, CacheDir: filepath.Join(b.Home, ".cache"),
		Template: []byte("firmware: {legacyBIOS: true}\n"),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithDeadline(t.Context(), b.Deadline)
	defer cancel()
	if err := d.Create(ctx, vm.Spec{
		Name: "bios", CPUs: 2, Memory: 1 << 30, Disk: 8 << 30, User: guestclient.User, AuthorizedKey: public, Boot: guestclient.BootScript(),
		Image: vm.Image{Arch: realvm.Image(t).Arch, Location: disk},
	}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Delete(context.WithoutCancel(ctx), "bios"); err != nil {
			t.Error(err)
		}
	}()
	e, err := d.Start(ctx, "bios", b.Progress)
	if err != nil {
		t.Fatal(err)
	}
	b.Progress("log in")
	c, err := ssh.DialBooted(ctx, ssh.Target{Addr: e.Addr, User: e.User, Key: private, HostKey: e.HostKey}, func() error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const line = "test ! -d /sys/firmware/efi && cloud-init --version && sudo id -un"
	if out, err := c.Output(ctx, line, nil, 4096); err != nil || !strings.HasSuffix(string(out), "root\n") {
		t.Errorf("%s = %q, %v, want root at the end", line, out, err)
	}
}

// digestOf returns the digest of a file as a VM template has it.
func digestOf(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("sha256:%x", h.Sum(nil))
}
