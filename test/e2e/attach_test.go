//go:build e2e

package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// attach drives a real tmux: a terminal (a second tmux server's pane) in which the
// user types, the local tmux session, and the guest's tmux inside it.
func attach(t *testing.T, b *box, name string) {
	u := newTerminal(t, b)
	tm, screen, sees, typed := u.tmux, u.screen, u.sees, u.typed

	typed("unset TMUX; "+realvm.Binary()+" open "+name, "Enter")
	sees("scratch") // the guest's status line
	// the guest's prefix reaches the guest: window 5 is scratch
	typed("C-b", "5")
	sees("scratch*")
	typed("stty size; echo in-$(hostname)", "Enter")
	sees("in-lima-" + name)
	typed("clear", "Enter")

	// returns types a sum until the screen has it: input without a connection is dropped, and a terminal
	// offers nothing to wait on.
	returns := func(what string) {
		t.Helper()
		n := rand.IntN(1_000_000)
		answer := fmt.Sprint("answer-", n+1, "-")
		for end := time.Now().Add(3 * time.Minute); !strings.Contains(screen(), answer); time.Sleep(3 * time.Second) {
			if time.Now().After(end) {
				t.Fatalf("screen after %s = %s, want %s: the pane must reconnect", what, screen(), answer)
			}
			typed(fmt.Sprintf("echo answer-$((%d+1))-", n), "Enter")
		}
	}
	pids := b.Processes("attach-session")
	if len(pids) != 1 {
		t.Fatalf("attach-session processes = %v, want 1", pids)
	}
	// the terminal uses the keeper's connection; the keeper freezes, and then the terminal's own connection dies
	if shows := b.MustIn(name, `tmux show-environment -t agent SSH_CONNECTION; echo "SSH_CONNECTION=$SSH_CONNECTION"`); len(slices.Compact(strings.Split(shows, "\n"))) != 1 {
		t.Errorf("connections of the terminal and of exec = %s, want the same", shows)
	}
	for pid := range b.Processes("keeper") {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	returns("the freeze of the keeper")
	b.kill("keeper")
	b.In(name, `sudo pkill -o -f 'sshd.*agent@pts|sshd-session.*agent@pts'`)
	returns("the end of the connection")
	for pid := range b.Processes("attach-session") {
		if pids[pid] == "" {
			t.Errorf("attach-session process %v is new, want the one before to reconnect: %v", pid, pids)
		}
	}
	// frozen for longer than a connection may be silent, as by the host's sleep, it
	// continues
	for pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(10 * time.Second) // simulates a sleep of the host
	for pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	returns("the freeze")

	// text that the guest copies reaches the host's clipboard
	typed("clear; printf '\\033]52;c;%s\\007' $(printf from-the-guest | base64)", "Enter")
	testenv.WaitFor(t, "the copied text", func() bool { return b.Run("tmux", "show-buffer").Stdout == "from-the-guest" })
	// the window has the name of the guest's
	testenv.WaitFor(t, "the window's name", func() bool {
		return strings.Contains(b.Run("tmux", "list-windows", "-a", "-F", "#W").Stdout, "scratch")
	})

	// prefix d leaves the local session; it stays
	typed("C-b", "d")
	sees("detached")
	// the guest's bell rings locally
	b.In(name, "tmux send-keys -t =agent:scratch \"printf '\\a'\" Enter")
	testenv.WaitFor(t, "the bell", func() bool {
		return strings.Contains(b.Run("tmux", "list-windows", "-a", "-F", "bell=#{window_bell_flag}").Stdout, "bell=1")
	})
	if out := b.Run("tmux", "list-sessions", "-F", "#S"); !strings.Contains(out.Stdout, "project") {
		t.Errorf("tmux list-sessions after detaching = %s, want project", out.All())
	}
	// prefix D asks before it destroys
	typed("clear; "+realvm.Binary()+" open "+name, "Enter")
	sees("scratch")
	typed("C-b", "D")
	sees("It would lose")
	typed("n", "Enter")
	testenv.WaitFor(t, "the end of the question", func() bool { return !strings.Contains(screen(), "It would lose") })
	if l := b.List(); len(l) != 1 || l[0].State != "ready" {
		t.Errorf("list after refusing to destroy = %+v, want 1 session, ready", l)
	}
	typed("C-b", "d")
	sees("detached")

	// the guest asks for the host's clipboard, and gets nothing; a program of the
	// host on the same terminal does
	tm("set-option", "-s", "set-clipboard", "on")
	tm("set-buffer", "of-the-host")
	const ask = `clear; stty -echo -icanon min 0 time 30; printf '\033]52;c;?\007'; echo "got<$(head -c 64 | tr -dc 'A-Za-z0-9+/=;')>"; stty sane`
	typed(ask, "Enter")
	sees("b2YtdGhlLWhvc3Q=>") // some versions of tmux omit which clipboard it is
	typed("clear; "+realvm.Binary()+" ssh "+name, "Enter")
	sees("lima-" + name)
	typed(ask, "Enter")
	sees("got<>")
	typed("exit", "Enter")
}
