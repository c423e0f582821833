package termtext

import (
	"encoding/base64"
	"io"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// MaxCopy limits how many bytes of base64 a guest may put on the clipboard.
const MaxCopy = 1 << 20

const (
	maxSequence = 128     // of a control sequence, in bytes
	maxOSC      = 4 << 10 // of an operating system command that is not a copy
)

// Filter passes untrusted output to a terminal, but removes everything that makes a
// terminal do more than display it: answer, print, copy, open, log, or change
// permanently.
//
// It writes text, harmless control characters and complete sequences of its allowlists,
// and nothing else. Between two of these every terminal is in its ground state, so it
// does not matter that terminals differ in how they read a broken sequence. C1 control
// characters count as the two 7-bit characters that they stand for.
//
// A Filter is safe for concurrent use.
type Filter struct {
	w      io.Writer
	screen bool
	replay bool
	onCopy func([]byte)

	mu     sync.Mutex
	part   []byte // beginning of an incomplete character
	state  filterState
	seq    []byte // the current sequence without its introducer
	long   bool   // the sequence exceeded its bound and is dropped at its end
	out    []byte
	styled bool // colours or styles are not the default
	alt    bool // the alternate screen is shown
	asked  bool // a passed sequence makes the terminal answer
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

// NewLineFilter returns a Filter for the output of programs without their own terminal.
// It passes text and colours, and no cursor movement except to the start of the line.
func NewLineFilter(w io.Writer) *Filter { return &Filter{w: w} }

// NewScreenFilter returns a Filter for programs that have a terminal, such as tmux. It
// also passes cursor movements, the modes that full-screen programs set, and queries
// whose answer is a number. onCopy receives text for the clipboard; without onCopy, a
// copy is passed to w in a single plain form.
func NewScreenFilter(w io.Writer, onCopy func([]byte)) *Filter {
	return &Filter{w: w, screen: true, onCopy: onCopy}
}

// NewReplayFilter returns a Filter for output that is shown later, to a person who cannot
// interact with the program. It passes what NewScreenFilter passes, but no operating system
// command, no query, and no mode in which the terminal sends input differently.
func NewReplayFilter(w io.Writer) *Filter { return &Filter{w: w, screen: true, replay: true} }

// Write filters p. It holds back an incomplete sequence or character until the rest
// arrives.
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

// Close drops an unfinished sequence and resets colours and styles. It does not close
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

// AltScreen reports whether the alternate screen is turned on.
func (f *Filter) AltScreen() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.alt
}

// Asked reports whether a query that the terminal answers was passed.
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
	case r == can || r == sub: // a terminal aborts the sequence
		f.end()
	case r == '\n' && !f.screen: // a sequence that begins in one line cannot hide the next
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
	case r < ' ': // keeps its meaning even within a sequence
		f.control(byte(r))
	case f.state == inText:
		f.text(r)
	case r >= del: // no sequence contains such a character
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

// end discards the current sequence.
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
		return // it would change the displayed order of a line's words
	}
	f.out = utf8.AppendRune(f.out, r)
}

// control passes the control characters that move the cursor, ring the bell, or select
// one of two character sets. Other control characters make some terminals answer.
func (f *Filter) control(c byte) {
	allowed := "\a\b\t\n\r"
	if f.screen {
		allowed += "\v\f\x0e\x0f"
	}
	if strings.IndexByte(allowed, c) >= 0 {
		f.out = append(f.out, c)
	}
}

// escape handles a character after ESC.
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
	if s := string(f.seq); f.screen && !f.long && strings.Contains(screenEscapes, " "+s+" ") && (!f.replay || !strings.Contains(keypadEscapes, s)) {
		f.out = append(f.out, "\x1b"+s...)
	}
	f.end()
}

// command ends an operating system command. The terminator is written as it was
// received.
func (f *Filter) command(end string) {
	if f.long || !f.screen || f.replay {
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

// copy handles a write to the clipboard, "SELECTION;BASE64". It drops everything else:
// a read, "?", and clearing the clipboard.
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
