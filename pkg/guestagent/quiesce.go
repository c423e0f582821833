package guestagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// Limits of quiesce: the time that processes have to end when they are asked to, and once they were
// killed.
const (
	endWait  = 10 * time.Second
	killWait = 4 * time.Second
)

// workServices run programs of the agent outside its login sessions: containers and jobs.
var workServices = []string{"docker", "containerd", "podman", "cron", "atd"}

// workGroups are parts of the control groups in which the agent's programs run.
var workGroups = []string{
	"/user.slice/", "/machine.slice/", "/docker", "/agent-task",
	"/system.slice/cron.service", "/system.slice/atd.service", "/system.slice/podman",
}

// quiesce ends all programs of the agent: those of its user, those in login sessions, tasks,
// containers and jobs. Only the login session that it runs in remains. Afterwards the checkout
// no longer changes, unless by a system service that the agent installed. It prints the name of
// each process that it ended, quoted, on a line: if a second call prints nothing, nothing ran
// between the two.
func quiesce(ctx context.Context, g sys.Guest, out io.Writer) error {
	if g.Fake {
		return nil // its processes are those of the host
	}
	stopWorkServices(ctx)
	uid, err := strconv.Atoi(os.Getenv("SUDO_UID"))
	if err != nil {
		return fmt.Errorf("find the agent's user: SUDO_UID is %q", os.Getenv("SUDO_UID"))
	}
	mine := ancestry(os.Getpid())
	seen := map[int]string{}
	for _, round := range []struct {
		signals []syscall.Signal // an interactive shell ends only at a SIGHUP
		wait    time.Duration
	}{{[]syscall.Signal{syscall.SIGTERM, syscall.SIGHUP}, endWait}, {[]syscall.Signal{syscall.SIGKILL}, killWait}} {
		sent := map[int]bool{} // a second signal could keep a program from saving its state
		for deadline := time.Now().Add(round.wait); time.Now().Before(deadline); {
			left, err := workProcesses(mine, uint32(uid))
			if err != nil {
				return err
			}
			if len(left) == 0 {
				for _, pid := range slices.Sorted(maps.Keys(seen)) {
					fmt.Fprintf(out, "%.64q\n", seen[pid])
				}
				return nil
			}
			for pid, name := range left {
				for _, signal := range round.signals {
					if !sent[pid] {
						_ = syscall.Kill(pid, signal) // it may have ended
					}
				}
				sent[pid], seen[pid] = true, name
			}
			select {
			case <-time.After(100 * time.Millisecond): // other processes send no event
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	}
	return errors.New("end the agent's processes: some remain")
}

// stopWorkServices asks systemd to stop those workServices that run, so that they start nothing
// new. It does not wait: what they started is killed like other processes.
func stopWorkServices(ctx context.Context) {
	var units []string
	for _, name := range workServices {
		if _, err := os.Stat("/sys/fs/cgroup/system.slice/" + name + ".service"); err == nil {
			units = append(units, name+".service")
		}
	}
	if len(units) == 0 {
		return
	}
	if slices.Contains(units, "docker.service") {
		units = append([]string{"docker.socket"}, units...) // otherwise it starts the service again
	}
	ctx, cancel := context.WithTimeout(ctx, endWait)
	defer cancel()
	_ = exec.CommandContext(ctx, "systemctl", append([]string{"stop", "--no-block"}, units...)...).Run() // their processes are killed anyway
}

// ancestry returns a process and those above it.
func ancestry(pid int) map[int]bool {
	all := map[int]bool{}
	for pid > 1 && !all[pid] {
		all[pid] = true
		p, ok := sys.ProcessAt(pid)
		if !ok {
			break
		}
		pid = p.Parent
	}
	return all
}

// workProcesses returns the processes of the agent's user and those in workGroups, except mine,
// with their names.
func workProcesses(mine map[int]bool, uid uint32) (found map[int]string, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	found = map[int]string{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || mine[pid] {
			continue
		}
		p, ok := sys.ProcessAt(pid)
		if !ok || p.Ended {
			continue
		}
		var st syscall.Stat_t
		if syscall.Stat("/proc/"+e.Name(), &st) == nil && st.Uid == uid {
			found[pid] = p.Name
			continue
		}
		group := sys.Text("/proc/" + e.Name() + "/cgroup")
		if slices.ContainsFunc(workGroups, func(part string) bool { return strings.Contains(group, part) }) {
			found[pid] = p.Name
		}
	}
	return found, nil
}
