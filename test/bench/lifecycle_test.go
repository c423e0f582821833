//go:build bench

package bench

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// diskSize is the same for every contender; realvm defines the other sizes.
const diskSize = "8GiB"

// These are the ways to a running VM.
const (
	generic       = "generic image"
	golden        = "golden clone"
	warm          = "warm fork"
	restart       = "restart"
	restartGolden = "restart of a golden clone"
	limaCreate    = "limactl start, new"
	limaRestart   = "limactl start, stopped"
	threeAtOnce   = "three at once"
	threeInARow   = "three in a row"
)

// These are the costs of a running VM.
const (
	firstExec  = "first exec"
	laterExec  = "repeated exec"
	freshSSH   = "fresh ssh"
	limaShell  = "limactl shell"
	oneSession = "a session"
	limaAgent  = "limactl's host agent"
)

// These are the figures of a VM.
const (
	rowSSH     = "to SSH ready, s"
	rowLima    = "to SSH ready, and limactl to its READY, s"
	rowPrompt  = "to a prompt in the clone, s"
	rowReady   = "until open returned, s"
	rowTrue    = "of true, ms"
	rowPSS     = "memory on the host (PSS), MB"
	rowPrivate = "memory on the host (private), MB"
)

// prepare is the setting that makes open use a way. The product uses the same words
// for a session's origin, except for none.
var prepare = map[string]string{generic: "none", golden: "golden", warm: "warm"}

const (
	baking          = time.Hour // limit for preparing images on an emulated machine
	commandsPerTurn = 5
)

func readyRows() []row {
	return []row{
		{name: rowSSH, unit: "s", comparisons: []comparison{
			{"golden_clone_ssh_ready", golden, generic, aim{atMost, 0.3}},
			{"warm_fork_ssh_ready", warm, generic, aim{atMost, 0.1}},
			{"generic_create_ssh_ready", generic, limaCreate, aim{}},
			{"golden_clone_ssh_ready_vs_limactl", golden, limaCreate, aim{}},
			{"warm_fork_ssh_ready_vs_limactl", warm, limaCreate, aim{}},
			{"restart_ssh_ready", restart, limaRestart, aim{}},
			{"restart_golden_ssh_ready", restartGolden, limaRestart, aim{}},
		}},
		{name: rowLima, unit: "s", comparisons: []comparison{
			{"generic_create_vs_limactl_ready", generic, limaCreate, aim{}},
			{"restart_vs_limactl_ready", restart, limaRestart, aim{}},
		}},
		{name: rowPrompt, unit: "s", comparisons: []comparison{
			{"generic_create_prompt", generic, "", aim{}},
			{"golden_clone_prompt", golden, generic, aim{}},
			{"warm_fork_prompt", warm, generic, aim{atMost, 0.15}},
			{"restart_prompt", restart, generic, aim{}},
			{"restart_golden_prompt", restartGolden, generic, aim{}},
		}},
		{name: rowReady, unit: "s", comparisons: []comparison{
			{"three_at_once", threeAtOnce, threeInARow, aim{atMost, 1}},
		}},
	}
}

func commandRows() []row {
	return []row{
		{name: rowTrue, unit: "ms", comparisons: []comparison{
			{"exec_first", firstExec, freshSSH, aim{}},
			{"exec_repeated", laterExec, freshSSH, aim{atMost, 0.1}},
			{"exec_first_vs_limactl_shell", firstExec, limaShell, aim{}},
			{"exec_repeated_vs_limactl_shell", laterExec, limaShell, aim{}},
		}},
		{name: rowPSS, unit: "MB", comparisons: []comparison{
			{"host_memory_per_session", oneSession, limaAgent, aim{below, 1}},
		}},
		{name: rowPrivate, unit: "MB", comparisons: []comparison{
			{"host_memory_per_session_private", oneSession, limaAgent, aim{below, 1}},
		}},
	}
}

// lifecycleBench is a user who repeatedly opens sessions of one repository.
type lifecycleBench struct {
	t        *testing.T
	box      *realvm.Box
	accel    string
	ids      map[string]string // machine ids and host keys, and the session that had them
	ready    *table
	steps    *table
	commands *table
}

// TestLifecycle uses every way to a running VM in turn, with one VM at a time except
// for the three at once. It also measures the costs of a running VM.
func TestLifecycle(t *testing.T) {
	unprepared := realvm.Prepare(t.Context()) // the sources of golden clones and warm forks
	b := realvm.NewBox(t)
	l := &lifecycleBench{
		t: t, box: b, ids: map[string]string{},
		ready:    results.table(table{title: titleReady, rows: readyRows()}),
		steps:    results.table(table{title: titleSteps}),
		commands: results.table(table{title: titleCommand, rows: commandRows()}),
	}
	for _, name := range []string{"project", "one", "two", "three"} {
		b.Repo(name)
	}
	ways := []string{generic}
	// The first session is not measured: it probes KVM, and warms the cache.
	told := l.look(l.open(generic, "project"))
	l.accel = told.Accel
	b.Asz("destroy", "--force", told.Name)
	for _, way := range []string{golden, warm} {
		if why := l.cannot(way, told.From != nil, unprepared); why != "" {
			t.Logf("%s is absent: %s", way, why)
			l.ready.absent(way, why)
			continue
		}
		ways = append(ways, way)
	}
	theirs := newLimactl(t, l.accel)
	for range runs() {
		for _, way := range ways {
			l.session(way)
		}
		l.stock(theirs)
		l.three()
	}
	l.steps.columns = slices.DeleteFunc([]string{generic, golden, warm, restart, restartGolden}, func(way string) bool {
		return len(l.steps.samples[way]) == 0
	})
	l.ready.done(t, runs(), append(ways, restart, limaCreate, limaRestart, threeAtOnce, threeInARow)...)
	l.steps.done(t, runs(), l.steps.columns...)
	l.commands.done(t, runs(), firstExec, laterExec, freshSSH, limaShell, oneSession, limaAgent)
}

// asking returns the box with the setting for a way.
func (l *lifecycleBench) asking(way string) *realvm.Box {
	b := *l.box
	b.Env = append(slices.Clone(b.Env), "AGENT_SESSIONIZER_PREPARE="+prepare[way])
	return &b
}

// open opens the session of a repository and returns its name.
func (l *lifecycleBench) open(way, repo string) string {
	l.t.Helper()
	return strings.TrimSpace(l.asking(way).Asz(openArgs(repo)...))
}

func openArgs(repo string) []string {
	return []string{"open", "-d", "--cpus=" + realvm.CPUs, "--memory=" + realvm.Memory, "--disk=" + diskSize, "./" + repo}
}

// view is a session as the product shows it.
type view struct {
	session.View
	From *string `json:"from"` // nil: the product does not report it
}

func (l *lifecycleBench) list() (all []view) {
	l.t.Helper()
	if err := json.Unmarshal([]byte(l.box.Asz("list", "--json")), &all); err != nil {
		l.t.Fatal(err)
	}
	return all
}

// only returns the only session.
func (l *lifecycleBench) only() view {
	l.t.Helper()
	all := l.list()
	if len(all) != 1 {
		l.t.Fatalf("sessions = %v, want one", all)
	}
	return all[0]
}

func (l *lifecycleBench) look(name string) view {
	l.t.Helper()
	all := l.list()
	i := slices.IndexFunc(all, func(v view) bool { return v.Name == name })
	if i < 0 {
		l.t.Fatalf("sessions = %v, want %s among them", all, name)
	}
	return all[i]
}

// origin returns how a session was made, as far as the product reports it.
func (v view) origin() string {
	if v.From == nil {
		return generic // a product that does not report it has no other way
	}
	for way, setting := range prepare {
		if *v.From == setting {
			return way
		}
	}
	if *v.From == "generic" {
		return generic
	}
	return fmt.Sprintf("%q", *v.From)
}

// cannot returns why the product cannot use a way, according to one unmeasured
// session that asked for it.
func (l *lifecycleBench) cannot(way string, says bool, unprepared error) (why string) {
	if !says {
		return "The product does not say where sessions come from."
	}
	name := l.open(way, "project")
	came := l.look(name).origin()
	l.box.Asz("destroy", "--force", name)
	if came == way {
		return ""
	}
	why = fmt.Sprintf("With `prepare: %s`, a session came from: %s.", prepare[way], came)
	if unprepared != nil {
		why += " " + strings.ReplaceAll(unprepared.Error(), "\n", " ")
	}
	return why
}

// settle waits until background preparation, which a session may have started, has
// ended.
func (l *lifecycleBench) settle() {
	l.t.Helper()
	waitLong(l.t, baking, "what is prepared in the background", func() bool { return len(l.box.Processes("agent-sessionizer prepare ")) == 0 })
}

// session measures one turn of one way: a session from its creation to its end.
func (l *lifecycleBench) session(way string) {
	l.t.Helper()
	name := l.measure(way, way)
	if got := l.look(name).origin(); got != way {
		l.t.Fatalf("origin of the session = %s, want %s", got, way)
	}
	if way == generic {
		l.use(name)
	}
	l.identity(name)
	if again, ok := map[string]string{generic: restart, golden: restartGolden}[way]; ok {
		l.box.Asz("stop", name)
		l.measure(again, way)
	}
	l.box.Asz("destroy", "--force", name)
}

// measure opens the session on a terminal and measures how long it takes until that shows a prompt.
func (l *lifecycleBench) measure(contender, way string) (name string) {
	l.t.Helper()
	b := l.asking(way)
	attached := slices.DeleteFunc(openArgs("project"), func(arg string) bool { return arg == "-d" })
	began := time.Now()
	reads(l.t, terminal(l.t, b, append([]string{realvm.Binary()}, attached...)...), boot, prompted)
	prompt := time.Since(began).Seconds()
	b.Run("tmux", "kill-server") // its terminal, too
	name = l.only().Name
	steps, ready := l.events(name, began, prompt)
	l.t.Logf("%s: %.1f s to SSH ready, %.1f to a prompt", contender, ready, prompt)
	l.ready.add(contender, sample{rowSSH: ready, rowLima: ready, rowPrompt: prompt})
	l.steps.add(contender, steps)
	return name
}

// prompted matches what draws the prompt of the guest's shell in the checkout.
var prompted = regexp.MustCompile(`~/project.{1,60}[%#]`)

// events reads the events since a time. It returns how long each step took, the time
// before the first and after the last step, and when SSH was ready.
func (l *lifecycleBench) events(name string, since time.Time, until float64) (steps sample, ssh float64) {
	l.t.Helper()
	steps = sample{}
	after := func(t time.Time) float64 { return t.Sub(since).Seconds() }
	first, last := 0.0, 0.0
	dec := json.NewDecoder(strings.NewReader(l.box.Asz("logs", "--json", name)))
	for dec.More() {
		var ev store.Event
		if err := dec.Decode(&ev); err != nil {
			l.t.Fatal(err)
		}
		if ev.Kind != session.EventStep || ev.At.Before(since.Truncate(time.Millisecond)) {
			continue
		}
		var st lifecycle.Step
		if err := json.Unmarshal(ev.Data, &st); err != nil {
			l.t.Fatal(err)
		}
		switch st.State {
		case "start":
			if first == 0 {
				first = after(ev.At)
			}
		case "done":
			l.stepRow(st.Name)
			steps[st.Name] = st.Elapsed().Seconds()
			last = after(ev.At)
			if st.Name == "log in" {
				ssh = last
			}
		}
	}
	if ssh == 0 {
		l.t.Fatalf("logins in the events of %s = none, want one", name)
	}
	l.stepRow(stepBefore)
	l.stepRow(stepAfter)
	steps[stepBefore], steps[stepAfter] = first, until-last
	return steps, ssh
}

const (
	stepBefore = "(before the first)"
	stepAfter  = "(from the last to the prompt seen)"
)

// stepRow adds a row for a step that is seen for the first time.
func (l *lifecycleBench) stepRow(name string) {
	if slices.ContainsFunc(l.steps.rows, func(r row) bool { return r.name == name }) {
		return
	}
	r := row{name: name, unit: "s"}
	for _, way := range []string{generic, golden, warm, restart, restartGolden} {
		r.comparisons = append(r.comparisons, comparison{key: "step_" + slug(way) + "_" + slug(name), mine: way})
	}
	l.steps.rows = append(l.steps.rows, r)
}

// slug converts words for use in a name.
func slug(s string) string {
	return strings.Join(strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return r < 'a' || r > 'z' }), "_")
}

// identity checks that no two machines have the same id or host key: a clone or a
// fork that kept its parent's would be ready before it has its own identity.
func (l *lifecycleBench) identity(name string) {
	l.t.Helper()
	var r realvm.Result
	waitLong(l.t, boot, "the identity of "+name, func() bool { // three concurrent emulated guests may not respond for a while
		r = l.box.In(name, "cat /etc/machine-id && cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub && cat /etc/hostname")
		return r.Code == 0
	})
	out := strings.Fields(r.Stdout)
	if len(out) != 3 || !strings.HasSuffix(out[2], name) { // Lima adds a prefix
		l.t.Fatalf("identity of %s = %q, want 3 words, the last its hostname", name, out)
	}
	for _, id := range out[:2] {
		if other, ok := l.ids[id]; ok {
			l.t.Errorf("identity of %s = %s, as of %s, want another", name, id, other)
		}
		l.ids[id] = name
	}
}

// use measures commands in a session, alternating with the alternatives, and then the
// session's processes on the host.
func (l *lifecycleBench) use(name string) {
	l.t.Helper()
	b := l.box
	ours := func() sample { return l.timed("agent-sessionizer", "exec", name, "--", "true") }
	l.commands.add(firstExec, ours())
	b.Write("ssh.config", b.Asz("ssh-config", name))
	for range commandsPerTurn {
		l.commands.add(laterExec, ours())
		l.commands.add(freshSSH, l.timed("ssh", "-F", filepath.Join(b.Home, "ssh.config"), name, "true"))
	}
	var sum memory
	for pid, line := range b.Processes("") {
		// The host agent of either has a connection of ssh; attach-session is the terminal of before.
		if strings.Contains(line, "qemu-system-") || strings.Contains(line, "attach-session") || strings.HasPrefix(line, "ssh") {
			continue
		}
		m, err := memoryOf(pid)
		if err != nil {
			l.t.Fatalf("%s: %v", line, err)
		}
		l.t.Logf("%.1f MB, %.1f private: %.60s", m.pss, m.private, line)
		sum.pss, sum.private = sum.pss+m.pss, sum.private+m.private
	}
	l.commands.add(oneSession, sample{rowPSS: sum.pss, rowPrivate: sum.private})
}

func (l *lifecycleBench) timed(argv ...string) sample {
	l.t.Helper()
	began := time.Now()
	r := l.box.Run(argv...)
	took := time.Since(began)
	if r.Code != 0 {
		l.t.Fatalf("%s = exit %d\n%s\nwant exit 0", strings.Join(argv, " "), r.Code, r.All())
	}
	return sample{rowTrue: took.Seconds() * 1000}
}

// stock runs limactl's turn: a new instance, and the same instance again after a
// shutdown.
func (l *lifecycleBench) stock(theirs *limactl) {
	l.t.Helper()
	begin := func(contender string, args ...string) {
		ssh, ready := theirs.start(args...)
		s := sample{rowSSH: ssh, rowLima: ready}
		l.t.Logf("%s: %.1f s to SSH ready, %.1f to READY", contender, ssh, ready)
		l.ready.add(contender, s)
	}
	begin(limaCreate, "--name="+instance, "bench.yaml")
	for range commandsPerTurn {
		l.commands.add(limaShell, sample{rowTrue: theirs.run("shell", instance, "true") * 1000})
	}
	m, err := memoryOf(theirs.hostAgent())
	if err != nil {
		l.t.Fatal(err)
	}
	l.commands.add(limaAgent, sample{rowPSS: m.pss, rowPrivate: m.private})
	theirs.powerOff()
	begin(limaRestart, instance)
	theirs.run("delete", "--force", instance)
}

// three opens three sessions at once, and three in a row, by the fastest way, which the product
// chooses itself.
func (l *lifecycleBench) three() {
	l.t.Helper()
	repos := []string{"one", "two", "three"}
	b := l.asking(warm)
	contenders := []string{threeAtOnce, threeInARow}
	if len(l.ready.samples[threeAtOnce])%2 == 1 { // each is first in half of the turns
		slices.Reverse(contenders)
	}
	for _, contender := range contenders {
		opened := make([]realvm.Result, len(repos))
		var all errgroup.Group
		if contender == threeInARow {
			all.SetLimit(1)
		}
		began := time.Now()
		for i, repo := range repos {
			all.Go(func() error {
				opened[i] = b.Run(append([]string{"agent-sessionizer"}, openArgs(repo)...)...)
				return nil
			})
		}
		_ = all.Wait()
		took := time.Since(began).Seconds()
		var names, from []string
		for _, r := range opened {
			if r.Code != 0 {
				l.t.Fatalf("%s: exit %d\n%s%s\nwant exit 0", contender, r.Code, r.All(), l.box.Logs())
			}
			name := strings.TrimSpace(r.Stdout)
			names, from = append(names, name), append(from, l.look(name).origin())
		}
		l.t.Logf("%s, from %v: %.1f s", contender, from, took)
		for _, name := range names {
			l.identity(name)
		}
		l.ready.add(contender, sample{rowReady: took})
		l.ready.note("Of the three: " + strings.Join(from, ", ") + ".")
		l.settle()
		l.box.Asz(append([]string{"destroy", "--force"}, names...)...)
	}
}
