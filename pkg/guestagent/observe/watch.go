package observe

import (
	"cmp"
	"context"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// Polling intervals. A guest may have a single emulated processor, which the agent
// needs.
const (
	lookEvery   = 250 * time.Millisecond // while an agent works or waits: a handful of system calls
	sureEvery   = time.Second            // a few more calls for missed changes; enough for idle agents
	screenEvery = 2 * time.Second        // starts a process; only if the terminal was written to
	bellEvery   = 3 * time.Second        // starts a process; only while a window has rung
	roundEvery  = 15 * time.Second       // tmux's windows and the machine's figures
	sayEvery    = time.Minute            // minimum rate of lines, even without changes
	keepGone    = 10 * time.Minute       // how long to list an agent that has ended
)

const maxNotes = 64 // maximum number of hook files read

// Options names the directory whose changes since base to report, if any. base
// is a commit, or "" if the checkout began without one.
type Options struct {
	Dir, Base string
}

var commitID = lazyregexp.New(`^([0-9a-f]{40}|[0-9a-f]{64})?$`)

// Watch prints an observation at each change, and receives the answers to questions from in.
// It ends when ctx or in does, because then the reader is gone.
func Watch(ctx context.Context, g sys.Guest, o Options, in io.Reader, out io.Writer) error {
	if !commitID.MatchString(o.Base) {
		return fail.New(fail.Usage, "watch: --base must be a commit id")
	}
	ctx, cancel := context.WithCancel(ctx)
	// This goroutine is not awaited: its read ends only when the sender closes in.
	go func() {
		_ = receiveAnswers(g, in) // after an error the host connects again
		cancel()
	}()
	w := newWatcher(g, o, out)
	defer w.tasks.Wait()
	defer cancel()
	for {
		now := time.Now()
		w.poll(now)
		if err := w.printObservation(now); err != nil {
			return err
		}
		w.startDue(ctx, now)
		select {
		case <-ctx.Done():
			return nil
		case learned := <-w.results:
			learned()
			w.news = true
		case <-time.After(w.nextPoll()):
		}
	}
}

// watcher is one run of Watch. Only its own goroutine uses it. Slower work runs in
// tasks, which return their results as functions for that goroutine to call.
type watcher struct {
	guest   sys.Guest
	options Options
	out     io.Writer
	results chan func()
	tasks   sync.WaitGroup

	agents  map[string]*reportFile // by file name
	bells   map[string]time.Time   // time of the bell, by window
	dir     stamp                  // the directory of the agents' and bells' files
	sure    time.Time              // time of the last full check
	round   time.Time              // time of the last measurement of the machine
	machine *guestproto.Machine
	view    view
	work    work

	questions     []question
	taken         []string
	questionStamp stamp                // of their directory
	sureQuestions bool                 // read them at the next poll
	unblocked     map[string]time.Time // when a question's agent was first seen not to be blocked, by id
	dialogs       dialogs

	news   bool // something may have changed since list was built
	list   []entry
	sent   guestproto.Observation
	sentAt time.Time
}

// reportFile is the information about one agent.
type reportFile struct {
	agentReport // as its hooks wrote it
	stamp       stamp
	claude      claude
	seen        stamp       // stamp of Claude Code's file
	now         agentReport // as it is shown
}

// stamp identifies one version of a file.
type stamp struct {
	changed time.Time
	size    int64
	info    fs.FileInfo // a rewritten file is another one, even within one tick of the clock
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

func newWatcher(g sys.Guest, o Options, out io.Writer) *watcher {
	return &watcher{guest: g, options: o, out: out, results: make(chan func()), agents: map[string]*reportFile{}, bells: map[string]time.Time{}}
}

// poll polls everything that costs next to nothing.
func (w *watcher) poll(now time.Time) {
	dir, _ := stampOf(w.guest.Path(attentionDir))
	sure := now.Sub(w.sure) >= sureEvery
	if sure || !dir.same(w.dir) {
		w.dir = dir
		w.read()
	}
	questions, _ := stampOf(w.guest.Path(questionDir))
	if sure || w.sureQuestions || !questions.same(w.questionStamp) {
		w.questionStamp, w.sureQuestions = questions, false
		w.questions, w.taken = readQuestions(w.guest)
		w.news = true
	}
	if sure {
		w.sure = now
	}
	for name, a := range w.agents {
		w.follow(name, a, now, sure)
	}
	w.endAnswered(now)
	if now.Sub(w.round) >= roundEvery {
		w.round = now
		w.machine = measure(w.machine, w.guest.Path("/dev/pts"))
		w.news = true
	}
}

// read reads the files of hooks and bells.
func (w *watcher) read() {
	dir := w.guest.Path(attentionDir)
	there := map[string]bool{}
	for _, name := range sys.Names(dir, maxNotes) {
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
			w.readReport(name, path, s)
		}
	}
	maps.DeleteFunc(w.agents, func(name string, _ *reportFile) bool { return !there[name] })
	maps.DeleteFunc(w.bells, func(window string, _ time.Time) bool { return !there[window] })
	w.news = true
}

// readReport reads a hook's file if it has changed.
func (w *watcher) readReport(name, path string, s stamp) {
	a := w.agents[name]
	if a != nil && a.stamp.same(s) {
		return
	}
	n, err := readReport(path)
	if err != nil || n.file() != name || n.State.Urgency() > guestproto.AgentGone.Urgency() {
		return // not a valid report
	}
	if a == nil {
		a = &reportFile{}
		w.agents[name] = a
	}
	a.agentReport, a.stamp = n, s
}

// follow updates the shown state of an agent. If sure, it also checks that the
// process is still the same one.
func (w *watcher) follow(name string, a *reportFile, now time.Time, sure bool) {
	before := a.now
	switch {
	case a.State == guestproto.AgentGone:
		if now.Sub(a.Since) > keepGone {
			_ = os.Remove(filepath.Join(w.guest.Path(attentionDir), name)) // a failed removal is retried at the next poll
		}
	case (sure || syscall.Kill(a.PID, 0) != nil) && !a.isAlive():
		// Save the time, so that the next watcher shows the same one.
		at := now.UTC().Round(0)
		a.State, a.On, a.Since, a.At = guestproto.AgentGone, "", at, at
		_ = writeReport(w.guest, a.agentReport)
	}
	if a.File != "" {
		if s, ok := stampOf(a.File); !ok {
			a.claude, a.seen = claude{}, stamp{}
		} else if !a.seen.same(s) {
			// The file may be half written.
			if c := readClaude(a.File); c.belongsTo(sys.Process{PID: a.PID, Start: a.Start}) {
				a.claude, a.seen = c, s
			}
		}
	}
	a.now = a.mergeClaude(a.claude, now)
	if a.now != before {
		w.news = true
		w.work.stirred = true
		// A user wants to see the changes soon after a turn has ended.
		w.work.turned = w.work.turned || before.State == guestproto.AgentWorking && a.now.State != before.State
	}
}

// isAlive reports whether the agent's process runs.
func (n agentReport) isAlive() bool { return isRunning(n.PID, n.Start) }

// isRunning reports whether a process runs that started at that time. Process ids are reused.
func isRunning(pid int, start string) bool {
	p, ok := sys.ProcessAt(pid)
	return ok && !p.Ended && p.Start == start
}

// printObservation prints the observation if it has changed, or if the last one is older than
// sayEvery.
func (w *watcher) printObservation(now time.Time) error {
	if now.Sub(w.sentAt) < sayEvery && !w.news {
		return nil
	}
	w.news = false
	w.list = w.sortedAgents()
	g := guestproto.Observation{
		Version: guestproto.Version, Window: w.view.shown.name, Screen: w.view.screen, Changes: w.work.changes, Machine: w.machine,
	}
	for _, e := range w.list {
		g.Agents = append(g.Agents, e.Agent)
	}
	for _, q := range w.questions {
		g.Questions = append(g.Questions, q.Question)
	}
	g.Taken = w.taken
	if now.Sub(w.sentAt) < sayEvery && reflect.DeepEqual(g, w.sent) {
		return nil
	}
	w.sent, w.sentAt = g, now
	return g.Encode(w.out)
}

// entry is one agent in the list.
type entry struct {
	guestproto.Agent
	window string // window that rang, if the agent has no hooks
}

// sortedAgents returns the agents as they are shown: the most urgent first, then those
// that have waited longest.
func (w *watcher) sortedAgents() []entry {
	var list []entry
	for _, a := range w.agents {
		list = append(list, entry{Agent: guestproto.Agent{Name: a.Agent, PID: a.PID, State: a.now.State, On: a.now.On, Since: a.now.Since}})
	}
	for window, since := range w.bells {
		if name, ok := w.rang(window); ok {
			list = append(list, entry{Agent: guestproto.Agent{Name: name, State: guestproto.AgentBlocked, On: "bell in window " + name, Since: since}, window: window})
		}
	}
	slices.SortFunc(list, func(a, b entry) int {
		return cmp.Or(a.State.Urgency()-b.State.Urgency(), a.Since.Compare(b.Since), a.PID-b.PID, cmp.Compare(a.window, b.window))
	})
	return list
}

// startDue starts the tasks that are due.
func (w *watcher) startDue(ctx context.Context, now time.Time) {
	if due, list := w.viewDue(now); due {
		w.view.running = true
		w.runTask(ctx, w.viewer(now, list))
	}
	if w.workDue(now) {
		w.work.running = true
		w.runTask(ctx, w.worker(now))
	}
	if w.dialogsDue(now) {
		w.dialogs.running = true
		w.runTask(ctx, w.typist(now))
	}
}

// nextPoll returns the time to the next poll. An idle agent can be polled slowly,
// because it must first be given work before it asks for something.
func (w *watcher) nextPoll() time.Duration {
	if len(w.questions) > 0 {
		return lookEvery
	}
	for _, e := range w.list {
		if e.State == guestproto.AgentWorking || e.State == guestproto.AgentBlocked && e.window == "" {
			return lookEvery
		}
	}
	return sureEvery
}

// runTask runs a task and passes its result to the watcher.
func (w *watcher) runTask(ctx context.Context, look func(context.Context) (learned func())) {
	w.tasks.Go(func() {
		learned := look(ctx)
		select {
		case w.results <- learned:
		case <-ctx.Done():
		}
	})
}
