package termtext

import (
	"slices"
	"strconv"
	"strings"
)

// screenEscapes lists the sequences without parameters that NewScreenFilter passes:
// save and restore the cursor, the keypad's modes, line movements, GNU screen's visible
// bell, and the character sets of terminfo's line drawing.
//
// Left out on purpose: c (clears the scrollback), Z (answers), H (sets permanent tabs),
// n o | } ~ % (other character sets, in which text may be control characters), SP F and
// SP G (8-bit answers), k and ! (strings of GNU screen).
const screenEscapes = ` 7 8 = > D E M g (0 (A (B )0 )A )B `

// keypadEscapes lists those of screenEscapes that change what keys send.
const keypadEscapes = "=>"

// screenCommands holds the operating system commands that NewScreenFilter passes, by
// number, with a check of their text. Command 52, the clipboard, is handled separately.
// Colours may be queried but never set, because the user's colours would be lost.
var screenCommands = map[string]func(body string) bool{
	"0": isTitle, "1": isTitle, "2": isTitle,
	"4": isPaletteQuery, "10": isColorQuery, "11": isColorQuery, "12": isColorQuery, "17": isColorQuery, "19": isColorQuery,
	"8": isLink,
}

func isTitle(body string) bool { return len(body) <= 1<<10 }

func isColorQuery(body string) bool {
	return body != "" && strings.Trim(body, "?;") == "" && !strings.Contains(body, ";;") && body[0] == '?' && strings.HasSuffix(body, "?")
}

func isPaletteQuery(body string) bool {
	parts := strings.Split(body, ";")
	for i, p := range parts {
		n, err := strconv.Atoi(p)
		if i%2 == 0 && (err != nil || n < 0) || i%2 == 1 && p != "?" {
			return false
		}
	}
	return len(parts)%2 == 0
}

// isLink accepts links to the web, because other links open local files and programs.
func isLink(body string) bool {
	_, uri, ok := strings.Cut(body, ";")
	scheme, _, _ := strings.Cut(uri, ":")
	return ok && (uri == "" || slices.Contains([]string{"http", "https", "mailto"}, strings.ToLower(scheme)))
}

// screenModes lists the private modes that NewScreenFilter sets and resets: cursor
// keys, wrapping, origin and margins, reverse video, the cursor, the mouse and its
// encodings, focus, the alternate screen, pasting, synchronised output, and reports of
// the colour scheme and of the size. All are reset when attaching ends.
//
// Left out on purpose, for example: 2 (VT52, whose sequences print), 3 (the window's
// width), 18 and 19 (printing), 38 (Tektronix), 1001 (waits for an answer), 1007 and
// 1034 (whose defaults differ between terminals).
var screenModes = []int{
	1, 5, 6, 7, 9, 12, 25, 47, 69, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 1047, 1048, 1049, 2004, 2026, 2031, 2048, 7727,
}

// replayModes lists those of screenModes that change only what the terminal shows.
var replayModes = []int{5, 6, 7, 12, 25, 47, 69, 1047, 1048, 1049, 2026}

// altScreenModes lists the modes that show the alternate screen.
var altScreenModes = []int{47, 1047, 1049}

// ansiModes lists the modes without a prefix: insert mode, and a plain cursor for
// terminfo's "screen".
var ansiModes = []int{4, 34}

// function handles a complete control sequence, whose parameters and final character
// are in f.seq.
func (f *Filter) function() {
	if f.long {
		return
	}
	body := string(f.seq[:len(f.seq)-1])
	params := strings.TrimRightFunc(body, func(r rune) bool { return r >= ' ' && r <= '/' })
	between := body[len(params):] // intermediate characters
	prefix := ""
	if params != "" && strings.IndexByte("<=>?", params[0]) >= 0 {
		prefix, params = params[:1], params[1:]
	}
	if strings.Trim(params, "0123456789;:") != "" {
		return
	}
	name := prefix + between + string(f.seq[len(f.seq)-1:])
	if strings.Contains(params, ":") && name != "m" { // parts of colours
		return
	}
	var args []int
	for p := range strings.SplitSeq(params, ";") {
		p, _, _ = strings.Cut(p, ":")
		n, err := strconv.Atoi(p)
		if p != "" && (err != nil || n > 1<<16) {
			return
		}
		args = append(args, n)
	}
	switch name {
	case "m":
		f.styled = strings.Trim(params, "0") != ""
	case "K":
	case "h", "l", "?h", "?l":
		if params = f.modes(args, name); !f.screen || params == "" {
			return
		}
	default:
		if !f.screen || !passes(name, params, args) {
			return
		}
	}
	if f.replay && (asks(name) || setsKeyboard(name)) {
		return
	}
	f.asked = f.asked || asks(name)
	f.out = append(f.out, "\x1b["+prefix+params+between+name[len(name)-1:]...)
}

// modes returns the modes in args that may be set or reset, as parameters.
func (f *Filter) modes(args []int, name string) string {
	allowed := ansiModes
	if name[0] == '?' {
		allowed = screenModes
		if f.replay {
			allowed = replayModes
		}
	}
	var kept []string
	for _, mode := range args {
		if slices.Contains(allowed, mode) {
			kept = append(kept, strconv.Itoa(mode))
			if name[0] == '?' && slices.Contains(altScreenModes, mode) {
				f.alt = f.screen && name == "?h"
			}
		}
	}
	return strings.Join(kept, ";")
}

// passes reports whether a control sequence only displays something, sets a state that
// is reset when attaching ends, or is a query whose answer is a number or the
// terminal's own name. name consists of prefix, intermediate characters and final
// character.
func passes(name, params string, args []int) bool {
	first := args[0]
	switch name {
	case "A", "B", "C", "D", "E", "F", "G", "H", "I", "L", "M", "P", "S", "X", "Z", "@", "`", "a", "b", "d", "e", "f", "r", "s", "u":
		return true
	case " q", "!p", "$x": // the cursor's form, a soft reset, a filled rectangle
		return true
	case ">m", "?m", ">u", "<u", "=u", "?u": // the keyboard protocols of xterm and kitty
		return true
	case "$p", "?$p": // queries whether a mode is set
		return true
	case "J": // 3 clears the scrollback
		return len(args) == 1 && first < 3
	case "T": // with more parameters it waits for the mouse
		return len(args) == 1
	case "c", ">c", ">q": // queries the type of the terminal
		return first == 0 && len(args) == 1
	case "?c": // the cursor's form on Linux
		return params != ""
	case "n": // queries the cursor's position; 5 is reserved for the code that drains answers
		return first == 6
	case "?n":
		return first == 6 || first == 996
	case "t": // sizes; pushing the title on a stack and popping it
		return slices.Contains([]int{14, 16, 18, 22, 23}, first)
	}
	return false
}

// asks reports whether terminals answer a control sequence.
func asks(name string) bool {
	return slices.Contains([]string{"c", ">c", ">q", "n", "?n", "t", "$p", "?$p", "?u", "?m"}, name)
}

// setsKeyboard reports whether a control sequence changes what keys send.
func setsKeyboard(name string) bool { return slices.Contains([]string{">m", ">u", "<u", "=u"}, name) }
