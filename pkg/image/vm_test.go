//go:build vmtest

package image_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain makes the test binary act as the host agent that the driver starts.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "hostagent" {
		if err := lima.HostAgent(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(realvm.Main(m, nil))
}

// ready reports the host key when sshd listens, as a session's boot script does.
const ready = `#!/bin/bash
systemd-run --no-block --property=DefaultDependencies=no bash -c '
  until (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null; do sleep 0.2; done
  echo "agent-sessionizer-ready $(cut -d" " -f1,2 /etc/ssh/ssh_host_ed25519_key.pub)" >/dev/ttyS0'
`

// TestDebianImageBootsWithItsTools uses the parts of the built image that a session
// needs. test/e2e checks that a restart keeps the machine's identity.
func TestDebianImageBootsWithItsTools(t *testing.T) {
	g := boot(t)
	g.run("nothing failed", "cloud-init status --wait | tail -1; systemctl --failed --no-legend", "status: done\n")
	g.run("docker", "docker --version && docker compose version && docker ps", "CONTAINER ID")
	g.run("agents", "claude --version && codex --version && agent-guest version", "")
	g.run("versions", "npm --version && gh --version && lazygit --version && node --version", "v24.")
	g.run("shell", "echo $SHELL; sudo -n id -u", "/usr/bin/zsh\n0\n")
	g.run("disk grew", "df --output=size -BG / | tail -1", "20G")
	g.run("secrets reach every shell",
		`sudo install -d -o agent /run/agent; echo "PROBE='a b'" >/run/agent/env; zsh -c 'echo 1$PROBE'; bash -lc 'echo 2$PROBE'`, "1a b\n2a b\n")
	const windows = "vim\nserver\nclaude\ngit\nscratch\n"
	list := " && tmux list-windows -t '=agent:' -F '#{window_name}'"
	g.run("ready-tmux", "ready-tmux -d /tmp && ready-tmux -d /tmp"+list, windows)
	g.run("ready-tmux restores", "tmux kill-window -t '=agent:git' && ready-tmux -d /tmp"+list, windows)
	g.run("commit", "cd $(mktemp -d) && git init -q && git commit -qm x --allow-empty && git log --format=%ae", "agent@localhost.invalid")
	g.run("one host key", "ls /etc/ssh/ssh_host_*_key", "/etc/ssh/ssh_host_ed25519_key\n")
	t.Log(g.run("boot time", "systemd-analyze; systemd-analyze blame --no-pager | head -15", "Startup finished"))
}

// guest is a VM with the built image.
type guest struct {
	t *testing.T
	c *ssh.Client
}

func boot(t *testing.T) guest {
	t.Helper()
	home := testenv.ShortDir(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d, err := lima.New(lima.Options{Home: home, Self: self, CacheDir: filepath.Join(home, "cache")})
	if err != nil {
		t.Fatal(err)
	}
	key, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	const name = "image"
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), name); err != nil {
			t.Error(err)
		}
	})
	if err := d.Create(t.Context(), vm.Spec{
		Name: name, AuthorizedKey: public, CPUs: 2, Memory: 2 << 30, Disk: 20 << 30,
		User: "agent", Boot: ready, Image: realvm.Image(t),
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	begin := time.Now()
	ep, err := d.Start(ctx, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("ready %.1fs after power-on", time.Since(begin).Seconds())
	c, err := ssh.Dial(ctx, ssh.Target{Addr: ep.Addr, User: ep.User, Key: key, HostKey: ep.HostKey})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return guest{t, c}
}

// run runs a command in the user's login shell and checks that its output contains
// want.
func (g guest) run(what, command, want string) string {
	g.t.Helper()
	out, err := g.c.Output(g.t.Context(), "{ "+command+"; } 2>&1", nil, 1<<20)
	if err != nil || !strings.Contains(string(out), want) {
		g.t.Errorf("%s = %v, output %s, want %q in it", what, err, out, want)
	}
	return string(out)
}
