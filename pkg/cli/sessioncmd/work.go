package sessioncmd

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

type diffOptions struct {
	repo.DiffOptions
	json bool
}

func NewDiffCmd(a *app.App) *cobra.Command {
	var o diffOptions
	cmd := &cobra.Command{
		Use:   "diff SESSION",
		Short: "Show what the agent changed since the clone",
		Long:  `Show what the agent changed since the clone, including uncommitted and untracked files.`,
		Example: `  agent-sessionizer diff repo
  agent-sessionizer diff --stat repo
  agent-sessionizer diff repo | git apply --stat`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runDiff(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().BoolVar(&o.Stat, "stat", false, "show only counts per file")
	cmd.Flags().BoolVar(&o.NameOnly, "name-only", false, "show only file names")
	cmd.Flags().BoolVar(&o.json, "json", false, "print files, counts and the patch as JSON")
	return cmd
}

func runDiff(ctx context.Context, a *app.App, o diffOptions, what string) error {
	if o.json && (o.Stat || o.NameOnly) {
		return fail.New(fail.Usage, "--json includes counts and names: it cannot be combined with --stat or --name-only").WithHint("agent-sessionizer diff --json %s", what)
	}
	h, s, err := app.Running(ctx, a, what)
	if err != nil {
		return err
	}
	if s.Base == nil {
		return ops.NotCloned(s)
	}
	conn, err := h.Dial(ctx, s.ID, true)
	if err != nil {
		return err
	}
	defer conn.Close()
	if o.json {
		changes, err := repo.Compare(ctx, conn, s.Dir, *s.Base, o.DiffOptions)
		if err != nil {
			return err
		}
		return a.Con.JSON(changes)
	}
	o.Color = a.Con.Color()
	return repo.Diff(ctx, conn, s.Dir, *s.Base, o.DiffOptions, a.Con.Out)
}

type fetchOptions struct {
	into    string
	maxSize config.Size
	maxRefs int
	json    bool
}

func NewFetchCmd(a *app.App) *cobra.Command {
	var o fetchOptions
	cmd := &cobra.Command{
		Use:   "fetch SESSION",
		Short: "Fetch the agent's commits to refs/agents/SESSION/*",
		Long: `Fetch the agent's branches, tags and stash to refs/agents/SESSION/* of the local clone:
the one the session was created from, the one in the working directory, or --into.
Without a clone, they go only to the repository's mirror. Objects are checked, no hook
runs, and branches, index and files of the clone are not touched.`,
		Example: `  agent-sessionizer fetch repo && git log --oneline refs/agents/NAME/main
  agent-sessionizer fetch --into ~/src/repo repo`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runFetch(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().StringVar(&o.into, "into", "", "local clone `DIR`")
	cmd.Flags().Var(&o.maxSize, "max-size", "maximum size that the guest may send, such as 1GiB (default 4GiB)")
	cmd.Flags().IntVar(&o.maxRefs, "max-refs", 0, "maximum number `N` of references that may change (default 5000)")
	cmd.Flags().BoolVar(&o.json, "json", false, "print what was fetched as JSON")
	return cmd
}

func runFetch(ctx context.Context, a *app.App, o fetchOptions, what string) error {
	h, s, err := app.Running(ctx, a, what)
	if err != nil {
		return err
	}
	if s.Base == nil {
		return ops.NotCloned(s)
	}
	into := o.into
	if into == "" {
		_, own := h.(ops.Engine)
		if into, err = localClone(s, own); err != nil {
			return err
		}
	}
	conn, err := h.Dial(ctx, s.ID, true)
	if err != nil {
		return err
	}
	defer conn.Close()
	e, here := h.(ops.Engine)
	if !here {
		return fetchRemote(ctx, a, h, conn, s, into, o)
	}
	work := session.Work{Sessions: e.Tasks.Sessions}
	v, err := e.Session(ctx, s.ID)
	if err != nil {
		return err
	}
	res, err := work.Fetch(ctx, v, conn, into, repo.FetchOptions{MaxBytes: int64(o.maxSize), MaxRefs: o.maxRefs})
	if err != nil {
		return err
	}
	if err := printFetched(a, res, o.json); err != nil || o.json {
		return err
	}
	if unsaved, err := work.Unsaved(ctx, v, conn); err == nil && !unsaved.Clean() {
		a.Con.Say("%s", "still only in the guest: "+unsaved.Summary())
	}
	return nil
}

func printFetched(a *app.App, res repo.FetchResult, asJSON bool) error {
	if asJSON {
		return a.Con.JSON(res)
	}
	for _, r := range res.Refs {
		a.Printf("%.12s %s\n", r.New, r.Name)
	}
	if len(res.Refs) == 0 {
		a.Con.Say("%s", "nothing new")
	}
	return nil
}

// fetchRemote fetches the work of a session on another host to that host's mirror, and to a
// clone on this one.
func fetchRemote(ctx context.Context, a *app.App, h ops.Host, conn *ssh.Client, s session.View, into string, o fetchOptions) error {
	if into == "" {
		return fail.New(fail.Usage, "fetch from another host: no clone of %s here", s.DisplayName()).WithHint("agent-sessionizer fetch --into DIR %s", s.Name)
	}
	if _, err := ops.FetchSession.On(ctx, h, ops.SessionPath{ID: s.ID}); err != nil {
		return err
	}
	paths, err := config.DefaultPaths()
	if err == nil {
		err = paths.Make()
	}
	if err != nil {
		return err
	}
	res, err := repo.Fetch(ctx, conn, s.Dir, s.Name, repo.Target{Local: into}, *s.Base, repo.FetchOptions{MaxBytes: int64(o.maxSize), MaxRefs: o.maxRefs, TempDir: paths.Cache})
	if err != nil {
		return err
	}
	return printFetched(a, res, o.json)
}

// localClone returns the default target of fetched work: the clone that the session was
// made from, or the one in the working directory. Paths of another host mean nothing here.
func localClone(s session.View, own bool) (string, error) {
	if !own && strings.HasPrefix(s.RepoKey, "local:") {
		return "", nil
	}
	if _, err := os.Stat(s.LocalClone); err == nil && own {
		return s.LocalClone, nil
	}
	cwd, err := os.Getwd()
	if err != nil {
		return "", fail.New(fail.Host, "find working directory: %w", err)
	}
	here, err := repo.Parse(".", cwd)
	if err != nil || here.Key != s.RepoKey {
		return "", nil //nolint:nilerr // the working directory need not be a clone of it
	}
	return here.Path, nil
}

type logsOptions struct {
	follow bool
	json   bool
	file   string
}

func NewLogsCmd(a *app.App) *cobra.Command {
	var o logsOptions
	cmd := &cobra.Command{
		Use:   "logs SESSION",
		Short: "Show a session's phases, steps and warnings",
		Example: `  agent-sessionizer logs repo
  agent-sessionizer logs -f repo
  agent-sessionizer logs --of setup repo
  agent-sessionizer logs --of serial repo`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runLogs(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "keep printing new events")
	cmd.Flags().BoolVar(&o.json, "json", false, "print events as JSON, one per line")
	cmd.Flags().StringVar(&o.file, "of", "", "`NAME` of another log: setup, devcontainer, services, keeper, gateway, serial (the VM's console) or hostagent")
	return cmd
}

func runLogs(ctx context.Context, a *app.App, o logsOptions, what string) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	if o.file != "" {
		m, v, err := a.Local(ctx, h, s)
		if err != nil {
			return err
		}
		return logFile(a, m, v, o.file)
	}
	for ev, err := range h.Events(ctx, ops.Session(s.ID), store.Oldest, o.follow) {
		if err != nil {
			return err
		}
		if err := printEvent(a, ev, o.json); err != nil {
			return err
		}
	}
	return nil
}

// logFile prints a log file. The guest can write to some of them.
func logFile(a *app.App, m *session.Manager, s session.Session, which string) error {
	logs := m.Logs(s)
	at := slices.IndexFunc(logs, func(l session.Log) bool { return l.Name == which })
	if at < 0 {
		return fail.New(fail.Usage, "unknown log %q: must be keeper, setup, devcontainer, services, gateway, serial or hostagent", which)
	}
	for _, name := range logs[at].Paths {
		f, err := os.Open(name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return fail.New(fail.Host, "open log: %w", err)
		}
		defer f.Close()
		return app.CopyClean(a.Con.Out, f)
	}
	return fail.New(fail.NotFound, "session %s has no %s log", s.Name, which)
}
