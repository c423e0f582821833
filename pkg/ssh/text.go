package ssh

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// briefLen bounds guest text that becomes part of an error.
const briefLen = 300

// brief is Clean, cut to what an error message can carry.
func brief(s string) string {
	if len(s) > 16*briefLen {
		s = s[:16*briefLen]
	}
	r := []rune(Clean(s))
	if len(r) > briefLen {
		return string(r[:briefLen]) + "…"
	}
	return string(r)
}

// Clean makes one harmless line of guest text: escape sequences, control
// characters, direction overrides and invalid UTF-8 are gone, and every run of
// white space is one space.
func Clean(s string) string {
	return strings.Join(strings.Fields(CleanText(s)), " ")
}

// CleanText is Clean for text of several lines: newlines and tabs stay, and a
// carriage return, which would let a line overwrite itself, becomes a newline.
func CleanText(s string) string {
	s = strings.ReplaceAll(s, "\r\n", "\n")
	var b strings.Builder
	b.Grow(len(s))
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			s = s[1:]
			continue
		case r == '\r':
			b.WriteByte('\n')
		case r == '\n' || r == '\t':
			b.WriteRune(r)
		case r == 0x1b || r >= 0x80 && r <= 0x9f:
			s = s[n:]
			s = s[escapeLen(r, s):]
			continue
		case !hidden(r):
			b.WriteRune(r)
		}
		s = s[n:]
	}
	return b.String()
}

// hidden reports characters that print nothing but change how others print.
func hidden(r rune) bool {
	if unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) {
		return true
	}
	return r == 0x2028 || r == 0x2029 || r == 0xfeff || r >= 0xe0000 && r <= 0xe007f
}

// escapeLen is the length of the rest of an escape sequence whose introducer,
// ESC or its 8-bit form, was read. A newline ends an unterminated one, so that
// a guest cannot swallow the lines that follow.
func escapeLen(intro rune, s string) int {
	i := 0
	kind := intro
	if intro == 0x1b {
		if s == "" {
			return 0
		}
		if s[0] < 0x20 || s[0] > 0x7e {
			return 0 // not a sequence; the next character is judged by itself
		}
		kind, i = rune(s[0])+0x40, 1 // ESC [ is 0x9b, ESC ] is 0x9d, …
	}
	switch kind {
	case 0x9b: // CSI: parameters and intermediates, then one final byte
		for ; i < len(s) && s[i] >= 0x20 && s[i] <= 0x3f; i++ {
		}
		if i < len(s) && s[i] >= 0x40 && s[i] <= 0x7e {
			i++
		}
	case 0x90, 0x98, 0x9d, 0x9e, 0x9f: // DCS, SOS, OSC, PM, APC: to BEL or ST
		for ; i < len(s) && s[i] != '\n' && s[i] != '\r'; i++ {
			switch {
			case s[i] == 0x07:
				return i + 1
			case s[i] == 0x1b:
				if i+1 < len(s) && s[i+1] == '\\' {
					return i + 2
				}
				return i // aborted by another sequence
			case strings.HasPrefix(s[i:], "\u009c"):
				return i + len("\u009c")
			}
		}
	default: // ESC, intermediates, one final byte
		if intro != 0x1b {
			return 0
		}
		if s[0] > 0x2f {
			return 1
		}
		for ; i < len(s) && s[i] >= 0x20 && s[i] <= 0x2f; i++ {
		}
		if i < len(s) && s[i] >= 0x30 && s[i] <= 0x7e {
			i++
		}
	}
	return i
}

// Quote makes one POSIX shell command line out of arguments. It is the only
// place where the product quotes for a shell.
func Quote(args ...string) string {
	q := make([]string, len(args))
	for i, a := range args {
		if a != "" && strings.IndexFunc(a, special) < 0 {
			q[i] = a
			continue
		}
		q[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	return strings.Join(q, " ")
}

// special reports what the shell may take to mean something. "=" and "~" do in
// the first word, so they are quoted everywhere.
func special(r rune) bool {
	switch {
	case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return false
	}
	return !strings.ContainsRune("_-./:,@+%", r)
}
