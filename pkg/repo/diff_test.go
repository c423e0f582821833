package repo

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func (s session) diff(t *testing.T, opts DiffOptions) string {
	t.Helper()
	var out bytes.Buffer
	if err := Diff(t.Context(), s.g, s.g.dir(), s.base, opts, &out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestDiffShowsEverything(t *testing.T) {
	s := start(t)
	s.agent(t, `git mv c moved && git commit -qm move && echo staged >>a && git add a && echo unstaged >>a && printf 'n\0w' >bin && printf 'tab\there\r\n' >new
		echo '*.log' >.gitignore && echo x >x.log && mkdir inner && git -C inner init -q && printf x >"$(printf 'e\033[31mvil')" && echo x >./-dash`)
	before := s.agent(t, "git status --short && sha256sum .git/index && find .git/objects -type f | sort")
	equal(t, "names", s.diff(t, DiffOptions{NameOnly: true}), "-dash\n.gitignore\na\nbin\n\"e\\033[31mvil\"\nmoved\nnew\n")
	full := s.diff(t, DiffOptions{})
	for _, want := range []string{"rename from c\nrename to moved", "+staged\n+unstaged\n", "Binary files /dev/null and b/bin differ", "+tab\there^M\n"} {
		if !strings.Contains(full, want) {
			t.Errorf("Diff = %s, want %q in it", full, want)
		}
	}
	if stat := s.diff(t, DiffOptions{Stat: true}); !strings.Contains(stat, "7 files changed") {
		t.Errorf("Diff with Stat = %q, want \"7 files changed\"", stat)
	}
	equal(t, "the agent's index", s.agent(t, "git status --short && sha256sum .git/index && find .git/objects -type f | sort"), before)

	var out bytes.Buffer
	if err := Diff(t.Context(), s.g, s.g.dir(), s.base, DiffOptions{MaxBytes: 100}, &out); fail.CodeOf(err) != fail.Conflict || out.Len() > 200 {
		t.Errorf("Diff over MaxBytes = %v, %d bytes, want code %v, at most 200 bytes", err, out.Len(), fail.Conflict)
	}
	bad := s.base
	bad.Commit = "--output=/tmp/x"
	if err := Diff(t.Context(), s.g, s.g.dir(), bad, DiffOptions{}, &out); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Diff from an option as the commit = %v, want code %v", err, fail.Usage)
	}
}

func TestDiffRunsNoProgramsOfTheGuestForText(t *testing.T) {
	s := start(t)
	s.agent(t, `echo '* diff=evil' >.gitattributes && git config diff.evil.textconv 'printf "\033]0;owned\007"' && git config diff.external 'echo external' && git config color.ui always
		printf 'x\033[2J\033]52;c;aGk=\007\302\233\357\273\277\342\200\256\377\n' >>a`)
	out := s.diff(t, DiffOptions{})
	if !strings.Contains(out, `+x^[[2J^[]52;c;aGk=^G<U+009B><U+FEFF><U+202E>\xff`+"\n") {
		t.Errorf("Diff = %q, want the control bytes of x in visible form", out)
	}
	if strings.ContainsAny(out, "\x1b\x07\u009b\u202e") || strings.Contains(out, "external") {
		t.Errorf("Diff = %q, want no control bytes, no output of an external program", out)
	}
}

func TestPrinter(t *testing.T) {
	in := "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@ f\n same\n--- gone\n+++ come\n \n\\ No newline\n--- a/y\n" +
		"\x1b[31m\x9b\u009b日本\u200b\u202e\r\n+" + strings.Repeat("é", 300)
	want := "\x1b[1mdiff --git a/x b/x\x1b[m\n\x1b[1m--- a/x\x1b[m\n\x1b[1m+++ b/x\x1b[m\n\x1b[36m@@ -1,3 +1,3 @@ f\x1b[m\n same\n\x1b[31m--- gone\x1b[m\n\x1b[32m+++ come\x1b[m\n \n\\ No newline\n" +
		"\x1b[1m--- a/y\x1b[m\n\x1b[1m^[[31m\\x9b<U+009B>日本<U+200B><U+202E>^M\x1b[m\n\x1b[1m+" + strings.Repeat("é", 300) + "\x1b[m"
	for _, size := range []int{1, 2, 3, 7, 10000} {
		var out bytes.Buffer
		p := newPrinter(&out, true)
		for rest := []byte(in); len(rest) > 0; {
			n := min(size, len(rest))
			if _, err := p.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if err := p.close(); err != nil {
			t.Fatal(err)
		}
		// The second header is within the hunk's line count, so the count decides
		// its colour.
		if got := out.String(); got != strings.Replace(want, "\x1b[1m--- a/y", "\x1b[31m--- a/y", 1) && got != want {
			t.Errorf("output in chunks of %d = %q, want %q", size, got, want)
		}
	}
}

func FuzzPrinter(f *testing.F) {
	f.Add([]byte("@@ -1 +1 @@\n-a\n+b\x1b[31m\xc2"), true)
	f.Fuzz(func(t *testing.T, in []byte, color bool) {
		var out bytes.Buffer
		p := newPrinter(&out, color)
		_, err := p.Write(in)
		if err := p.close(); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		text := out.String()
		for _, ours := range []string{"\x1b[m", "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[36m"} {
			if color {
				text = strings.ReplaceAll(text, ours, "")
			}
		}
		for _, r := range text {
			if r != '\n' && r != '\t' && (r < 0x20 || r >= 0x7f && r < 0xa0) {
				t.Fatalf("printed text = %q, want no control byte %U", text, r)
			}
		}
	})
}

func TestCompare(t *testing.T) {
	s := start(t)
	s.agent(t, `git mv c moved && git commit -qm move && echo more >>a && printf 'n\0w' >bin
		echo x >"$(printf 'e\033[31m\nvil')" && ln -s a link`)
	c, err := Compare(t.Context(), s.g, s.g.dir(), s.base, DiffOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]Change{}
	for _, f := range c.Files {
		got[f.Path] = f
	}
	for _, want := range []Change{
		{Path: "a", Status: "modified", Added: 1},
		{Path: "bin", Status: "added", Binary: true},
		{Path: "moved", From: "c", Status: "renamed"},
		{Path: "e^[[31m\nvil", Status: "added", Added: 1},
		{Path: "link", Status: "added", Added: 1},
	} {
		if diff := cmp.Diff(want, got[want.Path]); diff != "" {
			t.Errorf("change of %s mismatch (-want +got):\n%s", want.Path, diff)
		}
	}
	equal(t, "patch", c.Patch, s.diff(t, DiffOptions{}))
	equal(t, "base", c.Base, s.base.Commit)
	if _, err := Compare(t.Context(), s.g, s.g.dir(), s.base, DiffOptions{MaxBytes: 100}); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Compare over MaxBytes = %v, want code %v", err, fail.Conflict)
	}
}

func FuzzChanges(f *testing.F) {
	f.Add(":100644 100644 a b M\x00a\x00:100644 100644 a b R100\x00c\x00d\x001\t2\ta\x000\t0\t\x00c\x00d\x00\x00diff --git a/a b/a\n")
	f.Add("")
	f.Add(":A\x00-\x00")
	f.Fuzz(func(t *testing.T, out string) {
		c, err := parseChanges(out)
		if err != nil {
			return
		}
		for _, file := range c.Files {
			if strings.ContainsAny(file.Path+file.From, "\x00\x1b\u009b") || file.Status == "" || file.Added < 0 || file.Deleted < 0 {
				t.Errorf("changed file = %+v, want a status, counts from 0, no control bytes", file)
			}
		}
		if strings.ContainsAny(c.Patch, "\x00\x1b\u009b") {
			t.Errorf("patch = %q, want no control bytes", c.Patch)
		}
	})
}

// A guest that sends without end is cut off once the memory bound is reached.
func TestCompareIsBounded(t *testing.T) {
	sent := 0
	l := &liar{answer: map[string]func(io.Writer){diffScript: func(w io.Writer) {
		_, _ = io.WriteString(w, ":100644 100644 a b M\x00a\x001\t1\ta\x00\x00")
		for line := []byte(strings.Repeat("+\u200b", 4096) + "\n"); ; {
			n, err := w.Write(line)
			if sent += n; err != nil {
				return
			}
		}
	}}}
	_, err := Compare(t.Context(), l, "/home/agent/repo", Base{}, DiffOptions{})
	if fail.CodeOf(err) != fail.Conflict || !strings.Contains(err.Error(), "larger than 16777216 bytes") || sent > maxChanges {
		t.Errorf("Compare of an endless answer = %v after %d bytes, want code %v within %d bytes", err, sent, fail.Conflict, maxChanges)
	}
}
