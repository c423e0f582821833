//go:build fakevm

package store

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// kill is AGENT_SESSIONIZER_KILL, COMMAND:WHEN:N:FILE: the first process of that
// command to get there ends as by kill -9 before or after it commits for the Nth
// time, and leaves the file.
var kill = strings.SplitN(os.Getenv("AGENT_SESSIONIZER_KILL"), ":", 4)

var commits = map[string]*atomic.Int64{"before": {}, "after": {}}

func killHere(when string) {
	n := commits[when].Add(1)
	if len(kill) < 4 || len(os.Args) < 2 || os.Args[1] != kill[0] || when != kill[1] || strconv.FormatInt(n, 10) != kill[2] {
		return
	}
	f, err := os.OpenFile(kill[3], os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return // another was the first
	}
	_ = f.Close()
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // until it comes
}
