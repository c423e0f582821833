package setupcmd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// TestReplaceFile checks that a failed write leaves the old file, and nothing beside it.
func TestReplaceFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "new", "config.yaml")
	for _, text := range []string{"first", "second"} {
		if err := replaceFile(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != text {
			t.Errorf("ReadFile after replaceFile = %q, %v, want %q", got, err, text)
		}
	}
	taken := filepath.Join(dir, "taken")
	if err := os.MkdirAll(filepath.Join(taken, "by a directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := replaceFile(taken, []byte("x")); fail.CodeOf(err) != fail.Host {
		t.Errorf("replaceFile over a directory: error %v, want code %v", err, fail.Host)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("ReadDir = %v, %v, want 2 entries", left, err)
	}
}
