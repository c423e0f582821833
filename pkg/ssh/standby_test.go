package ssh_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestStandbyShell runs the command of standby shells in the shells that agents may have.
func TestStandbyShell(t *testing.T) {
	for _, shell := range []string{"dash", "bash", "zsh"} {
		t.Run(shell, func(t *testing.T) {
			path, err := exec.LookPath(shell)
			if err != nil {
				t.Fatal(err) // make setup installs them
			}
			home := t.TempDir()
			start := func() (*exec.Cmd, io.WriteCloser, *bytes.Buffer) {
				cmd := exec.CommandContext(t.Context(), path, "-c", ssh.StandbyCommand)
				cmd.Env = []string{"HOME=" + home, "LOGNAME=agent", "SHELL=" + path, "PATH=" + os.Getenv("PATH"), "TMPDIR=" + home, "SET=before"}
				var out bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, &out
				in, err := cmd.StdinPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				testenv.WaitFor(t, "the shell", func() bool { _, err := os.Stat(filepath.Join(home, ".agent-shell-agent")); return err == nil })
				return cmd, in, &out
			}
			ends := func(cmd *exec.Cmd, in io.WriteCloser, out *bytes.Buffer, input, want string, code int) {
				t.Helper()
				if _, err := io.WriteString(in, input); err != nil {
					t.Fatal(err)
				}
				_ = in.Close()
				_ = cmd.Wait()
				if out.String() != want || cmd.ProcessState.ExitCode() != code {
					t.Errorf("%q = %q, exit %d, want %q, exit %d", input, out, cmd.ProcessState.ExitCode(), want, code)
				}
			}
			run := func(input, want string, code int) {
				t.Helper()
				cmd, in, out := start()
				ends(cmd, in, out, input, want, code)
			}
			run("cd / && printf '%s\\n' \"$PWD\" 'it'\\''s \\n $SET' && cat\nfirst\nlast", "/\nit's \\n $SET\nfirst\nlast", 0)
			run("exit 42\n", "", 42)
			run("sh -c 'kill -TERM $$' 2>&1\n", map[string]string{"dash": "Terminated\n", "bash": "Terminated\n"}[shell], 143)
			run("echo ${_asz_f-}${_asz_l-}${_asz_i-} $SET\n", "before\n", 0)
			run("", "", 1) // the relay ended

			// What sets the environment changed after the shell had read it.
			cmd, in, out := start()
			rc := filepath.Join(home, map[string]string{"bash": ".bashrc"}[shell])
			if shell != "bash" {
				rc = filepath.Join(home, ".zshenv")
			}
			if err := os.WriteFile(rc, []byte("SET=after\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			later := time.Now().Add(time.Second)
			if err := os.Chtimes(rc, later, later); err != nil {
				t.Fatal(err)
			}
			want := map[string]string{"zsh": "after\n"}[shell]
			if want == "" { // only zsh reads a file without being interactive or a login shell
				want = "before\n"
			}
			ends(cmd, in, out, "echo $SET\n", want, 0)
		})
	}
}

// TestRelayUsesStandby counts what a guest is asked to start.
func TestRelayUsesStandby(t *testing.T) {
	var shells, ended atomic.Int64
	s := serve(t, func(c channel) {
		_, _ = fmt.Fprintf(c, "%s %s", c.cmd, c.term)
		_, _ = io.Copy(c, c)
		c.exit(3)
	}, nil)
	s.standby = func(c *channel) bool {
		shells.Add(1)
		ok := c.readCommand()
		if !ok {
			ended.Add(1)
		}
		return ok
	}
	r := s.relay(t)
	run := func(cmd, input string) string {
		t.Helper()
		var out bytes.Buffer
		err := r.dial(t).Run(t.Context(), cmd, ssh.IO{Stdin: strings.NewReader(input), Stdout: &out})
		if exit, ok := errors.AsType[*ssh.ExitError](err); !ok || exit.Code != 3 {
			t.Errorf("Run(%q) = %v, want exit status 3", cmd, err)
		}
		return out.String()
	}
	waits := func(n int64) {
		t.Helper()
		testenv.WaitFor(t, fmt.Sprintf("standby shell %d", n), func() bool { return shells.Load() == n })
		time.Sleep(20 * time.Millisecond) // until the relay has the answer
	}
	if got := run("one", "in"); got != "one in" || shells.Load() > 1 {
		t.Errorf("output = %q with %d standby shells, want \"one in\" and at most 1", got, shells.Load())
	}
	waits(1)
	was := s.sessions.Load()
	if got := run("two", "in"); got != "two in" {
		t.Errorf("output of a standby shell = %q, want \"two in\"", got)
	}
	waits(2)
	if n := s.sessions.Load(); n != was+1 {
		t.Errorf("sessions for a command = %d, want 1: the next standby shell", n-was)
	}
	// What a standby shell cannot run takes a session of its own, and the shell stays.
	if got := run("thr\nee", "in"); got != "thr\nee in" {
		t.Errorf("output of two lines = %q, want \"thr\\nee in\"", got)
	}
	c := r.dial(t)
	_ = c.Close() // a client that requests nothing
	if shells.Load() != 2 || ended.Load() != 0 {
		t.Errorf("standby shells = %d, of which %d ended, want 2 and 0", shells.Load(), ended.Load())
	}
	time.Sleep(20 * time.Millisecond)
	if got := run("four", ""); got != "four " {
		t.Errorf("output = %q, want \"four \"", got)
	}
	waits(3)
	_, open := r.guest.Relayed()
	if open != 0 {
		t.Errorf("open channels = %d, want 0: a standby shell is not in use", open)
	}
}

// TestRelayWithoutStandby has guests that do not start a standby shell, or whose standby shell ends.
func TestRelayWithoutStandby(t *testing.T) {
	for name, standby := range map[string]func(*channel) bool{
		"ends":   func(c *channel) bool { c.exit(1); return false },
		"is cut": func(c *channel) bool { _ = c.Close(); return false },
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, func(c channel) { _, _ = io.WriteString(c, c.cmd); c.exit(0) }, nil)
			s.standby = standby
			r := s.relay(t)
			for i := range 4 {
				var out bytes.Buffer
				if err := r.dial(t).Run(t.Context(), "cmd", ssh.IO{Stdout: &out}); err != nil || out.String() != "cmd" {
					t.Errorf("Run %d = %q, %v, want \"cmd\", nil", i, &out, err)
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
}
