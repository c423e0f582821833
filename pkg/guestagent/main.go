// Package guestagent is the program inside a session's VM. It enforces the network
// policy (firewall and DNS), holds the session's secrets in memory, and answers
// git's credential requests.
//
// It is a guard rail, not a security boundary: the agent is root in the guest and
// can disable it. Everything that must hold against root is enforced by the host.
// The program contacts nothing outside the guest except the resolver of the guest's
// network, and writes secrets only to memory-backed files.
package guestagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/boot"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// Main runs the program and returns its exit status.
func Main(version string, args []string, in io.Reader, out, errs io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if boot.InInitrd() {
		return int(fail.CodeOf(boot.Initrd()))
	}
	err := dispatch(ctx, args, &call{guest: sys.FromEnv(), version: version, in: in, out: out, errs: errs})
	if err == nil {
		return 0
	}
	fmt.Fprintf(errs, "agent-guest: %v\n", err)
	if hint := fail.HintOf(err); hint != "" {
		fmt.Fprintf(errs, "hint: %s\n", hint)
	}
	return int(fail.CodeOf(err))
}

// readyOnce returns a function that calls notifySystemd the first time.
func readyOnce(ctx context.Context) func() {
	return sync.OnceFunc(func() { notifySystemd(ctx) })
}

// notifySystemd reports that the firewall is active, so that systemd may start the
// network.
func notifySystemd(ctx context.Context) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "unixgram", path)
	if err != nil {
		return // systemd's own timeout reports the failure then
	}
	_, err = io.WriteString(c, "READY=1")
	_ = errors.Join(err, c.Close())
}
