package task

import (
	"cmp"
	"context"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
)

// audit records what was asked of a task, or what became of it.
func (m *Manager) audit(ctx context.Context, what audit.Type, t Task) {
	if m.Sessions.Audit == nil {
		return
	}
	details := map[string]any{"name": t.Name, "repository": t.repository(), "agent": t.Manifest.Agent.Kind}
	r := audit.Record{Type: what, Actor: cmp.Or(t.Status.Actor, "keeper"), Resource: "task:" + t.ID, Outcome: audit.Success, Details: details}
	if o := t.Status.Outcome; o != nil {
		details["result"], details["reason"] = o.Result, o.Reason
		if what == audit.TaskFailed {
			r.Outcome = audit.Failure
		}
	}
	m.Sessions.Audit(ctx, r)
}

// ends maps the phases that are recorded when a task enters them.
var ends = map[Phase]audit.Type{
	Completed: audit.TaskCompleted, Failed: audit.TaskFailed, FailedPreserved: audit.TaskFailed, Cancelled: audit.TaskCancelled,
}
