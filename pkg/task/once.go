package task

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Once identifies a submission that its client may repeat because it does not know
// whether it was accepted. However often it is repeated, it makes one task. Each
// Actor has its own keys.
type Once struct {
	Key    string
	Digest string // of what was asked for; a different one under the same key is an error
}

// ErrKeyReused means that the actor used the key of a Once for another request. It is
// returned wrapped.
var ErrKeyReused = errors.New("the key was used for another request")

// Check compares a repetition with the first request.
func (o Once) Check(first store.Request) error {
	if first.Digest != o.Digest {
		return fail.New(fail.Conflict, "%w", ErrKeyReused).WithHint("use another Idempotency-Key")
	}
	return nil
}

// repeated finds the task of an earlier, identical submission. It returns the task as
// it was when it was accepted, and the notices.
func (m *Manager) repeated(ctx context.Context, o Submission) (t Task, notices []string, found bool, err error) {
	if o.Once == nil {
		return Task{}, nil, false, nil
	}
	first, found, err := m.store().Request(ctx, o.Actor, o.Once.Key)
	if err != nil || !found {
		return Task{}, nil, false, err
	}
	if err := o.Once.Check(first); err != nil {
		return Task{}, nil, false, err
	}
	t, err = m.Get(ctx, first.Subject)
	if fail.CodeOf(err) == fail.NotFound { // the request was not accepted
		return Task{}, nil, false, nil
	}
	if err == nil {
		err = json.Unmarshal(first.Notes, &notices)
	}
	return t.accepted(), notices, err == nil, err
}

// reserve returns the id for the task that is to be created.
func (m *Manager) reserve(ctx context.Context, o Submission, notices []string) (id string, err error) {
	id = ids.New()
	if o.Once == nil {
		return id, nil
	}
	notes, err := json.Marshal(notices)
	if err != nil {
		return "", err
	}
	kept, err := m.store().Reserve(ctx, store.Request{Actor: o.Actor, Key: o.Once.Key, Digest: o.Once.Digest, Subject: id, Notes: notes})
	if err != nil {
		return "", err
	}
	return kept.Subject, o.Once.Check(kept)
}

// accepted returns t as it was when it was accepted.
func (t Task) accepted() Task {
	t.Phase, t.Desired, t.StateChangedAt = Pending, Run, t.CreatedAt
	t.Status = Status{RetryOf: t.Status.RetryOf, Actor: t.Status.Actor, Trace: t.Status.Trace, Restricted: t.Status.Restricted, Repository: t.Status.Repository, Subtask: t.Status.Subtask}
	t.SetError("", "", "")
	if !t.InSession() {
		t.SessionID = ""
	}
	return t
}
