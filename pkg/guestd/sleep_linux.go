package guestd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

const (
	identityPort = "/dev/hvc0" // only root opens it, and the host's end is nobody else's
	sshdPID      = "/run/sshd.pid"
	bootID       = "/proc/sys/kernel/random/boot_id"
	settleTime   = 5 * time.Minute
)

// Sleep waits, on a machine that is all but set up, to be saved. It returns in
// each of its forks after that has become a machine of its own and was
// announced, or not at all: a fork that cannot be renewed in every respect
// powers off.
func (g Guest) Sleep(ctx context.Context) error {
	if err := g.needRoot("sleep"); err != nil {
		return err
	}
	s := sleeper{guest: g}
	err := s.prepare(ctx)
	if err == nil {
		err = s.wake(ctx)
	}
	if err != nil {
		return die("the machine could not be renewed", err)
	}
	if err := s.port.Close(); err != nil {
		slog.Error("close the port", "err", err)
	}
	if err := g.own(ctx, []chore{{"put the seed disk in", s.insert}, {"say that it has booted", sayBooted}, {"grow the disk", growRoot}, {"start a new journal", newJournal}}); err != nil {
		return err
	}
	s.mark("own_ms")
	slog.Info("woke", s.steps...) // only now: before, it would be in the old journal
	awaitIdle(ctx)
	_ = do(ctx, []chore{{"provision", provision}}) // the machine works without
	return nil
}

// sleeper is one run of Sleep.
type sleeper struct {
	guest Guest
	port  *os.File // to the host
	card  string
	disk  scsiDisk // the seed disk, taken out while asleep
	woke  time.Time
	steps []any // what was done since, and after how many milliseconds
}

// prepare does what need not be done in every fork: it waits for the machine to
// be at rest, reads into memory what the first seconds of a session need, and
// takes the seed disk out, which is another one in a fork.
func (s *sleeper) prepare(ctx context.Context) error {
	var err error
	if s.port, err = openRaw(identityPort); err != nil {
		return err
	}
	if s.card, err = findCard(ctx); err != nil {
		return err
	}
	// A clone leaves it for when nobody waits; a fork has it from the start, and
	// with it somebody who watches the power button.
	if err := start(ctx, lateUnit); err != nil {
		return err
	}
	if err := settle(ctx); err != nil {
		return err
	}
	if err := perform(ctx, "", "udevadm", "settle", "--timeout=120"); err != nil {
		return err
	}
	if s.disk, err = removeSeedDisk(); err != nil {
		return fmt.Errorf("seed disk: %w", err)
	}
	warm(ctx)
	// The rules of a sleeping machine are those that its forks wake with: they
	// are loaded anew, and looked at, before it is saved.
	if err := s.guest.Door(ctx); err != nil {
		return err
	}
	if up, err := isUp(s.card); err != nil || up {
		return errors.Join(err, errors.New("the network is up already"))
	}
	unix.Sync()
	return nil
}

// wake reads who the machine is and makes it that.
func (s *sleeper) wake(ctx context.Context) error {
	if _, err := s.port.WriteString("\n" + wire.AsleepMarker + "\n"); err != nil {
		return err
	}
	line, err := readLine(s.port, wire.MaxIdentity)
	if err != nil {
		return err
	}
	id, err := wire.DecodeIdentity(bytes.NewReader(line))
	clear(line)
	if err != nil {
		return err
	}
	s.woke = time.Now()
	// First what everything else may depend on.
	if err := errors.Join(setClock(id.Time), stir(id.Seed)); err != nil {
		return fmt.Errorf("clock and random numbers: %w", err)
	}
	public, err := s.guest.become(id)
	if err != nil {
		return err
	}
	s.mark("identity_ms")
	mac, err := net.ParseMAC(id.MAC)
	if err != nil {
		return errors.New("bad address of the network card")
	}
	if err := bringUp(s.card, mac); err != nil {
		return err
	}
	sshd := async(func() error { return restartSSHD(ctx) })
	if err := syncRoot(); err != nil {
		return err
	}
	s.mark("disk_ms")
	if err := <-sshd; err != nil {
		return fmt.Errorf("sshd: %w", err)
	}
	s.mark("sshd_ms")
	if err := awaitLogins(ctx); err != nil {
		return err
	}
	announce(public)
	s.mark("ready_ms")
	return nil
}

// become writes the identity. Nothing of it is logged.
func (g Guest) become(id wire.Identity) (public string, err error) {
	if public, err = publicKey(id.HostKey); err != nil {
		return "", err
	}
	login, err := loginKey(id.AuthorizedKey)
	if err != nil {
		return "", err
	}
	if _, err := g.account(id.User); err != nil {
		return "", err
	}
	return public, errors.Join(
		g.place("/etc/machine-id", id.MachineID+"\n", 0o444),
		g.place(seedDir+"/boot_id", id.BootID+"\n", 0o444),
		unix.Mount(g.path(seedDir+"/boot_id"), bootID, "", unix.MS_BIND, ""),
		g.setHostname(id.Hostname),
		g.writeHostKey(id.HostKey, public),
		g.allow(id.User, login),
	)
}

// insert makes the kernel see the fork's own seed disk and takes the VM
// manager's keys from it.
func (s *sleeper) insert(ctx context.Context) error {
	if err := s.disk.insert(); err != nil {
		return err
	}
	if err := mountCidata(ctx); err != nil {
		return err
	}
	said, err := readCidata(cidataMount)
	if err != nil {
		return err
	}
	for _, u := range said.users {
		if err := s.guest.addKeys(u); err != nil {
			return err
		}
	}
	return nil
}

func (s *sleeper) mark(what string) {
	s.steps = append(s.steps, what, time.Since(s.woke).Milliseconds())
}

// openRaw opens a terminal that neither echoes nor interprets: what comes in is
// a private key, and what goes out is in the host's logs.
func openRaw(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	fd := int(f.Fd())
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err == nil {
		t.Iflag, t.Oflag, t.Lflag = 0, 0, 0
		t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8 | unix.CREAD
		t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
		err = unix.IoctlSetTermios(fd, unix.TCSETSF, t)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return f, nil
}

// readLine reads up to the first newline and nothing beyond limit.
func readLine(r io.Reader, limit int) ([]byte, error) {
	line := make([]byte, 0, limit)
	for len(line) < limit {
		n, err := r.Read(line[len(line):limit])
		if i := bytes.IndexByte(line[len(line):len(line)+n], '\n'); i >= 0 {
			return line[:len(line)+i], nil
		}
		line = line[:len(line)+n]
		if err != nil {
			return nil, fmt.Errorf("read the identity: %w", err)
		}
	}
	return nil, errors.New("the identity is longer than it may be")
}

// settle waits until systemd has nothing left to start.
func settle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	return await(ctx, settleTime, 100*time.Millisecond, func() error {
		out, err := run(ctx, "", "systemctl", "list-jobs", "--no-legend")
		if jobs := strings.TrimSpace(out); err == nil && !strings.HasPrefix(jobs, "No jobs") && jobs != "" {
			err = errors.New("the machine does not come to rest")
		}
		return err
	})
}

// warm reads what a session's first seconds need; whether it is all there is
// not for this to say.
func warm(ctx context.Context) {
	// Caches of the boot are not worth saving, and their memory is given back.
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		slog.Warn("drop caches", "err", err)
	}
	for _, args := range [][]string{
		{"sshd", "-t"},
		{"sudo", "-n", "-u", "#" + strconv.Itoa(AgentUID), "zsh", "-lic", "git --version; tmux -V; sudo -n true; base64 --version; tar --version; cat /dev/null; id; stat /; mkdir -p /tmp; sha256sum /dev/null"},
		{"sudo", "-n", "-u", "#" + strconv.Itoa(AgentUID), "bash", "-lc", "true"},
		{"systemctl", "is-system-running"},
		{Binary, "status"},
	} {
		if _, err := run(ctx, "", args[0], args[1:]...); err != nil {
			slog.Info("warm", "command", args[0], "err", err)
		}
	}
	// What sshd runs for a connection.
	for _, pattern := range []string{"/usr/lib/openssh/sshd-*", "/usr/lib/openssh/sftp-server", "/lib/*/security/pam_*.so"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			continue
		}
		for _, path := range found {
			_ = readBounded(path)
		}
	}
	knock(ctx)
}

// knock makes sshd serve one connection as far as its greeting.
func knock(ctx context.Context) {
	d := net.Dialer{Timeout: 20 * time.Second}
	c, err := d.DialContext(ctx, "tcp", "127.0.0.1:22")
	if err != nil {
		slog.Info("warm", "command", "ssh", "err", err)
		return
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return
	}
	_, _ = c.Read(make([]byte, 256))
}

func setClock(t time.Time) error {
	ts := unix.NsecToTimespec(t.UnixNano())
	return unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
}

// restartSSHD makes sshd take its new key: it executes itself anew, and writes
// its number once it listens again.
func restartSSHD(ctx context.Context) error {
	text, err := os.ReadFile(sshdPID)
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid < 2 {
		return errors.New("no process number")
	}
	if err := errors.Join(os.Remove(sshdPID), unix.Kill(pid, unix.SIGHUP)); err != nil {
		return err
	}
	return await(ctx, loginTime, loginLook, func() error {
		_, err := os.Stat(sshdPID)
		return err
	})
}

// syncRoot returns when all that was written is on the disk.
func syncRoot() error {
	root, err := os.Open("/etc")
	if err != nil {
		return err
	}
	defer root.Close()
	return unix.Syncfs(int(root.Fd()))
}

// scsiDisk is where the kernel finds a disk again.
type scsiDisk struct{ host, rest string }

// removeSeedDisk unmounts the seed disk and makes the kernel forget it, with its
// size and what was read of it.
func removeSeedDisk() (scsiDisk, error) {
	if err := unix.Unmount(cidataMount, 0); err != nil {
		return scsiDisk{}, err
	}
	const dev = "/sys/class/block/sr0/device"
	path, err := filepath.EvalSymlinks(dev)
	if err != nil {
		return scsiDisk{}, err
	}
	f := strings.Split(filepath.Base(path), ":") // host:channel:target:lun
	if len(f) != 4 {
		return scsiDisk{}, errors.New("it is no SCSI disk")
	}
	return scsiDisk{host: "/sys/class/scsi_host/host" + f[0], rest: strings.Join(f[1:], " ")},
		os.WriteFile(dev+"/delete", []byte("1"), 0)
}

func (d scsiDisk) insert() error { return os.WriteFile(d.host+"/scan", []byte(d.rest), 0) }

// newJournal makes journald read the new machine-id and boot_id, and removes
// what the machine logged before it was one of its own.
func newJournal(ctx context.Context) error {
	old, err := filepath.Glob("/run/log/journal/*")
	if err != nil {
		return err
	}
	if _, err := run(ctx, "", "systemctl", "restart", "systemd-journald.service"); err != nil {
		return err
	}
	now := strings.TrimSpace(readBounded("/etc/machine-id"))
	old = slices.DeleteFunc(old, func(dir string) bool { return filepath.Base(dir) == now })
	for _, dir := range old {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}
