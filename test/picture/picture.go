// Package picture draws the documentation's SVG files: terminal screens and the chart of the
// benchmarks. The pictures show real output, need no display, and are stored as text in git.
package picture

import (
	"encoding/xml"
	"fmt"
	"strconv"
	"strings"

	"github.com/charmbracelet/x/ansi"
)

// The size of a cell and of the frame around the cells, in pixels.
const (
	cellWidth  = 8.4
	cellHeight = 18
	fontSize   = 14
	margin     = 14
	bar        = 30 // height of the title bar with the three buttons
)

const (
	paper = "#1a1b26"
	ink   = "#c0caf5"
)

// sixteen are the terminal's basic colours: eight normal and eight bright ones.
var sixteen = [16]string{
	"#15161e", "#f7768e", "#9ece6a", "#e0af68", "#7aa2f7", "#bb9af7", "#7dcfff", "#a9b1d6",
	"#565f89", "#f7768e", "#9ece6a", "#e0af68", "#7aa2f7", "#bb9af7", "#7dcfff", "#c0caf5",
}

// style is the text attributes of SGR that are rendered here.
type style struct {
	fg, bg        string // "" means the terminal's default
	bold, reverse bool
	faint, under  bool
}

// SVG renders lines of text with SGR sequences, as printed by tmux's capture-pane -e. It
// ignores other sequences. width is in cells.
func SVG(title, screen string, width int) string {
	lines := strings.Split(strings.TrimRight(screen, "\n"), "\n")
	w := float64(width)*cellWidth + 2*margin
	h := len(lines)*cellHeight + bar + margin
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%d" viewBox="0 0 %.0f %d" role="img" aria-label="%s">`+"\n", w, h, w, h, escape(title))
	fmt.Fprintf(&b, `<rect width="%.0f" height="%d" rx="8" fill="%s"/>`+"\n", w, h, paper)
	for i, c := range []string{sixteen[1], sixteen[3], sixteen[2]} {
		fmt.Fprintf(&b, `<circle cx="%d" cy="16" r="5" fill="%s"/>`, 18+18*i, c)
	}
	fmt.Fprintf(&b, "\n"+`<g font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="%d">`+"\n", fontSize)
	var now style
	for row, line := range lines {
		b.WriteString(drawLine(line, &now, row))
	}
	b.WriteString("</g>\n</svg>\n")
	return b.String()
}

// run is text of one style that starts at a column.
type run struct {
	style
	text        string
	from, cells int
}

func drawLine(line string, now *style, row int) string {
	var runs []run
	column := 0
	var state byte
	for len(line) > 0 {
		seq, cells, n, next := ansi.DecodeSequence(line, state, nil)
		state, line = next, line[n:]
		if cells == 0 {
			now.apply(seq)
			continue
		}
		if last := len(runs) - 1; last >= 0 && runs[last].style == *now {
			runs[last].text += seq
			runs[last].cells += cells
		} else {
			runs = append(runs, run{style: *now, text: seq, from: column, cells: cells})
		}
		column += cells
	}
	var b strings.Builder
	y := bar + row*cellHeight
	for _, r := range runs {
		fg, bg := r.fg, r.bg
		if r.reverse {
			fg, bg = or(bg, paper), or(fg, ink)
		}
		x, wide := margin+float64(r.from)*cellWidth, float64(r.cells)*cellWidth
		if bg != "" {
			fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", x, y, wide, cellHeight, bg)
		}
		if strings.TrimSpace(r.text) == "" {
			continue
		}
		more := ""
		if r.bold {
			more += ` font-weight="bold"`
		}
		if r.faint {
			more += ` fill-opacity="0.6"`
		}
		if r.under {
			more += ` text-decoration="underline"`
		}
		// An explicit length keeps the columns aligned with any font.
		fmt.Fprintf(&b, `<text xml:space="preserve" x="%.1f" y="%d" textLength="%.1f" lengthAdjust="spacingAndGlyphs" fill="%s"%s>%s</text>`+"\n", x, y+fontSize, wide, or(fg, ink), more, escape(r.text))
	}
	return b.String()
}

// apply applies a sequence if it is SGR (ECMA-48, 8.3.117).
func (s *style) apply(seq string) {
	if !strings.HasPrefix(seq, "\x1b[") || !strings.HasSuffix(seq, "m") {
		return
	}
	body := seq[2 : len(seq)-1]
	var codes []int
	for _, p := range strings.FieldsFunc(body, func(r rune) bool { return r == ';' || r == ':' }) {
		n, err := strconv.Atoi(p)
		if err != nil {
			return
		}
		codes = append(codes, n)
	}
	if len(codes) == 0 {
		codes = []int{0}
	}
	for i := 0; i < len(codes); i++ {
		switch n := codes[i]; {
		case n == 0:
			*s = style{}
		case n == 1:
			s.bold = true
		case n == 2:
			s.faint = true
		case n == 4:
			s.under = true
		case n == 7:
			s.reverse = true
		case n == 22:
			s.bold, s.faint = false, false
		case n == 24:
			s.under = false
		case n == 27:
			s.reverse = false
		case n >= 30 && n <= 37:
			s.fg = sixteen[n-30]
		case n == 39:
			s.fg = ""
		case n >= 40 && n <= 47:
			s.bg = sixteen[n-40]
		case n == 49:
			s.bg = ""
		case n >= 90 && n <= 97:
			s.fg = sixteen[n-82]
		case n >= 100 && n <= 107:
			s.bg = sixteen[n-92]
		case n == 38 || n == 48:
			color, used := extended(codes[i+1:])
			i += used
			if n == 38 {
				s.fg = color
			} else {
				s.bg = color
			}
		}
	}
}

// extended parses the codes after 38 or 48: 5 and an index, or 2 and three components.
func extended(codes []int) (color string, used int) {
	switch {
	case len(codes) >= 2 && codes[0] == 5:
		return indexed(codes[1]), 2
	case len(codes) >= 4 && codes[0] == 2:
		return fmt.Sprintf("#%02x%02x%02x", codes[1]&255, codes[2]&255, codes[3]&255), 4
	}
	return "", len(codes)
}

// indexed returns one of xterm's 256 colours.
func indexed(n int) string {
	switch {
	case n < 0 || n > 255:
		return ""
	case n < 16:
		return sixteen[n]
	case n < 232:
		n -= 16
		level := func(v int) int {
			if v == 0 {
				return 0
			}
			return 55 + 40*v
		}
		return fmt.Sprintf("#%02x%02x%02x", level(n/36), level(n/6%6), level(n%6))
	}
	grey := 8 + 10*(n-232)
	return fmt.Sprintf("#%02x%02x%02x", grey, grey, grey)
}

func or(color, other string) string {
	if color == "" {
		return other
	}
	return color
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder never fails
	return b.String()
}
