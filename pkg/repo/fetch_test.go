package repo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// session is a pushed checkout with both kinds of target.
type session struct {
	g    *localGuest
	base Base
	into Target
}

// start pushes a new upstream into a guest, and makes a clone for its user.
func start(t *testing.T) session {
	t.Helper()
	isolate(t)
	ref, bare := upstream(t)
	mirror := ensure(t, mirrors(t), ref)
	s := session{g: newGuest(t), into: mirror.Target()}
	s.into.Local = filepath.Join(t.TempDir(), "clone")
	host(t, "/", "git clone -q '"+bare+"' '"+s.into.Local+"'")
	s.base = push(t, s.g, mirror.Source(false), s.g.dir())
	return s
}

func (s session) fetch(t *testing.T) FetchResult {
	t.Helper()
	res, err := Fetch(t.Context(), s.g, s.g.dir(), "s1", s.into, s.base, FetchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func (s session) work(t *testing.T) WorkState {
	t.Helper()
	known, err := Known(t.Context(), "s1", s.into)
	if err != nil {
		t.Fatal(err)
	}
	w, err := Work(t.Context(), s.g, s.g.dir(), s.base, known...)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func (s session) agent(t *testing.T, script string) string {
	t.Helper()
	return s.g.sh(t, "cd work/repo && "+script)
}

// refs lists a session's references in a target, without their prefix.
func refs(t *testing.T, dir string) string {
	t.Helper()
	return host(t, dir, `git for-each-ref --format='%(refname)' refs/agents/s1 | sed 's|^refs/agents/s1/||' | tr '\n' ' '`)
}

func TestFetchBringsTheWork(t *testing.T) {
	s := start(t)
	write(t, filepath.Join(s.into.Local, "mine"), "the user's own\n")
	host(t, s.into.Local, "git config fetch.prune true && git add mine")
	before := state(t, s.into.Local)
	tip := s.agent(t, `echo w >w && git add w && git commit -qm work && git switch -qc agent/x && git commit -q --allow-empty -m more && git tag -a done -m done
		echo st >>w && git stash -q && echo st2 >>w && git stash -q && git worktree add -q --detach ../other && git -C ../other commit -q --allow-empty -m wt && git rev-parse HEAD`)
	equal(t, "work before", s.work(t).Summary(), "3 commits neither pushed nor fetched, 2 stashes")
	res := s.fetch(t)
	if res.Commits != 6 && res.Commits != 7 { // the second commits of two stashes are identical if made within one second
		t.Errorf("commits fetched = %d, want 6 or 7", res.Commits)
	}
	equal(t, "references", len(res.Refs), 7)
	for _, dir := range []string{s.into.Mirror, s.into.Local} {
		equal(t, "tip", host(t, dir, "git rev-parse refs/agents/s1/heads/agent/x"), tip)
		equal(t, "HEAD", host(t, dir, "git rev-parse refs/agents/s1/HEAD"), tip)
		host(t, dir, "git fsck --strict")
		equal(t, "stashes", host(t, dir, "git for-each-ref refs/agents/s1/stash | wc -l"), "2")
	}
	equal(t, "the user's clone", state(t, s.into.Local), before)
	w := s.work(t)
	if !w.Clean() {
		t.Errorf("work after a fetch = %q, want clean", w.Summary())
	}

	// A second fetch finds nothing; the next one only new work.
	res = s.fetch(t)
	equal(t, "again", fmt.Sprint(len(res.Refs), res.Commits, res.Bytes), "0 0 0")
	s.agent(t, "head -c 300000 /dev/urandom >big && git add big && git commit -qm big")
	if res = s.fetch(t); res.Bytes < 300_000 {
		t.Errorf("bytes fetched = %d, want at least 300000", res.Bytes)
	}
	s.agent(t, "git commit -q --allow-empty -m small")
	if res = s.fetch(t); res.Bytes > 1000 || res.Commits != 1 {
		t.Errorf("fetch of a small commit = %+v, want 1 commit in at most 1000 bytes", res)
	}
}

func TestFetchNeverLosesWhatItBrought(t *testing.T) {
	s := start(t)
	first := s.agent(t, "git switch -qc topic && git commit -q --allow-empty -m first && git rev-parse HEAD")
	s.fetch(t)
	// The branch is rewritten.
	second := s.agent(t, "git commit -q --amend --allow-empty -m second && git rev-parse HEAD")
	s.fetch(t)
	equal(t, "rewritten", refs(t, s.into.Local), "HEAD heads/topic replaced/"+first)
	equal(t, "topic", host(t, s.into.Local, "git rev-parse refs/agents/s1/heads/topic"), second)
	// The branch is renamed so that the old name conflicts.
	s.agent(t, "git branch -m tmp && git branch -m topic/sub && git commit -q --allow-empty -m third")
	s.fetch(t)
	equal(t, "renamed", refs(t, s.into.Mirror), "HEAD heads/topic/sub replaced/"+first)
	// The branch is deleted, so that only the host has its work.
	third := s.agent(t, "git rev-parse HEAD; git switch -q main && git branch -qD topic/sub && git reflog expire --expire=now --all && git gc -q --prune=now")
	s.fetch(t)
	for _, dir := range []string{s.into.Mirror, s.into.Local} {
		equal(t, "deleted", refs(t, dir), "HEAD heads/topic/sub replaced/"+first)
		for _, id := range []string{first, second, third} {
			host(t, dir, "test -n \"$(git for-each-ref --contains="+id+" refs/agents)\"")
		}
	}
	// The reverse: a directory of branches becomes a branch.
	s.agent(t, "git switch -qc topic && git commit -q --allow-empty -m fourth")
	s.fetch(t)
	replaced := []string{"replaced/" + first, "replaced/" + third}
	slices.Sort(replaced) // git sorts by name, and the names are hashes
	equal(t, "a branch again", refs(t, s.into.Local), "HEAD heads/topic "+strings.Join(replaced, " "))
}

func TestFetchIntoATargetThatFellBehind(t *testing.T) {
	s := start(t)
	s.agent(t, "git commit -q --allow-empty -m one")
	both := s.into
	s.into.Local = ""
	s.fetch(t)
	tip := s.agent(t, "git commit -q --allow-empty -m two && git rev-parse HEAD")
	s.into = both
	s.fetch(t)
	equal(t, "local", host(t, both.Local, "git rev-parse refs/agents/s1/heads/main"), tip)
	// A clone without common history.
	s.into = Target{Local: t.TempDir()}
	host(t, s.into.Local, "git init -q .")
	s.fetch(t)
	equal(t, "unrelated", host(t, s.into.Local, "git rev-parse refs/agents/s1/heads/main"), tip)
	// A clone that has commits without their history.
	s.into = Target{Local: t.TempDir()}
	host(t, s.into.Local, "git init -q .")
	parent := host(t, both.Local, "git rev-parse refs/agents/s1/heads/main~1")
	host(t, both.Local, "git cat-file commit "+parent+" | git -C '"+s.into.Local+"' hash-object -t commit -w --stdin")
	s.fetch(t)
	host(t, s.into.Local, "git fsck --strict --connectivity-only")
}

func TestFetchedWorkCountsAsPushed(t *testing.T) {
	s := start(t)
	s.agent(t, "git switch -qc p && git commit -q --allow-empty -m pushed && git push -q origin p")
	if w := s.work(t); !w.Clean() {
		t.Errorf("work after pushing = %q, want clean", w.Summary())
	}
	s.agent(t, "echo x >>a && echo y >y && echo z >>c && git add c")
	w := s.work(t)
	equal(t, "work", fmt.Sprint(w.Ahead, w.Dirty, w.Untracked), "0 2 1")
	s.agent(t, "git reset -q --hard && git switch -qc q main && echo q >a && git commit -qam q && git switch -qc r main && echo r >a && git commit -qam r && ! git merge -q q 2>/dev/null")
	w = s.work(t)
	equal(t, "progress", fmt.Sprint(w.InProgress, w.Ahead, len(w.Branches)), "[merge] 2 2")
}

// A clone may be deleted after work was fetched into it.
func TestTargetsThatAreGone(t *testing.T) {
	s := start(t)
	s.agent(t, "git switch -qc work && git commit -q --allow-empty -m one")
	mirror, clone := s.into.Mirror, s.into.Local
	into, keep := Target{Mirror: mirror}.With(clone)
	equal(t, "into", fmt.Sprint(into), fmt.Sprint(Target{Mirror: mirror, Local: clone}))
	equal(t, "keep", fmt.Sprint(keep), fmt.Sprint(Target{Mirror: mirror}))
	s.into = into
	s.fetch(t)
	if err := os.RemoveAll(clone); err != nil {
		t.Fatal(err)
	}
	if w := s.work(t); !w.Clean() { // through {Mirror, Local}, which earlier versions recorded
		t.Errorf("work without the clone = %q, want clean", w.Summary())
	}
	if into, _ = s.into.With(""); into != keep {
		t.Errorf("target of the next fetch = %v, want %v", into, keep)
	}
	if _, err := Fetch(t.Context(), s.g, s.g.dir(), "s1", Target{Mirror: mirror, Local: clone}, s.base, FetchOptions{}); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("Fetch into a missing clone that the user named = %v, want code %v", err, fail.NotFound)
	}
	if err := os.RemoveAll(mirror); err != nil {
		t.Fatal(err)
	}
	if w := s.work(t); w.Ahead != 1 {
		t.Errorf("commits ahead when the only target is missing = %d (%s), want 1", w.Ahead, w.Summary())
	}
	other := t.TempDir()
	if into, keep = s.into.With(other); into != (Target{Local: other}) || keep != into {
		t.Errorf("With(new clone) when the old one is missing = %v, %v, want %v alone", into, keep, other)
	}
	own := t.TempDir() // a repository without a remote has no mirror
	if into, keep = (Target{Local: own}).With(other); into != (Target{Mirror: own, Local: other}) || keep != (Target{Local: own}) {
		t.Errorf("With(clone) of a repository without a remote = %v, %v, want mirror %s and local %s, keeping %s", into, keep, own, other, own)
	}
}

func TestFetchNeverRunsHooksOfTheClone(t *testing.T) {
	s := start(t)
	ran := filepath.Join(t.TempDir(), "ran")
	for _, name := range []string{"reference-transaction", "post-checkout", "post-merge", "pre-auto-gc", "post-index-change", "fsmonitor"} {
		hook := filepath.Join(s.into.Local, ".git", "hooks", name)
		write(t, hook, "#!/bin/sh\ntouch '"+ran+"'\n")
		if err := os.Chmod(hook, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	host(t, s.into.Local, "git config core.fsmonitor .git/hooks/fsmonitor && git update-ref refs/x HEAD && rm '"+ran+"'") // the trap works
	s.agent(t, "git commit -q --allow-empty -m x")
	s.fetch(t)
	write(t, filepath.Join(s.into.Local, "dirt"), "x")
	push(t, s.g, Source{Dir: s.into.Local, Local: true, Dirty: true}, s.g.dir()+"2")
	if _, err := os.Stat(ran); err == nil {
		t.Error("hook of the clone ran, want no hook run")
	}
}

func TestFetchBounds(t *testing.T) {
	s := start(t)
	s.agent(t, "head -c 2000000 /dev/urandom >big && git add big && git commit -qm big")
	before := refs(t, s.into.Mirror)
	tmp := t.TempDir()
	_, err := Fetch(t.Context(), s.g, s.g.dir(), "s1", s.into, s.base, FetchOptions{MaxBytes: 1 << 20, TempDir: tmp})
	if fail.CodeOf(err) != fail.Conflict || !strings.Contains(fmt.Sprint(err), "larger") {
		t.Errorf("Fetch over MaxBytes = %v, want code %v, \"larger\"", err, fail.Conflict)
	}
	s.agent(t, `for i in $(seq 200); do echo "create refs/heads/many/$i HEAD"; done | git update-ref --stdin`)
	_, err = Fetch(t.Context(), s.g, s.g.dir(), "s1", s.into, s.base, FetchOptions{MaxRefs: 100, TempDir: tmp})
	if fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Fetch over MaxRefs = %v, want code %v", err, fail.Conflict)
	}
	equal(t, "references", refs(t, s.into.Mirror), before)
	for _, name := range []string{"", "../x", "a/b", "a b", "-x", "a..b"} {
		if _, err := Fetch(t.Context(), s.g, s.g.dir(), name, s.into, s.base, FetchOptions{}); fail.CodeOf(err) != fail.Usage {
			t.Errorf("Fetch for session %q = %v, want code %v", name, err, fail.Usage)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(tmp, "*")); len(left) > 0 {
		t.Errorf("temporary files after Fetch = %q, want none", left)
	}
	res := s.fetch(t)
	equal(t, "within bounds", len(res.Refs), 202)
}

func TestFetchInterrupted(t *testing.T) {
	s := start(t)
	tip := s.agent(t, "head -c 500000 /dev/urandom >big && git add big && git commit -qm big && git rev-parse HEAD")
	for _, at := range []int{0, 1, 100, 250_000, 499_000} {
		ctx, cancel := context.WithCancel(t.Context())
		s.g.wrap = func(st ssh.IO) ssh.IO {
			if st.Stdin != nil { // only the request for the pack has an input
				st.Stdout = &pipe.Writer{W: st.Stdout, Left: int64(at), Full: cancel}
			}
			return st
		}
		if _, err := Fetch(ctx, s.g, s.g.dir(), "s1", s.into, s.base, FetchOptions{}); !errors.Is(err, context.Canceled) {
			t.Errorf("Fetch cancelled after %d bytes = %v, want %v", at, err, context.Canceled)
		}
		// The connection dies silently.
		s.g.wrap = func(st ssh.IO) ssh.IO {
			if st.Stdin != nil {
				st.Stdout = &pipe.Writer{W: st.Stdout, Left: int64(at), Full: func() {}}
			}
			return st
		}
		if _, err := Fetch(t.Context(), s.g, s.g.dir(), "s1", s.into, s.base, FetchOptions{}); err == nil {
			t.Errorf("Fetch cut at %d bytes = nil, want an error", at)
		}
		equal(t, "references", refs(t, s.into.Local), "")
		cancel()
	}
	s.g.wrap = nil
	s.fetch(t)
	equal(t, "tip", host(t, s.into.Local, "git rev-parse refs/agents/s1/HEAD && find .git -name 'tmp_*'"), tip)
}

// A branch whose name changes only in case replaces the old name, because a disk
// may store only one of them. The commits of the old name are kept.
func TestFetchOfABranchInAnotherCase(t *testing.T) {
	s := start(t)
	tip := s.agent(t, "git switch -qc topic/x && git commit -q --allow-empty -m old && git rev-parse HEAD")
	s.fetch(t)
	s.agent(t, "git switch -qc Topic/X main && git branch -qD topic/x && git commit -q --allow-empty -m new")
	s.fetch(t)
	for _, dir := range []string{s.into.Mirror, s.into.Local} {
		equal(t, "references", refs(t, dir), "HEAD heads/Topic/X replaced/"+tip)
	}
	equal(t, "work", s.work(t).Summary(), "nothing")
}

// A fetch leaves the disk's reserve free: on the disk of the temporary pack, during
// the transfer, and on the target's disk.
func TestFetchLeavesTheDisksReserve(t *testing.T) {
	s := start(t)
	s.agent(t, "head -c 300000 /dev/urandom >big && git add big && git commit -qm big")
	tmp := t.TempDir()
	const enough = 1 << 40
	for name, c := range map[string]struct {
		temp, target int64 // free bytes on each
		full         string
	}{
		"before":        {diskReserve, enough, tmp},
		"in the middle": {diskReserve + 100_000, enough, tmp},
		"at the target": {enough, diskReserve + 500_000, s.into.Mirror},
		"room for both": {enough, diskReserve + 700_000, ""},
	} {
		t.Run(name, func(t *testing.T) {
			into := Target{Mirror: copyOf(t, s.into.Mirror)}
			_, err := Fetch(t.Context(), s.g, s.g.dir(), "s1", into, s.base, FetchOptions{TempDir: tmp, free: func(dir string) (int64, error) {
				if dir == tmp {
					return c.temp, nil
				}
				return c.target, nil
			}})
			if c.full == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if fail.CodeOf(err) != fail.Host || !strings.Contains(err.Error(), "not enough free space") || !strings.HasPrefix(fail.HintOf(err), "df -h ") {
				t.Errorf("Fetch without free space = %v (code %v, hint %q), want code %v, hint \"df -h …\"", err, fail.CodeOf(err), fail.HintOf(err), fail.Host)
			}
			equal(t, "references", refs(t, into.Mirror), "")
			if left, _ := filepath.Glob(filepath.Join(tmp, "*")); len(left) > 0 {
				t.Errorf("temporary files after Fetch = %q, want none", left)
			}
			if left, _ := filepath.Glob(filepath.Join(into.Mirror, "objects", "tmp_*")); len(left) > 0 {
				t.Errorf("temporary objects after Fetch = %q, want none", left)
			}
		})
	}
	_, err := Fetch(t.Context(), s.g, s.g.dir(), "s1", s.into, s.base, FetchOptions{TempDir: tmp, free: func(string) (int64, error) { return 0, errors.New("unknown") }})
	if err == nil || !strings.Contains(err.Error(), "unknown") {
		t.Errorf("Fetch with unknown free space = %v, want \"unknown\"", err)
	}
}
