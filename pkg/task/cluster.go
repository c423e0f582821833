package task

import (
	"context"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// A host of a cluster writes what its users want into its store, as a host alone does. The cluster's
// part of serve (package fleet) sends it from there, and stores what the cluster has. So all of
// this works while the host is cut off.

// clusterWait limits the wait for what other hosts must know. Without an answer, it is sent later.
const clusterWait = 10 * time.Second

const unsent = "the cluster does not answer: the task is accepted, and is sent to the cluster once it does"

// place returns the Host of a new task: "" if it can run only on this host.
func (m *Manager) place(ctx context.Context, asked *manifest.Task, under *descent) (string, error) {
	l, err := m.store().Lease(ctx)
	if err != nil || l.Incarnation == "" {
		return "", err
	}
	field, bound, err := bound(asked, under)
	if err != nil || !bound {
		return store.Waiting, err
	}
	if p := asked.Placement; p.Host != "" || p.Arch != "" || len(p.Labels) > 0 {
		return "", asked.Refuse(manifest.Fault{Field: "placement", Err: fail.New(fail.Usage, "the task can run only on this host, because of %s", field).
			WithHint("leave placement out")})
	}
	return "", nil
}

// bound reports whether a task can run only on this host, and the field of its manifest that says so.
func bound(asked *manifest.Task, under *descent) (field string, is bool, err error) {
	switch {
	case under != nil:
		return "the parent", true, nil
	case asked.VM.Session != "":
		return "vm.session", true, nil
	case asked.VM.Workspace != "":
		return "vm.workspace", true, nil
	}
	ref, err := repo.Parse(asked.Repository.URL, "/")
	return "repository.url", ref.IsLocal(), err
}

// CheckShared returns an error if a task in the cluster's log is not one that its hosts may run: a host
// sends none there that needs a directory, a session, a workspace or a parent.
func CheckShared(row store.Task) error {
	t, err := Decode(row)
	if err != nil {
		return err
	}
	if t.Parent != "" || t.Status.Subtask != nil || t.Phase == Pending && t.SessionID != "" {
		return fail.New(fail.Policy, "task %s belongs to another task or a session", row.ID)
	}
	field, is, err := bound(t.Manifest, nil)
	if err == nil && is {
		err = fail.New(fail.Policy, "task %s can run only where it was submitted, because of %s", row.ID, field)
	}
	return err
}

// SubmittersSecrets returns the references of a manifest that only the host can resolve on which the task
// was submitted.
func SubmittersSecrets(m *manifest.Task) (refs []secret.Ref, err error) {
	for _, s := range m.Secrets {
		ref, err := secret.ParseRef(s.Name, s.Ref())
		if err != nil {
			return nil, err
		}
		if ref.Kind().OfSubmitter() {
			refs = append(refs, ref)
		}
	}
	return refs, nil
}

// leaveToSubmitter makes the host resolve secrets on which a task of the cluster was submitted, where
// only that host can. Nothing that another host wrote may name a file or a command of this one.
func (m *Manager) leaveToSubmitter(ctx context.Context, id string, r *session.Request) error {
	c, is, err := m.store().Claim(ctx, id)
	if err != nil || !is || c.Submitted {
		return err
	}
	for name, one := range r.Secrets {
		// A manifest in the cluster's log may also name the secrets of another task.
		if kind := (secret.Ref{Source: one.From}).Kind(); kind.OfSubmitter() || kind == secret.Submitter {
			one.From = secret.SubmitterOf(id)
			r.Secrets[name] = one
		}
	}
	return nil
}

// checkRetryable refuses to submit a task of another host here, if that would resolve its secrets with
// what this host has.
func (m *Manager) checkRetryable(ctx context.Context, t Task) error {
	c, is, err := m.store().Claim(ctx, t.ID)
	if err != nil || !is || c.Submitted {
		return err
	}
	refs, err := SubmittersSecrets(t.Manifest)
	if err == nil && len(refs) > 0 {
		err = fail.New(fail.Conflict, "only the host on which task %s was submitted has its secret %s", t.ID, refs[0].Name).
			WithHint("agent-sessionizer task retry %s # on that host", t.ID)
	}
	return err
}

// awaitCluster waits until the task is as done wants it. It returns false if that takes too long.
func (m *Manager) awaitCluster(ctx context.Context, id string, done func(store.Claim, store.Task) bool) bool {
	ctx, cancel := context.WithTimeout(ctx, clusterWait)
	defer cancel()
	w := m.store().Watch()
	defer w.Close()
	for {
		changed := w.Changed()
		c, _, err := m.store().Claim(ctx, id)
		if err != nil {
			return false
		}
		row, err := m.store().Task(ctx, id)
		if err != nil {
			return false
		}
		if done(c, row) {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// wish records what a user wants of a task that another host has, or none yet, and waits until
// the cluster knows it.
func (m *Manager) wish(ctx context.Context, t Task, desired DesiredPhase) (Task, error) {
	if t.Phase.Over() && (desired == Cancel || t.Phase != FailedPreserved) || t.Desired == desired || t.Desired == Destroyed {
		return t, nil
	}
	if err := m.store().AddWish(ctx, store.Wish{Task: t.ID, Desired: string(desired)}); err != nil {
		return t, err
	}
	if !m.awaitCluster(ctx, t.ID, func(_ store.Claim, row store.Task) bool {
		return row.Desired == string(desired) || row.Desired == string(Destroyed) || Phase(row.Phase).Over()
	}) {
		return t, fail.New(fail.Host, "the cluster does not answer: the request for task %s is sent once it does", t.ID).
			WithHint("agent-sessionizer cluster show")
	}
	return m.Get(ctx, t.ID)
}
