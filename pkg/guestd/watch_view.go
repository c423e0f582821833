package guestd

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

const toolTime = 30 * time.Second // of one tmux or git; an emulated guest is slow

// view is what is known of tmux's windows.
type view struct {
	running  bool
	began    time.Time // the last look
	listed   time.Time // the windows were, from then on
	captured time.Time // the screen was, from then on
	panes    []pane
	who      []whose
	speaks   map[string]bool // windows of agents that have hooks
	shown    pane            // whose screen it is
	screen   []string
}

// whose is what a screen is chosen by.
type whose struct {
	pid    int
	window string
}

// pane is one of tmux's.
type pane struct {
	window, id, tty string // "@1", "%1", "/dev/pts/1"
	pid             int    // of its first process
	activity        int64  // seconds; of the window
	rang, active    bool   // the window's bell was not seen yet; its current pane
	name            string // of the window
}

const paneFormat = "#{window_id} #{pane_id} #{pane_tty} #{pane_pid} #{window_activity} #{window_bell_flag} #{pane_active} #{window_name}"

// panesOf reads what tmux lists in that format. A window that several sessions
// share stands there once for each.
func panesOf(text string) (panes []pane) {
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimRight(line, "\n"), " ", 8)
		if len(f) != 8 || !windowID.MatchString(f[0]) {
			continue
		}
		pid, err := strconv.Atoi(f[3])
		if err != nil {
			continue
		}
		activity, _ := strconv.ParseInt(f[4], 10, 64) // 0 is long ago
		panes = append(panes, pane{
			window: f[0], id: f[1], tty: f[2], pid: pid, activity: activity,
			rang: f[5] == "1", active: f[6] == "1", name: wire.Clean(f[7]),
		})
	}
	return panes
}

// rang reports whether a window's bell stands for an agent, and the window's
// name. One that was visited since is quiet, and an agent that tells of itself
// is not shown by its bell, too.
func (v *view) rang(window string) (name string, ok bool) {
	i := slices.IndexFunc(v.panes, func(p pane) bool { return p.window == window && p.rang })
	if i < 0 || v.speaks[window] {
		return "", false
	}
	return v.panes[i].name, true
}

// after reports whether the windows were listed after a bell was noted; the
// clock of files is a little behind.
func (v *view) after(bell time.Time) bool { return v.listed.Sub(bell) > lookEvery }

// paneOf is the pane that a process runs in.
func paneOf(panes []pane, pid int) (pane, bool) {
	for _, p := range lineage(pid) {
		if i := slices.IndexFunc(panes, func(q pane) bool { return q.pid == p.pid }); i >= 0 {
			return panes[i], true
		}
	}
	return pane{}, false
}

// who are the agents that there is a screen of, in the order of the list.
func (w *watcher) who() (who []whose) {
	for _, e := range w.list {
		if e.State != wire.AgentGone {
			who = append(who, whose{e.PID, e.window})
		}
	}
	return who
}

// viewDue reports whether tmux is worth a process, and whether its windows are
// to be listed, too.
func (w *watcher) viewDue(now time.Time) (due, list bool) {
	v := &w.view
	since := now.Sub(v.began)
	if v.running || since < screenEvery {
		return false, false
	}
	list = now.Sub(v.listed) >= roundEvery || !slices.Equal(v.who, w.who()) || len(w.bells) > 0 && since >= bellEvery
	for _, at := range w.bells {
		list = list || !v.after(at)
	}
	return list || written(v.shown.tty, v.captured), list
}

// written reports whether a terminal may have been written to since a time. So
// that nobody learns from it how fast somebody types, the kernel changes a
// terminal's time only when more than the last three bits of its seconds change.
func written(tty string, since time.Time) bool {
	info, err := os.Stat(tty)
	return err == nil && info.ModTime().Unix() >= since.Unix()&^7
}

// viewer looks at tmux's windows, and at the screen of whoever is most urgent.
func (w *watcher) viewer(now time.Time, list bool) func(context.Context) func() {
	w.view.began = now
	next, who := w.view, w.who()
	return func(ctx context.Context) func() {
		active := !list
		if list {
			// The time first: what changes meanwhile is for the next look.
			next.listed, next.who = time.Now(), who
			text, err := tmux(ctx, "list-panes", "-a", "-F", paneFormat)
			if err != nil {
				text = "" // no tmux runs
			}
			next.panes, next.speaks = panesOf(text), map[string]bool{}
			for _, w := range who {
				if p, ok := paneOf(next.panes, w.pid); ok {
					next.speaks[p.window] = true
				}
			}
			before := next.shown
			next.shown = choose(next.panes, who)
			// tmux's own word, should the kernel's not mean what it seems to.
			active = next.shown.id != before.id || next.shown.activity >= next.captured.Unix() || written(next.shown.tty, next.captured)
		}
		switch {
		case next.shown.id == "":
			next.screen = nil
		case active:
			next.captured = time.Now()
			if text, err := tmux(ctx, "capture-pane", "-p", "-t", next.shown.id); err == nil {
				next.screen = lines(text)
			}
		}
		return func() {
			w.view = next
			w.view.running = false
			w.dropBells()
		}
	}
}

// dropBells forgets the windows that do not stand for an agent any more.
func (w *watcher) dropBells() {
	for window, since := range w.bells {
		if _, ok := w.view.rang(window); !ok && w.view.after(since) {
			delete(w.bells, window)
			_ = os.Remove(filepath.Join(w.guest.path(attentionDir), bellPrefix+window[1:])) // the next look finds it again
		}
	}
}

// choose picks whose screen is shown: the most urgent agent's, and without any
// that of the window where one would be.
func choose(panes []pane, who []whose) pane {
	for _, w := range who {
		if p, ok := paneOf(panes, w.pid); ok {
			return p
		}
		if i := slices.IndexFunc(panes, func(p pane) bool { return p.window == w.window && p.active }); i >= 0 {
			return panes[i]
		}
	}
	if i := slices.IndexFunc(panes, func(p pane) bool { return p.name == "claude" && p.active }); i >= 0 {
		return panes[i]
	}
	return pane{}
}

// lines are those of a screen, its end if there are too many, without the empty
// ones below the last.
func lines(text string) []string {
	text = strings.TrimRight(text, " \n")
	if text == "" {
		return nil
	}
	var all []string
	for line := range strings.SplitSeq(text, "\n") {
		if cells := []rune(line); len(cells) > wire.MaxScreenWidth {
			line = string(cells[:wire.MaxScreenWidth])
		}
		all = append(all, strings.TrimRight(strings.ReplaceAll(line, "\u00a0", " "), " "))
	}
	return all[max(0, len(all)-wire.MaxScreen):]
}

// tmux asks the server, if there is one.
func tmux(ctx context.Context, args ...string) (string, error) {
	var out capped
	// -u: without it, and without a terminal, other than ASCII becomes "_".
	err := runAside(ctx, &out, "tmux", append([]string{"-u"}, args...)...)
	return out.String(), err
}

// runAside runs a command of the agent's user within toolTime, and ends it with
// all that it started.
func runAside(ctx context.Context, out io.Writer, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, toolTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "GIT_OPTIONAL_LOCKS=0", "GIT_TERMINAL_PROMPT=0")
	cmd.Stdout = out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	return cmd.Run()
}
