package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/recording"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// recordRetryMin and recordRetryMax limit the pauses between attempts to record, for example while no tmux
// server runs in the guest.
const (
	recordRetryMin = 2 * time.Second
	recordRetryMax = time.Minute
)

// deliveryTime is how long after Status.SecretsAt the secrets may arrive in the guest: they are recorded
// before they are sent.
const deliveryTime = time.Minute

// recordTerminals records the windows of the guest's tmux, while the settings ask for it.
func (w *Worker) recordTerminals(ctx context.Context, s Session, settings func() *config.Config, conn func(context.Context) (*ssh.Client, error)) {
	isOn := func() bool {
		set, err := settings().For(config.RepoKey(s.RepoKey), s.Spec.Profile)
		return err == nil && set.Record == config.On
	}
	limit := recording.Limiter() // over all connections
	again(ctx, w.Log, "failed to record terminals", recordRetryMin, recordRetryMax, func(ctx context.Context) error {
		if !waitUntil(ctx, isOn) {
			return context.Cause(ctx)
		}
		client, err := conn(ctx)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() {
			defer cancel()
			waitUntil(ctx, func() bool { return !isOn() })
		}()
		return w.recordTmux(ctx, s, settings().Recordings.Size, limit, client)
	})
}

// recordTmux records over one connection, until it or the guest's tmux ends.
func (w *Worker) recordTmux(ctx context.Context, s Session, size config.Size, limit *rate.Limiter, client *ssh.Client) (err error) {
	redact := w.Redact
	if redact == nil {
		redact = secret.NewRedactor()
	}
	rec := &recording.Recorder{
		Dir:   recording.Store{Dir: w.Sessions.Config.Paths.Recordings()}.Subject(s.ID),
		Limit: int64(size), Redact: redact,
	}
	defer func() { err = errors.Join(err, rec.Close()) }()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	control := recording.NewControl(ctx, rec, limit)
	out := secretsFirst{ctx: ctx, w: w, id: s.ID, client: client, to: control, fail: cancel}
	stderr := pipe.Buffer{Limit: 1 << 10}
	err = client.Run(ctx, recording.TmuxCommand, ssh.IO{Stdin: control.Commands(), Stdout: &out, Stderr: &stderr})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err == nil:
		return errors.New("the guest's tmux ended")
	}
	return fmt.Errorf("%w: %s", err, termtext.Line(stderr.String()))
}

// secretsFirst passes output of a guest on after the redactor has learnt the secrets that the guest had
// when the output arrived.
type secretsFirst struct {
	ctx    context.Context
	w      *Worker
	id     string
	client *ssh.Client
	to     *recording.Control
	fail   context.CancelCauseFunc // ends the connection: a command goes on when its output is not read
}

func (f *secretsFirst) Write(p []byte) (n int, err error) {
	if err = f.learn(); err == nil {
		n, err = f.to.Write(p)
	}
	if err != nil {
		f.fail(err)
	}
	return n, err
}

// learn asks the guest for its secrets if they may have changed.
func (f *secretsFirst) learn() error {
	s, err := f.w.Sessions.Get(f.ctx, f.id)
	if err != nil {
		return err
	}
	gs, g := f.w.guestSetup(), s.Guest(f.client)
	if err := gs.redactSecretsOf(f.ctx, s, g); err != nil || time.Since(s.Status.SecretsAt) > deliveryTime {
		return err
	}
	f.w.secretsLock.Lock()
	defer f.w.secretsLock.Unlock()
	if f.w.delivered.Equal(s.Status.SecretsAt) {
		return nil
	}
	// Another process may deliver them at this moment.
	return gs.readSecretsOf(f.ctx, s, g)
}
