package lifecycle

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// These are the kinds of events that every keeper reports.
const (
	EventStep    = "step"    // Step
	EventWarning = "warning" // Warning
)

// stepProgress is the state of a step whose detail changed. The detail may come from
// the guest.
const stepProgress = "progress"

// Step is one step of the work: State is start, progress, done, failed or skip.
type Step struct {
	Name      string `json:"name"`
	State     string `json:"state"`
	Detail    string `json:"detail,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
}

// Elapsed returns the time since the step began.
func (s Step) Elapsed() time.Duration { return time.Duration(s.ElapsedMS) * time.Millisecond }

// Warning is a problem that the user should know about and that does not stop the
// work.
type Warning struct {
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// A Reporter appends events that change nothing in a row. If one cannot be written, the
// work continues: the phase change that follows uses the same store and will fail loudly.
type Reporter struct {
	Store  *store.Store
	Log    *slog.Logger
	Redact *secret.Redactor // may be nil

	// AppendFromGuest appends an event that a guest can cause as often as it likes. Only
	// the progress of steps needs it.
	AppendFromGuest func(ctx context.Context, subject string, ev store.Event) error
}

// Text returns s as rows and events may hold it: without secrets, safe to print, and
// short.
func (r Reporter) Text(s string) string { return r.Redact.Line(s, 2000) }

// Append appends an event of a kind with its data.
func (r Reporter) Append(ctx context.Context, subject, kind string, data any) {
	r.log(ctx, kind, r.Store.Append(ctx, subject, store.NewEvent(kind, data)))
}

func (r Reporter) log(ctx context.Context, kind string, err error) {
	if err != nil {
		r.Log.ErrorContext(ctx, "failed to append event", "kind", kind, "error", err)
	}
}

// Warn reports a Warning.
func (r Reporter) Warn(ctx context.Context, subject, hint, format string, args ...any) {
	r.Append(ctx, subject, EventWarning, Warning{Message: r.Text(fmt.Sprintf(format, args...)), Hint: hint})
}

// Step runs f as a named step and reports it.
func (r Reporter) Step(ctx context.Context, subject, name string, f func(context.Context, vm.Progress) error) error {
	began := time.Now()
	keep := context.WithoutCancel(ctx)
	now := func(state, detail string) Step {
		return Step{Name: name, State: state, Detail: r.Text(detail), ElapsedMS: time.Since(began).Milliseconds()}
	}
	r.Append(keep, subject, EventStep, now("start", ""))
	var last time.Time
	var lastMsg string
	err := f(ctx, func(msg string) {
		// A download reports progress often; a person reads a few lines a second.
		if msg == lastMsg || time.Since(last) < 200*time.Millisecond {
			return
		}
		last, lastMsg = time.Now(), msg
		r.log(keep, EventStep, r.AppendFromGuest(keep, subject, store.NewEvent(EventStep, now(stepProgress, msg))))
	})
	if err != nil {
		if ctx.Err() == nil {
			r.Append(keep, subject, EventStep, now("failed", err.Error()))
		}
		return fmt.Errorf("%s: %w", name, err)
	}
	r.Append(keep, subject, EventStep, now("done", ""))
	return nil
}
