package review

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzApply compares two texts with git. With all changes the old text must become the new one, and without any
// it must stay; with some of them, the lines that did not change must stay.
func FuzzApply(f *testing.F) {
	f.Add("a\nb\nc\n", "a\nB\nc\nd", uint64(1))
	f.Add("", "a\n\n\r\n", uint64(2))
	f.Add("no end", "no end\n", uint64(0))
	f.Add("-- a\n++ b\n@@ -1 +1 @@\n\\ x\n", "++ b\n\\ x\n-- a\n", uint64(5))
	f.Add(strings.Repeat("same\n", 30), "first\n"+strings.Repeat("same\n", 28)+"last\n", uint64(3))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, before, after string, some uint64) {
		if max(len(before), len(after)) > maxShown || strings.ContainsRune(before+after, 0) {
			return
		}
		for name, text := range map[string]string{"before": before, "after": after} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.CommandContext(t.Context(), "git", "diff", "--no-index", "--no-color", "--no-ext-diff", "--text", "-U3", "before", "after")
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_NOSYSTEM=1")
		out, err := cmd.Output()
		if err == nil {
			return // equal
		}
		_, diff, found := strings.Cut(string(out), "\n@@ ")
		if !found {
			return // one of them is empty, or git has failed
		}
		hunks, err := parseHunks("@@ " + diff)
		if err != nil {
			t.Fatal(err)
		}
		p := &Patch{Hunks: hunks}
		p.number()
		if got := p.apply(before, func(Key) bool { return true }); got != after {
			t.Errorf("with all changes = %q, want %q", got, after)
		}
		if got := p.apply(before, func(Key) bool { return false }); got != before {
			t.Errorf("without changes = %q, want %q", got, before)
		}
		n := 0
		got := splitLines(p.apply(before, func(Key) bool { n++; return some>>(n%64)&1 == 1 }))
		for _, h := range hunks {
			for _, l := range h.Lines {
				if l.Kind != ' ' {
					continue
				}
				for len(got) > 0 && got[0].text != l.Text {
					got = got[1:]
				}
				if len(got) == 0 {
					t.Fatalf("with some changes, the line %q is missing", l.Text)
				}
				got = got[1:]
			}
		}
	})
}
