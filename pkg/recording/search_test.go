package recording

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

func TestSearch(t *testing.T) {
	s, rec := newStore(t)
	at := time.Unix(1_700_000_000, 0)
	rec.now = func() time.Time { return at }
	tr := rec.track(1)
	check(t, tr.draw(screen{Width: 80, Height: 24, Title: "claude"}))
	for i, line := range []string{"go test ./...", "FAIL: TestX 1500", "ok", "Fail again", strings.Repeat("long ", 300) + "needle" + strings.Repeat(" more", 300)} {
		at = time.Unix(1_700_000_000+int64(i)+1, 500_000_000)
		check(t, tr.write([]byte(line+"\r\n")))
	}
	other := &Recorder{Dir: s.Subject("ba9876543210"), Limit: 64 << 20, now: rec.now}
	fmt.Fprintln(NewLog(other, 0, "agent"), "FAIL elsewhere")
	check(t, os.Chtimes(tr.part.cast(), at, at)) // earlier than the other
	for _, c := range []struct {
		q    Query
		want string
	}{
		{Query{Text: "FAIL"}, "5.5 FAIL elsewhere|2.5 FAIL: TestX 1500"},
		{Query{Text: "fail", IgnoreCase: true, Subject: subject}, "4.5 Fail again|2.5 FAIL: TestX 1500"},
		{Query{Text: "FAIL", Limit: 1}, "5.5 FAIL elsewhere"},
		{Query{Text: "1500"}, "2.5 FAIL: TestX 1500"}, // also the digits of a time
		{Query{Text: "absent"}, ""},
		{Query{Text: "ok"}, "3.5 ok"},
	} {
		if c.q.Limit == 0 {
			c.q.Limit = 100
		}
		got, more, err := s.Search(t.Context(), c.q)
		var lines []string
		for _, m := range got {
			seconds := m.Seconds
			if m.Subject != subject {
				seconds = m.Time.Sub(time.Unix(1_700_000_000, 0)).Seconds()
			}
			lines = append(lines, fmt.Sprintf("%.1f %s", seconds, m.Line))
		}
		if text := strings.Join(lines, "|"); err != nil || text != c.want || more != (c.q.Limit == 1) {
			t.Errorf("Search(%+v) = %q, %t, %v, want %q", c.q, text, more, err, c.want)
		}
	}
	got, _, err := s.Search(t.Context(), Query{Text: "needle", Limit: 10})
	if err != nil || len(got) != 1 || len(got[0].Line) > maxShown+10 || !strings.Contains(got[0].Line, "needle") || got[0].Title != "claude" || got[0].Recording != subject+"-1" {
		t.Errorf("Search = %+v, %v, want the part of the line around the match", got, err)
	}
	for _, text := range []string{"", "a\nb", "a\tb", strings.Repeat("x", MaxQuery+1)} {
		if _, _, err := s.Search(t.Context(), Query{Text: text, Limit: 1}); err == nil {
			t.Errorf("Search(%.10q) = nil, want an error", text)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := s.Search(ctx, Query{Text: "x", Limit: 1}); err == nil {
		t.Error("a cancelled search reports no error")
	}
}

// TestSearchBlocks checks that lines at the ends of blocks are found once.
func TestSearchBlocks(t *testing.T) {
	s, rec := newStore(t)
	check(t, rec.track(0).draw(screen{Width: 80, Height: 24}))
	var text strings.Builder
	for i := range 100_000 {
		fmt.Fprintf(&text, "%d\tline %d of %s\n", i, i, "text")
	}
	text.WriteString("7\ttorn line")
	check(t, os.WriteFile(rec.track(0).part.text(), []byte(text.String()), 0o600))
	for _, c := range []struct {
		text string
		want int
	}{{"line 77777 of", 1}, {"of text", 1000}, {"7\u00e4", 0}, {"torn line", 0}} {
		got, _, err := s.Search(t.Context(), Query{Text: c.text, Limit: MaxMatches})
		if err != nil || len(got) != c.want {
			t.Errorf("Search(%q) = %d matches, %v, want %d", c.text, len(got), err, c.want)
		}
	}
	got, more, err := s.Search(t.Context(), Query{Text: "of text", Limit: 10})
	if err != nil || len(got) != 10 || !more || !strings.HasPrefix(got[0].Line, "line 99999") {
		t.Errorf("Search = %+v, %t, %v, want the last lines", got, more, err)
	}
	check(t, os.WriteFile(rec.track(0).part.text(), []byte(strings.Repeat("x", 3*searchBlock)+"\n1\tneedle\n"), 0o600))
	if got, _, err := s.Search(t.Context(), Query{Text: "needle", Limit: 10}); err != nil || len(got) != 1 {
		t.Errorf("Search = %+v, %v, want the line behind one that is too long", got, err)
	}
}

// FuzzIndex compares the scanner's index with that of package bytes.
func FuzzIndex(f *testing.F) {
	f.Add("the needle in the hay", "needle")
	f.Add(strings.Repeat("aaaab", 100)+"aaaaac", "aaaaac")
	f.Add("ab", "abc")
	f.Fuzz(func(t *testing.T, text, needle string) {
		if needle == "" {
			t.Skip()
		}
		s := scanner{needle: []byte(needle), rare: rarest([]byte(needle))}
		if got, want := s.index([]byte(text)), strings.Index(text, needle); got != want {
			t.Errorf("index of %q in %q = %d, want %d", needle, text, got, want)
		}
	})
}
