package task

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// A subtask is a task that was submitted from inside the guest of a session. Its parent is
// the task that owns the session, or the session itself if a user opened it. The root is
// the parent at the top. What a subtask may do is decided here, once, when it is submitted.

// Subtask is what a subtask has from its parent, and its next keeper has to know.
type Subtask struct {
	Within  *session.Bounds          `json:"within"`
	Secrets map[string]config.Secret `json:"secrets,omitempty"` // references of the parent's own secrets
	Running int                      `json:"running"`           // how many subtasks of the parent may run at once
}

// submitsPerMinute limits the submissions in one tree.
const submitsPerMinute = 30

// rights are what a session may pass on to its subtasks.
type rights struct {
	url, key  string // of the repository
	profile   string
	base      repo.Base
	size      config.Resources
	mode      policy.Mode
	agent     manifest.Agent // of the parent; the zero Agent for a user's session
	lifecycle manifest.Lifecycle
	priority  int
	remaining time.Duration // until the parent's timeout; 0 for no limit
}

// narrow returns a subtask's manifest with everything that it has from its parent. Each fault
// is a right that the parent does not have.
func narrow(asked *manifest.Task, r rights) (t *manifest.Task, notices []string, faults []manifest.Fault) {
	refuse := func(field, hint, format string, args ...any) {
		faults = append(faults, manifest.Fault{Field: field, Err: fail.New(fail.Policy, format, args...).WithHint("%s", hint)})
	}
	out := *asked
	if url := out.Repository.URL; url != "" {
		if ref, err := repo.Parse(url, "/"); err != nil || ref.Key != r.key || ref.Branch != "" {
			refuse("repository.url", "leave repository.url out", "a subtask works on the repository of its parent, %s", r.key)
		}
	}
	out.Repository.URL = r.url
	if out.Repository.Branch == "" && out.Repository.Commit == "" {
		out.Repository.Branch, out.Repository.Commit = "", r.base.Commit
	}
	if out.VM.Session != "" {
		refuse("vm.session", "leave vm.session out", "a subtask has a VM of its own")
	}
	if out.VM.Workspace != "" {
		refuse("vm.workspace", "leave vm.workspace out", "a subtask has no workspace")
	}
	if p := out.VM.Profile; p != "" && p != r.profile {
		refuse("vm.profile", "leave vm.profile out", "a subtask has the profile of its parent, %q", r.profile)
	}
	out.VM.Profile = r.profile
	usual := manifest.DefaultLifecycle()
	if out.Metadata.Priority == 0 { // it was not asked for, like those below
		out.Metadata.Priority = min(0, r.priority)
	}
	if out.Lifecycle.CancelGrace == usual.CancelGrace {
		out.Lifecycle.CancelGrace = min(usual.CancelGrace, r.lifecycle.CancelGrace)
	}
	if out.Lifecycle.PreserveFor == usual.PreserveFor {
		out.Lifecycle.PreserveFor = min(usual.PreserveFor, r.lifecycle.PreserveFor)
	}
	if out.Lifecycle.MaxArtifactBytes == usual.MaxArtifactBytes {
		out.Lifecycle.MaxArtifactBytes = min(usual.MaxArtifactBytes, r.lifecycle.MaxArtifactBytes)
	}
	for _, n := range []struct {
		field    string
		ask, has int64
		text     string
	}{
		{"vm.cpus", int64(out.VM.CPUs), int64(r.size.CPUs), fmt.Sprint(r.size.CPUs)},
		{"vm.memory", int64(out.VM.Memory), int64(r.size.Memory), r.size.Memory.String()},
		{"vm.disk", int64(out.VM.Disk), int64(r.size.Disk), r.size.Disk.String()},
		{"metadata.priority", int64(out.Metadata.Priority), int64(r.priority), fmt.Sprint(r.priority)},
		{"lifecycle.cancel_grace", int64(out.Lifecycle.CancelGrace), int64(r.lifecycle.CancelGrace), r.lifecycle.CancelGrace.String()},
		{"lifecycle.preserve_for", int64(out.Lifecycle.PreserveFor), int64(r.lifecycle.PreserveFor), r.lifecycle.PreserveFor.String()},
		{"lifecycle.max_artifact_bytes", int64(out.Lifecycle.MaxArtifactBytes), int64(r.lifecycle.MaxArtifactBytes), r.lifecycle.MaxArtifactBytes.String()},
	} {
		if n.ask > n.has {
			key := n.field[strings.LastIndexByte(n.field, '.')+1:]
			refuse(n.field, fmt.Sprintf("%s: %s, or leave it out", key, n.text), "the parent has %s", n.text)
		}
	}
	out.VM.CPUs = cmp.Or(out.VM.CPUs, r.size.CPUs)
	out.VM.Memory, out.VM.Disk = cmp.Or(out.VM.Memory, measure.Size(r.size.Memory)), cmp.Or(out.VM.Disk, measure.Size(r.size.Disk))
	if mode := policy.Mode(out.VM.Network()); mode.Wider(r.mode) {
		refuse("vm.network_mode", "network_mode: "+string(r.mode), "the parent's network is %s", r.mode)
	} else if mode == "" {
		out.VM.NetworkMode = string(r.mode)
	}
	if len(out.Secrets) > 0 {
		refuse("secrets", "leave secrets out", "a subtask has the secrets of its parent, and no others")
	}
	if out.Lifecycle.FailureAction == "preserve" {
		refuse("lifecycle.failure_action", "failure_action: destroy", "the VM of a subtask is not kept")
	}
	if out.Lifecycle.HangAction == "preserve" {
		refuse("lifecycle.hang_action", "hang_action: terminate", "the VM of a subtask is not kept")
	}
	if r.agent.Permissions == manifest.AskPermissions && out.Agent.Permissions != manifest.AskPermissions {
		refuse("agent", "permissions: ask", "the parent's agent asks for permissions, so this one must")
	}
	if tools := r.agent.AllowedTools; len(tools) > 0 {
		more := slices.ContainsFunc(out.Agent.AllowedTools, func(t string) bool { return !slices.Contains(tools, t) })
		if out.Agent.Kind != manifest.Claude || len(out.Agent.AllowedTools) == 0 || more {
			refuse("agent", "claude: {allowed_tools: […]}", "the parent's agent has only the tools %v", tools)
		}
	}
	if limit := measure.Duration(r.remaining); limit > 0 && out.Lifecycle.Timeout > limit {
		out.Lifecycle.Timeout = measure.Duration(max(r.remaining.Truncate(time.Second), time.Second))
		notices = append(notices, fmt.Sprintf("the timeout is %v, which is left of the parent's", out.Lifecycle.Timeout))
	}
	return &out, notices, faults
}

// descent is the place of a new subtask.
type descent struct {
	parent, root string
	depth        int
	above        []Task // the tasks above it, the root first
	limits       config.Subtasks
	restricted   bool
	Subtask
}

// descend checks what a subtask may do, and finds its place in the tree.
func (m *Manager) descend(ctx context.Context, asked *manifest.Task, id string) (*manifest.Task, descent, []string, error) {
	s, err := m.Sessions.Get(ctx, id)
	if err != nil {
		return nil, descent{}, nil, err
	}
	d := descent{parent: s.Subject(), root: s.Subject(), depth: 1, restricted: s.Spec.Restricted}
	r := rights{
		url: cmp.Or(s.Spec.Repo.Path, s.Spec.Repo.URL), key: s.RepoKey, profile: s.Spec.Profile, size: s.Spec.Resources,
		lifecycle: manifest.DefaultLifecycle(),
	}
	if s.Status.Base == nil {
		return nil, d, nil, fail.New(fail.Conflict, "session %s has no checkout yet", s.Name).WithHint("agent-guest task submit, later")
	}
	r.base = *s.Status.Base
	d.Secrets = s.Spec.Secrets
	if s.Task != "" {
		if d.above, err = m.ancestors(ctx, s.Task); err != nil {
			return nil, d, nil, err
		}
		p := d.above[len(d.above)-1]
		d.root, d.depth = cmp.Or(p.Root, p.ID), p.Depth+1
		r.url, r.agent, r.lifecycle, r.priority = p.Manifest.Repository.URL, p.Manifest.Agent, p.Manifest.Lifecycle, p.Priority
		if !p.Status.Started.IsZero() {
			r.remaining = max(time.Duration(r.lifecycle.Timeout)-time.Since(p.Status.Started), time.Second)
		}
	}
	if d.Within, err = (session.Net{Sessions: m.Sessions}).Bounds(ctx, s); err != nil {
		return nil, d, nil, err
	}
	r.mode = d.Within.Policy.Mode
	set, err := m.Sessions.Config.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	if err != nil {
		return nil, d, nil, err
	}
	if s.Spec.Enforced && !set.Network.Enforced() {
		return nil, d, nil, fail.New(fail.Policy, "the settings no longer enforce the network, which is enforced for session %s", s.Name).
			WithHint("on the host: agent-sessionizer config edit config.yaml")
	}
	d.limits, d.Running = set.Subtasks, set.Subtasks.Running.Number()
	if len(d.above) > 0 {
		d.Running = min(d.Running, d.above[len(d.above)-1].Manifest.Subtasks.Running)
	}
	out, notices, faults := narrow(asked, r)
	return out, d, notices, asked.Refuse(faults...)
}

// ancestors returns the tasks above a subtask, from the root to its parent. The root can be a
// session, which is not among them.
func (m *Manager) ancestors(ctx context.Context, parent string) (all []Task, err error) {
	for id := parent; id != ""; id = all[0].Parent {
		t, err := m.Get(ctx, id)
		if fail.CodeOf(err) == fail.NotFound && len(all) > 0 {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = slices.Insert(all, 0, t)
	}
	return all, nil
}

// admit refuses a subtask beyond the limits of its tree. It decides in the transaction that
// creates the subtask.
func (d descent) admit(f store.Family) error {
	if p := Phase(f.Parent); p.Over() || p == Completing || f.ParentDesired == string(Cancel) || f.ParentDesired == string(Destroyed) ||
		f.ParentDesired == string(session.Gone) || f.Parent == string(session.Gone) {
		return fail.New(fail.Conflict, "%s is ending, so it gets no more subtasks", d.parent).WithHint("agent-sessionizer task show %s", d.parent)
	}
	full := func(what string, limit int, of string) error {
		return fail.New(fail.Policy, "the limit of %d %s of %s is reached", limit, what, of).
			WithHint("on the host, for later runs: agent-sessionizer config edit config.yaml # subtasks")
	}
	if !d.limits.Allowed() || d.Running < 1 {
		return fail.New(fail.Policy, "subtasks are not allowed here").WithHint("on the host: agent-sessionizer config edit config.yaml # subtasks: {count: 10}")
	}
	if d.depth > d.limits.Depth.Number() {
		return full("levels of subtasks", d.limits.Depth.Number(), d.root)
	}
	if len(f.Kin) >= d.limits.Count.Number() {
		return full("subtasks", d.limits.Count.Number(), d.root)
	}
	for _, t := range d.above {
		if d.depth-t.Depth > t.Manifest.Subtasks.Depth {
			return full("levels of subtasks", t.Manifest.Subtasks.Depth, t.ID)
		}
		if below(f.Kin, t.ID) >= t.Manifest.Subtasks.Count {
			return full("subtasks", t.Manifest.Subtasks.Count, t.ID)
		}
	}
	recent := 0
	for _, k := range f.Kin {
		if time.Since(k.CreatedAt) < time.Minute {
			recent++
		}
	}
	if recent >= submitsPerMinute {
		return fail.New(fail.Conflict, "%d subtasks were submitted within a minute", recent).WithHint("submit it again in a minute")
	}
	return nil
}

// fetch fetches the commits of the parent's guest, if its subtask names one, and would be
// admitted.
func (m *Manager) fetch(ctx context.Context, asked *manifest.Task, d descent, fetch func(context.Context) error) error {
	if fetch == nil || asked.Repository.Commit == "" {
		return nil
	}
	f, err := m.store().Family(ctx, d.parent, d.root)
	if err == nil {
		err = d.admit(f)
	}
	if err != nil {
		return err
	}
	return fetch(ctx)
}

// below counts the subtasks below a task or session, among those of its tree.
func below(kin []store.Kin, id string) int {
	in := map[string]bool{id: true}
	for _, k := range kin { // a parent is older than its subtasks
		if in[k.Parent] {
			in[k.ID] = true
		}
	}
	return len(in) - 1
}

// Below returns the subtasks below a task or session, oldest first.
func (m *Manager) Below(ctx context.Context, id string) ([]store.Kin, error) {
	root := id
	if t, err := m.Get(ctx, id); err == nil {
		root = cmp.Or(t.Root, id)
	} else if fail.CodeOf(err) != fail.NotFound {
		return nil, err
	}
	kin, err := m.store().Kin(ctx, root)
	in := map[string]bool{id: true}
	return slices.DeleteFunc(kin, func(k store.Kin) bool {
		if in[k.Parent] {
			in[k.ID] = true
		}
		return !in[k.Parent]
	}), err
}

// create adds the row of a new task. d is nil unless it is a subtask.
func (m *Manager) create(ctx context.Context, row store.Task, text []byte, d *descent) (store.Task, error) {
	ev := store.NewEvent(EventPhase, PhaseChange{To: Pending, Desired: Run})
	if d == nil {
		return m.store().CreateTask(ctx, row, text, ev)
	}
	row.Parent, row.Root, row.Depth = d.parent, d.root, d.depth
	return m.store().CreateSubtask(ctx, row, text, ev, store.NewEvent(EventSubtask, Submitted{row.ID, row.Name}), d.admit)
}

// sessionRequest describes the session that the task needs for itself.
func (t Task) sessionRequest() (session.Request, error) {
	r, err := sessionRequest(t.Manifest, t.Status.Restricted)
	if sub := t.Status.Subtask; err == nil && sub != nil {
		r.Within, r.Branch, r.Secrets = sub.Within, t.Branch(), sub.Secrets
	}
	return r, err
}

// maySubmit reports whether the agent of a task may submit subtasks, as far as the settings
// and its manifest decide it.
func (m *Manager) maySubmit(t Task) bool {
	ref, err := repo.Parse(t.repository(), "/")
	if err != nil {
		return false
	}
	set, err := m.Sessions.Config.For(config.RepoKey(ref.Key), t.Manifest.VM.Profile)
	own := t.Manifest.Subtasks
	return err == nil && set.Subtasks.Allowed() && t.Depth < set.Subtasks.Depth.Number() &&
		(t.InSession() || own.Count > 0 && own.Depth > 0 && own.Running > 0)
}

// Branch returns the name of the branch that a subtask works on.
func (t Task) Branch() string { return "agent-" + t.ID }

// Cascade cancels the subtasks whose parents have ended, unless these let them continue, and
// those of parents that were cancelled or destroyed. It decides by the rows alone, so it may
// be interrupted and repeated.
func (m *Manager) Cascade(ctx context.Context) error {
	rows, err := m.store().Subtasks(ctx, Unended())
	if err != nil {
		return err
	}
	ended := map[string]bool{}
	for _, row := range rows {
		t, err := read(row, nil)
		if err != nil {
			return err
		}
		if t.Desired != Run {
			continue
		}
		end, err := m.endedAbove(ctx, t, ended)
		if err != nil {
			return err
		}
		if end {
			if _, err := m.SetDesired(ctx, t, Cancel, Client{}); err != nil {
				return err
			}
		}
	}
	return nil
}

// endedAbove reports whether what is above a subtask has ended in a way that ends the subtask.
// It remembers the answers for parents in ended.
func (m *Manager) endedAbove(ctx context.Context, t Task, ended map[string]bool) (end bool, err error) {
	if is, known := ended[t.Parent]; known {
		return is, nil
	}
	defer func() { ended[t.Parent] = end }()
	p, err := m.Get(ctx, t.Parent)
	if fail.CodeOf(err) == fail.NotFound {
		s, err := m.Sessions.Get(ctx, t.Parent)
		return s.Desired == session.Gone || s.Phase == session.Gone || s.Phase == session.Destroying, err
	}
	switch {
	case err != nil:
		return false, err
	case p.Desired != Run, p.Phase == Cancelled:
		return true, nil
	case p.Phase.Over() && p.Manifest.Subtasks.Orphans != manifest.KeepOrphans:
		return true, nil
	case p.Parent == "":
		return false, nil
	}
	return m.endedAbove(ctx, p, ended)
}
