package plain

import (
	"encoding/base64"
	"io"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// MaxCopy is how many bytes of base64 a guest may put on the clipboard.
const MaxCopy = 1 << 20

const (
	maxSequence = 128     // of a control sequence, in bytes
	maxOSC      = 4 << 10 // of an operating system command that is no copy
)

// Filter passes a stranger's output on to a terminal, without what makes a
// terminal do more than show it: answer, print, copy, open, log or change for good.
//
// It writes text, harmless control characters and complete sequences of its
// allowlists, and nothing else. Between two of them every terminal is in its ground
// state, so terminals that read a broken sequence differently make no difference.
// C1 control characters count as the two 7-bit characters that they stand for.
//
// Safe for concurrent use.
type Filter struct {
	w      io.Writer
	screen bool
	onCopy func([]byte)

	mu     sync.Mutex
	part   []byte // the start of a character whose end has not come
	state  filterState
	seq    []byte // of the sequence so far, without its introducer
	long   bool   // it exceeded its bound, and is dropped at its end
	out    []byte
	styled bool // colours are not as they were
	alt    bool // the alternate screen is shown
	asked  bool // the terminal answers something
}

type filterState int

const (
	inText    filterState = iota
	inEscape              // after ESC, and intermediate characters
	inControl             // after CSI
	inCommand             // after OSC
	inString              // after DCS, SOS, PM, APC, or a title of GNU screen
)

const (
	bel, can, sub, esc, del = 0x07, 0x18, 0x1a, 0x1b, 0x7f
)

// NewLineFilter returns a Filter for what programs print without a terminal of
// their own: it passes text and colours, and no movement but to the line's start.
func NewLineFilter(w io.Writer) *Filter { return &Filter{w: w} }

// NewScreenFilter returns a Filter for programs that have a terminal, such as tmux:
// it also passes the cursor's movements, the modes that full-screen programs
// set, and questions whose answer is a number. onCopy takes what is put on the
// clipboard; without it a copy goes to w, in one plain form.
func NewScreenFilter(w io.Writer, onCopy func([]byte)) *Filter {
	return &Filter{w: w, screen: true, onCopy: onCopy}
}

// Write filters p. It keeps back a sequence or a character until it is complete.
func (f *Filter) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	rest := p
	if len(f.part) > 0 {
		rest = slices.Concat(f.part, p)
		f.part = nil
	}
	for len(rest) > 0 {
		if !utf8.FullRune(rest) {
			f.part = append([]byte(nil), rest...)
			break
		}
		r, n := utf8.DecodeRune(rest)
		if r == utf8.RuneError && n == 1 && rest[0] < 0xa0 { // a C1 character of an 8-bit terminal
			r = rune(rest[0])
		}
		f.step(r)
		rest = rest[n:]
	}
	if err := f.flush(); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close drops an unfinished sequence and puts the colours back. It does not close
// the underlying writer.
func (f *Filter) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.end()
	if f.part = nil; f.styled {
		f.out, f.styled = append(f.out, "\x1b[0m"...), false
	}
	return f.flush()
}

// AltScreen reports whether the alternate screen was turned on and not off.
func (f *Filter) AltScreen() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.alt
}

// Asked reports whether a question passed that the terminal answers.
func (f *Filter) Asked() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked
}

func (f *Filter) flush() error {
	if len(f.out) == 0 {
		return nil
	}
	_, err := f.w.Write(f.out)
	if f.out = f.out[:0]; cap(f.out) > 64<<10 {
		f.out = nil
	}
	return err
}

func (f *Filter) step(r rune) {
	switch {
	case r >= 0x80 && r < 0xa0: // C1
		f.step(esc)
		f.step(r - 0x40)
	case r == esc:
		if f.state == inCommand {
			f.command("\x1b\\")
		}
		f.end()
		f.state = inEscape
	case r == can || r == sub: // a terminal gives up the sequence
		f.end()
	case r == '\n' && !f.screen: // what begins in one line cannot hide the next
		f.end()
		f.control('\n')
	case r == del: // ignored everywhere
	case f.state == inString:
	case f.state == inCommand && r == bel:
		f.command("\a")
		f.end()
	case f.state == inCommand:
		if r >= ' ' {
			f.collect(r, MaxCopy+64)
		}
	case r < ' ': // also within a sequence it means what it means
		f.control(byte(r))
	case f.state == inText:
		f.text(r)
	case r >= del: // no sequence has such a character
		f.end()
		f.text(r)
	case f.state == inControl:
		if f.collect(r, maxSequence); r >= '@' {
			f.function()
			f.end()
		}
	default:
		f.escape(byte(r))
	}
}

// end gives up the sequence that was read.
func (f *Filter) end() {
	f.state, f.long = inText, false
	if f.seq = f.seq[:0]; cap(f.seq) > 64<<10 {
		f.seq = nil
	}
}

func (f *Filter) collect(r rune, most int) {
	if len(f.seq) >= most {
		f.long = true
		return
	}
	f.seq = utf8.AppendRune(f.seq, r)
}

func (f *Filter) text(r rune) {
	if !f.screen && unicode.Is(unicode.Bidi_Control, r) {
		return // it would show a line's words in another order
	}
	f.out = utf8.AppendRune(f.out, r)
}

// control passes the control characters that move the cursor, ring, or choose one
// of two character sets. Others make some terminals answer.
func (f *Filter) control(c byte) {
	allowed := "\a\b\t\n\r"
	if f.screen {
		allowed += "\v\f\x0e\x0f"
	}
	if strings.IndexByte(allowed, c) >= 0 {
		f.out = append(f.out, c)
	}
}

// escape takes a character after ESC.
func (f *Filter) escape(c byte) {
	if len(f.seq) == 0 {
		switch c {
		case '[':
			f.state = inControl
			return
		case ']':
			f.state = inCommand
			return
		case 'P', 'X', '^', '_', 'k':
			f.state = inString
			return
		}
	}
	if f.collect(rune(c), maxSequence); c < '0' {
		return // an intermediate character
	}
	if s := string(f.seq); f.screen && !f.long && strings.Contains(screenEscapes, " "+s+" ") {
		f.out = append(f.out, "\x1b"+s...)
	}
	f.end()
}

// command ends an operating system command; the end is written as it came.
func (f *Filter) command(end string) {
	if f.long || !f.screen {
		return
	}
	number, body, ok := strings.Cut(string(f.seq), ";")
	if number = strings.TrimLeft(number, "0"); number == "" {
		number = "0"
	}
	if number == "52" {
		f.copy(body)
		return
	}
	check := screenCommands[number]
	if !ok || check == nil || len(body) > maxOSC || !check(body) {
		return
	}
	f.asked = f.asked || strings.HasSuffix(body, "?")
	f.out = append(f.out, "\x1b]"+number+";"+body+end...)
}

// copy takes a write to the clipboard, "SELECTION;BASE64", and drops the rest: a
// read, "?", and what clears it.
func (f *Filter) copy(body string) {
	_, text, ok := strings.Cut(body, ";")
	if !ok || len(text) > MaxCopy {
		return
	}
	data, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(text, "="))
	if err != nil || len(data) == 0 {
		return
	}
	if f.onCopy != nil {
		f.onCopy(data)
		return
	}
	f.out = append(f.out, "\x1b]52;c;"+base64.StdEncoding.EncodeToString(data)+"\a"...)
}
