package repo

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// A updated checkout equals a new one, and has the files that git does not track.
func TestUpdateCheckout(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	m := mirrors(t)
	g := newGuest(t)
	if _, err := UpdateCheckout(t.Context(), g, ensure(t, m, ref).Source(false), Checkout{Dir: g.dir()}, nil); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("UpdateCheckout without a checkout = %v, want code %v", err, fail.Conflict)
	}
	push(t, g, ensure(t, m, ref).Source(false), g.dir())
	g.sh(t, `cd work/repo && mkdir deps && echo installed >deps/file && echo changed >a && git switch -qc mine && git commit -qam mine &&
		git tag old && echo more >>a && git stash -q && echo again >a`)
	tip := advance(t, bare, "main")
	src := ensure(t, m, ref).Source(false)
	for range 2 { // the second has nothing to send
		base, err := UpdateCheckout(t.Context(), g, src, Checkout{Dir: g.dir()}, nil)
		if err != nil || base.Commit != tip || base.Branch != "main" {
			t.Fatalf("UpdateCheckout = %+v, %v, want main at %s", base, err, tip)
		}
	}
	push(t, g, src, g.dir()+"2")
	state := `git rev-parse HEAD && git status --short --branch && git fsck --strict --no-dangling && git for-each-ref --format='%(objectname) %(refname)' &&
		git remote get-url origin && cat a && cat .git/agent-sessionizer/base && sort .git/agent-sessionizer/known`
	want := g.sh(t, "cd work/repo2 && "+state)
	equal(t, "updated checkout", g.sh(t, "cd work/repo && mv deps .. && "+state+"; mv ../deps ."), want)
	equal(t, "untracked file", g.sh(t, "cat work/repo/deps/file"), "installed")

	src.Branch, src.NewBranch = "feature", "work"
	if base, err := UpdateCheckout(t.Context(), g, src, Checkout{Dir: g.dir()}, nil); err != nil || base.Branch != "work" {
		t.Fatalf("UpdateCheckout for a new branch = %+v, %v, want the branch work", base, err)
	}
	equal(t, "status", g.sh(t, "cd work/repo && git status -sb -uno"), "## work...origin/work [gone]")
}

// A local clone, whose branches are the user's.
func TestUpdateCheckoutFromALocalClone(t *testing.T) {
	isolate(t)
	dir, _ := localClone(t)
	g := newGuest(t)
	src := Source{Dir: dir, Local: true}
	push(t, g, src, g.dir())
	host(t, dir, "git commit -q --allow-empty -m later")
	base, err := UpdateCheckout(t.Context(), g, src, Checkout{Dir: g.dir()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "commit", base.Commit, host(t, dir, "git rev-parse HEAD"))
}
