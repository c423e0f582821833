package screen

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

// fakeWork is a review without a repository. It can be made to wait, and to fail.
type fakeWork struct {
	mu       sync.Mutex
	attempts []*fakeAttempt
	landed   []review.LandRequest
	answers  []error         // of the next landings
	refresh  func(*fakeWork) // what the agents did
	hold     chan struct{}   // landings wait for it, or for their end
	begun    chan struct{}   // closed when a landing begins
	ended    chan struct{}   // closed a moment after the end of a landing that was cancelled
	merged   []string

	refreshErr error
}

func (w *fakeWork) Attempts() []attempt {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []attempt
	for _, a := range w.attempts {
		all = append(all, a)
	}
	return all
}

func (w *fakeWork) Branch() (name, tip string) { return "review/repo", "tip" }
func (w *fakeWork) DefaultMessage() string     { return "Land it" }

// replace makes new attempts with the same marks and notes.
func (w *fakeWork) replace() {
	for i, a := range w.attempts {
		w.attempts[i] = &fakeAttempt{
			source: a.source, patches: slices.Clone(a.patches), done: a.done, marks: maps.Clone(a.marks), notes: a.notes, read: a.read,
		}
	}
}

func (w *fakeWork) Refresh(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refreshErr != nil {
		return w.refreshErr
	}
	w.replace()
	if w.refresh != nil {
		w.refresh(w)
	}
	return nil
}

func (w *fakeWork) Land(ctx context.Context, r review.LandRequest) (review.Landed, error) {
	w.mu.Lock()
	w.landed = append(w.landed, r)
	var answer error
	if len(w.answers) > 0 {
		answer, w.answers = w.answers[0], w.answers[1:]
	}
	w.mu.Unlock()
	if w.begun != nil {
		close(w.begun)
	}
	if w.hold != nil {
		select {
		case <-w.hold:
		case <-ctx.Done():
			if w.ended != nil {
				time.Sleep(50 * time.Millisecond) // an early return of Run would be noticed
				close(w.ended)
			}
			return review.Landed{}, fmt.Errorf("land: %w", ctx.Err())
		}
	}
	done := review.Landed{Branch: r.Branch, Tip: "0123456789abcdef"}
	if answer != nil {
		return review.Landed{Branch: r.Branch}, answer
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.replace()
	for _, a := range w.attempts {
		commit := review.LandedCommit{Session: a.source.Name, Commit: "0123456789abcdef"}
		a.patches = slices.DeleteFunc(a.patches, func(p *review.Patch) bool {
			if !slices.ContainsFunc(p.Keys(), func(k review.Key) bool { return a.marks[k] }) {
				return false
			}
			commit.Files = append(commit.Files, p.Path)
			return true
		})
		if a.done = append(a.done, commit.Files...); len(commit.Files) > 0 {
			done.Commits = append(done.Commits, commit)
		}
		a.marks = map[review.Key]bool{}
	}
	return done, nil
}

func (w *fakeWork) MergeTool(_ context.Context, c review.Conflict, _ review.Terminal) (review.Resolution, error) {
	w.merged = append(w.merged, c.Path)
	return review.Resolution{Conflict: c, Result: repo.Entry{Mode: repo.ModeFile, ID: "merged"}}, nil
}

// fakeAttempt keeps its marks by key. Keys have the path of their file.
type fakeAttempt struct {
	source  review.Source
	patches []*review.Patch
	done    []string
	read    func(ctx context.Context, file int) error

	mu       sync.Mutex
	marks    map[review.Key]bool
	asked    int // for how many marks
	notes    []review.Note
	patchErr error
	sentErr  error
}

func (a *fakeAttempt) Source() review.Source { return a.source }
func (a *fakeAttempt) Head() string          { return "head" }
func (a *fakeAttempt) Landed() []string      { return a.done }

func (a *fakeAttempt) Files() []review.File {
	all := make([]review.File, len(a.patches))
	for i, p := range a.patches {
		all[i] = p.File
	}
	return all
}

func (a *fakeAttempt) Patch(ctx context.Context, file int) (*review.Patch, error) {
	if a.read != nil {
		if err := a.read(ctx, file); err != nil {
			return nil, err
		}
	}
	return a.patches[file], a.patchErr
}

func (a *fakeAttempt) Mark(file int) review.Mark {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked++
	on, keys := 0, a.patches[file].Keys()
	for _, k := range keys {
		if a.marks[k] {
			on++
		}
	}
	switch on {
	case 0:
		return review.None
	case len(keys):
		return review.All
	}
	return review.Part
}

func (a *fakeAttempt) Chosen(_ int, k review.Key) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked++
	return a.marks[k]
}

func (a *fakeAttempt) Choose(_ context.Context, _ int, on bool, keys ...review.Key) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range keys {
		a.marks[k] = on
	}
	return nil
}

func (a *fakeAttempt) ChooseFile(file int, on bool) error {
	return a.Choose(context.Background(), file, on, a.patches[file].Keys()...)
}

func (a *fakeAttempt) ChooseAll(on bool) error {
	for i := range a.patches {
		_ = a.ChooseFile(i, on)
	}
	return nil
}

func (a *fakeAttempt) Notes() []review.Note {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.notes)
}

func (a *fakeAttempt) AddNote(t review.Target, text string) (review.Note, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := review.Note{ID: fmt.Sprint(len(a.notes)), Target: t, Text: text}
	a.notes = append(a.notes, n)
	return n, nil
}

func (a *fakeAttempt) RemoveNote(id string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.notes = slices.DeleteFunc(a.notes, func(n review.Note) bool { return n.ID == id })
	return nil
}

func (a *fakeAttempt) Prompt() (prompt string, notes []review.Note) {
	for _, n := range a.Notes() {
		if n.Sent.IsZero() {
			prompt += n.Text + "\n"
			notes = append(notes, n)
		}
	}
	return prompt, notes
}

func (a *fakeAttempt) MarkSent(notes []review.Note) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.notes {
		if slices.ContainsFunc(notes, func(n review.Note) bool { return n.ID == a.notes[i].ID }) {
			a.notes[i].Sent = time.Unix(1, 0)
		}
	}
	return a.sentErr
}

// patch returns a patch of a modified file with two hunks.
func patch(path string) *review.Patch {
	key := func(s string) review.Key { return review.Key(path + " " + s) }
	return &review.Patch{
		File: review.File{Path: path, Status: review.Modified, OldMode: repo.ModeFile, NewMode: repo.ModeFile}, Added: 3, Removed: 2,
		Hunks: []review.Hunk{
			{OldStart: 1, OldLines: 3, NewStart: 1, NewLines: 3, Lines: []review.Line{
				{Kind: ' ', Text: "package x", Old: 1, New: 1},
				{Kind: '-', Text: "const a = 1", Old: 2, Key: key("-a")},
				{Kind: '+', Text: "const a = 2", New: 2, Key: key("+a")},
				{Kind: ' ', Text: "", Old: 3, New: 3},
			}},
			{OldStart: 20, OldLines: 2, NewStart: 20, NewLines: 3, Lines: []review.Line{
				{Kind: ' ', Text: "func f() {", Old: 20, New: 20},
				{Kind: '-', Text: "\treturn old", Old: 21, Key: key("-r")},
				{Kind: '+', Text: "\tlog()", New: 21, Key: key("+l")},
				{Kind: '+', Text: "\treturn new", New: 22, Key: key("+r")},
			}},
		},
	}
}

func newAttempt(name string, patches ...*review.Patch) *fakeAttempt {
	return &fakeAttempt{source: review.Source{ID: name, Name: name, Title: name}, patches: patches, marks: map[review.Key]bool{}}
}

// user plays the user of a screen. Commands run at once, unless they are held back.
type user struct {
	*testing.T
	m    *model
	work *fakeWork
	held []tea.Cmd // if hold is set
	hold bool
	quit bool
}

func newUser(t *testing.T, o Options, attempts ...*fakeAttempt) *user {
	t.Helper()
	w := &fakeWork{attempts: attempts}
	u := &user{T: t, m: newModel(t.Context(), o, w), work: w}
	t.Cleanup(u.m.stop)
	u.m.tick = func(*job) tea.Cmd { return nil }
	u.m.exec = func(c tea.ExecCommand, done tea.ExecCallback) tea.Cmd {
		return func() tea.Msg { return done(c.Run()) }
	}
	u.run(u.m.Init())
	u.size(80, 24)
	return u
}

func (u *user) size(width, height int) { u.send(tea.WindowSizeMsg{Width: width, Height: height}) }

func (u *user) send(msg tea.Msg) {
	u.Helper()
	_, cmd := u.m.Update(msg)
	u.run(cmd)
	lines := strings.Split(u.m.View().Content, "\n")
	if len(lines) > u.m.height {
		u.Errorf("the screen has %d lines, want at most %d:\n%s", len(lines), u.m.height, strings.Join(lines, "\n"))
	}
	for _, l := range lines {
		if w := ansi.StringWidthWc(l); w > u.m.width {
			u.Errorf("a line has %d columns, want at most %d: %q", w, u.m.width, l)
		}
	}
}

// run runs a command and what follows from it, or holds it back.
func (u *user) run(cmd tea.Cmd) {
	u.Helper()
	if cmd == nil {
		return
	}
	if u.hold {
		u.held = append(u.held, cmd)
		return
	}
	u.got(cmd())
}

func (u *user) got(msg tea.Msg) {
	u.Helper()
	switch msg := msg.(type) {
	case nil:
	case tea.QuitMsg:
		u.quit = true
	case tea.BatchMsg:
		for _, cmd := range msg {
			u.run(cmd)
		}
	default:
		u.send(msg)
	}
}

// release runs what was held back.
func (u *user) release() {
	u.Helper()
	u.hold = false
	held := u.held
	u.held = nil
	for _, cmd := range held {
		u.run(cmd)
	}
}

var namedKeys = map[string]tea.KeyPressMsg{
	"enter": {Code: tea.KeyEnter}, "esc": {Code: tea.KeyEscape}, "tab": {Code: tea.KeyTab}, "space": {Code: ' ', Text: " "}, "up": {Code: tea.KeyUp},
	"down": {Code: tea.KeyDown}, "end": {Code: tea.KeyEnd}, "home": {Code: tea.KeyHome}, "pgdown": {Code: tea.KeyPgDown}, "right": {Code: tea.KeyRight},
	"backspace": {Code: tea.KeyBackspace}, "ctrl+c": {Code: 'c', Mod: tea.ModCtrl}, "ctrl+u": {Code: 'u', Mod: tea.ModCtrl},
}

// press presses keys, by their names or as single characters.
func (u *user) press(keys ...string) {
	u.Helper()
	for _, k := range keys {
		msg, ok := namedKeys[k]
		if !ok {
			msg = tea.KeyPressMsg{Code: []rune(k)[0], Text: k}
		}
		u.send(msg)
	}
}

// typed types a text.
func (u *user) typed(text string) {
	u.Helper()
	for _, r := range text {
		u.press(string(r))
	}
}

func (u *user) screen() string { return ansi.Strip(u.m.View().Content) }

// sees checks that the screen has texts.
func (u *user) sees(texts ...string) {
	u.Helper()
	for _, text := range texts {
		if !strings.Contains(u.screen(), text) {
			u.Errorf("the screen lacks %q:\n%s", text, u.screen())
		}
	}
}

func (u *user) lacks(text string) {
	u.Helper()
	if strings.Contains(u.screen(), text) {
		u.Errorf("the screen has %q:\n%s", text, u.screen())
	}
}

// chosen returns the marked keys of an attempt.
func (u *user) chosen(attempt int) []string {
	var all []string
	for k, on := range u.work.attempts[attempt].marks {
		if on {
			all = append(all, string(k))
		}
	}
	slices.Sort(all)
	return all
}
