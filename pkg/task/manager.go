package task

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"iter"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// KeeperCommand is the hidden command that runs a task's keeper.
const KeeperCommand = "task-keeper"

// Manager writes desired phases and reads state; it does none of the work itself.
type Manager struct {
	Sessions *session.Manager

	CheckPublic func(context.Context, repo.Ref) error // nil means repo.CheckPublic; for tests
}

func (m *Manager) store() *store.Store       { return m.Sessions.Store }
func (m *Manager) paths() config.Paths       { return m.Sessions.Config.Paths }
func (m *Manager) LockPath(id string) string { return m.paths().TaskLock(id) }
func (m *Manager) Dir(id string) Dir         { return Dir(m.paths().TaskDir(id)) }
func (m *Manager) settings() config.Tasks    { return m.Sessions.Config.Tasks }

// Submission says who submits a task, and under which conditions.
type Submission struct {
	Text    []byte // the manifest as it was written; nil if unavailable
	Actor   string
	TraceID string
	RetryOf string // the id of the task that this one retries

	Permission *Permission // of the client; nil for the user, who may do everything
	Restricted bool        // restrict the task as if a client had submitted it

	Session string // whose guest submits it, as a subtask; "" for others
	// Fetch fetches the commits of that guest, because the manifest names one; nil if the host
	// has them.
	Fetch func(context.Context) error

	Once *Once // nil if a repeated request makes another task
}

// Submit adds a task to the queue. The notices list what is not as requested. Submit
// checks that the secrets exist, and does not resolve them.
func (m *Manager) Submit(ctx context.Context, asked *manifest.Task, o Submission) (Task, []string, error) {
	was := Status{RetryOf: o.RetryOf, Actor: o.Actor, Trace: cmp.Or(o.TraceID, traceid.ID(ctx), traceid.New())}
	if t, notices, found, err := m.repeated(ctx, o); err != nil || found {
		return t, notices, err
	}
	if o.Permission != nil || o.Restricted {
		if err := m.restrict(ctx, asked, o.Permission); err != nil {
			return Task{}, nil, err
		}
		was.Restricted = true
	}
	var under *descent
	var narrowed []string
	if o.Session != "" {
		narrow, d, notices, err := m.descend(ctx, asked, o.Session)
		if err != nil {
			return Task{}, nil, err
		}
		if err := m.fetch(ctx, asked, d, o.Fetch); err != nil {
			return Task{}, nil, err
		}
		asked, under, narrowed = narrow, &d, notices
		was.Restricted, was.Subtask = d.restricted, &d.Subtask
	}
	found, err := m.check(ctx, asked, was.Restricted)
	if err != nil {
		return Task{}, nil, err
	}
	in, slug, notices := found.session.ID, found.slug, slices.Concat(narrowed, found.notices)
	if in != "" {
		that := *asked
		that.VM.Session = in // another session may have this name later
		asked = &that
		was.Repository = cmp.Or(found.session.Spec.Repo.Path, found.session.Spec.Repo.URL)
	}
	normal, err := asked.Encode()
	if err != nil {
		return Task{}, nil, err
	}
	status, err := json.Marshal(was)
	if err != nil {
		return Task{}, nil, err
	}
	host, err := m.place(ctx, asked, under)
	if err != nil {
		return Task{}, nil, err
	}
	id, err := m.reserve(ctx, o, notices)
	if err != nil {
		return Task{}, nil, err
	}
	row, err := m.create(ctx, store.Task{
		ID: id, Name: cmp.Or(asked.Metadata.Name, slug), SessionID: in, Phase: string(Pending), Desired: string(Run),
		Priority: asked.Metadata.Priority, Labels: asked.Metadata.Labels, Manifest: normal, Status: status, Host: host,
	}, o.Text, under)
	if o.Once != nil && fail.CodeOf(err) == fail.Conflict { // the same request, at the same time
		if t, notices, found, rerr := m.repeated(ctx, o); rerr != nil || found {
			return t, notices, rerr
		}
	}
	if err != nil {
		return Task{}, nil, err
	}
	t, err := read(row, nil)
	if err != nil {
		return t, nil, err
	}
	m.audit(ctx, audit.TaskSubmitted, t)
	if t.Host != "" && !m.awaitCluster(ctx, t.ID, func(c store.Claim, _ store.Task) bool { return c.Revision > 0 }) {
		notices = append(notices, unsent)
	}
	return t, notices, nil
}

// sessionRequest describes the session that a task needs for itself.
func sessionRequest(t *manifest.Task, restricted bool) (session.Request, error) {
	ref, err := repo.Parse(t.Repository.URL, "/")
	if err != nil {
		return session.Request{}, err
	}
	ref.Branch, ref.Commit = cmp.Or(t.Repository.Branch, ref.Branch), t.Repository.Commit
	ref.PublicOnly = restricted
	r := session.Request{
		Repo: ref, Profile: t.VM.Profile, Workspace: t.VM.Workspace, NetworkMode: policy.Mode(t.VM.Network()),
		Resources: config.Resources{CPUs: t.VM.CPUs, Memory: config.Size(t.VM.Memory), Disk: config.Size(t.VM.Disk)},
		Secrets:   map[string]config.Secret{}, Restricted: restricted,
	}
	for _, h := range t.VM.HTTP {
		r.Requests = append(r.Requests, policy.RequestRules{Host: h.Host, Allow: h.Allow, Deny: h.Deny, Source: "vm.http"})
	}
	if t.Budget.Session != "" {
		if err := r.Budget.Session.Set(t.Budget.Session); err != nil {
			return session.Request{}, err
		}
	}
	r.Budget.Tokens = config.Tokens(t.Budget.Tokens)
	for _, s := range t.Secrets {
		one := config.Secret{From: s.Ref(), Binding: config.Binding{Body: s.Body, Guest: s.Guest, Like: s.Like}}
		for _, host := range s.To {
			one.To = append(one.To, config.Host(host))
		}
		r.Secrets[s.Name] = one
	}
	return r, nil
}

// Get reads one task by its whole id.
func (m *Manager) Get(ctx context.Context, id string) (Task, error) {
	return read(m.store().Task(ctx, id))
}

// Usage returns what the task's own session used of models, or nil.
func (m *Manager) Usage(ctx context.Context, id string) (*lifecycle.Usage, error) {
	sums, err := m.store().UsageSums(ctx, "task", store.UsageQuery{Task: id})
	if err != nil || len(sums) == 0 {
		return nil, err
	}
	return lifecycle.UsageOf(sums[0]), nil
}

// Find resolves what a person typed: an id, at least the first four digits of one, or
// a name that only one task has.
func (m *Manager) Find(ctx context.Context, what string) (Task, error) {
	if ids.Valid(what) {
		return m.Get(ctx, what)
	}
	found, err := m.List(ctx, store.TaskFilter{Name: what, Limit: 10})
	if err != nil {
		return Task{}, err
	}
	if len(found) == 0 && len(what) >= 4 && len(what) < 12 && ids.IsHex(what) {
		if found, err = m.List(ctx, store.TaskFilter{IDPrefix: what, Limit: 10}); err != nil {
			return Task{}, err
		}
	}
	const hint = "agent-sessionizer task list --all"
	t, ok, err := lifecycle.Only(found, what, hint, func(t Task) string { return t.ID })
	if err == nil && !ok {
		err = fail.New(fail.NotFound, "no task %q", what).WithHint(hint)
	}
	return t, err
}

// List returns the tasks that match the filter.
func (m *Manager) List(ctx context.Context, f store.TaskFilter) ([]Task, error) {
	rows, err := m.store().Tasks(ctx, f)
	if err != nil {
		return nil, err
	}
	return lifecycle.ReadAll(rows, read)
}

// SetDesired records the state that a client desires for the task, and starts a keeper. It
// never weakens that state: a task to be destroyed cannot be merely cancelled.
func (m *Manager) SetDesired(ctx context.Context, t Task, desired DesiredPhase, by Client) (Task, error) {
	if err := by.checkOwner(t); err != nil {
		return t, err
	}
	if t.Host != "" {
		return m.wish(ctx, t, desired)
	}
	cancelled := false
	row, err := m.store().UpdateTask(ctx, t.ID, func(row *store.Task) ([]store.Event, error) {
		cancelled = false // the transaction may run again
		cur, err := read(*row, nil)
		if err != nil {
			return nil, err
		}
		done := cur.Phase.Over() && (desired == Cancel || cur.Phase != FailedPreserved)
		if done || cur.Desired == desired || cur.Desired == Destroyed {
			return nil, nil
		}
		row.Desired = string(desired)
		change := PhaseChange{From: cur.Phase, To: cur.Phase, Desired: desired}
		if cur.Phase == Pending { // no keeper works on it, and nothing has to be undone
			cancelled = true
			cur.Status.Outcome = &Outcome{Result: CancelledByUser, At: time.Now().UTC()}
			row.Phase, change.To, change.Outcome = string(Cancelled), Cancelled, cur.Status.Outcome
			if row.Status, err = json.Marshal(cur.Status); err != nil {
				return nil, err
			}
		}
		return []store.Event{store.NewEvent(EventPhase, change)}, nil
	})
	if err != nil {
		return t, err
	}
	if t, err = read(row, nil); err != nil {
		return t, err
	}
	if cancelled {
		m.audit(ctx, audit.TaskCancelled, t)
	}
	if AtRest(t.Phase) {
		return t, errors.Join(m.prepareDir(ctx, t), m.Dir(t.ID).writeState(t))
	}
	return t, m.wake(ctx, t.ID)
}

// prepareDir makes the directory of a task that has left the queue.
func (m *Manager) prepareDir(ctx context.Context, t Task) error {
	text, err := m.store().TaskText(ctx, t.ID)
	if err != nil {
		return err
	}
	return m.Dir(t.ID).create(text, t.Task.Manifest)
}

// Retry submits the same manifest again.
func (m *Manager) Retry(ctx context.Context, t Task, o Submission) (Task, []string, error) {
	if t.Parent != "" {
		return Task{}, nil, fail.New(fail.Conflict, "task %s is a subtask, which only %s can submit again", t.ID, t.Parent).
			WithHint("agent-sessionizer task show %s", t.ID)
	}
	if err := (Client{o.Actor, o.Permission}).checkOwner(t); err != nil {
		return Task{}, nil, err
	}
	if !t.Phase.Over() {
		return Task{}, nil, fail.New(fail.Conflict, "task %s is %s; retry it after it has ended", t.ID, t.Phase).
			WithHint("agent-sessionizer task cancel %s", t.ID)
	}
	if err := m.checkRetryable(ctx, t); err != nil {
		return Task{}, nil, err
	}
	text, err := m.store().TaskText(ctx, t.ID)
	if err != nil {
		return Task{}, nil, err
	}
	o.Text, o.RetryOf, o.Restricted = text, t.ID, t.Status.Restricted
	return m.Submit(ctx, t.Manifest, o)
}

// Schedule gives free slots to waiting tasks: highest priority first, and oldest
// first within a priority. If the host currently lacks capacity for a task's VM, that
// task blocks those behind it; otherwise small tasks could keep a large one waiting
// forever. A task whose session is in use by another task does not block the queue,
// and no slot is reserved for it.
//
// A subtask takes none of the slots, because its parent, which has one, may wait for it.
// Instead, only some subtasks of one parent run at once. So every subtask can run while
// all tasks above it wait. Subtasks come first.
func (m *Manager) Schedule(ctx context.Context) error {
	if err := m.Cascade(ctx); err != nil {
		return err
	}
	waiting, err := m.store().Tasks(ctx, store.TaskFilter{Phases: []string{string(Pending)}, Here: true, Limit: 1})
	if err != nil || len(waiting) == 0 {
		return err
	}
	capacity, err := m.Sessions.Capacity(ctx)
	if err != nil {
		return err
	}
	queue := store.Queue{Waiting: string(Pending), Active: phasesThat(Phase.Active)}
	admitted, err := m.store().Admit(ctx, queue, func(active []store.Task, waiting iter.Seq[store.Task]) (next []store.Admission, err error) {
		capacity := capacity // the transaction may run again
		taken := map[string]bool{}
		running := map[string]int{} // by parent; "" for the slots
		for _, row := range active {
			taken[row.SessionID] = true
			running[row.Parent]++
			if full(reserveCapacity(&capacity, row)) {
				return nil, nil // the host lacks capacity even for a task that already has a slot
			}
		}
		for row := range waiting {
			if row.Parent == "" && running[""] >= m.settings().Slots {
				break
			}
			if row.Parent != "" {
				t, err := read(row, nil)
				if err != nil {
					return nil, err
				}
				if t.Status.Subtask == nil || running[row.Parent] >= t.Status.Subtask.Running {
					continue
				}
			}
			if row.SessionID != "" && taken[row.SessionID] {
				continue
			}
			if full(reserveCapacity(&capacity, row)) {
				break
			}
			taken[row.SessionID] = true
			running[row.Parent]++
			next = append(next, store.Admission{ID: row.ID, To: string(Staging), Event: store.NewEvent(EventPhase, PhaseChange{From: Pending, To: Staging, Desired: Run})})
		}
		return next, nil
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range admitted {
		errs = append(errs, m.wake(ctx, id))
	}
	return errors.Join(errs...)
}

// full reports whether err means a lack of capacity. A task with a different problem,
// such as a removed profile, may start and fail: waiting would not help it, and would
// block all others.
func full(err error) bool {
	code := fail.CodeOf(err)
	return err != nil && (code == fail.Conflict || code == fail.Host)
}

// reserveCapacity reserves the capacity for a task's VM, unless the VM is already counted.
func reserveCapacity(capacity *session.Capacity, row store.Task) error {
	if row.SessionID != "" {
		return capacity.ReserveResumed(row.SessionID)
	}
	t, err := read(row, nil)
	if err != nil {
		return err
	}
	r, err := t.sessionRequest()
	if err != nil {
		return err
	}
	return capacity.Reserve(r)
}

// Reconcile starts a keeper for every task that needs one and has none, and schedules
// waiting tasks. Every command calls it, and serve calls it periodically.
func (m *Manager) Reconcile(ctx context.Context) error {
	rows, err := m.store().Tasks(ctx, store.TaskFilter{Phases: phasesThat(func(p Phase) bool { return !AtRest(p) }), Here: true})
	if err != nil {
		return err
	}
	var errs []error
	for _, row := range rows {
		errs = append(errs, lifecycle.Tend(m.LockPath(row.ID), func(died bool, _ error) error {
			if t, err := read(row, nil); err == nil && died {
				m.audit(ctx, audit.SessionReconciled, t)
			}
			return m.wake(ctx, row.ID)
		}))
	}
	return errors.Join(append(errs, m.Schedule(ctx))...)
}

// ReconcileAll does what Reconcile does, for sessions and tasks.
func (m *Manager) ReconcileAll(ctx context.Context) error {
	return errors.Join(m.Sessions.Reconcile(ctx), m.Reconcile(ctx))
}

// phasesThat returns the phases that match.
func phasesThat(match func(Phase) bool) (all []string) {
	for _, p := range Phases() {
		if match(p) {
			all = append(all, string(p))
		}
	}
	return all
}

// wake starts a keeper for the task. If another keeper is alive, the new one ends.
func (m *Manager) wake(ctx context.Context, id string) error {
	d := m.Dir(id)
	if err := d.ensureDirs(); err != nil { // before its keeper writes anything
		return err
	}
	return lifecycle.Wake(ctx, m.Sessions.Self, d.KeeperLog(), KeeperCommand, id)
}
