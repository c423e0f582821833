package sessioncmd

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// TestLocalCloneOfAnotherHost answers as another host does that names a directory of this one.
func TestLocalCloneOfAnotherHost(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(t.TempDir())
	s := session.View{LocalClone: dir, RepoKey: "local:" + dir}
	if got, err := localClone(s, true); err != nil || got != dir {
		t.Errorf("clone of this host's session = %q, %v, want %s", got, err, dir)
	}
	if got, err := localClone(s, false); err != nil || got != "" {
		t.Errorf("clone of another host's session = %q, %v, want none", got, err)
	}
}

// TestGuestPath splits the arguments of cp.
func TestGuestPath(t *testing.T) {
	isHost := func(name string) bool { return name == "box2" }
	for arg, want := range map[string][2]string{
		"app:dir/file":       {"app", "dir/file"},
		"app:a:b":            {"app", "a:b"},
		"box2:app:dir":       {"box2:app", "dir"},
		"box2:app:a:b":       {"box2:app", "a:b"},
		"box2:file":          {"box2", "file"}, // a session of that name
		"box2:/etc/a:b":      {"box2", "/etc/a:b"},
		"box2:owner/repo:~/": {"box2:owner/repo", "~/"},
		"./a:b":              {},
		"/a:b":               {},
		"file":               {},
	} {
		name, path, ok := guestPath(arg, isHost)
		if name != want[0] || path != want[1] || ok != (want[0] != "") {
			t.Errorf("guestPath(%q) = %q, %q, %t, want %q", arg, name, path, ok, want)
		}
	}
}
