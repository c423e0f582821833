package secret

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/zalando/go-keyring"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// busConfig is that of a session bus which starts no service of this host.
const busConfig = `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>session</type>
  <listen>unix:path=%s/bus</listen>
  <policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy>
</busconfig>`

// process starts a program that ends with the test.
func process(t *testing.T, stdin string, argv ...string) io.Reader {
	t.Helper()
	path, err := exec.LookPath(argv[0])
	if err != nil {
		t.Fatalf("%v; run: make setup", err)
	}
	cmd := exec.Command(path, argv[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	return out
}

// startBus starts a D-Bus session bus and connects to it.
func startBus(t *testing.T) *dbus.Conn {
	t.Helper()
	dir := testenv.ShortDir(t)
	for _, name := range []string{"HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"} {
		t.Setenv(name, dir)
	}
	for _, name := range []string{"DISPLAY", "WAYLAND_DISPLAY", "GNOME_KEYRING_CONTROL"} {
		t.Setenv(name, "")
	}
	conf := write(t, dir, "bus.conf", fmt.Sprintf(busConfig, dir), 0o600)
	var shared *dbus.Conn // the library's, which must not outlive this bus
	t.Cleanup(func() {
		if shared != nil {
			<-shared.Context().Done()
		}
	})
	out := process(t, "", "dbus-daemon", "--config-file="+conf, "--print-address", "--nofork", "--nopidfile")
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("start dbus-daemon: %v", err)
	}
	t.Setenv("DBUS_SESSION_BUS_ADDRESS", strings.TrimSpace(addr))
	if shared, err = dbus.SessionBus(); err != nil {
		t.Fatal(err)
	}
	conn, err := dbus.ConnectSessionBus()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// startKeyring starts GNOME's Secret Service with an unlocked collection.
func startKeyring(t *testing.T, conn *dbus.Conn) {
	t.Helper()
	if err := conn.AddMatchSignal(dbus.WithMatchInterface("org.freedesktop.DBus"), dbus.WithMatchMember("NameOwnerChanged"), dbus.WithMatchArg(0, "org.freedesktop.secrets")); err != nil {
		t.Fatal(err)
	}
	owner := make(chan *dbus.Signal, 10)
	conn.Signal(owner)
	defer conn.RemoveSignal(owner)
	process(t, "password", "gnome-keyring-daemon", "--foreground", "--unlock", "--components=secrets", "--control-directory="+filepath.Join(os.Getenv("HOME"), "keyring"))
	late := time.After(patient)
	for {
		select {
		case s := <-owner:
			if s != nil && s.Name == "org.freedesktop.DBus.NameOwnerChanged" {
				return
			}
		case <-late:
			t.Fatal("gnome-keyring-daemon did not start")
		}
	}
}

func TestKeychain(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	conn := startBus(t)
	ref := Ref{"TOKEN", "keychain:https://git.example.org/me"}
	keychainRefuses(t, ref, "no Secret Service", "gnome-keyring-daemon --start")

	startKeyring(t, conn)
	keychainRefuses(t, ref, "the keychain has no entry of the service https://git.example.org and the account me",
		"secret-tool store --label=https://git.example.org service https://git.example.org username me")
	for account, value := range map[string]string{"me": sentinel, "lines": "a\nb\n", "big": strings.Repeat("x", MaxBytes+1)} {
		if err := keyring.Set("https://git.example.org", account, value); err != nil {
			t.Fatal(err)
		}
	}
	got, err := ResolveInChild(t.Context(), self, []Ref{ref, {"LINES", "keychain:https://git.example.org/lines"}})
	if err != nil || got["TOKEN"].Reveal() != sentinel || got["LINES"].Reveal() != "a\nb\n" {
		t.Errorf("Resolve = %q, %q, %v, want %q, %q", got["TOKEN"].Reveal(), got["LINES"].Reveal(), err, sentinel, "a\nb\n")
	}
	keychainRefuses(t, Ref{"TOKEN", "keychain:https://git.example.org/big"}, "larger than the limit of 256 KiB", "")

	// Without a display, the Secret Service cannot ask for the password.
	service := conn.Object("org.freedesktop.secrets", "/org/freedesktop/secrets")
	if err := service.Call("org.freedesktop.Secret.Service.Lock", 0, []dbus.ObjectPath{"/org/freedesktop/secrets/collection/login"}).Err; err != nil {
		t.Fatal(err)
	}
	keychainRefuses(t, ref, "the keychain is locked", "seahorse")
}

// Without a session bus, the library would start one.
func TestKeychainWithoutBus(t *testing.T) {
	if _, err := os.Stat(fmt.Sprintf("/run/user/%d/bus", os.Getuid())); err == nil {
		t.Setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/nonexistent/bus") // the library finds that one
	} else {
		t.Setenv("DBUS_SESSION_BUS_ADDRESS", "")
	}
	dir := t.TempDir()
	write(t, dir, "dbus-launch", "#!/bin/sh\ntouch "+dir+"/launched\n", 0o700)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	keychainRefuses(t, Ref{"TOKEN", "keychain:service/me"}, "the D-Bus session bus cannot be reached", "")
	if _, err := os.Stat(dir + "/launched"); err == nil {
		t.Error("a session bus was started, want none")
	}
}

// A Secret Service that does not answer costs a bounded time.
func TestKeychainHangs(t *testing.T) {
	conn := startBus(t)
	if _, err := conn.RequestName("org.freedesktop.secrets", 0); err != nil {
		t.Fatal(err)
	}
	if err := conn.Export(silentService{t.Context().Done()}, "/org/freedesktop/secrets", "org.freedesktop.DBus.Properties"); err != nil {
		t.Fatal(err)
	}
	_, err := Resolve(t.Context(), []Ref{{"TOKEN", "keychain:service/me"}}, Options{Timeout: time.Second})
	if fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), "did not answer within 1s; it may wait for you to unlock it") {
		t.Errorf("Resolve = %v, want \"did not answer within 1s\"", err)
	}
}

// silentService answers when the test ends.
type silentService struct{ done <-chan struct{} }

func (s silentService) Get(string, string) (dbus.Variant, *dbus.Error) {
	<-s.done
	return dbus.MakeVariant(""), nil
}

func keychainRefuses(t *testing.T, ref Ref, want, hint string) {
	t.Helper()
	_, err := Resolve(t.Context(), []Ref{ref}, Options{Timeout: patient})
	if fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), "secret TOKEN (keychain): ") || !strings.Contains(err.Error(), want) || !strings.HasPrefix(fail.HintOf(err), hint) {
		t.Errorf("Resolve(%s) = %v (hint %q), want %q (hint %q)", ref.Source, err, fail.HintOf(err), want, hint)
	}
	if strings.Contains(fmt.Sprint(err), "SENTINEL") {
		t.Errorf("Resolve(%s) = %v, want no content in the error", ref.Source, err)
	}
}
