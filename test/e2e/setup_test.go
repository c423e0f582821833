//go:build e2e

package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// TestSetup opens a session of a repository with a setup, and then others, which start from its result
// with only the new commits.
func TestSetup(t *testing.T) {
	b := newBox(t)
	dir := b.Repo("project")
	b.Write("project/.agent-sessionizer.yaml", `setup:
  run: |
    mkdir -p deps
    cat hello.txt >deps/installed
    (setsid sleep 100000 >/dev/null 2>&1 &)
  files: [hello.txt]
`)
	b.RunIn(dir, "sh", "-c", "git add . && git commit -qm setup")
	view := func(name string) (v session.View) {
		t.Helper()
		var all []session.View
		if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &all); err != nil {
			t.Fatal(err)
		}
		for _, v := range all {
			if v.Name == name {
				return v
			}
		}
		t.Fatalf("no session %s", name)
		return v
	}
	one := b.open("./project")
	if v := view(one); v.Setup == nil || v.Setup.State != session.SetupDone {
		t.Fatalf("setup of the first session = %+v, want done", v.Setup)
	}
	ids := map[string]map[string]string{one: who(t, b, one)}
	b.MustIn(one, "echo mine >notes && git checkout -qb mine && git commit -q --allow-empty -m agent")
	b.RunIn(dir, "sh", "-c", "echo more >other && git add . && git commit -qm other")

	two := b.open("./project", "--new")
	if v := view(two); v.Setup == nil || v.Setup.State != session.SetupKept || v.From != "repo" {
		t.Errorf("second session = from %s, setup %+v, want that of the first", v.From, v.Setup)
	}
	got := b.MustIn(two, "cat deps/installed other; git log --format=%s | head -1; git branch --show-current; git status --short; pgrep -c -u agent -x sleep; ls notes 2>&1")
	if !strings.HasPrefix(got, "hello\nmore\nother\n") || !strings.Contains(got, "?? deps/\n1\n") || !strings.Contains(got, "cannot access") {
		t.Errorf("second session = %q, want the new commit, the result of the setup, its process, and nothing of the first", got)
	}
	ids[two] = who(t, b, two)
	for what, value := range ids[one] {
		if ids[two][what] == value {
			t.Errorf("both sessions have the %s %q", what, value)
		}
	}
	b.Asz("destroy", "--force", one, two)

	// The result outlives its session, and has no other origin.
	three := b.open("./project")
	if got := b.MustIn(three, "cat deps/installed; git log --format=%s | head -1"); got != "hello\nother" {
		t.Errorf("third session = %q, want the result of the setup", got)
	}
	b.Asz("destroy", "--force", three)
	b.RunIn(dir, "sh", "-c", "echo changed >hello.txt && git commit -qam changed")
	four := b.open("./project")
	if got := b.MustIn(four, "cat deps/installed"); got != "changed" || view(four).Setup.State != session.SetupDone {
		t.Errorf("session with another file = %q, setup %+v, want a new setup", got, view(four).Setup)
	}
	b.Asz("destroy", "--force", four)
	b.Asz("prune", "--unused-for", "0s")
	if left := b.Asz("image", "list"); strings.Contains(left, "base-") {
		t.Errorf("image list after prune = %s, want no result of a setup", left)
	}
}
