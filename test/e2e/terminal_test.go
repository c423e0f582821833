//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/picture"
)

// terminal is a user's terminal: a pane of its own tmux server, in which the user
// types.
type terminal struct {
	t *testing.T
	b *box
}

func newTerminal(t *testing.T, b *box) terminal {
	t.Helper()
	u := terminal{t, b}
	t.Cleanup(func() { u.tmux("kill-server") })
	if out := u.tmux("new-session", "-d", "-s", "t", "-x", "120", "-y", "30", "sh"); strings.TrimSpace(out) != "" {
		t.Fatalf("tmux new-session = %q, want no output", out)
	}
	return u
}

func (u terminal) tmux(args ...string) string {
	return u.b.Run(append([]string{"tmux", "-f", "/dev/null", "-L", "terminal"}, args...)...).All()
}

func (u terminal) screen() string { return u.tmux("capture-pane", "-p", "-t", "t") }

func (u terminal) typed(keys ...string) {
	u.tmux(append([]string{"send-keys", "-t", "t"}, keys...)...)
}

// picks types keys into the picker until they take effect: fzf drops keys while it
// reloads the rows.
func (u terminal) picks(what string, keys ...string) {
	u.t.Helper()
	for range 3 {
		u.typed(keys...)
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
			if strings.Contains(u.screen(), what) {
				return
			}
		}
		u.typed("C-u")
	}
	u.sees(what)
}

// picture saves the screen as a picture in the directory PICTURES, if that is set.
func (u terminal) picture(name string) {
	u.t.Helper()
	dir := os.Getenv("PICTURES")
	if dir == "" {
		return
	}
	svg := picture.SVG(name, u.tmux("capture-pane", "-p", "-e", "-t", "t"), 120)
	if err := os.WriteFile(filepath.Join(dir, name+".svg"), []byte(svg), 0o644); err != nil {
		u.t.Fatal(err)
	}
}

// sees waits until what is on the screen.
func (u terminal) sees(what string) {
	u.t.Helper()
	u.until(what, func(screen string) bool { return strings.Contains(screen, what) })
}

func (u terminal) until(what string, f func(screen string) bool) {
	u.t.Helper()
	deadline := time.Now().Add(5 * time.Minute)
	for !f(u.screen()) {
		if time.Now().After(deadline) {
			u.t.Fatalf("screen = %s, want %q", u.screen(), what)
		}
		time.Sleep(200 * time.Millisecond) // a terminal offers nothing to wait on
	}
}
