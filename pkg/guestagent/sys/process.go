package sys

import (
	"strconv"
	"strings"
)

// Process is a process as the kernel describes it.
type Process struct {
	PID, Parent int
	Name        string
	Start       string // clock ticks since the machine booted
	Ended       bool   // a zombie or dead process
}

// ProcessAt returns the process with a number, if there is one.
func ProcessAt(pid int) (Process, bool) {
	text := Text("/proc/" + strconv.Itoa(pid) + "/stat")
	// A process name may contain any character, including parentheses.
	from, to := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if from < 0 || to < from {
		return Process{}, false
	}
	f := strings.Fields(text[to+1:])
	if len(f) < 20 {
		return Process{}, false
	}
	parent, err := strconv.Atoi(f[1])
	return Process{PID: pid, Parent: parent, Name: text[from+1 : to], Start: f[19], Ended: strings.ContainsAny(f[0], "ZX")}, err == nil
}
