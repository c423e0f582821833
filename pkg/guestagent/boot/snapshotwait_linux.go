package boot

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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/netguard"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const (
	identityPort = "/dev/hvc0" // only root can open it, and no one else holds its host end
	sshdPID      = "/run/sshd.pid"
	bootID       = "/proc/sys/kernel/random/boot_id"
	settleTime   = 5 * time.Minute
)

// Sleep waits, on an almost fully set-up machine, for its snapshot to be saved. It
// returns in each fork after the fork has received its own identity and was
// announced. A fork that cannot renew every part of the identity powers off
// instead.
func Sleep(ctx context.Context, g sys.Guest) error {
	if err := g.NeedRoot("sleep"); err != nil {
		return err
	}
	s := snapshotWaiter{guest: g}
	err := s.prepare(ctx)
	if err == nil {
		_, err = s.port.WriteString("\n" + guestproto.AsleepMarker + "\n")
	}
	if err == nil {
		err = s.readIdentity()
	}
	if err == nil {
		err = s.takeIdentity(ctx)
	}
	if err != nil {
		return poweroffWithError("setting the identity of the resumed VM failed", err)
	}
	if err := s.finish(ctx, bootTask{"grow the disk", growRoot}); err != nil {
		return err
	}
	waitIdle(ctx)
	_ = runBootTasks(ctx, []bootTask{{"provision", provision}}) // the machine works without it
	return nil
}

// snapshotWaiter is one run of Sleep.
type snapshotWaiter struct {
	guest sys.Guest
	port  *os.File // connection to the host
	card  string
	disk  scsiDisk // the seed disk, removed while the machine sleeps
	woke  time.Time

	identity guestproto.Identity
	steps    []any // completed steps since waking, each with its time in milliseconds
}

// prepare does the work that need not be repeated in every fork. It waits until the
// machine is at rest, reads the files of a session's first seconds into memory, and
// removes the seed disk, which is a different one in each fork.
func (s *snapshotWaiter) prepare(ctx context.Context) error {
	var err error
	if s.port, err = openRaw(identityPort); err != nil {
		return err
	}
	if s.card, err = findCard(ctx); err != nil {
		return err
	}
	// A clone starts these units once it is idle. A fork has them from the start,
	// including the one that watches the power button.
	if err := start(ctx, lateUnit); err != nil {
		return err
	}
	if err := waitSystemd(ctx); err != nil {
		return err
	}
	if err := sys.Perform(ctx, "", "udevadm", "settle", "--timeout=120"); err != nil {
		return err
	}
	if s.disk, err = removeSeedDisk(0); err != nil {
		return fmt.Errorf("seed disk: %w", err)
	}
	warmCaches(ctx)
	// Forks wake with the rules of the sleeping machine: reload and verify the
	// lockdown before the machine is saved.
	if err := netguard.Lockdown(ctx, s.guest); err != nil {
		return err
	}
	if up, err := isUp(s.card); err != nil || up {
		return errors.Join(err, errors.New("the network is already up"))
	}
	unix.Sync()
	return nil
}

// readIdentity waits for an identity from the host.
func (s *snapshotWaiter) readIdentity() error {
	line, err := readLine(s.port, guestproto.MaxIdentity)
	if err != nil {
		return err
	}
	s.identity, err = guestproto.DecodeIdentity(bytes.NewReader(line))
	clear(line)
	s.woke = time.Now()
	return err
}

// takeIdentity applies the identity that was read.
func (s *snapshotWaiter) takeIdentity(ctx context.Context) error {
	id := s.identity
	// The clock and the random seed come first, because everything else may depend
	// on them.
	if err := errors.Join(setClock(id.Time), reseedRNG(id.Seed)); err != nil {
		return fmt.Errorf("clock and random numbers: %w", err)
	}
	if s.disk == (scsiDisk{}) {
		if err := s.dropParent(); err != nil {
			return err
		}
	}
	public, err := applyIdentity(s.guest, id)
	if err != nil {
		return err
	}
	s.markStage("identity_ms")
	mac, err := net.ParseMAC(id.MAC)
	if err != nil {
		return errors.New("invalid address of the network card")
	}
	if err := bringUp(s.card, mac); err != nil {
		return err
	}
	sshd := async(func() error { return restartSSHD(ctx) })
	if err := syncRoot(); err != nil {
		return err
	}
	s.markStage("disk_ms")
	if err := <-sshd; err != nil {
		return fmt.Errorf("sshd: %w", err)
	}
	s.markStage("sshd_ms")
	if err := awaitLogins(ctx); err != nil {
		return err
	}
	announce(public)
	s.markStage("ready_ms")
	return nil
}

// finish completes the identity after logins have become possible.
func (s *snapshotWaiter) finish(ctx context.Context, more ...bootTask) error {
	if err := s.port.Close(); err != nil {
		slog.Error("closing the identity port failed", "error", err)
	}
	tasks := append([]bootTask{{"insert the seed disk", s.rescanSeedDisk}, {"report the boot", sayBooted}}, more...)
	if err := finishIdentity(ctx, s.guest, append(tasks, bootTask{"start a new journal", newJournal})); err != nil {
		return err
	}
	s.markStage("own_ms")
	slog.Info("resumed from saved VM", s.steps...) // not earlier: the entry would go to the old journal
	return nil
}

// applyIdentity writes the identity. It logs nothing of it.
func applyIdentity(g sys.Guest, id guestproto.Identity) (public string, err error) {
	if public, err = publicKey(id.HostKey); err != nil {
		return "", err
	}
	login, err := loginKey(id.AuthorizedKey)
	if err != nil {
		return "", err
	}
	if _, err := findAccount(g, id.User); err != nil {
		return "", err
	}
	if err := errors.Join(place(g, seedDir+"/boot_id", id.BootID+"\n", 0o444), unix.Mount(g.Path(seedDir+"/boot_id"), bootID, "", unix.MS_BIND, "")); err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return public, errors.Join(
		place(g, "/etc/machine-id", id.MachineID+"\n", 0o444),
		setHostname(g, id.Hostname),
		place(g, seedName, id.Hostname+"\n", 0o644),
		writeHostKey(g, id.HostKey, public),
		allow(g, id.User, login),
	)
}

// rescanSeedDisk makes the kernel detect the fork's own seed disk, and authorizes the VM
// manager's keys from it.
func (s *snapshotWaiter) rescanSeedDisk(ctx context.Context) error {
	if err := s.disk.insert(); err != nil {
		return err
	}
	if err := mountCidata(ctx); err != nil {
		return err
	}
	metadata, err := readCidata(cidataMount)
	if err != nil {
		return err
	}
	for _, u := range metadata.users {
		if err := addKeys(s.guest, u); err != nil {
			return err
		}
	}
	return nil
}

func (s *snapshotWaiter) markStage(what string) {
	s.steps = append(s.steps, what, time.Since(s.woke).Milliseconds())
}

// openRaw opens a terminal that neither echoes nor interprets its input. The input
// contains a private key, and the host logs all output.
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

// readLine reads up to the first newline, and at most limit bytes.
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
	return nil, errors.New("the identity is too long")
}

// waitSystemd waits until systemd has no more jobs.
func waitSystemd(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	return sys.Await(ctx, settleTime, 100*time.Millisecond, func() error {
		out, err := sys.Run(ctx, "", "systemctl", "list-jobs", "--no-legend")
		if jobs := strings.TrimSpace(out); err == nil && !strings.HasPrefix(jobs, "No jobs") && jobs != "" {
			err = errors.New("the machine still has running jobs")
		}
		return err
	})
}

// warmCaches reads the files of a session's first seconds into memory. It only logs
// errors, because the warm-up is an optimization.
func warmCaches(ctx context.Context) {
	// Drop the boot's caches to free memory; they are not worth saving.
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		slog.Warn("dropping caches failed", "error", err)
	}
	for _, args := range [][]string{
		{"sshd", "-t"},
		{"sudo", "-n", "-u", "#" + strconv.Itoa(sys.AgentUID), "zsh", "-lic", "git --version; tmux -V; sudo -n true; base64 --version; tar --version; cat /dev/null; id; stat /; mkdir -p /tmp; sha256sum /dev/null"},
		{"sudo", "-n", "-u", "#" + strconv.Itoa(sys.AgentUID), "bash", "-lc", "true"},
		{"systemctl", "is-system-running"},
		{sys.Binary, "status"},
	} {
		if _, err := sys.Run(ctx, "", args[0], args[1:]...); err != nil {
			slog.Info("warm-up command failed", "command", args[0], "error", err)
		}
	}
	// The files that sshd uses for a connection.
	for _, pattern := range []string{"/usr/lib/openssh/sshd-*", "/usr/lib/openssh/sftp-server", "/lib/*/security/pam_*.so"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			continue
		}
		for _, path := range found {
			_ = sys.Text(path)
		}
	}
	warmSSHD(ctx)
}

// warmSSHD connects to sshd and waits for its greeting.
func warmSSHD(ctx context.Context) {
	d := net.Dialer{Timeout: 20 * time.Second}
	c, err := d.DialContext(ctx, "tcp", "127.0.0.1:22")
	if err != nil {
		slog.Info("warm-up command failed", "command", "ssh", "error", err)
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

// restartSSHD makes sshd load its new host key. sshd re-executes itself and writes
// its pid file once it listens again.
func restartSSHD(ctx context.Context) error {
	text, err := os.ReadFile(sshdPID)
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid < 2 {
		return errors.New("no process id")
	}
	if err := errors.Join(os.Remove(sshdPID), unix.Kill(pid, unix.SIGHUP)); err != nil {
		return err
	}
	return sys.Await(ctx, loginTime, loginLook, func() error {
		_, err := os.Stat(sshdPID)
		return err
	})
}

// syncRoot returns when all written data is on the disk.
func syncRoot() error {
	root, err := os.Open("/etc")
	if err != nil {
		return err
	}
	defer root.Close()
	return unix.Syncfs(int(root.Fd()))
}

// scsiDisk is the SCSI address at which the kernel can detect a disk again.
type scsiDisk struct{ host, rest string }

// removeSeedDisk unmounts the seed disk, as umount2(2) does with the flags, and makes the kernel
// forget it, including its size and its cached content.
func removeSeedDisk(flags int) (scsiDisk, error) {
	if err := unix.Unmount(cidataMount, flags); err != nil {
		return scsiDisk{}, err
	}
	const dev = "/sys/class/block/sr0/device"
	path, err := filepath.EvalSymlinks(dev)
	if err != nil {
		return scsiDisk{}, err
	}
	f := strings.Split(filepath.Base(path), ":") // host:channel:target:lun
	if len(f) != 4 {
		return scsiDisk{}, errors.New("must be a SCSI disk")
	}
	return scsiDisk{host: "/sys/class/scsi_host/host" + f[0], rest: strings.Join(f[1:], " ")},
		os.WriteFile(dev+"/delete", []byte("1"), 0)
}

func (d scsiDisk) insert() error { return os.WriteFile(d.host+"/scan", []byte(d.rest), 0) }

// newJournal makes journald read the new machine-id and boot_id. It removes the
// entries that were logged under the previous identity.
func newJournal(ctx context.Context) error {
	old, err := filepath.Glob("/run/log/journal/*")
	if err != nil {
		return err
	}
	if _, err := sys.Run(ctx, "", "systemctl", "restart", "systemd-journald.service"); err != nil {
		return err
	}
	now := strings.TrimSpace(sys.Text("/etc/machine-id"))
	old = slices.DeleteFunc(old, func(dir string) bool { return filepath.Base(dir) == now })
	for _, dir := range old {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return nil
}
