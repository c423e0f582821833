// Package audit is the log of who did what to sessions and tasks, for those who
// have to answer for it: lines of JSON that are only ever added.
//
// A record is on the disk before Write returns. Whoever does a thing writes it before
// telling anybody that it is done: after a crash there may be two, and not none.
// Records have names of secrets, never values.
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
	"github.com/agent-sessionizer/agent-sessionizer/pkg/trace"
)

// Type is what was done.
type Type string

// The types.
const (
	TaskSubmitted     Type = "task_submitted"
	TaskCompleted     Type = "task_completed"
	TaskFailed        Type = "task_failed"
	TaskCancelled     Type = "task_cancelled"
	VMProvisioned     Type = "vm_provisioned"
	VMDestroyed       Type = "vm_destroyed"
	SecretAccessed    Type = "secret_accessed"
	SessionReconciled Type = "session_reconciled" // another keeper took the place of one that died
	OrphanRemoved     Type = "orphan_removed"
	TokenAdded        Type = "token_added"
	TokenRemoved      Type = "token_removed"
	ExecStarted       Type = "exec_started"
)

// Types are all of them.
func Types() []Type {
	return []Type{
		TaskSubmitted, TaskCompleted, TaskFailed, TaskCancelled, VMProvisioned, VMDestroyed, SecretAccessed,
		SessionReconciled, OrphanRemoved, TokenAdded, TokenRemoved, ExecStarted,
	}
}

// Outcome is how it went.
type Outcome string

// The outcomes.
const (
	Success Outcome = "success"
	Failure Outcome = "failure"
)

// OutcomeOf is that of what returned err.
func OutcomeOf(err error) Outcome {
	if err != nil {
		return Failure
	}
	return Success
}

// Record is one thing that was done.
type Record struct {
	Time     time.Time      `json:"timestamp"` // Write sets it
	Type     Type           `json:"type"`
	Actor    string         `json:"actor"`    // user:NAME, token:NAME, keeper, serve
	Resource string         `json:"resource"` // session:ID, task:ID, vm:NAME
	Outcome  Outcome        `json:"outcome"`
	TraceID  string         `json:"trace_id,omitempty"` // Write takes it from its context
	Details  map[string]any `json:"details,omitempty"`
}

// Log is an audit log. Safe for concurrent use: who comes while records are being
// written waits, and is written with all others that do so, at once.
type Log struct {
	Path      string           // of the file; old ones are beside it
	Retention time.Duration    // how long old ones are kept; 0 is for ever
	Redact    *secret.Redactor // may be nil

	turn sync.Mutex // held by who writes
	mu   sync.Mutex
	next *batch // of those who wait for the turn; the first of them writes it
}

// batch is records that are written at once.
type batch struct {
	lines   []byte
	written chan struct{} // closed when they are, or cannot be
	err     error
}

const (
	maxFile = 8 << 20 // of the file, then another is begun

	// A process may be stopped while it writes; nobody waits longer for it.
	maxWait = 10 * time.Second

	// What one record may take.
	maxText    = 1 << 10 // bytes of one text
	maxList    = 100     // items
	maxDepth   = 4
	maxDetails = 16 << 10
	maxRecord  = 64 << 10
)

// Write adds r. Processes may do so at the same time. What r tells of has
// happened, so that it is written though ctx be cancelled.
func (l *Log) Write(ctx context.Context, r Record) error {
	if !slices.Contains(Types(), r.Type) || r.Outcome != Success && r.Outcome != Failure {
		return fmt.Errorf("audit: a record of type %q with outcome %q", r.Type, r.Outcome)
	}
	r.Time = time.Now().UTC().Truncate(time.Millisecond)
	r.TraceID = trace.ID(ctx)
	r.Actor, r.Resource = l.text(r.Actor), l.text(r.Resource)
	details, err := l.details(r.Details)
	if err != nil {
		return fmt.Errorf("audit: details of %s: %w", r.Type, err)
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

// commit puts a line on the disk, with those of others who wait meanwhile.
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
		<-b.written // whoever is the first does not wait for ever
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

// encode is v on one line, with its end.
func encode(v any) ([]byte, error) {
	var line bytes.Buffer
	e := json.NewEncoder(&line)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return line.Bytes(), err
}

// text is one harmless, bounded line without secrets.
func (l *Log) text(s string) string { return l.Redact.Line(s, maxText) }

// details is text of all text in d. Whatever else d has becomes what JSON has.
func (l *Log) details(d map[string]any) (map[string]any, error) {
	if len(d) == 0 {
		return nil, nil
	}
	d = maps.Clone(d)
	for key, v := range d {
		if err, ok := v.(error); ok { // which would be {}
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

// Records are those in the log, oldest first. A line that is none is left out: one
// that is being written, or that somebody else has put there.
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

// read yields the records of one file, and reports whether more are wanted.
func read(f *os.File, yield func(Record, error) bool) (more bool, err error) {
	in := bufio.NewReaderSize(f, maxRecord)
	for {
		line, err := in.ReadSlice('\n')
		whole := !errors.Is(err, bufio.ErrBufferFull)
		for errors.Is(err, bufio.ErrBufferFull) { // none of ours; its rest is none either
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
