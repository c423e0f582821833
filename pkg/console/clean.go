package console

import (
	"strings"
	"unicode"

	"github.com/charmbracelet/x/ansi"
)

// Clean makes one harmless line of any text: no escape sequences, no control
// or direction characters, white space as single spaces.
func Clean(s string) string {
	s = ansi.Strip(strings.ToValidUTF8(s, ""))
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsControl(r), unicode.In(r, unicode.Cf, unicode.Co, unicode.Zl, unicode.Zp) && r != 0x200d:
			return -1
		}
		return r
	}, s)
	return strings.Join(strings.Fields(s), " ")
}

// cleanLines is Clean for text of several lines; it keeps them and their
// indentation.
func cleanLines(s string) []string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		indent := len(l) - len(strings.TrimLeft(l, " "))
		lines[i] = l[:indent] + Clean(l)
	}
	return lines
}

// fit cuts s to a width in terminal cells.
func fit(s string, width int) string { return ansi.Truncate(s, max(width, 0), "…") }

// cells is the width of s on a terminal.
func cells(s string) int { return ansi.StringWidth(s) }
