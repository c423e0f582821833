// Package notify notifies a user who is looking elsewhere, by a desktop notification or
// by the user's own command.
//
// The text may come from a hostile guest. It is passed as arguments or variables, never
// as part of a command line or of markup. The package never decides when to notify.
package notify

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// timeout limits how long one notification may take.
const timeout = 10 * time.Second

// HasDesktop guesses from the environment whether the user works at a desktop of this
// machine.
func HasDesktop(env func(string) string) bool {
	if env("SSH_CONNECTION") != "" || env("SSH_TTY") != "" {
		return false
	}
	return runtime.GOOS == "darwin" || env("DISPLAY") != "" || env("WAYLAND_DISPLAY") != ""
}

// Desktop shows a notification with notify-send on Linux and osascript on macOS.
func Desktop(ctx context.Context, title, body string) error {
	argv := desktopCommand(runtime.GOOS, title, body)
	if _, err := exec.LookPath(argv[0]); err != nil {
		return fail.New(fail.Host, "show desktop notification: %w", err).WithHint("sudo apt-get install libnotify-bin, or set attention.desktop to off")
	}
	return run(ctx, argv, nil)
}

// desktopCommand returns the command that shows a notification on a host with that operating
// system.
func desktopCommand(goos, title, body string) []string {
	if goos == "darwin" {
		return []string{
			"osascript", "-e", "on run argv", "-e", "display notification (item 2 of argv) with title (item 1 of argv)", "-e", "end run",
			"agent-sessionizer: " + title, body, // no option begins like this
		}
	}
	// Desktops interpret some HTML in the body.
	return []string{"notify-send", "--app-name=agent-sessionizer", "--", title, html.EscapeString(body)}
}

// Command runs a command line from the user's settings with sh, with additional
// environment variables.
func Command(ctx context.Context, line string, env map[string]string) error {
	more := os.Environ()
	for name, value := range env {
		more = append(more, name+"="+strings.ReplaceAll(value, "\x00", ""))
	}
	return run(ctx, []string{"sh", "-c", line}, more)
}

// run runs a program until it exits or its time is over.
func run(ctx context.Context, argv, env []string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("did not finish within %v", timeout))
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.WaitDelay = env, time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	}
	first, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
	return fmt.Errorf("%s: %w: %.200q", argv[0], err, first)
}
