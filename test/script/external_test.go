package script

import (
	"fmt"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
)

// TestExternalNATS checks a cluster whose streams are in a NATS server of others: tasks run on both hosts, and
// go on after that server was down.
func TestExternalNATS(t *testing.T) {
	x := testcluster.NewExternal(t, 1, true)
	first, second := newWorld(t), newWorld(t)
	settings := fmt.Sprintf("cluster:\n  url: %s\n  domain: %s\n  credentials: %s\n  ca: %s\n", x.URL, x.Domain, x.Credentials, x.CA)
	address := testcluster.FreeCoreAddr(t)
	first.write(".config/agent-sessionizer/config.yaml", "cluster: {url: 'nats://nats.example.com:7422', domain: hub}\n")
	if out, err := first.try("agent-sessionizer", "serve", "--cluster", "--name", "first", "--cluster-address", address); err == nil || !strings.Contains(out, "must begin with tls://") {
		t.Errorf("serve --cluster without TLS = %v, %s, want an error", err, out)
	}
	first.write(".config/agent-sessionizer/config.yaml", settings)
	if out := first.run("agent-sessionizer", "config", "show"); !strings.Contains(out, x.URL) {
		t.Errorf("config show = %s, want cluster.url", out)
	}
	app := first.clone("app")
	for _, w := range []*world{first, second} {
		w.write("gitconfig", "[user]\n\tname = Test\n\temail = test@example.invalid\n[init]\n\tdefaultBranch = main\n[url \"file://"+app+"\"]\n\tinsteadOf = https://github.com/acme/app.git\n")
	}
	first.serves("--cluster", "--name", "first", "--cluster-address", address)
	first.write("token", first.run("agent-sessionizer", "cluster", "token"))
	second.serves("--join", first.path("token"), "--name", "second")

	runs := func(name string) {
		t.Helper()
		first.write(name+".yaml", `version: "1"
kind: Task
metadata: {name: `+name+`}
repository: {url: acme/app}
vm: {cpus: 1, memory: 512M, disk: 4G}
agent: {kind: command, command: [sh, -c, "echo working; echo result >new.txt"]}
placement: {host: second}
`)
		first.run("agent-sessionizer", "task", "submit", "-f", first.path(name+".yaml"))
		for _, w := range []*world{first, second} {
			w.until("the end of the task", func() bool {
				out, err := w.try("agent-sessionizer", "task", "list")
				return err == nil && strings.Contains(out, "COMPLETED") && strings.Contains(out, name)
			})
		}
		first.until("the task's output", func() bool {
			out, err := first.try("agent-sessionizer", "task", "logs", name)
			return err == nil && strings.Contains(out, "working")
		})
		if out := first.run("agent-sessionizer", "task", "artifacts", name); !strings.Contains(out, "new.txt") {
			t.Errorf("artifacts of %s on the first host = %s, want new.txt", name, out)
		}
	}
	runs("before")
	x.Stop()
	x.Start()
	runs("after")
}
