package cli

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// app holds what commands share. Each part is created on first use: --help opens no file,
// and list creates no VM driver.
type app struct {
	con    *console.Console
	redact *secret.Redactor // applied to everything that this process prints or logs on its own behalf
	config *config.Config
	store  *store.Store
	chosen string        // the value of --host
	log    *logfile.File // the log file from the settings, nil until first used
}

func (a *app) close() {
	a.con.Close()
	if a.store != nil {
		if err := a.store.Close(); err != nil {
			slog.Warn("failed to close store", "error", err)
		}
	}
}

// settings returns the configuration, and loads it on first use.
func (a *app) settings() (*config.Config, error) {
	if a.config != nil {
		return a.config, nil
	}
	paths, err := config.DefaultPaths()
	if err != nil {
		return nil, err
	}
	defaults, err := shippedSettings()
	if err != nil {
		return nil, err
	}
	cfg, err := config.Load(paths, defaults)
	if err != nil {
		return nil, err
	}
	slog.SetDefault(a.logger(cfg.Log, slog.LevelWarn))
	a.config = cfg
	return cfg, nil
}

// manager does what reconciled does, and starts a search for orphans.
func (a *app) manager(ctx context.Context) (*session.Manager, error) {
	m, err := a.reconciled(ctx)
	if m != nil {
		a.sweep(ctx, m)
	}
	return m, err
}

// reconciled opens the store, starts missing keepers, and starts waiting tasks.
func (a *app) reconciled(ctx context.Context) (*session.Manager, error) {
	m, err := a.plainManager(ctx)
	if err != nil {
		return nil, err
	}
	// Start a keeper for every session and task that needs one and has none.
	return m, errors.Join(m.Reconcile(ctx), (&task.Manager{Sessions: m}).Reconcile(ctx))
}

// plainManager opens the store and does not reconcile.
func (a *app) plainManager(ctx context.Context) (*session.Manager, error) {
	cfg, err := a.settings()
	if err != nil {
		return nil, err
	}
	if err := cfg.Paths.Make(); err != nil {
		return nil, err
	}
	if a.store == nil {
		if a.store, err = store.Open(ctx, cfg.Paths.Store()); err != nil {
			return nil, err
		}
	}
	self, err := self()
	if err != nil {
		return nil, err
	}
	return &session.Manager{Store: a.store, Config: cfg, Self: self, Actor: actor(), Audit: a.auditTo(cfg)}, nil
}

// host returns the host that a command works on. As every command does, it first starts
// missing keepers and a search for orphans.
func (a *app) host(ctx context.Context) (ops.Host, error) {
	if h, err := a.remote(ctx); h != nil || err != nil {
		return h, err
	}
	m, err := a.manager(ctx)
	if err != nil {
		return nil, err
	}
	return a.engine(m)
}

// quietHost is like host, but starts nothing.
func (a *app) quietHost(ctx context.Context) (ops.Host, error) {
	if h, err := a.remote(ctx); h != nil || err != nil {
		return h, err
	}
	m, err := a.plainManager(ctx)
	if err != nil {
		return nil, err
	}
	return a.engine(m)
}

// local returns the manager and the row of a session of this host, for what cannot be done on
// another host.
func (a *app) local(ctx context.Context, h ops.Host, s session.View) (*session.Manager, session.Session, error) {
	e, ok := h.(ops.Engine)
	if !ok {
		return nil, session.Session{}, fail.New(fail.Usage, "this works only on the host of session %s", s.Name)
	}
	row, err := e.Session(ctx, s.ID)
	return e.Tasks.Sessions, row, err
}

// engine returns the engine that performs operations for the user of this process.
func (a *app) engine(m *session.Manager) (ops.Engine, error) {
	images, err := a.images()
	return ops.Engine{
		Tasks: &task.Manager{Sessions: m}, Images: images, Log: slog.Default(), Redact: a.redact, Preflight: a.preflight,
		Caller: ops.Caller{Name: actor(), Scope: ops.Admin},
	}, err
}

// worker returns a manager that can also do the work of a session.
func (a *app) worker(ctx context.Context, log *slog.Logger) (*session.Worker, error) {
	m, err := a.plainManager(ctx)
	if err != nil {
		return nil, err
	}
	driver, err := a.driver(log)
	if err != nil {
		return nil, err
	}
	maker, err := a.golden(driver)
	if err != nil {
		return nil, err
	}
	h, err := a.engine(m)
	if err != nil {
		return nil, err
	}
	mirrors := m.Mirrors()
	mirrors.Log = log
	return &session.Worker{
		Sessions: m, Driver: driver, Golden: maker,
		Mirrors: mirrors, Log: log, Redact: a.redact,
		Phase: func(ctx context.Context, _ session.Session) { a.pushStatus(ctx, h) },
		Attention: func(ctx context.Context, s session.Session) {
			a.pushStatus(ctx, h)
			a.notify(ctx, m, s)
		},
		KillLocal: func(ctx context.Context, s session.Session) error {
			if s.Status.Tmux == "" {
				return nil // no local tmux session was ever created
			}
			return tmux.Client{Socket: s.Status.Tmux}.Kill(ctx, tmux.SlugName(s.Repo, s.ID))
		},
	}, nil
}

// golden returns the maker of golden images, saved states and standby VMs.
func (a *app) golden(driver vm.Driver) (*golden.Maker, error) {
	cfg, err := a.settings()
	if err != nil {
		return nil, err
	}
	scripts, err := fs.Sub(sessionizer.Provision, "provision")
	if err != nil {
		return nil, err
	}
	images, err := a.images()
	if err != nil {
		return nil, err
	}
	self, err := self()
	if err != nil {
		return nil, err
	}
	// Images are built with the network access of a session without a profile.
	set, err := cfg.For("", "")
	if err != nil {
		return nil, err
	}
	reach, err := cfg.Policy(set, config.Additions{}, nil)
	if err != nil {
		return nil, err
	}
	reach.Enforced = true
	vms := golden.VMs{Driver: driver, Self: self}
	return &golden.Maker{
		VMs: vms, Images: images, Scripts: scripts, Template: images.Template, Policy: reach,
		Pool: golden.Pool{VMs: vms, Images: images, Dir: cfg.Paths.Pool(), Waiting: cfg.Pool},
	}, nil
}

func (a *app) driver(log *slog.Logger) (vm.Driver, error) {
	cfg, err := a.settings()
	if err != nil {
		return nil, err
	}
	self, err := self()
	if err != nil {
		return nil, err
	}
	template, err := a.template(cfg.Paths)
	if err != nil {
		return nil, err
	}
	return newDriver(cfg.Paths, self, template, log)
}

const templateName = "agent-sandbox.yaml"

// template returns the user's VM template, or the shipped one.
func (a *app) template(p config.Paths) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(p.Config, templateName))
	if err == nil || !os.IsNotExist(err) {
		return text, err
	}
	return sessionizer.Lima.ReadFile("lima/" + templateName)
}

// self returns the path of this program's executable, for processes that outlive this one.
func self() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", fail.New(fail.Host, "find own executable: %w", err)
	}
	// An upgrade can replace the file while it runs. Linux then appends " (deleted)".
	return strings.TrimSuffix(path, " (deleted)"), nil
}
