package screen

import (
	"fmt"
	"strconv"
	"strings"

	"charm.land/lipgloss/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

// maxRows limits the rows of a file that are drawn.
const maxRows = 100_000

// row is a line of the pane with the difference.
type row struct {
	hunk int          // index of its hunk, -1 for a row about the file
	keys []review.Key // what choosing the row chooses
	text string       // of a row that is not about lines
	old  *side        // what the agent removed, or an unchanged line
	new  *side        // what the agent added, or an unchanged line
}

// heading reports whether the row is about a hunk, or about the file.
func (r row) heading() bool { return r.old == nil && r.new == nil }

// number returns the number of the row's line.
func (r row) number() int {
	switch {
	case r.new != nil:
		return r.new.line.New
	case r.old != nil:
		return r.old.line.Old
	}
	return 0
}

// content returns the text of a row.
func (r row) content() string {
	text := r.text
	for _, s := range []*side{r.old, r.new} {
		if s != nil {
			text += "\n" + clean(s.line.Text)
		}
	}
	return text
}

// side is one version of a line.
type side struct {
	line  *review.Line
	spans []span
}

// view is how the difference of a file is drawn.
type view struct {
	unified []row
	split   []row
	digits  int // of the largest line number
}

func (v view) rows(split bool) []row {
	if split {
		return v.split
	}
	return v.unified
}

// The words that changed are also visible without colours.
var changedWord = map[byte]lipgloss.Style{
	'-': lipgloss.NewStyle().Background(lipgloss.Red).Foreground(lipgloss.BrightWhite).Underline(true),
	'+': lipgloss.NewStyle().Background(lipgloss.Green).Foreground(lipgloss.Black).Underline(true),
}

var changedLine = map[byte]lipgloss.Style{'-': problem, '+': good, ' ': normal}

// newView prepares a patch for drawing. It takes a moment. Without a colourer the rows are the
// same, in fewer colours.
func newView(p *review.Patch, c *colourer) view {
	v := view{digits: 1}
	add := func(r row) { v.unified, v.split = append(v.unified, r), append(v.split, r) }
	if about := metaText(p.File); about != "" {
		r := row{hunk: -1, text: about}
		if p.Meta != "" {
			r.keys = []review.Key{p.Meta}
		}
		add(r)
	}
	if p.Whole != "" {
		add(row{hunk: -1, text: p.Whole + "; choose the whole file"})
	}
	words := &comparer{}
	for i, h := range p.Hunks {
		if len(v.unified) > maxRows {
			add(row{hunk: -1, text: fmt.Sprintf("%s more not shown; the file can be chosen as a whole", count(len(p.Hunks)-i, "hunk"))})
			break
		}
		add(row{hunk: i, keys: h.Keys(), text: fmt.Sprintf("@@ -%d,%d +%d,%d @@", h.OldStart, h.OldLines, h.NewStart, h.NewLines)})
		shown := h.Lines[:min(len(h.Lines), maxRows)]
		v.hunk(i, shown, paint(shown, words, c))
		if len(shown) < len(h.Lines) {
			add(row{hunk: -1, text: fmt.Sprintf("%s more not shown; they are chosen with the hunk", count(len(h.Lines)-len(shown), "line"))})
		}
		v.digits = max(v.digits, len(strconv.Itoa(max(h.OldStart+h.OldLines, h.NewStart+h.NewLines))))
	}
	return v
}

func metaText(f review.File) string {
	var about []string
	if f.OldPath != "" {
		about = append(about, "renamed from "+f.OldPath)
	}
	switch {
	case f.OldMode == "" && f.NewMode != "":
		about = append(about, "new file, mode "+f.NewMode)
	case f.NewMode == "" && f.OldMode != "":
		about = append(about, "removed file, mode "+f.OldMode)
	case f.OldMode != f.NewMode:
		about = append(about, "mode "+f.OldMode+" became "+f.NewMode)
	}
	return strings.Join(about, ", ")
}

// hunk adds the rows of one hunk.
func (v *view) hunk(index int, lines []review.Line, sides []*side) {
	for i := range lines {
		r := row{hunk: index}
		if lines[i].Key != "" {
			r.keys = []review.Key{lines[i].Key}
		}
		if lines[i].Kind != '+' {
			r.old = sides[i]
		}
		if lines[i].Kind != '-' {
			r.new = sides[i]
		}
		v.unified = append(v.unified, r)
	}
	eachBlock(lines, func(same int, removed, added []int) {
		if same >= 0 {
			v.split = append(v.split, row{hunk: index, old: sides[same], new: sides[same]})
			return
		}
		for n := range max(len(removed), len(added)) {
			r := row{hunk: index}
			if n < len(removed) {
				r.old, r.keys = sides[removed[n]], append(r.keys, lines[removed[n]].Key)
			}
			if n < len(added) {
				r.new, r.keys = sides[added[n]], append(r.keys, lines[added[n]].Key)
			}
			v.split = append(v.split, r)
		}
	})
}

// eachBlock calls f for each unchanged line, and for each block of removed and added lines. same is
// -1 for a block.
func eachBlock(lines []review.Line, f func(same int, removed, added []int)) {
	var removed, added []int
	flush := func() {
		if len(removed)+len(added) > 0 {
			f(-1, removed, added)
		}
		removed, added = nil, nil
	}
	for i, l := range lines {
		switch l.Kind {
		case '-':
			if len(added) > 0 {
				flush()
			}
			removed = append(removed, i)
		case '+':
			added = append(added, i)
		default:
			flush()
			f(i, nil, nil)
		}
	}
	flush()
}

// paint returns the sides of a hunk's lines, in the colours of their syntax, and with the words
// that changed.
func paint(lines []review.Line, words *comparer, c *colourer) []*side {
	text := make([]string, len(lines))
	for i := range lines {
		text[i] = clean(lines[i].Text)
	}
	colours := colourVersions(lines, text, c)
	pieces := make([][]piece, len(lines))
	eachBlock(lines, func(_ int, removed, added []int) {
		for n := range min(len(removed), len(added)) {
			r, a := removed[n], added[n]
			pieces[r], pieces[a] = words.compare(text[r], text[a])
		}
	})
	sides := make([]*side, len(lines))
	for i := range lines {
		sides[i] = &side{line: &lines[i]}
		if pieces[i] == nil {
			pieces[i] = []piece{{text[i], false}}
		}
		at, kind := 0, lines[i].Kind
		for _, p := range pieces[i] {
			switch {
			case p.changed:
				sides[i].spans = append(sides[i].spans, span{p.text, changedWord[kind]})
			case colours[i] == nil:
				sides[i].spans = append(sides[i].spans, span{p.text, changedLine[kind]})
			default:
				sides[i].spans = append(sides[i].spans, styled(p.text, colours[i][at:], changedLine[kind])...)
			}
			at += len(p.text)
		}
		if lines[i].NoEnd {
			sides[i].spans = append(sides[i].spans, span{" (no newline at the end)", faint})
		}
	}
	return sides
}

// colourVersions colours the old and the new version of a hunk, each as a whole: a comment may have
// several lines.
func colourVersions(lines []review.Line, text []string, c *colourer) [][]colour {
	all := make([][]colour, len(lines))
	for _, other := range []byte{'+', '-'} {
		var version []string
		var index []int
		for i := range lines {
			if lines[i].Kind != other {
				version, index = append(version, text[i]), append(index, i)
			}
		}
		for n, colours := range c.colours(version) {
			all[index[n]] = colours
		}
	}
	return all
}

// styled splits a text where its colour changes. Text without a colour has the style of the line.
func styled(text string, colours []colour, line lipgloss.Style) []span {
	var all []span
	start := 0
	for i := 1; i <= len(text); i++ {
		if i < len(text) && colours[i] == colours[start] {
			continue
		}
		style, ok := palette[colours[start]]
		if !ok {
			style = line
		}
		all, start = append(all, span{text[start:i], style}), i
	}
	return all
}
