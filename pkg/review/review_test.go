package review_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
)

// clone is a user's clone, in which a test plays the agent too.
type clone struct {
	*testing.T
	dir   string
	state string
	base  string // commit
}

// newClone returns a clone with some files on the branch main.
func newClone(t *testing.T, files map[string]string) clone {
	t.Helper()
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("XDG_CONFIG_HOME", filepath.Join(home, ".config"))
	t.Setenv("TMPDIR", t.TempDir())
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "GIT_") {
			t.Setenv(name, "")
			os.Unsetenv(name)
		}
	}
	c := clone{T: t, dir: filepath.Join(home, "clone"), state: filepath.Join(home, "state")}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	c.git("config --global user.name 'The User'")
	c.git("config --global user.email user@example.com")
	c.git("init -q -b main")
	c.write(files)
	c.git("add -A && git commit -q --allow-empty -m start")
	c.base = c.git("rev-parse HEAD")
	return c
}

// git runs a shell line that begins with git, in the clone.
func (c clone) git(line string) string { return c.sh("git " + line) }

func (c clone) sh(line string) string {
	c.Helper()
	cmd := exec.CommandContext(c.Context(), "sh", "-ec", line)
	cmd.Dir = c.dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.Fatalf("%s: %v\n%s", line, err, out)
	}
	return strings.TrimSpace(string(out))
}

func (c clone) write(files map[string]string) {
	c.Helper()
	for name, text := range files {
		name = filepath.Join(c.dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			c.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			c.Fatal(err)
		}
	}
}

// agent commits what a shell line does to the files of a session, as that session's agent.
func (c clone) agent(session, line string) {
	c.Helper()
	tree := filepath.Join(c.TempDir(), "agent")
	ref := "refs/agents/" + session + "/HEAD"
	c.git(`rev-parse -q --verify ` + ref + ` >/dev/null || git update-ref ` + ref + ` ` + c.base)
	c.git(`worktree add -q --detach ` + tree + ` ` + ref)
	c.sh(`cd ` + tree + ` && ` + line + ` && git add -A && git -c user.name='An Agent' -c user.email=agent@example.com commit -q --allow-empty -m work && git update-ref ` + ref + ` HEAD`)
	c.git(`worktree remove --force ` + tree)
}

func (c clone) options(sessions ...string) review.Options {
	o := review.Options{Clone: c.dir, Dir: c.state}
	for _, s := range sessions {
		o.Sources = append(o.Sources, review.Source{ID: "id-" + s, Name: s, Title: s, Base: repo.Base{Commit: c.base, Branch: "main"}})
	}
	return o
}

func (c clone) open(sessions ...string) *review.Work { return c.openWith(c.options(sessions...)) }

func (c clone) openWith(o review.Options) *review.Work {
	c.Helper()
	w, err := review.Open(c.Context(), o)
	if err != nil {
		c.Fatalf("open the review: %v", err)
	}
	c.Cleanup(func() {
		if err := w.Close(); err != nil {
			c.Errorf("close the review: %v", err)
		}
	})
	return w
}

// land lands what a request says, which must succeed.
func (c clone) land(w *review.Work, r review.LandRequest) review.Landed {
	c.Helper()
	done, err := w.Land(c.Context(), r)
	if err != nil {
		c.Fatalf("land: %v", err)
	}
	return done
}

// names returns the files under review, each after its status.
func names(w *review.Work) []string {
	all := []string{}
	for _, a := range w.Attempts() {
		for _, f := range a.Files() {
			all = append(all, fmt.Sprintf("%c %s", f.Status, f.Path))
		}
	}
	return all
}

// choose chooses the lines of a file for which want returns true.
func (c clone) choose(a *review.Attempt, path string, want func(review.Line) bool) {
	c.Helper()
	for i, f := range a.Files() {
		if f.Path != path {
			continue
		}
		p, err := a.Patch(c.Context(), i)
		if err != nil {
			c.Fatalf("read the patch of %s: %v", path, err)
		}
		for _, h := range p.Hunks {
			for _, l := range h.Lines {
				if l.Key != "" && want(l) {
					if err := a.Choose(c.Context(), i, true, l.Key); err != nil {
						c.Fatalf("choose a line of %s: %v", path, err)
					}
				}
			}
		}
		return
	}
	c.Fatalf("%s is not under review", path)
}

func (c clone) equal(what string, got, want any) {
	c.Helper()
	if d := cmp.Diff(want, got); d != "" {
		c.Errorf("%s (-want +got):\n%s", what, d)
	}
}

func text(want string) func(review.Line) bool {
	return func(l review.Line) bool { return l.Text == want }
}

func everything(review.Line) bool { return true }

func TestLandPaths(t *testing.T) {
	c := newClone(t, map[string]string{"a": "1\n2\n3\n", "dir/b": "b\n", "c": "c\n"})
	c.agent("s", "echo 4 >>a; echo more >>dir/b; echo new >dir/new; rm c")
	before := c.sh("git status --porcelain; cat .git/HEAD; cksum .git/index")
	w := c.open("s")
	c.equal("files", names(w), []string{"M a", "D c", "M dir/b", "A dir/new"})

	done := c.land(w, review.LandRequest{Paths: []string{"dir/"}, Message: "Add b"})
	c.equal("landed", done.Commits, []review.LandedCommit{{Session: "s", Commit: done.Tip, Files: []string{"dir/b", "dir/new"}}})
	c.equal("branch", c.git("diff --name-status main review/s"), "M\tdir/b\nA\tdir/new")
	c.equal("parent", c.git("rev-parse review/s^"), c.base)
	c.equal("commit", c.git("log -1 --format='%an <%ae>%n%B' review/s"), "The User <user@example.com>\nAdd b\n\nCo-authored-by: An Agent <agent@example.com>\nAgent-Session: s\nAgent-Commit: "+c.git("rev-parse refs/agents/s/HEAD"))
	c.equal("files after landing", names(w), []string{"M a", "D c"})
	c.equal("landed files", w.Attempts()[0].Landed(), []string{"dir/b", "dir/new"})

	// What the agent changes after that is offered, and only that.
	c.agent("s", "echo again >>dir/b")
	again := c.open("s")
	c.equal("files after the agent went on", names(again), []string{"M a", "D c", "M dir/b"})
	c.land(again, review.LandRequest{Paths: []string{"."}})
	c.equal("tree", c.git("rev-parse review/s^{tree}"), c.git("rev-parse refs/agents/s/HEAD^{tree}"))
	c.equal("commits", c.git("rev-list --count main..review/s"), "2")
	c.equal("files in the end", names(again), []string{})
	c.equal("work tree, index and HEAD", c.sh("git status --porcelain; cat .git/HEAD; cksum .git/index"), before)
	if _, err := again.Land(t.Context(), review.LandRequest{Paths: []string{"."}}); err == nil {
		t.Error("land nothing: no error, want one")
	}
}

func TestLandLines(t *testing.T) {
	c := newClone(t, map[string]string{"a": "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n"})
	c.agent("s", `printf '0\n1\ntwo\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13' >a`)
	w := c.open("s")
	a := w.Attempts()[0]
	c.choose(a, "a", text("two"))
	c.choose(a, "a", text("2"))
	c.equal("mark", a.Mark(0), review.Part)
	c.land(w, review.LandRequest{})
	c.equal("content", c.git("show review/s:a"), "1\ntwo\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12")
	a = w.Attempts()[0]
	c.equal("mark after landing", a.Mark(0), review.None)
	c.choose(a, "a", text("13"))
	c.land(w, review.LandRequest{})
	c.equal("last line", c.git("show review/s:a | tail -n 1"), "13")
	c.choose(w.Attempts()[0], "a", everything)
	c.land(w, review.LandRequest{})
	c.equal("files in the end", names(w), []string{})
	c.equal("tree", c.git("rev-parse review/s^{tree}"), c.git("rev-parse refs/agents/s/HEAD^{tree}"))
}

// Once, marks were kept after a landing, and chose other lines with the same text.
func TestMarksDoNotChooseEqualLines(t *testing.T) {
	c := newClone(t, map[string]string{"a": "x\ny\n"})
	c.agent("s", `printf 'same\nsame\nx\nsame\nsame\ny\n' >a`)
	w := c.open("s")
	first := true
	c.choose(w.Attempts()[0], "a", func(review.Line) bool { is := first; first = false; return is })
	c.land(w, review.LandRequest{})
	c.equal("content", c.git("show review/s:a"), "same\nx\ny")
	a := w.Attempts()[0]
	c.equal("mark", a.Mark(0), review.None)
	if _, err := a.Patch(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	c.equal("mark of the patch", a.Mark(0), review.None)
	c.equal("mark in another process", c.open("s").Attempts()[0].Mark(0), review.None)
	c.agent("s", `printf 'same\nsame\nx\nsame\nsame\ny\nsame\n' >a`)
	later := c.open("s").Attempts()[0]
	if _, err := later.Patch(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	c.equal("mark after the agent went on", later.Mark(0), review.None)
}

// A line that the agent adds later, with the text of a chosen one, does not take over its mark.
func TestMarksKnowTheirNeighbours(t *testing.T) {
	c := newClone(t, map[string]string{"a": "1\n2\n3\n4\n5\n6\n7\n8\n9\n"})
	c.agent("s", `printf '1\n2\n3\n4\n5\n6\n7\n8\n9\nsame\n' >a`)
	w := c.open("s")
	c.choose(w.Attempts()[0], "a", text("same"))
	c.agent("s", `printf 'same\n1\n2\n3\n4\n5\n6\n7\n8\n9\nsame\n' >a`)
	if err := w.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.land(w, review.LandRequest{})
	c.equal("content", c.git("show review/s:a"), "1\n2\n3\n4\n5\n6\n7\n8\n9\nsame")
}

func TestMarksSurviveNewCommits(t *testing.T) {
	c := newClone(t, map[string]string{"a": "1\n2\n3\n4\n5\n6\n7\n8\n9\n", "b": "b\nb\nb\n"})
	c.agent("s", `sed -i 's/^5$/five/' a; echo more >>b`)
	w := c.open("s")
	c.choose(w.Attempts()[0], "a", text("five"))
	if err := w.Attempts()[0].ChooseFile(1, true); err != nil {
		t.Fatal(err)
	}
	c.agent("s", `sed -i 's/^9$/nine/' a; sed -i '1s/^/evil\n/' b`)
	if err := w.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	a := w.Attempts()[0]
	c.equal("marks before the patches are read", []review.Mark{a.Mark(0), a.Mark(1)}, []review.Mark{review.Part, review.Part})
	c.land(w, review.LandRequest{})
	c.equal("a", c.git("diff main review/s -- a | grep '^[+-][^+-]'"), "+five")
	c.equal("b", c.git("show review/s:b"), "b\nb\nb\nmore")
}

// What another process chose meanwhile is kept.
func TestTwoProcesses(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n", "b": "b\n"})
	c.agent("s", `echo 2 >>a; echo 2 >>b`)
	one, two := c.open("s"), c.open("s")
	if err := one.Attempts()[0].ChooseFile(0, true); err != nil {
		t.Fatal(err)
	}
	if err := two.Attempts()[0].ChooseFile(1, true); err != nil {
		t.Fatal(err)
	}
	a := c.open("s").Attempts()[0]
	c.equal("marks", []review.Mark{a.Mark(0), a.Mark(1)}, []review.Mark{review.All, review.All})
	c.land(one, review.LandRequest{Paths: []string{"a"}})
	if _, err := two.Land(t.Context(), review.LandRequest{Paths: []string{"b"}}); err == nil {
		t.Error("land from a list that is old: no error, want a conflict")
	}
	c.equal("files on the branch", c.git("show review/s:a review/s:b"), "a\n2\nb")
	c.land(two, review.LandRequest{Paths: []string{"b"}}) // the list is up to date now
	c.equal("b on the branch", c.git("show review/s:b"), "b\n2")
}

func TestHostileFiles(t *testing.T) {
	c := newClone(t, map[string]string{"crlf": "1\r\n2\r\n", "mode": "x\n", "old name": "1\n2\n3\n4\n5\n6\n7\n8\n", "dir/in": "x\n", "file": "x\n", "gone": "1\n2\n", "bin": "a\x00b", "link": "x\n", "huge": "x\n"})
	c.agent("s", `
printf '1\r\ntwo\r\n3\r\n' >crlf
chmod +x mode
sed 's/^8$/eight/' 'old name' >'new name'; rm 'old name'
rm -r dir && echo file >dir
rm file && mkdir file && echo x >file/in
rm gone
printf 'a\000c' >bin
rm link && ln -s /etc/passwd link
head -c 4000000 /dev/zero | tr '\0' x >huge
printf 'x' >"$(printf 'new\nline\033[31m')"
: >empty`)
	w := c.open("s")
	a := w.Attempts()[0]
	whole := map[string]string{}
	for i, f := range a.Files() {
		p, err := a.Patch(t.Context(), i)
		if err != nil {
			t.Fatalf("patch of %q: %v", f.Path, err)
		}
		if p.Whole != "" {
			whole[f.Path] = p.Whole
		}
	}
	c.equal("files that can only be chosen as a whole", whole, map[string]string{"bin": "binary file", "huge": "too large to show", "link": "symbolic link"})
	if err := a.ChooseAll(true); err != nil {
		t.Fatal(err)
	}
	c.land(w, review.LandRequest{})
	c.equal("tree", c.git("rev-parse review/s^{tree}"), c.git("rev-parse refs/agents/s/HEAD^{tree}"))
	c.equal("files in the end", names(w), []string{})
}

func TestPartsOfFiles(t *testing.T) {
	c := newClone(t, map[string]string{"mode": "x\n", "old": "1\n2\n3\n4\n5\n6\n7\n8\n", "gone": "1\n2\n3\n", "crlf": "1\r\n2\r\n"})
	c.agent("s", `chmod +x mode; echo y >>mode; sed 's/^8$/eight/' old >new; rm old gone; printf '1\r\n2\r\n3\r\n4' >crlf; printf 'one\ntwo' >added`)
	w := c.open("s")
	a := w.Attempts()[0]
	c.choose(a, "mode", text("y"))
	c.choose(a, "new", func(l review.Line) bool { return l.Text == "8" || l.Text == "eight" })
	c.choose(a, "gone", text("2"))
	c.choose(a, "crlf", text("3\r"))
	c.choose(a, "added", text("two"))
	c.land(w, review.LandRequest{})
	c.equal("files", c.git("ls-tree -r review/s --format='%(objectmode) %(path)'"), "100644 added\n100644 crlf\n100644 gone\n100644 mode\n100644 old")
	c.equal("contents", c.sh("for f in added crlf gone mode old; do git show review/s:$f | tr '\\r\\n' 'R,'; echo; done"), "two\n1R,2R,3R,\n1,3,\nx,y,\n1,2,3,4,5,6,7,eight,")
	if err := w.Attempts()[0].ChooseAll(true); err != nil {
		t.Fatal(err)
	}
	c.land(w, review.LandRequest{})
	c.equal("tree", c.git("rev-parse review/s^{tree}"), c.git("rev-parse refs/agents/s/HEAD^{tree}"))
}

// Once, a submodule that became a file could not land.
func TestSubmodules(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.git("update-index --add --cacheinfo 160000," + c.base + ",sub && git update-index --add --cacheinfo 160000," + c.base + ",other && git commit -qm modules")
	c.base = c.git("rev-parse HEAD")
	c.agent("s", `git rm -q --cached sub other && rm -rf sub other && echo file >sub && ln -s a other && git add -A && git update-index --add --cacheinfo 160000,`+c.base+`,new && git commit -qm work`)
	w := c.open("s")
	c.equal("files", names(w), []string{"T other", "T sub"})
	c.land(w, review.LandRequest{Paths: []string{"."}})
	c.equal("tree", c.git("rev-parse review/s^{tree}"), c.git("rev-parse refs/agents/s/HEAD^{tree}"))
}

// A file that takes the place of a directory lands only with the removal of what was there.
func TestFileInsteadOfDirectory(t *testing.T) {
	c := newClone(t, map[string]string{"dir/a": "1\n2\n3\n", "dir/b": "x\ny\nz\n", "f": "f\n"})
	c.agent("s", `rm -r dir && echo file >dir && rm f && mkdir f && echo in >f/in`)
	o := c.options("s")
	o.Paths = []string{"f/in"} // as on the command line
	w := c.open("s")
	for what, w := range map[string]*review.Work{"all files": w, "that file": c.openWith(o)} {
		if _, err := w.Land(t.Context(), review.LandRequest{Paths: o.Paths}); err == nil {
			t.Errorf("land f/in alone in a review of %s: no error, want one: f would be removed", what)
		}
	}
	for i, f := range w.Attempts()[0].Files() {
		if f.Path == "dir" {
			if err := w.Attempts()[0].ChooseFile(i, true); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := w.Land(t.Context(), review.LandRequest{}); err == nil {
		t.Error("land dir alone: no error, want one: dir/a and dir/b would be removed")
	}
	c.land(w, review.LandRequest{Paths: []string{"dir"}}) // the removals are in that path too
	c.equal("files", c.git("ls-tree -r --name-only review/s"), "dir\nf")
}

func TestRename(t *testing.T) {
	c := newClone(t, map[string]string{"lib/old": "1\n2\n3\n4\n5\n6\n"})
	c.agent("s", `mkdir src && mv lib/old src/new`)
	w := c.open("s")
	c.equal("files", names(w), []string{"R src/new"})
	c.land(w, review.LandRequest{Paths: []string{"lib"}})
	c.equal("files", c.git("ls-tree -r --name-only review/s"), "src/new")
}

func TestTooManyFiles(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.agent("s", `echo 1 >b; echo 1 >c`)
	o := c.options("s")
	o.MaxFiles = 1
	if _, err := review.Open(t.Context(), o); err == nil || !strings.Contains(err.Error(), "more than the limit") {
		t.Errorf("review of 2 files with a limit of 1: %v, want an error about the limit", err)
	}
}

func TestPathsLimitTheReview(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.agent("s", `mkdir d; echo 1 >d/b; echo 1 >c`)
	o := c.options("s")
	o.Paths = []string{"./d/"}
	c.equal("files", names(c.openWith(o)), []string{"A d/b"})
}

func TestNothingFetched(t *testing.T) {
	c := newClone(t, nil)
	if _, err := review.Open(t.Context(), c.options("s")); err == nil || !strings.Contains(err.Error(), "no commits of session s were fetched") {
		t.Errorf("review without commits: %v, want an error that says so", err)
	}
}

// Refresh fetches first, and a fetch that fails leaves the review as it was.
func TestRefreshFetches(t *testing.T) {
	c := newClone(t, map[string]string{"a": "a\n"})
	c.agent("s", `echo 2 >>a`)
	o, problem := c.options("s"), errors.New("no connection")
	o.Fetch = func(context.Context) ([]review.Source, error) {
		now := slices.Clone(o.Sources)
		if problem == nil {
			c.agent("s", "echo 3 >b")
			now[0].Results = []lifecycle.Result{{Name: "tests"}}
		}
		return now, problem
	}
	w := c.openWith(o)
	if err := w.Refresh(t.Context()); !errors.Is(err, problem) {
		t.Errorf("refresh without a connection: %v, want its error", err)
	}
	c.equal("files", names(w), []string{"M a"})
	problem = nil
	if err := w.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.equal("files after a refresh", names(w), []string{"M a", "A b"})
	if got := w.Attempts()[0].Source().Results; len(got) != 1 || got[0].Name != "tests" {
		t.Errorf("results after a refresh = %+v, want that of the tests", got)
	}
}

// The first list comes from one comparison: 5000 files cost little more than one.
func BenchmarkOpen5000Files(b *testing.B) {
	dir := b.TempDir()
	b.Setenv("HOME", dir)
	script := `git init -q -b main . && git config user.name x && git config user.email x@example.com && mkdir d && for i in $(seq 5000); do echo $i >d/$i; done
git add -A && git commit -qm base && for i in $(seq 5000); do echo x$i >>d/$i; done && git add -A && git commit -qm work && git update-ref refs/agents/s/HEAD HEAD && git reset -q --hard HEAD~`
	cmd := exec.CommandContext(b.Context(), "sh", "-ec", script)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	base, err := exec.CommandContext(b.Context(), "git", "-C", dir, "rev-parse", "HEAD").Output()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		w, err := review.Open(b.Context(), review.Options{Clone: dir, Dir: b.TempDir(), Sources: []review.Source{{ID: "s", Name: "s", Base: repo.Base{Commit: strings.TrimSpace(string(base)), Branch: "main"}}}})
		if err != nil {
			b.Fatal(err)
		}
		if n := len(w.Attempts()[0].Files()); n != 5000 {
			b.Fatalf("files: %d, want 5000", n)
		}
		w.Close()
	}
}
