package fleet

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Secrets are those secrets of the cluster's tasks that only the host can resolve on which a task was
// submitted. The host that runs the task asks for them, each time that a VM of the task starts. They
// are stored on neither host, nor in the cluster.
type Secrets struct {
	Tasks    *Tasks
	Exchange *cluster.Exchange
	Resolve  func(context.Context, []secret.Ref) (map[string]secret.Value, error)
	Audit    func(context.Context, audit.Record) // may be nil

	mu     sync.Mutex
	counts map[string]*count // by task
}

// count is how often the secrets of a task were given since a time.
type count struct {
	since time.Time
	n     int
}

// These limit how often the secrets of one task are given: each time, this host runs the commands that
// they are resolved with.
const (
	maxGiven   = 30
	givenEvery = time.Hour
)

// Get gets the secrets of a task that this host has, encoded by secret.Encode.
func (x *Secrets) Get(ctx context.Context, id string) ([]byte, error) {
	c, is, err := x.Tasks.Store.Claim(ctx, id)
	if err != nil {
		return nil, err
	}
	if !is || c.Fence == 0 {
		return nil, fail.New(fail.Conflict, "this host does not run task %s", id)
	}
	row, err := x.Tasks.Store.Task(ctx, id)
	if err != nil {
		return nil, err
	}
	sum, err := digest(row.Manifest)
	if err != nil {
		return nil, err
	}
	from, err := x.submitter(ctx, id)
	if err != nil {
		return nil, fail.New(fail.Host, "%w", err)
	}
	text, err := x.Exchange.Ask(ctx, from, cluster.SecretsRequest{Task: id, Fence: c.Fence, Manifest: sum})
	if err != nil {
		err = fail.New(fail.CodeOf(err), "host %s did not send the secrets: %w", from, err)
		if fail.HintOf(err) == "" {
			err = fail.New(fail.CodeOf(err), "%w", err).WithHint("agent-sessionizer cluster show %s", from)
		}
	}
	return text, err
}

// submitter returns the host on which a task was submitted. That host knows whether this is true.
func (x *Secrets) submitter(ctx context.Context, id string) (string, error) {
	for e, err := range x.Tasks.Tasks.Entries(ctx, id, 0) {
		return e.Host, err
	}
	return "", fmt.Errorf("task %s: %w", id, cluster.ErrNone)
}

// Give resolves the secrets of a task for the host that asks for them, and encodes them with
// secret.Encode. What it resolves comes from this host's own record of what its user submitted: every
// host can write to the cluster's log.
func (x *Secrets) Give(ctx context.Context, r cluster.SecretsRequest) ([]byte, error) {
	refs, err := x.permitted(ctx, r)
	if err != nil {
		x.Tasks.Log.WarnContext(ctx, "refused secrets to another host", "host", r.Host, "task", r.Task, "error", err)
		return nil, err
	}
	values, err := x.Resolve(ctx, refs)
	if failed, ok := errors.AsType[secret.Unresolved](err); ok {
		for name, err := range failed {
			failed[name] = fail.New(fail.CodeOf(err), "on host %s: %w", x.Tasks.Name, err).WithHint("%s", fail.HintOf(err))
		}
	} else if err != nil {
		err = fail.New(fail.CodeOf(err), "on host %s: %w", x.Tasks.Name, err).WithHint("%s", fail.HintOf(err))
	}
	if x.Audit != nil { // before they leave
		details := map[string]any{"fence": r.Fence, "host": r.Host, "secrets": slices.Sorted(maps.Keys(values))}
		if err != nil {
			details["code"], details["error"] = fail.CodeOf(err).String(), err.Error()
		}
		x.Audit(ctx, audit.Record{Type: audit.SecretsSent, Actor: "host:" + r.Host, Resource: "task:" + r.Task, Outcome: audit.OutcomeOf(err), Details: details})
	}
	return secret.Encode(values, err)
}

// permitted returns the secrets of a task that the host which asks for them may have.
func (x *Secrets) permitted(ctx context.Context, r cluster.SecretsRequest) ([]secret.Ref, error) {
	refuse := func(format string, args ...any) ([]secret.Ref, error) {
		return nil, fail.New(fail.Policy, format, args...)
	}
	c, _, err := x.Tasks.Store.Claim(ctx, r.Task)
	if err != nil {
		return nil, err
	}
	if !c.Submitted {
		return refuse("task %s was not submitted on host %s", r.Task, x.Tasks.Name)
	}
	s, err := x.Tasks.Get(ctx, r.Task)
	if err != nil {
		return nil, fail.New(fail.Host, "%w", err)
	}
	if s.Seq < r.Fence {
		return nil, fail.New(fail.Host, "the server of the cluster does not know the claim %d of task %s yet", r.Fence, r.Task)
	}
	if s.Host != r.Host || s.Fence != r.Fence || ended(task.Phase(s.Row.Phase)) {
		return refuse("host %s does not have task %s with the claim %d", r.Host, r.Task, r.Fence)
	}
	row, err := x.Tasks.Store.Task(ctx, r.Task)
	if err != nil {
		return nil, err
	}
	sum, err := digest(row.Manifest)
	if err != nil {
		return nil, err
	}
	if sum != r.Manifest {
		return refuse("host %s has another manifest of task %s than was submitted", r.Host, r.Task)
	}
	t, err := task.Decode(row)
	if err != nil {
		return nil, err
	}
	if p := t.Manifest.Placement; cmp.Or(p.Host, p.Labels[hostLabel], r.Host) != r.Host {
		return refuse("task %s is for another host", r.Task)
	}
	refs, err := task.SubmittersSecrets(t.Manifest)
	if err != nil {
		return nil, err
	}
	if !x.mayGive(r.Task, time.Now()) {
		return refuse("the secrets of task %s were sent %d times within %v", r.Task, maxGiven, givenEvery)
	}
	return refs, nil
}

// mayGive counts that the secrets of a task are given, and reports whether that is within the limit.
func (x *Secrets) mayGive(id string, now time.Time) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.counts == nil {
		x.counts = map[string]*count{}
	}
	maps.DeleteFunc(x.counts, func(_ string, c *count) bool { return now.Sub(c.since) >= givenEvery })
	if x.counts[id] == nil {
		x.counts[id] = &count{since: now}
	}
	x.counts[id].n++
	return x.counts[id].n <= maxGiven
}

// digest identifies a manifest, in whatever way its JSON is written.
func digest(manifest []byte) (string, error) {
	var is any
	d := json.NewDecoder(bytes.NewReader(manifest))
	d.UseNumber()
	err := d.Decode(&is)
	if err == nil {
		manifest, err = json.Marshal(is)
	}
	if err != nil {
		return "", fail.New(fail.Failure, "read a manifest: %w", err)
	}
	sum := sha256.Sum256(manifest)
	return hex.EncodeToString(sum[:]), nil
}
