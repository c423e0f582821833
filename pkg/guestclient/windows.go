package guestclient

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Window is a window of the guest's tmux.
type Window struct {
	ID      string `json:"id" example:"@3"`
	Index   int    `json:"index"`
	Name    string `json:"name"`
	Active  bool   `json:"active" doc:"It is the current window of its session."`
	Command string `json:"command" doc:"The program that runs in it."`
}

const maxWindows = 100

// WindowID matches the id of a tmux window.
var WindowID = lazyregexp.New(`^@[0-9]{1,9}$`)

// windowFormat has the fields that may contain spaces last.
const windowFormat = "#{window_id} #{window_index} #{window_active} #{pane_current_command} #{window_name}"

// Windows returns the windows of the guest's tmux, without those that another window of
// that id preceded: sessions may share them. There are none if tmux does not run.
func (g Guest) Windows(ctx context.Context) ([]Window, error) {
	text, err := g.SSH.Output(ctx, "exec "+ssh.Quote("tmux", "-u", "list-windows", "-a", "-F", windowFormat), nil, 64<<10)
	if _, ran := errors.AsType[*ssh.ExitError](err); ran {
		return nil, nil
	}
	if err != nil {
		return nil, fail.New(fail.CodeOf(err), "list windows in the guest: %w", err)
	}
	return windowsOf(string(text)), nil
}

func windowsOf(text string) (all []Window) {
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimRight(line, "\n"), " ", 5)
		if len(f) != 5 || !WindowID.MatchString(f[0]) || slices.ContainsFunc(all, func(w Window) bool { return w.ID == f[0] }) {
			continue
		}
		index, err := strconv.Atoi(f[1])
		if err != nil || index < 0 || len(all) == maxWindows {
			continue
		}
		all = append(all, Window{ID: f[0], Index: index, Name: guestproto.Clean(f[4]), Active: f[2] == "1", Command: guestproto.Clean(f[3])})
	}
	return all
}

// AttachTmux returns the command that shows the guest's tmux session on a terminal. It first creates
// the session's windows in dir. If tmux runs already, it does so while the terminal shows the session.
func (g Guest) AttachTmux(dir string) string {
	ready := ssh.Quote(g.Root+ReadyTmux, "-d", dir) + " >/dev/null"
	// The login shell is zsh, which expands a bare =agent to the path of a command.
	return "if tmux has-session -t '=agent' 2>/dev/null; then " + ready + " 2>&1 </dev/null & else " + ready + " || exit; fi; exec tmux -u attach-session -t '=agent'"
}

// ShareWindow returns the command that shows a window of the guest's tmux on a terminal,
// without changing what other terminals show: in a tmux session of its own, which has the
// same windows and ends with the terminal. For window "" it first creates the windows in dir
// if necessary.
func (g Guest) ShareWindow(window, dir string) (string, error) {
	target, prepare, show := "=agent", ssh.Quote(g.Root+ReadyTmux, "-d", dir)+" >/dev/null", ""
	if window != "" {
		if !WindowID.MatchString(window) {
			return "", fail.New(fail.Usage, "window must be @NUMBER, got %.20q", window)
		}
		// A new session that shares the windows of no session would have a new window.
		target, prepare, show = window, ssh.Quote("tmux", "has-session", "-t", window), " ';' "+ssh.Quote("select-window", "-t", window)
	}
	return prepare + " && exec tmux -u new-session -t " + ssh.Quote(target) + " ';' set-option destroy-unattached on ';' set-option status off" + show, nil
}
