package taskcmd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

type taskListOptions struct {
	all   bool
	json  bool
	state []string
	label string
	limit int
	watch bool
}

func newTaskListCmd(a *app.App) *cobra.Command {
	o := taskListOptions{limit: 50}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List tasks",
		Long: `List tasks that are waiting or running, and tasks that ended within the last day. With
--all, --state or --label, also list tasks that ended before.`,
		Example: `  agent-sessionizer task list --watch
  agent-sessionizer task list --state FAILED,FAILED_PRESERVED
  agent-sessionizer task list --all --json | jq -r '.[] | select(.outcome.exit_code == 2).id'`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runTaskList(cmd.Context(), a, o) },
	}
	f := cmd.Flags()
	f.BoolVarP(&o.all, "all", "a", false, "include tasks that ended long ago")
	f.BoolVar(&o.json, "json", false, "print a JSON array of tasks")
	f.StringSliceVar(&o.state, "state", nil, "`STATES` of the tasks to list, separated by commas")
	f.StringVar(&o.label, "label", "", "label `KEY=VALUE` of the tasks to list")
	f.IntVarP(&o.limit, "limit", "n", o.limit, "maximum number of tasks to list, newest first; 0 for all")
	f.BoolVarP(&o.watch, "watch", "w", false, "refresh the list until Ctrl-C")
	return cmd
}

func runTaskList(ctx context.Context, a *app.App, o taskListOptions) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	show := func() error {
		all, err := o.tasks(ctx, h)
		if err != nil {
			return err
		}
		if !o.all && o.label == "" && len(o.state) == 0 {
			all = slices.DeleteFunc(all, func(t task.View) bool {
				return task.AtRest(t.State) && t.State.Over() && time.Since(t.StateChangedAt) > 24*time.Hour
			})
		}
		return showTasks(a, all, o.json)
	}
	if !o.watch {
		return show()
	}
	return repaint(ctx, a, h, show)
}

// tasks returns the tasks that the flags select, page by page.
func (o taskListOptions) tasks(ctx context.Context, h ops.Host) (all []task.View, err error) {
	query := ops.TaskQuery{State: strings.Join(o.state, ","), Label: o.label}
	for o.limit == 0 || len(all) < o.limit {
		query.Limit = 500
		if o.limit > 0 {
			query.Limit = min(500, o.limit-len(all))
		}
		page, err := ops.ListTasks.On(ctx, h, query)
		if err != nil {
			return nil, err
		}
		all = append(all, page.Tasks...)
		if query.After = page.Next; page.Next == "" {
			break
		}
	}
	return all, nil
}

func showTasks(a *app.App, all []task.View, asJSON bool) error {
	if asJSON {
		return a.Con.JSON(append([]task.View{}, all...))
	}
	if len(all) == 0 {
		a.Con.Say("%s", "no tasks; run one with: agent-sessionizer task run -f FILE")
		return nil
	}
	header, rows := []string{"ID", "STATE", "FOR", "NAME", "SESSION", "AGENT", "ACTIVITY", "COST"}, [][]string{}
	for _, v := range all {
		does, cost := "", ""
		switch {
		case v.Outcome != nil && v.Outcome.Reason != "":
			does = v.Outcome.Reason
		case v.Error != nil:
			does = v.Error.Message
		}
		if p := v.Progress; p != nil {
			if does == "" {
				does = strings.TrimSpace(fmt.Sprintf("%d tools  %s", p.ToolCalls, p.CurrentTool))
			}
			if p.CostUSD > 0 {
				cost = fmt.Sprintf("$%.2f", p.CostUSD)
			}
		}
		in := "" // a task's own session is not shown
		if v.InSession {
			in = v.Session
		}
		rows = append(rows, []string{v.ID, string(v.State), console.Ago(v.StateChangedAt), strings.Repeat("> ", v.Depth) + v.Name, in, cmp.Or(v.Model, v.Agent), does, cost})
	}
	a.Con.Table(header, rows, console.Tint{Column: "STATE", Of: func(cell string) console.Tone { return toneOfTask(task.Phase(cell)) }})
	return nil
}

// toneOfTask returns the colour of a task's state.
func toneOfTask(p task.Phase) console.Tone {
	switch p {
	case task.Completed:
		return console.Good
	case task.Failed, task.FailedPreserved:
		return console.Bad
	case task.Cancelled, task.Pending:
		return console.Faint
	}
	return console.Notice
}

// repaint clears the screen and calls show every second until ctx ends. It also starts
// missing keepers and waiting tasks.
func repaint(ctx context.Context, a *app.App, h ops.Host, show func() error) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		a.Con.Clear()
		if err := show(); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if err := tend(ctx, h); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

func newTaskShowCmd(a *app.App) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show TASK", Short: "Show a task",
		Example: `  agent-sessionizer task show 4f2a --json | jq .progress`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: completeTasks(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			h, t, err := findTask(cmd.Context(), a, args[0])
			if err == nil {
				t, err = ops.GetTask.On(cmd.Context(), h, ops.TaskPath{ID: t.ID}) // with its subtasks and usage
			}
			if err != nil {
				return err
			}
			if asJSON {
				return a.Con.JSON(t)
			}
			return showTask(a, h, t)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func findTask(ctx context.Context, a *app.App, what string) (ops.Host, task.View, error) {
	h, err := a.Host(ctx)
	if err != nil {
		return nil, task.View{}, err
	}
	t, err := ops.FindTask.On(ctx, h, ops.FindTaskRequest{Name: what})
	return h, t, err
}

// tend starts missing keepers and waiting tasks of this host. On another host, serve does.
func tend(ctx context.Context, h ops.Host) error {
	if e, ok := h.(ops.Engine); ok {
		return e.Tasks.Reconcile(ctx)
	}
	return nil
}

// taskDir returns where a task's files are.
func taskDir(h ops.Host, t task.View) string {
	e, ok := h.(ops.Engine)
	switch {
	case !ok:
		return "the directory of task " + t.ID + " on its host"
	case t.Host != "":
		return "the cluster, from host " + t.Host
	}
	return string(e.Tasks.Dir(t.ID))
}

func showTask(a *app.App, h ops.Host, v task.View) error {
	line := func(key, format string, args ...any) {
		if text := fmt.Sprintf(format, args...); strings.TrimSpace(text) != "" {
			a.Printf("%-12s %s\n", key, termtext.Line(text))
		}
	}
	line("id", "%s", v.ID)
	line("name", "%s", v.Name)
	line("state", "%s for %s", v.State, console.Ago(v.StateChangedAt))
	line("host", "%s", v.Host)
	line("repository", "%s", v.Repository)
	line("parent", "%s", v.Parent)
	line("subtasks", "%s", strings.Join(v.Subtasks, " "))
	line("agent", "%s %s", v.Agent, v.Model)
	stays := ""
	if v.InSession {
		stays = "(kept when the task ends)"
	}
	line("session", "%s  %s", v.Session, stays)
	if v.StartedAt != nil {
		line("started", "%s ago", console.Ago(*v.StartedAt))
	}
	if p := v.Progress; p != nil {
		line("progress", "%d tools, %d turns, %d tokens in, %d out, $%.4f  %s", p.ToolCalls, p.Turns, p.InputTokens, p.OutputTokens, p.CostUSD, p.CurrentTool)
	}
	line("used", "%s", v.Usage)
	if o := v.Outcome; o != nil {
		line("outcome", "%s  %s", o.Result, o.Reason)
		if o.ExitCode != nil {
			line("exit code", "%d", *o.ExitCode)
		}
		line("hint", "%s", o.Hint)
	}
	if v.State == task.FailedPreserved {
		line("kept until", "%s; to inspect it: agent-sessionizer ssh %s", v.PreservedUntil.Local().Format(time.DateTime), v.Session)
	}
	if v.EventsDropped > 0 {
		line("events", "%d of the agent's events were counted but not stored", v.EventsDropped)
	}
	line("artifacts", "%d", v.Artifacts)
	if v.Host == "" {
		line("directory", "%s", taskDir(h, v))
	}
	return nil
}
