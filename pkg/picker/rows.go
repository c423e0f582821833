package picker

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/charmbracelet/x/ansi"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// state is the displayed state of a session.
type state struct {
	rank        int
	word        string
	mark, ascii string // one cell each
	tone        console.Tone
}

// The states in the order of their rows. Broken sessions come together with failed
// agents, above those that are done: nothing in them continues until the user acts, and
// a user who has just started a session looks near the top.
var (
	blocked = state{0, "blocked", "◆", "!", console.Notice}
	failed  = state{1, "error", "✗", "x", console.Bad}
	broken  = state{1, "broken", "✗", "x", console.Bad}
	done    = state{2, "done", "✓", "+", console.Good}
	working = state{3, "working", "●", "*", console.Plain}
	idle    = state{4, "idle", "○", "o", console.Plain}
	ready   = state{4, "ready", "○", "o", console.Plain}
	stopped = state{6, "stopped", "·", ".", console.Faint}
)

func moving(word string) state { return state{5, word, "◌", "~", console.Plain} }

// waits reports whether the session waits for the user.
func (st state) waits() bool { return st.rank <= done.rank }

// stateOf returns the state of s, and since when it has that state. The desired phase
// takes precedence over the current one, so that a key press shows at once.
func stateOf(s session.View) (state, time.Time) {
	switch {
	case s.Desired == session.Gone || s.State == session.Destroying:
		return moving("destroying"), s.StateChangedAt
	case s.State == session.Broken:
		return broken, s.StateChangedAt
	case s.State == session.Stopped && s.Desired == session.Stopped:
		return stopped, s.StateChangedAt
	case s.Desired == session.Stopped:
		return moving("stopping"), s.StateChangedAt
	case s.State == session.Stopped:
		return moving("starting"), s.StateChangedAt
	case s.State != session.Ready:
		return moving(string(s.State)), s.StateChangedAt
	}
	a := s.Attention
	if a == nil {
		return ready, s.StateChangedAt
	}
	switch a.State {
	case guestproto.AgentBlocked:
		return blocked, a.Since
	case guestproto.AgentError:
		return failed, a.Since
	case guestproto.AgentWorking:
		return working, a.Since
	case guestproto.AgentDone:
		if s.NeedsAttention() {
			return done, a.Since
		}
		return idle, a.Since // the user has seen it
	case guestproto.AgentIdle:
		return idle, a.Since
	}
	return ready, a.Since
}

// waitsFor returns what a session's agent waits for, or what failed.
func waitsFor(s session.View, st state) string {
	switch st {
	case blocked, failed:
		return s.Attention.On
	case broken:
		return s.Message()
	}
	return ""
}

// order sorts sessions that need attention first, and among these the one that has
// waited longest first. The others are grouped by repository, and a repository has the
// place of its most active session. They keep their places whatever they do, because users
// lose track of rows that move.
func order(all []workState) {
	place := map[string]int{} // by repository: the lowest rank of a session that does not wait
	for _, s := range all {
		if st, _ := stateOf(s.View); !st.waits() {
			if least, ok := place[s.RepoKey]; !ok || st.rank < least {
				place[s.RepoKey] = st.rank
			}
		}
	}
	rank := func(s workState) (int, time.Time) {
		if st, since := stateOf(s.View); st.waits() {
			return st.rank, since
		}
		return place[s.RepoKey], time.Time{}
	}
	slices.SortFunc(all, func(a, b workState) int {
		x, since := rank(a)
		y, until := rank(b)
		return cmp.Or(
			x-y, since.Compare(until), strings.Compare(a.RepoName(), b.RepoName()),
			strings.Compare(a.RepoKey, b.RepoKey), strings.Compare(a.Label, b.Label),
			strings.Compare(a.host, b.host), strings.Compare(a.ID, b.ID),
		)
	})
}

// The maximum widths of a row's columns, in cells.
const (
	nameWidth   = 40
	hostWidth   = 16
	stateWidth  = 10
	onWidth     = 48
	branchWidth = 28
	lineWidth   = 24
)

// cell is one column of a row.
type cell struct {
	text string
	tone console.Tone
}

// lines returns the rows in the form that fzf reads: key, tab, displayed text.
func (p *Picker) lines(all []workState, repos []repository, now time.Time) []string {
	var keys []string
	var cells [][]cell
	for _, s := range all {
		keys, cells = append(keys, sessionKey(s.host, s.ID)), append(cells, p.sessionCells(s, now))
	}
	lines := p.columns(keys, cells)
	if len(all) > 0 && len(repos) > 0 {
		rule := "─"
		if !p.Unicode {
			rule = "-"
		}
		lines = append(lines, lineKey+"\t"+p.Console.Paint(console.Faint, strings.Repeat(rule, lineWidth)))
	}
	keys, cells = nil, nil
	for _, r := range repos {
		keys, cells = append(keys, repositoryKey(r.open)), append(cells, p.repositoryCells(r, now))
	}
	return append(lines, p.columns(keys, cells)...)
}

func (p *Picker) sessionCells(s workState, now time.Time) []cell {
	st, since := stateOf(s.View)
	mark, ahead := st.mark, "↑"
	if !p.Unicode {
		mark, ahead = st.ascii, "^"
	}
	row := []cell{
		{mark, st.tone},
		{p.fit(s.DisplayName(), nameWidth), console.Plain},
		{p.fit(s.host, hostWidth), console.Faint},
		{p.fit(st.word, stateWidth), st.tone},
		{age(since, now), console.Faint},
		{p.fit(waitsFor(s.View, st), onWidth), st.tone},
		{p.fit(s.branch, branchWidth), console.Faint},
		{"", console.Notice},
	}
	if s.ahead > 0 {
		row[len(row)-1].text = fmt.Sprintf("%s%d", ahead, s.ahead)
	}
	return row
}

func (p *Picker) repositoryCells(r repository, now time.Time) []cell {
	note := ""
	switch {
	case r.path != "" && r.path == r.open:
		if note = tilde(r.path); note == r.name {
			note = ""
		}
	case !r.used.IsZero():
		note = age(r.used, now) + " ago"
	}
	return []cell{
		{" ", console.Plain}, // below the sessions' marks
		{p.fit(r.name, nameWidth), console.Plain},
		{p.fit(note, onWidth), console.Faint},
	}
}

// columns aligns rows. A column that is empty in all rows takes no space.
func (p *Picker) columns(keys []string, rows [][]cell) []string {
	var widths []int
	for _, row := range rows {
		for i, c := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], ansi.StringWidth(c.text))
		}
	}
	lines := make([]string, len(rows))
	for i, row := range rows {
		var b strings.Builder
		for j, c := range row {
			if widths[j] == 0 {
				continue
			}
			gap := "  "
			if j == 0 {
				gap = " " // the mark belongs to the name
			}
			b.WriteString(p.Console.Paint(c.tone, c.text) + strings.Repeat(" ", widths[j]-ansi.StringWidth(c.text)) + gap)
		}
		lines[i] = keys[i] + "\t" + strings.TrimRight(b.String(), " ")
	}
	return lines
}

// maxText limits how much of a text is used, in bytes.
const maxText = 1024

// fit turns untrusted text into one harmless line of at most width cells.
func (p *Picker) fit(s string, width int) string {
	tail := "…"
	if !p.Unicode {
		tail = "."
	}
	s = ansi.Truncate(termtext.Line(s[:min(len(s), maxText)]), width, tail)
	// Combining marks that pile up on one letter have no width.
	for i, n := 0, 0; i < len(s); n++ {
		if n == 4*width {
			return s[:i]
		}
		_, size := utf8.DecodeRuneInString(s[i:])
		i += size
	}
	return s
}

// age returns how long something has lasted, in minutes of the clock. All ages on the
// screen therefore change at the same time, once a minute, and rows are reloaded no
// more often. A key that is pressed during a reload may be lost.
func age(since, now time.Time) string {
	d := now.Truncate(time.Minute).Sub(since.Truncate(time.Minute))
	switch {
	case d < time.Minute:
		return "<1m"
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
