package audit

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func token(resource string, details map[string]any) Record {
	return Record{Type: TokenAdded, Actor: "user:me", Resource: resource, Outcome: Success, Details: details}
}

// TestFailedAppend checks that a record that cannot be written is an error for its writer,
// and for all writers of the same batch.
func TestFailedAppend(t *testing.T) {
	l := newLog(t)
	if err := l.Write(t.Context(), token("token:1", nil)); err != nil {
		t.Fatal(err)
	}
	busy, err := os.OpenFile(l.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	if err := unix.Flock(int(busy.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	const writers = 4
	errs := make(chan error, writers)
	write := func() { errs <- l.Write(t.Context(), token("token:2", nil)) }
	wait := func(lines int) {
		t.Helper()
		for {
			l.mu.Lock()
			n := 0
			if l.next != nil {
				n = strings.Count(string(l.next.lines), "\n")
			}
			taken := l.next == nil && !l.turn.TryLock()
			if l.next == nil && !taken {
				l.turn.Unlock()
			}
			l.mu.Unlock()
			if lines == 0 && taken || lines > 0 && n == lines {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
	go write() // waits for the file lock
	wait(0)
	for range writers - 1 {
		go write() // one waits for its turn, the others wait for that one
	}
	wait(writers - 1)
	if err := os.Rename(l.Path, l.Path+".aside"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(l.Path, 0o700); err != nil {
		t.Fatal(err)
	}
	for range writers {
		if err := <-errs; fail.CodeOf(err) != fail.Host || !strings.Contains(err.Error(), "write the audit log") {
			t.Errorf("Write: error %v with code %v, want code %v with %q", err, fail.CodeOf(err), fail.Host, "write the audit log")
		}
	}
}

func TestOutcomeOf(t *testing.T) {
	if got := OutcomeOf(nil); got != Success {
		t.Errorf("OutcomeOf(nil) = %s, want %s", got, Success)
	}
	if got := OutcomeOf(errors.New("x")); got != Failure {
		t.Errorf("OutcomeOf of an error = %s, want %s", got, Failure)
	}
}

// TestBoundsOfDetails checks that details are kept up to their bounds, and that the
// caller's map does not change.
func TestBoundsOfDetails(t *testing.T) {
	l := newLog(t)
	errOwn := errors.New("own")
	given := map[string]any{"error": errOwn}
	if err := l.Write(t.Context(), token("token:1", given)); err != nil {
		t.Fatal(err)
	}
	if got, ok := given["error"].(error); !ok || !errors.Is(got, errOwn) {
		t.Errorf("the caller's details after Write = %v, want the error %v unchanged", given, errOwn)
	}

	// A text at maxDepth is the deepest that is kept, in maps and in lists.
	deep := func(levels int) (d map[string]any) {
		v := any("text")
		for i := range levels - 1 {
			if i%2 == 0 {
				v = []any{v}
			} else {
				v = map[string]any{"k": v}
			}
		}
		return map[string]any{"k": v}
	}
	for levels, want := range map[int]string{1: "text", maxDepth: "text", maxDepth + 1: "…"} {
		got, err := l.details(deep(levels))
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		if other := strings.NewReplacer("text", "…", "…", "text").Replace(want); !strings.Contains(string(b), want) || strings.Contains(string(b), other) {
			t.Errorf("details of %d levels = %s, want %q and no %q in it", levels, b, want, other)
		}
	}

	// Lists and details are kept at exactly their limit and truncated above it.
	for n, want := range map[int]int{maxList: maxList, maxList + 1: maxList + 1, maxList + 2: maxList + 1} {
		got, err := l.details(map[string]any{"list": make([]int, n)})
		if err != nil {
			t.Fatal(err)
		}
		if items := len(got["list"].([]any)); items != want {
			t.Errorf("list of %d items became %d items, want %d", n, items, want)
		}
	}
	fill := func(size int) map[string]any {
		var all []string
		size -= len(`{"k":[]}` + "\n")
		for size > 0 {
			n := min(size, maxText)
			if rest := size - n; rest > 0 && rest < 4 {
				n -= 4
			}
			all = append(all, strings.Repeat("x", n-len(`"",`)))
			size -= n
		}
		all[len(all)-1] += "x" // no comma follows the last one
		return map[string]any{"k": all}
	}
	for size, want := range map[int]bool{maxDetails: false, maxDetails + 1: true} {
		line, err := encode(fill(size))
		if err != nil || len(line) != size {
			t.Fatalf("details made for the test have %d bytes, %v, want %d", len(line), err, size)
		}
		if got, err := l.details(fill(size)); err != nil || (got["truncated"] == true) != want {
			t.Errorf("details of %d bytes: truncated %v, %v, want %t", size, got["truncated"], err, want)
		}
	}
}

// TestRecordsOfSeveralFiles checks that rotated files are read first, and that a reader may
// stop after any record.
func TestRecordsOfSeveralFiles(t *testing.T) {
	l := newLog(t)
	for _, resource := range []string{"token:1", "token:2"} {
		if err := l.Write(t.Context(), token(resource, nil)); err != nil {
			t.Fatal(err)
		}
		if resource == "token:1" {
			if err := os.Rename(l.Path, l.Path+".20200101T000000.000Z"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := all(t, l); len(got) != 2 || got[0].Resource != "token:1" || got[1].Resource != "token:2" {
		t.Errorf("records = %+v, want token:1, then token:2", got)
	}
	for r := range l.Records() {
		if r.Resource != "token:1" {
			t.Errorf("first record = %+v, want token:1", r)
		}
		break
	}
	if err := os.Mkdir(l.Path+".20210101T000000.000Z", 0o700); err != nil {
		t.Fatal(err)
	}
	var failed error
	for _, err := range l.Records() {
		failed = err
	}
	if fail.CodeOf(failed) != fail.Host || !strings.Contains(failed.Error(), "read the audit log") {
		t.Errorf("Records with an unreadable file: error %v, want code %v with %q", failed, fail.Host, "read the audit log")
	}
}

// TestTailOfALongLine checks that the end of an overlong line is not taken for a record,
// even if it looks like one.
func TestTailOfALongLine(t *testing.T) {
	l := newLog(t)
	if err := l.Write(t.Context(), token("token:1", nil)); err != nil {
		t.Fatal(err)
	}
	record, err := os.ReadFile(l.Path)
	if err != nil {
		t.Fatal(err)
	}
	tail := strings.TrimSuffix(string(record), "\n")
	tail += strings.Repeat(" ", maxRecord-1-len(tail)) + "\n"
	if err := os.WriteFile(l.Path, []byte(strings.Repeat("x", maxRecord)+tail+string(record)), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := all(t, l); len(got) != 1 {
		t.Errorf("%d records after a long line, want 1", len(got))
	}
}

// TestRetention checks that rotated files are removed when they are older than the
// retention, and kept when there is none.
func TestRetention(t *testing.T) {
	for retention, want := range map[time.Duration]int{0: 4, 24 * time.Hour: 3} {
		l := newLog(t)
		l.Retention = retention
		now := time.Now().UTC()
		for _, ended := range []time.Time{now.Add(-25 * time.Hour), now.Add(-23 * time.Hour)} {
			if err := os.WriteFile(l.Path+"."+ended.Format("20060102T150405.000Z"), []byte("{}\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		full := strings.Repeat(strings.Repeat("x", 1023)+"\n", maxFile>>10)
		if err := os.WriteFile(l.Path, []byte(full), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := l.Write(t.Context(), token("token:1", nil)); err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(l.Path + "*")
		if err != nil || len(files) != want {
			t.Errorf("retention %s: files %q, %v, want %d", retention, files, err, want)
		}
	}
}
