package boot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/netguard"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// Paths in a golden image, whose clones have no cloud-init.
const (
	seedDir          = "/run/agent-seed"
	sleepFlag        = seedDir + "/sleep" // created by the boot script to request a snapshot
	identityDoneFile = seedDir + "/own"   // exists once the identity is complete; it contains the errors, if any
	loginLock        = seedDir + "/login" // agent-login.service waits until Seed releases it
	lateUnit         = "agent-late.target"
	sleepUnit        = "agent-sleep.service"
)

const (
	deviceTime = 2 * time.Minute      // for a disk or card to appear
	deviceLook = 2 * time.Millisecond // pause between checks
	scriptTime = 5 * time.Minute      // for bootcmd
	loginTime  = 5 * time.Minute      // for sshd and the network to respond
	loginLook  = 5 * time.Millisecond // pause between checks
	holdTime   = 3 * time.Second      // for the first login, before the boot continues
	holdLook   = 20 * time.Millisecond
	lateTime   = 2 * time.Hour // for provisioning scripts of a template
)

// Seed gives a clone of a golden image its own identity and connects it to the
// network. It does the work of cloud-init, in the order that makes a login possible
// soonest. It calls ready when sshd may start. It powers the clone off if any part
// fails, because the clone would be open to the network or have another machine's
// identity.
func Seed(ctx context.Context, g sys.Guest, ready func()) error {
	if err := g.NeedRoot("seed"); err != nil {
		return err
	}
	if _, err := os.Stat(seedDir + "/done"); err == nil {
		return nil // once per boot
	}
	s := cloneBooter{guest: g, began: time.Now()}
	if err := s.run(ctx, ready); err != nil {
		return poweroffWithError("machine setup failed", err)
	}
	return nil
}

// cloneBooter is one run of Seed.
type cloneBooter struct {
	guest    sys.Guest
	began    time.Time
	card     string // name of the network card
	key      string // sshd's public key
	metadata cidata
	login    *os.File // holds loginLock
}

func (s *cloneBooter) run(ctx context.Context, ready func()) error {
	if err := os.MkdirAll(seedDir, 0o755); err != nil {
		return err
	}
	var err error
	if s.login, err = holdBoot(loginLock); err != nil {
		return err
	}
	defer s.login.Close()
	locked := async(func() error { return netguard.LockdownFirst(ctx, s.guest) })
	key := async(func() (err error) { s.key, err = ensureHostKey(s.guest); return err })
	card := async(func() (err error) { s.card, err = findCard(ctx); return err })

	if err := mountCidata(ctx); err != nil {
		return fmt.Errorf("seed disk: %w", err)
	}
	s.markStage("seed disk")
	if s.metadata, err = readCidata(cidataMount); err != nil {
		return err
	}
	if err := s.apply(ctx); err != nil {
		return err
	}
	s.markStage("boot scripts")
	if err := <-key; err != nil {
		return err
	}
	copied := isCopy(s.guest, s.metadata.hostname)
	if copied {
		if err := s.renew(); err != nil {
			return fmt.Errorf("renew the identity: %w", err)
		}
	}
	if err := place(s.guest, seedName, s.metadata.hostname+"\n", 0o644); err != nil {
		return err
	}
	if err := <-card; err != nil {
		return err
	}
	if err := <-locked; err != nil {
		return fmt.Errorf("close the network: %w", err)
	}
	s.markStage("lockdown")
	if err := os.WriteFile(seedDir+"/done", nil, 0o644); err != nil {
		return err
	}
	if _, err := os.Stat(sleepFlag); err == nil {
		ready()
		if err := s.login.Close(); err != nil {
			return err
		}
		return start(ctx, sleepUnit)
	}
	// Only this program brings the card up, once the lockdown is in force: networkd
	// leaves the card down.
	if err := bringUp(s.card, nil); err != nil {
		return err
	}
	ready()
	if err := awaitLogins(ctx); err != nil {
		return err
	}
	announce(s.key)
	s.markStage("ready")
	awaitLogin(ctx)
	if err := s.login.Close(); err != nil {
		return err
	}
	tasks := []bootTask{{"report the boot", sayBooted}, {"grow the disk", growRoot}}
	if copied {
		tasks = append(tasks, bootTask{"start a new journal", newJournal})
	}
	if err := finishIdentity(ctx, s.guest, tasks); err != nil {
		return err
	}
	s.late(ctx)
	return nil
}

// apply applies the configuration from the seed disk.
func (s *cloneBooter) apply(ctx context.Context) error {
	g := s.guest
	if err := setHostname(g, s.metadata.hostname); err != nil {
		return err
	}
	for _, u := range s.metadata.users {
		if err := addKeys(g, u); err != nil {
			return err
		}
	}
	if err := setTimezone(g, s.metadata.timezone); err != nil {
		return err
	}
	if err := trust(ctx, g, s.metadata.trusted); err != nil {
		return err
	}
	return runBootcmd(ctx, s.metadata.bootcmd)
}

// late does the work that no session waits for.
func (s *cloneBooter) late(ctx context.Context) {
	waitIdle(ctx)
	s.markStage("idle")
	_ = runBootTasks(ctx, []bootTask{ // the machine works without these
		{"start the remaining units", func(ctx context.Context) error { return start(ctx, lateUnit) }},
		{"provision", provision},
	})
	s.markStage("late")
}

// holdBoot keeps the boot from continuing past agent-login.service until the caller
// closes the file or this process ends. The rest of the boot takes as much time as
// the first login does, and would delay it. The service may start before or after
// the lock is released.
func holdBoot(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// awaitLogin waits until the agent's user has logged in, or for holdTime at most.
func awaitLogin(ctx context.Context) {
	_ = sys.Await(ctx, holdTime, holdLook, func() error {
		if !runs(sys.AgentUID) {
			return errors.New("no user has logged in")
		}
		return nil
	})
}

// runs reports whether a user has a process.
func runs(uid uint32) bool {
	found, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return false
	}
	return slices.ContainsFunc(found, func(dir string) bool {
		var st unix.Stat_t
		return unix.Stat(dir, &st) == nil && st.Uid == uid
	})
}

// bootTask is work that the machine can run without.
type bootTask struct {
	what string
	do   func(context.Context) error
}

// runBootTasks runs all tasks, and logs and returns their errors.
func runBootTasks(ctx context.Context, tasks []bootTask) error {
	var failed []error
	for _, c := range tasks {
		if err := c.do(ctx); err != nil {
			slog.Error(c.what, "error", err)
			failed = append(failed, fmt.Errorf("%s: %w", c.what, err))
		}
	}
	return errors.Join(failed...)
}

// finishIdentity does the work that the first login need not wait for, but that must precede
// the ready state of a session. It records completion in identityDoneFile.
func finishIdentity(ctx context.Context, g sys.Guest, tasks []bootTask) error {
	failed := ""
	if err := runBootTasks(ctx, tasks); err != nil {
		failed = err.Error() + "\n"
	}
	return place(g, identityDoneFile, failed, 0o644)
}

func (s *cloneBooter) markStage(what string) {
	slog.Info("boot progress", "done", what, "ms", time.Since(s.began).Milliseconds())
}

func async(do func() error) <-chan error {
	c := make(chan error, 1)
	go func() { c <- do() }()
	return c
}

// poweroffWithError prints the reason on the consoles and powers the machine off.
func poweroffWithError(what string, err error) error {
	console("agent-sessionizer: " + what + ", powering off: " + sys.OneLine(err))
	unix.Sync()
	return errors.Join(err, unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}

// mountCidata mounts the seed disk where the VM manager's scripts expect it.
func mountCidata(ctx context.Context) error {
	if err := os.MkdirAll(cidataMount, 0o700); err != nil {
		return err
	}
	return sys.Await(ctx, deviceTime, deviceLook, func() error {
		disk, err := findCidata("/dev", "/sys/class/block")
		if err != nil {
			return err
		}
		err = unix.Mount(disk, cidataMount, "iso9660", unix.MS_RDONLY, "mode=0700,dmode=0700,overriderockperm,uid=0")
		if errors.Is(err, unix.EBUSY) {
			return nil // already mounted
		}
		return err
	})
}

// SetHostname gives the machine another name than its seed disk does. The next boot
// restores the seed disk's name.
func SetHostname(g sys.Guest, name string) error {
	if err := g.NeedRoot("hostname"); err != nil {
		return err
	}
	if g.Fake {
		return nil // the host name belongs to the host
	}
	return setHostname(g, name)
}

// setHostname names the machine, for this boot and the next ones.
func setHostname(g sys.Guest, name string) error {
	if !hostLabel.MatchString(name) {
		return errors.New("invalid host name")
	}
	return errors.Join(
		unix.Sethostname([]byte(name)),
		place(g, "/etc/hostname", name+"\n", 0o644),
		place(g, "/etc/hosts", hostsFile(g.Text("/etc/hosts"), name), 0o644),
	)
}

// addKeys authorizes the VM manager's own keys, which it uses to check whether the
// guest responds.
func addKeys(g sys.Guest, u cidataUser) error {
	if len(u.Keys) == 0 {
		return nil
	}
	text, err := keysFile(u.Keys)
	if err != nil {
		return err
	}
	a, err := findAccount(g, u.Name)
	if err != nil {
		return err
	}
	dir := filepath.Join(a.home, ".ssh")
	// The home directory belongs to the user, who could have put a link there.
	root, err := os.OpenRoot(g.Path(a.home))
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Mkdir(".ssh", 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if old, err := root.ReadFile(".ssh/authorized_keys"); err == nil && string(old) == text {
		return nil
	}
	const fresh = ".ssh/.authorized_keys.agent-seed"
	if err := root.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := errors.Join(
		root.WriteFile(fresh, []byte(text), 0o600),
		root.Lchown(".ssh", a.uid, a.gid),
		root.Lchown(fresh, a.uid, a.gid),
		root.Rename(fresh, ".ssh/authorized_keys"),
	); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

func setTimezone(g sys.Guest, name string) error {
	if name == "" {
		return nil
	}
	zone := "/usr/share/zoneinfo/" + name
	if info, _ := os.Stat(g.Path(zone)); info == nil {
		slog.Warn("timezone not found", "name", name) // cloud-init also continues without the timezone
		return nil
	}
	if old, err := os.Readlink(g.Path("/etc/localtime")); err == nil && old == zone {
		return nil
	}
	const fresh = "/etc/.localtime.agent-seed"
	if err := os.Remove(g.Path(fresh)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return errors.Join(
		os.Symlink(zone, g.Path(fresh)),
		os.Rename(g.Path(fresh), g.Path("/etc/localtime")),
		place(g, "/etc/timezone", name+"\n", 0o644),
	)
}

// trust adds certificates to the system's trust store, unless they are already in
// it.
func trust(ctx context.Context, g sys.Guest, certificates []string) error {
	fresh := false
	for i, c := range certificates {
		path := fmt.Sprintf("/usr/local/share/ca-certificates/cloud-init-ca-cert-%d.crt", i+1)
		if g.Text(path) == c {
			continue
		}
		fresh = true
		if err := place(g, path, c, 0o644); err != nil {
			return err
		}
	}
	if !fresh {
		return nil
	}
	_, err := sys.Run(ctx, "", "update-ca-certificates")
	return err
}

// runBootcmd runs the boot scripts. As in cloud-init, a failing exit status does
// not stop the boot.
func runBootcmd(ctx context.Context, script string) error {
	if script == "" {
		return nil
	}
	path := seedDir + "/bootcmd"
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, scriptTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/sh", path)
	cmd.Env = []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root",
		"AGENT_SEED=1", // makes the scripts skip the lockdown and the announcement
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if _, exited := errors.AsType[*exec.ExitError](err); exited && ctx.Err() == nil {
		slog.Error("boot scripts failed", "error", err)
		return nil
	}
	return err
}

// awaitLogins waits until sshd listens and the network has a route, so that the
// host's first packet is not lost. It succeeds without a route, because the host
// detects a missing network.
func awaitLogins(ctx context.Context) error {
	err := sys.Await(ctx, loginTime, loginLook, func() error {
		if !listens(22) {
			return errors.New("sshd is not listening")
		}
		if len(netguard.Gateways()) == 0 {
			return errNoRoute
		}
		return nil
	})
	if errors.Is(err, errNoRoute) && ctx.Err() == nil {
		slog.Warn("no network", "error", err)
		return nil
	}
	return err
}

var errNoRoute = errors.New("no route")

// sayBooted notifies Lima's host agent, which otherwise keeps logging in to check.
// It leaves the notification to the seed disk's boot script if there is one to run.
func sayBooted(context.Context) error {
	if provisions(cidataMount) {
		return nil
	}
	meta, err := readSmall(cidataMount + "/meta-data")
	if err != nil {
		return err
	}
	return os.WriteFile("/run/lima-boot-done", meta, 0o644)
}

// provision runs the VM manager's own boot script, unless its only task would be to
// report that it ran.
func provision(ctx context.Context) error {
	if !provisions(cidataMount) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lateTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, cidataMount+"/boot.sh")
	cmd.Env = []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root",
		"LIMA_CIDATA_MNT=" + cidataMount,
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.WaitDelay = time.Second
	return cmd.Run()
}

// start queues a start job in systemd and does not wait for it.
func start(ctx context.Context, unit string) error {
	return sys.Perform(ctx, "", "systemctl", "start", "--no-block", unit)
}
