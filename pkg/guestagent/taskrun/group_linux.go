package taskrun

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"golang.org/x/sys/unix"
)

// cgroups is the directory of the task units' control groups. The agent's processes
// have their own control group below the unit's, which contains the wrapper. This
// allows ending all of them at once without the wrapper, which records how the
// agent ended. A fake guest has no unit: there the agent's processes are the
// descendants of the wrapper, which adopts orphans.

const cgroups = "/sys/fs/cgroup/system.slice"

func (a agentProcesses) cgroup() string { return filepath.Join(cgroups, a.attempt.unit(), "agent") }

// taskGroup is the control group in which the agent's processes start.
type taskGroup struct {
	dir *os.File // directory of the control group, nil for none
}

func (a agentProcesses) makeGroup() (*taskGroup, error) {
	if a.attempt.guest.Fake {
		return &taskGroup{}, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	}
	if err := os.Mkdir(a.cgroup(), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	dir, err := os.Open(a.cgroup())
	return &taskGroup{dir: dir}, err
}

func (g *taskGroup) close() {
	if g.dir != nil {
		_ = g.dir.Close()
	}
}

func (g *taskGroup) attributes() *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true}
	if g.dir != nil {
		a.UseCgroupFD, a.CgroupFD = true, int(g.dir.Fd())
	}
	return a
}

// kill sends a signal to all of the agent's processes. It succeeds if there are
// none.
func (a agentProcesses) kill(sig syscall.Signal) error {
	if a.attempt.guest.Fake {
		for _, p := range a.members() {
			_ = syscall.Kill(p.pid, sig) // a process that ended in the meantime is a success
		}
		return nil
	}
	if sig == syscall.SIGKILL {
		f, err := os.OpenFile(filepath.Join(a.cgroup(), "cgroup.kill"), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString("1")
			err = errors.Join(err, f.Close())
		}
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
			return nil // the group is gone, and its processes with it
		}
		return err
	}
	return filepath.WalkDir(a.cgroup(), func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || e.Name() != "cgroup.procs" {
			return err
		}
		for line := range strings.Lines(sys.Text(path)) {
			// 0 is a process of another namespace, and kill(0) would signal the
			// caller's whole process group.
			if pid, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && pid > 1 {
				_ = syscall.Kill(pid, sig)
			}
		}
		return nil
	})
}

// populated reports whether any of the agent's processes is left.
func (a agentProcesses) populated() bool {
	if a.attempt.guest.Fake {
		for range 2 { // the second pass finds a process whose parent ended during the first
			if len(a.members()) > 0 {
				return true
			}
		}
		return false
	}
	return strings.Contains(sys.Text(filepath.Join(a.cgroup(), "cgroup.events")), "populated 1")
}

// usage returns the processor time of the agent's processes, in milliseconds, and
// their memory.
func (a agentProcesses) usage() (cpu, memory int64) {
	if a.attempt.guest.Fake {
		for _, p := range a.members() {
			cpu += p.cpu
			memory += p.memory
		}
		return cpu, memory
	}
	for line := range strings.Lines(sys.Text(filepath.Join(a.cgroup(), "cpu.stat"))) {
		if text, ok := strings.CutPrefix(line, "usage_usec "); ok {
			cpu, _ = strconv.ParseInt(strings.TrimSpace(text), 10, 64)
		}
	}
	// Read the unit's memory: below the unit no controller counts, and the wrapper
	// is small.
	memory, _ = strconv.ParseInt(strings.TrimSpace(sys.Text(filepath.Join(filepath.Dir(a.cgroup()), "memory.current"))), 10, 64)
	return cpu / 1000, memory
}

// member is a process of an agent in a fake guest.
type member struct {
	pid         int
	cpu, memory int64
}

// members returns the descendants of the wrapper, and the processes whose
// environment marks them as the agent's: the wrapper may have ended.
func (a agentProcesses) members() []member {
	wrapper := a.wrapper
	if wrapper == 0 {
		wrapper = a.attempt.lockHolder()
	}
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil
	}
	parent, ours := map[int]int{}, map[int]bool{}
	stats := map[int][]string{}
	for _, file := range files {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			continue
		}
		p, ok := sys.ProcessAt(pid)
		if !ok {
			continue
		}
		parent[pid] = p.Parent // recorded even for a process that has ended since its child was read
		if p.Ended {
			continue
		}
		ours[pid] = a.marked(pid)
		text := sys.Text(file)
		stats[pid] = strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	}
	var all []member
	for pid, f := range stats {
		descends := false
		for at, steps := pid, 0; at > 1 && steps < 1000 && !descends; at, steps = parent[at], steps+1 {
			descends = at != pid && at == wrapper || ours[at]
		}
		if pid == wrapper || !descends || len(f) < 22 {
			continue
		}
		number := func(i int) int64 { n, _ := strconv.ParseInt(f[i], 10, 64); return n }
		const tick = 10 // milliseconds; Linux always reports this tick to programs
		all = append(all, member{pid: pid, cpu: tick * (number(11) + number(12) + number(13) + number(14)), memory: number(21) * int64(os.Getpagesize())})
	}
	return all
}

// marked reports whether a process's environment names this task and this fake
// guest.
func (a agentProcesses) marked(pid int) bool {
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false
	}
	id, attempt, _ := strings.Cut(a.attempt.name, "/")
	env = append([]byte{0}, env...)
	for _, entry := range []string{"AGENT_GUEST_ROOT=" + a.attempt.guest.Root, "AGENT_TASK=" + id, "AGENT_TASK_ATTEMPT=" + attempt} {
		if !bytes.Contains(env, []byte("\x00"+entry+"\x00")) {
			return false
		}
	}
	return true
}
