package session

import (
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// guestSetup configures a guest that has booted.
type guestSetup struct{ w *Worker }

// configure sets up a running guest: network rules, tools, repository, home files and
// secrets. The repository arrives over SSH, so cloning needs no network, but it needs
// the tools, which the guest has or gets.
func (gs guestSetup) configure(ctx context.Context, s *Session, gst guestclient.Guest, from fetchedRepo, secrets secrets, tools, home bool) (err error) {
	g, gctx := errgroup.WithContext(ctx)
	provisioned := make(chan struct{})
	one, other, third := *s, *s, *s
	g.Go(func() error {
		if err := gs.installFirewall(gctx, &one, gst); err != nil {
			return err
		}
		if !tools {
			if err := gs.provision(gctx, &one, gst); err != nil {
				return err
			}
		}
		close(provisioned)
		if one.Status.VM != "" && ownTools(&one) {
			if err := gst.SetHostname(gctx, one.Name); err != nil {
				return err
			}
		}
		return gs.deliver(gctx, &one, gst, secrets)
	})
	if s.Status.Base == nil {
		g.Go(func() error {
			if !tools {
				select {
				case <-provisioned:
				case <-gctx.Done():
					return gctx.Err()
				}
			}
			return gs.clone(gctx, &other, gst, from.source, from.target)
		})
	}
	g.Go(func() error { // after provisioning, so that home files replace provisioned ones
		select {
		case <-provisioned:
		case <-gctx.Done():
			return gctx.Err()
		}
		if !home {
			return nil
		}
		return gs.w.homeFiles().copyHomeFiles(gctx, third, gst)
	})
	if err := g.Wait(); err != nil {
		return err
	}
	*s, err = gs.w.Sessions.Get(ctx, s.ID)
	return err
}

// installFirewall installs the guest program and the policy. From here on the guest reaches
// what the policy allows; before, it reached nothing.
func (gs guestSetup) installFirewall(ctx context.Context, s *Session, g guestclient.Guest) error {
	return gs.w.step(ctx, s.ID, "apply the network policy", func(ctx context.Context, _ vm.Progress) error {
		p, err := Net{Sessions: gs.w.Sessions}.Policy(ctx, *s)
		if err != nil {
			return err
		}
		// Update the gateway first, because its policy is the one that is enforced.
		// When the gateway was started, the repository's own file, which may narrow
		// the policy, had not been read.
		if s.Spec.Enforced {
			gateway, err := Net{Sessions: gs.w.Sessions}.gateway(ctx, *s)
			if err != nil {
				return err
			}
			if err := gateway.SetPolicy(ctx, p); err != nil {
				return err
			}
		}
		st, err := g.Install(ctx, s.Arch(), s.Status.Program, p)
		if err != nil {
			return err
		}
		key, err := guestclient.ProgramKey(s.Arch())
		if err != nil {
			return err
		}
		if key != s.Status.Program {
			if *s, err = gs.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Program = key }); err != nil {
				return err
			}
		}
		if !st.Ready() {
			return fail.New(fail.Policy, "the guest firewall is not running: %s %s", st.Firewall.Error, st.DNS.Error).
				WithHint("agent-sessionizer logs --of serial %s", s.Name)
		}
		return nil
	})
}

// readProject stores the repository's own settings file, which may only narrow the policy. It is the
// file of the commit that is checked out: that of from, or of a checkout which an earlier keeper
// finished.
func (gs guestSetup) readProject(ctx context.Context, s *Session, g repo.Guest, from fetchedRepo) error {
	base, ok, err := repo.Started(ctx, g, checkout(*s))
	if err != nil {
		return err
	}
	project := from.project
	if ok {
		src := from.source
		if src.Commit = base.Commit; s.Spec.NewBranch == "" {
			src.Branch = base.Branch
		}
		if project, err = readProjectFile(ctx, *s, src); err != nil {
			return err
		}
	}
	return gs.storeProject(ctx, s, project)
}

// readProjectFile returns the repository's own settings file, nil if it has none.
func readProjectFile(ctx context.Context, s Session, src repo.Source) (*config.Project, error) {
	text, ok, err := src.ReadFile(ctx, config.ProjectFile, 64<<10)
	if err != nil || !ok {
		return nil, err
	}
	project, err := config.ParseProject(s.Repo+":"+config.ProjectFile, text)
	return &project, err
}

func (gs guestSetup) storeProject(ctx context.Context, s *Session, project *config.Project) (err error) {
	if project == nil && s.Status.Project == nil {
		return nil
	}
	*s, err = gs.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Project = project })
	return err
}

// checkout returns where the repository is in the guest.
func checkout(s Session) repo.Checkout {
	home := guestclient.Home
	if s.Spec.Workspace != "" {
		home = WorkDir
	}
	return repo.Checkout{Dir: path.Join(s.Status.Root+home, path.Base(s.Repo))}
}

// ownTools reports whether the guest is a machine of its own. A guest with a root
// prefix is a directory of this host: it has the host's tools and must not get
// others.
func ownTools(s *Session) bool { return s.Status.Root == "" }

func (gs guestSetup) windows(ctx context.Context, s *Session, g guestclient.Guest) error {
	if !ownTools(s) {
		return nil
	}
	return gs.w.step(ctx, s.ID, "open tmux windows", func(ctx context.Context, _ vm.Progress) error {
		return g.Tmux(ctx, s.Status.Dir)
	})
}

// finishIdentity waits until the guest shares nothing with the image or snapshot that its
// VM was made from: it has its own seed disk, disk size and file-system journal.
func (gs guestSetup) finishIdentity(ctx context.Context, s Session, g guestclient.Guest) error {
	if s.Status.From == golden.FromGeneric { // not a fork of one
		return nil
	}
	return gs.w.step(ctx, s.ID, "grow the disk", func(ctx context.Context, _ vm.Progress) error {
		ctx, cancel := context.WithTimeoutCause(ctx, ownTimeout, fail.New(fail.Timeout, "the guest did not set up its own disks and file-system journal within %v", ownTimeout))
		defer cancel()
		trouble, err := g.FinishIdentity(ctx)
		if err == nil && trouble != "" {
			gs.w.warn(ctx, s.ID, "", "in the guest: %s", trouble)
		}
		return err
	})
}

// hasTools reports whether this version's provision scripts have run in the guest.
func (gs guestSetup) hasTools(s *Session) (bool, error) {
	key, err := guestclient.ScriptsKey(gs.w.Golden.Scripts)
	return !ownTools(s) || s.Status.Provisioned == key, err
}

func (gs guestSetup) provision(ctx context.Context, s *Session, g guestclient.Guest) error {
	return gs.w.step(ctx, s.ID, "provision", func(ctx context.Context, p vm.Progress) error {
		ctx, cancel := context.WithTimeout(ctx, provisionTimeout)
		defer cancel()
		provisioner := guestclient.Provisioner{Guest: g, Scripts: gs.w.Golden.Scripts, Source: image.Distribution(s.Spec.Image), Report: p}
		if err := provisioner.Provision(ctx); err != nil {
			return err
		}
		key, err := guestclient.ScriptsKey(gs.w.Golden.Scripts)
		if err != nil {
			return err
		}
		*s, err = gs.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Provisioned = key })
		return err
	})
}

func (gs guestSetup) clone(ctx context.Context, s *Session, g guestclient.Guest, src repo.Source, target repo.Target) error {
	return gs.w.step(ctx, s.ID, "clone into the guest", func(ctx context.Context, p vm.Progress) error {
		to := checkout(*s)
		src.TempDir = filepath.Join(gs.w.Sessions.Config.Paths.SessionDir(s.ID), "push")
		err := errors.Join(os.RemoveAll(src.TempDir), os.MkdirAll(src.TempDir, 0o700)) // a keeper may have died while it pushed
		if err != nil {
			return fail.New(fail.Host, "pack the history: %w", err)
		}
		defer os.RemoveAll(src.TempDir) // otherwise, it goes with the session
		var base repo.Base
		switch {
		case s.Status.FromSetup != nil:
			base, err = repo.UpdateCheckout(ctx, g.SSH, src, to, repo.Progress(p))
		case s.adoptsCheckout():
			old := path.Join(s.Status.Root+WorkDir, s.Status.SetAside, "git")
			base, err = repo.Reclone(ctx, g.SSH, src, to, old, settingsNames, repo.Progress(p))
		default:
			base, err = repo.Push(ctx, g.SSH, src, to, repo.Progress(p))
		}
		if err != nil {
			return err
		}
		for _, warning := range base.Warnings {
			gs.w.warn(ctx, s.ID, "", "%s", warning)
		}
		*s, err = gs.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Dir, f.Base, f.Target = to.Dir, &base, target })
		return err
	})
}

func (gs guestSetup) deliver(ctx context.Context, s *Session, g guestclient.Guest, secrets secrets) error {
	return gs.w.step(ctx, s.ID, "deliver secrets", func(ctx context.Context, _ vm.Progress) (err error) {
		*s, err = Secrets{gs.w.Sessions}.deliver(ctx, *s, g, secrets, gs.redactValues)
		gs.w.secretsLock.Lock()
		defer gs.w.secretsLock.Unlock()
		at := s.Status.SecretsAt
		gs.w.knownSecrets, gs.w.delivered = &at, at
		return err
	})
}

// redactValues makes Redact remove values from everything that is reported from now on.
func (gs guestSetup) redactValues(values ...secret.Value) {
	if gs.w.Redact != nil {
		gs.w.Redact.Add(values...)
	}
}

// redactSecretsOf asks a guest for the secrets that another process delivered, so that
// Redact knows them.
func (gs guestSetup) redactSecretsOf(ctx context.Context, s Session, g guestclient.Guest) error {
	gs.w.secretsLock.Lock()
	defer gs.w.secretsLock.Unlock()
	if known := gs.w.knownSecrets; known != nil && known.Equal(s.Status.SecretsAt) {
		return nil
	}
	return gs.readSecretsOf(ctx, s, g)
}

// readSecretsOf does the work of redactSecretsOf. The caller holds the lock.
func (gs guestSetup) readSecretsOf(ctx context.Context, s Session, g guestclient.Guest) error {
	values, err := g.Secrets(ctx)
	if err != nil {
		return err
	}
	if gs.w.Redact != nil {
		gs.w.Redact.SetGuest(values...)
	}
	at := s.Status.SecretsAt
	gs.w.knownSecrets = &at
	return nil
}
