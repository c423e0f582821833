package app

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// SweepCommand is the hidden command that removes orphans.
const SweepCommand = "sweep"

// sweepEvery is the interval at which orphans are removed while commands are used or serve
// runs.
const sweepEvery = time.Hour

// SweepLog returns the log of the last sweep. Its modification time is the time of that
// sweep.
func SweepLog(p config.Paths) string { return filepath.Join(p.State, "sweep.log") }

// SweepLock returns the path of the lock that a sweep holds.
func SweepLock(p config.Paths) string { return filepath.Join(p.State, "locks", "sweep") }

// sweep starts a sweep in the background, if the last one was long enough ago. If there was
// none, the store is new and there is nothing to sweep yet. No caller waits for the sweep,
// and its errors affect nothing else.
func sweep(ctx context.Context, m *session.Manager) {
	if err := startSweep(ctx, m); err != nil {
		slog.DebugContext(ctx, "failed to start orphan sweep", "error", err)
	}
}

// SweepNowAndThen calls sweep until ctx ends, for a process that may run while no commands
// do.
func SweepNowAndThen(ctx context.Context, m *session.Manager) {
	tick := time.NewTicker(sweepEvery / 6)
	defer tick.Stop()
	for {
		sweep(ctx, m)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func startSweep(ctx context.Context, m *session.Manager) error {
	path := SweepLog(m.Config.Paths)
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return os.WriteFile(path, nil, 0o600)
	}
	// Use the absolute value, because the clock may have been set back.
	if err != nil || time.Since(st.ModTime()).Abs() < sweepEvery || lockfile.Held(SweepLock(m.Config.Paths)) {
		return err
	}
	log, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	return lifecycle.Detach(ctx, m.Self, log, SweepCommand)
}
