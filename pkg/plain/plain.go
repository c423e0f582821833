// Package plain makes text of strangers fit to be printed: of a guest, of a
// repository, of the network.
package plain

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/charmbracelet/x/ansi"
)

// Line makes one harmless line of any text: no escape sequences, no control
// characters, none that turn the direction or hide, no invalid UTF-8, white space as
// single spaces.
func Line(s string) string {
	return strings.Join(strings.Fields(Lines(s)), " ")
}

// Lines is Line for text of several lines: newlines, tabs and spaces stay. A carriage
// return, which would let a line overwrite itself, becomes a newline.
func Lines(s string) string {
	all := strings.Split(newlines.Replace(s), "\n")
	for i, l := range all { // each by itself: what begins in one cannot swallow the next
		all[i] = strings.Map(harmless, ansi.Strip(strings.ToValidUTF8(l, "")))
	}
	return strings.Join(all, "\n")
}

var newlines = strings.NewReplacer("\r\n", "\n", "\r", "\n")

// harmless is what is left of a character, below 0 for nothing.
func harmless(r rune) rune {
	switch {
	case r == '\t' || r == 0x200d: // a tab; what joins the parts of one picture
		return r
	case unicode.IsControl(r), unicode.In(r, unicode.Cf, unicode.Co, unicode.Zl, unicode.Zp):
		return -1
	}
	return r
}

// Head is as much of s as fits into a number of bytes, without half a character at
// its end.
func Head(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// Brief is Head that shows where something was cut off.
func Brief(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return Head(s, most) + "…"
}
