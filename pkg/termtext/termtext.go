// Package termtext makes untrusted text safe to print, whether it comes from a guest, a
// repository or the network.
package termtext

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/charmbracelet/x/ansi"
)

// Line turns any text into one harmless line: without escape sequences, control
// characters, characters that change the direction or are invisible, and invalid UTF-8,
// and with white space reduced to single spaces.
func Line(s string) string {
	return strings.Join(strings.Fields(Lines(s)), " ")
}

// Lines is like Line for text of several lines: newlines, tabs and spaces stay. A
// carriage return, with which a line could overwrite itself, becomes a newline.
func Lines(s string) string {
	all := strings.Split(newlines.Replace(s), "\n")
	for i, l := range all { // each line separately: a sequence that begins in one cannot swallow the next
		all[i] = strings.Map(harmless, ansi.Strip(strings.ToValidUTF8(l, "")))
	}
	return strings.Join(all, "\n")
}

var newlines = strings.NewReplacer("\r\n", "\n", "\r", "\n")

// harmless returns r, or a negative value if r is to be removed.
func harmless(r rune) rune {
	switch {
	case r == '\t' || r == 0x200d: // a tab, or the zero width joiner, which joins the parts of an emoji
		return r
	case unicode.IsControl(r), unicode.In(r, unicode.Cf, unicode.Co, unicode.Zl, unicode.Zp):
		return -1
	}
	return r
}

// Head returns the beginning of s that fits into a number of bytes, without a partial
// character at its end.
func Head(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// Brief is like Head, but marks where text was cut off.
func Brief(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return Head(s, most) + "…"
}
