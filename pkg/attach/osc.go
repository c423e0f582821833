package attach

import (
	"encoding/base64"
	"io"
	"strings"
	"sync"
)

const (
	maxCopy   = 1 << 20 // bytes of base64 that a guest may put on the clipboard
	maxNumber = 9999    // above it an OSC's number is nonsense that may wrap around to 52
)

// The OSC numbers that do not reach the terminal.
const (
	oscClipboard      = 52
	oscITerm          = 1337 // copies to the clipboard, downloads files
	oscKittyClipboard = 5522
)

// filter passes a guest's output on, without its access to the clipboard:
// writes go to onCopy, reads are dropped. What it recognises does not depend on
// what stands around it, so that no wrapping (tmux's passthrough, a string
// inside another) hides a sequence from it and shows it to the terminal.
//
// C1 control characters are dropped altogether: UTF-8 programs do not use them,
// and to some terminals each is an escape sequence's beginning.
type filter struct {
	w      io.Writer
	onCopy func([]byte)

	mu    sync.Mutex // a guest may send stdout and stderr at once
	runes utf8State
	state state
	seq   []byte // what has been read of an escape sequence that may be an OSC
	num   int    // its number so far
	body  []byte // its text, when it is swallowed
	long  bool   // the text exceeded its bound
	out   []byte
}

type state int

const (
	text    state = iota
	escape        // after ESC
	number        // after ESC ], in the number
	cutOff        // in there, after ESC
	swallow       // in the text of an OSC that does not pass
	ending        // in there, after ESC
)

const esc = 0x1b

func (f *filter) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.out = f.out[:0]
	for _, b := range p {
		f.runes.each(b, f.step)
	}
	if len(f.out) > 0 {
		if _, err := f.w.Write(f.out); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

func (f *filter) step(b byte) {
	const can, sub, bel, del = 0x18, 0x1a, 0x07, 0x7f
	switch {
	case f.state == text:
		if b == esc {
			f.begin()
			return
		}
		f.out = append(f.out, b)
	case b == can || b == sub: // a terminal gives up the sequence
		f.pass()
		f.out = append(f.out, b)
		f.state, f.body = text, nil
	case f.state == escape && b == esc:
		// tmux doubles ESC inside a passthrough; both belong to what follows.
		// Kept back, all of them: one left before a sequence that is swallowed
		// would begin another with what follows.
		if len(f.seq) < 8 {
			f.seq = append(f.seq, esc)
		}
	case f.state == number && b == esc && f.blocked():
		f.state, f.seq, f.body, f.long = ending, f.seq[:0], f.body[:0], false
	case f.state == number && b == esc:
		f.seq, f.state = append(f.seq, b), cutOff
	case f.state == cutOff && b == '\\': // it has a number only, as in "reset the palette"
		f.pass()
		f.out = append(f.out, b)
		f.state = text
	case f.state == cutOff: // it came to nothing, and nothing may be left of it
		f.begin()
		f.step(b)
	case f.state == swallow && b == esc:
		f.state = ending
	case f.state == ending && b == '\\':
		f.finish()
	case f.state == ending && b == esc: // doubled
	case f.state == ending: // a new sequence: the old one ends here
		f.finish()
		f.begin()
		f.step(b)
	case f.state == swallow && b == bel:
		f.finish()
	case f.state == swallow:
		if len(f.body) >= maxCopy {
			f.long = true
		} else if b >= ' ' {
			f.body = append(f.body, b)
		}
	case b == del || b < ' ' && (b != bel || f.state == escape):
		// Terminals skip these within a sequence, and so must what looks for it.
		if f.state == escape {
			f.out = append(f.out, b) // they do what they mean first
		}
	case f.state == escape && b == ']':
		f.seq, f.state, f.num = append(f.seq, b), number, 0
	case f.state == number && b >= '0' && b <= '9':
		f.num = min(f.num*10+int(b-'0'), maxNumber+1)
		if len(f.seq) < 20 {
			f.seq = append(f.seq, b)
		} else if f.num <= maxNumber { // zeros without end
			f.num = maxNumber + 1
		}
	case f.state == number && f.blocked():
		f.state, f.seq, f.body, f.long = swallow, f.seq[:0], f.body[:0], false
		f.step(b)
	default: // another sequence
		f.pass()
		f.out = append(f.out, b)
		f.state = text
	}
}

func (f *filter) blocked() bool {
	return f.num == oscClipboard || f.num == oscITerm || f.num == oscKittyClipboard || f.num > maxNumber
}

func (f *filter) begin() { f.state, f.seq = escape, append(f.seq[:0], esc) }

// pass lets a sequence through that turned out to be harmless so far.
func (f *filter) pass() {
	f.out = append(f.out, f.seq...)
	f.seq = f.seq[:0]
}

// finish is the end of a swallowed OSC: ";c;BASE64" for a clipboard write.
func (f *filter) finish() {
	f.state = text
	body, long := string(f.body), f.long
	if cap(f.body) > 64<<10 {
		f.body = nil
	}
	parts := strings.SplitN(body, ";", 3)
	if f.num != oscClipboard || long || len(parts) != 3 || parts[0] != "" {
		return
	}
	data, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(parts[2], "="))
	if err != nil || len(data) == 0 { // "?" asks for the clipboard, others clear it
		return
	}
	if f.onCopy != nil {
		f.onCopy(data)
		return
	}
	f.out = append(f.out, "\x1b]52;c;"+base64.StdEncoding.EncodeToString(data)+"\x07"...)
}

// utf8State takes C1 control characters out of a stream, both their UTF-8 form
// and single bytes that stand where a character begins.
type utf8State struct {
	need int  // continuation bytes to come
	c2   bool // after 0xC2, which begins U+0080 to U+00BF
}

func (u *utf8State) each(b byte, emit func(byte)) {
	continues := b&0xc0 == 0x80
	switch {
	case u.c2:
		u.c2 = false
		if continues {
			if b >= 0xa0 {
				emit(0xc2)
				emit(b)
			}
			return
		}
		u.each(b, emit) // 0xC2 alone is no character; it is dropped
	case u.need > 0 && continues:
		u.need--
		emit(b)
	case b == 0xc2:
		u.need, u.c2 = 0, true
	case continues:
		u.need = 0
		if b >= 0xa0 {
			emit(b)
		}
	default:
		u.need = 0
		switch {
		case b >= 0xf0 && b < 0xf5:
			u.need = 3
		case b >= 0xe0 && b < 0xf0:
			u.need = 2
		case b > 0xc2 && b < 0xe0:
			u.need = 1
		}
		emit(b)
	}
}
