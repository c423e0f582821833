package config_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

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
		t.Errorf("by default: %q", got)
	}
	f.system("config.yaml", "roots: [/srv/src]\n")
	if got := f.load().Roots; !slices.Equal(got, []string{"/srv/src"}) {
		t.Errorf("the system's: %q", got)
	}
	f.user("config.yaml", "roots: [~/src, /srv/../code/, \"\"]\n")
	if got := f.load().Roots; !slices.Equal(got, []string{filepath.Join(home, "src"), "/code"}) {
		t.Errorf("the user's: %q", got)
	}
	f.user("config.yaml", "roots: []\n")
	if got := f.load().Roots; len(got) != 0 {
		t.Errorf("none: %q", got)
	}
	for _, bad := range []string{"roots: [src]\n", "roots: [{a: b}]\n", "roots: /src\n", "roots: [~other/src]\n"} {
		f.user("config.yaml", "image: x\n"+bad)
		if _, err := config.Load(f.paths, f.ship); err == nil || !strings.Contains(err.Error(), "config.yaml:2") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
