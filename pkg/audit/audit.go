// Package audit keeps the log of who did what to sessions and tasks. The log is append-only
// lines of JSON.
//
// A record is on disk before Write returns. The actor writes it before reporting the action
// as done, so that after a crash a record may appear twice but is never missing. Records
// contain the names of secrets, never their values.
package audit

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// Type is the kind of action that a record describes.
type Type string

// The types of records.
const (
	TaskSubmitted     Type = "task_submitted"
	TaskCompleted     Type = "task_completed"
	TaskFailed        Type = "task_failed"
	TaskCancelled     Type = "task_cancelled"
	VMProvisioned     Type = "vm_provisioned"
	VMDestroyed       Type = "vm_destroyed"
	SecretAccessed    Type = "secret_accessed"
	SecretsSent       Type = "secrets_sent"       // to another host of the cluster
	SessionReconciled Type = "session_reconciled" // a new keeper replaced one that died
	OrphanRemoved     Type = "orphan_removed"
	TokenAdded        Type = "token_added"
	TokenRemoved      Type = "token_removed"
	ExecStarted       Type = "exec_started"
	LoginCertified    Type = "login_certified" // a user of another host may log in to a guest
	QuestionAnswered  Type = "question_answered"
	DashboardOpened   Type = "dashboard_opened"
	LeaseRenewed      Type = "lease_renewed"
	LeaseEnded        Type = "lease_ended" // a limit of a session's lifetime was reached

	CheckpointCreated  Type = "checkpoint_created"
	CheckpointRemoved  Type = "checkpoint_removed"
	CheckpointRestored Type = "checkpoint_restored"
	SessionForked      Type = "session_forked"

	WorkspaceCreated  Type = "workspace_created"
	WorkspaceAttached Type = "workspace_attached"
	WorkspaceDetached Type = "workspace_detached"
	WorkspaceResized  Type = "workspace_resized"
	WorkspaceDeleted  Type = "workspace_deleted"

	HostInvited Type = "host_invited" // to the cluster
	HostJoined  Type = "host_joined"
	HostDrained Type = "host_drained"
	HostRemoved Type = "host_removed"
	HostLeft    Type = "host_left"
)

// Types returns all types.
func Types() []Type {
	return []Type{
		TaskSubmitted, TaskCompleted, TaskFailed, TaskCancelled, VMProvisioned, VMDestroyed, SecretAccessed, SecretsSent,
		SessionReconciled, OrphanRemoved, TokenAdded, TokenRemoved, ExecStarted, LoginCertified, QuestionAnswered,
		DashboardOpened, LeaseRenewed, LeaseEnded, CheckpointCreated, CheckpointRemoved, CheckpointRestored,
		SessionForked, WorkspaceCreated, WorkspaceAttached, WorkspaceDetached, WorkspaceResized, WorkspaceDeleted,
		HostInvited, HostJoined, HostDrained, HostRemoved, HostLeft,
	}
}

// Outcome is whether the action succeeded.
type Outcome string

// The outcomes.
const (
	Success Outcome = "success"
	Failure Outcome = "failure"
)

// OutcomeOf returns the outcome of an action that returned err.
func OutcomeOf(err error) Outcome {
	if err != nil {
		return Failure
	}
	return Success
}

// Record describes one action.
type Record struct {
	Time     time.Time      `json:"timestamp"` // set by Write
	Type     Type           `json:"type"`
	Actor    string         `json:"actor"`    // user:NAME, token:NAME, keeper, serve
	Resource string         `json:"resource"` // session:ID, task:ID, vm:NAME
	Outcome  Outcome        `json:"outcome"`
	TraceID  string         `json:"trace_id,omitempty"` // taken by Write from its context
	Details  map[string]any `json:"details,omitempty"`
}

// Log is an audit log that is safe for concurrent use. It commits in groups: calls that
// arrive while records are being written wait, and their records are then written together.
type Log struct {
	Path      string           // of the current file; rotated files are beside it
	Retention time.Duration    // how long rotated files are kept; 0 means forever
	Redact    *secret.Redactor // may be nil

	turn sync.Mutex // held by the call that is writing
	mu   sync.Mutex
	next *batch // of the calls that wait for turn; the first of them writes it
}

// batch is a group of records that are written together.
type batch struct {
	lines   []byte
	written chan struct{} // closed when they were written, or could not be
	err     error
}

const (
	maxFile = 8 << 20 // size at which the file is rotated

	// A process can be stopped while it holds the file; others wait at most this long for
	// it.
	maxWait = 10 * time.Second

	// Bounds of one record.
	maxText    = 1 << 10 // bytes of one text
	maxList    = 100     // items
	maxDepth   = 4
	maxDetails = 16 << 10
	maxRecord  = 64 << 10
)

// Write appends r to the log. Several processes may write at the same time. The action has
// already happened, so r is written even if ctx is canceled.
func (l *Log) Write(ctx context.Context, r Record) error {
	if !slices.Contains(Types(), r.Type) || r.Outcome != Success && r.Outcome != Failure {
		return fmt.Errorf("write audit record: invalid type %q or outcome %q", r.Type, r.Outcome)
	}
	r.Time = time.Now().UTC().Truncate(time.Millisecond)
	r.TraceID = traceid.ID(ctx)
	r.Actor, r.Resource = l.text(r.Actor), l.text(r.Resource)
	details, err := l.details(r.Details)
	if err != nil {
		return fmt.Errorf("encode audit details of %s: %w", r.Type, err)
	}
	r.Details = details
	line, err := encode(r)
	if err != nil {
		return err
	}
	if err := l.commit(context.WithoutCancel(ctx), line); err != nil {
		return fail.New(fail.Host, "write the audit log: %w", err)
	}
	return nil
}

// commit puts a line on disk, together with the lines of calls that arrive while it waits
// its turn.
func (l *Log) commit(ctx context.Context, line []byte) error {
	l.mu.Lock()
	b := l.next
	first := b == nil
	if first {
		b = &batch{written: make(chan struct{})}
		l.next = b
	}
	b.lines = append(b.lines, line...)
	l.mu.Unlock()
	if !first {
		<-b.written // the first does not wait forever
		return b.err
	}
	l.turn.Lock()
	defer l.turn.Unlock()
	l.mu.Lock()
	l.next = nil
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	b.err = logfile.Commit(ctx, l.Path, logfile.Limits{Max: maxFile, For: l.Retention}, b.lines)
	close(b.written)
	return b.err
}

// encode returns v as one line of JSON, including the newline.
func encode(v any) ([]byte, error) {
	var line bytes.Buffer
	e := json.NewEncoder(&line)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return line.Bytes(), err
}

// text returns s as one harmless, bounded line without secrets.
func (l *Log) text(s string) string { return l.Redact.Line(s, maxText) }

// details returns d as JSON decodes it, with text applied to all its strings.
func (l *Log) details(d map[string]any) (map[string]any, error) {
	if len(d) == 0 {
		return nil, nil
	}
	d = maps.Clone(d)
	for key, v := range d {
		if err, ok := v.(error); ok { // which JSON would encode as {}
			d[key] = err.Error()
		}
	}
	raw, err := json.Marshal(d)
	if err != nil {
		return nil, err
	}
	var all map[string]any
	in := json.NewDecoder(bytes.NewReader(raw))
	in.UseNumber()
	if err := in.Decode(&all); err != nil {
		return nil, err
	}
	clean, _ := l.clean(all, 0).(map[string]any)
	line, err := encode(clean)
	if err != nil || len(line) <= maxDetails {
		return clean, err
	}
	return map[string]any{"truncated": true}, nil
}

func (l *Log) clean(v any, depth int) any {
	if depth > maxDepth {
		return "…"
	}
	switch v := v.(type) {
	case string:
		return l.text(v)
	case []any:
		if len(v) > maxList {
			v = append(v[:maxList:maxList], "…")
		}
		for i := range v {
			v[i] = l.clean(v[i], depth+1)
		}
		return v
	case map[string]any:
		clean := make(map[string]any, len(v))
		for key, value := range v {
			clean[l.text(key)] = l.clean(value, depth+1)
		}
		return clean
	}
	return v
}

// Records yields the records of the log, oldest first. It skips lines that are not records:
// one that is still being written, or one that another program added.
func (l *Log) Records() iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		files, err := logfile.Open(l.Path)
		if err != nil {
			yield(Record{}, fail.New(fail.Host, "open the audit log: %w", err))
			return
		}
		defer func() {
			for _, f := range files {
				_ = f.Close() // only read
			}
		}()
		for _, f := range files {
			more, err := read(f, yield)
			if err != nil {
				yield(Record{}, fail.New(fail.Host, "read the audit log: %w", err))
				return
			}
			if !more {
				return
			}
		}
	}
}

// read yields the records of one file, and reports whether the caller wants more.
func read(f *os.File, yield func(Record, error) bool) (more bool, err error) {
	in := bufio.NewReaderSize(f, maxRecord)
	for {
		line, err := in.ReadSlice('\n')
		whole := !errors.Is(err, bufio.ErrBufferFull)
		for errors.Is(err, bufio.ErrBufferFull) { // too long to be a record, and so is its rest
			_, err = in.ReadSlice('\n')
		}
		switch {
		case errors.Is(err, io.EOF):
			return true, nil
		case err != nil:
			return false, err
		}
		var r Record
		if !whole || json.Unmarshal(line, &r) != nil || r.Type == "" {
			continue
		}
		if !yield(r, nil) {
			return false, nil
		}
	}
}
