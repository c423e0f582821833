package setupcmd

import (
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

func NewContextCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "context", Short: "Choose the host that commands work on",
		Long: `Choose the host that commands work on: this one, or another on which "serve" runs. A
context is a name for such a host. For a single command, use --host or the variable
` + app.HostVariable + ` with a context or a URL.

ssh://[USER@]HOST logs in with your ssh and needs no other setup. https://HOST:PORT needs
a token: run "serve token add NAME --scope admin" there. --token refers to it as settings
refer to secrets: env:NAME, file:/PATH, cmd:COMMAND, op://VAULT/ITEM/FIELD,
vault:PATH:KEY, keychain:SERVICE/ACCOUNT or age:/PATH.`,
		Example: `  agent-sessionizer context add box ssh://me@box.example.org && agent-sessionizer context use box
  agent-sessionizer context use local
  agent-sessionizer --host ssh://me@box.example.org list`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var token string
	add := &cobra.Command{
		Use: "add NAME URL", Short: "Add a host, or change its URL",
		Example: `  agent-sessionizer context add box ssh://me@box.example.org
  agent-sessionizer context add team https://team.example.org:8122 --token op://Work/serve/token`,
		Args: app.Usage(cobra.ExactArgs(2)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(_ *cobra.Command, args []string) error {
			return changeContexts(func(c *config.Contexts) error { return addContext(c, args[0], args[1], token) })
		},
	}
	add.Flags().StringVar(&token, "token", "", "`REFERENCE` to the token, for https")
	use := &cobra.Command{
		Use: "use NAME", Short: "Work on a host from now on (local: this one)",
		Example: `  agent-sessionizer context use box
  agent-sessionizer context use local`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(contextNames()),
		RunE: func(_ *cobra.Command, args []string) error {
			return changeContexts(func(c *config.Contexts) error {
				c.Current = args[0]
				if c.Current == app.ThisHost {
					c.Current = ""
				} else if _, ok := c.Contexts[c.Current]; !ok {
					return app.NoContext(*c, c.Current)
				}
				return nil
			})
		},
	}
	remove := &cobra.Command{
		Use: "remove NAME…", Aliases: []string{"rm"}, Short: "Forget hosts, which do not change",
		Example: `  agent-sessionizer context remove box`,
		Args:    app.Usage(cobra.MinimumNArgs(1)), ValidArgsFunction: complete.Many(contextNames()),
		RunE: func(_ *cobra.Command, args []string) error {
			return changeContexts(func(c *config.Contexts) error {
				for _, name := range args {
					if _, ok := c.Contexts[name]; !ok {
						return app.NoContext(*c, name)
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
		Args:    app.Usage(cobra.NoArgs),
		RunE:    func(*cobra.Command, []string) error { return runContextList(a, asJSON) },
	}
	list.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	cmd.AddCommand(add, use, list, remove)
	return cmd
}

var contextName = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

func addContext(c *config.Contexts, name, url, token string) error {
	if !contextName.MatchString(name) || name == app.ThisHost {
		return fail.New(fail.Usage, "a context's name must have letters, digits, dots and dashes, and not be %s, got %q", app.ThisHost, name)
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

func changeContexts(f func(*config.Contexts) error) error {
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

func runContextList(a *app.App, asJSON bool) error {
	c, err := app.Contexts()
	if err != nil {
		return err
	}
	views := []contextView{{Name: app.ThisHost, Current: c.Current == ""}}
	for _, name := range slices.Sorted(maps.Keys(c.Contexts)) {
		views = append(views, contextView{name, name == c.Current, c.Contexts[name]})
	}
	if asJSON {
		return a.Con.JSON(views)
	}
	var rows [][]string
	for _, v := range views {
		mark := ""
		if v.Current {
			mark = "*"
		}
		rows = append(rows, []string{mark, v.Name, v.URL, v.Token})
	}
	a.Con.Table([]string{"", "NAME", "URL", "TOKEN"}, rows)
	return nil
}

func contextNames() complete.Lister {
	return func(*cobra.Command, []string) []string {
		c, _ := app.Contexts() // on error there are none to offer
		return append([]string{app.ThisHost}, slices.Sorted(maps.Keys(c.Contexts))...)
	}
}
