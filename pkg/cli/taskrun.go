package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// tailEvery is the interval at which a growing log is read.
const tailEvery = 200 * time.Millisecond

// runTask shows the events of t until it ends, and returns its outcome as an error with an
// exit code. Interrupting it stops the display, not the task.
func (a *app) runTask(ctx context.Context, m *task.Manager, t task.Task, asJSON bool) error {
	a.con.Say("task %s: %s", t.ID, t.Name)
	raw := t.Manifest.Agent.Kind == manifest.Command && !asJSON
	var tails sync.WaitGroup
	tctx, done := context.WithCancel(ctx)
	defer func() { done(); tails.Wait() }()
	if raw {
		d := m.Dir(t.ID)
		tails.Go(func() { a.tail(tctx, d.Stdout(), a.con.Out) })
		tails.Go(func() { a.tail(tctx, d.Stderr(), a.con.Err) })
	}
	t, err := a.followTask(ctx, m, t, func(cur task.Task) bool { return cur.Phase.Over() }, !asJSON)
	if err != nil {
		return err
	}
	done()
	tails.Wait()
	if asJSON {
		if err := a.con.JSON(t.View()); err != nil {
			return err
		}
	}
	return a.taskEnd(m, t)
}

// taskEnd prints the end of a task and returns its outcome as an error.
func (a *app) taskEnd(m *task.Manager, t task.Task) error {
	dir := string(m.Dir(t.ID))
	code := t.Status.Outcome.ExitStatus(t.Phase)
	if code == 0 {
		a.con.Say("task %s: %s, %d artifacts in %s", t.ID, t.Phase, len(t.Status.Artifacts), dir)
		return nil
	}
	why := string(t.Phase)
	if o := t.Status.Outcome; o != nil && o.Reason != "" {
		why += ": " + o.Reason
	}
	err := fail.New(code, "task %s: %s; its logs are in %s", t.ID, why, dir)
	switch {
	case t.Phase == task.FailedPreserved:
		return err.WithHint("agent-sessionizer ssh %s, and then: agent-sessionizer task destroy %s", t.SessionID, t.ID)
	case t.Status.Outcome != nil && t.Status.Outcome.Hint != "":
		return err.WithHint("%s", t.Status.Outcome.Hint)
	}
	return err.WithHint("agent-sessionizer task logs %s", t.ID)
}

// waitTask waits until a desired phase has been reached.
func (a *app) waitTask(ctx context.Context, m *task.Manager, t task.Task, desired task.DesiredPhase) (task.Task, error) {
	return a.followTask(ctx, m, t, func(cur task.Task) bool {
		return cur.Phase.Over() && (desired != task.Destroyed || cur.Phase != task.FailedPreserved)
	}, true)
}

// followTask shows the steps of a task and of its session until done returns true.
func (a *app) followTask(ctx context.Context, m *task.Manager, t task.Task, done func(task.Task) bool, talk bool) (task.Task, error) {
	view := a.con.Steps()
	defer view.Close()
	show := taskPrinter{view: view, talk: talk && t.Manifest.Agent.Kind != manifest.Command}
	tick := time.NewTicker(tailEvery)
	defer tick.Stop()
	seq, sessionSeq := store.Oldest, store.Oldest // prune removes old events
	if t.InSession() {                            // earlier events of the session do not concern the task
		var err error
		if _, sessionSeq, err = m.Sessions.Store.EventRange(ctx, t.SessionID); err != nil {
			return t, interrupted(ctx, t, err)
		}
	}
	looked := time.Now()
	for {
		cur, err := m.Get(ctx, t.ID) // read before the events, so that they include its last one
		if err != nil {
			return t, interrupted(ctx, t, err)
		}
		t = cur
		for id, after := range map[string]*int64{t.ID: &seq, t.SessionID: &sessionSeq} {
			if id == "" {
				continue
			}
			evs, err := m.Sessions.Store.Events(ctx, id, *after, 1000)
			if err != nil {
				return t, interrupted(ctx, t, err)
			}
			for _, ev := range evs {
				*after = ev.Seq
				show.event(ev)
			}
		}
		if done(t) {
			return t, nil
		}
		if time.Since(looked) > keeperless {
			looked = time.Now()
			if err := m.Reconcile(ctx); err != nil {
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

func interrupted(ctx context.Context, t task.Task, err error) error {
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
		var st session.Step
		if json.Unmarshal(ev.Data, &st) == nil {
			s.view.Update(console.Step{Name: st.Name, State: st.State, Detail: st.Detail, Elapsed: st.Elapsed()})
		}
	case task.EventWarning:
		var w session.Warning
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

// tail copies the lines of a growing file until ctx ends, and then the rest.
func (a *app) tail(ctx context.Context, path string, w io.Writer) {
	var at int64
	for {
		over := ctx.Err() != nil
		n, err := copyLines(w, path, at, over)
		if err != nil || over {
			return // the reader is gone, or everything was copied
		}
		at += n
		select {
		case <-time.After(tailEvery):
		case <-ctx.Done():
		}
	}
}

// copyLines copies the complete lines after offset at. If all is set, it also copies an
// incomplete last line. It returns the number of bytes read.
func copyLines(w io.Writer, path string, at int64, all bool) (n int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, nil //nolint:nilerr // the file does not exist yet
	}
	defer f.Close()
	buf := make([]byte, 64<<10)
	for {
		got, err := f.ReadAt(buf, at+n)
		end := bytes.LastIndexByte(buf[:got], '\n') + 1
		if all && errors.Is(err, io.EOF) || end == 0 && got == len(buf) { // the last line, or one that is too long
			end = got
		}
		if end == 0 {
			return n, nil
		}
		if err := copyClean(w, bytes.NewReader(buf[:end])); err != nil {
			return n, err
		}
		n += int64(end)
	}
}

type taskLogsOptions struct {
	follow, json bool
	of           string
}

func newTaskLogsCmd(a *app) *cobra.Command {
	o := taskLogsOptions{of: "stdout"}
	cmd := &cobra.Command{
		Use: "logs TASK", Short: "Show a task's output, events or keeper log",
		Example: `  agent-sessionizer task logs -f 4f2a
  agent-sessionizer task logs --of events --json 4f2a
  agent-sessionizer task logs --of keeper 4f2a`,
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeTasks,
		RunE: func(cmd *cobra.Command, args []string) error { return runTaskLogs(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "keep printing until the task has ended")
	cmd.Flags().BoolVar(&o.json, "json", false, "print events as JSON, one per line (with --of events)")
	cmd.Flags().StringVar(&o.of, "of", o.of, "`NAME` of the log: stdout, stderr, events or keeper")
	return cmd
}

func runTaskLogs(ctx context.Context, a *app, o taskLogsOptions, what string) error {
	m, t, err := a.findTask(ctx, what)
	if err != nil {
		return err
	}
	d := m.Dir(t.ID)
	var path string
	switch o.of {
	case "stdout":
		path = d.Stdout()
	case "stderr":
		path = d.Stderr()
	case "keeper":
		path = d.KeeperLog()
	case "events":
		return a.taskEvents(ctx, m, t, o)
	default:
		return fail.New(fail.Usage, "unknown log %q: must be stdout, stderr, events or keeper", o.of)
	}
	if err := m.CheckFiles(t); err != nil {
		return err
	}
	if !o.follow {
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			a.con.Say("no output yet: task %s is %s", t.ID, t.Phase)
			return nil
		}
		if err != nil {
			return fail.New(fail.Host, "open log: %w", err)
		}
		defer f.Close()
		return copyClean(a.con.Out, f)
	}
	tctx, stop := context.WithCancel(ctx)
	var tailing sync.WaitGroup
	tailing.Go(func() { a.tail(tctx, path, a.con.Out) })
	defer func() { stop(); tailing.Wait() }()
	for !t.Phase.Over() {
		select {
		case <-time.After(tailEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
		if t, err = m.Get(ctx, t.ID); err != nil {
			return err
		}
	}
	return nil
}

// taskEvents prints the events of a task.
func (a *app) taskEvents(ctx context.Context, m *task.Manager, t task.Task, o taskLogsOptions) error {
	seq := store.Oldest // prune removes old events
	for {
		cur, err := m.Get(ctx, t.ID)
		if err != nil {
			return err
		}
		evs, err := m.Sessions.Store.Events(ctx, t.ID, seq, 1000)
		if err != nil {
			return err
		}
		for _, ev := range evs {
			seq = ev.Seq
			if o.json {
				err = a.jsonLine(ev)
			} else {
				a.printf("%s  %-10s %s\n", ev.At.Local().Format("15:04:05.000"), ev.Kind, termtext.Line(string(ev.Data)))
			}
			if err != nil {
				return err
			}
		}
		if len(evs) == 0 && (!o.follow || cur.Phase.Over()) {
			return nil
		}
		if len(evs) > 0 {
			continue
		}
		select {
		case <-time.After(tailEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
