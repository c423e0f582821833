package session

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/pbnjay/memory"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Host holds the host's free memory and disk space, in bytes.
type Host struct {
	FreeMemory config.Size
	FreeDisk   config.Size
	DiskDir    string
}

// MeasureHost returns what the host has free, on the disk of dir or of its nearest parent that
// exists.
func MeasureHost(dir string) (Host, error) {
	for {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err == nil {
			return Host{
				FreeMemory: config.Size(freeMemory()),
				FreeDisk:   config.Size(st.Bavail) * config.Size(st.Bsize),
				DiskDir:    dir,
			}, nil
		} else if !os.IsNotExist(err) {
			return Host{}, fail.New(fail.Host, "measure free disk space of %s: %w", dir, err)
		}
		dir = filepath.Dir(dir)
	}
}

// measureCapacity returns what the host has free. Standby VMs count as free memory, each with
// the half of its memory that a new VM is assumed to need: they become sessions, or
// are removed to make room for them.
func measureCapacity(cfg *config.Config) (Host, error) {
	h, err := MeasureHost(cfg.Paths.LimaHome)
	if err != nil || h.FreeMemory == 0 {
		return h, err
	}
	standbys, err := golden.Standbys(cfg.Paths.Pool())
	for _, s := range standbys {
		h.FreeMemory += config.Size(s.Memory) / 2
	}
	return h, err
}

// freeMemory returns the memory that new processes can get. On Linux that is
// MemAvailable, not MemFree: it includes the page cache, which the kernel gives up
// under pressure.
func freeMemory() uint64 {
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			var kib uint64
			if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); n == 1 {
				return kib << 10
			}
		}
	}
	if out, err := exec.CommandContext(context.Background(), "vm_stat").Output(); err == nil { // macOS
		if free := availablePages(string(out)); free > 0 {
			return free
		}
	}
	return memory.FreeMemory()
}

// availablePages reads the output of macOS's vm_stat, and returns the bytes of the pages that the
// kernel gives to new processes. The free ones alone are few: the file cache takes the others.
func availablePages(out string) uint64 {
	var page, pages uint64
	for line := range strings.Lines(out) {
		if _, rest, ok := strings.Cut(line, "page size of "); ok {
			_, _ = fmt.Sscanf(rest, "%d bytes", &page) // otherwise it stays 0, as the result does
		}
		name, number, _ := strings.Cut(line, ":")
		switch name {
		case "Pages free", "Pages inactive", "Pages speculative":
			n, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(number), "."), 10, 40)
			if err != nil {
				return 0
			}
			pages += n
		}
	}
	return pages * page
}

// clamp limits a request to what the host has in total.
func clamp(r config.Resources) (config.Resources, []string, error) {
	var notices []string
	if n := runtime.NumCPU(); r.CPUs > n {
		notices = append(notices, fmt.Sprintf("%d CPUs requested, the host has %d: using %d", r.CPUs, n, n))
		r.CPUs = n
	}
	// A guest with all of the memory would leave none for QEMU and the host.
	if most := config.Size(memory.TotalMemory() / 4 * 3); most > 0 && r.Memory > most {
		most = most >> 20 << 20
		notices = append(notices, fmt.Sprintf("%v of memory requested, using %v: three quarters of the host's memory", r.Memory, most))
		r.Memory = most
	}
	if r.CPUs < config.MinCPUs || r.Memory < config.MinMemory || r.Disk < config.MinDisk {
		return r, nil, fail.New(fail.Usage, "resources too small for a session: cpus %d, memory %v, disk %v; the minimum is %d, %v and %v",
			r.CPUs, r.Memory, r.Disk, config.MinCPUs, config.MinMemory, config.MinDisk).
			WithHint("agent-sessionizer config show")
	}
	return r, notices, nil
}

// Capacity is a snapshot of what the host has free for VMs.
type Capacity struct {
	m      *Manager
	others []store.Session
	host   Host
}

// Capacity measures the host and lists the live sessions.
func (m *Manager) Capacity(ctx context.Context) (Capacity, error) {
	host, err := measureCapacity(m.Config)
	if err != nil {
		return Capacity{}, err
	}
	others, err := m.Store.Sessions(ctx, false)
	return Capacity{m, others, host}, err
}

// Free returns the host's free memory and disk space beyond its reserves, in bytes.
func (r *Capacity) Free() (memory, disk int64) {
	l := r.m.Config.Limits
	return int64(max(0, r.host.FreeMemory-l.MemoryReserve)), int64(max(0, r.host.FreeDisk-l.DiskReserve))
}

// Reserve reserves the capacity for one more session, or returns why none is left.
// Copies of a Capacity are independent.
func (r *Capacity) Reserve(asked Request) error {
	settings, err := r.m.Config.For(config.RepoKey(asked.Repo.Key), asked.Profile)
	if err != nil {
		return err
	}
	size, _, err := clamp(asked.Resources.Over(settings.Resources))
	if err != nil {
		return err
	}
	if err := admit(r.others, size, r.m.Config.Limits, r.host); err != nil {
		return err
	}
	r.others = append(slices.Clip(r.others), store.Session{Name: asked.Repo.Slug, Phase: string(Creating)})
	r.host.FreeMemory -= min(r.host.FreeMemory, size.Memory/2)
	return nil
}

// ReserveResumed reserves the capacity that a session needs to run. It reserves nothing for a
// session that already runs or is gone.
func (r *Capacity) ReserveResumed(id string) error {
	i := slices.IndexFunc(r.others, func(o store.Session) bool { return o.ID == id })
	if i < 0 || runs(Phase(r.others[i].Phase)) {
		return nil
	}
	s, err := read(r.others[i], nil)
	if err != nil {
		return err
	}
	if err := admit(r.others, s.Spec.Resources, r.m.Config.Limits, r.host); err != nil {
		return err
	}
	r.others = slices.Clone(r.others)
	r.others[i].Phase = string(Starting)
	r.host.FreeMemory -= min(r.host.FreeMemory, s.Spec.Resources.Memory/2)
	return nil
}

// runs reports whether a session in phase p has a VM that takes memory.
func runs(p Phase) bool { return p != Stopped && p != Gone && p != Broken }

// admit refuses a VM for which the host has no capacity, and names the sessions that
// could be stopped.
func admit(others []store.Session, r config.Resources, l config.Limits, h Host) error {
	var running []string
	for _, o := range others {
		if runs(Phase(o.Phase)) {
			running = append(running, o.Name)
		}
	}
	hint := "agent-sessionizer list"
	if len(running) > 0 {
		hint = "agent-sessionizer stop " + running[0] // the oldest
	}
	if len(running) >= l.Running {
		return fail.New(fail.Conflict, "limit of %d running VMs reached: stop one of %s, or raise limits.running", l.Running, strings.Join(running, ", ")).
			WithHint("%s", hint)
	}
	// QEMU and vz allocate guest memory as the guest touches it; a fresh guest
	// touches far less than half.
	if need := r.Memory/2 + l.MemoryReserve; h.FreeMemory > 0 && h.FreeMemory < need {
		return fail.New(fail.Conflict, "not enough memory: %v free on the host, a VM of %v needs %v (half of its memory and the reserve of %v)", h.FreeMemory, r.Memory, need, l.MemoryReserve).
			WithHint("%s", hint)
	}
	if h.FreeDisk < l.DiskReserve {
		return fail.New(fail.Host, "not enough disk space: %v free on the disk of %s, the reserve is %v", h.FreeDisk, h.DiskDir, l.DiskReserve).
			WithHint("df -h %s # and: agent-sessionizer destroy SESSION, agent-sessionizer image prune", h.DiskDir)
	}
	return nil
}
