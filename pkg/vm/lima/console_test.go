package lima

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

func TestParseMarker(t *testing.T) {
	for line, want := range map[string]string{
		vm.ReadyMarker + " " + testKey:                          testKey,
		vm.ReadyMarker + "  " + testKey + " root@guest":         testKey,
		"[   12.3] systemd: x" + vm.ReadyMarker + " " + testKey: testKey, // interleaved
		"+ echo '" + vm.ReadyMarker + " ssh-ed25519 $KEY'":      "",
		vm.ReadyMarker:                                  "",
		vm.ReadyMarker + " ":                            "",
		vm.ReadyMarker + " ssh-ed25519":                 "",
		vm.ReadyMarker + " ssh-ed25519 AAAA":            "",
		vm.ReadyMarker + ` command="rm" ` + testKey:     "",
		vm.ReadyMarker + " # " + testKey:                "",
		testKey + " " + vm.ReadyMarker:                  "",
		vm.ReadyMarker + " " + testKey[:len(testKey)-4]: "",
		vm.ReadyMarker + " ssh-ed25519-cert-v01@openssh.com AAAAIHNzaC1lZDI1NTE5LWNlcnQtdjAx": "",
	} {
		if got := parseMarker(line); got != want {
			t.Errorf("parseMarker(%q) = %q, want %q", line, got, want)
		}
	}
}

func FuzzConsole(f *testing.F) {
	f.Add([]byte(vm.ReadyMarker + " " + testKey + "\n"))
	f.Add([]byte("\x1b[31mred\x1b[0m\r\n" + strings.Repeat("x", 3*maxLine) + "\n"))
	f.Add([]byte("\xff\xfe\x00Kernel panic - not syncing: \u202eVFS\n"))
	f.Fuzz(func(t *testing.T, said []byte) {
		w := newWatcher(t.TempDir())
		l := w.logs[0]
		l.feed(said, w.line)
		l.feed([]byte("\n"), w.line)
		if w.hostKey != "" {
			if key, _, options, rest, err := ssh.ParseAuthorizedKey([]byte(w.hostKey)); err != nil || len(options)+len(rest) > 0 || key == nil || strings.ContainsAny(w.hostKey, "\r\n") {
				t.Errorf("host key = %q, want one key without options on one line", w.hostKey)
			}
		}
		if len(w.last) > keptLines || len(l.buf) > maxLine {
			t.Errorf("stored console = %d lines, a line of %d bytes, want at most %d, %d", len(w.last), len(l.buf), keptLines, maxLine)
		}
		for _, s := range append(w.last, w.panic) {
			if len(s) > quotedLine+utf8.UTFMax || !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
				t.Errorf("stored line = %q, want valid UTF-8 without control bytes, at most %d bytes", s, quotedLine+utf8.UTFMax)
			}
		}
	})
}

func TestWatcherFollows(t *testing.T) {
	dir := t.TempDir()
	w := newWatcher(dir)
	look := func() {
		t.Helper()
		if err := w.readNew(); err != nil {
			t.Fatal(err)
		}
	}
	look() // no log yet
	log := filepath.Join(dir, "serialp.log")
	write := func(s string) {
		t.Helper()
		f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
	}
	write("booting\nagent-session")
	look()
	write(strings.Repeat("\x00", 3*maxLine) + "izer-ready ")
	look()
	if err := os.Truncate(log, 0); err != nil { // as limitLogs does
		t.Fatal(err)
	}
	look()
	write("agent-sessionizer-ready " + testKey)
	look()
	if w.hostKey != "" {
		t.Fatalf("host key from an unfinished line = %q, want none", w.hostKey)
	}
	write("\n")
	look()
	if w.hostKey != testKey {
		t.Fatalf("host key = %q, want %q", w.hostKey, testKey)
	}
	if w.last[0] != "booting" {
		t.Errorf("stored lines = %q, want \"booting\" first", w.last)
	}
}

func TestClean(t *testing.T) {
	if got := clean("\x1b[1;31m[ OK ]\x1b[0m\tStarted \u202ereversed\a\x7f."); got != "[ OK ] Started reversed." {
		t.Errorf("clean = %q, want \"[ OK ] Started reversed.\"", got)
	}
	if got := clean(strings.Repeat("ä", 1000)); len(got) > quotedLine+2 {
		t.Errorf("clean of a long line = %d bytes, want at most %d", len(got), quotedLine+2)
	}
}
