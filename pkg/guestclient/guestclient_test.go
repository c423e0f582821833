package guestclient

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// sh runs a script and returns its output.
func sh(t *testing.T, script string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", append(args, "-s")...)
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("sh %v: %v: %s", args, err, out)
	}
	return string(out)
}

func TestBootScriptIsValidShell(t *testing.T) {
	script := BootScript()
	if out := sh(t, script, "-n"); out != "" {
		t.Errorf("sh -n of the boot script printed %q, want nothing", out)
	}
	if strings.Contains(script, "@") {
		t.Errorf("the boot script contains a placeholder, want none:\n%s", script)
	}
	// /run is mounted noexec on Debian 13 and later.
	if want := "/bin/sh /run/agent-announce\n"; !strings.Contains(script, want) {
		t.Errorf("the boot script lacks %q, and needs /run to be executable:\n%s", want, script)
	}
}

// TestLockdownComesFirst checks that the boot script installs the lockdown rules first:
// nothing before them needs or opens a network. Only a seed may skip the script,
// because it installs the rules itself before it brings the network up.
func TestLockdownComesFirst(t *testing.T) {
	seeded := false
	for _, line := range strings.Split(BootScript(), "\n") {
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
			continue
		case line == `[ "${AGENT_SEED-}" != 1 ] || exit 0` && !seeded:
			seeded = true
			continue
		case line != "if ! sh <<'AGENT_LOCKDOWN'":
			t.Fatalf("first command of the boot script = %q, want %q", line, "if ! sh <<'AGENT_LOCKDOWN'")
		}
		return
	}
}

// TestOnlyAGoldenCloneSleeps checks that only a clone of a golden image can stop before
// it has an identity. Any other guest that received the command to sleep would come up with an open
// network, or with another machine's identity.
func TestOnlyAGoldenCloneSleeps(t *testing.T) {
	dir := t.TempDir()
	log, flag := filepath.Join(dir, "log"), filepath.Join(dir, "sleep")
	script := "systemctl() { echo \"systemctl $*\" >>'" + log + "'; }\n" +
		strings.NewReplacer("/dev/console", "/dev/null", "/run/agent-seed/sleep", flag).Replace(SleepScript())
	cmd := exec.CommandContext(t.Context(), "sh", "-c", script)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	if err := cmd.Run(); err == nil {
		t.Error("the sleep script without a seed succeeded, want an error")
	}
	if got, err := os.ReadFile(log); err != nil || string(got) != poweroff {
		t.Errorf("commands of the sleep script = %q, %v, want %q", got, err, poweroff)
	}
	cmd = exec.CommandContext(t.Context(), "sh", "-c", script)
	cmd.Env = append(cmd.Environ(), "AGENT_SEED=1")
	if err := cmd.Run(); err != nil {
		t.Errorf("the sleep script with a seed: %v", err)
	}
	if _, err := os.Stat(flag); err != nil {
		t.Errorf("flag of the sleep script: %v", err)
	}
}

// poweroff is the log of the command that a refused guest runs.
const poweroff = "systemctl poweroff --force --no-wall\n"

// TestNoLockdownNoGuest checks that a guest whose lockdown rules cannot be installed powers
// off and gets no further.
func TestNoLockdownNoGuest(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	script := BootScript()
	to := strings.Index(script, "# Report over the serial")
	from := strings.Index(script, "if ! sh")
	end := strings.Index(script, "\nAGENT_LOCKDOWN\n")
	if from < 0 || to < from || end < from {
		t.Fatalf("parts of the boot script are at %d, %d and %d, want them in this order: the script has changed", from, end, to)
	}
	script = "systemctl() { echo \"systemctl $*\" >>'" + log + "'; }\nif ! sh <<'AGENT_LOCKDOWN'\nexit 1" + script[end:to] + "\necho on >>'" + log + "'\n"
	cmd := exec.CommandContext(t.Context(), "sh", "-c", strings.ReplaceAll(script, "/dev/console", "/dev/null"))
	if err := cmd.Run(); err == nil {
		t.Error("the boot script without rules succeeded, want an error")
	}
	if got, err := os.ReadFile(log); err != nil || string(got) != poweroff {
		t.Errorf("commands of the boot script = %q, %v, want %q", got, err, poweroff)
	}
}

func unpack(t *testing.T, packed []byte) map[string]string {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Mode != 0o755 || h.Typeflag != tar.TypeReg || h.Uid != 0 || !fs.ValidPath(h.Name) {
			t.Errorf("header = %+v, want a regular file of root with mode 755 and a valid path", h)
		}
		out[h.Name] = string(text)
	}
}

func TestPackDependsOnContentOnly(t *testing.T) {
	tree := func(mod time.Time, mode fs.FileMode, run string) fs.FS {
		return fstest.MapFS{
			"run.sh":       {Data: []byte(run), ModTime: mod, Mode: mode},
			"files/a":      {Data: []byte("A"), ModTime: mod, Mode: mode},
			"files/deep/b": {Data: nil, ModTime: mod, Mode: mode},
		}
	}
	packed := func(f fs.FS) []byte {
		var b bytes.Buffer
		if err := pack(f, &b); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	one := packed(tree(time.Now(), 0o600, "x"))
	if !bytes.Equal(one, packed(tree(time.Unix(1, 0), 0o777, "x"))) {
		t.Error("pack() with other times and modes = other bytes, want the same")
	}
	if bytes.Equal(one, packed(tree(time.Now(), 0o600, "y"))) {
		t.Error("pack() with other content = the same bytes, want others")
	}
	want := map[string]string{"run.sh": "x", "files/a": "A", "files/deep/b": ""}
	if diff := cmp.Diff(want, unpack(t, one)); diff != "" {
		t.Errorf("packed files mismatch (-want +got):\n%s", diff)
	}
	if err := pack(failingFS{}, io.Discard); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("pack() of an unreadable file system: error %v, want %v", err, fs.ErrPermission)
	}
}

type failingFS struct{}

func (failingFS) Open(string) (fs.File, error) { return nil, fs.ErrPermission }

func TestShippedProvisionIsPacked(t *testing.T) {
	scripts, err := fs.Sub(sessionizer.Provision, "provision")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := pack(scripts, &b); err != nil {
		t.Fatal(err)
	}
	got := unpack(t, b.Bytes())
	for _, name := range []string{"run.sh", "lib.sh", "files/ready-tmux"} {
		if got[name] == "" {
			t.Errorf("content of %s in the archive = %q, want some", name, got[name])
		}
	}
	for name, text := range got {
		if strings.HasSuffix(name, ".sh") && strings.HasPrefix(text, "#!/bin/sh") {
			sh(t, text, "-n")
		}
	}
}

func TestProgressLines(t *testing.T) {
	var lines []string
	p := &progress{report: func(s string) { lines = append(lines, s) }}
	for _, part := range []string{
		"one\ntw", "o\n\n  \n", "10%\r20%\r\n", "\x1b[31mred\x1b[0m \x00\x07bell\n", "bad \xff utf\n",
		strings.Repeat("x", 300), strings.Repeat("y", 1<<20), "\nafter\n", strings.Repeat("ü", 400) + "\n", "no newline",
	} {
		if n, err := io.WriteString(p, part); n != len(part) || err != nil {
			t.Fatalf("Write(%.20q) = %d, %v, want %d", part, n, err, len(part))
		}
	}
	if cap(p.buf) > 2*maxLine {
		t.Errorf("progress keeps %d bytes, want at most %d", cap(p.buf), 2*maxLine)
	}
	p.end()
	p.end()
	want := []string{
		"one", "two", "10%", "20%", "red bell", "bad utf",
		strings.Repeat("x", 300) + strings.Repeat("y", maxLine-300), "after", strings.Repeat("ü", maxLine/2), "no newline",
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("reported lines mismatch (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want[len(want)-maxTail:], p.tail); diff != "" {
		t.Errorf("last lines mismatch (-want +got):\n%s", diff)
	}
}

// TestProgressFromTwoSides checks that progress may be written from two goroutines,
// because SSH copies stdout and stderr from one each (run with -race).
func TestProgressFromTwoSides(t *testing.T) {
	n := 0
	p := &progress{report: func(string) { n++ }}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for i := range 500 {
				fmt.Fprintf(p, "line %d\n", i)
			}
		})
	}
	wg.Wait()
	if n != 1000 {
		t.Errorf("%d lines were reported, want 1000", n)
	}
}

func TestNoProgramForUnknownMachines(t *testing.T) {
	for _, arch := range []string{"", "riscv64", "amd64", "../x"} {
		if _, err := Program(arch); fail.CodeOf(err) != fail.Host {
			t.Errorf("Program(%q): error %v with code %v, want code %v", arch, err, fail.CodeOf(err), fail.Host)
		}
	}
}

func TestProgramIsQuoted(t *testing.T) {
	g := Guest{Root: "/tmp/a b'c"}
	got := sh(t, "printf '%s|' "+g.program("log", "--since", "$(id)"))
	if want := "/tmp/a b'c/usr/local/bin/agent-guest|log|--since|$(id)|"; got != want {
		t.Errorf("arguments of the program in a shell = %q, want %q", got, want)
	}
}
