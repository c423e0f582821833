package repo

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

func TestPushFromAMirror(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	mirror := ensure(t, mirrors(t), ref)
	host(t, mirror.Dir, "git update-ref refs/agents/other/heads/secret feature")
	g := newGuest(t)
	base := push(t, g, mirror.Source(false), g.dir())
	equal(t, "commit", base.Commit, host(t, bare, "git rev-parse main"))
	equal(t, "branch", base.Branch, "main")
	got := g.sh(t, `cd work/repo && git status --short --branch && git fsck --strict && git for-each-ref --format='%(refname)' &&
		git remote get-url origin && cat a c && git symbolic-ref refs/remotes/origin/HEAD && git stash list && ls -A ..`)
	equal(t, "checkout", got, "## main...origin/main\nrefs/heads/main\nrefs/remotes/origin/HEAD\nrefs/remotes/origin/feature\nrefs/remotes/origin/main\nrefs/tags/v1\n"+
		ref.URL+"\none\nthree\nrefs/remotes/origin/main\nrepo")
	// The remote works like that of a clone.
	tip := advance(t, bare, "main")
	equal(t, "pulled", g.sh(t, "cd work/repo && git pull -q && git rev-parse HEAD"), tip)
}

// A push writes only to its TempDir, and leaves nothing there. It sends one pack with its index,
// whatever the clone's configuration says.
func TestPushLeavesNothing(t *testing.T) {
	isolate(t)
	clone, _ := localClone(t)
	host(t, clone, "git config pack.packSizeLimit 1m && head -c 3000000 /dev/urandom >big && cp big big2 && echo 2 >>big2 && git add . && git commit -qm big")
	before := host(t, clone, "find . -printf '%p %T@\\n' | sort")
	src := Source{Dir: clone, Local: true, TempDir: t.TempDir()}
	files := func() []string {
		found, _ := filepath.Glob(filepath.Join(src.TempDir, "*", "*"))
		return found
	}
	var during []string
	g := newGuest(t)
	g.wrap = func(st ssh.IO) ssh.IO {
		if st.Stdin != nil {
			during = append(during, files()...)
		}
		return st
	}
	push(t, g, src, g.dir())
	if !slices.ContainsFunc(during, func(name string) bool { return strings.HasSuffix(name, ".idx") }) {
		t.Errorf("files while the history was sent = %q, want an index", during)
	}
	equal(t, "packs and indexes", g.sh(t, "cd work/repo/.git/objects && git fsck --strict 2>&1 && ls pack | sed 's/.*[.]//' && find . -type f ! -path './pack/*'"), "idx\npack")
	g.wrap = func(st ssh.IO) ssh.IO {
		if st.Stdin != nil {
			g.path = t.TempDir() // no program is found
		}
		return st
	}
	if _, err := Push(t.Context(), g, src, Checkout{Dir: g.dir() + "2"}, nil); err == nil {
		t.Error("Push to a guest without programs = nil, want an error")
	}
	if left := files(); len(left) > 0 {
		t.Errorf("files after the pushes = %q, want none", left)
	}
	equal(t, "the source", host(t, clone, "find . -printf '%p %T@\\n' | sort"), before)
}

// A full disk of the host is reported as such, before and while git writes the pack.
func TestPushFullDisk(t *testing.T) {
	isolate(t)
	clone, _ := localClone(t)
	host(t, clone, "head -c 3000000 /dev/urandom >big && git add . && git commit -qm big")
	for _, free := range []int64{0, 1, 4_000_000} {
		src := Source{Dir: clone, Local: true, TempDir: t.TempDir()}
		ps, err := newPacks(t.Context(), src, nil)
		if err != nil {
			t.Fatal(err)
		}
		ps.free = func(string) (int64, error) { return free, nil }
		ps.refs = host(t, clone, "git rev-parse HEAD") + " HEAD\n"
		if err := ps.write(t.Context()); fail.CodeOf(err) != fail.Host || !strings.Contains(fail.HintOf(err), "df -h") {
			t.Errorf("with %d bytes free: %v (hint %q), want code %v with df", free, err, fail.HintOf(err), fail.Host)
		}
		ps.free = func(string) (int64, error) { return 8_000_000, nil } // a small disk with enough space
		if err := ps.write(t.Context()); err != nil {
			t.Errorf("with 8 MB free: %v, want success", err)
		}
	}
}

// A push ends when others have used up the space that it must leave.
func TestPushKeepsSpaceFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var free atomic.Int64
		ps := &packs{free: func(string) (int64, error) { return free.Load(), nil }}
		free.Store(diskReserve)
		ctx, stop := ps.keepFree(t.Context(), diskReserve)
		defer stop()
		time.Sleep(time.Minute)
		if err := context.Cause(ctx); err != nil {
			t.Errorf("with enough free space: %v", err)
		}
		free.Store(diskReserve - 1)
		time.Sleep(time.Second)
		if err := context.Cause(ctx); fail.CodeOf(err) != fail.Host || !strings.Contains(fail.HintOf(err), "df -h") {
			t.Errorf("with too little: %v (hint %q), want code %v with df", err, fail.HintOf(err), fail.Host)
		}
	})
}

func TestPushOtherBranches(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	mirror := ensure(t, mirrors(t), ref)
	g := newGuest(t)
	src := mirror.Source(false)
	src.Branch = "feature"
	base := push(t, g, src, g.dir())
	equal(t, "commit", base.Commit, host(t, bare, "git rev-parse feature"))
	equal(t, "status", g.sh(t, "cd work/repo && git status -sb"), "## feature...origin/feature")

	src.Branch = "nothere"
	_, err := Push(t.Context(), g, src, Checkout{Dir: g.dir() + "1"}, nil)
	if fail.CodeOf(err) != fail.NotFound || fail.HintOf(err) == "" {
		t.Errorf("Push of a missing branch = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.NotFound)
	}
	host(t, mirror.Dir, "git symbolic-ref HEAD refs/heads/nothere")
	src.Branch = ""
	if base := push(t, g, src, g.dir()+"2"); base.Branch == "" || base.Commit == "" {
		t.Errorf("Push of a HEAD without a branch = %+v, want a branch and a commit", base)
	}
}

func TestPushAgainLeavesTheCheckoutAlone(t *testing.T) {
	isolate(t)
	ref, bare := upstream(t)
	m := mirrors(t)
	g := newGuest(t)
	first := push(t, g, ensure(t, m, ref).Source(false), g.dir())
	g.sh(t, "cd work/repo && git switch -qc mine && echo x >new && git add new && git commit -qm mine && echo y >new")
	before := g.sh(t, "cd work/repo && git rev-parse HEAD && git status --short")
	advance(t, bare, "main")
	again := push(t, g, ensure(t, m, ref).Source(false), g.dir())
	equal(t, "base", fmt.Sprint(again), fmt.Sprint(first))
	equal(t, "work", g.sh(t, "cd work/repo && git rev-parse HEAD && git status --short"), before)
}

func TestPushRefusesAForeignDirectory(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	mirror := ensure(t, mirrors(t), ref)
	g := newGuest(t)
	g.sh(t, "mkdir -p work/repo && echo x >work/repo/x")
	_, err := Push(t.Context(), g, mirror.Source(false), Checkout{Dir: g.dir()}, nil)
	if fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Push into another repository's directory = %v, want code %v", err, fail.Conflict)
	}
	g.sh(t, "rm work/repo/x") // an empty one is fine
	push(t, g, mirror.Source(false), g.dir())
	for _, dir := range []string{"", "/", "repo", "-x", "/a\nb"} {
		if _, err := Push(t.Context(), g, mirror.Source(false), Checkout{Dir: dir}, nil); fail.CodeOf(err) != fail.Usage {
			t.Errorf("Push into %q = %v, want code %v", dir, err, fail.Usage)
		}
	}
}

// cut ends a command's input like a lost connection.
type cut struct {
	r    io.Reader
	left int
}

func (c *cut) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, errors.New("connection lost")
	}
	n, err := c.r.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}

// counted counts what is read.
type counted struct {
	r io.Reader
	n *int
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	*c.n += n
	return n, err
}

func TestPushInterrupted(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	mirror := ensure(t, mirrors(t), ref)
	whole, size := newGuest(t), 0
	whole.wrap = func(st ssh.IO) ssh.IO {
		if st.Stdin != nil {
			st.Stdin = &counted{r: st.Stdin, n: &size}
		}
		return st
	}
	push(t, whole, mirror.Source(false), whole.dir())
	for _, at := range []int{0, 1, 20, 600, 1100, size / 2, size - 1500, size - 1025, size - 1} { // 1,024 bytes end the archive
		g := newGuest(t)
		g.wrap = func(st ssh.IO) ssh.IO {
			if st.Stdin != nil {
				st.Stdin = &cut{r: st.Stdin, left: at}
			}
			return st
		}
		if _, err := Push(t.Context(), g, mirror.Source(false), Checkout{Dir: g.dir()}, nil); err == nil {
			t.Errorf("Push cut at %d of %d bytes = nil, want an error", at, size)
		}
		if _, err := os.Stat(g.dir()); err == nil {
			t.Errorf("Push cut at %d bytes left a checkout, want none", at)
		}
		// The leftovers of a guest that lost power.
		write(t, filepath.Join(g.home, "work", ".agent-push-repo.dead", ".git", "x"), "half")
		g.wrap = nil
		push(t, g, mirror.Source(false), g.dir())
		equal(t, "checkout", g.sh(t, "cd work/repo && git fsck --strict && git status -sb && ls -A .."), "## main...origin/main\nrepo")
	}
}

func TestPushCancelled(t *testing.T) {
	isolate(t)
	ref, _ := upstream(t)
	mirror := ensure(t, mirrors(t), ref)
	g := newGuest(t)
	ctx, cancel := context.WithCancel(t.Context())
	g.wrap = func(st ssh.IO) ssh.IO {
		if st.Stdin != nil {
			cancel()
		}
		return st
	}
	if _, err := Push(ctx, g, mirror.Source(false), Checkout{Dir: g.dir()}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled Push = %v, want %v", err, context.Canceled)
	}
	g.wrap = nil
	push(t, g, mirror.Source(false), g.dir())
}

func TestPushEmptyRepositories(t *testing.T) {
	isolate(t)
	dir := filepath.Join(t.TempDir(), "empty.git")
	host(t, "/", "git init -q --bare -b trunk '"+dir+"'")
	ref, err := Parse("file://"+dir, "/")
	if err != nil {
		t.Fatal(err)
	}
	g := newGuest(t)
	base := push(t, g, ensure(t, mirrors(t), ref).Source(false), g.dir())
	equal(t, "base", fmt.Sprint(base), fmt.Sprint(Base{Branch: "main"}))
	equal(t, "guest", g.sh(t, "cd work/repo && git symbolic-ref HEAD && git remote get-url origin"), "refs/heads/main\n"+ref.URL)

	local := t.TempDir()
	host(t, local, "git init -q . && echo x >file")
	base = push(t, g, Source{Dir: local, Local: true, Dirty: true}, g.dir()+"2")
	equal(t, "commit", base.Commit, "")
	equal(t, "files", g.sh(t, "cd work/repo2 && git status --short && git remote"), "?? file")
	w, err := Work(t.Context(), g, g.dir()+"2", base)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "untracked", w.Untracked, 1)
	var out bytes.Buffer
	if err := Diff(t.Context(), g, g.dir()+"2", base, DiffOptions{NameOnly: true}, &out); err != nil {
		t.Fatal(err)
	}
	equal(t, "diff", out.String(), "file\n")
}

// localClone creates a clone with an upstream, its own branches, and changes.
func localClone(t *testing.T) (dir, bare string) {
	t.Helper()
	_, bare = upstream(t)
	dir = filepath.Join(t.TempDir(), "clone")
	host(t, "/", "git clone -q '"+bare+"' '"+dir+"'")
	host(t, dir, `git remote set-url origin https://h.test/owner/project
		git switch -qc topic && echo local >l && git add l && git commit -qm local && git switch -q main`)
	return dir, bare
}

// state returns all parts of a local clone whose change a user could notice.
func state(t *testing.T, dir string) string {
	t.Helper()
	text := host(t, dir, `git for-each-ref | grep -v refs/agents/ || :; git stash list; cat .git/HEAD; find . -type f -not -path './.git/objects/*' -not -path './.git/refs/agents/*' | sort`)
	for _, name := range []string{".git/index", ".git/config"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		text += fmt.Sprintf("%x\n", sha256.Sum256(data))
	}
	return text
}

func TestPushALocalCloneWithItsChanges(t *testing.T) {
	home := isolate(t)
	dir, _ := localClone(t)
	host(t, home, "git config --global core.excludesFile '"+home+"/ignored'")
	write(t, filepath.Join(home, "ignored"), "*.swp\n")
	host(t, dir, `echo changed >a && git rm -q --cached c && rm c && mkdir d && printf 'bin\0ary' >d/new && echo '*.o' >.gitignore && echo x >x.o && echo x >x.swp
		echo x >'-dash' && printf x >"$(printf 'new\nline')" && echo x >'ünï' && ln -s a link && echo s >staged && git add staged && echo later >>staged
		chmod +x a && mkdir inner && git -C inner init -q`)
	before, objects := state(t, dir), host(t, dir, "find .git/objects -type f | sort")
	ref, err := Parse(".", dir)
	if err != nil {
		t.Fatal(err)
	}
	g := newGuest(t)
	base := push(t, g, ensure(t, mirrors(t), ref).Source(true), g.dir())
	equal(t, "the user's clone", state(t, dir), before)
	equal(t, "its objects", host(t, dir, "find .git/objects -type f | sort"), objects)
	equal(t, "commit", base.Commit, host(t, dir, "git rev-parse HEAD"))
	equal(t, "status", g.sh(t, "cd work/repo && git -c core.quotePath=true status --short -b && git diff --cached --stat && cat staged && test -x a && readlink link"),
		`## main...origin/main
 M a
 D c
?? -dash
?? .gitignore
?? d/
?? link
?? "new\nline"
?? staged
?? "\303\274n\303\257"
s
later
a`)
	equal(t, "refs", g.sh(t, "cd work/repo && git remote get-url origin && git for-each-ref --format='%(refname)'"),
		"https://h.test/owner/project\nrefs/heads/main\nrefs/heads/topic\nrefs/remotes/origin/HEAD\nrefs/remotes/origin/feature\nrefs/remotes/origin/main\nrefs/tags/v1")
	equal(t, "bytes", g.sh(t, "cd work/repo && od -An -c d/new | tr -d ' '"), `bin\0ary`)

	// The user's own branches are not the agent's work.
	w, err := Work(t.Context(), g, g.dir(), base)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "ahead", w.Ahead, 0)

	src := ensure(t, mirrors(t), ref).Source(true)
	src.Branch = "topic"
	if _, err := Push(t.Context(), g, src, Checkout{Dir: g.dir() + "2"}, nil); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Push of changes for another branch = %v, want code %v", err, fail.Usage)
	}
	src.Dirty, src.Branch = false, "feature" // only at the remote
	equal(t, "branch", push(t, g, src, g.dir()+"3").Commit, host(t, dir, "git rev-parse origin/feature"))
}

func TestPushUnusualClones(t *testing.T) {
	isolate(t)
	dir, bare := localClone(t)
	for name, tc := range map[string]struct{ make, status string }{
		"detached": {"git clone -q '" + dir + "' X && cd X && git checkout -q --detach HEAD~1", "## HEAD (no branch)"},
		"worktree": {"git -C '" + dir + "' worktree add -q ../X topic", "## topic"},
		"shallow":  {"git clone -q --depth 1 'file://" + bare + "' X", "## main"},
		"shared":   {"git clone -q -s '" + dir + "' X", "## main"},
		"packed":   {"git clone -q '" + dir + "' X && cd X && git gc -q && git pack-refs --all", "## main"},
		"sha256":   {"git init -q --object-format=sha256 X && cd X && echo x >x && git add x && git commit -qm x", "## main"},
	} {
		t.Run(name, func(t *testing.T) {
			x := filepath.Join(filepath.Dir(dir), "X")
			host(t, filepath.Dir(dir), tc.make)
			defer os.RemoveAll(x)
			write(t, filepath.Join(x, "dirt"), "dirt")
			g := newGuest(t)
			base := push(t, g, Source{Dir: x, Local: true, Dirty: true}, g.dir())
			equal(t, "status", g.sh(t, "cd work/repo && git status -sb && git fsck 2>&1 | grep -v dangling || :"), tc.status+"\n?? dirt")
			equal(t, "commit", base.Commit, host(t, x, "git rev-parse HEAD"))
			// And back.
			tip := g.sh(t, "cd work/repo && git add . && git commit -qm work && git rev-parse HEAD")
			res, err := Fetch(t.Context(), g, g.dir(), "s", Target{Local: x}, base, FetchOptions{})
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "commits", res.Commits, 1)
			equal(t, "fetched", host(t, x, "git rev-parse refs/agents/s/HEAD"), tip)
		})
	}
	t.Run("partial", func(t *testing.T) {
		x := filepath.Join(t.TempDir(), "X")
		host(t, bare, "git config uploadpack.allowFilter true && git clone -q --filter=blob:none 'file://"+bare+"' '"+x+"'")
		_, err := Push(t.Context(), newGuest(t), Source{Dir: x, Local: true}, Checkout{Dir: filepath.Join(t.TempDir(), "repo")}, nil)
		if fail.CodeOf(err) != fail.Conflict || fail.HintOf(err) == "" {
			t.Errorf("Push of an unusual clone = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.Conflict)
		}
	})
}

// Work that git status does not show still exists only in the guest.
func TestHiddenWork(t *testing.T) {
	for name, c := range map[string]struct{ script, want string }{
		"nothing":             {"true", "nothing"},
		"an ignored change":   {"git update-index --assume-unchanged a && echo changed >a", "1 changed file"},
		"a skipped file":      {"git update-index --skip-worktree a && echo changed >a", "1 changed file"},
		"a sparse checkout":   {"git sparse-checkout set --no-cone /b", "nothing"},
		"a nested repository": {"git init -q n && git -C n commit -q --allow-empty -m inner && git add n 2>/dev/null && git commit -qm outer && git push -q", "1 unpushed commit in a submodule"},
		"one in a work tree":  {"git worktree add -q ../t && cd ../t && git init -q n && git -C n commit -q --allow-empty -m inner && git add n 2>/dev/null && git commit -qm outer && git push -q origin HEAD:refs/heads/t && git fetch -q", "1 unpushed commit in a submodule"},
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			ref, _ := upstream(t)
			g := newGuest(t)
			base := push(t, g, ensure(t, mirrors(t), ref).Source(false), g.dir())
			g.sh(t, "cd work/repo && git config user.name a && git config user.email a@localhost && "+c.script)
			w, err := Work(t.Context(), g, g.dir(), base)
			if err != nil {
				t.Fatal(err)
			}
			equal(t, "work", w.Summary(), c.want)
		})
	}
}

func TestPushSubmodules(t *testing.T) {
	isolate(t)
	_, sub := upstream(t)
	ref, bare := upstream(t)
	work := t.TempDir()
	host(t, work, `git clone -q '`+bare+`' w && cd w && git -c protocol.file.allow=always submodule --quiet add '`+sub+`' lib && git commit -qm sub && git push -q`)
	mirror := ensure(t, mirrors(t), ref)
	g := newGuest(t)
	base := push(t, g, mirror.Source(false), g.dir())
	equal(t, "warnings", len(base.Warnings), 0)
	equal(t, "submodule", g.sh(t, "cat work/repo/lib/a"), "one")

	// Work inside a submodule is reported even if the outer commit hides it.
	g.sh(t, "cd work/repo/lib && git switch -qc x && git commit -q --allow-empty -m inner && cd .. && git add lib && git commit -qm outer && git push -q")
	w, err := Work(t.Context(), g, g.dir(), base)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "work", w.Summary(), "1 unpushed commit in a submodule")
	// A stash has two commits.
	g.sh(t, "cd work/repo/lib && git push -q origin x && echo changed >a && git stash -q")
	if w, err = Work(t.Context(), g, g.dir(), base); err != nil {
		t.Fatal(err)
	}
	equal(t, "work in a stash", w.Summary(), "2 unpushed commits in submodules")

	// A submodule that cannot be fetched causes a warning; the checkout is
	// complete.
	host(t, sub, "mv ../project.git ../gone.git")
	g = newGuest(t)
	var said []string
	base, err = Push(t.Context(), g, mirror.Source(false), Checkout{Dir: g.dir()}, func(s string) { said = append(said, s) })
	if err != nil {
		t.Fatal(err)
	}
	if len(base.Warnings) != 1 || !strings.Contains(base.Warnings[0], "submodule") || !strings.Contains(strings.Join(said, "\n"), "warning: ") {
		t.Errorf("warnings = %q, progress %q, want one about submodules, in both", base.Warnings, said)
	}
	equal(t, "file", g.sh(t, "cat work/repo/a"), "one")
}

func TestPushManyFiles(t *testing.T) {
	isolate(t)
	dir := t.TempDir()
	host(t, dir, `git init -q . && mkdir many && cd many && seq 10000 | split -l 1 -a 4 - f && git add . && git commit -qm many`)
	g := newGuest(t)
	base := push(t, g, Source{Dir: dir, Local: true}, g.dir())
	equal(t, "files", g.sh(t, "ls work/repo/many | wc -l"), "10000")
	g.sh(t, `cd work/repo && for f in many/faaa*; do echo x >>"$f"; done && seq 5000 | split -l 1 -a 4 - u`)
	w, err := Work(t.Context(), g, g.dir(), base)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "work", fmt.Sprint(w.Dirty, w.Untracked), "26 5000")
}
