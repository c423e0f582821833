package screen

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	tea "charm.land/bubbletea/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

// land asks for the message and the branch, and lands what is chosen. If pull is set, a pull
// request follows.
func (m *model) land(pull bool) tea.Cmd {
	switch {
	case pull && m.o.CreatePull == nil:
		m.say("pull requests cannot be opened from here")
		return nil
	case m.chosen() == 0:
		m.say("nothing is chosen; press Space to choose")
		return nil
	}
	m.request, m.pull, m.conflicts = review.LandRequest{}, pull, nil
	branch, _ := m.work.Branch()
	m.ask = &question{prompt: "message: ", about: []string{m.summary()}, text: m.work.DefaultMessage(), do: func(m *model, text string) tea.Cmd {
		m.request.Message = text
		m.ask = &question{prompt: "branch: ", text: branch, do: func(m *model, text string) tea.Cmd {
			m.request.Branch = text
			return m.checkPull()
		}}
		return nil
	}}
	return nil
}

// summary says what would land.
func (m *model) summary() string {
	attempts := 0
	for _, n := range m.counts {
		attempts += min(n, 1)
	}
	text := "landing the chosen changes in " + count(m.chosen(), "file")
	if len(m.counts) > 1 {
		text += " from " + count(attempts, "attempt")
	}
	return text
}

// checkPull lands if a pull request can be opened, or if none follows.
func (m *model) checkPull() tea.Cmd {
	if !m.pull || m.o.CheckPull == nil {
		return m.landNow()
	}
	branch := m.request.Branch
	return m.start("checking that a pull request can be opened", func(ctx context.Context) (func(*model) tea.Cmd, error) {
		return (*model).landNow, m.o.CheckPull(ctx, branch)
	})
}

// landNow lands what the request says.
func (m *model) landNow() tea.Cmd {
	request := m.request
	request.Accept, request.Resolutions = slices.Clone(request.Accept), slices.Clone(request.Resolutions)
	return m.start("landing", func(ctx context.Context) (func(*model) tea.Cmd, error) {
		done, err := m.work.Land(ctx, request)
		return func(m *model) tea.Cmd { return m.landed(done, err) }, nil
	})
}

// landed shows what a landing did, and asks for what it needs.
func (m *model) landed(done review.Landed, err error) tea.Cmd {
	var files int
	for _, c := range done.Commits {
		files += len(c.Files)
	}
	result := ""
	if len(done.Commits) > 0 {
		result = fmt.Sprintf("%s landed on %s, %.10s", count(files, "file"), done.Branch, done.Tip)
	}
	if findings, ok := errors.AsType[*review.FindingsError](err); ok {
		m.say("%s", result)
		m.accept(findings.Findings)
		return nil
	}
	if conflict, ok := errors.AsType[*review.ConflictError](err); ok {
		m.conflicts = slices.Clone(conflict.Conflicts)
		m.complain(fmt.Errorf("%s of %s with %s; press m to merge", count(len(m.conflicts), "conflict"), m.conflicts[0].Session, m.request.Branch), result)
		return nil
	}
	if err != nil {
		m.complain(err, result)
		return nil
	}
	m.conflicts = nil
	if result == "" {
		result = "nothing landed"
	}
	m.say("%s", result)
	if !m.pull {
		return nil
	}
	return m.start("opening the pull request", func(ctx context.Context) (func(*model) tea.Cmd, error) {
		address, err := m.o.CreatePull(ctx, done)
		return func(m *model) tea.Cmd {
			if err != nil {
				m.complain(fmt.Errorf("open pull request: %w", err), result)
			} else {
				m.say("%s; opened %s", result, address)
			}
			return nil
		}, nil
	})
}

// accept asks about findings. The user accepts only those that are on the screen.
func (m *model) accept(findings []review.Finding) {
	shown := findings[:min(len(findings), max(1, m.height-m.headerHeight()-3))]
	q := &question{prompt: fmt.Sprintf("land despite %s? [y/N] ", count(len(shown), "finding")), yesNo: true}
	if len(shown) < len(findings) {
		q.prompt = fmt.Sprintf("land despite these %d of %s? [y/N] ", len(shown), count(len(findings), "finding"))
	}
	for _, f := range shown {
		q.about = append(q.about, fmt.Sprintf("%s: %s", placeOf(review.Target{Path: f.Path, Line: f.Line}), f.What))
	}
	q.do = func(m *model, _ string) tea.Cmd {
		m.request.Accept = append(m.request.Accept, shown...)
		return m.landNow()
	}
	m.ask = q
}

// mergeTool opens a conflict in the user's merge tool, and lands after the last one: that of the
// selected file, or the first.
func (m *model) mergeTool() tea.Cmd {
	if len(m.conflicts) == 0 {
		m.say("no file conflicts")
		return nil
	}
	index := 0
	if s, ok := m.selected(); ok {
		index = max(0, slices.IndexFunc(m.conflicts, func(c review.Conflict) bool { return c.Attempt == m.attempt && c.Path == s.path() }))
	}
	c := m.conflicts[index]
	if c.Why != "" {
		m.complain(fmt.Errorf("%s: %s", c.Path, c.Why))
		return nil
	}
	run := &merge{ctx: m.ctx, work: m.work, conflict: c}
	return m.exec(run, func(err error) tea.Msg {
		return doneMsg{err, func(m *model) tea.Cmd {
			m.conflicts = slices.DeleteFunc(m.conflicts, func(other review.Conflict) bool { return other == c })
			m.request.Resolutions = append(m.request.Resolutions, run.result)
			if len(m.conflicts) > 0 {
				m.say("%s left; press m for the next", count(len(m.conflicts), "conflict"))
				return nil
			}
			return m.landNow()
		}}
	})
}

// merge is a run of the merge tool on the user's terminal.
type merge struct {
	ctx      context.Context
	work     work
	conflict review.Conflict
	term     review.Terminal
	result   review.Resolution
}

func (r *merge) SetStdin(in io.Reader)   { r.term.In = in }
func (r *merge) SetStdout(out io.Writer) { r.term.Out = out }
func (r *merge) SetStderr(err io.Writer) { r.term.Err = err }

// Run opens the tool.
func (r *merge) Run() (err error) {
	r.result, err = r.work.MergeTool(r.ctx, r.conflict, r.term)
	return err
}
