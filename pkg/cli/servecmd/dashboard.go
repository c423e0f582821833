package servecmd

import (
	"context"
	"fmt"
	"html"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/notify"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/server"
)

// browserTime is how long a browser has to read the file that takes it to the dashboard.
const browserTime = 10 * time.Second

func NewDashboardCmd(a *app.App) *cobra.Command {
	var noOpen bool
	cmd := &cobra.Command{
		Use: "dashboard", Short: "Open the dashboard in a browser",
		Long: `Open the dashboard of the running serve in a browser, which is then logged in as you. It
shows sessions and tasks, their terminals, and what waits for you. The printed link works
once, within a minute. On another device, open the address of serve and log in with a
token of "serve token add".`,
		Example: `  agent-sessionizer serve --listen 127.0.0.1:8122
  agent-sessionizer dashboard             # in another terminal
  agent-sessionizer dashboard --no-open   # only print the link`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runDashboard(cmd.Context(), a, noOpen) },
	}
	cmd.Flags().BoolVar(&noOpen, "no-open", false, "print the link, but start no browser")
	return cmd
}

func runDashboard(ctx context.Context, a *app.App, noOpen bool) error {
	cfg, err := a.Settings()
	if err != nil {
		return err
	}
	serve, err := client.New(client.Target{URL: (&url.URL{Scheme: "unix", Path: server.Socket(cfg.Paths.State)}).String()})
	if err != nil {
		return err
	}
	link, err := ops.CreateDashboardLink.On(ctx, serve, struct{}{})
	if fail.CodeOf(err) == fail.Host {
		return fail.New(fail.Host, "serve is not running").WithHint("agent-sessionizer serve --listen 127.0.0.1:8122")
	}
	if err != nil {
		return err
	}
	a.Printf("%s\n", link.URL)
	if noOpen || !notify.HasDesktop(os.Getenv) {
		return nil
	}
	if err := openBrowser(ctx, filepath.Join(cfg.Paths.State, "dashboard.html"), link.URL); err != nil {
		a.Con.Say("no browser was started: %v; open the link yourself", err)
	}
	return nil
}

// openBrowser opens a URL in the user's browser. Other users of the host can see the arguments
// of a process, and the URL is a secret; so the browser gets a file that leads to it, which
// only this user can read.
func openBrowser(ctx context.Context, file, link string) error {
	program := "xdg-open"
	if runtime.GOOS == "darwin" {
		program = "open"
	}
	if _, err := exec.LookPath(program); err != nil {
		return err
	}
	page := fmt.Sprintf("<!doctype html>\n<meta charset=\"utf-8\">\n<meta name=\"referrer\" content=\"no-referrer\">\n<meta http-equiv=\"refresh\" content=\"0; url=%s\">\n", html.EscapeString(link))
	if err := atomicfile.Write(file, []byte(page), 0o600); err != nil {
		return err
	}
	defer os.Remove(file)
	until := time.NewTimer(browserTime)
	defer until.Stop()
	cmd := exec.Command(program, file) //nolint:noctx // the browser must outlive this command
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
	case <-until.C: // it has become the browser
		return nil
	case <-ctx.Done():
		return nil
	}
	select { // the browser may read the file after the program that started it has ended
	case <-until.C:
	case <-ctx.Done():
	}
	return nil
}
