package guestd

import (
	"cmp"
	"context"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

// How often what is looked at. A guest may be one emulated processor, which the
// agent wants for itself.
const (
	lookEvery   = 250 * time.Millisecond // while an agent works or waits: a handful of system calls
	sureEvery   = time.Second            // some more, for what the handful may miss; enough for agents at rest
	screenEvery = 2 * time.Second        // a process; when the terminal was written to
	bellEvery   = 3 * time.Second        // a process; while a window has rung
	roundEvery  = 15 * time.Second       // tmux's windows, the machine
	sayEvery    = time.Minute            // a line, also when nothing changed
	keepGone    = 10 * time.Minute       // an agent that ended
)

const maxNotes = 64 // files of hooks that are looked at

// frugal trades the collector's work, of which there is next to none, for
// memory: what lives is a few hundred kilobytes.
func frugal() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(16 << 20)
}

// watchOptions: with a directory its changes since base, a commit; "" when it
// began with none.
type watchOptions struct {
	dir, base string
}

var commitID = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})?$`)

// Watch prints a glance each time that something of it changes, until ctx ends
// or in does: whoever started it is gone then.
func (g Guest) Watch(ctx context.Context, o watchOptions, in io.Reader, out io.Writer) error {
	if !commitID.MatchString(o.base) {
		return fail.New(fail.Usage, "watch: --base wants the id of a commit")
	}
	ctx, cancel := context.WithCancel(ctx)
	// Nobody waits for it: a read ends when its sender likes.
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	w := newWatcher(g, o, out)
	defer w.tasks.Wait()
	defer cancel()
	for {
		now := time.Now()
		w.look(now)
		if err := w.say(now); err != nil {
			return err
		}
		w.begin(ctx, now)
		select {
		case <-ctx.Done():
			return nil
		case learned := <-w.results:
			learned()
			w.news = true
		case <-time.After(w.pace()):
		}
	}
}

// watcher is one run of Watch. Its goroutine alone touches it; tasks, which are
// what takes longer, bring what they learned as functions for it to call.
type watcher struct {
	guest   Guest
	options watchOptions
	out     io.Writer
	results chan func()
	tasks   sync.WaitGroup

	agents  map[string]*noted    // by file
	bells   map[string]time.Time // since when, by window
	dir     stamp                // of the directory that these are in
	sure    time.Time            // that was read
	round   time.Time            // the machine was looked at
	machine *wire.Machine
	view    view
	work    work

	news   bool // there may be, since list was made
	list   []entry
	said   wire.Glance
	saidAt time.Time
}

// noted is what is known of one agent.
type noted struct {
	news   // as its hooks wrote it
	stamp  stamp
	claude claude
	seen   stamp // of Claude Code's file
	now    news  // as it is shown
}

// stamp tells one content of a file from the next.
type stamp struct {
	changed time.Time
	size    int64
	info    fs.FileInfo // a rewritten file is another one, also within one tick of the clock
}

func stampOf(path string) (stamp, bool) {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}, false
	}
	return stamp{info.ModTime(), info.Size(), info}, true
}

func (s stamp) same(t stamp) bool {
	return s.info != nil && t.info != nil && s.size == t.size && s.changed.Equal(t.changed) && os.SameFile(s.info, t.info)
}

func newWatcher(g Guest, o watchOptions, out io.Writer) *watcher {
	return &watcher{guest: g, options: o, out: out, results: make(chan func()), agents: map[string]*noted{}, bells: map[string]time.Time{}}
}

// look reads what costs next to nothing.
func (w *watcher) look(now time.Time) {
	dir, _ := stampOf(w.guest.path(attentionDir))
	sure := now.Sub(w.sure) >= sureEvery
	if sure || !dir.same(w.dir) {
		w.dir = dir
		w.read()
	}
	if sure {
		w.sure = now
	}
	for name, a := range w.agents {
		w.follow(name, a, now, sure)
	}
	if now.Sub(w.round) >= roundEvery {
		w.round = now
		w.machine = measure(w.machine)
		w.news = true
	}
}

// read reads what hooks and bells left.
func (w *watcher) read() {
	dir := w.guest.path(attentionDir)
	there := map[string]bool{}
	for _, name := range listing(dir, maxNotes) {
		path := filepath.Join(dir, name)
		s, ok := stampOf(path)
		if !ok {
			continue
		}
		if number, ok := strings.CutPrefix(name, bellPrefix); ok && windowID.MatchString("@"+number) {
			there["@"+number] = true
			w.bells["@"+number] = s.changed.UTC()
		} else if strings.HasSuffix(name, ".json") {
			there[name] = true
			w.note(name, path, s)
		}
	}
	maps.DeleteFunc(w.agents, func(name string, _ *noted) bool { return !there[name] })
	maps.DeleteFunc(w.bells, func(window string, _ time.Time) bool { return !there[window] })
	w.news = true
}

// note reads a hook's file, if it is another than before.
func (w *watcher) note(name, path string, s stamp) {
	a := w.agents[name]
	if a != nil && a.stamp.same(s) {
		return
	}
	n, err := readNews(path)
	if err != nil || n.file() != name || n.State.Urgency() > wire.AgentGone.Urgency() {
		return // not one of ours
	}
	if a == nil {
		a = &noted{}
		w.agents[name] = a
	}
	a.news, a.stamp = n, s
}

// follow compares what an agent's hooks said with the agent. It is sure at times
// that the process is still the same one.
func (w *watcher) follow(name string, a *noted, now time.Time, sure bool) {
	before := a.now
	switch {
	case a.State == wire.AgentGone:
		if now.Sub(a.Since) > keepGone {
			_ = os.Remove(filepath.Join(w.guest.path(attentionDir), name)) // the next look tries again
		}
	case (sure || syscall.Kill(a.PID, 0) != nil) && !a.lives():
		// Written down, so that it is as old to the next who watches.
		at := now.UTC().Round(0)
		a.State, a.On, a.Since, a.At = wire.AgentGone, "", at, at
		_ = w.guest.writeNews(a.news)
	}
	if a.File != "" {
		if s, ok := stampOf(a.File); !ok {
			a.claude, a.seen = claude{}, stamp{}
		} else if !a.seen.same(s) {
			// It may be half written.
			if c := readClaude(a.File); c.of(process{pid: a.PID, start: a.Start}) {
				a.claude, a.seen = c, s
			}
		}
	}
	a.now = a.with(a.claude, now)
	if a.now != before {
		w.news = true
		w.work.stirred = true
		// The end of a turn is when somebody wants to see what came of it.
		w.work.turned = w.work.turned || before.State == wire.AgentWorking && a.now.State != before.State
	}
}

// lives reports whether the agent's process runs.
func (n news) lives() bool {
	p, ok := processAt(n.PID)
	return ok && !p.ended && p.start == n.Start
}

// say prints the glance if it is another than the last, or that one is old.
func (w *watcher) say(now time.Time) error {
	if now.Sub(w.saidAt) < sayEvery && !w.news {
		return nil
	}
	w.news = false
	w.list = w.entries()
	g := wire.Glance{
		Version: wire.Version, Window: w.view.shown.name, Screen: w.view.screen, Changes: w.work.changes, Machine: w.machine,
	}
	for _, e := range w.list {
		g.Agents = append(g.Agents, e.Agent)
	}
	if now.Sub(w.saidAt) < sayEvery && reflect.DeepEqual(g, w.said) {
		return nil
	}
	w.said, w.saidAt = g, now
	return g.Encode(w.out)
}

// entry is one agent of the list.
type entry struct {
	wire.Agent
	window string // that rang, of an agent that says nothing itself
}

// entries are the agents as they are shown, the most urgent and then the one that
// is so for longest first.
func (w *watcher) entries() []entry {
	var list []entry
	for _, a := range w.agents {
		list = append(list, entry{Agent: wire.Agent{Name: a.Agent, PID: a.PID, State: a.now.State, On: a.now.On, Since: a.now.Since}})
	}
	for window, since := range w.bells {
		if name, ok := w.view.rang(window); ok {
			list = append(list, entry{Agent: wire.Agent{Name: name, State: wire.AgentBlocked, On: "bell in window " + name, Since: since}, window: window})
		}
	}
	slices.SortFunc(list, func(a, b entry) int {
		return cmp.Or(a.State.Urgency()-b.State.Urgency(), a.Since.Compare(b.Since), a.PID-b.PID, cmp.Compare(a.window, b.window))
	})
	return list
}

// begin starts what is due.
func (w *watcher) begin(ctx context.Context, now time.Time) {
	if due, list := w.viewDue(now); due {
		w.view.running = true
		w.aside(ctx, w.viewer(now, list))
	}
	if w.workDue(now) {
		w.work.running = true
		w.aside(ctx, w.worker(now))
	}
}

// pace is how soon to look again. Before it asks for something, an agent at rest
// is given work.
func (w *watcher) pace() time.Duration {
	for _, e := range w.list {
		if e.State == wire.AgentWorking || e.State == wire.AgentBlocked && e.window == "" {
			return lookEvery
		}
	}
	return sureEvery
}

// aside runs a task, and has the watcher learn what came of it.
func (w *watcher) aside(ctx context.Context, look func(context.Context) (learned func())) {
	w.tasks.Go(func() {
		learned := look(ctx)
		select {
		case w.results <- learned:
		case <-ctx.Done():
		}
	})
}
