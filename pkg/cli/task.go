package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/user"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// tasks opens the store, starts missing keepers, and returns a task manager.
func (a *app) tasks(ctx context.Context) (*task.Manager, error) {
	m, err := a.manager(ctx)
	if err != nil {
		return nil, err
	}
	return &task.Manager{Sessions: m}, nil
}

func newTaskCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "task", Short: "Run agents unattended, as described by a manifest",
		Long: `Run agents unattended. A manifest names the repository, the agent and its instructions.
The task waits for a slot and runs in its own VM. It produces a patch, the requested
files, the agent's commits and its logs. It needs no terminal and no process that you
keep running.`,
		Example: `  agent-sessionizer task run -f task.yaml      run a task and wait until it ends
  agent-sessionizer task submit -f task.yaml   submit a task without waiting
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

// actor returns the user of this process, for the audit log.
func actor() string {
	if u, err := user.Current(); err == nil {
		return "user:" + u.Username
	}
	return fmt.Sprintf("uid:%d", os.Getuid())
}

func newTaskArtifactsCmd(a *app) *cobra.Command {
	var asJSON bool
	var get, out string
	cmd := &cobra.Command{
		Use: "artifacts TASK", Short: "List a task's artifacts, or print one of them",
		Example: `  agent-sessionizer task artifacts 4f2a
  agent-sessionizer task artifacts 4f2a --get 4f2a81c0d9e3.patch | git apply
  agent-sessionizer task artifacts 4f2a --get files/report.html -o report.html`,
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeTasks,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, t, err := a.findTask(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if err := m.CheckFiles(t); err != nil {
				return err
			}
			if get != "" {
				return a.copyArtifact(m, t, get, out)
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
			for _, s := range t.Status.Skipped {
				a.con.Say("skipped: %s: %s", s.Name, s.Reason)
			}
			a.con.Say("%s", string(m.Dir(t.ID)))
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of artifacts")
	cmd.Flags().StringVar(&get, "get", "", "`NAME` of an artifact to write to standard output")
	cmd.Flags().StringVarP(&out, "output", "o", "", "`FILE` that --get writes to; it must not exist")
	return cmd
}

func (a *app) copyArtifact(m *task.Manager, t task.Task, name, out string) error {
	f, err := m.OpenArtifact(t, name)
	if err != nil {
		return err
	}
	defer f.Close()
	if out == "" || out == "-" {
		_, err = io.Copy(a.con.Out, f)
		return err
	}
	to, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return fail.New(fail.Conflict, "write artifact: %w", err)
	}
	if _, err := io.Copy(to, f); err != nil {
		_ = to.Close() // the copy's error is more relevant
		return fail.New(fail.Host, "write artifact: %w", err)
	}
	return to.Close()
}

// newTaskStateCmd completes cmd as a command that records a desired phase for tasks.
func newTaskStateCmd(a *app, cmd *cobra.Command, desired task.DesiredPhase) *cobra.Command {
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
				t, err = m.SetDesired(ctx, t, desired, task.Client{Actor: actor()})
			}
			if err == nil && wait {
				t, err = a.waitTask(ctx, m, t, desired)
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
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until the command has taken effect")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of tasks")
	return cmd
}

func newTaskCancelCmd(a *app) *cobra.Command {
	return newTaskStateCmd(a, &cobra.Command{
		Use: "cancel TASK…", Short: "Cancel tasks and collect their results so far",
		Example: `  agent-sessionizer task cancel --wait 4f2a`,
	}, task.Cancel)
}

func newTaskDestroyCmd(a *app) *cobra.Command {
	return newTaskStateCmd(a, &cobra.Command{
		Use: "destroy TASK…", Short: "Remove the VMs of tasks, and cancel running tasks",
		Long: `Remove the VMs of tasks: the kept VM of a failed task, and the VM of a running task, which
is cancelled. Logs and artifacts stay; prune removes them later.`,
		Example: `  agent-sessionizer task destroy 4f2a`,
	}, task.Destroyed)
}

// completeTasks offers the existing tasks.
func (a *app) completeTasks(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	m, _ := a.readStore(cmd)
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
			found = append(found, cobra.CompletionWithDesc(t.ID, string(t.Phase)+"  "+termtext.Line(t.Name)))
		}
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// taskWorker returns a task manager that can also do the work of a task.
func (a *app) taskWorker(ctx context.Context, w task.Worker) (*task.Worker, error) {
	m, err := a.plainManager(ctx)
	if err != nil {
		return nil, err
	}
	w.Manager = &task.Manager{Sessions: m}
	w.Mirrors = m.Mirrors()
	w.Mirrors.Log = w.Log
	w.Redact = a.redact
	return &w, nil
}
