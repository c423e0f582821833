package cli

import (
	"cmp"
	"context"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// hostVariable is the environment variable that chooses the host, like --host.
const hostVariable = "AGENT_SESSIONIZER_HOST"

// thisHost is the context of this host.
const thisHost = "local"

func newContextCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "context", Short: "Choose the host that commands work on",
		Long: `Choose the host that commands work on: this one, or another on which "serve" runs. A
context is a name for such a host. For a single command, use --host or the variable
` + hostVariable + ` with a context or a URL.

ssh://[USER@]HOST logs in with your ssh and needs no other setup. https://HOST:PORT needs
a token: run "serve token add NAME --scope admin" there. --token refers to it as settings
refer to secrets: env:NAME, file:/PATH, cmd:COMMAND or op://VAULT/ITEM/FIELD.`,
		Example: `  agent-sessionizer context add box ssh://me@box.example.org && agent-sessionizer context use box
  agent-sessionizer context use local
  agent-sessionizer --host ssh://me@box.example.org list`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var token string
	add := &cobra.Command{
		Use: "add NAME URL", Short: "Add a host, or change its URL",
		Example: `  agent-sessionizer context add box ssh://me@box.example.org
  agent-sessionizer context add team https://team.example.org:8122 --token op://Work/serve/token`,
		Args: usage(cobra.ExactArgs(2)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			return a.changeContexts(func(c *config.Contexts) error { return addContext(c, args[0], args[1], token) })
		},
	}
	add.Flags().StringVar(&token, "token", "", "`REFERENCE` to the token, for https")
	use := &cobra.Command{
		Use: "use NAME", Short: "Work on a host from now on (local: this one)",
		Example: `  agent-sessionizer context use box
  agent-sessionizer context use local`,
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeArgs(a.contextNames),
		RunE: func(_ *cobra.Command, args []string) error {
			return a.changeContexts(func(c *config.Contexts) error {
				c.Current = args[0]
				if c.Current == thisHost {
					c.Current = ""
				} else if _, ok := c.Contexts[c.Current]; !ok {
					return noContext(*c, c.Current)
				}
				return nil
			})
		},
	}
	remove := &cobra.Command{
		Use: "remove NAME…", Aliases: []string{"rm"}, Short: "Forget hosts, which do not change",
		Example: `  agent-sessionizer context remove box`,
		Args:    usage(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeMany(a.contextNames),
		RunE: func(_ *cobra.Command, args []string) error {
			return a.changeContexts(func(c *config.Contexts) error {
				for _, name := range args {
					if _, ok := c.Contexts[name]; !ok {
						return noContext(*c, name)
					}
					delete(c.Contexts, name)
					if c.Current == name {
						c.Current = ""
					}
				}
				return nil
			})
		},
	}
	var asJSON bool
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the hosts",
		Example: `  agent-sessionizer context list`,
		Args:    usage(cobra.NoArgs),
		RunE:    func(*cobra.Command, []string) error { return runContextList(a, asJSON) },
	}
	list.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	cmd.AddCommand(add, use, list, remove)
	return cmd
}

var contextName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

func addContext(c *config.Contexts, name, url, token string) error {
	if !contextName.MatchString(name) || name == thisHost {
		return fail.New(fail.Usage, "a context's name must have letters, digits, dots and dashes, and not be %s, got %q", thisHost, name)
	}
	if token != "" {
		if _, err := secret.ParseRef("TOKEN", token); err != nil {
			return err
		}
	}
	if _, err := client.New(client.Target{URL: url, Token: "later"}); err != nil {
		return err
	}
	if c.Contexts == nil {
		c.Contexts = map[string]config.Context{}
	}
	c.Contexts[name] = config.Context{URL: url, Token: token}
	return nil
}

func (a *app) changeContexts(f func(*config.Contexts) error) error {
	paths, err := config.DefaultPaths()
	if err != nil {
		return err
	}
	c, err := config.ReadContexts(paths)
	if err == nil {
		err = f(&c)
	}
	if err != nil {
		return err
	}
	return c.Write(paths)
}

// contextView is a context in the output of context list.
type contextView struct {
	Name    string `json:"name"`
	Current bool   `json:"current"`
	config.Context
}

func runContextList(a *app, asJSON bool) error {
	c, err := a.contexts()
	if err != nil {
		return err
	}
	views := []contextView{{Name: thisHost, Current: c.Current == ""}}
	for _, name := range slices.Sorted(maps.Keys(c.Contexts)) {
		views = append(views, contextView{name, name == c.Current, c.Contexts[name]})
	}
	if asJSON {
		return a.con.JSON(views)
	}
	var rows [][]string
	for _, v := range views {
		mark := ""
		if v.Current {
			mark = "*"
		}
		rows = append(rows, []string{mark, v.Name, v.URL, v.Token})
	}
	a.con.Table([]string{"", "NAME", "URL", "TOKEN"}, rows)
	return nil
}

func (a *app) contextNames(*cobra.Command, []string) []string {
	c, _ := a.contexts() // on error there are none to offer
	return append([]string{thisHost}, slices.Sorted(maps.Keys(c.Contexts))...)
}

// lookUp returns the context of a name or a URL. This host has the empty one.
func lookUp(c config.Contexts, name string) (config.Context, error) {
	if name == "" || name == thisHost {
		return config.Context{}, nil
	}
	if strings.Contains(name, "://") {
		return config.Context{URL: name, Token: "env:AGENT_SESSIONIZER_TOKEN"}, nil
	}
	found, ok := c.Contexts[name]
	if !ok {
		return found, noContext(c, name)
	}
	return found, nil
}

func noContext(c config.Contexts, name string) error {
	known := append([]string{thisHost}, slices.Sorted(maps.Keys(c.Contexts))...)
	return fail.New(fail.NotFound, "no context %q; there are %s", name, strings.Join(known, ", ")).
		WithHint("agent-sessionizer context add NAME URL")
}

// hostName returns the host that the command works on, as --host takes it.
func (a *app) hostName(c config.Contexts) string {
	return cmp.Or(a.chosen, os.Getenv(hostVariable), c.Current, thisHost)
}

// context returns the other host that the command works on, or the empty context for this
// host.
func (a *app) context() (config.Context, error) {
	c, err := a.contexts()
	if err != nil {
		return config.Context{}, err
	}
	return lookUp(c, a.hostName(c))
}

func (a *app) contexts() (config.Contexts, error) {
	paths, err := config.DefaultPaths()
	if err != nil {
		return config.Contexts{}, err
	}
	return config.ReadContexts(paths)
}

// anyHost lists the commands that work on every host. The others work only on this one, and
// refuse another, so that it is never changed instead of it.
var anyHost = []string{
	"", "open", "list", "status", "next", "last", "start", "stop", "destroy", "logs", "exec", "ssh", "cp", "diff", "fetch",
	"net", "ports", "task", "secrets", "image list", "context", "completion", "man", "version", "help", "attach-session",
}

// checkHost refuses a command that works only on this host if another is chosen.
func (a *app) checkHost(cmd *cobra.Command) error {
	_, name, _ := strings.Cut(cmd.CommandPath(), " ")
	if slices.ContainsFunc(anyHost, func(any string) bool { return name == any || any != "" && strings.HasPrefix(name, any+" ") }) {
		return nil
	}
	if cmd.Hidden { // processes of this host
		a.chosen = thisHost
		return nil
	}
	to, err := a.context()
	if err != nil || to.URL == "" {
		return err
	}
	return fail.New(fail.Usage, "%s works only on this host, but %s is chosen", cmd.CommandPath(), to.URL).WithHint("%s --host %s", cmd.CommandPath(), thisHost)
}

// remote returns the other host that the command works on, or nil for this host.
func (a *app) remote(ctx context.Context) (ops.Host, error) {
	to, err := a.context()
	if err != nil || to.URL == "" {
		return nil, err
	}
	target := client.Target{URL: to.URL}
	if strings.HasPrefix(to.URL, "http") {
		if target.Token, err = a.token(ctx, to); err != nil {
			return nil, err
		}
	}
	return client.New(target)
}

// token resolves the token of a context.
func (a *app) token(ctx context.Context, to config.Context) (string, error) {
	self, err := self()
	if err != nil {
		return "", err
	}
	ref, err := secret.ParseRef("AGENT_SESSIONIZER_TOKEN", to.Token)
	if err != nil {
		return "", err
	}
	values, err := secret.ResolveInChild(ctx, self, []secret.Ref{ref})
	if err != nil {
		return "", err
	}
	value := values[ref.Name]
	a.redact.Add(value)
	return value.Reveal(), nil
}
