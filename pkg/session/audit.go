package session

import (
	"cmp"
	"context"
	"maps"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

func (m *Manager) requestedBy(ctx context.Context) RequestedBy {
	return RequestedBy{Actor: m.Actor, Trace: traceid.ID(ctx)}
}

// audit records what was done, or that err prevented it.
func (m *Manager) audit(ctx context.Context, what audit.Type, actor, resource string, err error, details map[string]any) {
	if m.Audit == nil {
		return
	}
	if err != nil {
		details["code"], details["error"] = fail.CodeOf(err).String(), err
	}
	m.Audit(ctx, audit.Record{Type: what, Actor: cmp.Or(actor, "keeper"), Resource: resource, Outcome: audit.OutcomeOf(err), Details: details})
}

// auditWorkspace records a change of a workspace. s is the session that has it, if that matters.
func (m *Manager) auditWorkspace(ctx context.Context, what audit.Type, name string, s Session, err error) {
	if name == "" {
		return
	}
	details := map[string]any{}
	if s.ID != "" {
		details = s.details(details)
	}
	m.audit(ctx, what, m.Actor, "workspace:"+name, err, details)
}

// auditVM records a change to the VM of s.
func (w *Worker) auditVM(ctx context.Context, what audit.Type, s Session, err error) {
	w.Sessions.audit(ctx, what, s.Status.RequestedBy.Actor, "vm:"+s.VM(), err, s.details(map[string]any{"from": s.Status.From, "accel": s.Status.Accel}))
}

// details returns the fields that identify the session, together with those in more.
func (s Session) details(more map[string]any) map[string]any {
	d := map[string]any{"session": s.ID, "repo": s.RepoKey}
	if s.Task != "" {
		d["task"] = s.Task
	}
	maps.Copy(d, more)
	maps.DeleteFunc(d, func(_ string, v any) bool { return v == "" })
	return d
}
