package lima

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// poll is how often processes and logs are checked while waiting.
const poll = 50 * time.Millisecond

// killGrace limits the wait for a process that was sent SIGKILL; one in
// uninterruptible sleep (dead NFS) may take longer.
const killGrace = 10 * time.Second

// role is what a process does for a VM.
type role int

const (
	stranger role = iota
	agent         // host agent; on vz it is the VM as well
	driver        // QEMU
	sshMux        // Lima's SSH connection, which outlives a killed host agent
)

// roleOf returns what the process with these arguments does for the VM in dir. A pid
// alone proves nothing: after a crash or a reboot it may belong to any process.
func roleOf(args []string, dir string) role {
	for i, a := range args {
		value := ""
		if i+1 < len(args) {
			value = args[i+1]
		}
		switch {
		case a == "--pidfile" && value == filepath.Join(dir, filenames.HostAgentPID):
			return agent
		case a == "-pidfile" && filepath.Dir(value) == dir && strings.HasSuffix(value, ".pid"):
			return driver
		case strings.Contains(a, filepath.Join(dir, filenames.SSHSock)) &&
			(filepath.Base(args[0]) == "ssh" || args[0] == "ssh:" || strings.HasPrefix(args[0], "ssh: ")):
			return sshMux
		}
	}
	return stranger
}

// parseProcesses reads the output of "ps -o pid=,command=". It splits arguments at blanks: the
// paths that we compare contain none, see New. A line has as many bytes as the system allows for
// arguments.
func parseProcesses(out []byte) map[int][]string {
	table := map[int][]string{}
	for line := range bytes.Lines(out) {
		f := strings.Fields(string(line))
		if len(f) < 2 {
			continue
		}
		if pid, err := strconv.Atoi(f[0]); err == nil {
			table[pid] = f[1:]
		}
	}
	return table
}

// running is what Inspect sees of a VM's processes.
type running struct {
	agent, driver bool
}

func (r running) any() bool { return r.agent || r.driver }

// readProcesses reads the pid files. It is cheap enough for a list, and neither a stale pid
// nor a frozen process disturbs it.
func readProcesses(dir string, m meta) running {
	r := running{
		agent:  pidFileRole(filepath.Join(dir, filenames.HostAgentPID), dir) == agent,
		driver: false,
	}
	switch p := filepath.Join(dir, filenames.PIDFile(m.VMType)); pidFileRole(p, dir) {
	case driver:
		r.driver = true
	case agent: // vz runs inside the host agent
		r.driver = true
	}
	return r
}

func pidFileRole(path, dir string) role {
	b, err := os.ReadFile(path)
	if err != nil {
		return stranger
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return stranger
	}
	return roleOf(arguments(pid), dir)
}

// family finds a VM's processes by their arguments in the whole process table. Pid
// files miss a QEMU whose host agent died before QEMU wrote one.
func family(dir string) (map[int]role, error) {
	table, err := processTable()
	if err != nil {
		return nil, fmt.Errorf("read the process table: %w", err)
	}
	found := map[int]role{}
	for pid, args := range table {
		if r := roleOf(args, dir); r != stranger && pid != os.Getpid() {
			found[pid] = r
		}
	}
	return found, nil
}

// kill ends everything that runs for the VM in dir and clears what it left. Killing
// the host agent first keeps it from starting a QEMU unnoticed, so the table is read
// again until it is empty.
func kill(ctx context.Context, dir string) error {
	deadline := time.Now().Add(killGrace)
	for {
		found, err := family(dir)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return tidy(dir)
		}
		if time.Now().After(deadline) {
			return fail.New(fail.Host, "the VM's processes %v survived SIGKILL", pids(found))
		}
		for _, r := range []role{agent, driver, sshMux} {
			for pid, is := range found {
				if is == r {
					killVerified(pid, r, dir)
				}
			}
		}
		if err := sleep(ctx, poll); err != nil {
			return err
		}
	}
}

// killVerified first takes a handle of the process, a pidfd where available. It then
// checks the arguments again, so that a reused pid is spared. The caller checks the
// process table for the result.
func killVerified(pid int, want role, dir string) {
	p, err := os.FindProcess(pid)
	if err != nil {
		return
	}
	if roleOf(arguments(pid), dir) == want {
		_ = p.Kill()
	}
	_ = p.Release()
}

// tidy removes the pid files, sockets and disk locks of dead processes.
func tidy(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		for _, suffix := range filenames.TmpFileSuffixes {
			if !strings.HasSuffix(e.Name(), suffix) {
				continue
			}
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return releaseDisks(dir)
}

func pids(m map[int]role) []int {
	var out []int
	for pid := range m {
		out = append(out, pid)
	}
	return out
}

// sleep waits for d or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
