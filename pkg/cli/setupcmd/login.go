package setupcmd

import (
	"context"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
)

// loginState is a login as `login` lists it.
type loginState struct {
	Name string `json:"name"`
	From string `json:"from,omitempty"` // the file; "" for no login
	Own  bool   `json:"own"`            // made by `login`
	Plan string `json:"plan,omitempty"`
}

func NewLoginCmd(a *app.App) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "login [claude|codex]", Short: "Log in with a Claude or ChatGPT account, for all sessions",
		Long: `Log in with a Claude subscription (claude) or a ChatGPT account (codex), so that Claude
Code or Codex work in every session. Without an argument, list the logins.

The tokens stay on this host, in a file that only you can read; sessions have
placeholders. A login of Claude Code or Codex on this host is used too, without this
command, and stays as it is. "logins" in the settings says which sessions use a login.`,
		Example: `  agent-sessionizer login
  agent-sessionizer login claude`,
		Args: app.Usage(cobra.MaximumNArgs(1)), ValidArgsFunction: cobra.FixedCompletions([]string{"claude", "codex"}, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return listLogins(a, asJSON)
			}
			return runLogin(cmd.Context(), a, args[0])
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array of logins")
	return cmd
}

func NewLogoutCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "logout claude|codex", Short: "Forget a login of this program",
		Long: `Forget a login that "login" made. Running sessions use it until they are refreshed or
started again. A login of Claude Code or Codex on this host stays, and is used again.`,
		Example: `  agent-sessionizer logout claude`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: cobra.FixedCompletions([]string{"claude", "codex"}, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(_ *cobra.Command, args []string) error {
			_, l, err := loginOf(a, args[0])
			if err != nil {
				return err
			}
			existed, err := l.Forget()
			if err == nil && !existed {
				a.Con.Say("%s", "there was no such login")
			}
			return err
		},
	}
}

func loginOf(a *app.App, name string) (p login.Provider, l login.Login, err error) {
	if p, err = login.Find(name); err != nil {
		return p, l, err
	}
	cfg, err := a.Settings()
	if err != nil {
		return p, l, err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return p, l, fail.New(fail.Host, "find home directory: %w", err)
	}
	return p, login.At(p, cfg.Paths.Logins(), home), nil
}

func listLogins(a *app.App, asJSON bool) error {
	all, rows := []loginState{}, [][]string{}
	for _, p := range login.Providers() {
		_, l, err := loginOf(a, p.Name)
		if err != nil {
			return err
		}
		s := loginState{Name: p.Name}
		from := "no login"
		if is, own := l.Exists(); is {
			s.From, s.Own, s.Plan = l.Client, own, l.Account().Plan
			from = "of the client: " + l.Client
			if own {
				s.From, from = l.Own, "of agent-sessionizer"
			}
		}
		all = append(all, s)
		rows = append(rows, []string{p.Name, p.Title, s.Plan, from})
	}
	if asJSON {
		return a.Con.JSON(all)
	}
	a.Con.Table([]string{"NAME", "ACCOUNT", "PLAN", "LOGIN"}, rows)
	return nil
}

func runLogin(ctx context.Context, a *app.App, name string) error {
	p, l, err := loginOf(a, name)
	if err != nil {
		return err
	}
	attempt := login.Begin(p)
	a.Con.Say("%s", "Open this page in a browser and log in:")
	a.Printf("%s\n", attempt.URL)
	codes := make(chan string, 1)
	if addr, path := attempt.Local(); addr != "" {
		stop, err := receive(ctx, addr, path, codes, attempt)
		if err == nil { // otherwise another login waits there; the address can be pasted
			defer stop()
		}
	}
	failed := make(chan error, 1)
	go func() { // ends with the process, because nothing interrupts a read from a terminal
		text, err := a.Ask("Paste the code, or the address of the last page: ")
		if err != nil {
			failed <- err
			return
		}
		codes <- text
	}()
	var pasted string
	select {
	case pasted = <-codes:
	case err := <-failed:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	code, err := attempt.Code(pasted)
	if err != nil {
		return err
	}
	if err := l.Finish(ctx, attempt, code); err != nil {
		return err
	}
	a.Con.Say("%s", "logged in to "+p.Title+"; sessions use it when they start, or after: agent-sessionizer secrets refresh SESSION")
	return nil
}

// receive waits on this host for the browser, and passes on the address that it asks for. Other
// pages can make the browser ask for that too, but do not know the attempt.
func receive(ctx context.Context, addr, path string, codes chan<- string, attempt login.Attempt) (stop func(), err error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
		address := "http://" + addr + path + "?" + r.URL.RawQuery
		if _, err := attempt.Code(address); fail.CodeOf(err) == fail.Usage {
			http.Error(w, "This is not the login that agent-sessionizer waits for.", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "text/plain")
		_, _ = w.Write([]byte("Return to the terminal.\n"))
		select {
		case codes <- address:
		default: // the first one counts
		}
	})
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 64 << 10}
	go s.Serve(l) //nolint:errcheck // until it is closed
	return func() { s.Close() }, nil
}
