package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// tasks opens the store and sees to what died, of tasks and of sessions.
func (a *app) tasks(ctx context.Context) (*task.Manager, error) {
	m, err := a.manager(ctx)
	if err != nil {
		return nil, err
	}
	return &task.Manager{Sessions: m}, nil
}

func newTaskCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "task", Short: "Unattended runs of agents: manifest in, patch and artifacts out",
		Long: `Unattended runs of agents. A manifest says which repository, which agent and what it
is to do; the task waits for a slot, gets a VM of its own, and leaves a patch, the
files that were asked for, the agent's commits and its logs. Nothing of it needs a
terminal, or this program to go on running.`,
		Example: `  agent-sessionizer task run -f task.yaml      and wait for its end
  agent-sessionizer task submit -f task.yaml   and do not
  agent-sessionizer task logs -f 4f2a`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newTaskRunCmd(a), newTaskSubmitCmd(a), newTaskListCmd(a), newTaskShowCmd(a), newTaskLogsCmd(a), newTaskArtifactsCmd(a),
		newTaskCancelCmd(a), newTaskRetryCmd(a), newTaskDestroyCmd(a), newTaskValidateCmd(a), newTaskSchemaCmd(),
	)
	return cmd
}

// taskFile is a flag of the commands that take a manifest.
type taskFile struct {
	name string
	json bool
}

func (o *taskFile) flags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&o.name, "file", "f", "", "the manifest, a `FILE` of YAML or JSON; - is the standard input")
	cmd.Flags().BoolVar(&o.json, "json", false, "print JSON")
	if err := cmd.MarkFlagRequired("file"); err != nil {
		panic(err)
	}
}

// read returns the manifest and its text, and tells its notices.
func (o *taskFile) read(a *app) (*manifest.Task, []byte, error) {
	var text []byte
	var err error
	name, dir := o.name, "."
	if name == "-" {
		name = "standard input"
		text, err = io.ReadAll(io.LimitReader(os.Stdin, manifest.MaxBytes+1))
	} else {
		dir = filepath.Dir(name)
		text, err = readBounded(name, manifest.MaxBytes+1)
	}
	if err != nil {
		return nil, nil, fail.New(fail.NotFound, "read the manifest: %w", err)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, nil, err
	}
	t, notices, err := manifest.Parse(name, text, dir)
	if err != nil {
		return nil, nil, err
	}
	for _, n := range notices {
		a.con.Warn("%s", n)
	}
	return t, text, nil
}

func readBounded(name string, most int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, most))
}

// submit puts the manifest of o into the queue and starts it if there is a slot.
func (a *app) submit(ctx context.Context, m *task.Manager, o taskFile) (task.Task, error) {
	asked, text, err := o.read(a)
	if err != nil {
		return task.Task{}, err
	}
	t, notices, err := m.Submit(ctx, asked, task.Submission{Text: text, Actor: actor()})
	if err != nil {
		return task.Task{}, err
	}
	for _, n := range notices {
		a.con.Warn("%s", n)
	}
	if err := m.Schedule(ctx); err != nil { // it is in the queue, and every command looks there
		a.con.Warn("the task waits: %v", err)
	}
	return t, nil
}

// actor is who sits at this terminal, for the audit log.
func actor() string {
	if u, err := user.Current(); err == nil {
		return "user:" + u.Username
	}
	return fmt.Sprintf("uid:%d", os.Getuid())
}

func newTaskSubmitCmd(a *app) *cobra.Command {
	var o taskFile
	cmd := &cobra.Command{
		Use: "submit", Short: "Put a task into the queue and print its id",
		Example: `  id=$(agent-sessionizer task submit -f task.yaml)`,
		Args:    usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			m, err := a.tasks(cmd.Context())
			if err != nil {
				return err
			}
			t, err := a.submit(cmd.Context(), m, o)
			if err != nil {
				return err
			}
			if o.json {
				return a.con.JSON(t.View())
			}
			a.printf("%s\n", t.ID)
			return nil
		},
	}
	o.flags(cmd)
	return cmd
}

func newTaskRunCmd(a *app) *cobra.Command {
	var o taskFile
	cmd := &cobra.Command{
		Use: "run", Short: "Run a task and wait for its end",
		Long: `Run a task and wait for its end. What the agent prints is shown as it comes; of Claude
Code and Codex it is what they say and which tools they use.

The exit code is 0 when the task succeeded, 8 when it failed and its VM was kept,
124 when it ran out of time, and 1 otherwise. Ctrl-C ends the waiting, not the task.`,
		Example: `  agent-sessionizer task run -f task.yaml
  jq . task.json | agent-sessionizer task run -f - --json`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			m, err := a.tasks(cmd.Context())
			if err != nil {
				return err
			}
			t, err := a.submit(cmd.Context(), m, o)
			if err != nil {
				return err
			}
			return a.runTask(cmd.Context(), m, t, o.json)
		},
	}
	o.flags(cmd)
	return cmd
}

type taskListOptions struct {
	all   bool
	json  bool
	state []string
	label string
	limit int
	watch bool
}

func newTaskListCmd(a *app) *cobra.Command {
	o := taskListOptions{limit: 50}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List tasks",
		Long: `List tasks: those that wait or run, and those that ended within the last day. With
--all, --state or --label, ended ones of any age.`,
		Example: `  agent-sessionizer task list --watch
  agent-sessionizer task list --state FAILED,FAILED_PRESERVED
  agent-sessionizer task list --all --json | jq -r '.[] | select(.outcome.exit_code == 2).id'`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runTaskList(cmd.Context(), a, o) },
	}
	f := cmd.Flags()
	f.BoolVarP(&o.all, "all", "a", false, "tasks that ended long ago, too")
	f.BoolVar(&o.json, "json", false, "print an array of tasks")
	f.StringSliceVar(&o.state, "state", nil, "only tasks in these `STATES`, with commas between")
	f.StringVar(&o.label, "label", "", "only tasks with this `KEY=VALUE`")
	f.IntVarP(&o.limit, "limit", "n", o.limit, "at most so many, the newest; 0 for all")
	f.BoolVarP(&o.watch, "watch", "w", false, "show it again as things happen, until Ctrl-C")
	return cmd
}

func (o taskListOptions) filter() (store.TaskFilter, error) {
	f := store.TaskFilter{Limit: o.limit}
	for _, s := range o.state {
		p := task.Phase(strings.ToUpper(s))
		if !slices.Contains(task.Phases(), p) {
			return f, fail.New(fail.Usage, "no state %q; there are %v", s, task.Phases()).WithHint("agent-sessionizer task list --help")
		}
		f.Phases = append(f.Phases, string(p))
	}
	if o.label != "" {
		key, value, ok := strings.Cut(o.label, "=")
		if !ok || key == "" {
			return f, fail.New(fail.Usage, "%q is not a label; write it like team=platform", o.label).WithHint("agent-sessionizer task list --help")
		}
		f.Label = store.Label{Key: key, Value: value}
	}
	return f, nil
}

func runTaskList(ctx context.Context, a *app, o taskListOptions) error {
	f, err := o.filter()
	if err != nil {
		return err
	}
	m, err := a.tasks(ctx)
	if err != nil {
		return err
	}
	show := func() error {
		all, err := m.List(ctx, f)
		if err != nil {
			return err
		}
		if !o.all && o.label == "" && len(o.state) == 0 {
			all = slices.DeleteFunc(all, func(t task.Task) bool {
				return task.AtRest(t.Phase) && t.Phase.Over() && time.Since(t.StateChangedAt) > 24*time.Hour
			})
		}
		return a.showTasks(all, o.json)
	}
	if !o.watch {
		return show()
	}
	return a.repaint(ctx, m, show)
}

func (a *app) showTasks(all []task.Task, asJSON bool) error {
	if asJSON {
		views := make([]task.View, 0, len(all))
		for _, t := range all {
			views = append(views, t.View())
		}
		return a.con.JSON(views)
	}
	if len(all) == 0 {
		a.con.Say("%s", "no tasks; run one with: agent-sessionizer task run -f FILE")
		return nil
	}
	header, rows := []string{"ID", "STATE", "FOR", "NAME", "AGENT", "DOES", "COST"}, [][]string{}
	for _, t := range all {
		v := t.View()
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
		rows = append(rows, []string{t.ID, string(t.Phase), ago(t.StateChangedAt), t.Name, cmp.Or(v.Model, v.Agent), does, cost})
	}
	a.con.Table(header, rows, console.Tint{Column: "STATE", Of: func(cell string) console.Tone { return toneOfTask(task.Phase(cell)) }})
	return nil
}

// toneOfTask is how a task's state is coloured.
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

// repaint shows again when something changed, at most once a second.
func (a *app) repaint(ctx context.Context, m *task.Manager, show func() error) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		if a.con.Live() {
			a.printf("\x1b[H\x1b[2J")
		}
		if err := show(); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if err := m.Reconcile(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

func newTaskShowCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show TASK", Short: "Show one task",
		Example: `  agent-sessionizer task show 4f2a --json | jq .progress`,
		Args:    usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeTasks,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, t, err := a.findTask(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if asJSON {
				return a.con.JSON(t.View())
			}
			return a.showTask(m, t)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) findTask(ctx context.Context, what string) (*task.Manager, task.Task, error) {
	m, err := a.tasks(ctx)
	if err != nil {
		return nil, task.Task{}, err
	}
	t, err := m.Find(ctx, what)
	return m, t, err
}

func (a *app) showTask(m *task.Manager, t task.Task) error {
	v := t.View()
	line := func(key, format string, args ...any) {
		if text := fmt.Sprintf(format, args...); strings.TrimSpace(text) != "" {
			a.printf("%-12s %s\n", key, console.Clean(text))
		}
	}
	line("id", "%s", v.ID)
	line("name", "%s", v.Name)
	line("state", "%s for %s", v.State, ago(v.StateChangedAt))
	line("repository", "%s", v.Repository)
	line("agent", "%s %s", v.Agent, v.Model)
	line("session", "%s", v.Session)
	if v.StartedAt != nil {
		line("started", "%s ago", ago(*v.StartedAt))
	}
	if p := v.Progress; p != nil {
		line("progress", "%d tools, %d turns, %d tokens in, %d out, $%.4f  %s", p.ToolCalls, p.Turns, p.InputTokens, p.OutputTokens, p.CostUSD, p.CurrentTool)
	}
	if o := v.Outcome; o != nil {
		line("outcome", "%s  %s", o.Result, o.Reason)
		if o.ExitCode != nil {
			line("exit code", "%d", *o.ExitCode)
		}
		line("hint", "%s", o.Hint)
	}
	if v.State == task.FailedPreserved {
		line("kept until", "%s; look inside: agent-sessionizer ssh %s", v.PreservedUntil.Local().Format(time.DateTime), v.Session)
	}
	line("artifacts", "%d", v.Artifacts)
	line("directory", "%s", string(m.Dir(t.ID)))
	return nil
}

func newTaskArtifactsCmd(a *app) *cobra.Command {
	var asJSON bool
	var get, out string
	cmd := &cobra.Command{
		Use: "artifacts TASK", Short: "List what a task brought home, or print one of it",
		Example: `  agent-sessionizer task artifacts 4f2a
  agent-sessionizer task artifacts 4f2a --get 4f2a81c0d9e3.patch | git apply
  agent-sessionizer task artifacts 4f2a --get files/report.html -o report.html`,
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeTasks,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, t, err := a.findTask(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if get != "" {
				return copyArtifact(m, t, get, out)
			}
			if asJSON {
				return a.con.JSON(m.Artifacts(t))
			}
			var rows [][]string
			for _, art := range m.Artifacts(t) {
				rows = append(rows, []string{art.Name, config.Size(art.Size).String(), art.SHA256})
			}
			if len(rows) > 0 {
				a.con.Table([]string{"NAME", "SIZE", "SHA256"}, rows)
			}
			for _, s := range t.Facts.Skipped {
				a.con.Say("left out: %s: %s", s.Name, s.Reason)
			}
			a.con.Say("%s", string(m.Dir(t.ID)))
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of artifacts")
	cmd.Flags().StringVar(&get, "get", "", "write the artifact of this `NAME` to the standard output")
	cmd.Flags().StringVarP(&out, "output", "o", "", "with --get: to this `FILE`, which must not be there")
	return cmd
}

func copyArtifact(m *task.Manager, t task.Task, name, out string) error {
	f, err := m.OpenArtifact(t, name)
	if err != nil {
		return err
	}
	defer f.Close()
	if out == "" || out == "-" {
		_, err = io.Copy(os.Stdout, f)
		return err
	}
	to, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return fail.New(fail.Conflict, "write the artifact: %w", err)
	}
	if _, err := io.Copy(to, f); err != nil {
		_ = to.Close() // the copy's error is the one
		return fail.New(fail.Host, "write the artifact: %w", err)
	}
	return to.Close()
}

// newTaskWantCmd is a command that records an intent for tasks.
func newTaskWantCmd(a *app, cmd *cobra.Command, want task.Want) *cobra.Command {
	var wait, asJSON bool
	cmd.Args, cmd.ValidArgsFunction = usage(cobra.MinimumNArgs(1)), a.completeTasks
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		m, err := a.tasks(ctx)
		if err != nil {
			return err
		}
		views := []task.View{}
		for _, what := range args {
			t, err := m.Find(ctx, what)
			if err == nil {
				t, err = m.Want(ctx, t, want)
			}
			if err == nil && wait {
				t, err = a.waitTask(ctx, m, t, want)
			}
			if err != nil {
				return err
			}
			views = append(views, t.View())
			if !asJSON {
				a.con.Say("task %s is %s", t.ID, t.Phase)
			}
		}
		if asJSON {
			return a.con.JSON(views)
		}
		return nil
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "until it is done")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array of tasks")
	return cmd
}

func newTaskCancelCmd(a *app) *cobra.Command {
	return newTaskWantCmd(a, &cobra.Command{
		Use: "cancel TASK...", Short: "Call tasks off; what they did so far is brought home",
		Example: `  agent-sessionizer task cancel --wait 4f2a`,
	}, task.Cancel)
}

func newTaskDestroyCmd(a *app) *cobra.Command {
	return newTaskWantCmd(a, &cobra.Command{
		Use: "destroy TASK...", Short: "Remove the VMs of tasks; one that runs is called off",
		Long: `Remove the VMs of tasks: of one that failed and whose VM was kept, and of one that runs,
which is called off. Logs and artifacts stay; prune removes them in time.`,
		Example: `  agent-sessionizer task destroy 4f2a`,
	}, task.Destroyed)
}

func newTaskRetryCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "retry TASK", Short: "Submit a task's manifest again, and print the new task's id",
		Example: `  agent-sessionizer task retry 4f2a`,
		Args:    usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeTasks,
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			m, t, err := a.findTask(ctx, args[0])
			if err != nil {
				return err
			}
			again, notices, err := m.Retry(ctx, t, task.Submission{Actor: actor()})
			if err != nil {
				return err
			}
			for _, n := range notices {
				a.con.Warn("%s", n)
			}
			if err := m.Schedule(ctx); err != nil {
				a.con.Warn("the task waits: %v", err)
			}
			if asJSON {
				return a.con.JSON(again.View())
			}
			a.printf("%s\n", again.ID)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newTaskValidateCmd(a *app) *cobra.Command {
	var o taskFile
	cmd := &cobra.Command{
		Use: "validate", Short: "Check a manifest, and run nothing",
		Example: `  agent-sessionizer task validate -f task.yaml
  agent-sessionizer task validate -f task.yaml --json   with all defaults`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			t, _, err := o.read(a)
			if err != nil {
				return err
			}
			if o.json {
				return a.con.JSON(t)
			}
			a.con.Say("%s is a manifest of a task for %s", o.name, console.Clean(t.Repository.URL))
			return nil
		},
	}
	o.flags(cmd)
	return cmd
}

func newTaskSchemaCmd() *cobra.Command {
	return &cobra.Command{
		Use: "schema", Short: "Print the JSON Schema of manifests, for editors",
		Example: `  agent-sessionizer task schema >task.schema.json`,
		Args:    usage(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			_, err := os.Stdout.Write(manifest.Schema())
			return err
		},
	}
}

// completeTasks proposes the tasks that are there.
func (a *app) completeTasks(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	m, _ := a.peek(cmd)
	if m == nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(contextOf(cmd), completionTime)
	defer cancel()
	all, err := (&task.Manager{Sessions: m}).List(ctx, store.TaskFilter{Limit: 100})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var found []string
	for _, t := range all {
		if strings.HasPrefix(t.ID, prefix) {
			found = append(found, cobra.CompletionWithDesc(t.ID, string(t.Phase)+"  "+console.Clean(t.Name)))
		}
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// taskWorker is a task manager that can also do the work.
func (a *app) taskWorker(ctx context.Context, w task.Worker) (*task.Worker, error) {
	m, err := a.plainManager(ctx)
	if err != nil {
		return nil, err
	}
	w.Manager = &task.Manager{Sessions: m}
	w.Mirrors = &repo.Mirrors{Dir: m.Config.Paths.Mirrors()}
	w.Redact = a.redact
	return &w, nil
}

func taskStates() (all []string) {
	for _, p := range task.Phases() {
		all = append(all, string(p))
	}
	return all
}
