package repo

import (
	"testing"
)

// The files and branches of an earlier session stay. Nothing that it left in its git directory, and none
// of its settings, has an effect.
func TestReclone(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	host(t, bare, `git clone -q . ../w && cd ../w && mkdir -p .claude sub && echo '{"from":"commit"}' >.claude/settings.json && echo commit >sub/.envrc &&
		git add . && git commit -qm settings && git push -q origin main`)
	src := ensure(t, mirrors(t), ref).Source(false)
	g := newGuest(t)
	base := push(t, g, src, g.dir())
	// The earlier session, which is hostile.
	g.sh(t, `cd work/repo && git switch -qc mine && echo kept >kept && git add kept && git commit -qm mine && echo dirty >a && echo new >new
		evil=$(printf '{"from":"evil"}' | git hash-object -w --stdin)
		git replace "$(git rev-parse main:.claude/settings.json)" "$evil"
		git config core.fsmonitor "touch $HOME/ran; false"
		git config core.sshCommand "touch $HOME/ran; false"
		git config uploadpack.packObjectsHook "touch $HOME/ran; false"
		git config filter.x.smudge "touch $HOME/ran; cat"
		git config alias.status '!touch $HOME/ran'
		mkdir -p .git/hooks && for h in post-checkout reference-transaction post-index-change pre-receive; do printf '#!/bin/sh\ntouch %s/ran\n' "$HOME" >.git/hooks/$h && chmod +x .git/hooks/$h; done
		mkdir "$HOME/outside" && rm -r .claude sub && ln -s "$HOME/outside" .claude && ln -s "$HOME/outside" sub
		mkdir ../aside && mv .git ../aside/git && mv .claude ../aside`)
	old := g.home + "/work/aside/git"
	for range 2 { // the second leaves everything alone
		again, err := Reclone(t.Context(), g, src, Checkout{Dir: g.dir()}, old, []string{".claude", ".envrc"}, nil)
		if err != nil || again.Commit != base.Commit || len(again.Warnings) > 0 {
			t.Fatalf("Reclone = %+v, %v, want %+v", again, err, base)
		}
		equal(t, "settings", g.sh(t, `cd work/repo && cat .claude/settings.json sub/.envrc; ls -A "$HOME/outside"`), "{\"from\":\"commit\"}\ncommit")
		equal(t, "status", g.sh(t, `cd work/repo && git status --short --branch && git log --format=%s -1 && git fsck --strict --no-dangling`), "## mine\n M a\n?? new\nmine")
		equal(t, "work", g.sh(t, "cd work/repo && cat kept a new && ls -A .. && ls -A .git/hooks 2>/dev/null | grep -v sample || :"), "kept\ndirty\nnew\naside\nrepo")
		equal(t, "what ran", g.sh(t, `ls "$HOME" | grep ran || :`), "")
		g.sh(t, `cd work/repo && git config --get-regexp 'fsmonitor|sshcommand|filter|alias' && exit 1 || :`)
	}
}

// A git directory that cannot be read costs its branches, and nothing else.
func TestRecloneWithoutHistory(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	src := ensure(t, mirrors(t), ref).Source(false)
	for what, old := range map[string]string{
		"nothing":        "true",
		"a file":         "echo gitdir: /etc >aside/git",
		"a link":         "ln -s / aside/git",
		"an empty one":   "mkdir aside/git",
		"no objects":     "git init -q aside/r && mv aside/r/.git aside/git && mkdir -p aside/git/refs/heads && echo 1111111111111111111111111111111111111111 >aside/git/refs/heads/x",
		"a head outside": "git init -q aside/r && mv aside/r/.git aside/git && echo ref: refs/heads/../../../x >aside/git/HEAD",
	} {
		t.Run(what, func(t *testing.T) {
			g := newGuest(t)
			g.sh(t, "mkdir -p work/repo work/aside && cd work && echo kept >repo/kept && "+old)
			base, err := Reclone(t.Context(), g, src, Checkout{Dir: g.dir()}, g.home+"/work/aside/git", []string{".claude"}, nil)
			if err != nil || base.Branch != "main" {
				t.Fatalf("Reclone = %+v, %v, want main", base, err)
			}
			equal(t, "kept", g.sh(t, "cat work/repo/kept && cd work/repo && git symbolic-ref HEAD && git status --short | head -1"), "kept\nrefs/heads/main\n D a")
		})
	}
}
