package cli

import (
	"context"
	"log/slog"
	"time"

	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/imagecmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/sessioncmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestapi"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

// worker returns what does the work of a session.
func worker(ctx context.Context, a *app.App, log *slog.Logger) (*session.Worker, error) {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return nil, err
	}
	driver, err := a.Driver(log)
	if err != nil {
		return nil, err
	}
	maker, err := imagecmd.Golden(a, driver)
	if err != nil {
		return nil, err
	}
	h, err := a.Engine(m)
	if err != nil {
		return nil, err
	}
	mirrors := m.Mirrors()
	mirrors.Log = log
	notify := seldom(func(ctx context.Context, s session.Session) { sessioncmd.Notify(ctx, m, s) })
	return &session.Worker{
		Sessions: m, Driver: driver, Golden: maker,
		Mirrors: mirrors, Log: log, Redact: a.Redact,
		Phase: func(ctx context.Context, _ session.Session) { sessioncmd.PushStatus(ctx, h) },
		Attention: func(ctx context.Context, s session.Session) {
			sessioncmd.PushStatus(ctx, h)
			notify(ctx, s)
		},
		Budget: func(ctx context.Context, s session.Session, n gateway.BudgetNote) {
			sessioncmd.NotifyBudget(ctx, m, s, n)
		},
		Lifetime: func(ctx context.Context, s session.Session, text string) {
			sessioncmd.PushStatus(ctx, h)
			if text != "" {
				sessioncmd.NotifyLifetime(ctx, m, s, text)
			}
		},
		HasTasks: func(ctx context.Context, id string) (bool, error) {
			what, err := (&task.Manager{Sessions: m}).Needing(ctx, id)
			return what != "", err
		},
		Channel: func(s session.Session, guest func(context.Context) (*ssh.Client, error)) session.Channel {
			return (&guestapi.Server{
				Session: s.ID, Version: app.Version, Log: log,
				Engine: func(context.Context) (ops.Engine, error) {
					now, err := m.Config.Reload()
					if err != nil {
						return ops.Engine{}, err
					}
					sessions := *m
					sessions.Config = now
					return a.Engine(&sessions)
				},
				Fetch: func(ctx context.Context) error {
					cur, err := m.Get(ctx, s.ID)
					if err != nil {
						return err
					}
					g, err := guest(ctx)
					if err == nil {
						_, err = session.Work{Sessions: m, ByGuest: true}.Fetch(ctx, cur, g, "", repo.FetchOptions{})
					}
					return err
				},
			}).Serve
		},
		KillLocal: func(ctx context.Context, s session.Session) error {
			if s.Status.Tmux == "" {
				return nil // no local tmux session was ever created
			}
			return tmux.Client{Socket: s.Status.Tmux}.Kill(ctx, tmux.SlugName(s.View().ShortName(), s.ID))
		},
	}, nil
}

// noticesAtOnce is how many notifications of a session follow each other without a limit.
const noticesAtOnce = 30

// seldom drops calls beyond one in ten seconds on average: a guest decides how often its agents
// change, and so must not decide how often its user is notified.
func seldom(notify func(context.Context, session.Session)) func(context.Context, session.Session) {
	limit := rate.NewLimiter(rate.Every(10*time.Second), noticesAtOnce)
	return func(ctx context.Context, s session.Session) {
		if limit.Allow() {
			notify(ctx, s)
		}
	}
}

// taskWorker returns what does the work of a task.
func taskWorker(ctx context.Context, a *app.App, log *slog.Logger) (*task.Worker, error) {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return nil, err
	}
	mirrors := m.Mirrors()
	mirrors.Log = log
	return task.NewWorker(&task.Manager{Sessions: m}, mirrors, log, a.Redact), nil
}
