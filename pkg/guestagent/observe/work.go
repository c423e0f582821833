package observe

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// Limits on the rate of scans of the checkout, each of which can take a while:
// scans use at most a twentieth of the time, or a quarter after a turn has ended.
const (
	workShare = 20
	turnEvery = 2 * time.Second
	turnShare = 4
	workQuiet = 5 * time.Minute // scan even without signs of activity
)

// Bounds of the counts.
const (
	maxUntracked = 2000    // untracked files whose lines are counted
	maxUnread    = 4 << 20 // total bytes of these files
)

// work is the known state of the checkout.
type work struct {
	running bool
	began   time.Time
	asked   time.Time // last check for activity
	took    time.Duration
	stirred bool // something happened since the last scan
	turned  bool // a turn ended since the last scan
	changes *guestproto.Changes
}

func (w *watcher) workDue(now time.Time) bool {
	k := &w.work
	since := now.Sub(k.began)
	switch {
	case k.running || w.options.Dir == "" || since < turnEvery:
		return false
	case since >= workQuiet:
		return true
	case k.turned && since >= turnShare*k.took:
		return true
	case since < roundEvery || since < workShare*k.took:
		return false
	case k.stirred:
		return true
	case now.Sub(k.asked) < screenEvery:
		return false
	}
	k.asked = now
	return w.touched(k.began)
}

// touched reports whether there may have been work since a time: a terminal was
// written to, or git changed one of its files.
func (w *watcher) touched(since time.Time) bool {
	for _, p := range w.view.panes {
		if written(p.tty, since) {
			return true
		}
	}
	since = since.Add(-time.Second) // file timestamps lag slightly behind the clock
	for _, name := range []string{"HEAD", "index", "logs/HEAD"} {
		if info, err := os.Stat(filepath.Join(w.options.Dir, ".git", name)); err == nil && !info.ModTime().Before(since) {
			return true
		}
	}
	return false
}

func (w *watcher) worker(now time.Time) func(context.Context) func() {
	w.work.began, w.work.stirred, w.work.turned = now, false, false
	o := w.options
	return func(ctx context.Context) func() {
		began := time.Now()
		changes, err := o.changes(ctx)
		took := time.Since(began)
		return func() {
			w.work.running, w.work.took = false, took
			if err == nil {
				w.work.changes = changes
			}
		}
	}
}

// changes counts the differences between the checkout and base. It changes nothing
// in the checkout, and takes no lock that the agent's own git might wait for.
func (o Options) changes(ctx context.Context) (*guestproto.Changes, error) {
	c := &guestproto.Changes{}
	git := func(use func(string), args ...string) error { return o.git(ctx, use, args...) }
	first := func(to *string) func(string) {
		return func(s string) {
			if *to == "" {
				*to = strings.TrimSpace(s)
			}
		}
	}
	var top, count string
	if err := git(first(&top), "rev-parse", "--show-toplevel"); err != nil {
		return nil, err
	}
	// It fails if HEAD is detached.
	_ = git(first(&c.Branch), "symbolic-ref", "-q", "--short", "HEAD")
	base := o.Base
	revs := []string{"rev-list", "--count", "--branches", "--ignore-missing", "HEAD", "--not", "--remotes"}
	if base == "" {
		if err := git(first(&base), "hash-object", "-t", "tree", os.DevNull); err != nil {
			return nil, err
		}
	} else {
		revs = append(revs, base)
	}
	// It fails if HEAD has no commit.
	if git(first(&count), revs...) == nil {
		c.Commits, _ = strconv.Atoi(count)
	}
	err := git(func(line string) {
		f := strings.SplitN(line, "\t", 3)
		if len(f) != 3 {
			return
		}
		c.Files++
		plus, _ := strconv.Atoi(f[0]) // "-" for a binary file
		minus, _ := strconv.Atoi(f[1])
		c.Insertions += plus
		c.Deletions += minus
	}, "diff", "--numstat", "-z", "--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", base, "--")
	if err != nil {
		return nil, err
	}
	read, files := int64(0), 0
	err = git(func(name string) {
		c.Files++
		if files++; files <= maxUntracked && read < maxUnread && ctx.Err() == nil {
			n, size := countLines(filepath.Join(top, name), maxUnread-read)
			c.Insertions += n
			read += size
		}
	}, "-C", top, "ls-files", "--others", "--exclude-standard", "-z")
	if err != nil {
		return nil, err
	}
	return c, nil
}

// git runs git in the checkout and calls use for each entry of its output. The
// checkout's configuration may make git run programs, as it does when the agent
// calls git. Hooks and the file system monitor, which the answer does not need, are
// disabled.
func (o Options) git(ctx context.Context, use func(entry string), args ...string) error {
	out := &sys.Entries{Use: use}
	err := runAside(ctx, out, "nice", append([]string{
		"-n", "10", "git", "-C", o.Dir, "-c", "core.fsmonitor=false", "-c", "core.hooksPath=" + os.DevNull, "-c", "core.quotePath=false",
	}, args...)...)
	if err != nil {
		return err
	}
	out.End()
	return nil
}

// countLines counts the lines of a text file of at most most bytes, as git would.
// It also returns the number of bytes read.
func countLines(path string, most int64) (n int, size int64) {
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() > most {
		return 0, 0
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return 0, 0
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil || bytes.IndexByte(text[:min(len(text), 8000)], 0) >= 0 {
		return 0, int64(len(text))
	}
	n = bytes.Count(text, []byte("\n"))
	if len(text) > 0 && text[len(text)-1] != '\n' {
		n++
	}
	return n, int64(len(text))
}

// Steps of the machine's figures: smaller changes are not reported.
const (
	loadStep = 0.25
	memStep  = 32 << 20
	diskStep = 16 << 20
)

// measure returns the machine's load and its memory and disk usage, or the previous
// value if they are about the same.
func measure(before *guestproto.Machine, terminals string) *guestproto.Machine {
	m := guestproto.Machine{Input: lastInput(terminals)}
	if f := strings.Fields(sys.Text("/proc/loadavg")); len(f) > 0 {
		m.Load, _ = strconv.ParseFloat(f[0], 64)
	}
	var free int64
	for line := range strings.Lines(sys.Text("/proc/meminfo")) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "MemTotal:":
			m.MemTotal = n << 10
		case "MemAvailable:":
			free = n << 10
		}
	}
	m.MemUsed = m.MemTotal - free
	var st syscall.Statfs_t
	if syscall.Statfs("/", &st) == nil {
		unit := uint64(st.Bsize)
		m.DiskTotal, m.DiskUsed = int64(st.Blocks*unit), int64((st.Blocks-st.Bfree)*unit)
	}
	if before != nil && alike(m, *before) {
		return before
	}
	return &m
}

func alike(a, b guestproto.Machine) bool {
	return a.MemTotal == b.MemTotal && a.Input == b.Input && a.DiskTotal == b.DiskTotal &&
		near(a.Load, b.Load, loadStep) && near(a.MemUsed, b.MemUsed, memStep) && near(a.DiskUsed, b.DiskUsed, diskStep)
}

// lastInput returns when a program last read from a terminal in dir, as Unix time, or 0 for
// never. The kernel records that in the access time, to within eight seconds.
func lastInput(dir string) (at int64) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	for _, e := range entries {
		var st unix.Stat_t
		if _, err := strconv.Atoi(e.Name()); err == nil && unix.Stat(filepath.Join(dir, e.Name()), &st) == nil {
			at = max(at, st.Atim.Sec)
		}
	}
	return at
}

func near[T int64 | float64](a, b, step T) bool { return a-b < step && b-a < step }
