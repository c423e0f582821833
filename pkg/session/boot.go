package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// booter brings a session's VM up, whatever state it is in.
type booter struct{ w *Worker }

// start makes the session ready, whatever its phase is. Every step detects what is
// already done, so start can be repeated after any interruption. While the VM
// boots, the host fetches the repository and resolves the secrets.
func (b booter) start(ctx context.Context, s *Session) error {
	inGuest, err := b.tryStart(ctx, s, true)
	of := s.Status.FromSetup
	if err == nil || !inGuest || of == nil || s.Status.WasReady || ctx.Err() != nil {
		return err
	}
	b.w.warn(ctx, s.ID, "", "start from the saved setup, which is removed now: %v", err)
	if err := b.detachSavedSetup(ctx, s); err != nil {
		return err
	}
	if err := (SavedSetups{b.w.Sessions.Config.Paths}).RemoveUnused(ctx, b.w.Driver, of.VM); err != nil {
		b.w.Log.WarnContext(ctx, "failed to remove a saved setup", "error", err)
	}
	_, err = b.tryStart(ctx, s, false)
	return err
}

// tryStart does the work of start. inGuest reports whether an error is that of the VM or its guest.
func (b booter) tryStart(ctx context.Context, s *Session, maySaved bool) (inGuest bool, err error) {
	if err := b.mustBeWhole(ctx, *s); err != nil {
		return false, err
	}
	settings, err := Net{Sessions: b.w.Sessions}.settings(*s)
	if err != nil {
		return false, err
	}
	secrets, err := boundSecrets(b.w.Sessions.Config, settings.Secrets, s.Spec.Enforced)
	if err != nil {
		return false, err
	}
	secrets.logins = Secrets{b.w.Sessions}.logins(*s, settings)
	var conn *ssh.Client
	var from fetchedRepo
	was := *s // the concurrent steps must not read what boot writes
	if was.Status.SetupPlan != nil {
		from.plan = *was.Status.SetupPlan
	}
	fetched := was.Status.Base != nil
	if !fetched && maySaved && was.mayUseSavedSetup() {
		saved, err := SavedSetups{b.w.Sessions.Config.Paths}.OfRepo(was.RepoKey)
		if err != nil {
			return false, err
		}
		if len(saved) > 0 { // which one fits depends on the commit
			if from, err = b.fetch(ctx, was, settings); err != nil {
				return false, err
			}
			if err := b.chooseSavedSetup(ctx, s, saved, from); err != nil {
				return false, err
			}
			fetched = true
		}
	}
	wakes := &turn{path: b.w.Sessions.Config.Paths.WakeLock(), log: b.w.Log}
	defer wakes.end()
	g, gctx := errgroup.WithContext(ctx)
	var booting error
	g.Go(func() error {
		conn, booting = b.boot(gctx, s, wakes)
		return booting
	})
	if !fetched {
		g.Go(func() error {
			var err error
			from, err = b.fetch(gctx, was, settings)
			return err
		})
	}
	if len(secrets.refs) > 0 {
		g.Go(func() error {
			return b.w.step(gctx, was.ID, "resolve secrets", func(ctx context.Context, p vm.Progress) error {
				err := Secrets{b.w.Sessions}.resolve(ctx, was, &secrets, b.w.guestSetup().redactValues, p)
				for _, text := range secrets.warnings() {
					b.w.warn(ctx, was.ID, "agent-sessionizer secrets refresh "+was.Name, "%s", text)
				}
				return err
			})
		})
	}
	err = g.Wait()
	defer func() {
		if conn != nil {
			_ = conn.Close()
		}
	}()
	if err != nil {
		return err == booting, err //nolint:errorlint // which of them came first
	}
	gst := guestclient.Guest{SSH: conn, Root: s.Status.Root}
	if err := b.mountWorkspace(ctx, s, conn); err != nil {
		return true, err
	}
	needsSetup := len(from.plan.Steps) > 0 && (s.isUntouched() || was.Phase != Ready && !s.Status.Resumed)
	if needsSetup && s.adoptsCheckout() {
		b.w.warn(ctx, s.ID, "", "the repository's setup is skipped, because it would run in files that an earlier session left")
		needsSetup = false
	}
	if s.Status.Base == nil {
		read := func() error { return b.w.guestSetup().readProject(ctx, s, conn, from) }
		if s.Status.FromSetup != nil || s.adoptsCheckout() { // the guest has a checkout of another commit, or none
			read = func() error { return b.w.guestSetup().storeProject(ctx, s, from.project) }
		}
		if err := read(); err != nil {
			return false, err
		}
		// Not later: once the guest has a checkout, the repository is not fetched again.
		if needsSetup || s.Status.SetupPlan != nil {
			if *s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.SetupPlan = &from.plan }); err != nil {
				return false, err
			}
		}
	}
	tools, err := b.w.guestSetup().hasTools(s)
	if err != nil {
		return false, err
	}
	if err := b.w.guestSetup().configure(ctx, s, gst, from, secrets, tools, !needsSetup || !s.isUntouched()); err != nil {
		return true, err
	}
	if err := b.endSetAside(ctx, *s); err != nil {
		return true, err
	}
	if needsSetup {
		wakes.end() // a setup may take minutes
		if err := b.w.guestSetup().prepareRepository(ctx, s, conn, from.plan, was.Status.From == ""); err != nil {
			return true, err
		}
		if s.isUntouched() { // not earlier: the saved setup must not contain the user's files
			if err := b.w.homeFiles().copyHomeFiles(ctx, *s, gst); err != nil {
				return true, err
			}
		}
	}
	last, lctx := errgroup.WithContext(ctx)
	last.Go(func() error { return b.w.guestSetup().windows(lctx, s, gst) })
	last.Go(func() error { return b.w.guestSetup().finishIdentity(lctx, *s, gst) })
	if err := last.Wait(); err != nil {
		return true, err
	}
	*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		f.WasReady, f.Attention, f.ClockStopped = true, nil, false
	})
	if err == nil && tools && !needsSetup {
		b.w.booted = b.w.connect(ctx, *s, conn) // before the session is ready, because terminals attach at once
		conn = nil
	} // otherwise the user's groups, shell and environment, and sshd's limits, may have changed since that login
	return false, err
}

// fetchedRepo is what a new session needs of its repository on the host.
type fetchedRepo struct {
	source  repo.Source
	target  repo.Target
	project *config.Project // the repository's own file, nil if it has none
	plan    setupPlan
}

// fetch brings the mirror up to date, and finds the commit to check out.
func (b booter) fetch(ctx context.Context, s Session, set config.Settings) (from fetchedRepo, err error) {
	err = b.w.step(ctx, s.ID, "fetch the repository", func(ctx context.Context, p vm.Progress) error {
		m, err := b.w.Mirrors.Ensure(ctx, s.Spec.Repo, repo.Progress(p))
		if err != nil {
			return err
		}
		if m.Warning != "" {
			b.w.warn(ctx, s.ID, "", "%s", m.Warning)
		}
		from.source, from.target = m.Source(s.Spec.WithChanges), m.Target()
		if from.source.NewBranch = s.Spec.NewBranch; s.Spec.Within != nil {
			from.source.Session = s.Spec.Within.Name
		}
		if from.source, err = from.source.Resolve(ctx); err == nil {
			from.project, err = readProjectFile(ctx, s, from.source)
		}
		if err == nil {
			from.plan, err = b.w.planSetup(ctx, s, set, from)
		}
		return s.withLabelHint(err)
	})
	return from, err
}

// mustBeWhole refuses to rebuild a session whose VM has gone missing: the work that
// was in it would be lost without notice.
func (b booter) mustBeWhole(ctx context.Context, s Session) error {
	if !s.Status.WasReady {
		return nil
	}
	_, err := b.w.Driver.Inspect(ctx, s.VM())
	if errors.Is(err, vm.ErrNotFound) {
		return fail.New(fail.NotFound, "the VM of session %s is missing; it is not rebuilt, because that would hide the loss of the work in it", s.Name).
			WithHint("agent-sessionizer destroy --force %s", s.Name)
	}
	return err
}

// boot creates and starts the VM and logs in. A fork may still have its turn to wake then.
func (b booter) boot(ctx context.Context, s *Session, wakes *turn) (*ssh.Client, error) {
	accel, err := b.w.Driver.Accel(ctx, s.Arch())
	if err != nil {
		return nil, err
	}
	if accel.Name == "tcg" {
		b.w.warn(ctx, s.ID, cmp.Or(accel.Hint, "agent-sessionizer doctor"), "no hardware virtualization (%s): the VM is emulated and 10 to 30 times slower", accel.Reason)
	}
	prepared, again, panicked := b.w.Sessions.Config.Prepare, false, false
	if s.Status.Workspace != "" && prepared != config.PrepareNone { // a saved VM has no disk for it
		prepared = config.PrepareGolden
	}
	for {
		var err error
		switch {
		case s.Status.WasReady: // the VM exists and needs no image any more
		case s.forkOf() != nil:
			err = b.fork(ctx, s)
		default:
			err = b.create(ctx, s, prepared)
		}
		if s.Status.FromSetup != nil && fail.CodeOf(err) == fail.NotFound { // it was removed a moment ago
			if err = b.detachSavedSetup(ctx, s); err == nil {
				err = b.create(ctx, s, prepared)
			}
		}
		if err == nil {
			err = b.plugWorkspace(ctx, s)
		}
		if err != nil {
			return nil, err
		}
		if err := b.w.startGateway(ctx, *s); err != nil {
			return nil, err
		}
		err = b.startVM(ctx, s, accel, wakes)
		if errors.Is(err, vm.ErrPanicked) && !panicked {
			panicked = true
			b.w.warn(ctx, s.ID, "", "%v; starting the VM again", vm.ErrPanicked)
			continue
		}
		if !errors.Is(err, vm.ErrNotWoken) {
			if err != nil {
				return nil, err
			}
			break
		}
		if s.Status.WasReady || s.forkOf() != nil { // no other VM is as good
			if again && !s.Status.WasReady && s.origin() == golden.FromGeneric {
				return nil, err
			}
			if again {
				err = b.w.checkpointer().bootFromDisk(ctx, s, err)
			} else {
				b.w.warn(ctx, s.ID, "", "%v; trying again", err)
				err = b.w.Sessions.Gateway(*s).Stop(ctx)
			}
			if err != nil {
				return nil, err
			}
			again = true
			continue
		}
		// No user has been in this VM yet, so another one is as good. The first
		// failure need not be the snapshot's fault: QEMU may have been killed.
		if !again {
			b.w.warn(ctx, s.ID, "", "%v; resuming another saved VM", err)
		} else {
			b.w.warn(ctx, s.ID, "", "%v; booting a clone instead", err)
			if err := b.w.Golden.Distrust(s.Status.Warm); err != nil {
				return nil, err
			}
			prepared = config.PrepareGolden
		}
		again = true
		if err := errors.Join(b.w.Sessions.Gateway(*s).Stop(ctx), b.w.Driver.Delete(ctx, s.VM())); err != nil {
			return nil, err
		}
	}
	if err := b.w.checkpointer().settle(ctx, *s); err != nil { // a keeper may have died while it saved a setup
		return nil, err
	}
	var conn *ssh.Client
	err = b.w.step(ctx, s.ID, "log in", func(ctx context.Context, p vm.Progress) error {
		t, err := Connections{Paths: b.w.Sessions.Config.Paths}.target(*s, "")
		if err != nil {
			return err
		}
		conn, err = ssh.DialBooted(ctx, t, func() error {
			p("waiting for the guest's network")
			if m, err := b.w.Driver.Inspect(ctx, s.VM()); err == nil && m.State != vm.Running {
				return fail.New(fail.Failure, "the VM stopped before it accepted a login")
			}
			return nil
		})
		return err
	})
	if err == nil && s.Status.ClockStopped && ownTools(s) {
		err = conn.Run(ctx, fmt.Sprintf("sudo date --set=@%d.%09d >/dev/null", time.Now().Unix(), time.Now().Nanosecond()), ssh.IO{})
	}
	return conn, err
}

// startVM starts the VM and waits until it accepts logins. A fork first waits for its turn.
func (b booter) startVM(ctx context.Context, s *Session, accel vm.Accel, wakes *turn) error {
	return b.w.step(ctx, s.ID, "boot the VM", func(ctx context.Context, p vm.Progress) error {
		if !s.needsTurn(accel) {
			wakes.end() // a clone boots in the place of the fork
		} else if err := wakes.wait(ctx, p); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeoutCause(ctx, bootTimeout,
			fail.New(fail.Timeout, "the guest did not boot within %v", bootTimeout).WithHint("agent-sessionizer logs --of serial %s", s.Name))
		defer cancel()
		ep, err := b.w.Driver.Start(ctx, s.VM(), p)
		if err != nil {
			if cause := context.Cause(ctx); errors.Is(err, context.DeadlineExceeded) && cause != nil {
				return cause
			}
			return err
		}
		m, err := b.w.Driver.Inspect(ctx, s.VM())
		if err != nil {
			return err
		}
		*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
			if s.Spec.Fork != nil && f.Root != m.Root { // the directory is the original's
				f.Dir = m.Root + f.Dir
			}
			f.Endpoint, f.Root, f.Accel = ep, m.Root, accel.Name
			if s.Phase != Ready && f.Resumes != "" {
				f.Resumed, f.ClockStopped = s.Status.FromSetup == nil || f.WasReady, s.forkOf() == nil || f.WasReady // the identity of a fork has the time
			}
			f.hasResumed()
		})
		if err != nil {
			return err
		}
		return Connections{Paths: b.w.Sessions.Config.Paths}.writeSSHConfig(*s, b.w.Sessions.Self)
	})
}

// create makes the VM's files from whatever makes it start fastest.
func (b booter) create(ctx context.Context, s *Session, prepared config.Prepare) error {
	return b.w.step(ctx, s.ID, "create the VM", func(ctx context.Context, p vm.Progress) error {
		// A standby VM that was taken before an interruption.
		standby, err := golden.ReadStandby(b.w.Sessions.Config.Paths.Standby(s.ID))
		if err == nil {
			return b.w.standbys().adoptStandby(ctx, s, standby)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		// Keep an existing VM; the status records what it was made from.
		if m, err := b.w.Driver.Inspect(ctx, s.VM()); err == nil && m.State != vm.Broken {
			return nil
		}
		if s.Status.VM != "" { // a standby VM that was lost
			if err := b.w.Driver.Delete(ctx, s.Status.VM); err != nil {
				return err
			}
		}
		authorized, err := b.key(s.ID)
		if err != nil {
			return err
		}
		release, err := b.w.Golden.Images.Use()
		if err != nil {
			return err
		}
		defer release()
		r := s.Spec.Resources
		size := SizeOf(r)
		start, err := b.w.Golden.Best(ctx, prepared, s.Spec.Image, s.Arch(), size)
		if err != nil {
			return err
		}
		if start.Standbys.Name != "" && s.Spec.Enforced { // every standby VM has a gateway
			standby, ok, err := b.w.Golden.Pool.Take(ctx, start.Standbys, size, b.w.Sessions.Config.Paths.Standby(s.ID))
			if err != nil {
				return err
			}
			if ok {
				return b.w.standbys().adoptStandby(ctx, s, standby)
			}
		}
		if err := b.w.standbys().freeStandbyMemory(ctx, r.Memory); err != nil {
			return err
		}
		provisioned, program := "", ""
		if start.From != golden.FromGeneric { // both are already in the image
			var err1, err2 error
			provisioned, err1 = guestclient.ScriptsKey(b.w.Golden.Scripts)
			program, err2 = guestclient.ProgramKey(s.Arch())
			if err := errors.Join(err1, err2); err != nil {
				return err
			}
		}
		*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
			f.From, f.VM, f.Warm, f.Provisioned, f.Program = start.From, "", start.Warm.Path, provisioned, program
		})
		if err != nil {
			return err
		}
		return b.w.Driver.Create(ctx, vm.Spec{
			Name: s.Name, CPUs: r.CPUs, Memory: int64(r.Memory), Disk: int64(r.Disk),
			Image: start.Image, User: guestclient.User, AuthorizedKey: authorized, Boot: guestclient.BootScript(),
			ExternalNet: s.Spec.Enforced,
		})
	})
}

// key creates the session's own SSH key once and returns its public half.
func (b booter) key(id string) (authorized string, err error) {
	file := Connections{Paths: b.w.Sessions.Config.Paths}.keyFile(id)
	pub, err := os.ReadFile(file + ".pub")
	if err == nil {
		return string(pub), nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return "", fail.New(fail.Host, "create session directory: %w", err)
	}
	private, authorized, err := ssh.NewKey()
	if err != nil {
		return "", err
	}
	// Write the public half last: its presence means that the private half is
	// complete.
	if err := writeFile(file, private); err != nil {
		return "", err
	}
	return authorized, writeFile(file+".pub", []byte(authorized))
}

func (c Connections) keyFile(id string) string {
	return filepath.Join(c.Paths.SessionDir(id), "ssh_key")
}

// Dial connects to a session's running VM: over its keeper's relay if that is
// running, otherwise over a new connection.
func (c Connections) Dial(ctx context.Context, s Session) (*ssh.Client, error) {
	return c.dial(ctx, s, c.relaySocket(s.ID))
}

// DialOwn logs in to a session's running VM. The connection depends on no other
// process, and no other process waits for it.
func (c Connections) DialOwn(ctx context.Context, s Session) (*ssh.Client, error) {
	return c.dial(ctx, s, "")
}

func (c Connections) dial(ctx context.Context, s Session, relay string) (*ssh.Client, error) {
	t, err := c.target(s, relay)
	if err != nil {
		return nil, err
	}
	return ssh.Dial(ctx, t)
}

// hasVM returns an error if there is no VM to log in to.
func (s Session) hasVM() error {
	if s.Status.Endpoint.Addr == "" {
		return fail.New(fail.Conflict, "session %s is %s and has no VM to log in to", s.Name, s.Phase).WithHint("agent-sessionizer start %s", s.Name)
	}
	return nil
}

func (c Connections) target(s Session, relay string) (ssh.Target, error) {
	if err := s.hasVM(); err != nil {
		return ssh.Target{}, err
	}
	key, err := os.ReadFile(c.keyFile(s.ID))
	if err != nil {
		return ssh.Target{}, fail.New(fail.NotFound, "read SSH key of the session: %w", err).WithHint("agent-sessionizer destroy --force %s", s.Name)
	}
	return ssh.Target{Addr: s.Status.Endpoint.Addr, User: s.Status.Endpoint.User, Key: key, HostKey: s.Status.Endpoint.HostKey, Relay: relay}, nil
}

// writeFile replaces a private file atomically.
func writeFile(name string, content []byte) error {
	if err := atomicfile.Write(name, content, 0o600); err != nil {
		return fail.New(fail.Host, "write %s: %w", name, err)
	}
	return nil
}
