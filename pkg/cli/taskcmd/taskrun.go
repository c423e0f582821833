package taskcmd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// tailEvery is the interval at which a growing log is read.
const tailEvery = 200 * time.Millisecond

// runTask shows the events of t until it ends, and returns its outcome as an error with an
// exit code. Interrupting it stops the display, not the task.
func runTask(ctx context.Context, a *app.App, h ops.Host, t task.View, asJSON bool) error {
	a.Con.Say("task %s: %s", t.ID, t.Name)
	var copies sync.WaitGroup
	if t.Agent == string(manifest.Command) && !asJSON {
		copies.Go(func() { copyOutput(ctx, h, t.ID, "stdout", a.Con.Out) })
		copies.Go(func() { copyOutput(ctx, h, t.ID, "stderr", a.Con.Err) })
	}
	t, err := followTask(ctx, a, h, t, func(cur task.View) bool { return cur.State.Over() }, !asJSON)
	if err != nil {
		return err
	}
	copies.Wait()
	if t.Host != "" && t.Agent == string(manifest.Command) && !asJSON {
		if err := printStored(ctx, a, h, t); err != nil {
			a.Con.Say("the output of task %s is not shown: %s", t.ID, termtext.Line(err.Error()))
		}
	}
	if asJSON {
		if err := a.Con.JSON(t); err != nil {
			return err
		}
	}
	return taskEnd(a, h, t)
}

// storedWait is how long a command waits until the output of a task of another host is in the cluster.
const storedWait = 30 * time.Second

// printStored prints the output of a task that has ended on another host of the cluster.
func printStored(ctx context.Context, a *app.App, h ops.Host, t task.View) error {
	h, err := a.TaskHost(h, t)
	if err != nil {
		return err
	}
	for _, out := range []struct {
		stream string
		w      io.Writer
	}{{"stdout", a.Con.Out}, {"stderr", a.Con.Err}} {
		r, err := h.Read(ctx, ops.File{Task: t.ID, Stream: out.stream})
		for end := time.Now().Add(storedWait); fail.CodeOf(err) == fail.Conflict && time.Now().Before(end) && ctx.Err() == nil; {
			time.Sleep(tailEvery)
			r, err = h.Read(ctx, ops.File{Task: t.ID, Stream: out.stream})
		}
		if err != nil {
			return err
		}
		if err := errors.Join(app.CopyClean(out.w, r), r.Close()); err != nil {
			return err
		}
	}
	return nil
}

// copyOutput prints an output of a task until it has ended. An error is in the log only: the
// task's end is reported in any case.
func copyOutput(ctx context.Context, h ops.Host, id, stream string, w io.Writer) {
	r, err := h.Read(ctx, ops.File{Task: id, Stream: stream, Follow: true})
	if err == nil {
		err = errors.Join(app.CopyClean(w, r), r.Close())
	}
	if err != nil && ctx.Err() == nil {
		slog.WarnContext(ctx, "failed to print output", "task", id, "stream", stream, "error", err)
	}
}

// taskEnd prints the end of a task and returns its outcome as an error.
func taskEnd(a *app.App, h ops.Host, t task.View) error {
	dir := taskDir(h, t)
	code := t.Outcome.ExitStatus(t.State)
	if code == 0 {
		a.Con.Say("task %s: %s, %d artifacts in %s", t.ID, t.State, t.Artifacts, dir)
		return nil
	}
	why := string(t.State)
	if o := t.Outcome; o != nil && o.Reason != "" {
		why += ": " + o.Reason
	}
	err := fail.New(code, "task %s: %s; its logs are in %s", t.ID, why, dir)
	switch {
	case t.State == task.FailedPreserved:
		return err.WithHint("agent-sessionizer ssh %s, and then: agent-sessionizer task destroy %s", t.Session, t.ID)
	case t.Outcome != nil && t.Outcome.Hint != "":
		return err.WithHint("%s", t.Outcome.Hint)
	}
	return err.WithHint("agent-sessionizer task logs %s", t.ID)
}

// followTask shows the steps of a task and of its session until done returns true.
func followTask(ctx context.Context, a *app.App, h ops.Host, t task.View, done func(task.View) bool, talk bool) (task.View, error) {
	view := a.Con.Steps()
	defer view.Close()
	show := taskPrinter{view: view, talk: talk && t.Agent != string(manifest.Command)}
	tick := time.NewTicker(tailEvery)
	defer tick.Stop()
	seq, sessionSeq := store.Oldest, store.Oldest // prune removes old events
	if t.InSession {                              // earlier events of the session do not concern the task
		now, err := ops.GetProgress.On(ctx, h, ops.SessionPath{ID: t.Session})
		if err != nil {
			return t, interrupted(ctx, t, err)
		}
		sessionSeq = now.Newest
	}
	looked := time.Now()
	for {
		cur, err := ops.GetTask.On(ctx, h, ops.TaskPath{ID: t.ID}) // read before the events, so that they include its last one
		if err != nil {
			return t, interrupted(ctx, t, err)
		}
		t = cur
		for of, after := range map[ops.Subject]*int64{ops.Task(t.ID): &seq, ops.Session(t.Session): &sessionSeq} {
			if of.ID == "" {
				continue
			}
			for ev, err := range h.Events(ctx, of, *after, false) {
				if err != nil {
					return t, interrupted(ctx, t, err)
				}
				*after = ev.Seq
				show.event(ev)
			}
		}
		if done(t) {
			return t, nil
		}
		if time.Since(looked) > app.Keeperless {
			looked = time.Now()
			if err := tend(ctx, h); err != nil {
				return t, interrupted(ctx, t, err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return t, interrupted(ctx, t, ctx.Err())
		}
	}
}

func interrupted(ctx context.Context, t task.View, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return fail.New(fail.Interrupted, "task %s continues in the background", t.ID).
		WithHint("agent-sessionizer task logs -f %[1]s, or to cancel it: agent-sessionizer task cancel %[1]s", t.ID)
}

// taskPrinter shows the events of a task and of its session.
type taskPrinter struct {
	view *console.StepView
	talk bool // show what the agent says and does
}

func (s taskPrinter) event(ev store.Event) {
	switch ev.Kind {
	case task.EventStep: // the session's steps have the same kind
		var st lifecycle.Step
		if json.Unmarshal(ev.Data, &st) == nil {
			s.view.Update(console.Step{Name: st.Name, State: st.State, Detail: st.Detail, Elapsed: st.Elapsed()})
		}
	case task.EventWarning:
		var w lifecycle.Warning
		if json.Unmarshal(ev.Data, &w) == nil {
			s.view.Say("warning: %s", w.Message)
			if w.Hint != "" {
				s.view.Say("hint: %s", w.Hint)
			}
		}
	case task.EventRetry:
		var r task.Retrying
		if json.Unmarshal(ev.Data, &r) == nil {
			s.view.Say("%s; try %d of %d in %v", r.Error, r.Try, r.Most, time.Duration(r.DelayMS)*time.Millisecond)
		}
	case task.EventRestart:
		var r task.Restart
		if json.Unmarshal(ev.Data, &r) == nil {
			s.view.Say("%s, restarting the agent (%s)", r.Reason, r.What)
		}
	case task.EventHang:
		var h task.Hang
		if json.Unmarshal(ev.Data, &h) == nil {
			s.view.Say("warning: the agent may be stuck: %s for %v", h.Sign, (time.Duration(h.SinceMS) * time.Millisecond).Round(time.Second))
		}
	case task.EventTool, task.EventMessage, task.EventError:
		var c agent.Change
		if s.talk && json.Unmarshal(ev.Data, &c) == nil {
			s.view.Say("%s", changeLine(c))
		}
	}
}

func changeLine(c agent.Change) string {
	if c.Kind == task.EventTool {
		return fmt.Sprintf("  › %s %s", c.Name, c.Text)
	}
	return c.Text
}

type taskLogsOptions struct {
	follow, json bool
	of           string
}

func newTaskLogsCmd(a *app.App) *cobra.Command {
	o := taskLogsOptions{of: "stdout"}
	cmd := &cobra.Command{
		Use: "logs TASK", Short: "Show a task's output, events or keeper log",
		Example: `  agent-sessionizer task logs -f 4f2a
  agent-sessionizer task logs --of events --json 4f2a
  agent-sessionizer task logs --of keeper 4f2a`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: completeTasks(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runTaskLogs(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "keep printing until the task has ended")
	cmd.Flags().BoolVar(&o.json, "json", false, "print events as JSON, one per line (with --of events)")
	cmd.Flags().StringVar(&o.of, "of", o.of, "`NAME` of the log: stdout, stderr, events or keeper")
	return cmd
}

func runTaskLogs(ctx context.Context, a *app.App, o taskLogsOptions, what string) error {
	h, t, err := findTask(ctx, a, what)
	if err != nil {
		return err
	}
	switch o.of {
	case "events":
		return taskEvents(ctx, a, h, t, o)
	case "keeper":
		return keeperLog(ctx, a, h, t, o)
	case "stdout", "stderr":
	default:
		return fail.New(fail.Usage, "unknown log %q: must be stdout, stderr, events or keeper", o.of)
	}
	if h, err = a.TaskHost(h, t); err != nil {
		return err
	}
	r, err := h.Read(ctx, ops.File{Task: t.ID, Stream: o.of, Follow: o.follow})
	if err != nil {
		return err
	}
	defer r.Close()
	first := bufio.NewReader(r)
	if _, err := first.Peek(1); err == io.EOF && !o.follow { //nolint:errorlint // Peek's own error
		a.Con.Say("no output yet: task %s is %s", t.ID, t.State)
	}
	return app.CopyClean(a.Con.Out, first)
}

// keeperLog prints the log of a task's keeper, which only its host has.
func keeperLog(ctx context.Context, a *app.App, h ops.Host, t task.View, o taskLogsOptions) error {
	e, ok := h.(ops.Engine)
	if !ok {
		return fail.New(fail.Usage, "the keeper's log of task %s is only on its host", t.ID)
	}
	if _, err := e.TaskWithFiles(ctx, t.ID); err != nil {
		return err
	}
	path := e.Tasks.Dir(t.ID).KeeperLog()
	if o.follow {
		r := e.Follow(ctx, t.ID, path)
		defer r.Close()
		return app.CopyClean(a.Con.Out, r)
	}
	over := make(chan struct{})
	close(over)
	return logfile.Tail(ctx, path, 0, over, func(_ int64, data []byte) error { return app.CopyClean(a.Con.Out, bytes.NewReader(data)) })
}

// taskEvents prints the events of a task.
func taskEvents(ctx context.Context, a *app.App, h ops.Host, t task.View, o taskLogsOptions) error {
	seq := store.Oldest // prune removes old events
	for {
		cur, err := ops.GetTask.On(ctx, h, ops.TaskPath{ID: t.ID})
		if err != nil {
			return err
		}
		for ev, err := range h.Events(ctx, ops.Task(t.ID), seq, false) {
			if err != nil {
				return err
			}
			seq = ev.Seq
			if o.json {
				err = a.JsonLine(ev)
			} else {
				a.Printf("%s  %-10s %s\n", ev.At.Local().Format("15:04:05.000"), ev.Kind, termtext.Line(string(ev.Data)))
			}
			if err != nil {
				return err
			}
		}
		if !o.follow || cur.State.Over() {
			return nil
		}
		select {
		case <-time.After(tailEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
