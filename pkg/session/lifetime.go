package session

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// The lifetime of a session is limited by its lease and by the time that it may be idle. Its
// keeper counts both, and stops the session. A stopped session is destroyed after some time,
// but only if nothing would be lost. Sessions of tasks have the limits of their tasks instead.

// Limit is a limit of a session's lifetime.
type Limit string

// The limits.
const (
	LimitLease Limit = "lease"
	LimitIdle  Limit = "idle"
)

// Lifetime is what a session has used of its limits. Only time in which its keeper watches it
// counts, by the monotonic clock. Neither a suspended host nor a changed clock ends a session.
type Lifetime struct {
	Lease  time.Duration `json:"lease,omitempty"`  // left; 0 if it was never counted, negative if it has ended
	Idle   time.Duration `json:"idle,omitempty"`   // since the last use
	Warned []Limit       `json:"warned,omitempty"` // limits that the user was warned of
	// Status.Attached and Status.Used, as far as they were counted as use.
	SeenVisit time.Time `json:"seen_visit,omitzero"`
	SeenUse   time.Time `json:"seen_use,omitzero"`
	Ended     Limit     `json:"ended,omitempty"` // the limit that ended it
	// Time since the stop, as far as it was counted, and when it was counted last. A look
	// counts at most maxCount, so that a changed clock does not remove anything.
	Stopped time.Duration `json:"stopped,omitempty"`
	Counted time.Time     `json:"counted,omitzero"`
	Kept    string        `json:"kept,omitempty"` // why it was not destroyed
}

// Saved are the commits of a guest that a stop fetched, after which nothing ran in the guest.
type Saved struct {
	Commits []string `json:"commits"` // those that refs/agents/SESSION pointed to
}

// maxSaved limits Saved.Commits. A session with more is not destroyed automatically.
const maxSaved = 1000

const (
	lifetimeEvery = 5 * time.Second
	lifetimeSave  = time.Minute   // how often counted time is stored
	maxCount      = 2 * time.Hour // of Lifetime.Stopped
	maxWarning    = 10 * time.Minute

	// DefaultRenewal is how long a renewed lease lasts.
	DefaultRenewal = 4 * time.Hour
)

// warnBefore returns how long before the end of a limit the user is warned.
func warnBefore(limit config.TTL) time.Duration {
	return min(time.Duration(limit)/4, maxWarning)
}

// spend counts running time against the lease, and returns the limits that are reached and
// those that soon will be.
func (l *Lifetime) spend(set config.Lifetime, passed time.Duration) (reached, near []Limit) {
	check := func(limit Limit, most config.TTL, left time.Duration) {
		switch {
		case most <= 0:
		case left <= 0:
			reached = append(reached, limit)
		case left <= warnBefore(most):
			near = append(near, limit)
		}
	}
	if set.Lease <= 0 {
		l.Lease = 0
	} else {
		if l.Lease == 0 {
			l.Lease = time.Duration(set.Lease)
		}
		if l.Lease -= passed; l.Lease <= 0 {
			l.Lease = -1
		}
	}
	check(LimitLease, set.Lease, l.Lease)
	check(LimitIdle, set.IdleTTL, time.Duration(set.IdleTTL)-l.Idle)
	return reached, near
}

// usage counts signs that a session is used.
type usage struct{ signs atomic.Int64 }

func (u *usage) sign() { u.signs.Add(1) }

// lifetimeWatch counts the lifetime of one session.
type lifetimeWatch struct {
	w    *Worker
	id   string
	use  *usage
	conn func() *ssh.Client // nil while no connection exists

	set     config.Lifetime
	lastErr string
	idle    time.Duration
	spent   time.Duration // running time that is not stored yet

	signs, relayed int64
	input          int64
}

// watchLifetime counts the lifetime of a session until ctx ends, and stops the session when a
// limit is reached. settings returns the settings as they are now.
func (w *Worker) watchLifetime(ctx context.Context, s Session, settings func() *config.Config, use *usage, conn func() *ssh.Client) {
	if s.Task != "" {
		return
	}
	l := lifetimeWatch{w: w, id: s.ID, use: use, conn: conn, idle: s.Status.Lifetime.Idle}
	tick := time.NewTicker(lifetimeEvery)
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		passed := min(time.Since(last), 10*lifetimeEvery) // more if this process did not run
		last = time.Now()
		if err := l.look(ctx, settings(), passed); err != nil && ctx.Err() == nil && err.Error() != l.lastErr {
			l.lastErr = err.Error()
			w.Log.WarnContext(ctx, "failed to count the lifetime", "error", err)
		}
	}
}

// look counts the time that passed, warns, and requests the stop when a limit is reached.
func (l *lifetimeWatch) look(ctx context.Context, c *config.Config, passed time.Duration) error {
	s, err := l.w.Sessions.Get(ctx, l.id)
	if err != nil {
		return err
	}
	// The last known limits apply while the settings have an error.
	set, setErr := c.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	if setErr == nil {
		l.set = set.Lifetime
	}
	if life := s.Status.Lifetime; l.set.Lease <= 0 && l.set.IdleTTL <= 0 && life.Lease == 0 && len(life.Warned) == 0 {
		l.idle, l.spent = 0, 0
		return setErr
	}
	l.spent += passed
	l.idle += passed
	busy, err := l.w.hasTasks(ctx, l.id)
	if err != nil {
		return err
	}
	if busy {
		l.spent = 0 // tasks have limits of their own
	}
	if l.showsUse(s) || l.wasAsked(s) || busy {
		l.idle = 0
	}
	preview := s.Status.Lifetime
	preview.Idle = l.idle
	reached, near := preview.spend(l.set, l.spent)
	if len(reached) == 0 && sameLimits(near, preview.Warned) && l.spent < lifetimeSave && !l.wasAsked(s) {
		return setErr
	}
	var now Session
	var news []string
	var ended bool
	row, err := l.w.Sessions.Store.Update(ctx, l.id, func(row *store.Session) (ev store.Event, err error) {
		news, ended = nil, false
		if now, err = read(*row, nil); err != nil || now.Phase != Ready || now.Desired != Ready {
			return ev, err
		}
		if l.wasAsked(now) { // in this moment
			l.idle = 0
		}
		life := now.Status.Lifetime
		life.Idle, life.SeenVisit, life.SeenUse = l.idle, now.Status.Attached, now.Status.Used
		reached, near := life.spend(l.set, l.spent)
		// Nothing ends without a warning, whatever happened to the keeper meanwhile.
		for _, limit := range reached {
			if !slices.Contains(life.Warned, limit) {
				near, reached = append(near, limit), nil
			}
		}
		for _, limit := range near {
			if !slices.Contains(life.Warned, limit) {
				news = append(news, life.warning(l.set, limit))
			}
		}
		life.Warned = near
		if ended = len(reached) > 0; ended {
			life.Ended = reached[0]
			row.Desired = string(Stopped)
			ev = store.NewEvent(EventPhase, PhaseChange{From: Ready, To: Ready, Desired: Stopped, Reason: life.reason(l.set)})
		}
		return ev, change(row, func(f *Status) {
			f.Lifetime = life
			if ended {
				f.RequestedBy = RequestedBy{Actor: "lifetime"}
				if life.Ended == LimitIdle && l.set.Idle == config.IdleSuspend {
					f.Suspend = ids.Hex(6)
				}
			}
		})
	})
	if err != nil {
		return err
	}
	l.spent = 0
	if now, err = read(row, nil); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx) // the stop cancels it
	life := now.Status.Lifetime
	for _, text := range news {
		l.w.warn(ctx, l.id, "agent-sessionizer lease renew "+now.Name, "%s", text)
	}
	if ended {
		news = append(news, life.reason(l.set)) // the phase event has it too
		l.w.Sessions.audit(ctx, audit.LeaseEnded, "keeper", "session:"+l.id, nil, now.details(map[string]any{"limit": string(life.Ended)}))
	}
	if len(news) == 0 && !sameLimits(life.Warned, s.Status.Lifetime.Warned) {
		news = []string{""} // the warning no longer applies
	}
	for _, text := range news {
		if l.w.Lifetime != nil {
			l.w.Lifetime(ctx, now, text)
		}
	}
	return setErr
}

// showsUse reports whether there were signs of use since the last call. What the guest claims
// counts too: it can only prevent that the session is stopped for being idle.
func (l *lifetimeWatch) showsUse(s Session) bool {
	used := false
	if signs := l.use.signs.Load(); signs != l.signs {
		l.signs, used = signs, true
	}
	if client := l.conn(); client != nil {
		opened, open := client.Relayed()
		used = used || open > 0 || opened != l.relayed
		l.relayed = opened
	}
	if a := s.Status.Attention; a != nil && a.State == guestproto.AgentWorking {
		used = true
	}
	if g, _, err := Observation(l.w.Sessions.Config.Paths, s); err == nil {
		// Another agent may be more urgent than one that works.
		used = used || slices.ContainsFunc(g.Agents, func(a guestproto.Agent) bool { return a.State == guestproto.AgentWorking })
		if g.Machine != nil && g.Machine.Input != l.input {
			used = used || l.input != 0
			l.input = g.Machine.Input
		}
	}
	return used
}

// wasAsked reports whether a user visited or opened the session since that was last counted.
func (l *lifetimeWatch) wasAsked(s Session) bool {
	life := s.Status.Lifetime
	return !s.Status.Attached.Equal(life.SeenVisit) || !s.Status.Used.Equal(life.SeenUse)
}

func (w *Worker) hasTasks(ctx context.Context, id string) (bool, error) {
	if w.HasTasks == nil {
		return false, nil
	}
	return w.HasTasks(ctx, id)
}

func sameLimits(a, b []Limit) bool {
	for _, l := range a {
		if !slices.Contains(b, l) {
			return false
		}
	}
	return len(a) == len(b)
}

// warning returns the warning that a limit is near.
func (l Lifetime) warning(set config.Lifetime, limit Limit) string {
	if limit == LimitIdle {
		return fmt.Sprintf("idle for %v; it stops in %v unless you use it", Brief(l.Idle), Brief(max(time.Duration(set.IdleTTL)-l.Idle, time.Second)))
	}
	return fmt.Sprintf("its lease ends in %v, and then it stops", Brief(max(l.Lease, time.Second)))
}

// reason returns why the session was stopped.
func (l Lifetime) reason(set config.Lifetime) string {
	if l.Ended == LimitIdle {
		return fmt.Sprintf("stopped: it was idle for %v", set.IdleTTL)
	}
	return "stopped: its lease ended"
}

// lifetimeNote returns how the session's lifetime ends or ended, or "".
func (v View) lifetimeNote() string {
	switch {
	case slices.Contains(v.Ending, LimitLease):
		return fmt.Sprintf("lease ends in %v", Brief(max(time.Duration(v.LeaseLeft)*time.Second, time.Minute)))
	case len(v.Ending) > 0:
		return "idle, will stop soon"
	case v.Kept != "":
		return "kept: " + v.Kept
	case v.Ended == LimitLease:
		return "stopped: lease ended"
	case v.Ended == LimitIdle:
		return "stopped: idle"
	}
	return ""
}

// Brief formats a duration in whole minutes, or in seconds if it is short.
func Brief(d time.Duration) measure.Duration {
	unit := time.Minute
	if d < 2*time.Minute {
		unit = time.Second
	}
	return measure.Duration(d.Round(unit))
}

// LeaseRenewed is the event of a renewed lease.
type LeaseRenewed struct {
	LeftS int64  `json:"left_s"` // seconds
	By    string `json:"by,omitempty"`
}

// Renew extends the lease of a running session so that at least d of it is left, and counts as
// use.
func (m *Manager) Renew(ctx context.Context, s Session, d time.Duration) (Session, error) {
	set, err := m.Config.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	if err != nil {
		return s, err
	}
	s, err = read(m.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
		now, err := read(*row, nil)
		switch {
		case err != nil:
			return store.Event{}, err
		case now.Desired != Ready || now.Phase != Ready:
			return store.Event{}, fail.New(fail.Conflict, "session %s is %s; it gets a new lease when it starts", now.Name, now.Phase).WithHint("agent-sessionizer open %s", now.Name)
		case set.Lifetime.Lease <= 0 && set.Lifetime.IdleTTL <= 0 || now.Task != "":
			return store.Event{}, fail.New(fail.Conflict, "session %s has no lease, so it may run without limit", now.Name).WithHint("agent-sessionizer list")
		}
		life := now.Status.Lifetime
		if set.Lifetime.Lease > 0 {
			if life.Lease == 0 {
				life.Lease = time.Duration(set.Lifetime.Lease)
			}
			life.Lease = max(life.Lease, d)
		}
		life.Idle, life.Warned, life.Ended = 0, nil, ""
		return store.NewEvent(EventLease, LeaseRenewed{LeftS: int64(life.Lease / time.Second), By: m.Actor}), change(row, func(f *Status) {
			f.Lifetime, f.Used = life, time.Now()
		})
	}))
	if err == nil {
		m.audit(ctx, audit.LeaseRenewed, m.Actor, "session:"+s.ID, nil, s.details(map[string]any{"left": s.Status.Lifetime.Lease.String()}))
	}
	return s, err
}

// MarkUsed records that a user works with the session, at most once a minute.
func (m *Manager) MarkUsed(ctx context.Context, s Session) (Session, error) {
	if time.Since(s.Status.Used).Abs() < time.Minute {
		return s, nil
	}
	return m.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Used = time.Now() })
}

// Cleanup is the result of CleanUp.
type Cleanup struct {
	Due  bool   // its time after the stop is over
	Kept string // why it stays nevertheless
}

// CleanUp counts the time since a session was stopped. If that is longer than the settings
// allow and nothing would be lost, it requests that the session is destroyed. tasks returns
// what still needs the session, or "". A dry run changes nothing.
//
// Nothing is lost if the guest reported, after its agents had ended, that all its work was
// committed, and if a repository of the host has these commits.
func (m *Manager) CleanUp(ctx context.Context, id string, dry bool, tasks func() (string, error)) (c Cleanup, err error) {
	s, err := m.Get(ctx, id)
	if err != nil || s.Task != "" || !s.isCleanable() {
		return c, err
	}
	set, err := m.Config.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	if err != nil {
		return c, err
	}
	if set.Lifetime.CleanupTTL <= 0 {
		if s.Status.Lifetime.Kept != "" && !dry {
			_, err = m.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Lifetime.Kept = "" })
		}
		return c, err
	}
	if s, err = m.countStopped(ctx, s, dry); err != nil || !s.isCleanable() {
		return c, err
	}
	if c.Due = s.Status.Lifetime.Stopped >= time.Duration(set.Lifetime.CleanupTTL); !c.Due {
		return c, nil
	}
	if c.Kept, err = m.whyKept(ctx, s, tasks); err != nil || dry {
		return c, err
	}
	row, err := m.Store.Update(ctx, id, func(row *store.Session) (store.Event, error) {
		now, err := read(*row, nil)
		if err != nil || !now.isCleanable() || !now.StateChangedAt.Equal(s.StateChangedAt) {
			c = Cleanup{}
			return store.Event{}, err
		}
		if c.Kept != "" {
			var ev store.Event
			if c.Kept != now.Status.Lifetime.Kept {
				ev = store.NewEvent(EventWarning, lifecycle.Warning{Message: "kept, although cleanup_ttl is over: " + c.Kept, Hint: "agent-sessionizer start " + now.Name + " # then commit and fetch, or: agent-sessionizer destroy --force " + now.Name})
			}
			return ev, change(row, func(f *Status) { f.Lifetime.Kept = c.Kept })
		}
		row.Desired = string(Gone)
		return phaseEvent(Stopped, Stopped, Gone), change(row, func(f *Status) { f.RequestedBy = RequestedBy{Actor: "lifetime"} })
	})
	if err == nil && Phase(row.Desired) == Gone {
		err = m.wake(ctx, id)
	}
	return c, err
}

func (s Session) isCleanable() bool { return s.Phase == Stopped && s.Desired == Stopped }

// countStopped counts the time since the session was stopped.
func (m *Manager) countStopped(ctx context.Context, s Session, dry bool) (Session, error) {
	count := func(now Session) Lifetime {
		l := now.Status.Lifetime
		since := l.Counted
		if since.Before(now.StateChangedAt) {
			since, l.Stopped, l.Kept = now.StateChangedAt, 0, ""
		}
		l.Stopped += min(max(time.Since(since), 0), maxCount)
		l.Counted = time.Now().UTC()
		return l
	}
	if dry {
		s.Status.Lifetime = count(s)
		return s, nil
	}
	return read(m.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
		now, err := read(*row, nil)
		if err != nil || !now.isCleanable() {
			return store.Event{}, err
		}
		return store.Event{}, change(row, func(f *Status) { f.Lifetime = count(now) })
	}))
}

// whyKept returns why a stopped session must not be destroyed, or "".
func (m *Manager) whyKept(ctx context.Context, s Session, tasks func() (string, error)) (string, error) {
	if what, err := tasks(); err != nil || what != "" {
		return what, err
	}
	if s.Status.Base == nil {
		return "", nil // no repository was ever cloned into it
	}
	if forked, err := m.IsBeingForked(ctx, s); err != nil || forked {
		return "it is being forked", err
	}
	work := s.Status.Work
	switch {
	case s.Status.Resumes != "":
		return "it is suspended", nil
	case len(s.Checkpoints()) > 0:
		return "it has checkpoints", nil
	case work == nil:
		return "its unsaved work is unknown, because it did not stop cleanly", nil
	case !work.Clean():
		return work.Summary() + " would be lost", nil
	case s.Status.Saved == nil:
		return "its commits were not fetched at the stop", nil
	case len(s.Status.Saved.Commits) > maxSaved:
		return "it has too many branches to check", nil
	case len(s.Status.Saved.Commits) == 0:
		return "", nil // it has no commits of its own
	}
	held, err := repo.Holds(ctx, s.Name, s.Status.Target, s.Status.Saved.Commits)
	switch {
	case err != nil:
		return "this host's copy of its commits cannot be checked: " + strings.TrimSpace(err.Error()), nil
	case !held:
		return "this host does not have all its commits", nil
	}
	return "", nil
}
