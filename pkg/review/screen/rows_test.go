package screen

import (
	"context"
	"strings"
	"testing"
	"time"

	"charm.land/lipgloss/v2"
	"github.com/alecthomas/chroma/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

func TestClean(t *testing.T) {
	for text, want := range map[string]string{
		"a\tb":                              "a   b",
		"\tx":                               "    x",
		"crlf\r":                            "crlf␍",
		"back\rover":                        "back␍over",
		"\x1b[31mred\x1b]0;t\x07":           "␛[31mred␛]0;t␇",
		"bidi\u202eevil":                    "bidi�evil",
		"zero\u200bwidth":                   "zero�width",
		"bad\xffbyte":                       "bad�byte",
		"e" + strings.Repeat("\u0301", 500): "e" + strings.Repeat("\u0301", maxJoined-1) + "�",
		"日本 ok":                             "日本 ok",
		"nbsp\u2800\u3164\ufe0f\U000e0101":  "nbsp����",
		"c1\u009b31m":                       "c1�31m",
		"tab\te\u0301\tx":                   "tab e\u0301   x",
	} {
		if got := clean(text); got != want {
			t.Errorf("clean(%q) = %q, want %q", text, got, want)
		}
	}
	if got := clean(strings.Repeat("x", 4<<20)); len(got) > maxLine+len("…") {
		t.Errorf("clean of a long line has %d bytes, want at most %d", len(got), maxLine)
	}
}

// A line has exactly the width of its pane, whatever it contains: another width would break the screen.
func TestFit(t *testing.T) {
	for _, text := range []string{"", "short", strings.Repeat("long ", 50), strings.Repeat("日", 40), "x" + strings.Repeat("日", 40), strings.Repeat("ᄀ", 90), "\u0301x", strings.Repeat("e\u0301", 60)} {
		for _, width := range []int{1, 2, 3, 10, 11, 80} {
			for _, from := range []int{0, 1, 8, 200} {
				half := len(text) / 2
				for half > 0 && half < len(text) && text[half]&0xc0 == 0x80 {
					half--
				}
				got := fit([]span{{text[:half], lipgloss.NewStyle()}, {text[half:], lipgloss.NewStyle().Bold(true)}}, from, width, lipgloss.NewStyle())
				if w := ansi.StringWidthWc(got); w != width {
					t.Errorf("fit(%.20q, %d, %d) has %d columns: %q", text, from, width, w, got)
				}
			}
		}
	}
}

func text(pieces []piece) string {
	var b strings.Builder
	for _, p := range pieces {
		if p.changed {
			b.WriteString("[" + p.text + "]")
		} else {
			b.WriteString(p.text)
		}
	}
	return b.String()
}

func TestCompare(t *testing.T) {
	for _, c := range []struct{ old, new, wantOld, wantNew string }{
		{"return a + b", "return a - b", "return a [+] b", "return a [-] b"},
		{"f(x)", "f(x, y)", "f(x)", "f(x[, y])"},
		{"old name here", "new name here", "[old] name here", "[new] name here"},
		{"nothing in common", "completely_other()", "nothing in common", "completely_other()"},
		{"", "", "", ""},
	} {
		a, b := (&comparer{}).compare(c.old, c.new)
		if text(a) != c.wantOld || text(b) != c.wantNew {
			t.Errorf("compare(%q, %q) = %q, %q, want %q, %q", c.old, c.new, text(a), text(b), c.wantOld, c.wantNew)
		}
	}
}

func lines(kinds string, texts ...string) []review.Line {
	var all []review.Line
	old, new := 1, 1
	for i, k := range []byte(kinds) {
		l := review.Line{Kind: k, Text: texts[i]}
		if k != '+' {
			l.Old = old
			old++
		}
		if k != '-' {
			l.New = new
			new++
		}
		if k != ' ' {
			l.Key = review.Key(texts[i])
		}
		all = append(all, l)
	}
	return all
}

// Side by side, each changed line is in exactly one row, beside the line that it replaces.
func TestSideBySide(t *testing.T) {
	p := &review.Patch{File: review.File{Path: "x.go"}, Hunks: []review.Hunk{{Lines: lines(" --+ +-", "same", "one", "two", "uno", "same", "added", "gone")}}}
	v := newView(p, nil)
	var got []string
	for _, r := range v.rows(true) {
		side := func(s *side) string {
			if s == nil {
				return "."
			}
			return s.line.Text
		}
		if !r.heading() {
			got = append(got, side(r.old)+"|"+side(r.new))
		}
	}
	if want := "same|same one|uno two|. same|same .|added gone|."; strings.Join(got, " ") != want {
		t.Errorf("rows = %q, want %q", strings.Join(got, " "), want)
	}
	for _, split := range []bool{false, true} {
		var keys []review.Key
		for _, r := range v.rows(split) {
			if !r.heading() {
				keys = append(keys, r.keys...)
			}
		}
		if len(keys) != 5 {
			t.Errorf("split %v: the rows choose %q, want each of five changes once", split, keys)
		}
	}
}

func colourerOf(t *testing.T, l chroma.Lexer) *colourer {
	t.Helper()
	return &colourer{ctx: t.Context(), lexer: chroma.Coalesce(l), until: time.Now().Add(time.Hour)}
}

// Colours change neither the text nor the rows.
func TestColoursKeepText(t *testing.T) {
	for _, file := range []string{"x.go", "x.py", "Makefile", "x.html", "x.ts"} {
		c := colourerOf(t, lexers().Match(file))
		p := &review.Patch{File: review.File{Path: file}, Hunks: []review.Hunk{{Lines: lines(" -+ ", "func f() { // \"x\"", "\treturn 1", "\treturn `2`", "}\r")}}}
		coloured, bare := newView(p, c).unified, newView(p, nil).unified
		if len(coloured) != len(bare) {
			t.Fatalf("%s: %d rows with colours, want %d", file, len(coloured), len(bare))
		}
		changed := false
		for i := range coloured {
			for _, s := range []*side{coloured[i].old, coloured[i].new} {
				if s == nil {
					continue
				}
				got := ""
				for _, sp := range s.spans {
					got += sp.text
				}
				if want := clean(s.line.Text); got != want {
					t.Errorf("%s: the line is %q, want %q", file, got, want)
				}
				changed = changed || len(s.spans) > 1
			}
		}
		if !changed {
			t.Errorf("%s: no line has a colour", file)
		}
	}
	if newColourer(t.Context(), "x.unknown") != nil {
		t.Error("colourer of an unknown language is not nil")
	}
}

// A file that would take long to colour or to compare stays plain.
func TestLimits(t *testing.T) {
	long := []string{strings.Repeat("(a+)+$ \"'`", maxColoured/8)}
	c := colourerOf(t, lexers().Get("ruby"))
	if got := c.colours(long); got != nil {
		t.Error("colours of a long text is not nil, want nil")
	}
	c = colourerOf(t, lexers().Get("ruby"))
	c.until = time.Now().Add(-time.Second)
	if got := c.colours([]string{"if x"}); got != nil {
		t.Error("colours after the time is not nil, want nil")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c = colourerOf(t, lexers().Get("ruby"))
	c.ctx = ctx
	if got := c.colours([]string{"if x"}); got != nil {
		t.Error("colours after a cancellation is not nil, want nil")
	}
	if newColourer(t.Context(), strings.Repeat("x", 1<<20)+".go") != nil {
		t.Error("colourer for a very long name is not nil, want nil")
	}
	words := &comparer{}
	a, b := strings.Repeat("x ", maxWords/2), strings.Repeat("x ", maxWords/2-1)+"y "
	for range maxCompared / (maxWords * maxWords) {
		words.compare(a, b)
	}
	if got, _ := words.compare(a, b); len(got) != 1 || got[0].changed {
		t.Errorf("compare after too many words = %v, want one unchanged piece", got)
	}
}

// A new file of very many lines is one hunk. Not all of it is drawn, and it can be chosen.
func TestManyLines(t *testing.T) {
	p := &review.Patch{File: review.File{Path: "x"}, Hunks: []review.Hunk{{Lines: make([]review.Line, maxRows+5)}, {}}}
	for i := range p.Hunks[0].Lines {
		p.Hunks[0].Lines[i] = review.Line{Kind: '+', Key: "k", New: i + 1}
	}
	v := newView(p, nil)
	if n := len(v.unified); n > maxRows+5 {
		t.Errorf("the view has %d rows, want at most %d", n, maxRows+5)
	}
	var texts []string
	for _, r := range v.unified {
		if r.heading() {
			texts = append(texts, r.text)
		}
	}
	want := []string{"@@ -0,0 +0,0 @@", "5 lines more not shown; they are chosen with the hunk", "1 hunk more not shown; the file can be chosen as a whole"}
	if diff := cmp.Diff(want, texts); diff != "" {
		t.Error(diff)
	}
	if n := len(v.unified[0].keys); n != maxRows+5 {
		t.Errorf("the hunk chooses %d lines, want all", n)
	}
}
