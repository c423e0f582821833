//go:build e2e

package e2e

import (
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// fromAnotherHost works in a session of b from another account, which has no session and no
// guest image, with the API between them: over loopback TCP with a token, and over SSH. The
// SSH server is the guest's. Its command "serve connect" reaches b's serve through a socket
// that the SSH client forwards.
func fromAnotherHost(t *testing.T, b *box, name string) {
	serve := b.start("serve", "--listen", "127.0.0.1:18122")
	testenv.WaitFor(t, "an answer of serve", func() bool { r, err := b.api("/api/health"); return err == nil && r.Body.Close() == nil })
	stopped := false
	stop := func() {
		if !stopped {
			stopped = true
			_ = serve.Process.Signal(syscall.SIGTERM)
			serve.ends(t)
		}
	}
	defer stop()
	token := strings.TrimSpace(b.Asz("serve", "token", "add", "far", "--scope", "admin"))
	far := newBox(t)
	far.Write("token", token)
	far.Asz("context", "add", "box", "http://127.0.0.1:18122", "--token", "file:"+far.Home+"/token")
	far.Asz("context", "use", "box")

	if l := far.List(); len(l) != 1 || l[0].Name != name || l[0].State != "ready" {
		t.Fatalf("sessions from another host = %+v, want %s, ready", l, name)
	}
	if got := far.MustIn(name, "hostname"); got != "lima-"+name {
		t.Errorf("hostname = %q, want lima-%s", got, name)
	}
	far.Write("note.txt", "from afar\n")
	far.Asz("cp", "note.txt", name+":/tmp/note.txt")
	if got := far.MustIn(name, "cat /tmp/note.txt"); got != "from afar" {
		t.Errorf("copied file = %q, want \"from afar\"", got)
	}
	if got := far.Asz("net", "explain", name, "github.com"); !strings.HasPrefix(got, "allowed") {
		t.Errorf("net explain = %q, want allowed", got)
	}

	// attached, and still so after serve was away
	u := newTerminal(t, far)
	u.typed("unset TMUX; "+realvm.Binary()+" open "+name, "Enter")
	u.sees("scratch")
	u.typed("C-b", "5")
	u.sees("scratch*")
	u.typed("clear; echo far-$((40+2))", "Enter")
	u.sees("far-42")
	stop()
	serve = b.start("serve", "--listen", "127.0.0.1:18122")
	stopped = false
	for end := time.Now().Add(3 * time.Minute); !strings.Contains(u.screen(), "again-43"); time.Sleep(3 * time.Second) { // a terminal offers nothing to wait on
		if time.Now().After(end) {
			t.Fatalf("screen after serve was away = %s, want again-43: the pane must reconnect", u.screen())
		}
		u.typed("echo again-$((40+3))", "Enter")
	}
	u.typed("C-b", "d")
	u.sees("detached")

	// over SSH
	b.Write("ssh.config", b.Asz("ssh-config", "--forwards", name))
	b.Asz("cp", realvm.Binary(), name+":/tmp/agent-sessionizer")
	b.MustIn(name, "sudo install /tmp/agent-sessionizer /usr/local/bin/ && mkdir -p -m 700 ~/.local/state/agent-sessionizer")
	socket := filepath.Join(b.Home, ".local/state/agent-sessionizer/serve.sock")
	config := filepath.Join(b.Home, "ssh.config")
	forward := exec.Command("ssh", "-F", config, "-N", "-R", "/home/agent/.local/state/agent-sessionizer/serve.sock:"+socket, name)
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = forward.Process.Kill(), forward.Wait() }()
	b.MustIn(name, "until [ -S ~/.local/state/agent-sessionizer/serve.sock ]; do sleep 0.2; done")
	far.Write("bin/ssh", "#!/bin/sh\nexec "+forward.Path+" -F "+config+" \"$@\"\n")
	if r := far.Run("sh", "-c", "chmod +x bin/ssh && PATH=$HOME/bin:$PATH exec agent-sessionizer --host ssh://"+name+" exec "+name+" -- hostname"); strings.TrimSpace(r.Stdout) != "lima-"+name {
		t.Errorf("exec over SSH = %s, want lima-%s", r.All(), name)
	}
	far.Asz("context", "use", "local")
	// Ends attach-session.
	far.Run("tmux", "kill-server")
	// The folder of the socket also has the record of the dotfiles.
	b.MustIn(name, "sudo rm /usr/local/bin/agent-sessionizer /tmp/agent-sessionizer /tmp/note.txt; rm ~/.local/state/agent-sessionizer/serve.sock")
}
