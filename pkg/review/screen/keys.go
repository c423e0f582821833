package screen

import (
	"slices"
	"strings"

	tea "charm.land/bubbletea/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

// binding is a key and what it does.
type binding struct {
	keys  []string
	label string // of the keys in the help
	about string // "" for keys that the help has in another line
	waits bool   // for a job: it changes marks, or begins another job
	do    func(*model) tea.Cmd
}

// far is further than any list is long.
const far = 1 << 30

var bindings = []binding{
	{keys: []string{"up", "k"}, do: moveBy(-1)},
	{keys: []string{"down", "j"}, label: "↑ ↓ PgUp PgDn Home End", about: "move", do: moveBy(1)},
	{keys: []string{"pgup", "ctrl+b"}, do: func(m *model) tea.Cmd { return m.move(-m.body()) }},
	{keys: []string{"pgdown", "ctrl+f"}, do: func(m *model) tea.Cmd { return m.move(m.body()) }},
	{keys: []string{"home", "g"}, do: moveBy(-far)},
	{keys: []string{"end", "G"}, do: moveBy(far)},
	{keys: []string{"left", "h"}, do: func(m *model) tea.Cmd { return m.scrollLine(-8) }},
	{keys: []string{"right", "l"}, label: "← →", about: "scroll long lines", do: func(m *model) tea.Cmd { return m.scrollLine(8) }},
	{keys: []string{"tab", "enter"}, label: "Tab Enter", about: "go to the files, or to the changes", do: (*model).otherPane},
	{keys: []string{"]"}, do: func(m *model) tea.Cmd { return m.hunk(1) }},
	{keys: []string{"["}, label: "[ ]", about: "go to the previous or next hunk", do: func(m *model) tea.Cmd { return m.hunk(-1) }},
	{keys: []string{"/"}, label: "/", about: "find a file or a line", do: (*model).find},
	{keys: []string{"t"}, label: "t", about: "go to the next attempt", do: (*model).nextAttempt},
	{keys: []string{"s"}, label: "s", about: "show both versions side by side", do: (*model).sideBySide},
	{keys: []string{"space"}, label: "Space", about: "choose the file, the hunk or the line", waits: true, do: (*model).choose},
	{keys: []string{"v"}, label: "v", about: "choose lines instead of hunks", do: (*model).chooseLines},
	{keys: []string{"a"}, label: "a", about: "choose the whole file", waits: true, do: (*model).chooseFile},
	{keys: []string{"A"}, label: "A", about: "choose all files", waits: true, do: (*model).chooseAll},
	{keys: []string{"n"}, label: "n", about: "write a note on the line for the agent", do: (*model).writeNote},
	{keys: []string{"N"}, label: "N", about: "remove the last note on the line", waits: true, do: (*model).removeNote},
	{keys: []string{"S"}, label: "S", about: "send the notes to the agent as its next prompt", waits: true, do: (*model).send},
	{keys: []string{"L"}, label: "L", about: "land what is chosen on a branch", waits: true, do: func(m *model) tea.Cmd { return m.land(false) }},
	{keys: []string{"P"}, label: "P", about: "land it, and open a pull request", waits: true, do: func(m *model) tea.Cmd { return m.land(true) }},
	{keys: []string{"m"}, label: "m", about: "resolve a conflict in your merge tool", waits: true, do: (*model).mergeTool},
	{keys: []string{"r"}, label: "r", about: "fetch the agent's latest commits", waits: true, do: (*model).refresh},
	{keys: []string{"q"}, label: "q", about: "quit; choices and notes are saved", do: (*model).end},
}

// key acts on a key.
func (m *model) key(msg tea.KeyPressMsg) tea.Cmd {
	k := msg.String()
	switch {
	case m.ask != nil:
		return m.answer(msg)
	case k == "ctrl+c" && m.busy == nil:
		return tea.Quit
	case m.help:
		m.help = false
		return nil
	case k == "?":
		m.help = true
		return nil
	case k == "esc" || k == "ctrl+c":
		if m.busy != nil {
			m.busy.cancel()
		}
		m.message = ""
		return nil
	}
	for _, b := range bindings {
		if slices.Contains(b.keys, k) && (!b.waits || m.busy == nil) {
			m.message = ""
			return b.do(m)
		}
	}
	return nil
}

// end ends the review, after what runs now.
func (m *model) end() tea.Cmd {
	if m.busy == nil {
		return tea.Quit
	}
	m.quit = true
	return nil
}

func moveBy(by int) func(*model) tea.Cmd { return func(m *model) tea.Cmd { return m.move(by) } }

func (m *model) move(by int) tea.Cmd {
	if m.pane == diffPane {
		m.diff.at += by
		m.diff.clamp(len(m.rows()))
		return nil
	}
	m.files.at += by
	return m.load()
}

func (m *model) scrollLine(by int) tea.Cmd {
	m.from = max(0, min(maxLine, m.from+by))
	return nil
}

func (m *model) otherPane() tea.Cmd {
	m.pane = 1 - m.pane
	return nil
}

// hunk moves to the previous or next hunk.
func (m *model) hunk(by int) tea.Cmd {
	rows := m.rows()
	for i := m.diff.at + by; i >= 0 && i < len(rows); i += by {
		if rows[i].heading() && rows[i].hunk >= 0 {
			m.diff.at, m.pane = i, diffPane
			break
		}
	}
	return nil
}

// sideBySide changes how the difference is drawn, and stays at the same line.
func (m *model) sideBySide() tea.Cmd {
	was := m.rowAt()
	m.split = !m.split
	m.diff.at = max(0, slices.IndexFunc(m.rows(), func(r row) bool { return sameLine(r, was) }))
	return nil
}

func sameLine(a, b row) bool {
	if a.heading() || b.heading() {
		return a.heading() && b.heading() && a.hunk == b.hunk && a.text == b.text
	}
	return a.old != nil && a.old == b.old || a.new != nil && a.new == b.new
}

// rowAt returns the row of the cursor.
func (m *model) rowAt() row {
	rows := m.rows()
	if len(rows) == 0 {
		return row{hunk: -1}
	}
	m.diff.clamp(len(rows))
	return rows[m.diff.at]
}

// nextAttempt goes to the next attempt, and there to the same file.
func (m *model) nextAttempt() tea.Cmd {
	all := m.work.Attempts()
	if len(all) == 1 {
		m.say("there is only one attempt")
		return nil
	}
	path := ""
	if s, ok := m.selected(); ok {
		path = s.path()
	}
	m.attempt = (m.attempt + 1) % len(all)
	m.files = scroll{at: max(0, slices.IndexFunc(m.current().Files(), func(f review.File) bool { return f.Path == path }))}
	return m.load()
}

func (m *model) chooseLines() tea.Cmd {
	m.lines = !m.lines
	if m.lines {
		m.say("Space chooses lines")
	} else {
		m.say("Space chooses hunks")
	}
	return nil
}

// covered returns the keys that Space chooses in the pane with the difference.
func (m *model) covered() []review.Key {
	r := m.rowAt()
	if !m.lines && r.hunk >= 0 {
		return m.patch.Hunks[r.hunk].Keys()
	}
	return r.keys
}

func (m *model) choose() tea.Cmd {
	s, ok := m.selected()
	switch {
	case !ok:
		m.say("this file has landed")
		return nil
	case m.pane == filesPane:
		return m.chooseFile()
	case m.patch == nil || s != m.patchOf:
		m.say("still loading the changes")
		return nil
	case m.patch.Whole != "":
		return m.chooseFile()
	}
	keys := m.covered()
	if len(keys) == 0 {
		m.say("no change on this line")
		return nil
	}
	if len(keys) == len(m.patch.Keys()) { // faster, if the file has very many lines
		return m.chooseFile()
	}
	on := slices.ContainsFunc(keys, func(k review.Key) bool { return !s.attempt.Chosen(s.file, k) })
	if !m.marked(s.attempt.Choose(m.ctx, s.file, on, keys...)) || !m.lines {
		return nil
	}
	return m.move(1)
}

// marked takes note of changed marks, and shows why they could not be changed.
func (m *model) marked(err error) bool {
	m.recount()
	if err != nil {
		m.complain(err)
	}
	return err == nil
}

func (m *model) chooseFile() tea.Cmd {
	s, ok := m.selected()
	if !ok {
		m.say("this file has landed")
		return nil
	}
	if m.marked(s.attempt.ChooseFile(s.file, s.attempt.Mark(s.file) != review.All)) && m.pane == filesPane {
		return m.move(1)
	}
	return nil
}

func (m *model) chooseAll() tea.Cmd {
	a := m.current()
	on := false
	for i := range a.Files() {
		on = on || a.Mark(i) != review.All
	}
	m.marked(a.ChooseAll(on))
	return nil
}

// find moves to the next file or line with a text.
func (m *model) find() tea.Cmd {
	files := m.pane == filesPane
	prompt := "find: "
	if m.found != "" {
		prompt = "find (Enter for " + m.found + "): "
	}
	m.ask = &question{prompt: prompt, empty: true, do: func(m *model, text string) tea.Cmd {
		if text != "" {
			m.found = text
		}
		if m.found == "" {
			return nil
		}
		if files {
			return m.findFile()
		}
		m.findRow()
		return nil
	}}
	return nil
}

func (m *model) findFile() tea.Cmd {
	all := m.current().Files()
	if i := findFrom(m.files.at, len(all), m.found, func(i int) string { return all[i].Path }); i >= 0 {
		m.files.at = i
		return m.load()
	}
	m.say("not found: %s", m.found)
	return nil
}

func (m *model) findRow() {
	rows := m.rows()
	if i := findFrom(m.diff.at, len(rows), m.found, func(i int) string { return rows[i].content() }); i >= 0 {
		m.diff.at = i
		return
	}
	m.say("not found: %s", m.found)
}

// findFrom returns the first index after at, and from the beginning again, whose text has what is
// searched for in capital or small letters; -1 for none.
func findFrom(at, length int, what string, text func(int) string) int {
	what = strings.ToLower(what)
	for n := range length {
		if i := (at + 1 + n) % length; strings.Contains(strings.ToLower(text(i)), what) {
			return i
		}
	}
	return -1
}
