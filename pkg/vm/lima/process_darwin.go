package lima

import (
	"context"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// arguments returns a process's arguments as ps prints them, split at blanks: the
// paths that we compare contain none, see New.
func arguments(pid int) []string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "ps", "-ww", "-o", "command=", "-p", strconv.Itoa(pid)).Output()
	if err != nil {
		return nil
	}
	return strings.Fields(string(out))
}

func processTable() (map[int][]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "ps", "-axww", "-o", "pid=,command=").Output()
	if err != nil {
		return nil, err
	}
	return parseProcesses(out), nil
}
