package recording

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTrack(t *testing.T) {
	s, rec := newStore(t)
	at := time.Unix(1_700_000_000, 250_000_000)
	rec.now = func() time.Time { return at }
	tr := rec.track(3)
	check(t, tr.draw(screen{Width: 80, Height: 24, CursorX: 2, CursorY: 1, Title: "claude\x1b[31m " + theSecret, Lines: [][]byte{[]byte("hello"), []byte("$ ")}}))
	at = at.Add(time.Second)
	check(t, tr.write([]byte("ls\r\nf\xc3")))
	check(t, tr.write([]byte("\xa9\r\n")))
	check(t, tr.resize(100, 30))
	check(t, rec.Close())
	r := one(t, s)
	if want := (Recording{ID: subject + "-3", Subject: subject, Title: "claude [redacted]", Began: time.Unix(1_700_000_000, 0).UTC(), Width: 80, Height: 24, Parts: 1}); r.Ended.IsZero() || r.Size == 0 ||
		!cmp.Equal(want, Recording{ID: r.ID, Subject: r.Subject, Title: r.Title, Began: r.Began, Width: r.Width, Height: r.Height, Parts: r.Parts}, cmp.AllowUnexported(Recording{})) {
		t.Errorf("recording = %+v, want %+v", r, want)
	}
	want := "\x1b[0m\x1b[H\x1b[2Jhello\r\n$ \x1b[0m\x1b[2;3Hls\r\nfé\r\n"
	if got := played(t, r); got != want {
		t.Errorf("played = %q, want %q", got, want)
	}
	var text strings.Builder
	check(t, r.WriteText(t.Context(), &text))
	if want := "hello\n$\nls\nfé\n"; text.String() != want {
		t.Errorf("text = %q, want %q", text.String(), want)
	}
	cast := contents(t, s)[r.parts[0].cast()]
	if !strings.Contains(cast, `[1.250, "r", "100x30"]`) {
		t.Errorf("recording = %s, want the new size", cast)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestRotation checks that the oldest parts are removed, that each part begins with the screen, and that what is
// held back is neither lost nor in two parts.
func TestRotation(t *testing.T) {
	s, rec := newStore(t)
	rec.Limit = 8 * minPart
	tr := rec.track(0)
	sc := screen{Width: 80, Height: 24, Title: "shell", Lines: [][]byte{[]byte("THE SCREEN")}}
	check(t, tr.draw(sc))
	for i := range 400 {
		check(t, tr.write([]byte(strings.Repeat(fmt.Sprintf("line %d\r\n", i), 400))))
		if tr.due() {
			check(t, tr.draw(sc))
		}
	}
	check(t, rec.Close())
	r := one(t, s)
	if r.Parts < 3 || r.Size > rec.Limit+2*minPart {
		t.Errorf("%d parts with %d bytes, want several within %d", r.Parts, r.Size, rec.Limit)
	}
	if r.parts[0].serial == 1 {
		t.Error("the oldest part is still there")
	}
	for _, p := range r.parts {
		if got := played(t, Recording{Began: r.Began, parts: []part{p}}); !strings.HasPrefix(got, "\x1b[0m\x1b[H\x1b[2JTHE SCREEN") {
			t.Errorf("part %d begins with %.40q, want the screen", p.serial, got)
		}
	}
	var text strings.Builder
	check(t, r.WriteText(t.Context(), &text))
	if strings.Contains(text.String(), "THE SCREEN") || !strings.HasSuffix(text.String(), "line 399\n") {
		t.Errorf("text ends with %.60q, want line 399, and no screen from the start of a part", text.String()[max(0, text.Len()-60):])
	}
}

func TestTrackDropsWhatItCannotTake(t *testing.T) {
	s, rec := newStore(t)
	rec.Limit = 1
	tr := rec.track(0)
	check(t, tr.draw(screen{Width: 80, Height: 24}))
	for range 1000 {
		check(t, tr.write([]byte(strings.Repeat("x", 4000))))
	}
	if r := one(t, s); r.Size > 3*minPart || !tr.due() {
		t.Errorf("size = %d, want at most %d until the next screen", r.Size, 3*minPart)
	}
}

func TestManySmallParts(t *testing.T) {
	s, rec := newStore(t)
	for i := range maxParts + 20 {
		tr := rec.track(i)
		check(t, tr.draw(screen{Width: 80, Height: 24}))
		check(t, tr.close())
		delete(rec.open, i)
	}
	all, err := s.List(subject)
	if err != nil || len(all) > maxParts {
		t.Errorf("%d recordings, %v, want at most %d", len(all), err, maxParts)
	}
}

// TestKilled checks that an incomplete last line is ignored, and that the next process continues the recording.
func TestKilled(t *testing.T) {
	s, rec := newStore(t)
	tr := rec.track(1)
	check(t, tr.draw(screen{Width: 80, Height: 24, Lines: [][]byte{[]byte("before")}}))
	f, err := os.OpenFile(tr.part.cast(), os.O_APPEND|os.O_WRONLY, 0)
	check(t, err)
	_, err = f.WriteString(`[9.000, "o", "half`)
	check(t, err)
	check(t, f.Close())

	next := &Recorder{Dir: rec.Dir, Limit: rec.Limit}
	check(t, next.track(1).draw(screen{Width: 100, Height: 24, Lines: [][]byte{[]byte("after")}}))
	check(t, next.Close())
	r := one(t, s)
	var shown strings.Builder
	resized := ""
	for e, err := range r.Events(t.Context()) {
		check(t, err)
		if shown.WriteString(e.Data); e.Kind == Resize {
			resized = e.Data
		}
	}
	if got := shown.String(); r.Parts != 2 || !strings.Contains(got, "before") || !strings.Contains(got, "after") || strings.Contains(got, "half") || resized != "100x24" {
		t.Errorf("%d parts show %q with the size %q, want what was before and after, and the size 100x24", r.Parts, got, resized)
	}
	// Killed before the header was complete.
	check(t, os.WriteFile(part{dir: rec.Dir, number: 1, serial: 3}.cast(), []byte(`{"version"`), 0o600))
	check(t, os.WriteFile(part{dir: rec.Dir, number: 7, serial: 1}.cast(), nil, 0o600))
	if r := one(t, s); r.Parts != 2 {
		t.Errorf("%d parts, want 2", r.Parts)
	}
}

func TestRemove(t *testing.T) {
	s, rec := newStore(t)
	at := time.Now()
	rec.now = func() time.Time { return at }
	tr := rec.track(1)
	check(t, tr.draw(screen{Width: 80, Height: 24}))
	check(t, rec.track(2).draw(screen{Width: 80, Height: 24}))
	if _, err := s.Remove(subject + "-1"); err != nil {
		t.Fatal(err)
	}
	if r := one(t, s); r.ID != subject+"-2" {
		t.Errorf("%s is left, want the other recording", r.ID)
	}
	at = at.Add(goneEvery)
	check(t, tr.write([]byte("x")))
	if !tr.due() {
		t.Error("the removed recording wants no next part")
	}
	check(t, tr.draw(screen{Width: 80, Height: 24}))
	if all, err := s.List(""); err != nil || len(all) != 2 {
		t.Errorf("List = %+v, %v, want a new part", all, err)
	}
	check(t, rec.Close())
	if _, err := s.Remove(subject); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(rec.Dir); !os.IsNotExist(err) {
		t.Errorf("directory: %v, want it removed", err)
	}
	for _, id := range []string{subject, subject + "-1", "../../etc-1", "", "x"} {
		if _, err := s.Remove(id); err == nil {
			t.Errorf("Remove(%q) = nil, want not found", id)
		}
	}
}

func TestExpired(t *testing.T) {
	s, rec := newStore(t)
	check(t, rec.track(1).draw(screen{Width: 80, Height: 24}))
	for _, c := range []struct {
		before time.Time
		want   int
	}{{time.Now().Add(-time.Hour), 0}, {time.Now().Add(time.Hour), 1}} {
		if got, err := s.Expired(c.before); err != nil || len(got) != c.want {
			t.Errorf("Expired(%v) = %v, %v, want %d", c.before, got, err, c.want)
		}
	}
	// A process was killed before it wrote the first part, or after it had removed the last one.
	const empty = "ffffffffffff"
	check(t, os.Mkdir(s.Subject(empty), 0o700))
	if got, err := s.Expired(time.Now().Add(time.Hour)); err != nil || len(got) != 2 {
		t.Errorf("Expired with an empty directory = %v, %v, want both", got, err)
	}
	if _, err := s.Remove(empty); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(s.Subject(empty)); err == nil {
		t.Error("the empty directory is still there")
	}
}

func TestLog(t *testing.T) {
	s, rec := newStore(t)
	rec.Limit = 4 * minPart
	l := NewLog(rec, 0, "agent")
	var want strings.Builder
	for i := range 3000 {
		fmt.Fprintf(l, "%d %s\n", i, strings.Repeat("y", 100))
		fmt.Fprintf(&want, "%d %s\n", i, strings.Repeat("y", 100))
	}
	check(t, l.Close())
	r := one(t, s)
	if got := strings.ReplaceAll(played(t, r), "\r\n", "\n"); !strings.HasSuffix(want.String(), got) || len(got) < minPart/2 {
		t.Errorf("the log of %d bytes shows %d, ending with %.40q", want.Len(), len(got), got[max(0, len(got)-40):])
	}
}
