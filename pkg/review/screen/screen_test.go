package screen

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	tea "charm.land/bubbletea/v2"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

// golden compares the screen with a picture of it. Spaces at the ends of lines do not count.
func (u *user) golden(want string) {
	u.Helper()
	var got []string
	for l := range strings.Lines(u.screen()) {
		got = append(got, strings.TrimRight(l, " \n"))
	}
	if diff := cmp.Diff(strings.Split(strings.Trim(want, "\n"), "\n"), got); diff != "" {
		u.Errorf("the screen differs (-want +got):\n%s\n%s", diff, strings.Join(got, "\n"))
	}
}

func TestScreen(t *testing.T) {
	a := newAttempt("repo", patch("main.go"), patch("pkg/deep/down/in/a/tree/parser.go"))
	a.done = []string{"old.go"}
	a.source.Results = []lifecycle.Result{
		{Name: "tests", Commit: "head"},
		{Name: "lint", ExitCode: 2, Commit: "0123456789", Uncommitted: true},
		{Name: "claude"},
	}
	u := newUser(t, Options{}, a)
	u.size(80, 14)
	u.golden(`
repo → review/repo   2 files, 1 landed
✓ tests   ✗ lint (exit 2) on 01234567 with uncommitted changes   ✓ claude
○ M main.go          +3 -2│○ @@ -1,3 +1,3 @@
○ M …n/in/a/tree/parser.go│   1  package x
✓   old.go                │○  2 -const a = 1
                          │○  2 +const a = 2
                          │   3
                          │○ @@ -20,2 +20,3 @@
                          │  20  func f() {
                          │○ 21 -    return old
                          │○ 21 +    log()
                          │○ 22 +    return new
main.go
? help   Space choose   L land   n note   q quit`)
	u.press("tab", "space", "s")
	u.golden(`
repo → review/repo   2 files, 1 chosen, 1 landed
✓ tests   ✗ lint (exit 2) on 01234567 with uncommitted changes   ✓ claude
◐ M main.go          +3 -2│●▎@@ -1,3 +1,3 @@
○ M …n/in/a/tree/parser.go│   1  package x            │ 1  package x
✓   old.go                │●▎ 2 -const a = 1          │ 2 +const a = 2
                          │   3                       │ 3
                          │○ @@ -20,2 +20,3 @@
                          │  20  func f() {           │20  func f() {
                          │○ 21 -    return old       │21 +    log()
                          │○                          │22 +    return new
                          │
                          │
main.go
? help   Space choose   L land   n note   q quit`)
	u.size(40, 10)
	u.sees("const a = 1")
	u.lacks("parser.go")
	u.press("tab")
	u.sees("parser.go")
	u.lacks("const a = 1")
	for _, size := range [][2]int{{1, 1}, {3, 2}, {20, 5}, {60, 3}, {200, 60}} { // send checks that nothing is too large
		u.size(size[0], size[1])
		u.press("tab", "?", "x", "/", "esc")
	}
}

func TestChoose(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go"), patch("b.go")))
	u.press("tab", "]", "space")
	u.equal([]string{"a.go +l", "a.go +r", "a.go -r"}, u.chosen(0))
	u.press("v", "down", "down", "space") // a line, and on to the next
	u.equal([]string{"a.go +l", "a.go +r"}, u.chosen(0))
	u.press("space")
	u.equal([]string{"a.go +r"}, u.chosen(0))
	u.press("home", "down", "space")
	u.sees("no change on this line")
	u.press("v", "home", "space")
	u.sees("◐ M a.go", "○ M b.go")
	u.press("a")
	u.sees("● M a.go")
	u.press("A")
	u.sees("● M a.go", "● M b.go")
	u.press("A")
	u.equal([]string{}, u.chosen(0))
	u.press("tab", "space", "space") // both files: the cursor moves on
	u.sees("● M a.go", "● M b.go")
}

func (u *user) equal(want, got any) {
	u.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		u.Errorf("(-want +got):\n%s", diff)
	}
}

// Marks that were saved earlier are visible before a file is opened.
func TestPartBeforeOpening(t *testing.T) {
	a := newAttempt("repo", patch("a.go"), patch("b.go"))
	a.marks["b.go +a"] = true
	u := newUser(t, Options{}, a)
	u.sees("○ M a.go", "◐ M b.go")
}

// Space on a hunk that is still read must not choose the whole file.
func TestSpaceWhileReading(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go"), patch("b.go")))
	u.hold = true
	u.press("down", "tab", "space")
	u.sees("loading …", "still loading the changes")
	u.equal([]string{}, u.chosen(0))
	u.release()
	u.sees("const a = 2")
}

// A user who moves quickly reads one file at a time, and the last one is shown.
func TestReadingIsBounded(t *testing.T) {
	var all []*review.Patch
	for i := range 100 {
		all = append(all, patch(fmt.Sprintf("%03d.go", i)))
	}
	a := newAttempt("repo", all...)
	var read []int
	cancelled := 0
	a.read = func(ctx context.Context, file int) error {
		read = append(read, file)
		if ctx.Err() != nil {
			cancelled++
		}
		return ctx.Err()
	}
	u := newUser(t, Options{}, a)
	u.hold = true
	for range 50 {
		u.press("down")
	}
	if len(u.held) != 1 {
		t.Errorf("%d files are read at once, want 1", len(u.held))
	}
	u.release()
	u.equal([]int{0, 1, 50}, read)
	u.equal(1, cancelled)
	u.sees("050.go")
	u.lacks("context canceled")
	if got := u.m.patch.Path; got != "050.go" {
		t.Errorf("shown is %s, want 050.go", got)
	}
}

func TestPatchError(t *testing.T) {
	a := newAttempt("repo", patch("a.go"), patch("b.go"))
	a.patchErr = errors.New("read\x1b[2J object")
	u := newUser(t, Options{}, a)
	u.sees("object")
	u.press("tab", "space", "s", "]", "n", "esc")
	u.equal([]string{}, u.chosen(0))
}

// The list draws what is visible, however many files exist.
func TestManyFiles(t *testing.T) {
	var all []*review.Patch
	for i := range 10_000 {
		all = append(all, &review.Patch{File: review.File{Path: fmt.Sprintf("dir/%05d", i), Status: review.Added}, Meta: review.Key(fmt.Sprint(i))})
	}
	u := newUser(t, Options{}, newAttempt("repo", all...))
	u.press("end")
	u.sees("dir/09999")
	u.press("/")
	u.typed("DIR/0420")
	u.press("enter")
	u.sees("dir/04200")
	u.press("/", "enter") // again
	u.equal(4201, u.m.files.at)
	u.press("/")
	u.typed("nothing")
	u.press("enter")
	u.sees("not found: nothing")
	u.drawsLittle()
}

func TestFindLine(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go")))
	u.press("tab", "/")
	u.typed("LOG()")
	u.press("enter", "n")
	u.sees("note on a.go:21: ")
}

// Whatever a path, a line or a result contains, a terminal only displays it, and each line has its width.
func TestHostileTexts(t *testing.T) {
	for _, evil := range []string{
		"\x1b]0;title\x07\x1b[2J", "\u009b2J", "a\rb", "x\ny", "\u202etxt.exe", strings.Repeat("日", 300), strings.Repeat("e\u0301\u0302", 300), "bad\xff\xfe",
		strings.Repeat("x", 1<<20), "\ufe0f\u200d\U000e0001", strings.Repeat("ᄀ", 200), "👩\u200d👩\u200d👧👍🏽🇩🇪", "\t\t\t",
	} {
		p := patch(evil)
		p.OldPath, p.Meta, p.Status = evil, "meta", review.Renamed
		p.Hunks[0].Lines[1].Text, p.Hunks[0].Lines[2].Text = evil, evil+"x"
		a := newAttempt("repo", p)
		a.done = []string{evil}
		a.source.Title = evil
		a.source.Results = []lifecycle.Result{{Name: evil, Commit: evil}}
		u := newUser(t, Options{}, a)
		u.press("tab", "down", "down", "down", "s", "s", "right", "n")
		u.typed("x")
		u.press("enter")
		for _, r := range u.screen() {
			if r != '\n' && (r < ' ' || r >= 0x7f && r < 0xa0 || r == '\u202e' || r == '\u200d' || r == '\ufe0f') {
				t.Errorf("%.20q: the screen has %q:\n%q", evil, r, u.screen())
				break
			}
		}
	}
}

func TestKinds(t *testing.T) {
	file := func(path, was, is string, status review.Status, whole string) *review.Patch {
		return &review.Patch{File: review.File{Path: path, OldMode: was, NewMode: is, Status: status}, Whole: whole, Meta: review.Key(path)}
	}
	u := newUser(t, Options{}, newAttempt("repo",
		file("bin", repo.ModeFile, repo.ModeFile, review.Modified, "binary file"),
		file("exe", repo.ModeFile, repo.ModeExecutable, review.Modified, ""),
		file("ln", "", repo.ModeLink, review.Added, "symbolic link"),
		file("sub", repo.ModeSubmodule, "", review.Deleted, "submodule"),
	))
	u.size(200, 24)
	u.sees("binary", "binary file; choose the whole file")
	u.press("tab", "space")
	u.sees("● M bin")
	u.press("tab", "down")
	u.sees("mode 100644 became 100755")
	u.press("tab", "space")
	u.sees("● M exe")
	for _, line := range []string{"M exe", "A ln", "D sub"} {
		i := slices.IndexFunc(strings.Split(u.screen(), "\n"), func(l string) bool { return strings.Contains(l, line) })
		kind := map[string]string{"M exe": " mode│", "A ln": " link│", "D sub": " submodule│"}[line]
		if l := strings.Split(u.screen(), "\n")[i]; !strings.Contains(l, kind) {
			t.Errorf("line %q lacks %q", l, kind)
		}
	}
}

func TestAttempts(t *testing.T) {
	one, two := newAttempt("one", patch("a.go"), patch("b.go")), newAttempt("two", patch("b.go"))
	one.source.Results = []lifecycle.Result{{Name: "tests", Commit: "head"}}
	two.source.Results = []lifecycle.Result{{Name: "tests", ExitCode: 1, Commit: "head"}}
	u := newUser(t, Options{}, one, two)
	u.sees("▸ 1 one (0 chosen)   ✓ tests", "  2 two (0 chosen)   ✗ tests (exit 1)")
	u.press("down", "space", "t")
	u.sees("▸ 2 two", "1 one (1 chosen)", "M b.go")
	u.press("tab", "space")
	u.equal([]string{"b.go +a", "b.go -a"}, u.chosen(1))
	u.press("L")
	u.sees("landing the chosen changes in 2 files from 2 attempts")
	u.press("esc", "t")
	u.sees("▸ 1 one")
	u.equal("b.go", u.m.patch.Path)
}

func TestLand(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go"), patch("b.go")))
	u.press("L")
	u.sees("nothing is chosen")
	u.press("space", "L")
	u.sees("landing the chosen changes in 1 file", "message: Land it")
	u.press("ctrl+u", "enter") // an empty message does nothing
	u.typed("Fix x")
	u.press("backspace", "enter")
	u.sees("branch: review/repo")
	u.typed("2")
	u.press("enter")
	u.sees("1 file landed on review/repo2, 0123456789", "✓   a.go", "1 file, 1 landed")
	u.equal(1, len(u.work.landed))
	u.equal("Fix", u.work.landed[0].Message)
	u.equal("b.go", u.m.patch.Path)
	u.press("home", "down", "space", "n") // on what has landed
	u.sees("this file has landed")
	u.equal([]string{}, u.chosen(0))
}

// The user accepts exactly the findings that are on the screen.
func TestFindings(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go")))
	u.size(80, 10)
	var found []review.Finding
	for i := range 20 {
		found = append(found, review.Finding{ID: fmt.Sprint(i), Path: fmt.Sprintf("f%02d", i), Line: 3, What: "a key"})
	}
	u.work.answers = []error{&review.FindingsError{Findings: found}, &review.FindingsError{Findings: found[5:]}}
	u.press("space", "L", "enter", "enter")
	u.sees("f00:3: a key", "f04:3: a key", "land despite these 5 of 20 findings? [y/N]")
	u.lacks("f05")
	u.press("y")
	u.equal(found[:5], u.work.landed[1].Accept)
	u.sees("f05:3", "land despite these 5 of 15 findings")
	u.press("enter") // is not consent
	u.sees("cancelled")
	u.equal(2, len(u.work.landed))
	u.press("L", "enter", "enter") // consent is not kept
	u.equal(0, len(u.work.landed[2].Accept))
	u.sees("1 file landed")
}

func TestConflicts(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go"), patch("b.go"), patch("c.go")))
	u.press("m")
	u.sees("no file conflicts")
	conflicts := []review.Conflict{{Session: "repo", Path: "a.go"}, {Session: "repo", Path: "b.go"}, {Session: "repo", Path: "c.go", Why: "one is a directory"}}
	u.work.answers = []error{&review.ConflictError{Conflicts: conflicts}}
	u.press("A", "down", "L", "enter", "enter")
	u.sees("3 conflicts of repo with review/repo; press m", "conflict")
	u.press("m", "home", "m")
	u.equal([]string{"b.go", "a.go"}, u.work.merged)
	u.press("m")
	u.sees("c.go: one is a directory")
	u.work.answers = []error{&review.ConflictError{Conflicts: conflicts[:2]}}
	u.press("L", "enter", "enter", "m", "m")
	u.equal(3, len(u.work.landed))
	u.equal(2, len(u.work.landed[2].Resolutions))
	u.sees("3 files landed")
}

func TestPull(t *testing.T) {
	var checked, created []string
	var checkErr, createErr error
	o := Options{
		CheckPull: func(_ context.Context, branch string) error { checked = append(checked, branch); return checkErr },
		CreatePull: func(_ context.Context, done review.Landed) (string, error) {
			created = append(created, done.Branch)
			return "https://example.com/pull/1", createErr
		},
	}
	u := newUser(t, o, newAttempt("repo", patch("a.go"), patch("b.go"), patch("c.go")))
	checkErr = fail.New(fail.Conflict, "no remote").WithHint("git remote add")
	u.press("space", "P", "enter", "enter")
	u.sees("no remote (git remote add)")
	u.equal(0, len(u.work.landed))
	checkErr = nil
	u.press("P", "enter", "enter")
	u.sees("1 file landed on review/repo, 0123456789; opened https://example.com/pull/1")
	createErr = errors.New("no network")
	u.press("space", "P", "enter", "enter") // what landed is not hidden by the error
	u.sees("1 file landed on review/repo, 0123456789; open pull request: no network")
	u.equal([]string{"review/repo", "review/repo"}, created)
	u.equal(3, len(checked))

	u = newUser(t, Options{}, newAttempt("repo", patch("a.go")))
	u.press("space", "P")
	u.sees("pull requests cannot be opened from here")
}

// While a landing runs, marks do not change, a second landing does not begin, and q waits.
func TestBusy(t *testing.T) {
	u := newUser(t, Options{Send: func(context.Context, review.Source, string) error { return nil }}, newAttempt("repo", patch("a.go"), patch("b.go")))
	u.press("space", "L", "enter")
	u.hold = true
	u.press("enter")
	u.m.Update(tickMsg{u.m.busy})
	u.sees("busy: landing, 1 s; Esc cancels")
	for _, k := range []string{"space", "a", "A", "L", "P", "S", "N", "r", "m"} {
		u.press(k)
		u.sees("busy: landing")
		if u.m.ask != nil {
			t.Errorf("%s asks %q while busy", k, u.m.ask.prompt)
		}
	}
	u.equal([]string{"a.go +a", "a.go +l", "a.go +r", "a.go -a", "a.go -r"}, u.chosen(0))
	u.press("q")
	u.sees("then quits")
	if u.quit {
		t.Error("q ends the review while it lands, want it to wait")
	}
	u.release()
	if !u.quit {
		t.Error("the review goes on after the landing, want its end")
	}
}

// An error or a question that comes after q is shown.
func TestQuitShowsProblems(t *testing.T) {
	for _, err := range []error{errors.New("disk is full"), &review.FindingsError{Findings: []review.Finding{{Path: "a.go", What: "disk is full"}}}} {
		u := newUser(t, Options{}, newAttempt("repo", patch("a.go")))
		u.work.answers = []error{err}
		u.press("space", "L", "enter")
		u.hold = true
		u.press("enter", "q")
		u.release()
		if u.quit {
			t.Errorf("the review ended without showing %v", err)
		}
		u.sees("disk is full")
		u.lacks("busy")
	}
}

func TestCancel(t *testing.T) {
	for _, key := range []string{"esc", "ctrl+c"} {
		u := newUser(t, Options{}, newAttempt("repo", patch("a.go")))
		u.work.hold = make(chan struct{})
		u.press("space", "L", "enter")
		u.hold = true
		u.press("enter", key)
		u.release()
		u.sees("cancelled")
		u.lacks("busy")
		u.equal(5, len(u.chosen(0)))
		if u.quit {
			t.Errorf("%s ended the review", key)
		}
		u.press("?", "ctrl+c") // also ends an idle review from the help
		if !u.quit {
			t.Error("Ctrl-C does not end an idle review")
		}
	}
}

// A note is about the line on which the user began to type, whatever a refresh does meanwhile.
func TestNotes(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go"), patch("b.go")))
	u.press("tab", "]", "down", "down", "n")
	u.sees("note on a.go, removed line 21: ")
	u.typed("Why")
	u.press("space")
	u.send(tea.PasteMsg{Content: "this?\x1b[2J\nReally"})
	u.work.refresh = func(w *fakeWork) { w.attempts[0].patches = []*review.Patch{patch("0.go"), patch("b.go")} }
	_ = u.work.Refresh(t.Context())
	u.send(doneMsg{}) // of that refresh
	u.press("enter")
	u.equal([]review.Note{{ID: "0", Target: review.Target{Path: "a.go", Line: 21, Removed: true, Quote: "\treturn old"}, Text: "Why this? Really"}}, u.work.attempts[0].notes)
	u.equal(0, len(u.work.attempts[0].sentNotes()))
}

func (a *fakeAttempt) sentNotes() (sent []string) {
	for _, n := range a.Notes() {
		if !n.Sent.IsZero() {
			sent = append(sent, n.Text)
		}
	}
	return sent
}

func TestRemoveNote(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go")))
	u.press("tab", "n")
	u.typed("first")
	u.press("enter")
	u.sees("S sends your notes to repo", "✎ first")
	u.press("down", "N")
	u.sees("no unsent notes on this line")
	u.press("up", "N")
	u.equal(0, len(u.work.attempts[0].notes))
}

// Only the notes that the agent got are sent, not those written meanwhile.
func TestSend(t *testing.T) {
	var sent []string
	var sendErr error
	o := Options{Send: func(_ context.Context, to review.Source, prompt string) error {
		sent = append(sent, to.Name+": "+prompt)
		return sendErr
	}}
	a := newAttempt("repo", patch("a.go"))
	u := newUser(t, o, a)
	u.press("S")
	u.sees("no unsent notes")
	u.press("n")
	u.typed("first")
	u.press("enter", "S")
	u.sees("a.go: first", "send 1 note to repo? [y/N]")
	sendErr = errors.New("agent waits for an answer")
	u.press("y")
	u.sees("agent waits for an answer")
	u.equal(0, len(a.sentNotes()))
	sendErr = nil
	u.press("S")
	u.hold = true
	u.press("y", "n")
	u.typed("second")
	u.press("enter")
	u.release()
	u.equal([]string{"first"}, a.sentNotes())
	u.equal([]string{"repo: first\n", "repo: first\n"}, sent)
	u.sees("✎ first (sent)   ✎ second")
	a.sentErr = errors.New("disk is full")
	u.press("S", "y")
	u.sees("the agent has the notes, but they could not be marked as sent: disk is full")
}

// After a refresh, the same file is selected, and the cursor is on the same change.
func TestRefresh(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go"), patch("b.go")))
	u.press("down", "tab", "]", "down", "down", "down") // b.go, +log()
	u.work.refresh = func(w *fakeWork) {
		p := patch("b.go")
		p.Hunks[0].Lines = append([]review.Line{{Kind: '+', Text: "// new", New: 1, Key: "new"}}, p.Hunks[0].Lines...)
		w.attempts[0].patches = []*review.Patch{patch("0.go"), patch("a.go"), p}
	}
	u.press("r")
	u.equal("b.go", u.m.patch.Path)
	u.equal([]review.Key{"b.go +l"}, u.m.rowAt().keys)
	u.equal(1, len(u.m.known))                                         // nothing of the attempts that were replaced
	u.work.refresh = func(w *fakeWork) { w.attempts[0].patches = nil } // everything landed elsewhere
	u.press("r", "space", "a", "A", "n", "s", "]", "t", "/", "enter")
	u.sees("no committed changes")
}

// A refresh may fail, such as without the VM. What was read before stays, and so does the place.
func TestRefreshFails(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go"), patch("b.go")))
	u.press("down", "tab", "]")
	u.work.refreshErr = errors.New("the VM is down")
	u.press("r")
	u.sees("the VM is down", "const a = 2")
	u.equal("b.go", u.m.patch.Path)
	u.equal("@@ -20,2 +20,3 @@", u.m.rowAt().text)
}

// The help fits on a small terminal, and has every key.
func TestHelp(t *testing.T) {
	u := newUser(t, Options{}, newAttempt("repo", patch("a.go")))
	u.press("?")
	u.sees("choose the file, the hunk or the line", "quit; choices and notes are saved", "Ctrl-C cancel")
	u.press("x")
	u.sees("package x")
	used := map[string]bool{}
	for _, b := range bindings {
		for _, k := range b.keys {
			if used[k] {
				t.Errorf("the key %s is bound twice", k)
			}
			used[k] = true
		}
	}
}

// drawsLittle checks that drawing asks only for marks of what is visible.
func (u *user) drawsLittle() {
	u.Helper()
	a := u.work.attempts[0]
	u.m.draw()
	before := a.asked
	u.m.draw()
	if n := a.asked - before; n == 0 || n > 2*u.m.height {
		u.Errorf("drawing asks for %d marks, want 1 to %d", n, 2*u.m.height)
	}
}

// A hunk with very many lines must not slow each key down.
func TestHugeHunk(t *testing.T) {
	p := &review.Patch{File: review.File{Path: "x", Status: review.Added, NewMode: repo.ModeFile}, Hunks: []review.Hunk{{}}}
	for i := range maxRows {
		p.Hunks[0].Lines = append(p.Hunks[0].Lines, review.Line{Kind: '+', Text: "x", New: i + 1, Key: review.Key(fmt.Sprint(i))})
	}
	u := newUser(t, Options{}, newAttempt("repo", p))
	u.press("tab")
	u.sees("○▎@@")
	u.drawsLittle()
	u.press("space")
	u.sees("●▎@@", "● A x")
}
