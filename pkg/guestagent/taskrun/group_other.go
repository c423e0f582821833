//go:build !linux

package taskrun

import (
	"errors"
	"os"
	"strconv"
	"syscall"
)

// taskGroup is empty: only fake guests run here, and their agents' processes form a
// process group.

type taskGroup struct{}

func (a agentProcesses) makeGroup() (*taskGroup, error) { return &taskGroup{}, nil }

func (*taskGroup) close() {}

func (*taskGroup) attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func (a agentProcesses) kill(sig syscall.Signal) error {
	text, _ := os.ReadFile(a.attempt.path(taskAgent))
	pid, _ := strconv.Atoi(string(text))
	if pid <= 1 {
		return nil
	}
	if err := syscall.Kill(-pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EPERM) {
		return err
	}
	return nil
}

func (a agentProcesses) populated() bool {
	text, _ := os.ReadFile(a.attempt.path(taskAgent))
	pid, _ := strconv.Atoi(string(text))
	return pid > 1 && syscall.Kill(-pid, 0) == nil
}

func (a agentProcesses) usage() (cpu, memory int64) { return 0, 0 }
