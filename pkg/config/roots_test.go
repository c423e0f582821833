package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
)

// TestRoots checks that a later list replaces an earlier one, so that a user can clear it.
func TestRoots(t *testing.T) {
	f := newFiles(t)
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	if got := f.load().Roots; len(got) != 0 {
		t.Errorf("Roots by default = %q, want none", got)
	}
	f.system("config.yaml", "roots: [/srv/src]\n")
	if diff := cmp.Diff([]string{"/srv/src"}, f.load().Roots); diff != "" {
		t.Errorf("Roots of the system mismatch (-want +got):\n%s", diff)
	}
	f.user("config.yaml", "roots: [~/src, /srv/../code/, \"\"]\n")
	if diff := cmp.Diff([]string{filepath.Join(home, "src"), "/code"}, f.load().Roots); diff != "" {
		t.Errorf("Roots of the user mismatch (-want +got):\n%s", diff)
	}
	f.user("config.yaml", "roots: []\n")
	if got := f.load().Roots; len(got) != 0 {
		t.Errorf("Roots of an empty list = %q, want none", got)
	}
	for _, bad := range []string{"roots: [src]\n", "roots: [{a: b}]\n", "roots: /src\n", "roots: [~other/src]\n"} {
		f.user("config.yaml", "image: x\n"+bad)
		if _, err := config.Load(f.paths, f.ship); err == nil || !strings.Contains(err.Error(), "config.yaml:2") {
			t.Errorf("Load of %q: error %v, want %q in it", bad, err, "config.yaml:2")
		}
	}
}
