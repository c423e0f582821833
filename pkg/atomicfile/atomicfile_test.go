package atomicfile

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWrite(t *testing.T) {
	for name, write := range map[string]func(string, []byte, os.FileMode) error{"flushed": Write, "not flushed": WriteUnflushed} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			for _, text := range []string{"a longer text", "short"} {
				if err := write(path, []byte(text), 0o640); err != nil {
					t.Fatal(err)
				}
				got, err := os.ReadFile(path)
				if err != nil || string(got) != text {
					t.Errorf("%q, %v; want %q", got, err, text)
				}
			}
			if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o640 {
				t.Errorf("mode %v, %v", st.Mode(), err)
			}
			// What cannot be replaced stays, and nothing is left beside it.
			if err := os.MkdirAll(filepath.Join(dir, "full", "x"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := write(filepath.Join(dir, "full"), nil, 0o600); err == nil {
				t.Error("a directory was replaced")
			}
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
				t.Errorf("%v, %v", entries, err)
			}
		})
	}
}
