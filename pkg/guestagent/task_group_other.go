//go:build !linux

package guestagent

import (
	"errors"
	"os"
	"strconv"
	"syscall"
)

// taskGroup is empty: only fake guests run here, and their agents' processes form a
// process group.

type taskGroup struct{}

func (t task) makeGroup() (*taskGroup, error) { return &taskGroup{}, nil }

func (*taskGroup) close() {}

func (*taskGroup) attributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func (t task) kill(sig syscall.Signal) error {
	text, _ := os.ReadFile(t.path(taskAgent))
	pid, _ := strconv.Atoi(string(text))
	if pid <= 1 {
		return nil
	}
	if err := syscall.Kill(-pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EPERM) {
		return err
	}
	return nil
}

func (t task) populated() bool {
	text, _ := os.ReadFile(t.path(taskAgent))
	pid, _ := strconv.Atoi(string(text))
	return pid > 1 && syscall.Kill(-pid, 0) == nil
}

func (t task) usage() (cpu, memory int64) { return 0, 0 }
