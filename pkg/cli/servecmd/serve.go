// Package servecmd has the command serve and its subcommands.
package servecmd

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/server"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

type serveOptions struct {
	listen            string
	expose            bool
	certFile, keyFile string
	agentic           bool

	found         bool   // a cluster
	join          string // file of a token
	name, address string // of this host in its cluster
}

func (o *serveOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.listen, "listen", "", "additional loopback `ADDRESS` for clients with tokens, such as 127.0.0.1:8122")
	f.BoolVar(&o.expose, "expose-to-network", false, "allow --listen on an address that the network can reach; needs a certificate")
	f.StringVar(&o.certFile, "tls-cert", "", "certificate `FILE` for --listen, in PEM format")
	f.StringVar(&o.keyFile, "tls-key", "", "key `FILE` of the certificate, in PEM format")
	f.BoolVar(&o.agentic, "agentic-metrics", false, "also export the metrics as agentic_*")
}

func NewServeCmd(a *app.App) *cobra.Command {
	var o serveOptions
	cmd := &cobra.Command{
		Use: "serve", Short: "Serve the HTTP API, the dashboard and tools for agents",
		Long: `Serve the HTTP API for tasks, sessions, events, artifacts and metrics, and tools for
agents at /mcp, on a socket that only you can use. With --listen, serve them also on an
address, for clients with tokens, and the dashboard for browsers. Tasks do not depend on
the server: they continue when it ends or is killed, and commands work with and without
it. /openapi.json describes the API.`,
		Example: `  agent-sessionizer serve
  agent-sessionizer serve token add ci --scope submit --repo acme/app && agent-sessionizer serve --listen 127.0.0.1:8122
  curl --unix-socket ~/.local/state/agent-sessionizer/serve.sock http://localhost/api/v1/tasks`,
		Args:    app.Usage(cobra.NoArgs),
		PreRunE: func(*cobra.Command, []string) error { return app.ForbidCoreDumps() }, // it holds tokens
		RunE:    func(cmd *cobra.Command, _ []string) error { return runServe(cmd.Context(), a, o) },
	}
	o.flags(cmd)
	cmd.AddCommand(newServeTokenCmd(a), newServeUnitCmd(a), newServeConnectCmd(a))
	f := cmd.Flags()
	f.BoolVar(&o.found, "cluster", false, "found a cluster with this host as its first core; see \"cluster --help\"")
	f.StringVar(&o.join, "join", "", "join the cluster of the token in `FILE`, - for standard input")
	f.StringVar(&o.name, "name", "", "`NAME` of this host in its cluster; the host name when omitted")
	f.StringVar(&o.address, "cluster-address", "", "`ADDRESS:PORT` at which the hosts of the cluster reach this core; the port after it is for other cores")
	cmd.MarkFlagsMutuallyExclusive("cluster", "join")
	return cmd
}

// newServeConnectCmd returns the command that another host runs here over SSH.
func newServeConnectCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "connect", Short: "Connect standard input and output to serve", Hidden: true, Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := a.Settings()
			if err != nil {
				return err
			}
			return client.Connect(cmd.Context(), server.Socket(cfg.Paths.State), os.Stdin, a.Con.Out)
		},
	}
}

func runServe(ctx context.Context, a *app.App, o serveOptions) error {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return err
	}
	m.Actor = "serve" // for actions without a client; a client's actions are recorded under its token
	settings := m.Config.Log
	log, stop := a.OwnLog(ctx, serveLog(m.Config), settings, console.Format(settings.Format))
	defer stop()
	engine, err := a.Engine(m)
	if err != nil {
		return err
	}
	engine.Log = log
	if err := o.enter(ctx, a, engine); err != nil {
		return err
	}
	part, err := partOf(ctx, engine)
	if err != nil {
		return err
	}
	engine.Cluster = part
	s, err := server.New(server.Options{
		Engine: engine, Log: log, Version: app.Version,
		Agentic: o.agentic, Listen: o.listen, Expose: o.expose, CertFile: o.certFile, KeyFile: o.keyFile,
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var sweeping sync.WaitGroup
	sweeping.Go(func() { app.SweepNowAndThen(ctx, m) })
	defer func() { cancel(); sweeping.Wait() }()
	return s.Run(ctx, func(addr string) {
		where := server.Socket(m.Config.Paths.State)
		if addr != "" {
			where += " and " + addr
		}
		a.Con.Say("serving on %s", where)
		if part != nil { // only now: another server of this user would have the same name in the cluster
			sweeping.Go(func() { part.Serve(ctx) })
			a.Con.Say("this host is %s in the cluster %s", part.State.Name, part.State.Cluster)
		}
	})
}

// serveLog returns the file to which launchd redirects the output of serve. Under systemd,
// the journal receives it.
func serveLog(cfg *config.Config) string { return filepath.Join(cfg.Paths.State, "serve.log") }

func newServeTokenCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "token", Short: "Manage tokens for clients of --listen",
		Example: `  agent-sessionizer serve token add ci --scope submit --repo acme/app
  agent-sessionizer serve token remove ci`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newServeTokenAddCmd(a), newServeTokenListCmd(a), newServeTokenRemoveCmd(a))
	return cmd
}

// tokens returns the token file. A running serve notices changes to it.
func tokens(a *app.App) (*server.Tokens, error) {
	cfg, err := a.Settings()
	if err != nil {
		return nil, err
	}
	return server.TokensIn(cfg.Paths.State), cfg.Paths.Make()
}

// tokenChanged records a change of a token in the audit log.
func tokenChanged(ctx context.Context, a *app.App, what audit.Type, name string, details map[string]any) {
	a.AuditTo(a.Config)(ctx, audit.Record{Type: what, Actor: app.Actor(), Resource: "token:" + name, Outcome: audit.Success, Details: details})
}

func newServeTokenAddCmd(a *app.App) *cobra.Command {
	var scope string
	var repositories, profiles []string
	cmd := &cobra.Command{
		Use: "add NAME --scope SCOPE", Short: "Create a token and print it once",
		Long: `Create a token and print it. The token is not stored, only its SHA-256.

A token with the scope read may only read. With submit, it may also submit tasks, and
cancel, retry and destroy the tasks that it submitted. With admin, it may also do that
with all tasks, run commands in sessions, and submit manifests that name secrets or
repositories on this host's disk: everything that you can do yourself.

A token with the scope submit may submit tasks only for the repositories of --repo, and
without --repo for none. They are fetched with your git credentials. A manifest may name
a profile, with its secrets, only if --profile lists it.`,
		Example: `  TOKEN=$(agent-sessionizer serve token add ci --scope submit --repo acme/app)
  agent-sessionizer serve token add team --scope submit --repo 'acme/*' --profile small
  curl -H "Authorization: Bearer $TOKEN" http://127.0.0.1:8122/api/v1/tasks`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			all, err := tokens(a)
			if err != nil {
				return err
			}
			may, err := task.ParsePermission(repositories, profiles)
			if err != nil {
				return err
			}
			token, err := all.Add(args[0], ops.Scope(scope), may)
			if err != nil {
				return err
			}
			tokenChanged(cmd.Context(), a, audit.TokenAdded, args[0], map[string]any{"scope": scope, "repositories": may.Repositories, "profiles": may.Profiles})
			a.Printf("%s\n", token)
			a.Con.Say("token %s is shown only once", args[0])
			if ops.Scope(scope) == ops.Submit && len(may.Repositories) == 0 {
				a.Con.Say("token %s may not submit tasks for any repository; create one with --repo OWNER/REPO to allow some", args[0])
			}
			return nil
		},
	}
	cmd.Flags().StringArrayVar(&repositories, "repo", nil, "`REPOSITORY` that the token's tasks may use: OWNER/REPO, OWNER/*, HOST/OWNER/REPO or * (any on a public host); repeatable")
	cmd.Flags().StringArrayVar(&profiles, "profile", nil, "`PROFILE` that the token's manifests may name; repeatable")
	cmd.Flags().StringVar(&scope, "scope", "", "`SCOPE` of the token: read, submit or admin")
	if err := cmd.MarkFlagRequired("scope"); err != nil {
		panic(err)
	}
	return cmd
}

func newServeTokenListCmd(a *app.App) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the names and scopes of tokens",
		Example: `  agent-sessionizer serve token list --json | jq -r '.[].name'`,
		Args:    app.Usage(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			tokens, err := tokens(a)
			if err != nil {
				return err
			}
			all, err := tokens.List()
			if err != nil {
				return err
			}
			type row struct {
				Name      string    `json:"name"`
				Scope     ops.Scope `json:"scope"`
				CreatedAt time.Time `json:"created_at"`
				task.Permission
			}
			rows, cells := []row{}, [][]string{}
			for _, t := range all {
				rows = append(rows, row{t.Name, t.Scope, t.CreatedAt, t.Permission})
				cells = append(cells, []string{t.Name, string(t.Scope), console.Ago(t.CreatedAt), strings.Join(t.Repositories, " "), strings.Join(t.Profiles, " ")})
			}
			switch {
			case asJSON:
				return a.Con.JSON(rows)
			case len(rows) == 0:
				a.Con.Say("%s", "no tokens; create one with: agent-sessionizer serve token add NAME --scope submit --repo OWNER/REPO")
			default:
				a.Con.Table([]string{"NAME", "SCOPE", "AGE", "REPOSITORIES", "PROFILES"}, cells)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	return cmd
}

// completeTokens offers the names of the existing tokens.
func completeTokens(a *app.App) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		cfg, err := a.Settings()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		all, _ := server.TokensIn(cfg.Paths.State).List() // on error there are none to offer
		var names []string
		for _, t := range all {
			names = append(names, t.Name)
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

func newServeTokenRemoveCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "remove NAME…", Aliases: []string{"rm"}, Short: "Revoke tokens immediately",
		Example: `  agent-sessionizer serve token remove ci`,
		Args:    app.Usage(cobra.MinimumNArgs(1)), ValidArgsFunction: completeTokens(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			tokens, err := tokens(a)
			if err != nil {
				return err
			}
			for _, name := range args {
				if err := tokens.Remove(name); err != nil {
					return err
				}
				tokenChanged(cmd.Context(), a, audit.TokenRemoved, name, nil)
			}
			return nil
		},
	}
}

func newServeUnitCmd(a *app.App) *cobra.Command {
	var o serveOptions
	var launchd bool
	cmd := &cobra.Command{
		Use: "unit", Short: "Print a systemd unit or launchd agent that runs serve",
		Long: `Print a systemd user unit that runs serve with the given flags. With --launchd, print a
launchd agent instead. The comment at the top describes how to install it.`,
		Example: `  agent-sessionizer serve unit >~/.config/systemd/user/agent-sessionizer.service
  agent-sessionizer serve unit --launchd --listen 127.0.0.1:8122`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			argv, err := o.argv()
			if err != nil {
				return err
			}
			var text []byte
			if launchd {
				cfg, err := a.Settings()
				if err != nil {
					return err
				}
				text, err = server.LaunchdAgent(argv, serveLog(cfg))
				if err != nil {
					return err
				}
			} else if text, err = server.SystemdUnit(argv); err != nil {
				return err
			}
			a.Printf("%s", strings.TrimRight(string(text), "\n")+"\n")
			return nil
		},
	}
	o.flags(cmd)
	cmd.Flags().BoolVar(&launchd, "launchd", false, "print a launchd agent, for macOS")
	return cmd
}

// argv returns the command that runs serve with these flags.
func (o serveOptions) argv() ([]string, error) {
	program, err := app.Self()
	if err != nil {
		return nil, err
	}
	argv := []string{program, "serve"}
	if o.listen != "" {
		argv = append(argv, "--listen", o.listen)
	}
	if o.expose {
		argv = append(argv, "--expose-to-network")
	}
	for _, file := range []struct{ flag, name string }{{"--tls-cert", o.certFile}, {"--tls-key", o.keyFile}} {
		if file.name == "" {
			continue
		}
		path, err := filepath.Abs(file.name) // a unit has its own working directory
		if err != nil {
			return nil, err
		}
		argv = append(argv, file.flag, path)
	}
	if o.agentic {
		argv = append(argv, "--agentic-metrics")
	}
	return argv, nil
}
