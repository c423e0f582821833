package screen

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Limits of what is drawn of one line. The text comes from an agent.
const (
	maxLine   = 4 << 10 // bytes of a line that are drawn
	maxJoined = 4       // characters that become one with a character
	tabWidth  = 4
)

// span is a piece of a line with one style.
type span struct {
	text  string
	style lipgloss.Style
}

// clean returns the start of a line as printable text: tabs become spaces, and what a terminal
// would obey, or not show, becomes a visible sign. Unlike termtext.Line it leaves out nothing: a
// user who reviews a change must see that an invisible character is in it.
func clean(line string) string {
	line = termtext.Brief(line, maxLine)
	var b strings.Builder
	column, joined := 0, 0
	for i := 0; i < len(line); {
		r, size := utf8.DecodeRuneInString(line[i:])
		i += size
		switch {
		case r >= ' ' && r < 0x7f: // the usual one, faster
			joined = 0
			b.WriteRune(r)
			column++
			continue
		case r == '\t':
			n := tabWidth - column%tabWidth
			b.WriteString(strings.Repeat(" ", n))
			column, joined = column+n, 0
			continue
		case unicode.In(r, invisible...):
			r = '�'
		case r == '\r':
			r = '␍'
		case r < ' ':
			r = '␀' + r
		case r == 0x7f:
			r = '␡'
		case unicode.In(r, joining...):
			if b.Len() == 0 {
				b.WriteRune('◌') // what it would become one with is not part of the line
				column++
			}
			if joined++; joined > maxJoined {
				continue
			}
			if joined == maxJoined {
				r = '�' // for all that follow
			}
			b.WriteRune(r)
			column += width(r)
			continue
		}
		joined = 0
		b.WriteRune(r) // an invalid byte is '�' here
		column += width(r)
	}
	return b.String()
}

// width returns the columns of a character as wcwidth counts them, with which terminals and the
// renderer begin.
func width(r rune) int { return ansi.StringWidthWc(string(r)) }

// joining has the characters that become one with those before them: combining characters, and the
// letters of Hangul syllables.
var joining = []*unicode.RangeTable{
	unicode.Mn, unicode.Me, unicode.Mc,
	{R16: []unicode.Range16{{Lo: 0x1100, Hi: 0x11ff, Stride: 1}, {Lo: 0xa960, Hi: 0xa97f, Stride: 1}, {Lo: 0xd7b0, Hi: 0xd7ff, Stride: 1}}},
}

// invisible has the characters that a terminal does not show, or that change the order or the width
// of others.
var invisible = []*unicode.RangeTable{
	{R16: []unicode.Range16{{Lo: 0x80, Hi: 0x9f, Stride: 1}, {Lo: 0x2800, Hi: 0x2800, Stride: 1}}}, // C1 characters, and a blank of Braille
	unicode.Cf, unicode.Co, unicode.Zl, unicode.Zp,
	unicode.Variation_Selector, unicode.Other_Default_Ignorable_Code_Point,
}

// columnsOf returns the width of clean texts, or more than most if it is larger than that. It does
// not look at what follows then.
func columnsOf(most int, spans ...span) (n int) {
	for _, s := range spans {
		for _, r := range s.text {
			if n += width(r); n > most {
				return n
			}
		}
	}
	return n
}

// fit draws spans in exactly columns, beginning at the column from. What is too long ends with an
// ellipsis. It looks at no more than it draws.
func fit(spans []span, from, columns int, fill lipgloss.Style) string {
	if columns <= 0 {
		return ""
	}
	end, last := columns, ""
	if columnsOf(from+columns, spans...) > from+columns {
		end, last = columns-1, "…"
	}
	var b strings.Builder
	at := -from
	for _, s := range spans {
		part, next := visible(s.text, at, end)
		if part != "" {
			b.WriteString(s.style.Render(part))
		}
		if at = next; at > end {
			break
		}
	}
	used := max(0, min(at, end))
	if at > end { // a wide character that did not fit is part of it
		used = ansi.StringWidthWc(b.String())
	}
	return b.String() + fill.Render(strings.Repeat(" ", end-used)+last)
}

// visible returns the part of a text, which begins at the column at, between the columns 0 and end;
// and the column where the text ends, or one after end if it is cut off.
func visible(text string, at, end int) (part string, next int) {
	var b strings.Builder
	for _, r := range text {
		w := width(r)
		switch {
		case at+w > end:
			return b.String(), end + 1
		case at < 0 && at+w > 0: // the second half of a wide character
			b.WriteByte(' ')
		case at > 0 || at == 0 && w > 0:
			b.WriteRune(r)
		}
		at += w
	}
	return b.String(), at
}

// plain draws one text in exactly columns, whatever it contains.
func plain(text string, columns int, style lipgloss.Style) string {
	return fit([]span{{clean(text), style}}, 0, columns, style)
}

// aside draws a text on the left, and one on the right if both fit.
func aside(left, right string, columns int, style lipgloss.Style) string {
	right = clean(right)
	if w := columnsOf(columns, span{text: right}); right != "" && columns-w > 12 {
		return plain(left, columns-w-1, style) + style.Render(" "+right)
	}
	return plain(left, columns, style)
}

// shorten leaves out the beginning of a path that does not fit.
func shorten(p string, columns int) string {
	p = clean(p)
	w := columnsOf(maxLine, span{text: p})
	if w <= columns || columns < 4 {
		return p
	}
	part, _ := visible(p, columns-1-w, columns)
	return "…" + part
}
