package screen

import (
	"context"
	"fmt"
	"slices"

	tea "charm.land/bubbletea/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// target returns what a note on the cursor's row is about.
func (m *model) target() (t review.Target, ok bool) {
	s, ok := m.selected()
	if !ok {
		return t, false
	}
	t.Path = s.path()
	if m.pane == filesPane || s != m.patchOf {
		return t, true
	}
	switch r := m.rowAt(); {
	case r.new != nil:
		t.Line, t.Quote = r.new.line.New, r.new.line.Text
	case r.old != nil:
		t.Line, t.Quote, t.Removed = r.old.line.Old, r.old.line.Text, true
	}
	t.Quote = termtext.Head(t.Quote, maxLine)
	return t, true
}

// about reports whether a note is about a target.
func about(n review.Note, t review.Target) bool {
	return n.Path == t.Path && n.Line == t.Line && n.Removed == t.Removed
}

// writeNote asks for a note. What it is about does not change while the user types, even if the
// attempt is replaced meanwhile.
func (m *model) writeNote() tea.Cmd {
	t, ok := m.target()
	if !ok {
		m.say("this file has landed")
		return nil
	}
	id := m.current().Source().ID
	m.ask = &question{prompt: "note on " + placeOf(t) + ": ", do: func(m *model, text string) tea.Cmd {
		for _, a := range m.work.Attempts() {
			if a.Source().ID != id {
				continue
			}
			if _, err := a.AddNote(t, text); err != nil {
				m.complain(err)
				return nil
			}
			m.say("note saved; S sends your notes to %s", a.Source().Title)
		}
		return nil
	}}
	return nil
}

func placeOf(t review.Target) string {
	switch {
	case t.Line == 0:
		return t.Path
	case t.Removed:
		return fmt.Sprintf("%s, removed line %d", t.Path, t.Line)
	}
	return fmt.Sprintf("%s:%d", t.Path, t.Line)
}

// removeNote removes the last note on the cursor's row that was not sent.
func (m *model) removeNote() tea.Cmd {
	t, ok := m.target()
	if !ok {
		return nil
	}
	for _, n := range slices.Backward(m.current().Notes()) {
		if about(n, t) && n.Sent.IsZero() {
			if err := m.current().RemoveNote(n.ID); err != nil {
				m.complain(err)
			}
			return nil
		}
	}
	m.say("no unsent notes on this line")
	return nil
}

// send gives the agent the notes as its next prompt. Notes that are written meanwhile are not part
// of it, and stay unsent.
func (m *model) send() tea.Cmd {
	a := m.current()
	prompt, notes := a.Prompt()
	switch {
	case m.o.Send == nil:
		m.say("notes cannot be sent from here")
		return nil
	case prompt == "":
		m.say("no unsent notes; n writes one")
		return nil
	}
	q := &question{prompt: fmt.Sprintf("send %s to %s? [y/N] ", count(len(notes), "note"), a.Source().Title), yesNo: true}
	for _, n := range notes[:min(len(notes), max(1, m.height-8))] {
		q.about = append(q.about, placeOf(n.Target)+": "+n.Text)
	}
	q.do = func(m *model, _ string) tea.Cmd {
		return m.start("sending the notes", func(ctx context.Context) (func(*model) tea.Cmd, error) {
			if err := m.o.Send(ctx, a.Source(), prompt); err != nil {
				return nil, err
			}
			if err := a.MarkSent(notes); err != nil {
				return nil, fmt.Errorf("the agent has the notes, but they could not be marked as sent: %w", err)
			}
			return func(m *model) tea.Cmd {
				m.say("sent %s to %s", count(len(notes), "note"), a.Source().Title)
				return nil
			}, nil
		})
	}
	m.ask = q
	return nil
}

// refresh fetches the agents' latest commits.
func (m *model) refresh() tea.Cmd {
	return m.start("fetching the latest commits", func(ctx context.Context) (func(*model) tea.Cmd, error) {
		return nil, m.work.Refresh(ctx)
	})
}
