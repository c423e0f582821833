package taskcmd

import (
	"cmp"
	"context"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// taskFile holds the flags of the commands that take a manifest.
type taskFile struct {
	name    string
	json    bool
	session string
}

func (o *taskFile) flags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&o.name, "file", "f", "", "manifest `FILE` in YAML or JSON; - for standard input")
	cmd.Flags().BoolVar(&o.json, "json", false, "print JSON")
	cmd.Flags().StringVar(&o.session, "session", "", "existing `SESSION` to run in, which is kept")
	if err := cmd.MarkFlagRequired("file"); err != nil {
		panic(err)
	}
}

// read returns the request that the flags describe.
func (o *taskFile) read(ctx context.Context, h ops.Host) (r ops.SubmitRequest, err error) {
	if o.session != "" {
		s, err := app.FindSession(ctx, h, o.session)
		if err != nil {
			return r, err
		}
		r.Session = s.ID
	}
	r.Name, r.Dir = o.name, "."
	if r.Name == "-" {
		r.Name = "standard input"
		r.RawBody, err = io.ReadAll(io.LimitReader(os.Stdin, manifest.MaxBytes+1))
	} else {
		r.Dir = filepath.Dir(r.Name)
		r.RawBody, err = readBounded(r.Name, manifest.MaxBytes+1)
	}
	if err != nil {
		return r, fail.New(fail.NotFound, "read manifest: %w", err)
	}
	r.ContentType = "application/yaml"
	r.Dir, err = filepath.Abs(r.Dir)
	return r, err
}

func warnAll(a *app.App, notices []string) {
	for _, n := range notices {
		a.Con.Warn("%s", n)
	}
}

func readBounded(name string, most int64) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, most))
}

// submits makes cmd a command that submits a manifest and then calls then.
func submits(a *app.App, cmd *cobra.Command, then func(ctx context.Context, a *app.App, h ops.Host, t task.View, asJSON bool) error) *cobra.Command {
	var o taskFile
	cmd.Args = app.Usage(cobra.NoArgs)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx := cmd.Context()
		h, err := a.Host(ctx)
		if err != nil {
			return err
		}
		r, err := o.read(ctx, h)
		if err != nil {
			return err
		}
		answer, err := ops.SubmitTask.On(ctx, h, r)
		if err != nil {
			return err
		}
		warnAll(a, answer.Notices)
		return then(ctx, a, h, answer.View, o.json)
	}
	o.flags(cmd)
	return cmd
}

// printID prints a submitted task.
func printID(_ context.Context, a *app.App, _ ops.Host, t task.View, asJSON bool) error {
	if asJSON {
		return a.Con.JSON(t)
	}
	a.Printf("%s\n", t.ID)
	return nil
}

func newTaskSubmitCmd(a *app.App) *cobra.Command {
	return submits(a, &cobra.Command{
		Use: "submit", Short: "Queue a task and print its id",
		Example: `  id=$(agent-sessionizer task submit -f task.yaml)`,
	}, printID)
}

func newTaskRunCmd(a *app.App) *cobra.Command {
	return submits(a, &cobra.Command{
		Use: "run", Short: "Run a task and wait until it ends",
		Long: `Run a task and wait until it ends. The agent's output is shown as it arrives. Of Claude
Code and Codex, the messages and the tool calls are shown.

The exit code is 0 if the task succeeded, 8 if it failed and its VM was kept, 124 if it
ran out of time, and 1 otherwise. Ctrl-C stops waiting, not the task.`,
		Example: `  agent-sessionizer task run -f task.yaml
  agent-sessionizer task run -f task.yaml --session repo   in an existing session
  jq . task.json | agent-sessionizer task run -f - --json`,
	}, runTask)
}

func newTaskRetryCmd(a *app.App) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "retry TASK", Short: "Submit a task's manifest again and print the new id",
		Example: `  agent-sessionizer task retry 4f2a`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: completeTasks(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			h, t, err := findTask(ctx, a, args[0])
			if err != nil {
				return err
			}
			answer, err := ops.RetryTask.On(ctx, h, ops.RetryRequest{TaskPath: ops.TaskPath{ID: t.ID}})
			if err != nil {
				return err
			}
			warnAll(a, answer.Notices)
			return printID(ctx, a, h, answer.View, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newTaskValidateCmd(a *app.App) *cobra.Command {
	var o taskFile
	cmd := &cobra.Command{
		Use: "validate", Short: "Check a manifest without submitting it",
		Example: `  agent-sessionizer task validate -f task.yaml
  agent-sessionizer task validate -f task.yaml --json   print it with all defaults`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			h, err := a.QuietHost(cmd.Context())
			if err != nil {
				return err
			}
			r, err := o.read(cmd.Context(), h)
			if err != nil {
				return err
			}
			checked, err := ops.CheckTask.On(cmd.Context(), h, r)
			if err != nil {
				return err
			}
			warnAll(a, checked.Notices)
			if o.json {
				return a.Con.JSON(checked.Manifest)
			}
			a.Con.Say("%s is a valid manifest of a task for %s", o.name, termtext.Line(cmp.Or(checked.Repository, "session "+cmp.Or(o.session, checked.Session))))
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
		Args:    app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(manifest.Schema())
			return err
		},
	}
}
