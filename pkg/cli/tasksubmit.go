package cli

import (
	"cmp"
	"context"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
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

// read returns the manifest and its text, and prints its notices.
func (o *taskFile) read(ctx context.Context, a *app, m *task.Manager) (*manifest.Task, []byte, error) {
	if o.session != "" {
		s, err := findSession(ctx, m.Sessions, o.session)
		if err != nil {
			return nil, nil, err
		}
		o.session = s.ID
	}
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
		return nil, nil, fail.New(fail.NotFound, "read manifest: %w", err)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, nil, err
	}
	t, notices, err := manifest.ParseIn(o.session, name, text, dir)
	if err != nil {
		return nil, nil, err
	}
	a.warnAll(notices)
	if o.session != "" {
		text = nil // the text lacks the session, so it does not describe the task
	}
	return t, text, nil
}

func (a *app) warnAll(notices []string) {
	for _, n := range notices {
		a.con.Warn("%s", n)
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

// accepted prints the notices of a submitted task, and starts it if there is a free slot.
func (a *app) accepted(ctx context.Context, m *task.Manager, notices []string) {
	a.warnAll(notices)
	if err := m.Schedule(ctx); err != nil { // the task is queued, and every command tries again
		a.con.Warn("the task is queued but could not be started: %v", err)
	}
}

// submits makes cmd a command that submits a manifest and then calls then.
func (a *app) submits(cmd *cobra.Command, then func(ctx context.Context, m *task.Manager, t task.Task, asJSON bool) error) *cobra.Command {
	var o taskFile
	cmd.Args = usage(cobra.NoArgs)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx := cmd.Context()
		m, err := a.tasks(ctx)
		if err != nil {
			return err
		}
		asked, text, err := o.read(ctx, a, m)
		if err != nil {
			return err
		}
		t, notices, err := m.Submit(ctx, asked, task.Submission{Text: text, Actor: actor()})
		if err != nil {
			return err
		}
		a.accepted(ctx, m, notices)
		return then(ctx, m, t, o.json)
	}
	o.flags(cmd)
	return cmd
}

// printID prints a submitted task.
func (a *app) printID(_ context.Context, _ *task.Manager, t task.Task, asJSON bool) error {
	if asJSON {
		return a.con.JSON(t.View())
	}
	a.printf("%s\n", t.ID)
	return nil
}

func newTaskSubmitCmd(a *app) *cobra.Command {
	return a.submits(&cobra.Command{
		Use: "submit", Short: "Queue a task and print its id",
		Example: `  id=$(agent-sessionizer task submit -f task.yaml)`,
	}, a.printID)
}

func newTaskRunCmd(a *app) *cobra.Command {
	return a.submits(&cobra.Command{
		Use: "run", Short: "Run a task and wait until it ends",
		Long: `Run a task and wait until it ends. The agent's output is shown as it arrives. Of Claude
Code and Codex, the messages and the tool calls are shown.

The exit code is 0 if the task succeeded, 8 if it failed and its VM was kept, 124 if it
ran out of time, and 1 otherwise. Ctrl-C stops waiting, not the task.`,
		Example: `  agent-sessionizer task run -f task.yaml
  agent-sessionizer task run -f task.yaml --session repo   in an existing session
  jq . task.json | agent-sessionizer task run -f - --json`,
	}, a.runTask)
}

func newTaskRetryCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "retry TASK", Short: "Submit a task's manifest again and print the new id",
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
			a.accepted(ctx, m, notices)
			return a.printID(ctx, m, again, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newTaskValidateCmd(a *app) *cobra.Command {
	var o taskFile
	cmd := &cobra.Command{
		Use: "validate", Short: "Check a manifest without submitting it",
		Example: `  agent-sessionizer task validate -f task.yaml
  agent-sessionizer task validate -f task.yaml --json   print it with all defaults`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			sessions, err := a.plainManager(cmd.Context())
			if err != nil {
				return err
			}
			m, typed := &task.Manager{Sessions: sessions}, o.session
			t, _, err := o.read(cmd.Context(), a, m)
			if err != nil {
				return err
			}
			notices, err := m.Check(cmd.Context(), t)
			if err != nil {
				return err
			}
			a.warnAll(notices)
			if o.json {
				return a.con.JSON(t)
			}
			a.con.Say("%s is a valid manifest of a task for %s", o.name, termtext.Line(cmp.Or(t.Repository.URL, "session "+cmp.Or(typed, t.VM.Session))))
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
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(manifest.Schema())
			return err
		},
	}
}
