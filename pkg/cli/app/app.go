// Package app has what the commands share: settings, store, hosts, terminal, and how they find a session.
package app

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/user"
	"path/filepath"
	"strings"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// App holds what commands share. Each part is created on first use: --help opens no file,
// and list creates no VM driver.
type App struct {
	Con     *console.Console
	Redact  *secret.Redactor // applied to everything that this process prints or logs on its own behalf
	Config  *config.Config
	store   *store.Store
	Chosen  string        // the value of --host
	AnyHost bool          // the command works on every host
	log     *logfile.File // the log file from the settings, nil until first used
}

// Close closes what the commands opened.
func (a *App) Close() {
	a.Con.Close()
	if a.store != nil {
		if err := a.store.Close(); err != nil {
			slog.Warn("failed to close store", "error", err)
		}
	}
}

// Settings returns the configuration, and loads it on first use.
func (a *App) Settings() (*config.Config, error) {
	if a.Config != nil {
		return a.Config, nil
	}
	paths, err := config.DefaultPaths()
	if err != nil {
		return nil, err
	}
	defaults, err := ShippedSettings()
	if err != nil {
		return nil, err
	}
	cfg, err := config.Load(paths, defaults)
	if err != nil {
		return nil, err
	}
	slog.SetDefault(a.logger(cfg.Log, slog.LevelWarn))
	a.Config = cfg
	return cfg, nil
}

// Manager does what Reconciled does, and starts a search for orphans.
func (a *App) Manager(ctx context.Context) (*session.Manager, error) {
	m, err := a.Reconciled(ctx)
	if m != nil {
		sweep(ctx, m)
	}
	return m, err
}

// Reconciled opens the store, starts missing keepers, and starts waiting tasks.
func (a *App) Reconciled(ctx context.Context) (*session.Manager, error) {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return nil, err
	}
	// Start a keeper for every session and task that needs one and has none.
	return m, (&task.Manager{Sessions: m}).ReconcileAll(ctx)
}

// PlainManager opens the store and does not reconcile.
func (a *App) PlainManager(ctx context.Context) (*session.Manager, error) {
	cfg, err := a.Settings()
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
	self, err := Self()
	if err != nil {
		return nil, err
	}
	return &session.Manager{Store: a.store, Config: cfg, Self: self, Actor: Actor(), Audit: a.AuditTo(cfg)}, nil
}

// Host returns the host that a command works on. As every command does, it first starts
// missing keepers and a search for orphans.
func (a *App) Host(ctx context.Context) (ops.Host, error) {
	if h, err := a.remote(ctx); h != nil || err != nil {
		return h, err
	}
	m, err := a.Manager(ctx)
	if err != nil {
		return nil, err
	}
	return a.Engine(m)
}

// QuietHost is like Host, but starts nothing.
func (a *App) QuietHost(ctx context.Context) (ops.Host, error) {
	if h, err := a.remote(ctx); h != nil || err != nil {
		return h, err
	}
	m, err := a.PlainManager(ctx)
	if err != nil {
		return nil, err
	}
	return a.Engine(m)
}

// Local returns the manager and the row of a session of this host, for what cannot be done on
// another host.
func (a *App) Local(ctx context.Context, h ops.Host, s session.View) (*session.Manager, session.Session, error) {
	e, ok := h.(ops.Engine)
	if !ok {
		return nil, session.Session{}, fail.New(fail.Usage, "this works only on the host of session %s", s.Name)
	}
	row, err := e.Session(ctx, s.ID)
	return e.Tasks.Sessions, row, err
}

// Engine returns the engine that performs operations for the user of this process.
func (a *App) Engine(m *session.Manager) (ops.Engine, error) {
	images, err := Images(a)
	return ops.Engine{
		Tasks: &task.Manager{Sessions: m}, Images: images, Log: slog.Default(), Redact: a.Redact, Preflight: a.preflight,
		Driver: func() (vm.Driver, error) { return a.Driver(QuietLog()) },
		Caller: ops.Caller{Name: Actor(), Scope: ops.Admin},
	}, err
}

// Driver returns the VM driver. It logs to log.
func (a *App) Driver(log *slog.Logger) (vm.Driver, error) {
	cfg, err := a.Settings()
	if err != nil {
		return nil, err
	}
	self, err := Self()
	if err != nil {
		return nil, err
	}
	template, err := a.template(cfg.Paths)
	if err != nil {
		return nil, err
	}
	return newDriver(cfg.Paths, self, template, log)
}

// TemplateName is the name of the user's VM template, in the settings directory.
const TemplateName = "agent-sandbox.yaml"

// template returns the user's VM template, or the shipped one.
func (a *App) template(p config.Paths) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(p.Config, TemplateName))
	if err == nil || !os.IsNotExist(err) {
		return text, err
	}
	return sessionizer.Lima.ReadFile("lima/" + TemplateName)
}

// Self returns the path of this program's executable, for processes that outlive this one.
func Self() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", fail.New(fail.Host, "find own executable: %w", err)
	}
	// An upgrade can replace the file while it runs. Linux then appends " (deleted)".
	return strings.TrimSuffix(path, " (deleted)"), nil
}

// Images returns the store of images.
func Images(a *App) (*image.Store, error) {
	cfg, err := a.Settings()
	if err != nil {
		return nil, err
	}
	template, err := a.template(cfg.Paths)
	return &image.Store{Dir: cfg.Paths.Images(), Template: template}, err
}

// Actor returns the user of this process, for the audit log.
func Actor() string {
	if u, err := user.Current(); err == nil {
		return "user:" + u.Username
	}
	return fmt.Sprintf("uid:%d", os.Getuid())
}

// ShippedText returns the default content of a settings file.
func ShippedText(name string) ([]byte, error) {
	if name == TemplateName {
		return sessionizer.Lima.ReadFile("lima/" + name)
	}
	return sessionizer.Config.ReadFile("config/" + name)
}

// ShippedSettings returns the directory of the defaults.
func ShippedSettings() (fs.FS, error) { return fs.Sub(sessionizer.Config, "config") }
