package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"iter"

	"github.com/nats-io/nats.go/jetstream"
)

// Kind says what an entry of a task's log is about.
type Kind string

// The kinds of entries.
const (
	Submitted Kind = "submit"  // the first entry: the manifest
	Claimed   Kind = "claim"   // the writer runs the task from now on; its Seq is the fence
	Reported  Kind = "events"  // events of the task, and its state after them
	Requested Kind = "request" // a user wants the task to be cancelled or destroyed
	Released  Kind = "release" // the task's host was lost
	Stored    Kind = "stored"  // the cluster has the files of the task, which has ended
)

// Entry is one entry in the log of a task.
type Entry struct {
	Task  string          `json:"-"` // Append sets it
	Seq   uint64          `json:"-"` // position in the cluster's log; Append sets it
	Host  string          `json:"-"` // the writer; Append sets it
	Kind  Kind            `json:"kind"`
	Fence uint64          `json:"fence,omitempty"` // Seq of the claim under which it was written; 0 without one
	Data  json.RawMessage `json:"data,omitempty"`

	Err error `json:"-"` // ErrDamaged, wrapped: only Task and Seq are known
}

// TaskLog is the record of all tasks of a cluster: a sequence of entries for each task. Its
// methods may be called concurrently.
type TaskLog struct{ records records }

const taskStream = "TASKS"

// OpenTaskLog opens the log, and creates it on that many cores if it does not exist. It is limited
// to size bytes.
func OpenTaskLog(ctx context.Context, js jetstream.JetStream, host string, replicas int, size int64) (*TaskLog, error) {
	r, err := openRecords(ctx, js, host, "task.", jetstream.StreamConfig{Name: taskStream, Replicas: replicas, MaxBytes: size, DenyDelete: true})
	return &TaskLog{r}, err
}

// Append adds an entry to a task's log if the latest one there has the sequence number after, which
// is 0 for a log without entries. It returns the number of the new entry, or ErrConflict, wrapped,
// if another entry was added first. It tries until ctx ends; then it is unknown whether the
// entry was added.
func (l *TaskLog) Append(ctx context.Context, task string, e Entry, after uint64) (uint64, error) {
	return l.records.append(ctx, task, e, after)
}

// Last returns the latest entry of a task, or ErrNone, wrapped. It may be outdated: only Append
// decides. Like all entries that are read, it may be damaged.
func (l *TaskLog) Last(ctx context.Context, task string) (Entry, error) {
	return entry(l.records.last(ctx, task))
}

// Entries yields the entries of a task after a sequence number, up to now. An error is the last item.
func (l *TaskLog) Entries(ctx context.Context, task string, after uint64) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for {
			e, err := entry(l.records.from(ctx, task, after+1))
			if errors.Is(err, ErrNone) || !yield(e, err) || err != nil {
				return
			}
			after = e.Seq
		}
	}
}

// Latest yields the latest entry of every task, up to now. An error is the last item.
func (l *TaskLog) Latest(ctx context.Context) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		for r, err := range l.records.each(ctx) {
			if !yield(entry(r, err)) || err != nil {
				return
			}
		}
	}
}

// Follow yields the entries of all tasks after a sequence number, in order and several at a time, and
// then waits for new ones until ctx ends. An error is the last item.
func (l *TaskLog) Follow(ctx context.Context, after uint64) iter.Seq2[[]Entry, error] {
	return func(yield func([]Entry, error) bool) {
		for batch, err := range l.records.follow(ctx, after) {
			entries := make([]Entry, len(batch))
			for i, r := range batch {
				if err == nil {
					entries[i], err = entry(r, r.Err)
				}
			}
			if !yield(entries, err) || err != nil {
				return
			}
		}
	}
}

func entry(r record, err error) (Entry, error) {
	e, err := body[Entry](r, err)
	if errors.Is(err, ErrDamaged) {
		return Entry{Task: r.Key, Seq: r.Seq, Host: r.Host, Err: err}, nil
	}
	e.Task, e.Seq, e.Host = r.Key, r.Seq, r.Host
	return e, err
}
