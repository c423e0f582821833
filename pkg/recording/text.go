package recording

import (
	"hash/maphash"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	maxLine    = 4 << 10 // characters of a line of text; the rest begins another line
	maxForward = 512     // columns that the cursor moves forward at once
	recent     = 128     // lines that are remembered, so that a program which draws its screen again does not repeat them
)

// lines turns a terminal's output into lines of text that can be searched. It follows the cursor within
// a line, because shells and progress bars write over it, and ends the line where a program moves elsewhere.
type lines struct {
	emit func(line string)

	line   []rune
	column int
	part   []byte // beginning of an incomplete character

	seed  maphash.Seed
	seen  map[uint64]bool
	order [recent]uint64
	next  int
}

func newLines(emit func(string)) *lines {
	return &lines{emit: emit, seed: maphash.MakeSeed(), seen: map[uint64]bool{}}
}

func (l *lines) text(p []byte) {
	for p = append(l.part, p...); len(p) > 0 && utf8.FullRune(p); {
		r, n := utf8.DecodeRune(p)
		l.put(r)
		p = p[n:]
	}
	l.part = append([]byte(nil), p...)
}

// put writes a character at the cursor.
func (l *lines) put(r rune) {
	if l.column >= maxLine {
		l.end()
	}
	for len(l.line) <= l.column {
		l.line = append(l.line, ' ')
	}
	l.line[l.column] = r
	l.column++
}

func (l *lines) control(p []byte) {
	switch p[0] {
	case '\n', '\v', '\f':
		l.end()
	case '\r':
		l.column = 0
	case '\b':
		l.column = max(l.column-1, 0)
	case '\t':
		l.put(' ')
	case 0x1b:
		l.sequence(string(p[1:]))
	}
}

// sequence handles an escape sequence without its ESC.
func (l *lines) sequence(s string) {
	if !strings.HasPrefix(s, "[") || len(s) < 2 {
		if s == "D" || s == "E" || s == "M" || s == "7" || s == "8" {
			l.end()
		}
		return
	}
	n, err := strconv.Atoi(s[1 : len(s)-1])
	if err != nil {
		n = 0
	}
	count := min(max(n, 1), maxForward)
	switch s[len(s)-1] {
	case 'C', 'a':
		l.column = min(l.column+count, maxLine)
	case 'D':
		l.column = max(l.column-count, 0)
	case 'G', '`':
		l.column = count - 1
	case 'K':
		if n == 0 && l.column < len(l.line) {
			l.line = l.line[:l.column]
		}
	case 'P':
		if l.column < len(l.line) {
			l.line = append(l.line[:l.column], l.line[min(l.column+count, len(l.line)):]...)
		}
	case '@':
		if l.column < len(l.line) && len(l.line)+count <= maxLine {
			l.line = append(l.line[:l.column], append([]rune(strings.Repeat(" ", count)), l.line[l.column:]...)...)
		}
	case 'X':
		for i := l.column; i < min(l.column+count, len(l.line)); i++ {
			l.line[i] = ' '
		}
	case 'h', 'l':
		if strings.Contains(s, "1049") || strings.Contains(s, "1047") || strings.Contains(s, "?47") { // another screen
			l.end()
		}
	case 'A', 'B', 'E', 'F', 'H', 'f', 'd', 'e', 'I', 'Z', 'J', 'S', 'T', 'L', 'M', 'r', 's', 'u', 'b', 'x', 'p':
		l.end()
	}
}

// end ends the line, and emits it unless it is empty or was emitted a moment ago.
func (l *lines) end() {
	text := strings.TrimSpace(string(l.line))
	l.line, l.column = l.line[:0], 0
	if text == "" {
		return
	}
	sum := maphash.String(l.seed, text)
	if l.seen[sum] {
		return
	}
	delete(l.seen, l.order[l.next])
	l.order[l.next], l.seen[sum] = sum, true
	l.next = (l.next + 1) % recent
	l.emit(text)
}
