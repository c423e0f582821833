package guestproto_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

func TestTaskStart(t *testing.T) {
	s := guestproto.TaskStart{
		Version: 1, Argv: []string{"claude", "--print", "say \"<hi>\"\n\x1b", ""}, Env: map[string]string{"A": "", "b_2": "x=y\n"},
		Dir: "/home/agent/x", Brief: "# Task\n",
	}
	var text bytes.Buffer
	if err := s.Encode(&text); err != nil {
		t.Fatal(err)
	}
	got, err := guestproto.DecodeTaskStart(&text)
	if err != nil || !reflect.DeepEqual(got, s) {
		t.Fatalf("%+v, %v", got, err)
	}
	for why, change := range map[string]func(*guestproto.TaskStart){
		"no command":                 func(s *guestproto.TaskStart) { s.Argv = nil },
		"no command ":                func(s *guestproto.TaskStart) { s.Argv[0] = "" },
		"must be absolute":           func(s *guestproto.TaskStart) { s.Dir = "x" },
		"contains a zero byte":       func(s *guestproto.TaskStart) { s.Argv[2] = "a\x00" },
		"is not UTF-8":               func(s *guestproto.TaskStart) { s.Argv[2] = "a\xff" },
		"variable A":                 func(s *guestproto.TaskStart) { s.Env["A"] = strings.Repeat("x", guestproto.MaxTaskArg) },
		"environment variable":       func(s *guestproto.TaskStart) { s.Env["A-"] = "" },
		"Linux allows at most":       func(s *guestproto.TaskStart) { s.Argv[2] = strings.Repeat("x", guestproto.MaxTaskArg+1) },
		"arguments, must be at most": func(s *guestproto.TaskStart) { s.Argv = append(s.Argv, make([]string, guestproto.MaxTaskArgs)...) },
		"and variables of": func(s *guestproto.TaskStart) {
			s.Argv = append(s.Argv, many(10, strings.Repeat("x", guestproto.MaxTaskArg))...)
		},
		"a brief of": func(s *guestproto.TaskStart) { s.Brief = strings.Repeat("x", guestproto.MaxTaskBrief+1) },
	} {
		bad := s
		bad.Argv, bad.Env = append([]string{}, s.Argv...), map[string]string{"B": ""}
		change(&bad)
		if err := bad.Encode(io.Discard); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(why)) {
			t.Errorf("%s: %v", why, err)
		}
		bad.Version = 1
		raw, err := json.Marshal(bad)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := guestproto.DecodeTaskStart(bytes.NewReader(raw)); err == nil && why != "is not UTF-8" { // JSON replaces invalid UTF-8
			t.Errorf("%s: decoded", why)
		}
	}
	if err := guestproto.CheckTaskName(guestproto.TaskName("0123456789ab", 12)); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "0123456789ab", "0123456789ab/0", "0123456789ab/-1", "0123456789ab/1/..", "../0123456789ab/1", "0123456789AB/1", "0123456789ab/1\n", "0123456789ab/01"} {
		if guestproto.CheckTaskName(bad) == nil {
			t.Errorf("%q", bad)
		}
	}
}

func many(n int, s string) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = s
	}
	return all
}

func TestTaskStatusOfAGuest(t *testing.T) {
	s := guestproto.TaskStatus{
		Version: 1, State: guestproto.TaskExited, Time: time.Unix(1_700_000_000, 5).UTC(), Stdout: 7, Stderr: 8,
		Result: &guestproto.TaskResult{ExitCode: 143, Signal: "TERM", Started: time.Unix(1_699_999_999, 0).UTC(), Ended: time.Unix(1_700_000_000, 0).UTC(), User: 1, System: 2, MaxRSS: 3, Stdout: 7, Stderr: 8},
	}
	var text bytes.Buffer
	if err := s.Encode(&text); err != nil {
		t.Fatal(err)
	}
	if got, err := guestproto.DecodeTaskStatus(&text); err != nil || !reflect.DeepEqual(got, s) {
		t.Errorf("%+v, %v", got, err)
	}
	got, err := guestproto.DecodeTaskStatus(strings.NewReader(`{"version":1,"state":"exited","time":"0000-01-01T00:00:00Z","cpu_ms":-5,"memory":-1,"stdout":-2,"stderr":1,
		"result":{"exit_code":-7,"signal":"\u001b[2J","error":"a\u001b]0;x\u0007","started":"9999-12-31T23:59:59-10:00","ended":"2026-01-01T00:00:00Z","user_ms":-1,"system_ms":0,"max_rss":-9,"stdout":-1,"stderr":0}}`))
	want := guestproto.TaskStatus{Version: 1, State: guestproto.TaskExited, Stderr: 1, Result: &guestproto.TaskResult{
		ExitCode: 1, Signal: "UNKNOWN", Error: "a\ufffd]0;x\ufffd", Ended: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
	}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v %+v, %v", got, got.Result, err)
	}
	for name, bad := range map[string]string{
		"another version":       `{"version":2,"state":"none"}`,
		"no state":              `{"version":1}`,
		"an unknown state":      `{"version":1,"state":"fine"}`,
		"an end without result": `{"version":1,"state":"exited"}`,
		"a result too early":    `{"version":1,"state":"running","result":{"exit_code":0}}`,
		"an unknown field":      `{"version":1,"state":"none","run":"x"}`,
		"endless":               `{"version":1,"state":"none","time":"` + strings.Repeat("x", 1<<20),
		"nothing":               ``,
	} {
		if got, err := guestproto.DecodeTaskStatus(strings.NewReader(bad)); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestTaskCollect(t *testing.T) {
	c := guestproto.TaskCollect{Version: 1, Dir: "/home/agent/x", Base: strings.Repeat("0a", 20), Patterns: []string{"out/**/*.log", "a..b"}, MaxFiles: 3, MaxBytes: 4}
	var text bytes.Buffer
	if err := c.Encode(&text); err != nil {
		t.Fatal(err)
	}
	if got, err := guestproto.DecodeTaskCollect(&text); err != nil || !reflect.DeepEqual(got, c) {
		t.Errorf("%+v, %v", got, err)
	}
	for name, change := range map[string]func(*guestproto.TaskCollect){
		"relative":        func(c *guestproto.TaskCollect) { c.Dir = "x" },
		"an option":       func(c *guestproto.TaskCollect) { c.Base = "--output=x" },
		"a branch":        func(c *guestproto.TaskCollect) { c.Base = "main" },
		"out of the tree": func(c *guestproto.TaskCollect) { c.Patterns = []string{"a/../../b"} },
		"absolute":        func(c *guestproto.TaskCollect) { c.Patterns = []string{"/etc/*"} },
		"empty":           func(c *guestproto.TaskCollect) { c.Patterns = []string{""} },
		"too long":        func(c *guestproto.TaskCollect) { c.Patterns = many(1, strings.Repeat("x", 2000)) },
		"too many":        func(c *guestproto.TaskCollect) { c.Patterns = many(guestproto.MaxTaskPatterns+1, "x") },
		"too many files":  func(c *guestproto.TaskCollect) { c.MaxFiles = guestproto.MaxArtifacts + 1 },
		"fewer than none": func(c *guestproto.TaskCollect) { c.MaxFiles = -1 },
		"less than none":  func(c *guestproto.TaskCollect) { c.MaxBytes = -1 },
	} {
		bad := c
		change(&bad)
		if bad.Encode(io.Discard) == nil {
			t.Errorf("%s: encoded", name)
		}
	}
}

const (
	anID  = "0123456789ab"
	aHash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
)

func TestArtifactsOfAGuest(t *testing.T) {
	describe := func(name string) []byte {
		text, err := json.Marshal(guestproto.Artifact{Name: name, Size: 5, SHA256: aHash})
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for _, name := range []string{anID + ".patch", anID + "-untracked.txt", "untracked/.env", "files/a b/-rf", "files/..x/...", "untracked/%0A", "files/ü"} {
		if a, err := guestproto.DecodeArtifact(describe(name), anID); err != nil || a.Name != name || a.Size != 5 {
			t.Errorf("%q: %+v, %v", name, a, err)
		}
	}
	for _, name := range []string{
		"", ".", "..", "x", "ba9876543210.patch", "/etc/passwd", "files", "files/", "files//x", "files/../x", "files/./x", "files/x/..", "../files/x", "untracked/x/",
		"files/a\nb", "files/a\x00", "files/\x1b[2J", "files/\u202e", "files/\u00a0", "files/%", "files/%0", "files/%0a", "files/%zz", ".part/x", "metadata.json",
		anID + ".patch/x", "files/" + strings.Repeat("x", 256), strings.Repeat("files/", 1000) + "x",
	} {
		if a, err := guestproto.DecodeArtifact(describe(name), anID); err == nil {
			t.Errorf("%q: %+v", name, a)
		} else if strings.ContainsAny(err.Error(), "\x1b\n\x00") {
			t.Errorf("the error is %q", err)
		}
	}
	for _, text := range []string{
		`{"name":"files/x","size":-1,"sha256":"` + aHash + `"}`, `{"name":"files/x","size":1}`, `{"name":"files/x","size":1,"sha256":"` + strings.ToUpper(aHash) + `"}`,
		`{"name":"files/x","size":1,"sha256":"` + aHash[1:] + `"}`, `{"name":"files/x","size":1e30,"sha256":"` + aHash + `"}`, `{"name":"files/x","path":"/etc/passwd","sha256":"` + aHash + `"}`, `[]`, ``,
	} {
		if a, err := guestproto.DecodeArtifact([]byte(text), anID); err == nil {
			t.Errorf("%s: %+v", text, a)
		}
	}
	a, err := guestproto.DecodeArtifact([]byte(`{"name":"../\u001b","size":-3,"sha256":"x","executable":true,"skipped":"it is\u0007"}`), anID)
	if want := (guestproto.Artifact{Name: "../\ufffd", Skipped: "it is\ufffd"}); err != nil || a != want {
		t.Errorf("%+v, %v", a, err)
	}
}

// Any path that a file can have becomes a valid name that identifies the path and is
// unique.
func TestEscapedNames(t *testing.T) {
	for raw, want := range map[string]string{
		"a/b.txt": "a/b.txt", "a b": "a b", "-rf": "-rf", "100%": "100%25", "%41": "%2541", "a\nb": "a%0Ab", "\xff\xfe": "%FF%FE", "ü\u202eü": "ü%E2%80%AEü",
		"\ufffd": "\ufffd", "..a": "..a", "a\"'\\": "a\"'\\", "\x7f\u0085": "%7F%C2%85", "\u00a0": "%C2%A0",
	} {
		if got := guestproto.EscapeName(raw); got != want {
			t.Errorf("%q: %q, want %q", raw, got, want)
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	parts := []string{"a", "%", "\n", "\xff", "\xc3", "\xa9", "é", "..", ".", "~", " ", "𝔘", "\u202e", "\x00"[:0], "A0"}
	names := map[string]string{}
	for range 3000 {
		var raw string
		for range 1 + random.IntN(3) {
			element := ""
			for range 1 + random.IntN(120) {
				if element += parts[random.IntN(len(parts))]; len(element) > 240 {
					break
				}
			}
			if strings.Trim(element, ".") == "" {
				element += "x"
			}
			raw += "/" + element
		}
		raw = raw[1:]
		name := guestproto.EscapeName(raw)
		if err := guestproto.CheckArtifactName(name); err != nil {
			t.Fatalf("%q: %v", raw, err)
		}
		if before, there := names[name]; there && before != raw {
			t.Fatalf("%q and %q are both %q", before, raw, name)
		}
		names[name] = raw
		if back, err := url.PathUnescape(name); (err != nil || back != raw) && !strings.Contains(name, "~") {
			t.Fatalf("%q: %q is %q, %v", raw, name, back, err)
		}
	}
	long := guestproto.EscapeName(strings.Repeat("\xff", 255))
	if len(long) > 255 || guestproto.CheckArtifactName(long) != nil || long == guestproto.EscapeName(strings.Repeat("\xff", 254)) {
		t.Errorf("%d bytes: %q", len(long), long)
	}
}

func TestFrames(t *testing.T) {
	var stream bytes.Buffer
	large := bytes.Repeat([]byte{0, 1, 'o', 0xff}, guestproto.MaxFrame/4)
	for _, f := range []guestproto.Frame{{guestproto.FrameStdout, large}, {guestproto.FrameBeat, nil}, {guestproto.FrameStderr, []byte("x")}, {guestproto.FrameEnd, nil}} {
		if err := guestproto.WriteFrame(&stream, f.Kind, f.Data); err != nil {
			t.Fatal(err)
		}
	}
	whole := stream.Bytes()
	var kinds string
	var data []byte
	for f, err := range guestproto.Frames(iotest.OneByteReader(bytes.NewReader(whole))) {
		if err != nil {
			t.Fatal(err)
		}
		kinds += string(rune(f.Kind))
		data = append(data, f.Data...)
	}
	if kinds != "obez" || !bytes.Equal(data, append(bytes.Clone(large), 'x')) {
		t.Errorf("%q, %d bytes", kinds, len(data))
	}
	// A stream that is cut anywhere is an error, except between two frames.
	ends := map[int]bool{0: true, len(whole): true, len(whole) - 5: true, len(whole) - 11: true, len(whole) - 16: true}
	for _, cut := range []int{0, 1, 4, 5, 6, 4096, len(whole) - 17, len(whole) - 16, len(whole) - 12, len(whole) - 11, len(whole) - 6, len(whole) - 5, len(whole) - 1, len(whole)} {
		var last error
		for _, last = range guestproto.Frames(bytes.NewReader(whole[:cut])) {
		}
		if (last == nil) != ends[cut] || last != nil && !errors.Is(last, io.ErrUnexpectedEOF) {
			t.Errorf("cut at %d of %d: %v", cut, len(whole), last)
		}
	}
	for _, bad := range []string{"o\xff\xff\xff\xff", "o\x00\x04\x00\x01" + strings.Repeat("x", guestproto.MaxFrame+1), "x\x00\x00\x00\x00", "b\x00\x00\x00\x01x", "s\x00\x01\x00\x00" + strings.Repeat("x", 1<<16), "\x1b]52;"} {
		n := 0
		for f, err := range guestproto.Frames(strings.NewReader(bad)) {
			if n++; err == nil {
				t.Errorf("%.10q: %.10q", bad, f.Data)
			}
		}
		if n != 1 {
			t.Errorf("%.10q: %d frames", bad, n)
		}
	}
	if guestproto.WriteFrame(io.Discard, guestproto.FrameStdout, make([]byte, guestproto.MaxFrame+1)) == nil || guestproto.WriteFrame(io.Discard, 'x', nil) == nil {
		t.Error("what nobody reads is written")
	}
	broken := errors.New("broken")
	for _, err := range guestproto.Frames(io.MultiReader(bytes.NewReader(whole[:7]), brokenReader{broken})) {
		if !errors.Is(err, broken) {
			t.Error(err)
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte("o\x00\x00\x00\x02hib\x00\x00\x00\x00s\x00\x00\x00\x1c{\"version\":1,\"state\":\"none\"}"))
	f.Add([]byte("a\x00\x00\x00\x6a{\"name\":\"files/x\",\"size\":1,\"sha256\":\"" + aHash + "\"}z\x00\x00\x00\x02{}"))
	f.Add([]byte("f\x00\x00\x00\x1c{\"kind\":\"item\",\"text\":\"\\u001b\"}"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		clean := func(s string) {
			if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Fatalf("%q", s)
			}
		}
		for frame, err := range guestproto.Frames(bytes.NewReader(stream)) {
			if err != nil {
				clean(strings.ReplaceAll(err.Error(), "\n", ""))
				break
			}
			if len(frame.Data) > guestproto.MaxFrame {
				t.Fatal(len(frame.Data))
			}
			switch frame.Kind {
			case guestproto.FrameStatus:
				if s, err := guestproto.DecodeTaskStatus(bytes.NewReader(frame.Data)); err == nil {
					if s.Result != nil {
						clean(s.Result.Error + s.Result.Signal)
					}
					if err := s.Encode(io.Discard); err != nil {
						t.Fatal(err)
					}
				}
			case guestproto.FrameArtifact:
				if a, err := guestproto.DecodeArtifact(frame.Data, anID); err == nil {
					clean(a.Name + a.Skipped)
					if a.Size < 0 || a.Skipped == "" && guestproto.CheckArtifactName(a.Name) != nil {
						t.Fatalf("%+v", a)
					}
				}
			case guestproto.FrameFailure:
				if failure, err := guestproto.DecodeFailure(frame.Data); err == nil {
					clean(failure.Kind + failure.Text)
				}
			}
		}
	})
}
