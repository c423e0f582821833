package boot

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

func TestReadLineIsBounded(t *testing.T) {
	for what, c := range map[string]struct {
		in, want string
		ok       bool
	}{
		"a line":         {"{}\n", "{}", true},
		"more behind it": {"{}\nsecret", "{}", true},
		"empty":          {"\n", "", true},
		"cut":            {"{", "", false},
		"as long as may": {"1234567\n", "1234567", true},
		"too long":       {"12345678\n", "", false},
	} {
		for how, r := range map[string]io.Reader{
			"at once": strings.NewReader(c.in), "byte by byte": iotest.OneByteReader(strings.NewReader(c.in)),
			"with the end": iotest.DataErrReader(strings.NewReader(c.in)),
		} {
			got, err := readLine(r, 8)
			if (err == nil) != c.ok || string(got) != c.want {
				t.Errorf("%s, %s: readLine(%q, 8) = %q, %v, want %q, success: %t", what, how, c.in, got, err, c.want, c.ok)
			}
		}
	}
}

// The private key that the guest receives must not be echoed, because the host logs
// all output.
func TestTheIdentityPortNeitherEchoesNorWaitsForLines(t *testing.T) {
	host, guest, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	port, err := openRaw(guest.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer port.Close()
	guest.Close()
	// Longer than a terminal's limit for a line, and with control characters.
	sent := strings.Repeat("secret\x03\x04\x7f\r", 800) + "\n"
	read := async(func() error {
		got, err := readLine(port, len(sent))
		if err == nil && string(got)+"\n" != sent {
			err = fmt.Errorf("read %q, want %q", got, sent)
		}
		return err
	})
	if _, err := io.WriteString(host, sent); err != nil {
		t.Fatal(err)
	}
	if err := <-read; err != nil {
		t.Fatal(err)
	}
	if _, err := port.WriteString("end\n"); err != nil {
		t.Fatal(err)
	}
	back := make([]byte, len(sent)+100)
	n, err := host.Read(back)
	if err != nil || string(back[:n]) != "end\n" {
		t.Fatalf("the host reads %q, %v, want %q", back[:n], err, "end\n")
	}
}

func TestTheRootDeviceIsReadOffTheCommandLine(t *testing.T) {
	device, options := rootOf("console=ttyS0 root=/dev/vda rw rootflags=discard quiet\n")
	if device != "/dev/vda" || options != "discard" {
		t.Fatalf("rootOf() = %q, %q, want %q, %q", device, options, "/dev/vda", "discard")
	}
	if device, _ := rootOf("root=LABEL=cloudimg-rootfs"); device != "" {
		t.Fatalf("rootOf(%q) = %q, want no device", "root=LABEL=cloudimg-rootfs", device)
	}
}

func TestKeysOfTheManagerStayInTheHome(t *testing.T) {
	dir, uid := t.TempDir(), os.Geteuid()
	g := sys.Guest{Root: dir, Fake: true}
	home := filepath.Join(dir, "home/agent")
	for path, text := range map[string]string{"etc/passwd": fmt.Sprintf("agent:x:%d:%d::/home/agent:/bin/sh\n", uid, os.Getegid()), "victim/x": "", "home/agent/x": ""} {
		path = filepath.Join(dir, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	user := cidataUser{Name: "agent", Keys: []string{"ssh-ed25519 AAAA"}}
	if err := addKeys(g, user); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	file := filepath.Join(home, ".ssh/authorized_keys")
	if err := unix.Stat(file, &st); err != nil || int(st.Uid) != uid || st.Mode&0o777 != 0o600 {
		t.Fatalf("authorized_keys: uid %d, mode %o, %v, want uid %d, mode 600", st.Uid, st.Mode, err, uid)
	}
	// The user may have replaced .ssh with a link to a directory of root.
	if err := errors.Join(os.RemoveAll(filepath.Join(home, ".ssh")), os.Symlink("../../victim", filepath.Join(home, ".ssh"))); err != nil {
		t.Fatal(err)
	}
	if err := addKeys(g, user); err == nil {
		t.Fatal("addKeys through a link out of the home succeeded, want an error")
	}
	if left, err := os.ReadDir(filepath.Join(dir, "victim")); err != nil || len(left) != 1 {
		t.Fatalf("ReadDir(victim) = %v, %v, want one entry", left, err)
	}
}
