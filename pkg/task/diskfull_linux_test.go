package task

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// A full disk is distinguished from a failing one, whatever was being written. The
// hint shows the disk's usage, and partly written files are removed.
func TestBundleOnAFullDisk(t *testing.T) {
	d := Dir(t.TempDir())
	if err := d.create(nil, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	part := filepath.Join(string(d), ".bundle.part")
	if err := os.Symlink("/dev/full", part); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.Stdout(), []byte(strings.Repeat("output\n", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	err := d.writeBundle()
	if !isDiskFull(err) || fail.CodeOf(err) != fail.Host || fail.HintOf(err) != "df -h "+filepath.Dir(string(d)) {
		t.Errorf("writeBundle = %v (code %v, hint %q), want a full disk with code %v", err, fail.CodeOf(err), fail.HintOf(err), fail.Host)
	}
	for _, file := range []string{part, d.Bundle()} {
		if _, err := os.Lstat(file); !os.IsNotExist(err) {
			t.Errorf("%s after a full disk: %v, want no such file", file, err)
		}
	}
	if isDiskFull(os.Remove(part)) {
		t.Error("isDiskFull of a missing file = true, want false")
	}
}

// Temporary files of a keeper that died while writing are removed, and not bundled.
func TestSweep(t *testing.T) {
	d := Dir(t.TempDir())
	if err := d.create(nil, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	left := d.path("outbox", ".metadata.json.123.tmp")
	theirs := filepath.Join(d.artifacts(), ".notes.tmp")
	for _, file := range []string{left, theirs} {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.sweep(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(left); !os.IsNotExist(err) {
		t.Errorf("leftover %s after the sweep: %v, want it removed", left, err)
	}
	if _, err := os.Lstat(theirs); err != nil {
		t.Errorf("file of the agent after the sweep: %v, want it kept", err)
	}
}
