package session

import (
	"context"
	"os"
	"os/exec"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// Detach starts this program with args as a process that outlives this one. Its
// output goes to log, unless log is nil. Its result appears only there or in the
// store.
func (m *Manager) Detach(ctx context.Context, log *os.File, args ...string) error {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), m.Self, args...)
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
