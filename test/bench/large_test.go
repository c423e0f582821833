//go:build bench

package bench

import (
	"bufio"
	"crypto/ed25519"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// These are the ways of a large repository into a guest.
const (
	cloneStep    = "a session's step clone"
	plainSSH     = "git clone over SSH"
	checkoutOnly = "the checkout alone"
	rowClone     = "until the files are checked out, s"

	largeFiles  = 60_000
	largeFile   = 5_600 // bytes, which cannot be compressed
	largeCommit = 1_000 // files
)

// TestLarge brings a large repository into the same guest in two ways, once each: it takes minutes.
func TestLarge(t *testing.T) {
	_ = realvm.Prepare(t.Context()) // sessions start warm
	b := realvm.NewBox(t)
	large := results.table(table{title: titleLarge, rows: []row{
		{name: rowClone, unit: "s", comparisons: []comparison{
			{key: "large_clone", mine: cloneStep, other: plainSSH, aim: aim{atMost, 0.3}},
			{key: "large_checkout", mine: checkoutOnly, other: plainSSH},
		}},
	}})
	dir := filepath.Join(b.Home, "large")
	makeLarge(t, dir)
	port := serveGit(t, dir)
	began := time.Now()
	name := strings.TrimSpace(b.Asz(append(openArgs("large"), fmt.Sprintf("--host-service=localhost:%d", port))...))
	steps, _ := (&lifecycleBench{t: t, box: b, steps: new(table)}).events(name, began, 0)
	large.add(cloneStep, sample{rowClone: steps["clone into the guest"]})
	began = time.Now()
	b.MustIn(name, fmt.Sprintf("cd && GIT_SSH_COMMAND='ssh -o StrictHostKeyChecking=no' git clone -q ssh://git@host.lima.internal:%d/large plain", port))
	large.add(plainSSH, sample{rowClone: time.Since(began).Seconds()})
	began = time.Now()
	b.MustIn(name, "cd && git -C plain worktree add -q ../again")
	large.add(checkoutOnly, sample{rowClone: time.Since(began).Seconds()})
	if got := b.MustIn(name, "cd && git -C plain rev-parse HEAD && git -C large rev-parse HEAD && git -C large status --short | wc -l"); len(strings.Fields(got)) != 3 ||
		strings.Fields(got)[0] != strings.Fields(got)[1] || strings.Fields(got)[2] != "0" {
		t.Fatalf("both checkouts = %q, want the same commit, and no changes", got)
	}
	b.Asz("destroy", "--force", name)
	large.done(t, 1, cloneStep, plainSSH, checkoutOnly)
}

// makeLarge makes a repository whose pack has about 340 MB.
func makeLarge(t *testing.T, dir string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "git", "init", "-q", dir).CombinedOutput(); err != nil {
		t.Fatalf("git init: %v: %s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), "git", "-C", dir, "fast-import", "--quiet")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w, random, content := bufio.NewWriter(in), rand.NewChaCha8([32]byte{}), make([]byte, largeFile)
	for i := range largeFiles {
		if i%largeCommit == 0 {
			fmt.Fprintf(w, "commit refs/heads/main\ncommitter a <a@b> %d +0000\ndata 1\nc\n", 1_700_000_000+i)
		}
		_, _ = random.Read(content)
		fmt.Fprintf(w, "M 100644 inline d%d/f%d\ndata %d\n", i%600, i, largeFile)
		_, _ = w.Write(content)
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("git fast-import: %v", err)
	}
	for _, args := range [][]string{{"symbolic-ref", "HEAD", "refs/heads/main"}, {"reset", "-q", "--hard"}} {
		if out, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", dir}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
}

// serveGit serves the repository dir over SSH on loopback, for everyone who connects, and returns the port.
func serveGit(t *testing.T, dir string) int {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	config := &ssh.ServerConfig{NoClientAuth: true}
	config.AddHostKey(signer)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go serveUploadPack(conn, config, dir)
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// serveUploadPack answers every command on a connection with git upload-pack of dir.
func serveUploadPack(conn net.Conn, config *ssh.ServerConfig, dir string) {
	defer conn.Close()
	_, channels, requests, err := ssh.NewServerConn(conn, config)
	if err != nil {
		return
	}
	go ssh.DiscardRequests(requests)
	for n := range channels {
		ch, requests, err := n.Accept()
		if err != nil {
			return
		}
		go func() {
			defer ch.Close()
			for r := range requests {
				_ = r.Reply(r.Type == "exec" || r.Type == "env", nil)
				if r.Type != "exec" {
					continue
				}
				cmd := exec.Command("git", "upload-pack", dir) //nolint:noctx // ends with the connection
				cmd.Stdout, cmd.Stderr = ch, ch.Stderr()
				in, err := cmd.StdinPipe()
				if err != nil || cmd.Start() != nil {
					return
				}
				go func() { _, _ = io.Copy(in, ch); in.Close() }()
				status := struct{ Status uint32 }{}
				if cmd.Wait() != nil {
					status.Status = 1
				}
				_, _ = ch.SendRequest("exit-status", false, ssh.Marshal(status))
				return
			}
		}()
	}
}
