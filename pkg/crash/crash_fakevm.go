//go:build fakevm

package crash

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// plan is AGENT_SESSIONIZER_CRASH in the form COMMAND:MARK:N:HOW:FILE. The first process of
// that command to reach the Nth mark of that name creates the file and then acts on HOW. With
// COMMAND#K it can only be the Kth process of that command that reached any mark.
// With "kill" it dies as if by kill -9; with "stop" it stops until it receives SIGCONT.
// With "tell", every process appends a line to the file at each of its marks.
var plan = strings.SplitN(os.Getenv("AGENT_SESSIONIZER_CRASH"), ":", 5)

var passed = map[Mark]*atomic.Int64{BeforeCommit: {}, AfterCommit: {}, BeforeFile: {}, AfterFile: {}}

// Here marks a point of the program, at which the process may end or stop. Marks with the
// same name are counted together.
func Here(m Mark) {
	n := passed[m].Add(1)
	if len(plan) < 5 || len(os.Args) < 2 {
		return
	}
	if plan[3] == "tell" {
		tell(m)
		return
	}
	command, which, one := strings.Cut(plan[0], "#")
	if os.Args[1] != command || one && which != order() || string(m) != plan[1] || strconv.FormatInt(n, 10) != plan[2] {
		return
	}
	f, err := os.OpenFile(plan[4], os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return // another process was first
	}
	_, _ = f.WriteString(strconv.Itoa(os.Getpid()))
	_ = f.Close()
	if plan[3] == "stop" {
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		return
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // until the signal arrives
}

func tell(m Mark) {
	appendLine(plan[4], os.Args[1]+" "+string(m)+" "+strconv.Itoa(os.Getpid()))
}

// order returns which process of its command this is, from "1", in the order of their first marks.
var order = sync.OnceValue(func() string {
	path, self := plan[4]+"."+os.Args[1], strconv.Itoa(os.Getpid())
	appendLine(path, self)
	text, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	before, _, _ := strings.Cut("\n"+string(text), "\n"+self+"\n")
	return strconv.Itoa(strings.Count(before, "\n") + 1)
})

func appendLine(path, line string) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	defer f.Close()
	if _, err := f.WriteString(line + "\n"); err != nil {
		panic(err)
	}
}
