//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	socks5 "golang.org/x/net/proxy"
)

// asleep is how long the VM does not run, as if the host slept. It is longer than OpenSSH would wait for an
// answer if it asked.
const asleep = 20 * time.Second

// editors connects as VS Code does: one ssh that runs a shell, starts a server in the guest by a script on
// the standard input, and forwards connections to it (-D); and sftp beside it.
func editors(t *testing.T, b *box, name string) {
	b.Asz("ssh-config", "--install")
	config := filepath.Join(b.Home, ".ssh", "config")
	port := freePort(t)
	//nolint:noctx // ended below
	client := exec.Command("ssh", "-F", config, "-T", "-D", fmt.Sprint("127.0.0.1:", port), "-o", "ConnectTimeout=60", name+"-editor", "bash")
	in, err := client.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := client.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var problems bytes.Buffer
	client.Stderr, client.Env = &problems, b.Env
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = client.Process.Kill(), client.Wait() }()
	script := `exec node -e 'require("net").createServer(c => c.on("data", d => c.write("server: " + d))).listen(0, "127.0.0.1", function() { console.log("listening on " + this.address().port) })'` + "\n"
	if _, err := in.Write([]byte(script)); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		_ = client.Wait()
		t.Fatalf("the server in the guest: %v: %s", err, problems.String())
	}
	var inGuest int
	if _, err := fmt.Sscanf(line, "listening on %d\n", &inGuest); err != nil {
		t.Fatalf("the server in the guest = %q, want its port", line)
	}
	socks, err := socks5.SOCKS5("tcp", fmt.Sprint("127.0.0.1:", port), nil, socks5.Direct)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := socks.Dial("tcp", fmt.Sprint("127.0.0.1:", inGuest))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answers := bufio.NewReader(conn)
	ask := func(text string) {
		t.Helper()
		if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintln(conn, text); err != nil {
			t.Fatal(err)
		}
		if got, err := answers.ReadString('\n'); got != "server: "+text+"\n" {
			t.Fatalf("answer = %q, %v, want %q", got, err, "server: "+text)
		}
	}
	ask("before")
	b.Write("editor.txt", "by the editor\n")
	b.Write("batch", "put "+filepath.Join(b.Home, "editor.txt")+" editor.txt\nrename editor.txt renamed.txt\nls -l renamed.txt\n")
	if r := b.Run("sftp", "-F", config, "-b", filepath.Join(b.Home, "batch"), name+"-editor"); r.Code != 0 || !strings.Contains(r.Stdout, "renamed.txt") {
		t.Errorf("sftp = %s, want the renamed file", r.All())
	}
	if got := b.MustIn(name, "cat ~/renamed.txt; rm ~/renamed.txt"); got != "by the editor" {
		t.Errorf("file from sftp = %q, want the editor's", got)
	}
	for pid := range b.Processes("qemu-system") {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	}
	time.Sleep(asleep) // this is the sleep of the host
	for pid := range b.Processes("qemu-system") {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	ask("after the host slept")
}

// editorsAfterRestart logs in by name to the VM, which has another port now.
func editorsAfterRestart(t *testing.T, b *box, name string) {
	if r := b.Run("ssh", "-F", filepath.Join(b.Home, ".ssh", "config"), name, "echo", "back"); r.Stdout != "back\n" {
		t.Errorf("ssh by name after a restart = %s, want back", r.All())
	}
	b.Asz("ssh-config", "--uninstall")
}

// freePort returns a TCP port of the loopback interface that is free now.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}
