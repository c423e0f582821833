package lima

import (
	"os"
	"strconv"
	"strings"
)

// arguments returns a process's arguments. The result is empty for a process that is
// gone, a zombie, or not visible to us.
func arguments(pid int) []string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	if err != nil || len(b) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
}

func processTable() (map[int][]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	table := make(map[int][]string, len(entries))
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			table[pid] = arguments(pid)
		}
	}
	return table, nil
}
