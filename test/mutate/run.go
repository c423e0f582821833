package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Verdict is the outcome of a mutant.
type Verdict string

// The verdicts. A timeout counts as detected, because it makes go test fail, too.
const (
	Killed   Verdict = "killed"
	Timeout  Verdict = "timeout"
	Survived Verdict = "survived"
	Invalid  Verdict = "does not compile" // not counted as a mutant
)

// try compiles the tests with one mutant and runs them. It leaves the source tree
// unchanged: the compiler reads the changed file through an overlay.
func (p *Package) try(ctx context.Context, m *Mutant) (Verdict, error) {
	dir, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	changed, err := m.apply()
	if err != nil {
		return "", err
	}
	file, binary := filepath.Join(dir, "changed.go"), filepath.Join(dir, "mutant.test")
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {m.File: file}})
	if err != nil {
		return "", err
	}
	if err := errors.Join(os.WriteFile(file, changed, 0o600), os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600)); err != nil {
		return "", err
	}
	if err := p.build(ctx, binary, "-overlay="+filepath.Join(dir, "overlay.json")); err != nil {
		return Invalid, ctx.Err()
	}
	_, err = p.run(ctx, binary, dir, 10*time.Second+5*p.baseline, "-test.failfast")
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(err, context.DeadlineExceeded):
		return Timeout, nil
	case err != nil:
		return Killed, nil
	}
	return Survived, nil
}

// apply returns the content of the file with the mutant applied.
func (m *Mutant) apply() ([]byte, error) {
	src, err := os.ReadFile(m.File)
	if err != nil {
		return nil, err
	}
	return slices.Concat(src[:m.start], []byte(m.with), src[m.end:]), nil
}

// run runs a test binary with its own temporary and home directories, and kills all
// processes that it started. After the limit, its error is context.DeadlineExceeded.
func (p *Package) run(ctx context.Context, binary, dir string, limit time.Duration, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tmp, err := os.MkdirTemp(dir, "t") // a short name, because the tests' sockets are below it
	if err != nil {
		return nil, err
	}
	// Some tests run a process as another user, which must reach the tests' files.
	if err := errors.Join(os.Chmod(dir, 0o711), os.Chmod(tmp, 0o711)); err != nil {
		return nil, err
	}
	argv := append(slices.Clone(sandbox()), append([]string{binary, "-test.timeout=0"}, args...)...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = p.Dir
	cmd.Env = append(os.Environ(), append(goEnv(), "PWD="+p.Dir, "TMPDIR="+tmp, "HOME="+tmp, "GOCOVERDIR="+dir)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second // child processes may keep its output open
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // no process may be left
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	} else if errors.Is(err, exec.ErrWaitDelay) {
		err = nil
	}
	return out.Bytes(), err
}

// sandbox returns the command that confines a mutant's processes, where the system supports
// it. Without it, a mutant of code that sends signals could signal any process. In the
// sandbox, the tests see only their own processes, which die with it.
var sandbox = sync.OnceValue(func() []string {
	if runtime.GOOS != "linux" {
		return nil
	}
	for _, more := range [][]string{nil, {"--user", "--map-current-user"}} {
		argv := append(append([]string{"unshare"}, more...), "--pid", "--fork", "--kill-child", "--mount-proc", "--", "sh", "-c", `"$@"; exit $?`, "sh")
		if exec.Command(argv[0], append(argv[1:], "true")...).Run() == nil { //nolint:noctx // ends at once
			return argv
		}
	}
	return nil
})

// goEnv returns variables that keep the toolchain's caches in place, for tests that build.
var goEnv = sync.OnceValue(func() (env []string) {
	for _, name := range []string{"GOCACHE", "GOMODCACHE", "GOPATH"} {
		if out, err := exec.Command("go", "env", name).Output(); err == nil { //nolint:noctx // ends at once
			env = append(env, name+"="+strings.TrimSpace(string(out)))
		}
	}
	return env
})
