package taskrun

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// agentProcesses are all processes of an attempt's agent.
type agentProcesses struct {
	attempt Attempt
	wrapper int // this process if it holds the lock, because it cannot query its own lock
}

// clear kills the processes that the agent left behind.
func (a agentProcesses) clear() error {
	deadline := time.Now().Add(stragglerTime)
	for {
		if err := a.kill(syscall.SIGKILL); err != nil {
			return fmt.Errorf("stop the agent's remaining processes: %w", err)
		}
		if !a.populated() {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.New("some of the agent's remaining processes cannot be stopped")
		}
		time.Sleep(20 * time.Millisecond)
	}
}
