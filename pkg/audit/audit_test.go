package audit

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain turns this test binary into a process that writes records until it is killed,
// and prints the number of each.
func TestMain(m *testing.M) {
	path := os.Getenv("AUDIT_TEST_PATH")
	if path == "" {
		os.Exit(testenv.Run(m))
	}
	who := os.Args[1]
	for n := 0; ; n++ {
		err := (&Log{Path: path}).Write(context.Background(), Record{
			Type: TaskSubmitted, Actor: who, Resource: "task:" + strconv.Itoa(n), Outcome: Success,
			Details: map[string]any{"pad": []string{strings.Repeat("x", 900), strings.Repeat("y", 900), strings.Repeat("z", 900)}},
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(n)
	}
}

func newLog(t *testing.T) *Log {
	t.Helper()
	return &Log{Path: filepath.Join(t.TempDir(), "audit.jsonl")}
}

func all(t *testing.T, l *Log) []Record {
	t.Helper()
	var found []Record
	for r, err := range l.Records() {
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, r)
	}
	return found
}

func TestRecord(t *testing.T) {
	l := newLog(t)
	if got := all(t, l); len(got) != 0 {
		t.Errorf("records of a missing log = %v, want none", got)
	}
	id := traceid.New()
	ctx, cancel := context.WithCancel(traceid.With(t.Context(), id))
	cancel() // the action has happened, so it is recorded regardless
	before := time.Now().Truncate(time.Millisecond)
	err := l.Write(ctx, Record{
		Type: VMProvisioned, Actor: "user:me", Resource: "vm:agent-o-r-aaaa11", Outcome: OutcomeOf(errors.New("no")),
		Details: map[string]any{"session": "aaaa11112222", "seconds": 1.5, "count": uint64(1) << 60, "error": errors.New("no <disk>"), "secrets": []string{"A", "B"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(l.Path)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), `",`)
	want := `"type":"vm_provisioned","actor":"user:me","resource":"vm:agent-o-r-aaaa11","outcome":"failure","trace_id":"` + id +
		`","details":{"count":1152921504606846976,"error":"no <disk>","seconds":1.5,"secrets":["A","B"],"session":"aaaa11112222"}}` + "\n"
	if diff := cmp.Diff(want, rest); diff != "" {
		t.Errorf("line of the record mismatch (-want +got):\n%s", diff)
	}
	got := all(t, l)
	if len(got) != 1 {
		t.Fatalf("records = %+v, want 1", got)
	}
	if at := got[0].Time; at.Before(before) || time.Since(at) > time.Hour {
		t.Errorf("Time = %v, want one after %v", at, before)
	}
	if detail := got[0].Details["error"]; detail != "no <disk>" {
		t.Errorf("detail error = %v, want %q", detail, "no <disk>")
	}
	if st, err := os.Stat(l.Path); err != nil {
		t.Error(err)
	} else if mode := st.Mode().Perm(); mode != 0o600 {
		t.Errorf("mode of the log = %v, want %v", mode, os.FileMode(0o600))
	}
	for _, wrong := range []Record{
		{Type: "vm_moved", Outcome: Success},
		{Type: VMDestroyed},
		{Type: VMDestroyed, Outcome: "maybe"},
		{Type: VMDestroyed, Outcome: Success, Details: map[string]any{"f": func() {}}},
	} {
		if err := l.Write(t.Context(), wrong); err == nil {
			t.Errorf("Write(%+v) succeeded, want an error", wrong)
		}
	}
	if n := len(all(t, l)); n != 1 {
		t.Errorf("%d records after refused ones, want 1", n)
	}
}

// TestHostileDetails checks that any details become one bounded, harmless line without
// secrets.
func TestHostileDetails(t *testing.T) {
	const value = "tok-12345"
	l := newLog(t)
	l.Redact = secret.NewRedactor(secret.NewValue(value))
	hostile := "a\x1b[2J\r\n{\u202e\x00 " + value + " tok\x1b[0m-123\x0045 " + strings.Repeat("ü", 1<<20)
	deep := any(hostile)
	for range 50 {
		deep = map[string]any{"k": deep}
	}
	var many []string
	for range 5000 {
		many = append(many, hostile[:100])
	}
	for _, d := range []map[string]any{{"text": hostile, hostile: []any{hostile}}, {"deep": deep}, {"many": many}, {"big": make([]string, 1<<16)}} {
		if err := l.Write(t.Context(), Record{Type: ExecStarted, Actor: hostile, Resource: hostile, Outcome: Success, Details: d}); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(l.Path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	if len(lines) != 4 || len(all(t, l)) != 4 {
		t.Fatalf("%d lines, %d records, want 4 of each", len(lines), len(all(t, l)))
	}
	for _, line := range lines {
		if strings.Contains(line, value) || len(line) > maxRecord || !json.Valid([]byte(line)) {
			t.Errorf("line of %d bytes, %.300q, want JSON of at most %d bytes without the secret", len(line), line, maxRecord)
		}
		for _, r := range line {
			if r < ' ' || r == 0x7f || r == 0x202e {
				t.Fatalf("the log contains %q, want no control characters: %.300q", r, line)
			}
		}
	}
	if n := len(all(t, l)[2].Details["many"].([]any)); n != maxList+1 {
		t.Errorf("list of %d items, want %d", n, maxList+1)
	}
}

// TestDamagedLog checks that lines that are not records are skipped, and that a truncated
// record does not swallow the next one.
func TestDamagedLog(t *testing.T) {
	l := newLog(t)
	write := func(resource string) {
		t.Helper()
		if err := l.Write(t.Context(), Record{Type: TokenAdded, Actor: "user:me", Resource: resource, Outcome: Success}); err != nil {
			t.Fatal(err)
		}
	}
	add := func(text string) {
		t.Helper()
		f, err := os.OpenFile(l.Path, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	write("token:1")
	add("not JSON\n\n{}\n" + strings.Repeat("x", 3*maxRecord) + "\n[1]\n")
	write("token:2")
	add(`{"timestamp":"2026-01-01T00:00:00Z","type":"token_ad`)
	if n := len(all(t, l)); n != 2 {
		t.Errorf("%d records while one is being written, want 2", n)
	}
	write("token:3")
	var resources []string
	for _, r := range all(t, l) {
		resources = append(resources, r.Resource)
	}
	if got, want := strings.Join(resources, " "), "token:1 token:2 token:3"; got != want {
		t.Errorf("resources = %q, want %q", got, want)
	}
	text, err := os.ReadFile(l.Path)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "token_ad{") || strings.Contains(string(text), "token_ad\n") {
		t.Errorf("log = %.500q, want the truncated record on a line that is not read", text)
	}
}

// TestManyAtOnce writes from many goroutines of one process, and checks that each record is
// in the log exactly once when its Write returns.
func TestManyAtOnce(t *testing.T) {
	const writers, each = 20, 10
	l := newLog(t)
	var writing sync.WaitGroup
	for w := range writers {
		writing.Go(func() {
			for n := range each {
				name := fmt.Sprintf("task:%d-%d", w, n)
				if err := l.Write(t.Context(), Record{Type: TaskSubmitted, Actor: "test", Resource: name, Outcome: Success}); err != nil {
					t.Errorf("Write of %s: %v", name, err)
				}
				found := 0
				for r, err := range l.Records() {
					if err != nil {
						t.Errorf("read a record: %v", err)
					}
					if r.Resource == name {
						found++
					}
				}
				if found != 1 {
					t.Errorf("%d records of %s, want 1", found, name)
				}
			}
		})
	}
	writing.Wait()
	if n := len(all(t, l)); n != writers*each {
		t.Errorf("%d records, want %d", n, writers*each)
	}
}

// TestKilledWriters kills processes that write at the same time. It checks that every
// record whose Write returned is in the log, whole and in its writer's order.
func TestKilledWriters(t *testing.T) {
	l := newLog(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	told := map[string]int{}
	for round := range 6 {
		var writers sync.WaitGroup
		for w := range 3 {
			who := fmt.Sprintf("user:%d-%d", round, w)
			cmd := exec.CommandContext(t.Context(), self, who)
			cmd.Env = append(os.Environ(), "AUDIT_TEST_PATH="+l.Path)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			writers.Go(func() {
				n := 0
				lines := bufio.NewScanner(out)
				for lines.Scan() {
					if n++; n == 2+w {
						_ = cmd.Process.Kill() // the writer ends in no other way
					}
				}
				_ = cmd.Wait() // killed
				mu.Lock()
				defer mu.Unlock()
				told[who] = n
			})
		}
		writers.Wait()
	}
	if err := l.Write(t.Context(), Record{Type: TaskCompleted, Resource: "task:last", Outcome: Success}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(l.Path)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for line := range strings.Lines(string(text)) {
		var r Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("line %.200q: %v", line, err)
		}
		if r.Type == TaskSubmitted && r.Resource != "task:"+strconv.Itoa(found[r.Actor]) {
			t.Fatalf("record %s of %s, want %s", r.Resource, r.Actor, "task:"+strconv.Itoa(found[r.Actor]))
		}
		found[r.Actor]++
	}
	for who, n := range told {
		if n < 2 || found[who] < n || found[who] > n+1 { // one record may be in the log before its writer learned of it
			t.Errorf("%d records of %s, want %d or one more", found[who], who, n)
		}
	}
	if len(told) != 18 {
		t.Errorf("%d writers printed, want 18", len(told))
	}
}
