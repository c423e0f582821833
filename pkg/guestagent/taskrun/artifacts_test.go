package taskrun

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// checkout is the repository that a task began with, and its collections.
type checkout struct {
	*testing.T
	attempt   Attempt
	dir, base string
	ask       guestproto.TaskCollect
}

func newCheckout(t *testing.T, files map[string]string) *checkout {
	t.Helper()
	top := t.TempDir()
	t.Setenv("HOME", filepath.Join(top, "home"))
	t.Setenv("GIT_CONFIG_NOSYSTEM", "1")
	c := &checkout{T: t, dir: filepath.Join(top, "work tree")}
	var err error
	if c.attempt, err = Open(sys.Guest{Root: filepath.Join(top, "guest"), Fake: true}, "0123456789ab/1"); err != nil {
		t.Fatal(err)
	}
	c.must(os.MkdirAll(c.attempt.dir, 0o700), os.MkdirAll(filepath.Join(top, "home"), 0o700), os.MkdirAll(c.dir, 0o755))
	c.git("init", "-q", "-b", "main")
	c.git("config", "user.name", "agent")
	c.git("config", "user.email", "agent@localhost.invalid")
	c.git("config", "protocol.file.allow", "always")
	for name, text := range files {
		c.put(name, text)
	}
	c.git("add", "-A")
	c.git("commit", "-q", "--allow-empty", "-m", "base")
	c.base = c.git("rev-parse", "HEAD")
	c.ask = guestproto.TaskCollect{Version: guestproto.Version, Dir: c.dir, Base: c.base, MaxFiles: guestproto.MaxArtifacts, MaxBytes: 4 << 30}
	return c
}

func (c *checkout) must(errs ...error) {
	c.Helper()
	for _, err := range errs {
		if err != nil {
			c.Fatal(err)
		}
	}
}

func (c *checkout) put(name, text string) {
	c.Helper()
	path := filepath.Join(c.dir, name)
	c.must(os.MkdirAll(filepath.Dir(path), 0o755))
	if target, ok := strings.CutPrefix(text, "→"); ok {
		c.must(os.RemoveAll(path), os.Symlink(target, path))
		return
	}
	c.must(os.WriteFile(path, []byte(text), 0o644))
}

func (c *checkout) gitIn(dir string, env []string, stdin io.Reader, args ...string) (string, error) {
	cmd := exec.CommandContext(c.Context(), "git", args...)
	cmd.Dir, cmd.Stdin = dir, stdin
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (c *checkout) git(args ...string) string {
	c.Helper()
	out, err := c.gitIn(c.dir, nil, nil, args...)
	if err != nil {
		c.Fatalf("git %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return out
}

// collection is the result of one collection.
type collection struct {
	id      string
	index   map[string]int // by name
	files   map[string]guestproto.Artifact
	skipped map[string]string
	more    int
	dir     string
}

func (c *checkout) collect() collection {
	c.Helper()
	var in, out bytes.Buffer
	c.must(c.ask.Encode(&in))
	c.must(c.attempt.Collect(c.Context(), &in, &out))
	got := collection{index: map[string]int{}, files: map[string]guestproto.Artifact{}, skipped: map[string]string{}}
	n := 0
	for f, err := range guestproto.Frames(&out) {
		c.must(err)
		switch f.Kind {
		case guestproto.FrameArtifact:
			a, err := guestproto.DecodeArtifact(f.Data, c.attempt.id())
			c.must(err)
			if a.Skipped != "" {
				got.skipped[a.Name] = a.Skipped
			} else {
				got.files[a.Name], got.index[a.Name] = a, n
			}
			n++
		case guestproto.FrameEnd:
			var end guestproto.Collection
			c.must(json.Unmarshal(f.Data, &end), guestproto.CheckCollectionID(end.ID))
			got.id, got.more, got.dir = end.ID, end.More, filepath.Join(c.attempt.path(taskOut), end.ID)
		case guestproto.FrameBeat: // the collection took a while
		default:
			c.Fatalf("collect sent a frame %q, want an artifact, a beat or the end", rune(f.Kind))
		}
	}
	if got.id == "" {
		c.Fatalf("collect sent %d artifacts and no end, want an end", n)
	}
	return got
}

// sent returns the content of a file from an offset on, or the reason why it could
// not be sent.
func (c *checkout) sent(from collection, name string, offset int64) (text, failure string) {
	c.Helper()
	i, ok := from.index[name]
	if !ok {
		c.Fatalf("collected files are %q, skipped %v, want %q among them", slices.Sorted(maps.Keys(from.files)), from.skipped, name)
	}
	var in, out bytes.Buffer
	c.must(guestproto.TaskSend{Collection: from.id, Items: []guestproto.SendItem{{Index: i, Offset: offset}}}.Encode(&in))
	c.must(c.attempt.Send(c.Context(), &in, &out))
	ended := false
	for f, err := range guestproto.Frames(&out) {
		c.must(err)
		switch f.Kind {
		case guestproto.FrameData:
			text += string(f.Data)
		case guestproto.FrameFailure:
			why, err := guestproto.DecodeFailure(f.Data)
			c.must(err)
			failure, ended = why.Text, true
		case guestproto.FrameEnd:
			ended = true
		}
	}
	if !ended {
		c.Fatalf("send of %q ended after %d bytes without an end, want one", name, len(text))
	}
	return text, failure
}

// tracked returns the tree of all tracked files, with their current content.
func (c *checkout) tracked() string {
	c.Helper()
	index := filepath.Join(c.TempDir(), "index")
	if text, err := os.ReadFile(filepath.Join(c.dir, ".git/index")); err == nil {
		c.must(os.WriteFile(index, text, 0o600))
	}
	env := []string{"GIT_INDEX_FILE=" + index}
	for _, args := range [][]string{{"add", "-u"}, {"write-tree"}} {
		out, err := c.gitIn(c.dir, env, nil, args...)
		if err != nil {
			c.Fatalf("git %s: %v: %s", args[0], err, out)
		}
		if args[0] == "write-tree" {
			return out
		}
	}
	return ""
}

// applied returns the tree that results from applying the patch to the base.
func (c *checkout) applied(patch string) string {
	c.Helper()
	env := []string{"GIT_INDEX_FILE=" + filepath.Join(c.TempDir(), "index")}
	steps := [][]string{{"read-tree", c.base}, {"apply", "--cached", "--binary", "--whitespace=nowarn"}, {"write-tree"}}
	if patch == "" { // git rejects an empty patch
		steps = [][]string{steps[0], steps[2]}
	}
	var out string
	for _, args := range steps {
		var err error
		if out, err = c.gitIn(c.dir, env, strings.NewReader(patch), args...); err != nil {
			c.Fatalf("git %s: %v: %s\nof\n%.2000s", args[0], err, out, patch)
		}
	}
	return out
}

func (c *checkout) checkPatch() collection {
	c.Helper()
	want := c.tracked()
	before, _ := os.ReadFile(filepath.Join(c.dir, ".git/index"))
	got := c.collect()
	if after, _ := os.ReadFile(filepath.Join(c.dir, ".git/index")); !bytes.Equal(before, after) {
		c.Errorf("the agent's index has %d bytes after the collection, want the %d bytes of before unchanged", len(after), len(before))
	}
	patch := "" // without a difference there is no patch, because git would reject it
	if _, has := got.files[c.attempt.id()+".patch"]; has || want != c.git("rev-parse", c.base+"^{tree}") {
		var failure string
		if patch, failure = c.sent(got, c.attempt.id()+".patch", 0); failure != "" || patch == "" {
			c.Fatalf("patch of %d bytes, failure %q, want a patch and no failure", len(patch), failure)
		}
	}
	if tree := c.applied(patch); tree != want {
		out, _ := c.gitIn(c.dir, nil, nil, "diff", "--stat", tree, want)
		c.Errorf("the patch makes tree %s, want %s; difference:\n%s\npatch:\n%.3000s", tree, want, out, patch)
	}
	return got
}

var someFiles = map[string]string{
	"a.txt": "one\ntwo\nthree\n", "dir/b.txt": strings.Repeat("line\n", 50), "bin": "\x00\x01\xff" + strings.Repeat("z", 1000), "run.sh": "#!/bin/sh\n",
	"crlf.txt": "a\r\nb\r\n", "empty": "", "link": "→a.txt", "no newline": "x", "odd \"'\n-name": "odd", "-dash": "d", "..dots..": "d", "\xff\xfe": "bytes", "ü": "u",
}

func TestPatchOfEverythingAnAgentDoes(t *testing.T) {
	for name, do := range map[string]func(*checkout){
		"nothing": func(*checkout) {},
		"commits": func(c *checkout) {
			c.put("a.txt", "1\n")
			c.git("commit", "-qam", "1")
			c.put("n", "new")
			c.git("add", "n")
			c.git("commit", "-qm", "2")
		},
		"an amendment": func(c *checkout) { c.put("a.txt", "1\n"); c.git("commit", "-qa", "--amend", "-m", "other") },
		"a rebase": func(c *checkout) {
			c.put("a.txt", "1\n")
			c.git("commit", "-qam", "1")
			c.git("checkout", "-q", "--orphan", "new")
			c.git("commit", "-qm", "2")
			c.git("branch", "-D", "main")
		},
		"a branch": func(c *checkout) { c.git("checkout", "-qb", "x"); c.put("a.txt", "1\n"); c.git("commit", "-qam", "1") },
		"no branch": func(c *checkout) {
			c.git("checkout", "-q", "--detach")
			c.put("a.txt", "1\n")
			c.git("commit", "-qam", "1")
		},
		"staged":       func(c *checkout) { c.put("a.txt", "1\n"); c.git("add", "a.txt") },
		"unstaged":     func(c *checkout) { c.put("a.txt", "1\n") },
		"staged twice": func(c *checkout) { c.put("a.txt", "1\n"); c.git("add", "a.txt"); c.put("a.txt", "2\n") },
		"staged new":   func(c *checkout) { c.put("new/x", "1\n"); c.git("add", "new") },
		"meant to add": func(c *checkout) { c.put("new/x", "1\n"); c.git("add", "-N", "new") },
		"staged, gone": func(c *checkout) {
			c.put("new", "1\n")
			c.git("add", "new")
			c.must(os.Remove(filepath.Join(c.dir, "new")))
		},
		"deleted":     func(c *checkout) { c.must(os.Remove(filepath.Join(c.dir, "a.txt"))); c.git("rm", "-q", "bin") },
		"all deleted": func(c *checkout) { c.git("rm", "-rq", ".") },
		"renamed": func(c *checkout) {
			c.git("mv", "dir/b.txt", "c.txt")
			c.put("c.txt", strings.Repeat("line\n", 49)+"x\n")
			c.git("mv", "bin", "dir")
		},
		"modes": func(c *checkout) {
			c.must(os.Chmod(filepath.Join(c.dir, "run.sh"), 0o755), os.Chmod(filepath.Join(c.dir, "empty"), 0o755))
		},
		"binary": func(c *checkout) {
			c.put("bin", "\x00\x02\xfe"+strings.Repeat("y", 5000))
			c.put("new.bin", "\x00\xff")
			c.git("add", "new.bin")
		},
		"line ends": func(c *checkout) { c.put("crlf.txt", "a\nb\r\n"); c.put("a.txt", "one\r\ntwo\r\nthree\r\n") },
		"converted": func(c *checkout) { c.git("config", "core.autocrlf", "true"); c.put("a.txt", "one\r\n2\r\n") },
		"attributes": func(c *checkout) {
			c.put(".gitattributes", "*.txt text eol=crlf\nbin -diff\n*.sh binary\n")
			c.git("add", ".")
			c.put("run.sh", "x")
			c.put("bin", "\x00y")
			c.put("a.txt", "1\r\n")
		},
		"empty files": func(c *checkout) { c.put("empty", "x"); c.put("a.txt", ""); c.put("e2", ""); c.git("add", "e2") },
		"links": func(c *checkout) {
			c.put("link", "→../../../etc/passwd")
			c.must(os.Remove(filepath.Join(c.dir, "a.txt")))
			c.put("a.txt", "→link")
			c.put("l2", "→/dev/zero")
			c.git("add", "l2")
		},
		"a link to file": func(c *checkout) { c.must(os.Remove(filepath.Join(c.dir, "link"))); c.put("link", "a file") },
		"dir for file": func(c *checkout) {
			c.must(os.Remove(filepath.Join(c.dir, "a.txt")))
			c.put("a.txt/x", "1")
			c.git("add", "a.txt/x")
		},
		"file for dir": func(c *checkout) {
			c.must(os.RemoveAll(filepath.Join(c.dir, "dir")))
			c.put("dir", "1")
			c.git("add", "dir")
		},
		"odd names": func(c *checkout) {
			c.put("odd \"'\n-name", "1")
			c.put("-dash", "1")
			c.put("..dots..", "1")
			c.put("\xff\xfe", "1")
			c.put("ü", "1")
			c.put("new\t\n", "1")
			c.git("add", "new\t\n")
		},
		"long names": func(c *checkout) {
			n := strings.Repeat(strings.Repeat("n", 200)+"/", 10) + strings.Repeat("x", 255)
			c.put(n, "1")
			c.git("add", n[:200])
		},
		"no newline": func(c *checkout) { c.put("no newline", "y"); c.put("a.txt", "one\ntwo\nthree") },
		"touched":    func(c *checkout) { c.put("a.txt", someFiles["a.txt"]) },
		"a merge that waits": func(c *checkout) {
			c.git("checkout", "-qb", "x")
			c.put("a.txt", "x\n")
			c.git("commit", "-qam", "x")
			c.git("checkout", "-q", "main")
			c.put("a.txt", "y\n")
			c.git("commit", "-qam", "y")
			if _, err := c.gitIn(c.dir, nil, nil, "merge", "x"); err == nil {
				c.Fatal("git merge succeeded, want a conflict")
			}
			c.put("a.txt", "both\n")
		},
		"assumed unchanged": func(c *checkout) {
			c.put("new", "1\n")
			c.git("add", "new")
			c.git("update-index", "--assume-unchanged", "run.sh")
		},
		"many":        func(c *checkout) { many(c, 10_000); c.git("add", "-A") },
		"a lock":      func(c *checkout) { c.put("a.txt", "1\n"); c.put(".git/index.lock", "") },
		"split index": func(c *checkout) { c.git("update-index", "--split-index"); c.put("new", "1\n"); c.git("add", "new") },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCheckout(t, someFiles)
			do(c)
			c.checkPatch()
		})
	}
}

func many(c *checkout, n int) {
	for i := range n {
		c.put(fmt.Sprintf("many/%02d/%d.txt", i%100, i), fmt.Sprint(i))
	}
}

func TestPatchWithoutCommits(t *testing.T) {
	c := newCheckout(t, nil)
	c.must(os.RemoveAll(filepath.Join(c.dir, ".git")))
	c.git("init", "-q")
	c.put("a", "1")
	c.git("add", "a")
	c.base, c.ask.Base = "4b825dc642cb6eb9a060e54bf8d69288fbee4904", "" // the empty tree
	c.checkPatch()
}

func TestPatchOfSubmodules(t *testing.T) {
	lib := newCheckout(t, map[string]string{"lib.c": "1"})
	c := newCheckout(t, someFiles)
	c.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", lib.dir, "lib")
	c.git("commit", "-qm", "with a submodule")
	c.base = c.git("rev-parse", "HEAD")
	c.ask.Base = c.base
	sub := filepath.Join(c.dir, "lib")
	for _, args := range [][]string{{"config", "user.name", "a"}, {"config", "user.email", "a@localhost.invalid"}, {"commit", "-q", "--allow-empty", "-m", "moved"}} {
		if out, err := c.gitIn(sub, nil, nil, args...); err != nil {
			t.Fatalf("git %s: %v: %s", args[0], err, out)
		}
	}
	c.put("lib/lib.c", "changed, and not committed")
	c.git("config", "diff.submodule", "log")
	c.git("config", "diff.ignoreSubmodules", "all")
	c.git("config", "submodule.recurse", "true")
	got := c.checkPatch()
	patch, _ := c.sent(got, c.attempt.id()+".patch", 0)
	if !strings.Contains(patch, "+Subproject commit ") || strings.Contains(patch, "-dirty") {
		t.Errorf("patch of a submodule = %q, want %q and no %q", patch, "+Subproject commit ", "-dirty")
	}
}

// The agent's work in nested submodules is collected too, because commits made
// there exist nowhere else.
func TestWorkInSubmodules(t *testing.T) {
	inner := newCheckout(t, map[string]string{"inner.c": "1\n"})
	lib := newCheckout(t, map[string]string{"lib.c": "1\n", ".gitignore": "*.o\n"})
	file := []string{"-c", "protocol.file.allow=always"}
	lib.git(append(file, "submodule", "--quiet", "add", inner.dir, "in ner")...)
	lib.git("commit", "-qm", "with one")
	c := newCheckout(t, someFiles)
	for _, path := range []string{"a/lib", "calm", "gone"} {
		c.git(append(file, "submodule", "--quiet", "add", lib.dir, path)...)
	}
	c.git(append(file, "submodule", "--quiet", "update", "--init", "--recursive")...)
	c.git("commit", "-qm", "with submodules")
	c.base = c.git("rev-parse", "HEAD")
	c.ask.Base = c.base
	fresh := t.TempDir()
	c.git(append(file, "clone", "-q", "--recurse-submodules", c.dir, fresh)...)

	sub := filepath.Join(c.dir, "a/lib")
	agent := func(dir string, args ...string) {
		t.Helper()
		if out, err := c.gitIn(dir, nil, nil, append([]string{"-c", "user.name=a", "-c", "user.email=a@localhost.invalid"}, args...)...); err != nil {
			t.Fatalf("git %s: %v: %s", args[0], err, out)
		}
	}
	c.put("a/lib/lib.c", "2\n")
	agent(sub, "commit", "-qam", "by the agent")
	c.put("a/lib/lib.c", "3\n") // not committed
	c.put("a/lib/new.c", "new\n")
	c.put("a/lib/new.o", "ignored")
	c.put("a/lib/in ner/inner.c", "\x00\xff")
	c.put("a/lib/in ner/deep.c", "deep\n")
	c.must(os.RemoveAll(filepath.Join(c.dir, "gone")))
	c.git(append(file, "submodule", "--quiet", "add", inner.dir, "added")...)

	got := c.collect()
	for _, p := range []struct{ path, at string }{{"a/lib", "a/lib"}, {"a/lib/in ner", "a/lib/in ner"}} {
		patch, failure := c.sent(got, "submodules/"+p.path+".patch", 0)
		if failure != "" {
			t.Fatalf("send of the patch of %s: failure %q, want none", p.path, failure)
		}
		if out, err := c.gitIn(filepath.Join(fresh, p.at), nil, strings.NewReader(patch), "apply"); err != nil {
			t.Errorf("git apply of the patch of %s: %v: %s\n%s", p.path, err, out, patch)
		}
	}
	for name, want := range map[string]string{"a/lib/lib.c": "3\n", "a/lib/in ner/inner.c": "\x00\xff"} {
		if text, err := os.ReadFile(filepath.Join(fresh, name)); err != nil || string(text) != want {
			t.Errorf("%s after the patches = %q, %v, want %q", name, text, err, want)
		}
	}
	for name, want := range map[string]string{"untracked/a/lib/new.c": "new\n", "untracked/a/lib/in ner/deep.c": "deep\n"} {
		if text, failure := c.sent(got, name, 0); text != want {
			t.Errorf("%s = %q, failure %q, want %q", name, text, failure, want)
		}
	}
	if patch, failure := c.sent(got, "submodules/added.patch", 0); !strings.Contains(patch, "inner.c") {
		t.Errorf("patch of a submodule that the agent added = %q, failure %q, want %q in it", patch, failure, "inner.c")
	}
	for name := range got.files {
		if strings.Contains(name, "calm") || strings.Contains(name, "new.o") || strings.Contains(name, "gone") {
			t.Errorf("%s was collected, want nothing of calm, new.o or gone", name)
		}
	}
	if len(got.skipped) > 0 {
		t.Errorf("skipped %v, want none", got.skipped)
	}
}

// A submodule that is broken, or whose commit is missing, does not prevent the
// collection of anything else. Its files are collected individually.
func TestSubmodulesThatAreBroken(t *testing.T) {
	lib := newCheckout(t, map[string]string{"lib.c": "1\n"})
	c := newCheckout(t, someFiles)
	for _, path := range []string{"one", "two"} {
		c.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", lib.dir, path)
	}
	c.git("commit", "-qm", "with submodules")
	c.base = c.git("rev-parse", "HEAD")
	c.ask.Base = c.base
	c.must(os.RemoveAll(filepath.Join(c.dir, "one")))
	c.git("init", "-q", "one")
	c.put("one/work.c", "work\n")
	c.put("two/.git", "gitdir: /nowhere\n")
	c.put("two/work.c", "work\n")
	got := c.collect()
	for _, name := range []string{"one", "two"} {
		if text, failure := c.sent(got, "untracked/"+name+"/work.c", 0); text != "work\n" {
			t.Errorf("work.c of %s = %q, failure %q, want %q", name, text, failure, "work\n")
		}
		if got.skipped["submodules/"+name+".patch"] == "" {
			t.Errorf("skipped %v, want a reason for the patch of %s", got.skipped, name)
		}
	}
}

// git can express and apply any random change to files.
func TestPatchOfRandomChanges(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 7))
			c := newCheckout(t, someFiles)
			content := func() string {
				var b strings.Builder
				for range random.IntN(40) {
					b.WriteString([]string{"line\n", "other\r\n", "\x00", "\xff", "x", "", "\n", " \t\n"}[random.IntN(8)])
				}
				return strings.TrimPrefix(b.String(), "→")
			}
			names := append(slices.Sorted(maps.Keys(someFiles)), "new", "new dir/x", "dir/y\n", "dir/b.txt/in", "%41")
			for range 3 + random.IntN(25) {
				name := names[random.IntN(len(names))]
				path := filepath.Join(c.dir, name)
				switch random.IntN(9) {
				case 0, 1, 2:
					if info, err := os.Lstat(filepath.Dir(path)); err == nil && !info.IsDir() {
						c.must(os.Remove(filepath.Dir(path)))
					}
					c.must(os.RemoveAll(path))
					c.put(name, content())
				case 3:
					_ = os.RemoveAll(path) // there is nothing below a file
				case 4:
					if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() {
						c.must(os.Chmod(path, []os.FileMode{0o644, 0o755}[random.IntN(2)]))
					}
				case 5:
					to := filepath.Join(c.dir, names[random.IntN(len(names))])
					if info, err := os.Lstat(to); err != nil || info.Mode().IsRegular() {
						_ = os.Rename(path, to) // an impossible rename changes nothing
					}
				case 6:
					c.git("add", "-A")
				case 7:
					c.git("commit", "-qam", "some", "--allow-empty")
				case 8:
					if info, err := os.Lstat(filepath.Dir(path)); err == nil && info.IsDir() {
						c.put(name, "→"+names[random.IntN(len(names))])
					}
				}
			}
			c.checkPatch()
		})
	}
}

// The repository's configuration and attributes must have no effect, although they
// could make git run programs or print something other than a patch.
func TestPatchOfAHostileRepository(t *testing.T) {
	c := newCheckout(t, someFiles)
	canary := filepath.Join(c.TempDir(), "canary")
	evil := filepath.Join(c.TempDir(), "evil.sh")
	c.must(os.WriteFile(evil, []byte("#!/bin/sh\necho \"$0 $*\" >>'"+canary+"'\ncat >/dev/null\nexit 0\n"), 0o755))
	c.put(".gitattributes", "*.txt diff=evil\n")
	c.put("a.txt", "1\n")
	c.put("new", "1\n\n")
	c.git("add", "new", ".gitattributes")
	c.git("mv", "dir/b.txt", "b.txt")
	c.put("untracked", "u")
	want := c.tracked()
	config, err := os.ReadFile(filepath.Join(c.dir, ".git/config"))
	c.must(err)
	c.must(os.MkdirAll(filepath.Join(c.dir, ".git/hooks"), 0o755), syscall.Mkfifo(filepath.Join(c.dir, ".git/pipe"), 0o600))
	for _, hook := range []string{"post-index-change", "post-checkout", "pre-commit", "fsmonitor-watchman"} {
		c.must(os.Symlink(evil, filepath.Join(c.dir, ".git/hooks", hook)))
	}
	for key, value := range map[string]string{
		"diff.external": evil, "diff.evil.command": evil, "diff.evil.textconv": evil, "diff.evil.cachetextconv": "true", "core.fsmonitor": evil, "core.pager": evil,
		"core.hooksPath": filepath.Join(c.dir, ".git/hooks"), "pager.diff": evil, "color.ui": "always", "color.diff": "always", "diff.noprefix": "true",
		"diff.mnemonicPrefix": "true", "diff.renames": "copies", "diff.relative": "true", "diff.orderFile": filepath.Join(c.dir, ".git/pipe"), "diff.context": "0",
		"diff.interHunkContext": "9", "diff.wordRegex": ".", "core.quotePath": "true", "diff.suppressBlankEmpty": "true", "diff.colorMoved": "zebra", "core.askPass": evil,
		"alias.ls-files": "!" + evil, "core.editor": evil, "core.sshCommand": evil, "credential.helper": evil, "gpg.program": evil, "diff.ignoreSubmodules": "all",
		"core.abbrev": "5", "diff.submodule": "diff", "diff.autoRefreshIndex": "false", "core.splitIndex": "true", "core.untrackedCache": "true",
	} {
		c.git("config", key, value)
	}
	c.git("config", "core.worktree", c.TempDir()) // last, because git uses that directory from now on
	for _, name := range []string{"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_CONFIG_PARAMETERS"} {
		t.Setenv(name, evil)
	}
	got := c.collect()
	patch, failure := c.sent(got, c.attempt.id()+".patch", 0)
	if text, err := os.ReadFile(canary); err == nil || failure != "" {
		t.Errorf("programs of the agent ran: %q, failure %q, want neither", text, failure)
	}
	for _, name := range []string{"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_CONFIG_PARAMETERS"} {
		c.must(os.Unsetenv(name))
	}
	c.must(os.WriteFile(filepath.Join(c.dir, ".git/config"), config, 0o600))
	if tree := c.applied(patch); tree != want {
		t.Errorf("the patch makes tree %s, want %s:\n%s", tree, want, patch)
	}
	if text, _ := c.sent(got, "untracked/untracked", 0); text != "u" {
		t.Errorf("untracked file = %q, want %q; skipped %v", text, "u", got.skipped)
	}
}

// If git cannot determine the agent's changes, all files that are not ignored are
// collected.
func TestArtifactsWithoutAPatch(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(*checkout)
		said string
	}{
		"no .git":      {func(c *checkout) { c.must(os.RemoveAll(filepath.Join(c.dir, ".git"))) }, "not a git repository"},
		"a broken one": {func(c *checkout) { c.must(os.Remove(filepath.Join(c.dir, ".git/HEAD"))) }, "not a git repository"},
		"another": {func(c *checkout) {
			c.must(os.RemoveAll(filepath.Join(c.dir, ".git")))
			c.git("init", "-q")
			c.git("add", "-A")
			c.git("-c", "user.name=a", "-c", "user.email=a@localhost.invalid", "commit", "-qm", "x")
		}, "is no longer in its repository"},
		"around it": {func(c *checkout) {
			c.must(os.Rename(filepath.Join(c.dir, ".git"), filepath.Join(filepath.Dir(c.dir), ".git")))
		}, "not a git repository"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newCheckout(t, map[string]string{"a.txt": "1", "dir/b": "2", ".gitignore": "*.o\n"})
			w.put("new", "3")
			w.put("x.o", "ignored")
			w.put("a.txt", "changed")
			c.do(w)
			got := w.collect()
			if why := got.skipped[w.attempt.id()+".patch"]; !strings.Contains(why, c.said) {
				t.Errorf("reason for no patch = %q, want %q in it", why, c.said)
			}
			list, _ := w.sent(got, w.attempt.id()+"-untracked.txt", 0)
			if want := ".gitignore\na.txt\ndir/b\nnew\n"; list != want {
				t.Errorf("list of untracked files = %q, want %q", list, want)
			}
			for name, want := range map[string]string{"a.txt": "changed", "dir/b": "2", "new": "3"} {
				if text, failure := w.sent(got, "untracked/"+name, 0); text != want || failure != "" {
					t.Errorf("%s = %q, failure %q, want %q", name, text, failure, want)
				}
			}
			if len(got.files) != 5 {
				t.Errorf("collected %q, want 5 files", slices.Sorted(maps.Keys(got.files)))
			}
		})
	}
	t.Run("no checkout", func(t *testing.T) {
		c := newCheckout(t, nil)
		c.must(os.RemoveAll(c.dir))
		if got := c.collect(); len(got.files) != 0 || len(got.skipped) != 1 {
			t.Errorf("collection without a checkout: files %v, skipped %v, want no files and one reason", got.files, got.skipped)
		}
	})
}

// failGit makes git commands fail after their output if their arguments match a
// shell pattern.
func failGit(t *testing.T, pattern string) {
	t.Helper()
	git, err := exec.LookPath("git")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	script := "#!/bin/sh\ncase \" $* \" in " + pattern + ") '" + git + "' \"$@\"; exit 128;; esac\nexec '" + git + "' \"$@\"\n"
	if err := os.WriteFile(filepath.Join(dir, "git"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("REAL_GIT", git)
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// Files that git fails to list are not lost: they are found in another way, or the
// collection fails and the VM is kept.
func TestGitFailsWhileCollecting(t *testing.T) {
	files := map[string]string{"a": "1", "dir/b": "2", ".gitignore": "*.o\n"}
	for name, c := range map[string]struct {
		fails string // the git commands that fail
		want  []string
		err   string
	}{
		"list untracked files":                    {`*--others*`, nil, "list untracked files"},
		"list untracked files beside the tracked": {`*--git-dir=*) exec "$REAL_GIT" "$@";; *--others*`, []string{".gitignore", "a", "dir/b", "new"}, ""},
		"diff":                            {`*" diff "*`, []string{".gitignore", "a", "dir/b", "new"}, ""},
		"list tracked files":              {`*--cached*`, []string{".gitignore", "a", "dir/b", "new"}, ""},
		"look for the repository":         {`*--git-path*`, []string{".gitignore", "a", "dir/b", "new"}, ""},
		"list submodules that are there":  {`*--stage*`, nil, "list the submodules"},
		"list submodules that were there": {`*ls-tree*`, nil, "list the submodules"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newCheckout(t, files)
			w.put("a", "changed")
			w.put("new", "3")
			failGit(t, c.fails)
			var in, out bytes.Buffer
			w.must(w.ask.Encode(&in))
			err := w.attempt.Collect(t.Context(), &in, &out)
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("collect: error %v, want %q in it", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := w.collect()
			for _, name := range c.want {
				if _, failure := w.sent(got, "untracked/"+name, 0); failure != "" {
					t.Errorf("send of %s: failure %q, want none", name, failure)
				}
			}
		})
	}
}

func TestUntrackedFiles(t *testing.T) {
	c := newCheckout(t, map[string]string{"a": "tracked", ".gitignore": "*.o\n/ignored/\n"})
	deep := strings.Repeat("d/", 150) + "x"
	for name, text := range map[string]string{
		"new": "1", "x.o": "ignored", "ignored/x": "ignored", "with\nnewline": "2", "quo\"te'": "3", "-rf": "4", "..a": "5", "a..b/..c..": "6", "\xff\xfe/\xc3": "7",
		"100%": "8", "%41": "9", " space ": "10", "tab\t\x1b[2J": "11", deep: "12", "empty": "", ".hidden/.env": "13", "ignored not/x.o.txt": "14",
		"to file": "→a", "out": "→/etc/passwd", "up": "→../../../..", "dangling": "→nowhere", strings.Repeat("\xff", 255): "15",
	} {
		c.put(name, text)
	}
	c.must(os.MkdirAll(filepath.Join(c.dir, "empty dir"), 0o755), os.Chmod(filepath.Join(c.dir, "new"), 0o755))
	c.must(syscall.Mkfifo(filepath.Join(c.dir, "pipe"), 0o600))
	outside := c.TempDir()
	c.must(os.WriteFile(filepath.Join(outside, "secret"), []byte("outside"), 0o600), os.Symlink(outside, filepath.Join(c.dir, "linked dir")))
	// A repository in the checkout, and one nested in it, are work of the agent
	// like anything else.
	for _, dir := range []string{"inner", "inner/most"} {
		c.put(dir+"/made", dir)
		if out, err := c.gitIn(filepath.Join(c.dir, dir), nil, nil, "init", "-q"); err != nil {
			t.Fatalf("git init: %v: %s", err, out)
		}
	}
	c.put("inner/x.o", "ignored by the rules of what is around it? no: it is a repository of its own")
	got := c.collect()
	want := map[string]string{
		"new": "1", "with%0Anewline": "2", "quo\"te'": "3", "-rf": "4", "..a": "5", "a..b/..c..": "6", "%FF%FE/%C3": "7", "100%25": "8", "%2541": "9", " space ": "10",
		"tab%09%1B[2J": "11", deep: "12", "empty": "", ".hidden/.env": "13", "ignored not/x.o.txt": "14", "inner/made": "inner", "inner/most/made": "inner/most",
		guestproto.EscapeName(strings.Repeat("\xff", 255)): "15", "inner/x.o": "ignored by the rules of what is around it? no: it is a repository of its own",
	}
	list, _ := c.sent(got, c.attempt.id()+"-untracked.txt", 0)
	for name, text := range want {
		if is, failure := c.sent(got, "untracked/"+name, 0); is != text || failure != "" {
			t.Errorf("%s = %q, failure %q, want %q", name, is, failure, text)
		}
		if !strings.Contains("\n"+list, "\n"+name+"\n") {
			t.Errorf("list of untracked files = %q, want %q in it", list, name)
		}
	}
	if len(got.files) != len(want)+1 { // plus the list of untracked files; no tracked file changed
		t.Errorf("collected %q, want %d files", slices.Sorted(maps.Keys(got.files)), len(want)+1)
	}
	for name, want := range map[string]bool{"new": true, "-rf": false} {
		if a := got.files["untracked/"+name]; a.Executable != want {
			t.Errorf("Executable of %s = %t, want %t", name, a.Executable, want)
		}
	}
	for name, why := range map[string]string{
		"to file": `link to "a"`, "out": `link to "/etc/passwd"`, "up": `link to "../../../.."`, "dangling": `link to "nowhere"`, "linked dir": "link to",
	} {
		if said := got.skipped["untracked/"+name]; !strings.Contains(said, why) {
			t.Errorf("reason for skipping %s = %q, want %q in it", name, said, why)
		}
	}
	if len(got.skipped) != 5 {
		t.Errorf("skipped %v, want 5 files", got.skipped)
	}
}

func TestArtifactsByPattern(t *testing.T) {
	c := newCheckout(t, map[string]string{"src/main.c": "tracked", ".gitignore": "build/\n"})
	for name, text := range map[string]string{
		"build/out.bin": "1", "build/deep/er/x.log": "2", "build/deep/y.txt": "3", "report.html": "4", "reports/a/b": "5", "other": "6", "logs/1.log": "7", "logs/2.txt": "8",
		"a{b": "9", "dist/x/.git/config": "10", "build/link": "→deep", "build/\xff.log": "11", "build/pipe dir/z": "12",
	} {
		c.put(name, text)
	}
	c.must(syscall.Mkfifo(filepath.Join(c.dir, "build/pipe"), 0o600))
	socket := filepath.Join(c.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	c.must(err)
	defer l.Close()
	c.must(os.Rename(socket, filepath.Join(c.dir, "build/socket")))
	for _, s := range []struct {
		patterns string
		files    string
		skipped  int
	}{
		{"nothing", "", 0},
		{"build/out.bin", "build/out.bin", 0},
		{"build", "build/%FF.log build/deep/er/x.log build/deep/y.txt build/out.bin build/pipe dir/z", 3},
		{"build/ ./reports/", "build/%FF.log build/deep/er/x.log build/deep/y.txt build/out.bin build/pipe dir/z reports/a/b", 3},
		{"**/*.log", "build/%FF.log build/deep/er/x.log logs/1.log", 0},
		{"*.log", "", 0},
		{"build/**/*.{log,txt}", "build/%FF.log build/deep/er/x.log build/deep/y.txt", 0},
		{"{build/deep,logs}/*.txt", "build/deep/y.txt logs/2.txt", 0},
		{"src/* src/**", "src/main.c", 0},
		{"build/pipe build/socket build/link", "", 3},
		{"dist", "", 0},
		{"[", "", 1},
		{"rep*", "report.html reports/a/b", 0},
		{"build/link/**", "", 1},
	} {
		c.ask.Patterns = strings.Fields(s.patterns)
		got := c.collect()
		var files []string
		for name := range got.files {
			if name, ok := strings.CutPrefix(name, "files/"); ok {
				files = append(files, name)
				if _, twice := got.files["untracked/"+name]; twice {
					t.Errorf("patterns %q: %s was collected twice, want once", s.patterns, name)
				}
			}
		}
		slices.Sort(files)
		if got := strings.Join(files, " "); got != s.files {
			t.Errorf("patterns %q: files %q, want %q", s.patterns, got, s.files)
		}
		if len(got.skipped) != s.skipped {
			t.Errorf("patterns %q: skipped %v, want %d", s.patterns, got.skipped, s.skipped)
		}
	}
	c.ask.Patterns = []string{"."}
	if got := c.collect(); got.files["files/src/main.c"].Size != 7 || got.files["files/build/deep/er/x.log"].Size != 1 || len(got.skipped) != 3 {
		t.Errorf("pattern %q: files %+v, skipped %v, want src/main.c of 7 bytes, x.log of 1 byte, 3 skipped", ".", got.files, got.skipped)
	}
}

// Bounds are respected. The patch takes precedence over named files, and named
// files over others.
func TestArtifactsAreBounded(t *testing.T) {
	c := newCheckout(t, map[string]string{"a": "1"})
	for i := range 50 {
		c.put(fmt.Sprintf("u/%02d", i), strings.Repeat("x", 100))
		c.put(fmt.Sprintf("z/%02d", i), strings.Repeat("x", 10))
	}
	c.ask.Patterns, c.ask.MaxFiles = []string{"z"}, 60
	got := c.collect()
	count := func(dir string) (n int) {
		for name := range got.files {
			if strings.HasPrefix(name, dir) {
				n++
			}
		}
		return n
	}
	for dir, want := range map[string]int{"files/": 50, "untracked/": 9, "": 60} {
		if n := count(dir); n != want {
			t.Errorf("with 60 files allowed: %d files below %q, want %d", n, dir, want)
		}
	}
	if got, want := got.skipped["untracked/u/49"], "there are more than 60 files"; got != want {
		t.Errorf("reason for skipping u/49 = %q, want %q", got, want)
	}
	c.ask.MaxFiles, c.ask.MaxBytes = guestproto.MaxArtifacts, 2000
	got = c.collect()
	var size int64
	for _, a := range got.files {
		size += a.Size
	}
	if count("files/") != 50 || size > 2000 || size < 1800 || !strings.Contains(got.skipped["untracked/u/49"], "more than 2000 bytes") {
		t.Errorf("with 2000 bytes allowed: %d files, %d of them requested, %d bytes, skipped %v, want 50 requested files, 1800 to 2000 bytes, u/49 skipped", len(got.files), count("files/"), size, got.skipped)
	}
	c.put("a", strings.Repeat("y\n", 3000))
	if got = c.collect(); !strings.Contains(got.skipped[c.attempt.id()+".patch"], "more than 2000 bytes") || count("untracked/a") != 0 {
		t.Errorf("a patch over 2000 bytes: skipped %v, %d files of a, want the patch skipped, no file", got.skipped, count("untracked/a"))
	}
	c.ask.MaxBytes = 4 << 30
	c.must(os.WriteFile(filepath.Join(c.dir, "a"), []byte("1"), 0o600))
	many(c, 100)
	for i := range 1500 {
		c.put(fmt.Sprintf("links/%d", i), "→nowhere")
	}
	if got = c.collect(); count("untracked/many/") != 100 || got.more != 500 || len(got.skipped) != guestproto.MaxTaskSkipped {
		t.Errorf("%d files below many/, %d skipped, %d more, want 100, %d, 500", count("untracked/many/"), len(got.skipped), got.more, guestproto.MaxTaskSkipped)
	}
}

// Special files that would block a reader do not block the collection.
func TestPatchOfWhatIsNoFileAnyMore(t *testing.T) {
	c := newCheckout(t, someFiles)
	for _, name := range []string{"a.txt", "odd \"'\n-name"} {
		c.must(os.Remove(filepath.Join(c.dir, name)), syscall.Mkfifo(filepath.Join(c.dir, name), 0o600))
	}
	got := c.collect()
	patch, _ := c.sent(got, c.attempt.id()+".patch", 0)
	tree := c.applied(patch)
	want := "D\x00a.txt\x00D\x00odd \"'\n-name\x00"
	if out, err := c.gitIn(c.dir, nil, nil, "diff", "--name-status", "-z", c.base, tree); err != nil || out != want {
		t.Errorf("git diff of the patched tree = %q, %v, want %q", out, err, want)
	}
}

func TestUnreadableFiles(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root reads everything")
	}
	c := newCheckout(t, nil)
	c.put("x", "1")
	c.put("dir/y", "1")
	c.must(os.Chmod(filepath.Join(c.dir, "x"), 0))
	if got := c.collect(); got.skipped["untracked/x"] != "the agent is not permitted to read it" || got.files["untracked/dir/y"].Size != 1 {
		t.Errorf("collected %+v, skipped %v, want dir/y of 1 byte, and x skipped because it may not be read", got.files, got.skipped)
	}
}

func TestSendOfWhatChanges(t *testing.T) {
	c := newCheckout(t, nil)
	text := strings.Repeat("0123456789", 100_000)
	for _, name := range []string{"same", "gone", "shorter", "longer", "link", "pipe", "dir"} {
		c.put(name, text)
	}
	got := c.collect()
	path := func(name string) string { return filepath.Join(c.dir, name) }
	c.must(os.Remove(path("gone")), os.Truncate(path("shorter"), 500_000), os.WriteFile(path("longer"), []byte(text+"more"), 0o600))
	c.must(os.Remove(path("link")), os.Symlink(path("same"), path("link")), os.Remove(path("pipe")), syscall.Mkfifo(path("pipe"), 0o600))
	c.must(os.Remove(path("dir")), os.Mkdir(path("dir"), 0o700))
	for _, offset := range []int64{0, 1, 262_144, 999_999, 1_000_000} {
		for _, name := range []string{"same", "longer"} {
			if is, failure := c.sent(got, "untracked/"+name, offset); is != text[offset:] || failure != "" {
				t.Errorf("%s from %d: %d bytes, failure %q, want %d bytes equal to the original", name, offset, len(is), failure, len(text)-int(offset))
			}
		}
	}
	for name, why := range map[string]string{
		"gone": "no longer exists", "shorter": "truncated", "link": "symbolic link", "pipe": "a pipe", "dir": "a directory",
	} {
		if is, failure := c.sent(got, "untracked/"+name, 100_000); !strings.Contains(failure, why) || !strings.HasPrefix(text[100_000:], is) {
			t.Errorf("%s: %d bytes, failure %q, want original bytes, then a failure with %q", name, len(is), failure, why)
		}
	}
	if _, failure := c.sent(got, "untracked/same", 1_000_001); failure == "" {
		t.Error("send from an offset beyond the end succeeded, want a failure")
	}
	var out bytes.Buffer
	for _, bad := range []string{
		`{"version":1,"collection":"` + got.id + `","items":[{"index":100,"offset":0}]}`, `{"version":1,"collection":"` + got.id + `","items":[{"index":-1,"offset":0}]}`,
		`{"version":1,"collection":"../../../etc","items":[]}`, `{"version":2}`,
	} {
		if err := c.attempt.Send(c.Context(), strings.NewReader(bad), &out); err == nil {
			t.Errorf("send of %s succeeded, want an error", bad)
		}
	}
	out.Reset()
	c.must(c.attempt.Send(c.Context(), strings.NewReader(`{"version":1,"collection":"0123456789abcdef","items":[{"index":0,"offset":0}]}`), &out))
	if !strings.Contains(out.String(), guestproto.FailureNoCollection) {
		t.Errorf("send of an unknown collection printed %q, want %q in it", out.String(), guestproto.FailureNoCollection)
	}
	// The next collection replaces it.
	next := c.collect()
	if entries, err := os.ReadDir(c.attempt.path(taskOut)); err != nil || len(entries) != 1 || entries[0].Name() != next.id {
		t.Errorf("ReadDir of collections = %v, %v, want only %s", entries, err, next.id)
	}
}

// A file of several gigabytes needs little memory, and its collection can be
// interrupted.
func TestALargeSparseArtifact(t *testing.T) {
	if testing.Short() {
		t.Skip("reads 2 GiB of zeros")
	}
	c := newCheckout(t, nil)
	f, err := os.Create(filepath.Join(c.dir, "huge"))
	c.must(err)
	c.must(f.Truncate(2<<30), f.Close())
	got := c.collect()
	if a := got.files["untracked/huge"]; a.Size != 2<<30 || a.SHA256 != "a7c744c13cc101ed66c29f672f92455547889cc586ce6d44fe76ae824958ea51" {
		t.Errorf("artifact = %+v, want %d bytes, SHA256 a7c744c1…; skipped %v", a, int64(2<<30), got.skipped)
	}
	if is, failure := c.sent(got, "untracked/huge", 2<<30-5); is != "\x00\x00\x00\x00\x00" || failure != "" {
		t.Errorf("last bytes = %q, failure %q, want 5 zero bytes", is, failure)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var in bytes.Buffer
	c.must(c.ask.Encode(&in))
	if err := c.attempt.Collect(ctx, &in, io.Discard); err == nil {
		t.Error("collect with a cancelled context succeeded, want an error")
	}
}
