//go:build e2e && foreign

package e2e

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// guestArch is the architecture of the guests: another than this host's.
var guestArch = map[string]string{vm.X8664: vm.AArch64, vm.AArch64: vm.X8664}[vm.HostArch()]

// foreignTime limits each command of the test. An emulated guest of another architecture is slower
// than the guests of the other tests, and the host may be busy.
const foreignTime = 40 * time.Minute

// removeFirewall is what root in a guest does to be rid of the guest firewall, and of its DNS proxy.
const removeFirewall = `sudo sh -ec '
systemctl disable --now --quiet agent-guest.service
for tables in iptables ip6tables; do
	for table in filter nat mangle raw; do $tables -t $table -F; $tables -t $table -X; done 2>/dev/null || true
	for chain in INPUT OUTPUT FORWARD; do $tables -P $chain ACCEPT; done
done
rm -f /etc/resolv.conf
echo nameserver $(ip -4 route show default | cut -d" " -f3) >/etc/resolv.conf'`

// TestForeignArchitecture covers the life of a session whose VM has another architecture than this
// host: its image was built here, and contains the guest agent for that architecture. The parts
// run in order.
func TestForeignArchitecture(t *testing.T) {
	b := newBox(t)
	clone := b.Repo("project")
	b.Write("project/draft.txt", "not committed\n")
	limited := func() { b.Deadline = time.Now().Add(foreignTime) }
	limited()
	name := b.open("--arch", guestArch, "--with-changes", "./project")
	from(t, b, name, "golden")
	id := map[string]string{}

	for _, part := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"architecture", func(t *testing.T) { checkArchitecture(t, b, name) }},
		{"a VM of its own", func(t *testing.T) { checkIsolation(t, b, name) }},
		{"tools", func(t *testing.T) { checkTools(t, b, name) }},
		{"repository", func(t *testing.T) { checkRepository(t, b, name) }},
		{"guest firewall", func(t *testing.T) { checkFirewall(t, b, name) }},
		{"names", func(t *testing.T) { names(t, b, name) }},
		{"addresses and ports", func(t *testing.T) { addresses(t, b, name) }},
		{"ports and host services", func(t *testing.T) { services(t, b, name) }},
		{"fetch", func(t *testing.T) { work(t, b, name, clone) }},
		{"fork", func(t *testing.T) { forkForeign(t, b, name) }},
		{"stop and start", func(t *testing.T) {
			id = whoWithin(t, b, name, 20)
			b.MustIn(name, "echo work >work.txt && sync")
			b.Asz("stop", name)
			if left := b.Processes("qemu"); len(left) > 0 {
				t.Errorf("QEMU processes after the stop = %v, want none", left)
			}
			b.Asz("start", name)
			same(t, b, name, id)
			checkArchitecture(t, b, name)
			checkFirewall(t, b, name)
		}},
		{"gateway without the guest firewall", func(t *testing.T) {
			b.MustIn(name, removeFirewall)
			if rules := b.MustIn(name, "sudo iptables -S OUTPUT"); rules != "-P OUTPUT ACCEPT" {
				t.Fatalf("rules of the guest = %s, want none", rules)
			}
			addresses(t, b, name)
			const get = "curl -sS -m 20 http://files.example/"
			b.MustIn(name, get)
			r := b.Run("agent-sessionizer", "net", "deny", name, "files.example")
			if r.Code != 4 || !strings.Contains(r.Stderr, "did not apply its policy") {
				t.Errorf("net deny = exit %d, %s, want 4, because the guest's daemon does not run", r.Code, r.Stderr)
			}
			if r := b.In(name, get); r.Code == 0 { // the gateway applies it first
				t.Errorf("files.example after net deny = %s, want it denied", r.Stdout)
			}
		}},
		{"destroy", func(t *testing.T) {
			b.Asz("destroy", "--force", name)
			if l := b.List(); len(l) != 0 {
				t.Errorf("sessions at the end = %+v, want none", l)
			}
			if left := b.Leftovers(); len(left) > 0 {
				t.Errorf("processes at the end = %v, want none", left)
			}
		}},
	} {
		limited()
		t.Run(part.name, part.run)
	}
}

// checkArchitecture checks which programs run the guest, and in it.
func checkArchitecture(t *testing.T, b *box, name string) {
	t.Helper()
	if got := b.MustIn(name, "uname -m"); got != guestArch {
		t.Errorf("machine = %s, want %s", got, guestArch)
	}
	machine := map[string]string{vm.X8664: "3e", vm.AArch64: "b7"}[guestArch] // of the ELF header
	for _, program := range []string{"/usr/local/bin/agent-guest", "/usr/bin/git", "/usr/local/bin/node"} {
		if got := b.MustIn(name, "od -An -tx1 -j18 -N1 $(readlink -f "+program+")"); got != machine {
			t.Errorf("ELF machine of %s = %s, want %s", program, got, machine)
		}
	}
	b.MustIn(name, "agent-guest version && systemctl is-active agent-guest")
	if qemu := b.Processes("qemu-system-" + guestArch + " "); len(qemu) == 0 {
		t.Errorf("QEMU for %s = none of %v, want one", guestArch, b.Processes(""))
	}
	var views []session.View
	if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &views); err != nil || len(views) == 0 || views[0].Arch != guestArch || views[0].Accel != "tcg" {
		t.Errorf("sessions = %+v, %v, want one of %s that is emulated", views, err, guestArch)
	}
}

// checkFirewall checks that the guest agent's rules are in force.
func checkFirewall(t *testing.T, b *box, name string) {
	t.Helper()
	for tables, want := range map[string]string{"iptables -S": "-A OUTPUT -j AGENT-OUT", "ip6tables -S": "-A OUTPUT -j AGENT-OUT", "iptables -t nat -S": "--dport 53 -j REDIRECT"} {
		if rules := b.MustIn(name, "sudo "+tables); !strings.Contains(rules, want) {
			t.Errorf("%s = %s, want %q", tables, rules, want)
		}
	}
}

// forkForeign forks the session with its memory, and checks that both have their own identity.
func forkForeign(t *testing.T, b *box, name string) {
	const find = `pgrep -f "^sleep 54321"`
	b.MustIn(name, "echo mine >notes; setsid -f sleep 54321 >/dev/null 2>&1 </dev/null")
	pid := b.MustIn(name, find)
	var forks []session.View
	if err := json.Unmarshal([]byte(b.Asz("fork", "--json", name)), &forks); err != nil || len(forks) != 1 {
		t.Fatalf("fork = %+v, %v, want one", forks, err)
	}
	fork := forks[0]
	if !fork.Resumed || fork.Arch != guestArch {
		t.Errorf("fork = %+v, want its programs to continue, on %s", fork, guestArch)
	}
	differ(t, map[string]map[string]string{name: whoWithin(t, b, name, 20), fork.Name: whoWithin(t, b, fork.Name, 20)})
	if got := b.MustIn(fork.Name, "cat notes; "+find); got != "mine\n"+pid {
		t.Errorf("notes and process of the fork = %q, want mine and %s", got, pid)
	}
	checkFirewall(t, b, fork.Name)
	b.Asz("destroy", "--force", fork.Name)
	b.MustIn(name, "rm notes; kill "+pid)
}
