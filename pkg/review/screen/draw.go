package screen

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	tea "charm.land/bubbletea/v2"
	"charm.land/lipgloss/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

// The styles use the terminal's own 16 colours. Nothing is visible by its colour alone.
var (
	normal  = lipgloss.NewStyle()
	faint   = normal.Foreground(lipgloss.BrightBlack)
	strong  = normal.Bold(true)
	cursor  = normal.Reverse(true)
	good    = normal.Foreground(lipgloss.Green)
	problem = normal.Foreground(lipgloss.Red)
	heading = normal.Foreground(lipgloss.Cyan)
)

const (
	narrow      = 60 // width below which only one pane is visible
	maxAttempts = 4  // whose results are visible at the same time
)

// View returns the screen.
func (m *model) View() tea.View {
	v := tea.NewView(m.draw())
	v.AltScreen = true
	v.WindowTitle = "review"
	return v
}

// draw returns the lines of the screen.
func (m *model) draw() string {
	if m.help {
		return m.drawHelp()
	}
	lines := m.drawHeader()
	height := m.body()
	switch left := m.listWidth(); {
	case m.width >= narrow:
		list, diff := m.drawFiles(left, height), m.drawDiff(m.width-left-1, height)
		for i := range height {
			lines = append(lines, list[i]+faint.Render("│")+diff[i])
		}
	case m.pane == filesPane:
		lines = append(lines, m.drawFiles(m.width, height)...)
	default:
		lines = append(lines, m.drawDiff(m.width, height)...)
	}
	lines = append(lines, m.drawBelow()...)
	return strings.Join(lines[max(0, len(lines)-m.height):], "\n") // the last line has a question
}

func (m *model) listWidth() int { return max(20, min(48, m.width/3)) }

// headerHeight returns the number of lines above the panes.
func (m *model) headerHeight() int { return 1 + min(maxAttempts, len(m.work.Attempts())) }

// body returns the number of rows of the panes.
func (m *model) body() int {
	below := 2
	if m.ask != nil {
		below += len(m.ask.about)
	}
	return max(1, m.height-m.headerHeight()-below)
}

// drawHeader draws the title, and the results of the attempts.
func (m *model) drawHeader() []string {
	all := m.work.Attempts()
	lines := []string{plain(m.title(), m.width, strong)}
	first := max(0, min(m.attempt-maxAttempts/2, len(all)-maxAttempts))
	for i := first; i < min(len(all), first+maxAttempts); i++ {
		style, text := faint, results(all[i])
		if len(all) > 1 {
			sign := "  "
			if i == m.attempt {
				sign, style = "▸ ", normal
			}
			text = fmt.Sprintf("%s%d %s (%d chosen)   %s", sign, i+1, all[i].Source().Title, m.counts[i], text)
		}
		lines = append(lines, plain(text, m.width, style))
	}
	return lines
}

func (m *model) title() string {
	a := m.current()
	branch, _ := m.work.Branch()
	text := a.Source().Title + " → " + branch + "   " + count(len(a.Files()), "file")
	if n := m.counts[m.attempt]; n > 0 {
		text += ", " + strconv.Itoa(n) + " chosen"
	}
	if n := len(a.Landed()); n > 0 {
		text += ", " + strconv.Itoa(n) + " landed"
	}
	return text
}

// results returns the recorded results of an attempt.
func results(a attempt) string {
	var all []string
	for _, r := range a.Source().Results {
		text := "✓ " + r.Name
		if !r.OK() {
			text = fmt.Sprintf("✗ %s (exit %d)", r.Name, r.ExitCode)
		}
		if r.Commit != "" && r.Commit != a.Head() {
			text += fmt.Sprintf(" on %.8s", r.Commit)
		}
		if r.Uncommitted {
			text += " with uncommitted changes"
		}
		all = append(all, text)
	}
	if len(all) == 0 {
		return "no test results (exec --record=NAME)"
	}
	return strings.Join(all, "   ")
}

var markSigns = map[review.Mark]string{review.None: "○", review.Part: "◐", review.All: "●"}

// drawFiles draws the visible part of the list: files that can be chosen, and then those that have
// landed.
func (m *model) drawFiles(width, height int) []string {
	a := m.current()
	files, landed := a.Files(), a.Landed()
	m.files.show(len(files)+len(landed), height)
	var lines []string
	for i := m.files.top; i < min(len(files)+len(landed), m.files.top+height); i++ {
		var sign, path, kind string
		style := normal
		if i < len(files) {
			sign, path, kind = markSigns[a.Mark(i)]+" "+string(rune(files[i].Status)), files[i].Path, m.kind(selection{a, i})
		} else {
			style, sign, path = faint, "✓  ", landed[i-len(files)]
		}
		if i == m.files.at {
			style = strong
			if m.pane == filesPane {
				style = cursor
			}
		}
		room := width - 4 // the mark and the status
		if kind != "" {
			room -= len(kind) + 1
		}
		lines = append(lines, aside(sign+" "+shorten(path, max(8, room)), kind, width, style))
	}
	if len(files)+len(landed) == 0 {
		lines = append(lines, plain("no committed changes", width, faint))
	}
	return padded(lines, width, height)
}

// kind returns what is special about a file, or how many lines changed, once that is known.
func (m *model) kind(s selection) string {
	f := s.attempt.Files()[s.file]
	known := m.known[s]
	switch {
	case slices.ContainsFunc(m.conflicts, func(c review.Conflict) bool { return c.Path == f.Path && c.Attempt == m.attempt }):
		return "conflict"
	case f.NewMode == repo.ModeSubmodule || f.OldMode == repo.ModeSubmodule:
		return "submodule"
	case f.NewMode == repo.ModeLink || f.OldMode == repo.ModeLink:
		return "link"
	case known != nil && known.Whole == "binary file":
		return "binary"
	case known != nil && known.Whole != "":
		return "whole"
	case known != nil && known.Added+known.Removed > 0:
		return fmt.Sprintf("+%d -%d", known.Added, known.Removed)
	case f.ModeChanged():
		return "mode"
	}
	return ""
}

// padded returns exactly height lines.
func padded(lines []string, width, height int) []string {
	for len(lines) < height {
		lines = append(lines, strings.Repeat(" ", width))
	}
	return lines
}

// drawDiff draws the visible part of the difference.
func (m *model) drawDiff(width, height int) []string {
	switch {
	case m.patchErr != nil:
		return padded([]string{plain(m.patchErr.Error(), width, problem)}, width, height)
	case m.patchOf.attempt == nil:
		return padded(nil, width, height)
	case m.patch == nil:
		return padded([]string{plain("loading …", width, faint)}, width, height)
	}
	rows := m.rows()
	m.diff.show(len(rows), height)
	notes := m.unsent()
	var lines []string
	for i := m.diff.top; i < min(len(rows), m.diff.top+height); i++ {
		lines = append(lines, m.drawRow(rows[i], width, i == m.diff.at, notes))
	}
	return padded(lines, width, height)
}

// drawRow draws one row: its mark, line numbers and text. A bar marks what Space would choose.
func (m *model) drawRow(r row, width int, at bool, notes map[place]bool) string {
	style, bar := good, " "
	if m.pane == diffPane {
		if at {
			style = cursor
		}
		if here := m.rowAt(); at || !m.lines && r.hunk >= 0 && r.hunk == here.hunk && len(r.keys) > 0 {
			bar = "▎"
		}
	}
	gutter := style.Render(m.sign(r, notes) + bar)
	width -= 2
	switch {
	case r.heading():
		return gutter + plain(r.text, width, heading)
	case m.split:
		left := (width - 1) / 2
		return gutter + m.drawSide(r.old, left, true) + faint.Render("│") + m.drawSide(r.new, width-left-1, false)
	case r.new != nil:
		return gutter + m.drawSide(r.new, width, false)
	}
	return gutter + m.drawSide(r.old, width, true)
}

// place is a line of one version of the shown file.
type place struct {
	line    int
	removed bool
}

// unsent returns the lines of the shown file with notes that wait to be sent.
func (m *model) unsent() map[place]bool {
	all := map[place]bool{}
	for _, n := range m.patchOf.attempt.Notes() {
		if n.Path == m.patch.Path && n.Line > 0 && n.Sent.IsZero() {
			all[place{n.Line, n.Removed}] = true
		}
	}
	return all
}

// sign returns the mark of a row. A line with a note has a sign for that instead.
func (m *model) sign(r row, notes map[place]bool) string {
	if r.new != nil && notes[place{r.new.line.New, false}] || r.old != nil && notes[place{r.old.line.Old, true}] {
		return "✎"
	}
	if !r.heading() || r.hunk < 0 {
		return m.markOf(r.keys)
	}
	s, ok := m.signs[r.hunk]
	if !ok { // a hunk may have very many lines
		s = m.markOf(r.keys)
		m.signs[r.hunk] = s
	}
	return s
}

// markOf returns how much is chosen of some changes of the patch.
func (m *model) markOf(keys []review.Key) string {
	if len(keys) == 0 {
		return " "
	}
	on := 0
	for _, k := range keys {
		if m.patchOf.attempt.Chosen(m.patchOf.file, k) {
			on++
		}
	}
	switch on {
	case 0:
		return markSigns[review.None]
	case len(keys):
		return markSigns[review.All]
	}
	return markSigns[review.Part]
}

// drawSide draws one version of a line.
func (m *model) drawSide(s *side, width int, old bool) string {
	if s == nil {
		return strings.Repeat(" ", max(0, width))
	}
	number := s.line.New
	if old {
		number = s.line.Old
	}
	sign, style := " ", faint
	if s.line.Kind != ' ' {
		sign, style = string(rune(s.line.Kind)), changedLine[s.line.Kind]
	}
	gutter := fmt.Sprintf("%*d ", m.view.digits, number)
	if width < 3*len(gutter) {
		gutter = ""
	}
	return faint.Render(gutter) + style.Render(sign) + fit(s.spans, m.from, max(0, width-len(gutter)-1), normal)
}

// drawBelow draws what the cursor is on, and messages or the question.
func (m *model) drawBelow() []string {
	if q := m.ask; q != nil {
		lines := []string{plain(m.message, m.width, normal)}
		for _, l := range q.about {
			lines = append(lines, plain(l, m.width, heading))
		}
		return append(lines, plain(shorten(q.prompt+q.text+"█", m.width), m.width, strong))
	}
	style, text := normal, m.message
	if m.problem {
		style = problem
	}
	if text == "" {
		text = "? help   Space choose   L land   n note   q quit"
	}
	if m.busy != nil {
		style, text = strong, fmt.Sprintf("busy: %s, %d s; Esc cancels", m.busy.what, m.busy.seconds)
		if m.quit {
			text += "; then quits"
		}
		if m.message != "" {
			text += "   " + m.message
		}
	}
	return []string{plain(m.here(), m.width, faint), plain(text, m.width, style)}
}

// here returns the path of the selected file, and the notes on the row of the cursor.
func (m *model) here() string {
	t, ok := m.target()
	if !ok {
		return ""
	}
	all := []string{t.Path}
	for _, n := range m.current().Notes() {
		if n.Path != t.Path || m.pane == diffPane && !about(n, t) {
			continue
		}
		text := "✎ " + n.Text
		if !n.Sent.IsZero() {
			text += " (sent)"
		}
		all = append(all, text)
	}
	return strings.Join(all, "   ")
}

func (m *model) drawHelp() string {
	var lines []string
	for _, b := range bindings {
		if b.about != "" {
			lines = append(lines, plain(fmt.Sprintf("  %-23s %s", b.label, b.about), m.width, normal))
		}
	}
	lines = append(lines, plain("  ○ not chosen   ◐ partly   ● chosen   ✓ landed   ✎ note   Esc, Ctrl-C cancel", m.width, faint))
	return strings.Join(lines[:min(len(lines), m.height)], "\n")
}

// count returns a number with the singular or plural of a noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
