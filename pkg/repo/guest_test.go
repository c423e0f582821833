package repo

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// localGuest is a Guest that runs its commands on this machine, with a separate
// home and environment.
type localGuest struct {
	home string
	path string                 // PATH of its programs; "" for the host's
	wrap func(st ssh.IO) ssh.IO // to break connections
}

func newGuest(t *testing.T) *localGuest {
	t.Helper()
	g := &localGuest{home: t.TempDir()}
	write(t, filepath.Join(g.home, ".gitconfig"), `[user]
	name = agent
	email = agent@guest
[init]
	defaultBranch = main
[protocol "file"]
	allow = always
`)
	return g
}

func (g *localGuest) Run(ctx context.Context, cmd string, st ssh.IO) error {
	if g.wrap != nil {
		st = g.wrap(st)
	}
	c := exec.CommandContext(ctx, "sh", "-c", cmd)
	c.Dir = g.home
	c.Env = []string{"HOME=" + g.home, "PATH=" + cmp.Or(g.path, os.Getenv("PATH")), "TMPDIR=" + g.home}
	c.Stdin, c.Stdout, c.Stderr = st.Stdin, st.Stdout, st.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGTERM) }
	c.WaitDelay = time.Minute
	err := c.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return &ssh.ExitError{Code: exit.ExitCode()}
	}
	return err
}

func (g *localGuest) Output(ctx context.Context, cmd string, stdin io.Reader, limit int64) ([]byte, error) {
	var out, said bytes.Buffer
	err := g.Run(ctx, cmd, ssh.IO{Stdin: stdin, Stdout: &pipe.Writer{W: &out, Left: limit}, Stderr: &said})
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, said.String())
	}
	return out.Bytes(), nil
}

// sh runs a script in the guest as the agent would.
func (g *localGuest) sh(t *testing.T, script string) string {
	t.Helper()
	out, err := g.Output(t.Context(), ssh.Quote("sh", "-euc", script), nil, 64<<20)
	if err != nil {
		t.Fatalf("%s in the guest = %v, want nil", script, err)
	}
	return strings.TrimSpace(string(out))
}

// dir returns the path of the guest's checkout.
func (g *localGuest) dir() string { return filepath.Join(g.home, "work", "repo") }

// isolate gives the test process a new home and no git environment.
func isolate(t *testing.T) string {
	t.Helper()
	for _, tool := range []string{"git", "timeout"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%v; install it: apt-get install git coreutils", err)
		}
	}
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("XDG_CONFIG_HOME", filepath.Join(home, "xdg"))
	t.Setenv("GIT_CONFIG_NOSYSTEM", "1")
	write(t, filepath.Join(home, ".gitconfig"), "[user]\n\tname = user\n\temail = user@host\n[init]\n\tdefaultBranch = main\n[advice]\n\tdefaultBranchName = false\n")
	return home
}

// host runs a script on the host, as its user would.
func host(t *testing.T, dir, script string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-euc", script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s on the host = %v, want nil\n%s", script, err, out)
	}
	return strings.TrimSpace(string(out))
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// upstream creates a remote repository with two branches and a tag, and returns its
// Ref (a file URL).
func upstream(t *testing.T) (Ref, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "owner", "project.git")
	work := t.TempDir()
	host(t, work, `git init -q . && echo one >a && git add a && git commit -qm one && git tag -a v1 -m v1
		git switch -qc feature && echo two >b && git add b && git commit -qm two && git switch -q main
		echo three >c && git add c && git commit -qm three
		git clone -q --bare . '`+dir+`'`)
	ref, err := Parse("file://"+dir, "/")
	if err != nil {
		t.Fatal(err)
	}
	return ref, dir
}

// advance adds a commit to a branch of a bare repository.
func advance(t *testing.T, bare, branch string) string {
	t.Helper()
	return host(t, bare, `git update-ref refs/heads/`+branch+` "$(git commit-tree -p refs/heads/`+branch+` -m more refs/heads/`+branch+`^{tree})"
		git rev-parse refs/heads/`+branch)
}

func mirrors(t *testing.T) *Mirrors {
	t.Helper()
	return &Mirrors{Dir: filepath.Join(t.TempDir(), "mirrors"), Pauses: (&pauses{each: func(time.Duration) { t.Error("retries = 1, want 0") }}).new}
}

func ensure(t *testing.T, m *Mirrors, ref Ref) Mirror {
	t.Helper()
	mirror, err := m.Ensure(t.Context(), ref, nil)
	if err != nil {
		t.Fatal(err)
	}
	if mirror.Warning != "" {
		t.Fatalf("warning of Ensure = %q, want none", mirror.Warning)
	}
	return mirror
}

func push(t *testing.T, g Guest, src Source, dir string) Base {
	t.Helper()
	base, err := Push(t.Context(), g, src, Checkout{Dir: dir}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return base
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s = %v, want %v", what, got, want)
	}
}
