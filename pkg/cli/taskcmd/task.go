// Package taskcmd has the commands for unattended tasks.
package taskcmd

import (
	"context"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

func NewTaskCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "task", Short: "Run agents unattended, as described by a manifest",
		Long: `Run agents unattended. A manifest names the repository, the agent and its instructions.
The task waits for a slot and runs in its own VM. It produces a patch, the requested
files, the agent's commits and its logs. It needs no terminal and no process that you
keep running.`,
		Example: `  agent-sessionizer task run -f task.yaml      run a task and wait until it ends
  agent-sessionizer task submit -f task.yaml   submit a task without waiting
  agent-sessionizer task logs -f 4f2a`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(
		newTaskRunCmd(a), newTaskSubmitCmd(a), newTaskListCmd(a), newTaskShowCmd(a), newTaskLogsCmd(a), newTaskArtifactsCmd(a),
		newTaskCancelCmd(a), newTaskRetryCmd(a), newTaskDestroyCmd(a), newTaskValidateCmd(a), newTaskSchemaCmd(),
	)
	return cmd
}

func newTaskArtifactsCmd(a *app.App) *cobra.Command {
	var asJSON bool
	var get, out string
	cmd := &cobra.Command{
		Use: "artifacts TASK", Short: "List a task's artifacts, or print one of them",
		Example: `  agent-sessionizer task artifacts 4f2a
  agent-sessionizer task artifacts 4f2a --get 4f2a81c0d9e3.patch | git apply
  agent-sessionizer task artifacts 4f2a --get files/report.html -o report.html`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: completeTasks(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			h, t, err := findTask(ctx, a, args[0])
			if err != nil {
				return err
			}
			if get != "" {
				if h, err = a.TaskHost(h, t); err != nil {
					return err
				}
				return copyArtifact(ctx, a, h, ops.File{Task: t.ID, Artifact: get}, out)
			}
			list, err := ops.ListArtifacts.On(ctx, h, ops.TaskPath{ID: t.ID})
			if err != nil {
				return err
			}
			if asJSON {
				return a.Con.JSON(list.Artifacts)
			}
			var rows [][]string
			for _, art := range list.Artifacts {
				rows = append(rows, []string{art.Name, config.Size(art.Size).String(), art.SHA256})
			}
			if len(rows) > 0 {
				a.Con.Table([]string{"NAME", "SIZE", "SHA256"}, rows)
			}
			for _, s := range list.Skipped {
				a.Con.Say("skipped: %s: %s", s.Name, s.Reason)
			}
			a.Con.Say("%s", taskDir(h, t))
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of artifacts")
	cmd.Flags().StringVar(&get, "get", "", "`NAME` of an artifact to write to standard output")
	cmd.Flags().StringVarP(&out, "output", "o", "", "`FILE` that --get writes to; it must not exist")
	return cmd
}

func copyArtifact(ctx context.Context, a *app.App, h ops.Host, file ops.File, out string) error {
	f, err := h.Read(ctx, file)
	if err != nil {
		return err
	}
	defer f.Close()
	if out == "" || out == "-" {
		_, err = io.Copy(a.Con.Out, f)
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

// newTaskStateCmd completes cmd as a command that asks for a phase of tasks. Waiting is over
// once done returns true.
func newTaskStateCmd(a *app.App, cmd *cobra.Command, ask func(ctx context.Context, h ops.Host, at ops.TaskPath) (task.View, error), done func(task.View) bool) *cobra.Command {
	var wait, asJSON bool
	cmd.Args, cmd.ValidArgsFunction = app.Usage(cobra.MinimumNArgs(1)), completeTasks(a)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		views := []task.View{}
		for _, what := range args {
			h, t, err := findTask(ctx, a, what)
			if err == nil {
				t, err = ask(ctx, h, ops.TaskPath{ID: t.ID})
			}
			if err == nil && wait {
				t, err = followTask(ctx, a, h, t, done, true)
			}
			if err != nil {
				return err
			}
			views = append(views, t)
			if !asJSON {
				a.Con.Say("task %s is %s", t.ID, t.State)
			}
		}
		if asJSON {
			return a.Con.JSON(views)
		}
		return nil
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until the command has taken effect")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of tasks")
	return cmd
}

func newTaskCancelCmd(a *app.App) *cobra.Command {
	return newTaskStateCmd(a, &cobra.Command{
		Use: "cancel TASK…", Short: "Cancel tasks and collect their results so far",
		Example: `  agent-sessionizer task cancel --wait 4f2a`,
	}, func(ctx context.Context, h ops.Host, at ops.TaskPath) (task.View, error) {
		answer, err := ops.CancelTask.On(ctx, h, at)
		return answer.View, err
	}, func(t task.View) bool { return t.State.Over() })
}

func newTaskDestroyCmd(a *app.App) *cobra.Command {
	return newTaskStateCmd(a, &cobra.Command{
		Use: "destroy TASK…", Short: "Remove the VMs of tasks, and cancel running tasks",
		Long: `Remove the VMs of tasks: the kept VM of a failed task, and the VM of a running task, which
is cancelled. Logs and artifacts stay; prune removes them later.`,
		Example: `  agent-sessionizer task destroy 4f2a`,
	}, func(ctx context.Context, h ops.Host, at ops.TaskPath) (task.View, error) {
		answer, err := ops.DestroyTask.On(ctx, h, at)
		return answer.View, err
	}, func(t task.View) bool { return t.State.Over() && t.State != task.FailedPreserved })
}

// completeTasks offers the existing tasks.
func completeTasks(a *app.App) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
		m, _ := complete.ReadStore(a, cmd)
		if m == nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(complete.ContextOf(cmd), complete.CompletionTime)
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
}
