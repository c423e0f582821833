package app

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// WithTrace returns ctx with the trace id of the process that started this one, or a new
// one.
func WithTrace(ctx context.Context) context.Context {
	id, ok := traceid.FromParent(os.Getenv(traceid.Variable))
	if !ok {
		id = traceid.New()
	}
	return traceid.With(ctx, id)
}

// logger returns a logger as configured by l. auto is the level if l leaves it open.
func (a *App) logger(l config.Log, auto slog.Level) *slog.Logger {
	to := console.Log{Level: levelOf(l, auto), Format: console.Format(l.Format), Redact: a.Redact}
	if f := a.sharedLog(l); f != nil {
		to.To = f
	}
	return a.Con.Logger(to)
}

func levelOf(l config.Log, auto slog.Level) slog.Level {
	if level, ok := console.ParseLevel(l.Level); ok {
		return level
	}
	return auto
}

// sharedLog returns the file that all processes log to, or nil if there is none. A file
// that cannot be written causes a warning, not an error.
func (a *App) sharedLog(l config.Log) *logfile.File {
	if l.File == "" {
		return nil
	}
	if a.log == nil {
		a.log = &logfile.File{Path: string(l.File), Limits: logfile.Limits{Max: int64(l.MaxSize), Every: l.Rotation, Keep: l.Keep}}
		if _, err := a.log.Write(nil); err != nil {
			a.Con.Warn("log.file: %v; logging to standard error", err)
			a.log = nil
		}
	}
	return a.log
}

// ownLimits are the limits of the log file that each background process has for itself.
var ownLimits = logfile.Limits{Max: 1 << 20, Keep: 1}

// OwnLog returns the logger of a background process. It writes to stderr and to the log
// file of the settings. If the starter redirected stderr to the file at path, that file is
// bounded until stop is called. The attributes identify the process.
func (a *App) OwnLog(ctx context.Context, path string, l config.Log, format console.Format, attrs ...any) (log *slog.Logger, stop func()) {
	own := logfile.NewStandard(path, ownLimits)
	level := levelOf(l, slog.LevelInfo)
	h := a.Con.Logger(console.Log{Level: level, Format: format, To: own, Redact: a.Redact}).Handler()
	if f := a.sharedLog(l); f != nil {
		h = slog.NewMultiHandler(h, a.Con.Logger(console.Log{Level: level, Format: console.Format(l.Format), To: f, Redact: a.Redact}).Handler())
	}
	log = slog.New(h).With(append(attrs, "pid", os.Getpid())...)
	slog.SetDefault(log)
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { own.Watch(ctx) })
	return log, func() { cancel(); watching.Wait() }
}

// AuditLog returns the audit log of the settings.
func (a *App) AuditLog(cfg *config.Config) *audit.Log {
	return &audit.Log{Path: cfg.Paths.Audit(), Retention: time.Duration(cfg.Audit.Retention), Redact: a.Redact}
}

// AuditTo returns a function that writes to the audit log. A failed write must not undo the
// recorded action, so the record then goes to the log instead.
func (a *App) AuditTo(cfg *config.Config) func(context.Context, audit.Record) {
	log := a.AuditLog(cfg)
	return func(ctx context.Context, r audit.Record) {
		if err := log.Write(ctx, r); err != nil {
			slog.ErrorContext(ctx, "failed to write audit log", "type", r.Type, "actor", r.Actor, "resource", r.Resource,
				"outcome", r.Outcome, "details", r.Details, "error", err)
		}
	}
}
