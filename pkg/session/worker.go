package session

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Worker does the work of a session's phases. One keeper uses one Worker, and holds
// the session's lock meanwhile.
type Worker struct {
	Sessions *Manager
	Driver   vm.Driver
	Golden   *golden.Maker
	Mirrors  *repo.Mirrors
	Log      *slog.Logger

	// Redact removes secrets from the session's row, its events and Log. The secrets
	// that a start resolves are added to it. It may be nil.
	Redact *secret.Redactor

	// Attention is called after an agent's state changed in the row, Phase after a
	// phase changed. Both may be nil, and should return quickly.
	Attention func(ctx context.Context, s Session)
	Phase     func(ctx context.Context, s Session)
	// Budget is called after a session used a part of its budget, or of today's. It may be nil.
	Budget func(ctx context.Context, s Session, n gateway.BudgetNote)

	// Lifetime is called when a limit of the session's lifetime is near or reached, or with no text
	// when it no longer is. It may be nil.
	Lifetime func(ctx context.Context, s Session, text string)
	// HasTasks reports whether tasks that have not ended run in the session. It may be nil.
	HasTasks func(ctx context.Context, id string) (bool, error)

	// Channel returns what serves the connections from the guest of a session. It may be nil.
	Channel func(s Session, guest func(context.Context) (*ssh.Client, error)) Channel

	// KillLocal removes the session's local tmux session; a missing one is a success.
	KillLocal func(ctx context.Context, s Session) error

	booted *connection // from the end of a start to the next step, which watches; nil otherwise

	secretsLock  sync.Mutex // held while Redact is brought up to date
	knownSecrets *time.Time // Status.SecretsAt of those that Redact knows; nil for none
	delivered    time.Time  // Status.SecretsAt of those that this Worker delivered
}

func (w *Worker) guestSetup() guestSetup { return guestSetup{w} }
func (w *Worker) homeFiles() homeFiles   { return homeFiles{w} }
func (w *Worker) standbys() standbys     { return standbys{w} }

// These limit the durations of the parts. Emulation is slow: a first boot that takes
// half a minute under KVM takes several minutes under TCG.
const (
	bootTimeout      = 10 * time.Minute
	provisionTimeout = 40 * time.Minute
	ownTimeout       = 5 * time.Minute
	stopGrace        = 30 * time.Second
)

// report returns what reports the work of the phases in events.
func (w *Worker) report() lifecycle.Reporter {
	return lifecycle.Reporter{Store: w.Sessions.Store, Log: w.Log, Redact: w.Redact, AppendFromGuest: func(ctx context.Context, id string, ev store.Event) error {
		_, err := w.Sessions.appendFromGuest(ctx, id, ev, func(*Status) {})
		return err
	}}
}

func (w *Worker) step(ctx context.Context, id, name string, f func(context.Context, vm.Progress) error) error {
	return w.report().Step(ctx, id, name, f)
}

func (w *Worker) text(s string) string { return w.report().Text(s) }

func (w *Worker) warn(ctx context.Context, id, hint, format string, args ...any) {
	w.report().Warn(ctx, id, hint, format, args...)
}

// updateStatus changes the session's status in the store.
func (m *Manager) updateStatus(ctx context.Context, id string, ev store.Event, f func(*Status)) (Session, error) {
	return read(m.Store.Update(ctx, id, func(row *store.Session) (store.Event, error) { return ev, change(row, f) }))
}

// appendFromGuest works like updateStatus, for an event that a guest can cause as
// often as it likes. The event is stored only within the session's budget.
func (m *Manager) appendFromGuest(ctx context.Context, id string, ev store.Event, f func(*Status)) (Session, error) {
	return read(m.Store.Update(ctx, id, func(row *store.Session) (store.Event, error) {
		var admitted store.Event
		err := change(row, func(status *Status) {
			f(status)
			if all := status.Events.Admit(ev); len(all) > 0 {
				admitted = all[0]
			}
		})
		return admitted, err
	}))
}

// change changes the status of a row that is being updated.
func change(row *store.Session, f func(*Status)) error {
	var status Status
	if err := json.Unmarshal(row.Status, &status); err != nil {
		return fmt.Errorf("read status of session %s: %w", row.Name, err)
	}
	f(&status)
	raw, err := json.Marshal(status)
	if err == nil {
		row.Status = raw
	}
	return err
}

// advance moves s to another phase, as the transition table allows. It clears
// Status.Work, which is valid only for the stop that recorded it: a session that
// leaves Stopped, or gets there without a report from its guest, has none.
func (w *Worker) advance(ctx context.Context, s Session, to Phase, change func(*store.Session)) (Session, error) {
	if !next.Allow(s.Phase, to) {
		return s, fmt.Errorf("session %s: no transition from %s to %s", s.Name, s.Phase, to)
	}
	return w.move(ctx, s, to, nil, change)
}

// move does the work of advance, and records the unsaved work that the guest reported
// at a clean stop.
func (w *Worker) move(ctx context.Context, s Session, to Phase, work *repo.WorkState, also func(*store.Session)) (Session, error) {
	var statusErr error
	row, err := w.Sessions.Store.Advance(ctx, s.ID, string(s.Phase), string(to), phaseEvent(s.Phase, to, s.Desired), func(row *store.Session) {
		if also != nil {
			also(row)
		}
		if to != Destroying {
			statusErr = change(row, func(f *Status) { f.Work = work })
		}
	})
	if err = errors.Join(err, statusErr); err != nil {
		return s, err
	}
	w.Log.InfoContext(ctx, "session state transition", "from", s.Phase, "to", to, "desired", s.Desired)
	return read(row, nil)
}

// markBroken records a failed step.
func (w *Worker) markBroken(ctx context.Context, s Session, cause error) (Session, error) {
	code, hint := fail.CodeOf(cause).String(), fail.HintOf(cause)
	if hint == "" {
		hint = "agent-sessionizer open " + s.Name
	}
	msg := w.text(cause.Error())
	var statusErr error
	row, err := w.Sessions.Store.Advance(ctx, s.ID, string(s.Phase), string(Broken),
		store.NewEvent(EventPhase, PhaseChange{From: s.Phase, To: Broken, Desired: s.Desired, Code: code, Reason: msg, Hint: hint}),
		func(row *store.Session) {
			row.SetError(code, msg, hint)
			statusErr = change(row, func(f *Status) { f.failPending("the session is broken") })
		})
	if err = errors.Join(err, statusErr); err != nil {
		return s, errors.Join(cause, err)
	}
	w.Log.WarnContext(ctx, "session state transition", "from", s.Phase, "to", Broken, "desired", s.Desired, "code", code, "error", msg)
	return read(row, nil)
}

// Next takes the step that brings the session one phase closer to its desired phase,
// and returns the session as it is afterwards. When ctx is cancelled because the
// desired phase changed, Next returns with the phase unchanged; the keeper then calls
// it again.
func (w *Worker) Next(ctx context.Context, s Session) (Session, error) {
	ctx = traceid.With(ctx, s.Status.RequestedBy.Trace)
	keep := context.WithoutCancel(ctx) // for writes that must happen even when the work is cancelled
	booted := w.booted
	w.booted = nil
	if booted != nil && (s.Phase != Ready || s.Desired != Ready || s.Status.Restore != nil) {
		booted.stop()
		booted = nil
	}
	switch {
	case s.Desired == Gone:
		return w.destroy(keep, s)
	case s.Status.Restore != nil && (s.Desired == Ready || s.Status.Restore.Begun) && (s.Phase == Ready || s.Phase == Stopped):
		return w.checkpointer().restore(keep, s)
	case s.Desired == Stopped && s.Phase != Stopped:
		return w.stop(keep, s)
	case s.Desired == Ready && s.Phase == Stopped:
		var statusErr error
		s, err := w.advance(keep, s, Starting, func(row *store.Session) {
			row.SetError("", "", "")
			statusErr = change(row, func(f *Status) { f.Resumed = false })
		})
		return s, errors.Join(err, statusErr)
	case s.Desired == Ready && (s.Phase == Creating || s.Phase == Starting):
		err := booter{w}.start(ctx, &s)
		switch {
		case ctx.Err() != nil:
			return s, nil //nolint:nilerr // cancelled; the desired phase says what is next
		case s.Phase == Creating: // not for a session that is started again
			w.auditVM(keep, audit.VMProvisioned, s, err)
		}
		if err != nil {
			return w.markBroken(keep, s, err)
		}
		w.standbys().prepareNext(keep, s)
		var statusErr error
		s, err = w.advance(keep, s, Ready, func(row *store.Session) {
			row.SetError("", "", "")
			statusErr = change(row, func(f *Status) { f.Lifetime = Lifetime{} }) // a new lease
		})
		return s, errors.Join(err, statusErr)
	case s.Desired == Ready && s.Phase == Stopping:
		// Finish stopping, then start: a shutdown in progress cannot be undone.
		return w.stop(keep, s)
	case s.Desired == Ready && s.Phase == Ready:
		return w.watch(ctx, s, booted)
	}
	return s, fmt.Errorf("session %s is %s: no transition leads to %s", s.Name, s.Phase, s.Desired)
}

// watch waits until the VM has ended or ctx is cancelled. Meanwhile it keeps
// the guest's policy up to date with the settings. It ends conn, and makes one if conn is nil.
func (w *Worker) watch(ctx context.Context, s Session, conn *connection) (Session, error) {
	settings := w.Sessions.Config
	defer func() { w.Sessions.Config = settings }() // not earlier: the goroutines below read it
	if conn == nil {
		conn = w.connect(ctx, s, nil)
	}
	defer conn.stop()
	defer context.AfterFunc(ctx, conn.cancel)() // what waits for the guest below ends at once, too
	if err := w.checkpointer().settle(ctx, s); err != nil && ctx.Err() == nil {
		w.Log.WarnContext(ctx, "failed to complete an interrupted checkpoint", "error", err)
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	stamp := settings.Stamp()
	var current atomic.Pointer[config.Config]
	current.Store(settings)
	var looking sync.WaitGroup
	lctx, stopLooking := context.WithCancel(ctx)
	defer func() { stopLooking(); looking.Wait() }()
	looking.Go(func() { w.watchGuest(lctx, s, current.Load, conn.get) })
	looking.Go(func() { w.watchGateway(lctx, s, current.Load) })
	var use usage
	looking.Go(func() { w.watchLifetime(lctx, s, current.Load, &use, conn.current) })
	looking.Go(func() { w.serveGuest(lctx, s, current.Load, conn.get) })
	looking.Go(func() { w.recordTerminals(lctx, s, current.Load, conn.get) })
	ports := publisher{log: w.Log, guest: conn.get, name: s.Name, use: use.sign}
	defer ports.close()
	var monitor gatewayMonitor
	for {
		if now := settings.Stamp(); now != stamp {
			stamp = now
			settings = w.reload(ctx, s.ID, settings)
			current.Store(settings)
		}
		m, err := w.Driver.Inspect(ctx, s.VM())
		switch {
		case ctx.Err() != nil:
			return s, nil
		case errors.Is(err, vm.ErrNotFound):
			// A separate variable, because watchGuest still reads s.
			gone, err := w.Sessions.updateStatus(context.WithoutCancel(ctx), s.ID, store.Event{}, func(f *Status) { f.Endpoint = vm.Endpoint{} })
			if err != nil {
				return s, err
			}
			return w.markBroken(context.WithoutCancel(ctx), gone, fail.New(fail.NotFound, "the VM of session %s was removed by another program", s.Name).
				WithHint("agent-sessionizer destroy --force %s", s.Name))
		case err != nil:
			w.Log.WarnContext(ctx, "failed to inspect the VM", "error", err)
		case m.State == vm.Broken:
			return w.markBroken(context.WithoutCancel(ctx), s, fail.New(fail.Failure, "the VM is broken: %s", m.Reason))
		case m.State == vm.Stopped:
			return w.markPoweredOff(context.WithoutCancel(ctx), s, errPoweredOff)
		}
		cause, err := w.Sessions.lapsed(ctx, s)
		if err != nil && ctx.Err() == nil { // the gateway enforces the lease
			w.Log.WarnContext(ctx, "failed to read whether the VM's task is still this host's", "error", err)
		}
		if cause != nil && ctx.Err() == nil {
			if err := w.Driver.Stop(context.WithoutCancel(ctx), s.VM(), nil, 0); err != nil {
				return s, err
			}
			return w.markPoweredOff(context.WithoutCancel(ctx), s, cause)
		}
		if err := monitor.check(ctx, w, s); err != nil {
			return w.markBroken(context.WithoutCancel(ctx), s, err)
		}
		if err := w.publish(ctx, &ports, s.ID); err != nil && ctx.Err() == nil {
			w.Log.WarnContext(ctx, "failed to publish ports", "error", err)
		}
		restore, err := w.checkpointer().process(ctx, s.ID)
		if err != nil && ctx.Err() == nil {
			w.Log.WarnContext(ctx, "failed to create or remove checkpoints", "error", err)
		}
		if restore {
			return w.Sessions.Get(ctx, s.ID)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return s, nil
		}
	}
}

// publish makes the listeners match the row, and records their ports in it.
func (w *Worker) publish(ctx context.Context, p *publisher, id string) error {
	s, err := w.Sessions.Get(ctx, id)
	if err != nil {
		return err
	}
	is, news := p.sync(ctx, s.Status.Ports)
	if !news {
		return nil
	}
	_, err = w.Sessions.updateStatus(ctx, id, store.Event{}, func(f *Status) {
		for i, now := range f.Ports { // a user may have requested others meanwhile
			if j := slices.IndexFunc(is, func(p PublishedPort) bool { return p.Guest == now.Guest }); j >= 0 {
				is[j].Close = now.Close
				f.Ports[i] = is[j]
			}
		}
		f.Ports = slices.DeleteFunc(f.Ports, func(p PublishedPort) bool {
			return p.Close && slices.ContainsFunc(s.Status.Ports, func(was PublishedPort) bool { return was.Guest == p.Guest && was.Close })
		})
	})
	return err
}

// reload brings the running guest's policy up to date with the changed settings, which it
// returns. A file with an error changes nothing: the previous policy stays in force.
func (w *Worker) reload(ctx context.Context, id string, previous *config.Config) *config.Config {
	settings, err := previous.Reload()
	if err == nil {
		sessions := *w.Sessions
		sessions.Config = settings
		var s Session
		if s, err = sessions.Get(ctx, id); err == nil {
			err = Net{Sessions: &sessions}.ApplyPolicy(ctx, s)
		}
	} else {
		settings = previous
	}
	if err != nil && ctx.Err() == nil {
		w.warn(ctx, id, fail.HintOf(err), "the changed settings were not applied: %v", err)
	}
	return settings
}

var errPoweredOff = errors.New("the VM stopped unexpectedly (powered off from inside, or its process was killed)")

// markPoweredOff records that the guest powered off, or that its process was killed.
// What the agent has not written to the disk is lost; the disk is not.
func (w *Worker) markPoweredOff(ctx context.Context, s Session, cause error) (Session, error) {
	msg, hint := cause.Error(), cmp.Or(fail.HintOf(cause), "agent-sessionizer open "+s.Name)
	var statusErr error
	row, err := w.Sessions.Store.Advance(ctx, s.ID, string(s.Phase), string(Stopped),
		store.NewEvent(EventPhase, PhaseChange{From: s.Phase, To: Stopped, Desired: Stopped, Code: fail.Failure.String(), Reason: msg, Hint: hint}),
		func(row *store.Session) {
			if Phase(row.Desired) == Ready { // a desired phase of Gone stays
				row.Desired = string(Stopped)
			}
			row.SetError(fail.Failure.String(), msg, hint)
			statusErr = change(row, func(f *Status) {
				f.Endpoint, f.Work = vm.Endpoint{}, nil
				f.failPending("the VM stopped unexpectedly")
			})
		})
	if err = errors.Join(err, statusErr); err != nil {
		return s, err
	}
	if s, err = read(row, nil); err == nil {
		w.checkpointer().removeHidden(ctx, s)
	}
	return s, err
}
