package observe

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// A guest without activity prints nothing except its periodic line.
func TestWatchIsSilent(t *testing.T) {
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	var out bytes.Buffer
	w := newWatcher(g, Options{}, &out)
	now := time.Now()
	w.poll(now)
	lines := func(at time.Time) int {
		t.Helper()
		if err := w.printObservation(at); err != nil {
			t.Fatal(err)
		}
		return bytes.Count(out.Bytes(), []byte("\n"))
	}
	if n := lines(now); n != 1 {
		t.Fatalf("%d lines at first, want 1", n)
	}
	if n := lines(now.Add(sayEvery - 1)); n != 1 {
		t.Errorf("%d lines without a change, want 1", n)
	}
	if n := lines(now.Add(sayEvery)); n != 2 {
		t.Errorf("%d lines after %v, want 2", n, sayEvery)
	}
	w.view.screen, w.news = []string{"new"}, true
	if n := lines(now.Add(sayEvery + 1)); n != 3 {
		t.Errorf("%d lines after a change, want 3", n)
	}
	for seen, err := range guestproto.ReadObservations(&out) {
		if err != nil || seen.Machine == nil {
			t.Errorf("observation = %+v, %v, want one with a machine", seen, err)
		}
	}
}

func TestMachine(t *testing.T) {
	first := measure(nil, "/dev/pts")
	if first.MemTotal <= first.MemUsed || first.MemUsed <= 0 || first.DiskTotal < first.DiskUsed || first.DiskUsed <= 0 || first.Load < 0 {
		t.Errorf("measure() = %+v, want plausible memory, disk and load", first)
	}
	for name, c := range map[string]struct {
		change func(*guestproto.Machine)
		alike  bool
	}{
		"nothing":       {func(*guestproto.Machine) {}, true},
		"a little":      {func(m *guestproto.Machine) { m.Load += 0.2; m.MemUsed -= 20 << 20; m.DiskUsed += 10 << 20 }, true},
		"load":          {func(m *guestproto.Machine) { m.Load += 0.3 }, false},
		"less memory":   {func(m *guestproto.Machine) { m.MemUsed -= 32 << 20 }, false},
		"more disk":     {func(m *guestproto.Machine) { m.DiskUsed += 16 << 20 }, false},
		"a larger disk": {func(m *guestproto.Machine) { m.DiskTotal++ }, false},
	} {
		now := *first
		c.change(&now)
		if got, reverse := alike(*first, now), alike(now, *first); got != c.alike || reverse != c.alike {
			t.Errorf("%s: alike() = %t, in the other order %t, want %t; %+v and %+v", name, got, reverse, c.alike, *first, now)
		}
	}
}

func TestGoneAgentsAreForgotten(t *testing.T) {
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	if err := os.MkdirAll(g.Path(attentionDir), 0o700); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	me, _ := sys.ProcessAt(os.Getpid())
	for _, n := range []agentReport{
		{Agent: "claude", PID: me.PID, Start: me.Start, State: guestproto.AgentDone, Since: now.UTC(), At: now.UTC()},
		{Agent: "codex", PID: me.PID, Start: "1", State: guestproto.AgentWorking, Since: now.UTC(), At: now.UTC()}, // its pid now belongs to another process
		{Agent: "third", PID: 1 << 30, Start: "1", State: guestproto.AgentBlocked, On: "x", Since: now.UTC(), At: now.UTC()},
	} {
		if err := writeReport(g, n); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{
		"broken-1.json": `{"agent":`, "other-2.json": `{"agent":"claude","pid":2,"state":"idle"}`,
		"odd-3.json": `{"agent":"odd","pid":3,"state":"happy"}`, "bell-x": "", "notes": "",
	} {
		if err := os.WriteFile(filepath.Join(g.Path(attentionDir), name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w := newWatcher(g, Options{}, &bytes.Buffer{})
	states := func() string {
		var all []string
		for _, e := range w.sortedAgents() {
			all = append(all, fmt.Sprint(e.Name, " ", e.State, e.On))
		}
		slices.Sort(all)
		return strings.Join(all, ", ")
	}
	w.poll(now)
	if got, want := states(), "claude done, codex gone, third gone"; got != want {
		t.Errorf("agents at first = %q, want %q", got, want)
	}
	w.poll(now.Add(keepGone))
	if got, want := states(), "claude done, codex gone, third gone"; got != want {
		t.Errorf("agents after %v = %q, want %q", keepGone, got, want)
	}
	w.poll(now.Add(keepGone + 2*time.Second))
	w.poll(now.Add(keepGone + 3*time.Second))
	if got, want := states(), "claude done"; got != want {
		t.Errorf("agents after more than %v = %q, want %q", keepGone, got, want)
	}
	if left, _ := filepath.Glob(filepath.Join(g.Path(attentionDir), "codex*")); len(left) > 0 {
		t.Errorf("files of codex = %v, want none", left)
	}
}

func TestWorkDue(t *testing.T) {
	began := time.Now()
	for _, c := range []struct {
		name  string
		work  work
		since time.Duration
		due   bool
	}{
		{"at first", work{}, 1000 * time.Hour, true},
		{"nothing happened", work{}, time.Minute, false},
		{"nothing for long", work{}, workQuiet, true},
		{"it runs", work{running: true, turned: true}, time.Hour, false},
		{"a turn ended", work{turned: true}, turnEvery, true},
		{"a turn ended just after a look", work{turned: true}, turnEvery - 1, false},
		{"a turn ended, and a look takes long", work{turned: true, took: 4 * time.Second}, 10 * time.Second, false},
		{"something happened", work{stirred: true}, roundEvery, true},
		{"something happened just after a look", work{stirred: true}, roundEvery - 1, false},
		{"something happened, and a look takes long", work{stirred: true, took: 2 * time.Second}, 30 * time.Second, false},
	} {
		c.work.began = began
		w := &watcher{options: Options{Dir: t.TempDir()}, work: c.work}
		if got := w.workDue(began.Add(c.since)); got != c.due {
			t.Errorf("%s: workDue %v after the last scan = %t, want %t", c.name, c.since, got, c.due)
		}
	}
	if (&watcher{}).workDue(began) {
		t.Error("workDue without a checkout = true, want false")
	}
}

func TestPanes(t *testing.T) {
	panes := panesOf("@1 %1 /dev/pts/1 11 100 0 1 vim\n@2 %2 /dev/pts/2 22 200 1 0 my\x1b agent \ngarbage\n@x %3 /dev/pts/3 33 1 1 1 x\n@4 %4 /dev/pts/4 pid 1 1 1 x\n")
	want := []pane{
		{window: "@1", id: "%1", tty: "/dev/pts/1", pid: 11, activity: 100, active: true, name: "vim"},
		{window: "@2", id: "%2", tty: "/dev/pts/2", pid: 22, activity: 200, rang: true, name: "my\ufffd agent "},
	}
	if diff := cmp.Diff(want, panes, cmp.AllowUnexported(pane{})); diff != "" {
		t.Errorf("panesOf() mismatch (-want +got):\n%s", diff)
	}
}

func TestScreenLines(t *testing.T) {
	if diff := cmp.Diff([]string{"a", "", " b c"}, lines("a  \n\n b\u00a0c \n\n  \n")); diff != "" {
		t.Errorf("lines() mismatch (-want +got):\n%s", diff)
	}
	got := lines(strings.Repeat("x\n", 10) + strings.Repeat(strings.Repeat("é", 300)+"\n", guestproto.MaxScreen-1) + "last\n\n")
	if len(got) != guestproto.MaxScreen || got[len(got)-1] != "last" || got[0] != strings.Repeat("é", guestproto.MaxScreenWidth) {
		t.Errorf("lines() of a large screen = %d lines, %.20q, want %d lines, the first of %d characters, the last %q", len(got), got, guestproto.MaxScreen, guestproto.MaxScreenWidth, "last")
	}
	if got := lines("\n\n"); len(got) != 0 {
		t.Errorf("lines of an empty screen = %q, want none", got)
	}
}

func TestEntries(t *testing.T) {
	if _, err := (&sys.Entries{Use: func(string) {}}).Write(make([]byte, 200000)); err != nil {
		t.Errorf("Write of 200000 empty entries: %v", err)
	}
	if _, err := (&sys.Entries{Use: func(string) {}}).Write(bytes.Repeat([]byte("x"), 200000)); err == nil {
		t.Error("Write of an entry of 200000 bytes succeeded, want an error")
	}
	var seen []string
	out := &sys.Entries{Use: func(s string) { seen = append(seen, s) }}
	if err := runAside(t.Context(), out, "printf", `a\0\nb\0c`); err != nil {
		t.Fatal(err)
	}
	out.End()
	if diff := cmp.Diff([]string{"a", "\nb", "c"}, seen); diff != "" {
		t.Errorf("entries mismatch (-want +got):\n%s", diff)
	}
}

// A command that is killed takes its children with it.
// The bell of an agent with hooks does not count either when the windows were listed
// before the agent was known.
func TestBellOfANewAgent(t *testing.T) {
	w := &watcher{bells: map[string]time.Time{"@1": time.Now(), "@2": time.Now()}}
	w.view.panes = []pane{{window: "@1", pid: os.Getpid(), rang: true, name: "claude"}, {window: "@2", pid: 1 << 30, rang: true, name: "other"}}
	if got := w.sortedAgents(); len(got) != 2 {
		t.Fatalf("without agents: sortedAgents() = %+v, want both bells", got)
	}
	agent := &reportFile{}
	agent.PID, agent.now.State = os.Getpid(), guestproto.AgentDone
	w.agents = map[string]*reportFile{"claude": agent}
	got := w.sortedAgents()
	if len(got) != 2 || got[0].Name != "other" || got[1].PID != os.Getpid() {
		t.Errorf("with an agent in the first window: sortedAgents() = %+v, want the other bell and the agent", got)
	}
}

func TestRunAsideLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	child := 0
	out := &sys.Entries{Use: func(s string) {
		child, _ = strconv.Atoi(s)
		cancel()
	}}
	if err := runAside(ctx, out, "sh", "-c", `sleep 1000 & printf '%d\0' $!; wait`); err == nil {
		t.Error("runAside of a cancelled command succeeded, want an error")
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // poll, because this process is not notified of the end of a grandchild
		p, ok := sys.ProcessAt(child)
		if !ok || p.Ended {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("child %+v is running a minute after the cancellation, want that it has ended", p)
		}
	}
	if child == 0 {
		t.Error("the command printed no child's process id, want one")
	}
}

func TestProcessAt(t *testing.T) {
	p, ok := sys.ProcessAt(os.Getpid())
	if !ok || p.Parent != os.Getppid() || p.Start == "" || p.Ended {
		t.Errorf("ProcessAt(%d) = %+v, %t, want parent %d, a start time, not ended", os.Getpid(), p, ok, os.Getppid())
	}
	if line := lineage(os.Getpid()); len(line) < 2 || line[0] != p || line[1].PID != os.Getppid() {
		t.Errorf("lineage(%d) = %+v, want it to begin with this process and its parent, %d", os.Getpid(), line, os.Getppid())
	}
	if p, ok := sys.ProcessAt(1 << 30); ok {
		t.Errorf("ProcessAt(%d) = %+v, want no process", 1<<30, p)
	}
}

// TestLateDialog checks that a question stays open while its agent says that it works because the
// dialog is not drawn yet, and ends when the agent goes on after it.
func TestLateDialog(t *testing.T) {
	g := sys.Guest{Root: t.TempDir(), Fake: true}
	self, _ := sys.ProcessAt(os.Getpid())
	q, err := question{Question: guestproto.Question{Kind: guestproto.AskPermission, Text: "Bash: touch x"}, AgentPID: self.PID}.raise(g, self)
	if err != nil {
		t.Fatal(err)
	}
	w := newWatcher(g, Options{}, nil)
	w.questions, _ = readQuestions(g)
	agent := &reportFile{agentReport: agentReport{Agent: "claude", PID: self.PID, Start: self.Start}}
	w.agents["a"] = agent
	for _, c := range []struct {
		state guestproto.AgentState
		since time.Duration // after the question
		after time.Duration
		open  bool
	}{
		{guestproto.AgentBlocked, 0, time.Second, true},
		{guestproto.AgentWorking, -time.Minute, 6 * time.Second, true},
		{guestproto.AgentWorking, -time.Minute, time.Hour, true},
		{guestproto.AgentBlocked, 2 * time.Hour, 2 * time.Hour, true},
		{guestproto.AgentWorking, 3 * time.Hour, 3 * time.Hour, true},
		{guestproto.AgentWorking, 3 * time.Hour, 3*time.Hour + 2*time.Second, false},
	} {
		agent.now = agent.agentReport
		agent.now.State, agent.now.Since = c.state, q.At.Add(c.since)
		w.endAnswered(q.At.Add(c.after))
		if open, _ := readQuestions(g); (len(open) == 1) != c.open {
			t.Fatalf("questions %v later, %s since %v = %+v, want it open: %t", c.after, c.state, c.since, open, c.open)
		}
	}
}
