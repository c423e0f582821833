// Package termtexttest reads output as terminals do, and reports what it would make them
// do besides displaying text. It is for tests, and shares no code with the filter that
// it checks: its control functions come from the manuals of xterm, kitty, iTerm2, GNU
// screen, tmux and the Linux console.
package termtexttest

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// dialect describes how a terminal differs from others in reading the same bytes.
type dialect struct {
	name       string
	escAborts  bool // ESC inside a string ends it, whatever follows
	belEnds    bool // BEL ends every string, not only an operating system command
	linux      bool // ESC ] P takes seven digits and no terminator, ESC [ [ takes one character
	screen     bool // ESC k and ESC ! begin a string
	ignoresDEL bool
}

var dialects = []dialect{
	{name: "xterm", escAborts: true, ignoresDEL: true},
	{name: "tmux", belEnds: true, screen: true},
	{name: "GNU screen", screen: true},
	{name: "Linux console", escAborts: true, linux: true, belEnds: true, ignoresDEL: true},
}

// Effects returns everything that output makes any known terminal do and for which a
// program without its own terminal has no reason. Allowed are text, colours, erasing a
// line, and moving the cursor to the start of the line.
func Effects(output string) []string { return effects(output, false) }

// ScreenEffects is like Effects, but for a program that draws a screen. It also allows
// movements, modes, and queries whose answer the program cannot choose.
func ScreenEffects(output string) []string { return effects(output, true) }

func effects(output string, screen bool) []string {
	var all []string
	add := func(format string, args ...any) {
		if s := fmt.Sprintf(format, args...); !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	if !utf8.ValidString(output) {
		add("invalid UTF-8")
	}
	for _, d := range dialects {
		t := &terminal{d: d, full: screen, report: func(format string, args ...any) { add(d.name+": "+format, args...) }}
		for _, r := range output {
			t.read(r)
		}
		if t.in != "" {
			add("%s: the output ends inside %s", d.name, t.in)
		}
	}
	return all
}

type terminal struct {
	d      dialect
	full   bool // a screen's functions do not count as effects
	report func(string, ...any)

	in   string // "", "ESC", "CSI", "OSC", "DCS", "APC", …
	body string
	esc  bool // in a string, after ESC
	skip int  // remaining characters of the Linux console's own sequences
}

func (t *terminal) read(r rune) {
	if t.skip > 0 {
		t.skip--
		return
	}
	isString := t.in != "" && t.in != "ESC" && t.in != "CSI"
	switch {
	case r >= 0x80 && r <= 0x9f: // for every terminal that interprets C1 in UTF-8
		t.report("C1 %#x", r)
		t.in, t.body = "ESC", ""
		t.escape(r - 0x40)
	case isString && t.esc:
		t.esc = false
		if r == '\\' || t.d.escAborts {
			t.end()
		}
		if r != '\\' && t.d.escAborts {
			t.in, t.body = "ESC", ""
			t.read(r)
		}
	case isString && r == 0x1b:
		t.esc = true
	case r == 0x1b:
		t.in, t.body = "ESC", ""
	case r == 0x18 || r == 0x1a:
		t.in = ""
	case isString:
		if r == 7 && (t.in == "OSC" || t.d.belEnds) {
			t.end()
		} else if r >= ' ' {
			if t.body += string(r); t.d.linux && t.in == "OSC" && t.body == "P" {
				t.report("palette")
				t.in, t.skip = "", 7
			}
		}
	case r < ' ':
		t.control(r)
	case r == 0x7f && t.d.ignoresDEL:
	case t.in == "ESC":
		t.escape(r)
	case t.in == "CSI":
		if r == '[' && t.body == "" && t.d.linux {
			t.in, t.skip = "", 1
			return
		}
		t.body += string(r)
		if r >= 0x40 {
			t.in = ""
			t.csi()
		}
	}
}

func (t *terminal) control(r rune) {
	switch {
	case strings.ContainsRune("\a\b\t\n\r", r):
	case t.full && strings.ContainsRune("\v\f\x0e\x0f", r):
	default: // ENQ is answered, others are flow control
		t.report("C0 %#x", r)
	}
}

func (t *terminal) escape(r rune) {
	kinds := map[rune]string{'[': "CSI", ']': "OSC", 'P': "DCS", 'X': "SOS", '^': "PM", '_': "APC"}
	if t.d.screen {
		kinds['k'], kinds['!'] = "title", "message"
	}
	if kind, ok := kinds[r]; ok && t.body == "" {
		if t.in, t.body = kind, ""; kind != "CSI" && kind != "OSC" {
			t.report("%s", kind)
		}
		return
	}
	t.body += string(r)
	if r >= ' ' && r < '0' {
		return
	}
	t.in = ""
	switch t.body {
	case "\\":
	case "7", "8", "=", ">", "D", "E", "M", "g", "(0", "(A", "(B", ")0", ")A", ")B":
		if !t.full {
			t.report("ESC %s", t.body)
		}
	default:
		t.report("ESC %s", t.body)
	}
}

// end handles the end of a string.
func (t *terminal) end() {
	kind, body := t.in, t.body
	t.in, t.body = "", ""
	if kind != "OSC" {
		return
	}
	number, text, _ := strings.Cut(body, ";")
	switch number {
	case "0", "1", "2":
		if t.full {
			return
		}
	case "8":
		_, uri, _ := strings.Cut(text, ";")
		if web := strings.HasPrefix(strings.ToLower(uri), "http"); t.full && (uri == "" || web || strings.HasPrefix(strings.ToLower(uri), "mailto:")) {
			return
		}
	case "4", "10", "11", "12", "17", "19":
		if t.full && strings.HasSuffix(text, "?") && strings.Trim(text, "0123456789;?") == "" {
			return
		}
	case "52":
		if t.full && strings.HasPrefix(text, "c;") && text != "c;?" {
			return
		}
	}
	t.report("OSC %.80s", body)
}

// csi checks a control sequence by its parameters and its name.
func (t *terminal) csi() {
	i := strings.IndexFunc(t.body, func(r rune) bool { return r < '0' || r > '?' })
	params, name := t.body[:i], t.body[i:]
	if params != "" && strings.ContainsRune("<=>?", rune(params[0])) {
		params, name = params[1:], params[:1]+name
	}
	show := fmt.Sprintf("CSI %s %s", params, name)
	switch name {
	case "m", "K":
		return
	}
	if !t.full {
		t.report("%s", show)
		return
	}
	args := strings.Split(params, ";")
	switch name {
	case "A", "B", "C", "D", "E", "F", "G", "H", "I", "L", "M", "P", "S", "X", "Z", "@", "`", "a", "b", "d", "e", "f", "r", "s", "u",
		" q", "!p", "$x", ">m", "?m", ">u", "<u", "=u", "?u", "$p", "?$p", "?c":
		return
	case "T":
		if len(args) < 2 {
			return
		}
	case "J":
		if params != "3" && strings.Trim(params, "012") == "" {
			return
		}
	case "c", ">c", ">q":
		if strings.Trim(params, "0") == "" {
			return
		}
	case "n", "?n":
		if params == "6" || params == "996" {
			return
		}
	case "t":
		if slices.Contains([]string{"14", "16", "18", "22", "23"}, args[0]) {
			return
		}
	case "h", "l":
		if !slices.ContainsFunc(args, func(a string) bool { return a != "4" && a != "34" }) {
			return
		}
	case "?h", "?l":
		for _, a := range args {
			switch a {
			case "2", "3", "18", "19", "30", "35", "38", "40", "42", "1001", "1010", "1011", "1035", "1036", "1039", "1042", "1043", "1046", "5522", "9001", "":
				t.report("mode %s", a)
			}
		}
		return
	}
	t.report("%s", show)
}
