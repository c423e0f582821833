package lima

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lima-vm/lima/pkg/store/filenames"
	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

func TestForksDifferInEveryRespect(t *testing.T) {
	f := &fork{User: "agent", AuthorizedKey: "ssh-ed25519 AAAA"}
	a, keyA, err := f.identity("agent-a", "/vms/agent-a")
	if err != nil {
		t.Fatal(err)
	}
	b, keyB, err := f.identity("agent-b", "/vms/agent-b")
	if err != nil {
		t.Fatal(err)
	}
	if a.Hostname == b.Hostname || a.MachineID == b.MachineID || a.BootID == b.BootID || a.HostKey == b.HostKey || keyA == keyB ||
		a.MAC == b.MAC || string(a.Seed) == string(b.Seed) {
		t.Errorf("identities of two forks (%s, %s) share a part, want every part different", a.Hostname, b.Hostname)
	}
	if !regexp.MustCompile(`^[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}$`).MatchString(a.MachineID) || len(a.Seed) < 32 {
		t.Errorf("machine-id = %q with %d bytes of seed, want a version 4 UUID, at least 32", a.MachineID, len(a.Seed))
	}
	if text := fmt.Sprintf("%v %+v %#v", a, a, a); strings.Contains(text, "PRIVATE") {
		t.Error("printed identity holds the host key, want it hidden")
	}
}

func TestStateKey(t *testing.T) {
	t.Setenv(accelEnv, "tcg")
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	d := newDriver(t)
	if _, err := d.StateKey(t.Context(), hostArch(), 2, 1<<30); err == nil {
		t.Error("StateKey without QEMU = nil, want an error")
	}
	qemu := filepath.Join(bin, "qemu-system-"+hostArch())
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(qemu, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	key := func(cpus int, memory int64) string {
		t.Helper()
		k, err := d.StateKey(t.Context(), hostArch(), cpus, memory)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	put("seven")
	first := key(2, 1<<30)
	if first != key(2, 1<<30) {
		t.Errorf("StateKey of the same machine twice = %q and another, want the same", first)
	}
	put("seven.two")
	for what, other := range map[string]string{"CPUs": key(1, 1<<30), "memory": key(2, 2<<30), "QEMU": key(2, 1<<30)} {
		if other == first {
			t.Errorf("StateKey with other %s = %q, want another key", what, other)
		}
	}
}

// A fork that has not woken stays marked until the host agent removes the mark.
func TestForkIsMadeWithItsMark(t *testing.T) {
	d := newDriver(t)
	s := testSpec("agent-fork-012345")
	s.Image.State = "/images/warm/state"
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(d.home, s.Name)
	f, err := readFork(dir)
	if err != nil || f == nil || f.State != s.Image.State || f.Disk != s.Disk || f.User != s.User || f.AuthorizedKey != s.AuthorizedKey {
		t.Fatalf("readFork = %+v, %v, want the state, disk, user and key of %+v", f, err, s)
	}
	if !isFork(dir) {
		t.Error("isFork = false, want true")
	}
	if err := removeSynced(filepath.Join(dir, forkFile)); err != nil || isFork(dir) {
		t.Errorf("isFork after removing the mark = %t, %v, want false, nil", isFork(dir), err)
	}
	if f, err := readFork(dir); f != nil || err != nil {
		t.Errorf("readFork without the mark = %+v, %v, want nil, nil", f, err)
	}
}

// qemu answers one connection as the machine protocol does.
func qemu(t *testing.T, dir string, answer func(command string) string) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "unix", filepath.Join(dir, filenames.QMPSock))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, `{"QMP": {"version": {}}}`)
			for sc := bufio.NewScanner(c); sc.Scan(); {
				var request struct{ Execute string }
				if json.Unmarshal(sc.Bytes(), &request) != nil {
					break
				}
				fmt.Fprintln(c, `{"event": "RESUME", "data": {}}`)
				if a := answer(request.Execute); a != "" {
					fmt.Fprintln(c, a)
				}
			}
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
}

func TestMonitor(t *testing.T) {
	dir := testenv.ShortDir(t)
	asked := 0
	qemu(t, dir, func(command string) string {
		switch command {
		case "query-status":
			if asked++; asked < 3 {
				return `{"return": {"status": "inmigrate"}}`
			}
			return `{"return": {"status": "paused"}}`
		case "block_resize":
			return `{"error": {"class": "GenericError", "desc": "no such\u001b[31m device"}}`
		case "query-migrate":
			return "" // hangs
		}
		return `{"return": {}}`
	})
	ctx, cancel := context.WithCancel(t.Context())
	m, err := dialMonitor(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	err = until(ctx, m, "query-status", func(s struct{ Status string }) (bool, error) { return s.Status == "paused", nil })
	if err != nil || asked != 3 {
		t.Errorf("until = %v after %d queries, want nil, 3", err, asked)
	}
	if _, err := m.do("block_resize", nil); err == nil || strings.Contains(err.Error(), "\x1b") || !strings.Contains(err.Error(), "no such") {
		t.Errorf("do(block_resize) = %q, want \"no such\" without escapes", err)
	}
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := m.do("query-migrate", nil); err == nil {
		t.Error("do(query-migrate) of a hung QEMU = nil, want an error")
	}
	bounded, stop := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer stop()
	if _, err := dialMonitor(bounded, t.TempDir()); err == nil || errors.Is(err, vm.ErrNotFound) {
		t.Errorf("dialMonitor without QEMU = %v, want an error other than %v", err, vm.ErrNotFound)
	}
}

// The first VMs of a home, started concurrently, use the same key.
func TestTheFirstVMsMakeOneKey(t *testing.T) {
	d := newDriver(t)
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			if err := d.ensureUserKey(); err != nil {
				t.Error(err)
			}
			dir := filepath.Join(d.home, filenames.ConfigDir)
			private, err1 := os.ReadFile(filepath.Join(dir, filenames.UserPrivateKey))
			public, err2 := os.ReadFile(filepath.Join(dir, filenames.UserPublicKey))
			key, err3 := xssh.ParsePrivateKey(private)
			if err := errors.Join(err1, err2, err3); err != nil {
				t.Error(err)
				return
			}
			if want := strings.TrimSpace(string(xssh.MarshalAuthorizedKey(key.PublicKey()))) + " lima\n"; string(public) != want {
				t.Errorf("public key = %q, want %q", public, want)
			}
		})
	}
	all.Wait()
	for _, f := range []string{filenames.UserPrivateKey, filenames.UserPublicKey} {
		if st, err := os.Stat(filepath.Join(d.home, filenames.ConfigDir, f)); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("mode of %s = %v, %v, want 0600", f, st.Mode(), err)
		}
	}
}
