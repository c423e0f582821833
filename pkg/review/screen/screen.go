// Package screen is the terminal interface of a review.
//
// Its model turns messages into a new state and a text, so that a test can send it keys and read
// what a user would see. Everything that takes a moment runs outside of the model and comes back
// as a message. The package never runs git, and decides nothing about what may land.
package screen

import (
	"context"
	"errors"
	"fmt"
	"io"

	tea "charm.land/bubbletea/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Options describes a review on a terminal.
type Options struct {
	Work *review.Work
	In   io.Reader
	Out  io.Writer
	Env  []string

	// Send gives an agent its next prompt. It is nil if that is not possible.
	Send func(ctx context.Context, to review.Source, prompt string) error
	// CheckPull returns an error if CreatePull cannot succeed for a branch.
	CheckPull func(ctx context.Context, branch string) error
	// CreatePull opens a pull request for what landed, and returns its address. It is nil if that
	// is not possible.
	CreatePull func(ctx context.Context, done review.Landed) (string, error)
}

// Run shows the review until the user ends it. It returns after all that it started has ended.
func Run(ctx context.Context, o Options) error { return run(ctx, o, reviewWork{o.Work}) }

func run(ctx context.Context, o Options, w work) error {
	m := newModel(ctx, o, w)
	defer m.stop()
	p := tea.NewProgram(m, tea.WithInput(o.In), tea.WithOutput(o.Out), tea.WithEnvironment(o.Env))
	// tea.WithContext would end the program without waiting for what reads the terminal.
	defer context.AfterFunc(ctx, p.Quit)()
	_, err := p.Run()
	if errors.Is(err, tea.ErrInterrupted) || ctx.Err() != nil {
		return context.Canceled
	}
	return err
}

// pane is the part of the screen that gets the keys.
type pane int

const (
	filesPane pane = iota
	diffPane
)

// model is the state of the screen.
type model struct {
	ctx    context.Context
	cancel context.CancelFunc // of everything that runs
	work   work
	o      Options

	width, height int
	attempt       int // of the review's attempts
	pane          pane
	split         bool // both versions side by side
	lines         bool // keys choose lines, not hunks
	help          bool

	files scroll // its rows are the files that can be chosen, and then those that have landed
	diff  scroll
	from  int // column at which the lines of the difference begin

	patch    *review.Patch // of the selected file, nil while it is read
	patchOf  selection
	patchErr error
	view     view
	resume   *row // the row to return to in the patch that is being read

	owner     *owner
	exec      func(tea.ExecCommand, tea.ExecCallback) tea.Cmd // gives a program the terminal
	tick      func(*job) tea.Cmd                              // returns a tickMsg a second later
	reading   latest                                          // reads the patch of the selected file
	colouring latest                                          // colours it

	counts []int                       // chosen files of each attempt
	signs  map[int]string              // marks of hunks
	known  map[selection]*review.Patch // without hunks: the files that were read

	ask     *question // what the user is asked, nil for nothing
	busy    *job      // what runs, nil for nothing
	found   string    // what was searched for last
	message string    // the last one for the user
	problem bool      // it is about a problem
	quit    bool      // as soon as nothing runs any more

	request   review.LandRequest // that is being landed
	pull      bool               // a pull request follows
	conflicts []review.Conflict  // that the user has not resolved
}

// selection is a file of an attempt. The zero value is none.
type selection struct {
	attempt attempt
	file    int
}

func (s selection) path() string { return s.attempt.Files()[s.file].Path }

func newModel(ctx context.Context, o Options, w work) *model {
	ctx, cancel := context.WithCancel(ctx)
	m := &model{ctx: ctx, cancel: cancel, work: w, o: o, width: 80, height: 24, known: map[selection]*review.Patch{}}
	m.owner, m.exec, m.tick = &owner{}, tea.Exec, tick
	m.reading.owner, m.colouring.owner = m.owner, m.owner
	m.recount()
	return m
}

// stop cancels what runs, and waits for it.
func (m *model) stop() {
	m.cancel()
	m.owner.wait()
}

func (m *model) Init() tea.Cmd { return m.load() }

// current returns the selected attempt.
func (m *model) current() attempt {
	all := m.work.Attempts()
	m.attempt = min(m.attempt, len(all)-1)
	return all[m.attempt]
}

// selected returns the selected file; ok is false if none is selected, or one that has landed.
func (m *model) selected() (s selection, ok bool) {
	a := m.current()
	m.files.clamp(len(a.Files()) + len(a.Landed()))
	return selection{a, m.files.at}, m.files.at < len(a.Files())
}

// rows returns the rows of the difference.
func (m *model) rows() []row { return m.view.rows(m.split) }

// recount counts what is chosen, which is too slow for each time that the screen is drawn.
func (m *model) recount() {
	m.counts, m.signs = nil, map[int]string{}
	for _, a := range m.work.Attempts() {
		n := 0
		for i := range a.Files() {
			if a.Mark(i) != review.None {
				n++
			}
		}
		m.counts = append(m.counts, n)
	}
}

// chosen returns how many files have something chosen, in all attempts.
func (m *model) chosen() (files int) {
	for _, n := range m.counts {
		files += n
	}
	return files
}

func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = max(1, msg.Width), max(1, msg.Height)
	case patchMsg:
		return m, tea.Batch(m.reading.end(), m.gotPatch(msg))
	case colourMsg:
		if msg.of == m.patchOf && len(msg.view.unified) > 0 {
			m.view = msg.view
		}
		return m, m.colouring.end()
	case tickMsg:
		if m.busy != nil && m.busy == msg.job {
			m.busy.seconds++
			return m, m.tick(m.busy)
		}
	case doneMsg:
		return m, m.done(msg)
	case tea.PasteMsg:
		if m.ask != nil {
			m.ask.add(termtext.Line(msg.Content))
		}
	case tea.KeyPressMsg:
		return m, m.key(msg)
	}
	return m, nil
}

// patchMsg is the difference of a file that was read.
type patchMsg struct {
	of    selection
	patch *review.Patch
	view  view
	err   error
}

// colourMsg is the same difference in colours. It has no rows if it was cancelled.
type colourMsg struct {
	of   selection
	view view
}

// load reads the difference of the selected file, unless it is the one that is shown.
func (m *model) load() tea.Cmd {
	s, ok := m.selected()
	if !ok {
		s = selection{}
	}
	if s == m.patchOf {
		return nil
	}
	m.patch, m.view, m.patchOf, m.patchErr, m.signs = nil, view{}, s, nil, map[int]string{}
	m.diff, m.from = scroll{}, 0
	if !ok {
		return nil
	}
	return m.reading.start(m.ctx, func(ctx context.Context) tea.Msg {
		p, err := s.attempt.Patch(ctx, s.file)
		if err != nil {
			return patchMsg{of: s, err: err}
		}
		return patchMsg{of: s, patch: p, view: newView(p, nil)}
	})
}

// gotPatch shows a patch if it is still the selected one, and begins to colour it.
func (m *model) gotPatch(msg patchMsg) tea.Cmd {
	if msg.of != m.patchOf {
		return nil
	}
	m.patch, m.view, m.patchErr = msg.patch, msg.view, msg.err
	m.recount() // the engine knows now how much of the file is chosen
	if msg.err != nil {
		return nil
	}
	p := *msg.patch
	p.Hunks = nil
	m.known[msg.of] = &p
	m.diff.at = locate(m.rows(), m.resume)
	m.resume = nil
	return m.colouring.start(m.ctx, func(ctx context.Context) tea.Msg {
		if c := newColourer(ctx, msg.patch.Path); c != nil {
			return colourMsg{msg.of, newView(msg.patch, c)}
		}
		return colourMsg{of: msg.of}
	})
}

// locate returns the row that is most like an earlier one, or the first that can be chosen.
func locate(rows []row, was *row) int {
	first, nearest := -1, -1
	for i, r := range rows {
		if len(r.keys) == 0 {
			continue
		}
		if first < 0 {
			first = i
		}
		if was == nil {
			break
		}
		if len(was.keys) > 0 && was.heading() == r.heading() && was.keys[0] == r.keys[0] {
			return i
		}
		if !r.heading() && (nearest < 0 || abs(r.number()-was.number()) < abs(rows[nearest].number()-was.number())) {
			nearest = i
		}
	}
	if nearest >= 0 {
		return nearest
	}
	return max(0, first)
}

func abs(n int) int { return max(n, -n) }

// follow stays at the selected file after the attempts were replaced, and forgets the old ones.
func (m *model) follow() {
	was := m.patchOf
	m.recount()
	if was.attempt == nil || was.attempt == m.current() {
		return
	}
	clear(m.known)
	if r := m.rowAt(); len(m.rows()) > 0 {
		m.resume = &r
	}
	path := was.path()
	for i, f := range m.current().Files() {
		if f.Path == path {
			m.files.at = i
			return
		}
	}
	m.resume = nil
}

// say shows a message.
func (m *model) say(format string, args ...any) {
	m.message, m.problem = fmt.Sprintf(format, args...), false
}

// complain shows a problem with its hint, and what succeeded before it.
func (m *model) complain(err error, before ...string) {
	if errors.Is(err, context.Canceled) {
		m.say("cancelled")
	} else {
		m.message, m.problem = termtext.Line(err.Error()), true
		if hint := fail.HintOf(err); hint != "" {
			m.message += " (" + termtext.Line(hint) + ")"
		}
	}
	for _, b := range before {
		if b != "" {
			m.message = b + "; " + m.message
		}
	}
}

// scroll is a position in a list of which a part is visible.
type scroll struct{ at, top int }

func (s *scroll) clamp(length int) { s.at = max(0, min(s.at, length-1)) }

// show moves the visible part so that it has the position.
func (s *scroll) show(length, height int) {
	s.clamp(length)
	s.top = max(0, min(s.top, s.at, length-height))
	if s.at >= s.top+height {
		s.top = s.at - height + 1
	}
}
