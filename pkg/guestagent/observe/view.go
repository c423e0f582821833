package observe

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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

const toolTime = 30 * time.Second // per tmux or git command; an emulated guest is slow

// view is the known state of tmux's windows.
type view struct {
	running  bool
	began    time.Time // start of the last viewer task
	listed   time.Time // when the windows were listed
	captured time.Time // when the screen was captured
	panes    []pane
	who      []agentWindow
	speaks   map[string]bool // windows of agents that have hooks
	shown    pane            // the pane whose screen is shown
	screen   []string
}

// agentWindow identifies an agent when a screen is chosen.
type agentWindow struct {
	pid    int
	window string
}

// pane is a tmux pane.
type pane struct {
	window, id, tty string // "@1", "%1", "/dev/pts/1"
	pid             int    // of its first process
	activity        int64  // time of the window's last activity, in seconds
	rang, active    bool   // the window's bell has not been seen; the window's current pane
	name            string // of the window
}

const paneFormat = "#{window_id} #{pane_id} #{pane_tty} #{pane_pid} #{window_activity} #{window_bell_flag} #{pane_active} #{window_name}"

// panesOf parses tmux's list in that format. A window that several sessions share
// is listed once for each.
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
		activity, _ := strconv.ParseInt(f[4], 10, 64) // 0 counts as long ago
		panes = append(panes, pane{
			window: f[0], id: f[1], tty: f[2], pid: pid, activity: activity,
			rang: f[5] == "1", active: f[6] == "1", name: guestproto.Clean(f[7]),
		})
	}
	return panes
}

// rang reports whether a window's bell represents an agent, and returns the
// window's name. A window that was visited since does not count. Nor does the bell
// of an agent that reports through hooks.
func (w *watcher) rang(window string) (name string, ok bool) {
	panes := w.view.panes
	i := slices.IndexFunc(panes, func(p pane) bool { return p.window == window && p.rang })
	if i < 0 || w.view.speaks[window] {
		return "", false
	}
	for _, a := range w.agents { // the windows may have been listed before an agent was known
		if a.now.State == guestproto.AgentGone || slices.ContainsFunc(w.view.who, func(o agentWindow) bool { return o.pid == a.PID }) {
			continue
		}
		if p, ok := paneOf(panes, a.PID); ok && p.window == window {
			return "", false
		}
	}
	return panes[i].name, true
}

// listedAfter reports whether the windows were listed after a bell was recorded. File
// timestamps lag slightly behind the clock.
func (v *view) listedAfter(bell time.Time) bool { return v.listed.Sub(bell) > lookEvery }

// paneOf returns the pane that a process runs in.
func paneOf(panes []pane, pid int) (pane, bool) {
	for _, p := range lineage(pid) {
		if i := slices.IndexFunc(panes, func(q pane) bool { return q.pid == p.PID }); i >= 0 {
			return panes[i], true
		}
	}
	return pane{}, false
}

// visibleAgents returns the running agents, in the order of the list.
func (w *watcher) visibleAgents() (who []agentWindow) {
	for _, e := range w.list {
		if e.State != guestproto.AgentGone {
			who = append(who, agentWindow{e.PID, e.window})
		}
	}
	return who
}

// viewDue reports whether to start tmux, and whether to list its windows too.
func (w *watcher) viewDue(now time.Time) (due, list bool) {
	v := &w.view
	since := now.Sub(v.began)
	if v.running || since < screenEvery {
		return false, false
	}
	list = now.Sub(v.listed) >= roundEvery || !slices.Equal(v.who, w.visibleAgents()) || len(w.bells) > 0 && since >= bellEvery
	for _, at := range w.bells {
		list = list || !v.listedAfter(at)
	}
	return list || written(v.shown.tty, v.captured), list
}

// written reports whether a terminal may have been written to since a time. The
// kernel updates a terminal's time only when more than the last three bits of its
// seconds change, so that the timing of keystrokes does not leak.
func written(tty string, since time.Time) bool {
	info, err := os.Stat(tty)
	return err == nil && info.ModTime().Unix() >= since.Unix()&^7
}

// viewer lists tmux's windows, if list is set, and captures the screen of the most
// urgent agent.
func (w *watcher) viewer(now time.Time, list bool) func(context.Context) func() {
	w.view.began = now
	next, who := w.view, w.visibleAgents()
	return func(ctx context.Context) func() {
		active := !list
		if list {
			// Take the time first: changes during the listing belong to the next
			// one.
			next.listed, next.who = time.Now(), who
			text, err := tmux(ctx, "list-panes", "-a", "-F", paneFormat)
			if err != nil {
				text = "" // no tmux server runs
			}
			next.panes, next.speaks = panesOf(text), map[string]bool{}
			for _, w := range who {
				if p, ok := paneOf(next.panes, w.pid); ok {
					next.speaks[p.window] = true
				}
			}
			before := next.shown
			next.shown = choose(next.panes, who)
			// Also use tmux's own activity time, in case the terminal's time is
			// misleading.
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

// dropBells forgets the windows that no longer represent an agent.
func (w *watcher) dropBells() {
	for window, since := range w.bells {
		if _, ok := w.rang(window); !ok && w.view.listedAfter(since) {
			delete(w.bells, window)
			_ = os.Remove(filepath.Join(w.guest.Path(attentionDir), bellPrefix+window[1:])) // a failed removal is retried at the next poll
		}
	}
}

// choose returns the pane whose screen is shown: that of the most urgent agent or,
// without any, that of the window named "claude".
func choose(panes []pane, who []agentWindow) pane {
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

// lines splits a screen into lines without the empty ones at the end, and keeps at
// most the last MaxScreen.
func lines(text string) []string {
	text = strings.TrimRight(text, " \n")
	if text == "" {
		return nil
	}
	var all []string
	for line := range strings.SplitSeq(text, "\n") {
		if cells := []rune(line); len(cells) > guestproto.MaxScreenWidth {
			line = string(cells[:guestproto.MaxScreenWidth])
		}
		all = append(all, strings.TrimRight(strings.ReplaceAll(line, "\u00a0", " "), " "))
	}
	return all[max(0, len(all)-guestproto.MaxScreen):]
}

// tmux runs a command of the tmux server, if one runs.
func tmux(ctx context.Context, args ...string) (string, error) {
	out := pipe.Buffer{Limit: sys.MaxOutput}
	// -u: otherwise, without a terminal, tmux prints "_" for non-ASCII characters.
	err := runAside(ctx, &out, "tmux", append([]string{"-u"}, args...)...)
	return out.String(), err
}

// runAside runs a command within toolTime, and kills it with its children when the
// time is up.
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
