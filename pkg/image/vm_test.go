//go:build vmtest

package image

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// Builds an image from packages, boots it under emulation with a NoCloud seed,
// and uses what a session needs. Several minutes; IMAGE_DIR keeps the store.
func TestDebianImageBootsWithItsTools(t *testing.T) {
	for _, tool := range []string{"qemu-system-x86_64", "genisoimage", "mmdebstrap"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%v: sudo apt-get install qemu-system-x86 genisoimage mmdebstrap", err)
		}
	}
	dir := os.Getenv("IMAGE_DIR")
	if dir == "" {
		dir = t.TempDir()
	}
	begin := time.Now()
	lists := aptLists(t)
	s := &Store{Dir: dir}
	info, err := s.Build(t.Context(), BuildOptions{
		Provision:    provision(t),
		GuestProgram: []byte("#!/bin/sh\necho stand-in\n"),
		Environ:      os.Environ(),
		Progress:     func(l string) { t.Logf("%5.1fs %s", time.Since(begin).Seconds(), l) },
	})
	if err != nil {
		t.Fatal(err)
	}
	// A hook once deleted mmdebstrap's configuration: its apt then emptied these.
	if now := aptLists(t); now != lists {
		t.Errorf("the build changed the host's package lists:\n%s\nwas\n%s", now, lists)
	}
	t.Logf("image: %d MB, %.0fs", info.Size>>20, time.Since(begin).Seconds())

	g := newGuest(t, s)
	g.boot()
	g.run("docker", "docker --version && docker compose version && docker ps", "CONTAINER ID")
	g.run("agents", "claude --version && codex --version && agent-guest", "stand-in")
	g.run("versions", "node --version && npm --version && gh --version && lazygit --version", "v24.")
	g.run("shell", "echo $SHELL; sudo -n id -u", "/usr/bin/zsh\n0\n")
	g.run("disk grew", "df --output=size -BG / | tail -1", "20G")
	g.run("nothing failed", "systemctl --failed --no-legend; cloud-init status --wait | tail -1", "status: done")
	g.run("secrets reach every shell",
		`sudo install -d -o agent /run/agent; echo "PROBE='a b'" >/run/agent/env; zsh -c 'echo 1$PROBE'; bash -lc 'echo 2$PROBE'`, "1a b\n2a b\n")
	windows := "vim\nserver\nclaude\ngit\nscratch\n"
	list := " && tmux list-windows -t '=agent:' -F '#{window_name}'"
	g.run("ready-tmux", "ready-tmux -d /tmp && ready-tmux -d /tmp"+list, windows)
	g.run("ready-tmux restores", "tmux kill-window -t '=agent:git' && ready-tmux -d /tmp"+list, windows)
	g.run("commit", "cd $(mktemp -d) && git init -q && git commit -qm x --allow-empty && git log --format=%ae", "agent@localhost.invalid")
	id := g.run("identity", "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub; ls /etc/ssh/ssh_host_*_key", "ssh_host_ed25519_key\n")
	t.Log(g.run("boot time", "systemd-analyze; systemd-analyze blame --no-pager | head -15", "Startup finished"))
	g.stop()

	g.seed("iid-2") // as the VM manager does at every start
	g.boot()
	if again := g.run("identity", "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub; ls /etc/ssh/ssh_host_*_key", "ssh-ed25519"); again != id {
		t.Errorf("a restart changed the machine's identity:\n%s\n%s", id, again)
	}
	g.stop()
}

// aptLists names the host's package lists.
func aptLists(t *testing.T) string {
	t.Helper()
	names, err := filepath.Glob("/var/lib/apt/lists/*")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(names, "\n")
}

// guest is one QEMU process over a throw-away disk.
type guest struct {
	t      *testing.T
	dir    string
	image  *Store
	key    ssh.Signer
	public string
	cmd    *exec.Cmd
	client *ssh.Client
}

func newGuest(t *testing.T, s *Store) *guest {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	g := &guest{t: t, dir: t.TempDir(), image: s, key: key, public: strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key.PublicKey())))}
	img, err := s.Lookup(Debian, hostArch())
	if err != nil {
		t.Fatal(err)
	}
	g.host("qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", img.Location, filepath.Join(g.dir, "disk"), "20G")
	g.seed("iid-1")
	return g
}

func (g *guest) host(name string, args ...string) {
	g.t.Helper()
	if out, err := exec.CommandContext(g.t.Context(), name, args...).CombinedOutput(); err != nil {
		g.t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

// seed writes the ISO that Lima would: its user-data and network-config.
func (g *guest) seed(instance string) {
	g.t.Helper()
	files := map[string]string{
		"meta-data": "instance-id: " + instance + "\nlocal-hostname: lima-test\n",
		"user-data": "#cloud-config\ngrowpart: {mode: auto, devices: ['/']}\nusers:\n" +
			"- {name: agent, uid: '1000', homedir: /home/agent, shell: /bin/bash, sudo: 'ALL=(ALL) NOPASSWD:ALL', lock_passwd: true, ssh-authorized-keys: ['" + g.public + "']}\n",
		"network-config": "version: 2\nethernets:\n  eth0: {match: {macaddress: '52:55:55:00:00:01'}, dhcp4: true, set-name: eth0, dhcp-identifier: mac}\n",
	}
	args := []string{"-quiet", "-J", "-R", "-V", "cidata", "-o", filepath.Join(g.dir, "seed.iso")}
	for name, content := range files {
		p := filepath.Join(g.dir, name)
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			g.t.Fatal(err)
		}
		args = append(args, p)
	}
	g.host("genisoimage", args...)
}

// boot starts QEMU on the devices that Lima gives it, and logs in.
func (g *guest) boot() {
	g.t.Helper()
	img, err := g.image.Lookup(Debian, hostArch())
	if err != nil {
		g.t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		g.t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	begin := time.Now()
	g.cmd = exec.CommandContext(g.t.Context(), "qemu-system-x86_64", "-machine", "q35,vmport=off", "-accel", "tcg,thread=multi,tb-size=512",
		"-cpu", "max", "-m", "2048", "-smp", "2", "-display", "none", "-monitor", "none", "-no-reboot",
		"-serial", "file:"+filepath.Join(g.dir, "serial.log"),
		"-kernel", img.Kernel, "-initrd", img.Initrd, "-append", img.Cmdline,
		"-drive", "file="+filepath.Join(g.dir, "disk")+",if=virtio,discard=on",
		"-drive", "id=cd,if=none,format=raw,readonly=on,file="+filepath.Join(g.dir, "seed.iso"),
		"-device", "virtio-scsi-pci,id=scsi0", "-device", "scsi-cd,bus=scsi0.0,drive=cd", "-device", "virtio-rng-pci",
		"-netdev", "user,id=net0,restrict=on,hostfwd=tcp:"+addr+"-:22", "-device", "virtio-net-pci,netdev=net0,mac=52:55:55:00:00:01")
	var out bytes.Buffer
	g.cmd.Stdout, g.cmd.Stderr = &out, &out
	if err := g.cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		if g.cmd.ProcessState == nil {
			g.cmd.Process.Kill()
			g.cmd.Wait()
		}
	})
	ctx, cancel := context.WithTimeout(g.t.Context(), 5*time.Minute)
	defer cancel()
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for {
		g.client, err = ssh.Dial("tcp", addr, &ssh.ClientConfig{
			User: "agent", Auth: []ssh.AuthMethod{ssh.PublicKeys(g.key)}, Timeout: 10 * time.Second,
			HostKeyCallback: ssh.InsecureIgnoreHostKey(), // a guest of this test, over loopback
		})
		if err == nil {
			g.t.Logf("logged in %.1fs after power-on", time.Since(begin).Seconds())
			return
		}
		select {
		case <-ctx.Done():
			serial, _ := os.ReadFile(filepath.Join(g.dir, "serial.log"))
			g.t.Fatalf("no login: %v\n%s\n%s", err, out.String(), serial)
		case <-tick.C:
		}
	}
}

// run runs a command as the user's login shell does and wants to see want.
func (g *guest) run(what, command, want string) string {
	g.t.Helper()
	s, err := g.client.NewSession()
	if err != nil {
		g.t.Fatalf("%s: %v", what, err)
	}
	defer s.Close()
	out, err := s.CombinedOutput(command)
	if err != nil || !strings.Contains(string(out), want) {
		g.t.Errorf("%s: %v, no %q in:\n%s", what, err, want, out)
	}
	return string(out)
}

// stop powers off as a session does, so that a restart finds a clean disk.
func (g *guest) stop() {
	g.t.Helper()
	s, err := g.client.NewSession()
	if err != nil {
		g.t.Fatal(err)
	}
	_ = s.Run("sudo systemctl poweroff") // the connection dies with it
	g.client.Close()
	done := make(chan error, 1)
	go func() { done <- g.cmd.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			g.t.Errorf("QEMU: %v", err)
		}
	case <-time.After(2 * time.Minute):
		g.cmd.Process.Kill()
		<-done
		g.t.Error("the guest did not power off within two minutes")
	}
}
