package repo

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"unicode"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// printer writes a guest's diff so that it cannot control the terminal. Newlines
// and tabs pass; it escapes all other control characters, invisible characters and
// bytes that are not UTF-8. Its memory use does not depend on the length of the
// diff.
type printer struct {
	w     io.Writer
	color bool
	out   bytes.Buffer
	rest  []byte // an incomplete character
	line  []byte // start of the current line, until its colour is known
	held  bool   // line has not been written yet
	tint  bool   // a colour is active
	old   int64  // remaining lines of the hunk
	new   int64
	err   error // of w
}

const (
	lineStart = 256 // bytes of a line that determine its colour
	flushAt   = 32 << 10
)

func newPrinter(w io.Writer, color bool) *printer {
	return &printer{w: w, color: color, held: true}
}

func (p *printer) Write(b []byte) (int, error) {
	n := len(b)
	if len(p.rest) > 0 {
		b = append(p.rest, b...)
		p.rest = nil
	}
	for len(b) > 0 {
		if !utf8.FullRune(b) {
			p.rest = append([]byte(nil), b...)
			break
		}
		r, size := utf8.DecodeRune(b)
		p.character(r, b[:size])
		b = b[size:]
	}
	return n, p.flush(flushAt)
}

func (p *printer) character(r rune, raw []byte) {
	switch {
	case r == '\n':
		p.endLine()
	case r == '\t':
		p.text(raw)
	case r == utf8.RuneError && len(raw) == 1:
		p.text(fmt.Appendf(nil, `\x%02x`, raw[0]))
	case r < 0x20 || r == 0x7f:
		p.text([]byte{'^', byte(r) ^ 0x40})
	case !unicode.IsPrint(r) && !unicode.Is(unicode.Zs, r) && !unicode.Is(unicode.Co, r):
		p.text(fmt.Appendf(nil, "<U+%04X>", r))
	default:
		p.text(raw)
	}
}

func (p *printer) text(b []byte) {
	if !p.held {
		p.out.Write(b)
		return
	}
	p.line = append(p.line, b...)
	if !p.color || len(p.line) >= lineStart {
		p.release()
	}
}

func (p *printer) endLine() {
	if p.held {
		p.release()
	}
	if p.tint {
		p.out.WriteString("\x1b[m")
		p.tint = false
	}
	p.out.WriteByte('\n')
	p.held = true
	if p.out.Len() >= flushAt {
		p.err = p.flush(flushAt)
	}
}

// release writes the start of a line in its colour.
func (p *printer) release() {
	if p.color {
		if c := p.paint(); c != "" {
			p.out.WriteString("\x1b[" + c + "m")
			p.tint = true
		}
	}
	p.out.Write(p.line)
	p.line = p.line[:0]
	p.held = false
}

var hunk = lazyregexp.New(`^@@ -[0-9]{1,9}(?:,([0-9]{1,9}))? \+[0-9]{1,9}(?:,([0-9]{1,9}))? @@`)

// paint returns a line's colour. The remaining lines of the hunk distinguish a
// removed line "-- x" from the header "--- x".
func (p *printer) paint() string {
	if found := hunk.FindSubmatch(p.line); found != nil && p.old <= 0 && p.new <= 0 {
		p.old, p.new = hunkLen(found[1]), hunkLen(found[2])
		return "36"
	}
	first := byte(' ')
	if len(p.line) > 0 {
		first = p.line[0]
	}
	if p.old <= 0 && p.new <= 0 {
		if first == ' ' || first == '\\' {
			return ""
		}
		return "1"
	}
	switch first {
	case '+':
		p.new--
		return "32"
	case '-':
		p.old--
		return "31"
	case ' ':
		p.old--
		p.new--
	}
	return ""
}

func hunkLen(b []byte) int64 {
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		return 1
	}
	return n
}

// close writes the rest and resets the terminal's colour.
func (p *printer) close() error {
	for _, c := range p.rest {
		p.text(fmt.Appendf(nil, `\x%02x`, c))
	}
	p.rest = nil
	if p.held && len(p.line) > 0 {
		p.release()
	}
	if p.tint {
		p.out.WriteString("\x1b[m")
		p.tint = false
	}
	return p.flush(0)
}

func (p *printer) flush(at int) error {
	if p.err == nil && p.out.Len() > 0 && p.out.Len() >= at {
		_, p.err = p.w.Write(p.out.Bytes())
	}
	if p.out.Len() >= at {
		p.out.Reset()
	}
	return p.err
}
