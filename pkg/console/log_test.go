package console

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

const (
	traceID  = "4bf92f3577b34da6a3ce929d0e0e4736"
	password = "tok-12345"
)

// logTo returns a log that knows one secret, and the buffer it writes to.
func logTo(format Format, level slog.Level) (*slog.Logger, *bytes.Buffer) {
	var to bytes.Buffer
	return New(io.Discard, io.Discard, env()).Logger(Log{Level: level, Format: format, To: &to, Redact: secret.NewRedactor(secret.NewValue(password))}), &to
}

// members returns the keys of a JSON object in order, and the object.
func members(t *testing.T, line string) (keys []string, object map[string]any) {
	t.Helper()
	if err := json.Unmarshal([]byte(line), &object); err != nil {
		t.Fatalf("log line %s: %v", line, err)
	}
	d := json.NewDecoder(strings.NewReader(line))
	_, err := d.Token()
	for err == nil && d.More() {
		var key json.Token
		var value json.RawMessage
		if key, err = d.Token(); err == nil {
			keys = append(keys, key.(string))
			err = d.Decode(&value)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return keys, object
}

func TestJSONLog(t *testing.T) {
	log, out := logTo(FormatJSON, slog.LevelInfo)
	ctx := traceid.With(t.Context(), traceID)
	log.DebugContext(ctx, "not shown")
	log.With("pid", 7, "session", "aaaa11112222").InfoContext(ctx, "task state transition", "from", "STAGING", "task_id", "bbbb11112222", "in", 1500*time.Millisecond)
	if n := strings.Count(out.String(), "\n"); n != 1 || !strings.HasSuffix(out.String(), "\n") {
		t.Fatalf("log = %q, want one line", out)
	}
	keys, got := members(t, out.String())
	if diff := cmp.Diff([]string{"timestamp", "level", "trace_id", "task_id", "session", "message", "pid", "from", "in"}, keys); diff != "" {
		t.Errorf("keys mismatch (-want +got):\n%s", diff)
	}
	at, err := time.Parse("2006-01-02T15:04:05.000Z", got["timestamp"].(string))
	if err != nil || time.Since(at) > time.Hour || time.Since(at) < -time.Hour {
		t.Errorf("timestamp = %v, %v, want the current time", got["timestamp"], err)
	}
	delete(got, "timestamp")
	want := map[string]any{
		"level": "info", "trace_id": traceID, "task_id": "bbbb11112222", "session": "aaaa11112222",
		"message": "task state transition", "pid": 7.0, "from": "STAGING", "in": "1.5s",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("record mismatch (-want +got):\n%s", diff)
	}
}

// panics is an error whose Error method panics.
type panics struct{}

func (*panics) Error() string { panic("no such thing") }

func TestLogValues(t *testing.T) {
	log, out := logTo(FormatJSON, LevelTrace)
	log.Log(t.Context(), LevelTrace, "m",
		"error", fmt.Errorf("wrapped: %w", errors.New("cause")),
		"list", []string{"a", "b\x1b[31m"},
		"nested", map[string]any{"k\x07": []any{1, "x\ny"}},
		"big", uint64(math.MaxUint64), "nan", math.NaN(), "none", nil, "bytes", []byte("ab\x00c"),
		"at", time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.FixedZone("x", 3600)),
		"func", func() {}, "panics", (*panics)(nil), "token", secret.NewValue("other-value"),
		slog.Group("g", "a", 1, slog.Group("h", "b", 2)), slog.Group("", "inline", true), slog.Attr{},
		"Camel-Case", 1, "message", "mine", "twice", 1, "twice", 2, strings.Repeat("k", 200), 1,
	)
	_, got := members(t, out.String())
	delete(got, "timestamp")
	if f, ok := got["func"].(string); !ok || f == "" {
		t.Errorf("value of func = %v, want some text", got["func"])
	}
	delete(got, "func")
	if !strings.Contains(fmt.Sprint(got["panics"]), "!PANIC") {
		t.Errorf("value of panics = %v, want %q in it", got["panics"], "!PANIC")
	}
	delete(got, "panics")
	want := `map[at:2026-01-02T02:04:05.006Z big:1.8446744073709552e+19 bytes:abc camel_case:1 error:wrapped: cause ` +
		`g.a:1 g.h.b:2 inline:true ` + strings.Repeat("k", maxLogKey) + `:1 level:trace list:[a b] message:m message_:mine nan:NaN nested:map[k:[1 x y]] none:<nil> token:[redacted] twice:2]`
	if diff := cmp.Diff(want, fmt.Sprint(got)); diff != "" {
		t.Errorf("record mismatch (-want +got):\n%s", diff)
	}
}

func TestLogLevels(t *testing.T) {
	for _, name := range []string{"trace", "debug", "info", "warn", "error"} {
		level, ok := ParseLevel(name)
		if !ok || levelName(level) != name {
			t.Errorf("ParseLevel(%q) = %v, %v, which is called %q, want the same name", name, level, ok, levelName(level))
		}
		for _, format := range []Format{FormatJSON, FormatPretty, FormatCompact} {
			log, out := logTo(format, level)
			log.Log(t.Context(), level-1, "below")
			log.Log(t.Context(), level, "at")
			log.Log(t.Context(), level+1, "above")
			if s := out.String(); strings.Contains(s, "below") || strings.Count(s, "\n") != 2 {
				t.Errorf("log at level %s in format %s = %q, want the records at and above the level", name, format, s)
			}
		}
	}
	if level, ok := ParseLevel("loud"); ok {
		t.Errorf("ParseLevel(%q) = %v, want none", "loud", level)
	}
	for level, want := range map[slog.Level]string{-100: "trace", 100: "error"} {
		if got := levelName(level); got != want {
			t.Errorf("levelName(%d) = %q, want %q", int(level), got, want)
		}
	}
}

func TestTextLog(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.Local)
	for format, want := range map[Format]string{
		FormatPretty:  `2026-01-02 03:04:05.006 warn  watch guest error="a b" n=1 list=["x"] empty="" trace_id=` + traceID,
		FormatCompact: `03:04:05 w watch guest error="a b" n=1 list=["x"] empty=""`,
	} {
		log, out := logTo(format, slog.LevelInfo)
		r := slog.NewRecord(at, slog.LevelWarn, "watch guest", 0)
		r.Add("error", errors.New("a b"), "n", 1, "list", []string{"x"}, "empty", "")
		if err := log.Handler().Handle(traceid.With(t.Context(), traceID), r); err != nil {
			t.Fatal(err)
		}
		if got := out.String(); got != want+"\n" {
			t.Errorf("record in format %s = %q, want %q", format, got, want+"\n")
		}
	}
	var conv bytes.Buffer
	New(io.Discard, &conv, env("FORCE_COLOR=1")).Logger(Log{}).Error("red")
	if s := conv.String(); !strings.Contains(s, "\x1b[31merror\x1b[m red\n") {
		t.Errorf("record with FORCE_COLOR=1 = %q, want %q in it", s, "\x1b[31merror\x1b[m red\n")
	}
}

// TestHostileLog checks that a guest's text in any position produces one bounded line
// without control characters and secrets.
func TestHostileLog(t *testing.T) {
	hostile := "a\x1b[2J\r\n{\"level\":\"error\"}\u202e\u009b31m\x00 " + password + " tok\x1b[0m-123\x0045 " + strings.Repeat("ü", 1<<20)
	many := make([]any, 0, 2000)
	for i := range 1000 {
		many = append(many, fmt.Sprintf("k%d", i), strings.Repeat("x", 5000))
	}
	for _, format := range []Format{FormatJSON, FormatPretty, FormatCompact} {
		log, out := logTo(format, slog.LevelInfo)
		log.With("with", hostile, password, 1).WithGroup(password).Info(hostile, "text", hostile, "error", errors.New(hostile), "bytes", []byte(hostile),
			"list", []any{hostile, map[string]string{hostile: hostile}}, slog.Group(hostile, "key", 1), hostile, 1)
		log.Info("many", many...)
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		if len(lines) != 2 {
			t.Fatalf("%s: two records became %d lines, want 2", format, len(lines))
		}
		for _, line := range lines {
			if len(line) > maxLogRecord+maxLogText {
				t.Errorf("%s: record of %d bytes, want at most %d", format, len(line), maxLogRecord+maxLogText)
			}
			if strings.Contains(line, password) {
				t.Errorf("%s: record %.300q, want it without the secret", format, line)
			}
			for _, r := range line {
				if r < ' ' || r >= 0x7f && r < 0xa0 || r == 0x202e {
					t.Fatalf("%s: the record contains %q, want no control characters: %.300q", format, r, line)
				}
			}
			if format == FormatJSON {
				members(t, line)
			}
		}
	}
}

// TestLaterSecret checks that a secret that becomes known later is also hidden in
// attributes that the log received before.
func TestLaterSecret(t *testing.T) {
	var out bytes.Buffer
	r := secret.NewRedactor()
	log := New(io.Discard, io.Discard, env()).Logger(Log{Format: FormatJSON, To: &out, Redact: r}).With("given", "later-secret")
	r.Add(secret.NewValue("later-secret"))
	log.Info("now")
	if got := out.String(); strings.Contains(got, "later-secret") || !strings.Contains(got, "[redacted]") {
		t.Errorf("log = %q, want the secret redacted", got)
	}
}

func TestLogFromManyGoroutines(t *testing.T) {
	log, out := logTo(FormatJSON, slog.LevelInfo)
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			with := log.With("g", g)
			for n := range 200 {
				with.InfoContext(context.Background(), "record", "n", n)
			}
		})
	}
	all.Wait()
	seen := map[string]bool{}
	for line := range strings.Lines(out.String()) {
		_, o := members(t, line)
		seen[fmt.Sprint(o["g"], " ", o["n"])] = true
	}
	if len(seen) != 8*200 {
		t.Errorf("%d different records, want %d", len(seen), 8*200)
	}
}

func FuzzLog(f *testing.F) {
	f.Add("message", "key", "value\x1b[31m\n")
	f.Fuzz(func(t *testing.T, message, key, value string) {
		log, out := logTo(FormatJSON, slog.LevelInfo)
		log.Info(message, key, value, "any", []string{value})
		if strings.Count(out.String(), "\n") != 1 || !json.Valid(out.Bytes()) {
			t.Fatalf("log of %q, %q, %q = %q, want one line of JSON", message, key, value, out)
		}
	})
}
