package lifecycle

import (
	"context"
	"os"
	"os/exec"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// Wake starts a keeper: program with args, as Detach does. Its output is appended to the file
// log.
func Wake(ctx context.Context, program, log string, args ...string) error {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fail.New(fail.Host, "open keeper log: %w", err)
	}
	defer f.Close()
	return Detach(ctx, program, f, args...)
}

// Detach starts program, which is this program, with args as a process that outlives this
// one. Its output goes to log, unless log is nil. Its result appears only there or in the
// store.
func Detach(ctx context.Context, program string, log *os.File, args ...string) error {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program, args...)
	cmd.Dir, cmd.Env = "/", traceid.Environ(ctx, os.Environ())
	if log != nil {
		cmd.Stdout, cmd.Stderr = log, log
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fail.New(fail.Host, "start agent-sessionizer %s: %w", args[0], err)
	}
	go func() { _ = cmd.Wait() }() // only reaps the child if it ends before this process does
	return nil
}
