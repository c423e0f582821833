package cli

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gc"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// sweepCommand is the hidden command that removes orphans.
const sweepCommand = "sweep"

// sweepEvery is the interval at which orphans are removed while commands are used or serve
// runs.
const sweepEvery = time.Hour

// sweepLog returns the log of the last sweep. Its modification time is the time of that
// sweep.
func sweepLog(p config.Paths) string { return filepath.Join(p.State, "sweep.log") }

func sweepLock(p config.Paths) string { return filepath.Join(p.State, "locks", "sweep") }

// sweep starts a sweep in the background, if the last one was long enough ago. If there was
// none, the store is new and there is nothing to sweep yet. No caller waits for the sweep,
// and its errors affect nothing else.
func (a *app) sweep(ctx context.Context, m *session.Manager) {
	if err := startSweep(ctx, m); err != nil {
		slog.DebugContext(ctx, "failed to start orphan sweep", "error", err)
	}
}

// sweepNowAndThen calls sweep until ctx ends, for a process that may run while no commands
// do.
func (a *app) sweepNowAndThen(ctx context.Context, m *session.Manager) {
	tick := time.NewTicker(sweepEvery / 6)
	defer tick.Stop()
	for {
		a.sweep(ctx, m)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func startSweep(ctx context.Context, m *session.Manager) error {
	path := sweepLog(m.Config.Paths)
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return os.WriteFile(path, nil, 0o600)
	}
	// Use the absolute value, because the clock may have been set back.
	if err != nil || time.Since(st.ModTime()).Abs() < sweepEvery || lockfile.Held(sweepLock(m.Config.Paths)) {
		return err
	}
	log, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	return m.Detach(ctx, log, sweepCommand)
}

// runSweep implements sweepCommand. Only one sweep runs at a time.
func runSweep(ctx context.Context, a *app) error {
	cfg, err := a.settings()
	if err != nil {
		return err
	}
	lock, free, err := lockfile.Try(sweepLock(cfg.Paths))
	if err != nil || !free {
		return err
	}
	defer lock.Unlock()
	// Set the time before the work, so that a failing sweep is not repeated by every
	// command.
	if err := os.WriteFile(sweepLog(cfg.Paths), nil, 0o600); err != nil {
		return fail.New(fail.Host, "create sweep log: %w", err)
	}
	now := time.Now() // writing nothing to an empty file may not change its time
	if err := os.Chtimes(sweepLog(cfg.Paths), now, now); err != nil {
		return fail.New(fail.Host, "set time of sweep log: %w", err)
	}
	log, stop := a.ownLog(ctx, sweepLog(cfg.Paths), cfg.Log, console.FormatJSON)
	defer stop()
	report, err := a.prune(ctx, sweepCommand, pruneOptions{}, gc.Orphans()...)
	for _, o := range report.Removed {
		log.InfoContext(ctx, "orphan removed", "kind", o.Kind, "name", o.Name, "bytes", o.Size, "reason", o.Why)
	}
	return err
}
