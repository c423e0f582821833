package picker

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// TestHeaderFits checks that the header fits beside the preview, in a popup on a
// terminal of 130 columns: 90 % of it, half of that, and fzf's margins.
func TestHeaderFits(t *testing.T) {
	said, _ := strings.CutPrefix(UnknownTarget, "change-header[")
	for _, line := range append(strings.Split(header, "\n"), strings.TrimSuffix(said, "]")) {
		if w := ansi.StringWidth(line); w > 50 {
			t.Errorf("header = %d cells (%s), want at most 50", w, line)
		}
	}
}

// checkOrder checks the name and state of each row, and returns the rows.
func (p *Picker) checkOrder(t *testing.T, want []string) []string {
	t.Helper()
	lines, _, err := p.now(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range lines {
		got = append(got, strings.Join(strings.Fields(l)[2:4], " "))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("order of the rows mismatch (-want +got):\n%s", diff)
	}
	return lines
}

// TestOrder checks that sessions are ordered by how urgently they need attention. Of
// those that need it, the one that has waited longest comes first; the others are
// ordered by name.
func TestOrder(t *testing.T) {
	p := newPicker(t)
	now := time.Now()
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	seen := attention(guestproto.AgentDone, "", ago(9*time.Hour))
	seen.Attached = ago(time.Hour)
	for i, r := range []row{
		{slug: "o/stopped", phase: session.Stopped},
		{slug: "o/zz-idle", phase: session.Ready, status: attention(guestproto.AgentIdle, "", ago(time.Hour))},
		{slug: "o/creating", phase: session.Creating, desired: session.Ready},
		{slug: "o/working-b", phase: session.Ready, status: attention(guestproto.AgentWorking, "", ago(9*time.Hour))},
		{slug: "o/working-a", phase: session.Ready, status: attention(guestproto.AgentWorking, "", ago(time.Hour))},
		{slug: "o/done", phase: session.Ready, status: attention(guestproto.AgentDone, "", ago(3*time.Hour))},
		{slug: "o/seen", phase: session.Ready, status: seen},
		{slug: "o/blocked-short", phase: session.Ready, status: attention(guestproto.AgentBlocked, "Bash", ago(time.Minute))},
		{slug: "o/blocked-long", phase: session.Ready, status: attention(guestproto.AgentBlocked, "Bash", ago(2*time.Hour))},
		{slug: "o/broken", phase: session.Broken, err: "no space"},
		{slug: "o/error", phase: session.Ready, status: attention(guestproto.AgentError, "API", ago(5*time.Hour))},
		{slug: "o/plain", phase: session.Ready},
		{slug: "o/stopping", phase: session.Ready, desired: session.Stopped},
		{slug: "o/going", phase: session.Stopped, desired: session.Gone},
		{slug: "o/waking", phase: session.Stopped, desired: session.Ready},
		// An agent's state from before its VM was stopped no longer matters.
		{slug: "o/asleep", phase: session.Stopped, status: attention(guestproto.AgentBlocked, "Bash", ago(time.Hour))},
		{slug: "o/exited", phase: session.Ready, status: attention(guestproto.AgentGone, "", ago(time.Hour))},
	} {
		r.id = fmt.Sprintf("%012x", i)
		p.put(t, r)
	}
	lines := p.checkOrder(t, []string{
		"o/blocked-long blocked", "o/blocked-short blocked", "o/error error", "o/broken broken", "o/done done",
		"o/working-a working", "o/working-b working", "o/exited ready", "o/plain ready", "o/seen idle", "o/zz-idle idle",
		"o/creating creating", "o/going destroying", "o/stopping stopping", "o/waking starting", "o/asleep stopped", "o/stopped stopped",
	})
	words := func(i int) string { return strings.Join(strings.Fields(lines[i]), " ") }
	if !strings.HasSuffix(words(0), "blocked 2h Bash") || !regexp.MustCompile(`broken <?1m no space$`).MatchString(words(3)) {
		t.Errorf("first and fourth row = %q, %q, want what the agent waits for, and why it is broken", lines[0], lines[3])
	}
}

// The sessions of a repository are shown together, unless one needs its user.
func TestOrderOfOneRepository(t *testing.T) {
	p := newPicker(t)
	for i, r := range []row{
		{slug: "o/a", phase: session.Ready},
		{slug: "o/b", label: "fix", phase: session.Ready, status: attention(guestproto.AgentWorking, "", time.Now())},
		{slug: "o/b", label: "2", phase: session.Stopped},
		{slug: "o/b", label: "dev", phase: session.Broken, err: "no space"},
		{slug: "o/b", phase: session.Stopped},
		{slug: "o/b-c", phase: session.Stopped},
		{slug: "o/d", phase: session.Ready, status: attention(guestproto.AgentWorking, "", time.Now())},
	} {
		r.id = fmt.Sprintf("%012x", i)
		p.put(t, r)
	}
	want := []string{"o/b@dev broken", "o/b stopped", "o/b@2 stopped", "o/b@fix working", "o/d working", "o/a ready", "o/b-c stopped"}
	p.checkOrder(t, want)
}

// TestOthers checks that sessions of other hosts are ordered with those of this one, with their host, and
// that those of tasks and with other ids are not shown.
func TestOthers(t *testing.T) {
	p := newPicker(t)
	p.put(t, row{id: "000000000001", slug: "o/own", phase: session.Ready})
	other := func(id, slug string, state guestproto.AgentState) session.View {
		v := session.View{ID: id, Repo: slug, RepoKey: "github.com/" + slug, State: session.Ready, Desired: session.Ready}
		if state != "" {
			v.Attention = &session.Attention{State: state, Agent: "claude", Since: time.Now()}
		}
		return v
	}
	task := other("000000000005", "o/task", "")
	task.Task = "00000000000a"
	now := time.Now()
	p.others.set(map[string][]session.View{
		"box2": {other("000000000001", "o/own", ""), other("$(touch x)", "o/hostile", ""), task},
		"box3": {other("000000000003", "o/asks", guestproto.AgentBlocked)},
	}, now)
	p.checkOrder(t, []string{"o/asks box3", "o/own ready", "o/own box2"})
	var keys []string
	lines, _, err := p.now(t.Context())
	for _, l := range lines {
		key, _, _ := strings.Cut(l, "\t")
		keys = append(keys, key)
	}
	if diff := cmp.Diff([]string{"s:box3:000000000003", "s:000000000001", "s:box2:000000000001"}, keys); diff != "" || err != nil {
		t.Errorf("keys mismatch (-want +got):\n%s%v", diff, err)
	}
	if got, ok := ParseKey(keys[0]); !ok || got != (Target{Session: "000000000003", Host: "box3"}) || got.Open() != "box3:000000000003" {
		t.Errorf("ParseKey(%q) = %+v, %t, want the session of box3", keys[0], got, ok)
	}

	// A host with very many sessions does not hide those of others. One that does not answer keeps its rows
	// for a while.
	many := make([]session.View, maxOthers+1)
	for i := range many {
		many[i] = other(fmt.Sprintf("%012x", i), "o/r", "")
	}
	now = now.Add(silentFor)
	if p.others.set(map[string][]session.View{"box2": many}, now); len(p.others.get()) != maxOthers+1 {
		t.Errorf("sessions of other hosts = %d, want %d of box2 and one of box3", len(p.others.get()), maxOthers)
	}
	if p.others.set(nil, now.Add(time.Second)); len(p.others.get()) != maxOthers {
		t.Errorf("sessions of other hosts = %d, want none of box3", len(p.others.get()))
	}
}

var keyRE = regexp.MustCompile(`^(s:([a-z0-9-]+:)?[0-9a-f]{12}|r:[A-Za-z0-9_-]+|-)$`)

// TestRowsAreHarmless checks that each row is one line of limited width per column,
// whatever its name is, and that its key is harmless to a shell.
func TestRowsAreHarmless(t *testing.T) {
	for _, env := range [][]string{{"NO_COLOR=1"}, {"CLICOLOR_FORCE=1"}} {
		p := newPicker(t, env...)
		status := attention(guestproto.AgentBlocked, strings.Repeat(hostile, 50), time.Now())
		p.put(t, row{id: "aaaaaaaaaaaa", key: "local:/a", slug: strings.Repeat(hostile, 50), phase: session.Ready, status: status})
		p.put(t, row{id: "bbbbbbbbbbbb", slug: "o/short", phase: session.Ready, status: attention(guestproto.AgentBlocked, "x", time.Now())})
		p.put(t, row{id: "cccccccccccc", key: "local:/c", slug: "piled" + strings.Repeat("\u0301", 900), phase: session.Broken, err: hostile})
		p.observation(t, "aaaaaaaaaaaa", guestproto.Observation{Changes: &guestproto.Changes{Branch: strings.Repeat(hostile, 9), Commits: 3}})
		p.Listed = []string{"o/r", "/tmp/x'$(touch y)'", "https://x.example/`id`", hostile}
		p.others.set(map[string][]session.View{"box2": {{ID: "dddddddddddd", Name: hostile, Repo: hostile, RepoKey: hostile, Branch: hostile, State: hostile}}}, time.Now())
		lines, _, err := p.now(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(lines) != 4+1+4 {
			t.Fatalf("rows = %d (%q), want %d", len(lines), lines, 4+1+4)
		}
		for _, l := range lines {
			key, text, ok := strings.Cut(l, "\t")
			if !ok || !keyRE.MatchString(key) {
				t.Errorf("key of %q = %q, want a valid one", l, key)
			}
			plain := ansi.Strip(text)
			if env[0] == "NO_COLOR=1" && plain != text {
				t.Errorf("row with NO_COLOR = %q, want no colours", l)
			}
			if strings.IndexFunc(plain, func(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Cf, r) }) >= 0 || !utf8.ValidString(plain) {
				t.Errorf("row = %q, want printable text alone", plain)
			}
			if w := ansi.StringWidth(plain); w > 2+nameWidth+2+hostWidth+2+stateWidth+2+4+2+onWidth+2+branchWidth+8 {
				t.Errorf("row = %d cells (%q), want at most %d", w, plain, 2+nameWidth+2+hostWidth+2+stateWidth+2+4+2+onWidth+2+branchWidth+8)
			}
			if len(text) > 4*maxText {
				t.Errorf("row = %d bytes, want at most %d", len(text), 4*maxText)
			}
		}
		if p.Console.Color() && !strings.Contains(strings.Join(lines, ""), "\x1b[3") {
			t.Errorf("rows = %q, want colours", lines)
		}
	}
}

// TestColumns checks that columns are aligned, also with wide letters.
func TestColumns(t *testing.T) {
	p := newPicker(t)
	for i, slug := range []string{"o/日本語", "o/ascii", "o/e\u0301te\u0301"} {
		p.put(t, row{id: fmt.Sprintf("%012x", i), slug: slug, phase: session.Stopped})
	}
	lines, _, err := p.now(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := map[int]bool{}
	for _, l := range lines {
		_, text, _ := strings.Cut(l, "\t")
		before, _, found := strings.Cut(text, "stopped")
		if !found {
			t.Fatalf("row = %q, want \"stopped\"", l)
		}
		at[ansi.StringWidth(before)] = true
	}
	if len(at) != 1 {
		t.Errorf("second column begins at %v, want one position:\n%s", at, strings.Join(lines, "\n"))
	}
}

func TestASCII(t *testing.T) {
	p := newPicker(t)
	p.Unicode = false
	p.Listed = []string{"o/" + strings.Repeat("long", 20)}
	p.put(t, row{id: "aaaaaaaaaaaa", slug: "o/r", phase: session.Ready})
	p.observation(t, "aaaaaaaaaaaa", guestproto.Observation{Changes: &guestproto.Changes{Branch: "main", Commits: 2}})
	lines, _, err := p.now(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(lines, "\n")
	if strings.IndexFunc(text, func(r rune) bool { return r > unicode.MaxASCII }) >= 0 {
		t.Errorf("rows = %s, want ASCII alone", text)
	}
	if !strings.Contains(text, "main  ^2") {
		t.Errorf("rows = %s, want \"main  ^2\"", text)
	}
	for env, want := range map[string]bool{"C.UTF-8": true, "de_DE.utf8": true, "C": false, "en_US.ISO-8859-1": false, "": true} { // without LC_ALL, LANG counts
		if got := Unicode(func(name string) string { return map[string]string{"LANG": "C.UTF-8", "LC_ALL": env}[name] }); got != want {
			t.Errorf("Unicode with LC_ALL=%q = %t, want %t", env, got, want)
		}
	}
}

// TestRowsChangeOnceAMinute checks that time alone changes the rows only once a minute,
// because fzf may lose keys while it reloads rows.
func TestRowsChangeOnceAMinute(t *testing.T) {
	p := newPicker(t)
	start := time.Now().Truncate(time.Minute)
	var all []workState
	for i := range 20 {
		s := workState{}
		s.State, s.Desired = session.Stopped, session.Stopped
		s.ID, s.RepoKey, s.Repo = fmt.Sprint(i), "github.com/o/r", fmt.Sprint("o/r", i)
		s.StateChangedAt = start.Add(-time.Duration(i*7) * time.Second)
		all = append(all, s)
	}
	first := strings.Join(p.lines(all, nil, start), "\n")
	for s := range 60 {
		if strings.Join(p.lines(all, nil, start.Add(time.Duration(s)*time.Second)), "\n") != first {
			t.Fatalf("rows changed after %d s, want them unchanged within a minute", s)
		}
	}
	if strings.Join(p.lines(all, nil, start.Add(time.Minute)), "\n") == first {
		t.Errorf("rows after a minute = %q, want others", first)
	}
}

func TestAge(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for d, want := range map[time.Duration]string{
		-time.Hour: "<1m", 5 * time.Second: "<1m", time.Minute: "1m", 59 * time.Minute: "59m", 90 * time.Minute: "1h", 47 * time.Hour: "47h", 49 * time.Hour: "2d",
	} {
		if got := age(now.Add(-d), now); got != want {
			t.Errorf("age of %v = %q, want %q", d, got, want)
		}
	}
}
