//go:build e2e

package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestCluster works on two hosts with real VMs: a session and a task that are started on one host
// run on the other. The hosts are two accounts that share no file but the guest image.
func TestCluster(t *testing.T) {
	one, two := newBox(t), newBox(t)
	one.Repo("app")
	for _, b := range []*box{one, two} {
		b.Asz("--help") // a store, before two processes want one
		b.Run("git", "config", "--global", "url.file://"+one.Home+"/app.insteadOf", "https://github.com/acme/app.git")
	}
	var serves []*background
	stop := func() {
		for _, s := range serves {
			_ = s.Process.Signal(syscall.SIGTERM)
			s.ends(t)
		}
		serves = nil
	}
	defer stop()
	up := func(name string) func() bool {
		return func() bool {
			for line := range strings.Lines(one.Run("agent-sessionizer", "cluster", "list").Stdout) {
				if words := strings.Fields(strings.Replace(line, " (this host)", "", 1)); len(words) > 1 && words[0] == name && words[1] == "up" {
					return true
				}
			}
			return false
		}
	}
	serves = append(serves, one.start("serve", "--cluster", "--name", "one", "--cluster-address", testcluster.FreeAddr(t)))
	testenv.WaitFor(t, "the first host", up("one"))
	two.Write("token", one.Asz("cluster", "token"))
	serves = append(serves, two.start("serve", "--join", filepath.Join(two.Home, "token"), "--name", "two"))
	testenv.WaitFor(t, "the second host", up("two"))

	t.Run("session", func(t *testing.T) {
		name := one.open("--on", "two", "acme/app")
		if l := two.List(); len(l) != 1 || l[0].Name != name || l[0].State != "ready" {
			t.Fatalf("sessions of the second host = %+v, want %s, ready", l, name)
		}
		if got := one.MustIn("two:"+name, "hostname; id -un"); got != "lima-"+name+"\nagent" {
			t.Errorf("guest = %q, want lima-%s and agent", got, name)
		}
		one.Write("note.txt", "from the first host\n")
		one.Asz("cp", "note.txt", name+":/tmp/note.txt")
		if got := two.MustIn(name, "cat /tmp/note.txt"); got != "from the first host" {
			t.Errorf("copied file = %q, want that of the first host", got)
		}
		u := newTerminal(t, one)
		u.typed("unset TMUX; agent-sessionizer open two:"+name, "Enter")
		u.sees("scratch")
		u.typed("C-b", "5")
		u.sees("scratch*")
		u.typed("clear; echo far-$((40+2))", "Enter")
		u.sees("far-42")
		u.typed("C-b", "d")
		u.sees("detached")
		one.Run("tmux", "kill-server") // ends attach
		one.Asz("destroy", "--force", name)
		if l := two.List(); len(l) != 0 {
			t.Errorf("sessions of the second host after destroy = %+v, want none", l)
		}
	})

	t.Run("task", func(t *testing.T) {
		one.Write("task.yaml", fmt.Sprintf(`
version: "1"
kind: Task
metadata: {name: "on two"}
repository: {url: acme/app}
vm: {cpus: 2, memory: 1536M, disk: 8G}
agent: %s
placement: {host: two}
`, shell("echo result-$((40+2)); echo changed >>hello.txt; git commit -qam changed")))
		id := strings.TrimSpace(one.Asz("task", "submit", "-f", "task.yaml"))
		one.until(id, "COMPLETED")
		if got := one.Asz("task", "show", id); !strings.Contains(got, "two") {
			t.Errorf("task show on the first host = %s, want host two", got)
		}
		here, there := one.Asz("task", "logs", "--of", "events", "--json", id), two.Asz("task", "logs", "--of", "events", "--json", id)
		if here != there || here == "" {
			t.Errorf("events on the first host = %s, want those of the second: %s", here, there)
		}
		if got := two.Asz("task", "logs", id); !strings.Contains(got, "result-42") {
			t.Errorf("log on the second host = %q, want result-42", got)
		}
	})
}
