//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// identity prints what no two guests may share, one item per line.
const identity = `
echo "machine-id $(cat /etc/machine-id)"
echo "boot-id $(cat /proc/sys/kernel/random/boot_id)"
echo "hostname $(hostname) $(cat /etc/hostname)"
echo "host-key $(cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub)"
echo "mac $(cat /sys/class/net/e*/address)"
echo "random $(head -c 24 /dev/urandom | base64)"
echo "uuid $(cat /proc/sys/kernel/random/uuid)"
echo "login-key $(head -n 1 /etc/ssh/agent-sessionizer/agent)"
`

const wholeDisk = `[ $(df -BM --output=size / | tail -1 | tr -dc 0-9) -gt 7000 ]`

// who reads a session's identity, and checks its clock.
func who(t *testing.T, b *box, name string) map[string]string {
	t.Helper()
	return whoWithin(t, b, name, 2)
}

// whoWithin works as who does. The clock may be wrong by that many seconds.
func whoWithin(t *testing.T, b *box, name string, seconds int64) map[string]string {
	t.Helper()
	id := map[string]string{}
	for line := range strings.Lines(b.MustIn(name, identity)) {
		what, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		id[what] = value
	}
	if len(id) != 8 {
		t.Fatalf("identity of %s = %v, want 8 parts", name, id)
	}
	var now int64
	before := time.Now().Unix()
	if _, err := fmt.Sscan(b.MustIn(name, "date +%s"), &now); err != nil || now < before-seconds || now > time.Now().Unix()+seconds {
		t.Errorf("clock of %s is %d s off, %v, want at most %d", name, now-before, err, seconds)
	}
	if !strings.HasSuffix(id["hostname"], name) {
		t.Errorf("hostname of %s = %s, want its name last", name, id["hostname"])
	}
	return id
}

// same checks that a session kept its identity and the work left in it.
func same(t *testing.T, b *box, name string, was map[string]string) {
	t.Helper()
	now := who(t, b, name)
	for _, what := range []string{"machine-id", "hostname", "host-key", "mac", "login-key"} {
		if now[what] != was[what] {
			t.Errorf("%s after a restart = %s, want %s", what, now[what], was[what])
		}
	}
	if now["boot-id"] == was["boot-id"] {
		t.Errorf("boot id after a restart = %s, want another", now["boot-id"])
	}
	if got := b.MustIn(name, "cat work.txt"); got != "work" {
		t.Errorf("work.txt = %q, want \"work\"", got)
	}
}

func from(t *testing.T, b *box, name, want string) {
	t.Helper()
	for _, v := range b.List() {
		if v.Name == name && v.From != want {
			images := b.Run("sh", "-c", "agent-sessionizer image list; ls -la --time-style=full-iso "+realvm.DataHome()+"/agent-sessionizer/images")
			t.Errorf("origin of %s = %s, want %s\n%s%s", name, v.From, want, images.All(), b.Asz("logs", name))
		}
	}
}

func differ(t *testing.T, all map[string]map[string]string) {
	t.Helper()
	names := slices.Sorted(maps.Keys(all))
	for i, a := range names {
		for _, b := range names[i+1:] {
			for what, value := range all[a] {
				if value == all[b][what] {
					t.Errorf("%s of %s and %s = %s, want two", what, a, b, value)
				}
			}
		}
	}
}

// TestGolden starts sessions from a golden image and from a saved VM.
func TestGolden(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	for _, repo := range []string{"one", "two", "three"} {
		b.Repo(repo)
	}
	one := b.open("./one")
	two := b.open("./two")
	from(t, b, one, "warm")
	from(t, b, two, "warm")
	ids := map[string]map[string]string{one: who(t, b, one), two: who(t, b, two)}

	t.Run("a fork is its own when it is ready", func(t *testing.T) {
		b.MustIn(one, "test -e /run/agent-seed/own && ! test -s /run/agent-seed/own")
		b.MustIn(one, "sudo grep -q "+one+" /mnt/lima-cidata/meta-data")
		b.MustIn(one, wholeDisk)
		b.MustIn(one, "sudo journalctl -b | grep -q . && ls -d /run/log/journal/$(cat /etc/machine-id)")
	})
	t.Run("a fork is an ordinary guest", func(t *testing.T) {
		testenv.WaitFor(t, "the end of the boot", func() bool { return b.In(one, "test -e /run/lima-boot-done").Code == 0 })
		for what, line := range map[string]string{
			"a lease":          "ip -4 addr show | grep -q 192.168.5.15 && ip route | grep -q ^default",
			"names":            "getent hosts github.com",
			"running services": "systemctl is-active ssh dbus systemd-logind systemd-networkd agent-guest docker.socket",
			"no failed ones":   `[ -z "$(systemctl list-units --failed --no-legend)" ]`,
			"docker":           "docker info >/dev/null",
			"sudo and a shell": "sudo -n true && zsh -lic true",
		} {
			testenv.WaitFor(t, what, func() bool { return b.In(one, line).Code == 0 })
		}
	})
	t.Run("the host key stays off the host's disk", func(t *testing.T) {
		secret := strings.Split(b.MustIn(one, "sudo cat /etc/ssh/ssh_host_ed25519_key"), "\n")[2]
		files, err := filepath.Glob(filepath.Join(b.Home, ".agent-vms", one, "*"))
		if err != nil || len(files) == 0 {
			t.Fatalf("files of the VM = %q, %v, want some", files, err)
		}
		logs, _ := filepath.Glob(filepath.Join(b.Home, ".local/state/agent-sessionizer/sessions/*/*"))
		for _, file := range append(files, logs...) {
			if info, err := os.Stat(file); err != nil || !info.Mode().IsRegular() || strings.HasSuffix(file, "diffdisk") {
				continue // the guest's own disk contains it
			}
			if text, err := os.ReadFile(file); err == nil && strings.Contains(string(text), secret) {
				t.Errorf("%s has the guest's private key, want it absent", file)
			}
		}
	})
	t.Run("it keeps who it is", func(t *testing.T) {
		long(t)
		b.MustIn(one, "echo work >work.txt && sync")
		b.Asz("stop", one)
		b.Asz("image", "prune") // the image of a stopped session stays
		b.Asz("start", one)
		same(t, b, one, ids[one])
	})
	t.Run("a clone", func(t *testing.T) {
		b.Env = append(b.Env, "AGENT_SESSIONIZER_PREPARE=golden")
		three := b.open("./three")
		from(t, b, three, "golden")
		b.MustIn(three, wholeDisk)
		ids[three] = who(t, b, three)
	})
	differ(t, ids)
}

// TestPool gives a session a standby VM, as where snapshots are unavailable.
func TestPool(t *testing.T) {
	long(t)
	b := newBox(t)
	b.Env = append(b.Env, "AGENT_SESSIONIZER_PREPARE=pool")
	for _, repo := range []string{"one", "two"} {
		b.Repo(repo)
	}
	b.Write("two/.agent-sessionizer.yaml", "network: {deny: [github.com]}\n")
	if r := b.Run("sh", "-c", "cd two && git add . && git commit -q -m narrow"); r.Code != 0 {
		t.Fatalf("git commit in two = exit %d\n%s\nwant exit 0", r.Code, r.All())
	}
	one := b.open("./one")
	from(t, b, one, "golden")
	testenv.WaitFor(t, "a standby VM", func() bool { return strings.Contains(b.Asz("image", "list"), "is a standby VM") })
	two := b.open("./two")
	from(t, b, two, "pool")
	ids := map[string]map[string]string{one: who(t, b, one), two: who(t, b, two)}
	differ(t, ids)
	b.MustIn(two, "git log --oneline | grep -q narrow")
	// The gateway was started before the session existed; check what it allows.
	if out := b.Asz("net", "explain", two, "github.com"); !strings.Contains(out, "denied") {
		t.Errorf("net explain github.com = %s, want denied", out)
	}
	b.MustIn(two, "echo work >work.txt && sync")
	b.Asz("stop", two)
	b.Asz("start", two)
	same(t, b, two, ids[two])
	b.Asz("destroy", "--force", two)
	testenv.WaitFor(t, "another standby VM", func() bool { return strings.Contains(b.Asz("image", "list"), "is a standby VM") })
	b.Env = append(b.Env, "AGENT_SESSIONIZER_POOL=0")
	b.Asz("image", "prune")
	if left, err := filepath.Glob(filepath.Join(b.Home, ".agent-vms", "standby-*")); err != nil || len(left) > 0 {
		t.Errorf("standby VMs at the end = %q, %v, want none", left, err)
	}
}

// TestForksAtOnce forks ten sessions at once, but at most two for each of the host's
// processors: emulated ones starve each other.
func TestForksAtOnce(t *testing.T) {
	long(t)
	b := newBox(t)
	forks := min(10, 2*runtime.NumCPU())
	b.Write(".config/agent-sessionizer/config.yaml", "limits: {running: 12}\n")
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]map[string]string{}
	for i := range forks {
		repo := fmt.Sprintf("r%d", i)
		args := []string{"./" + repo}
		if b.Repo(repo); i == 1 {
			args = []string{"./r0", "--new", "again"} // two sessions of one repository
		}
		wg.Go(func() {
			r := b.Run(append(append([]string{"agent-sessionizer", "open", "-d"}, strings.Fields(small)...), args...)...)
			if r.Code != 0 {
				t.Errorf("open %s = exit %d\n%s\nwant exit 0", repo, r.Code, r.All())
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ids[strings.TrimSpace(r.Stdout)] = nil
		})
	}
	wg.Wait()
	for name := range ids {
		from(t, b, name, "warm")
		ids[name] = who(t, b, name)
	}
	if len(ids) != forks {
		t.Errorf("identities = %d (%v), want %d", len(ids), ids, forks)
	}
	differ(t, ids)
	b.MustIn("r0@again", "touch of-the-second")
	if r := b.In("r0", "test -e of-the-second"); r.Code == 0 {
		t.Error("a file of the second session of r0 is in the first, want a checkout of its own")
	}
}

// TestForkKilled kills the processes of a fork while it wakes: repeating the command
// leads to the same result.
func TestForkKilled(t *testing.T) {
	t.Parallel()
	for name, what := range map[string]string{"keeper": "keeper", "host agent": "hostagent", "QEMU": qemu, "gateway": "gateway"} {
		t.Run(name, func(t *testing.T) {
			if name != "QEMU" {
				long(t)
			}
			b := newBox(t)
			b.Repo("project")
			done := make(chan realvm.Result, 1)
			go func() {
				done <- b.Run(append(append([]string{"agent-sessionizer", "open", "-d"}, strings.Fields(small)...), "./project")...)
			}()
			testenv.WaitFor(t, "QEMU", func() bool { return len(b.Processes(qemu)) > 0 })
			b.kill(what)
			r := <-done // it may have finished in time, or failed
			name := b.open("./project")
			who(t, b, name)
			from(t, b, name, "warm") // the snapshot was not at fault
			b.MustIn(name, "git status")
			var views []struct {
				Error any `json:"error"`
			}
			if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &views); err != nil || len(views) != 1 || views[0].Error != nil {
				t.Errorf("sessions = %+v, %v, want 1 without an error; the first open: %+v", views, err, r)
			}
		})
	}
}
