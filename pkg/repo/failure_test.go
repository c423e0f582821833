package repo

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// failures puts wrapper programs first in PATH. They count their calls, and fail at
// the call that a test names.
type failures struct{ dir string }

const failingProgram = `#!/bin/sh
# Like REAL, but for the call that DIR/fail names: "CALL MODE".
name=${0##*/} sub= skip=
if [ "$name" = git ]; then
	for a in "$@"; do
		[ -z "$skip" ] || { skip=; continue; }
		case $a in
		-c | -C) skip=1 ;;
		-*) ;;
		*) sub=-$a; break ;;
		esac
	done
fi
set -C
n=1
until { true >"DIR/calls/$name$sub.$n"; } 2>/dev/null; do n=$((n + 1)); done
read -r call mode <DIR/fail
[ "$call" = "$name$sub.$n" ] || exec REAL "$@"
[ "$mode" = start ] || REAL "$@" | HEAD -c 30
exit 128
`

func newFailures(t *testing.T, programs ...string) failures {
	t.Helper()
	f := failures{dir: t.TempDir()}
	head, err := exec.LookPath("head")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range programs {
		real, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		text := strings.NewReplacer("DIR", f.dir, "REAL", real, "HEAD", head).Replace(failingProgram)
		write(t, filepath.Join(f.dir, "bin", name), text)
		if err := os.Chmod(filepath.Join(f.dir, "bin", name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	f.set(t, "none", "start")
	return f
}

func (f failures) path() string {
	return filepath.Join(f.dir, "bin") + string(os.PathListSeparator) + os.Getenv("PATH")
}

func (f failures) set(t *testing.T, call, mode string) {
	t.Helper()
	if err := os.RemoveAll(filepath.Join(f.dir, "calls")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(f.dir, "calls"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(f.dir, "fail"), call+" "+mode+"\n")
}

// each runs do with each of its program calls failing in turn, at the start and in
// the middle of the output. do must return an error or its undisturbed result: a
// failed command must never count as one that found nothing.
func (f failures) each(t *testing.T, do func(t *testing.T) (string, error)) {
	t.Helper()
	f.set(t, "none", "start")
	want, err := do(t)
	if err != nil {
		t.Fatalf("undisturbed run = %v, want nil", err)
	}
	found, err := os.ReadDir(filepath.Join(f.dir, "calls"))
	if err != nil {
		t.Fatal(err)
	}
	if len(found) == 0 {
		t.Fatal("programs called = 0, want some")
	}
	noticed := 0
	for _, call := range found {
		for _, mode := range []string{"start", "middle"} {
			if mode == "middle" && !strings.HasPrefix(call.Name(), "git-") {
				continue
			}
			f.set(t, call.Name(), mode)
			got, err := do(t)
			if err != nil {
				noticed++
			} else if got != want {
				t.Errorf("result after %s failed (%s) unnoticed = %s, want %s", call.Name(), mode, got, want)
			}
		}
	}
	f.set(t, "none", "start")
	if noticed < len(found)/2 {
		t.Errorf("failures noticed = %d of %d calls, want at least half: the failures do not reach their targets", noticed, len(found))
	}
}

// guestPrograms returns the programs that the guest's scripts call.
func guestPrograms() []string {
	return []string{"git", "sed", "sort", "cat", "tr", "wc", "mktemp", "head", "mkdir", "cp", "cut", "dirname", "mv", "ls", "sync", "awk", "tar"}
}

// busyGuest returns a guest whose agent has work of every kind, and the target of a
// fetch.
func busyGuest(t *testing.T) (*localGuest, Mirror, Base) {
	t.Helper()
	isolate(t)
	ref, _ := upstream(t)
	mirror := ensure(t, mirrors(t), ref)
	g := newGuest(t)
	base := push(t, g, mirror.Source(false), g.dir())
	g.sh(t, `cd work/repo && git config user.name a && git config user.email a@b
		echo 1 >own && git add own && git commit -qm own && git switch -qc side && echo 2 >own && git commit -qam side
		git worktree add -q --detach ../tree && cd ../tree && echo 3 >own && git commit -qam detached && echo loose >in-tree && cd ../repo
		echo stashed >a && git stash -q && echo changed >a && echo staged >staged && git add staged && echo new >untracked
		git init -q ../sub.git && git -C ../sub.git commit -q --allow-empty -m sub
		git submodule --quiet add "$PWD/../sub.git" sub && git -C sub commit -q --allow-empty -m "only here"`)
	return g, mirror, base
}

func TestGuestFailuresAreNoticed(t *testing.T) {
	g, mirror, base := busyGuest(t)
	path := os.Getenv("PATH")
	f := newFailures(t, guestPrograms()...)
	g.path = f.path()
	t.Run("work", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			w, err := Work(t.Context(), g, g.dir(), base)
			return fmt.Sprintf("%+v", w), err
		})
	})
	t.Run("head", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			b, err := Head(t.Context(), g, g.dir())
			return fmt.Sprintf("%+v", b), err
		})
	})
	t.Run("diff", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			var out strings.Builder
			err := Diff(t.Context(), g, g.dir(), base, DiffOptions{}, &out)
			return out.String(), err
		})
	})
	t.Run("fetch", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			g.path = path
			into := copyOf(t, mirror.Dir)
			g.path = f.path()
			res, err := Fetch(t.Context(), g, g.dir(), "s", Target{Mirror: into}, base, FetchOptions{TempDir: t.TempDir()})
			if err != nil { // nothing was taken, and the next fetch gets everything
				if refs := host(t, into, "git for-each-ref refs/agents"); refs != "" {
					t.Errorf("refs/agents after %v = %q, want none", err, refs)
				}
			}
			return fmt.Sprint(res.Refs), err
		})
	})
	t.Run("push", func(t *testing.T) {
		n := 0
		f.each(t, func(t *testing.T) (string, error) {
			n++
			to := filepath.Join(g.home, fmt.Sprint("push", n), "repo")
			base, err := Push(t.Context(), g, mirror.Source(false), Checkout{Dir: to}, nil)
			if err == nil && len(base.Warnings) > 0 {
				err = fmt.Errorf("%v", base.Warnings)
			}
			if err != nil {
				return "", err
			}
			return checkoutState(t, to), nil
		})
	})
	t.Run("push with changes", func(t *testing.T) {
		clone := filepath.Join(t.TempDir(), "repo")
		host(t, filepath.Dir(clone), `git clone -q '`+mirror.Dir+`' repo && cd repo && git switch -q main && echo changed >a && echo new >untracked`)
		n := 0
		f.each(t, func(t *testing.T) (string, error) {
			n++
			to := filepath.Join(g.home, fmt.Sprint("dirty", n), "repo")
			base, err := Push(t.Context(), g, Source{Dir: clone, Local: true, Dirty: true}, Checkout{Dir: to}, nil)
			if err == nil && len(base.Warnings) > 0 {
				err = fmt.Errorf("%v", base.Warnings)
			}
			if err != nil {
				return "", err
			}
			return checkoutState(t, to), nil
		})
	})
}

func TestHostFailuresAreNoticed(t *testing.T) {
	g, mirror, base := busyGuest(t)
	g.path = os.Getenv("PATH")
	f := newFailures(t, "git")
	t.Setenv("PATH", f.path())
	t.Run("mirror", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			m := mirrors(t)
			got, err := m.Ensure(t.Context(), mirror.Ref, nil)
			if err != nil {
				return "", err
			}
			return refsOf(t, g, got.Dir), nil
		})
	})
	t.Run("mirror again", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			m := mirrors(t)
			dir, err := m.mirrorDir(mirror.Ref)
			if err != nil {
				t.Fatal(err)
			}
			g.sh(t, "mkdir -p "+ssh.Quote(filepath.Dir(dir))+" && cp -r "+ssh.Quote(mirror.Dir)+" "+ssh.Quote(dir)+" && git -C "+ssh.Quote(dir)+
				" update-ref refs/heads/gone main && git -C "+ssh.Quote(dir)+" update-ref -d refs/heads/feature")
			got, err := m.Ensure(t.Context(), mirror.Ref, nil)
			if err == nil && got.Warning != "" {
				err = fmt.Errorf("%s", got.Warning)
			}
			if err != nil {
				return "", err
			}
			return refsOf(t, g, got.Dir), nil
		})
	})
	t.Run("known", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			known, err := Known(t.Context(), "s", mirror.Target())
			return fmt.Sprint(known), err
		})
	})
	t.Run("read a file", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			text, ok, err := mirror.Source(false).ReadFile(t.Context(), "a", 100)
			return fmt.Sprint(string(text), ok), err
		})
	})
	t.Run("fetch", func(t *testing.T) {
		f.each(t, func(t *testing.T) (string, error) {
			into := filepath.Join(t.TempDir(), fmt.Sprint("m", len(t.Name())))
			g.sh(t, "rm -rf "+ssh.Quote(into)+" && cp -r "+ssh.Quote(mirror.Dir)+" "+ssh.Quote(into))
			res, err := Fetch(t.Context(), g, g.dir(), "s", Target{Mirror: into}, base, FetchOptions{TempDir: t.TempDir()})
			left, _ := filepath.Glob(filepath.Join(into, "objects", "tmp_objdir-*"))
			if len(left) > 0 {
				t.Errorf("temporary object directories = %q, want none", left)
			}
			g.sh(t, "git -C "+ssh.Quote(into)+" fsck --connectivity-only 2>&1")
			return fmt.Sprint(res.Refs), err
		})
	})
	t.Run("push", func(t *testing.T) {
		n := 0
		f.each(t, func(t *testing.T) (string, error) {
			n++
			to := filepath.Join(g.home, fmt.Sprint("push", n), "repo")
			_, err := Push(t.Context(), g, mirror.Source(false), Checkout{Dir: to}, nil)
			if err != nil {
				return "", err
			}
			return checkoutState(t, to), nil
		})
	})
	t.Run("local clone", func(t *testing.T) {
		clone := filepath.Join(t.TempDir(), "repo")
		g.sh(t, `git clone -q `+ssh.Quote(mirror.Dir)+` `+ssh.Quote(clone)+` && cd `+ssh.Quote(clone)+
			` && git switch -q main && git remote set-url origin https://example.com/o/r && echo changed >a && echo new >untracked`)
		n := 0
		f.each(t, func(t *testing.T) (string, error) {
			ref, err := Parse(clone, "/")
			if err != nil {
				return "", err
			}
			n++
			to := filepath.Join(g.home, fmt.Sprint("clone", n), "repo")
			if _, err = Push(t.Context(), g, Mirror{Dir: clone, Local: true, Ref: ref}.Source(true), Checkout{Dir: to}, nil); err != nil {
				return "", err
			}
			return ref.Key + checkoutState(t, to), nil
		})
	})
}

// copyOf returns a separate copy of the repository dir.
func copyOf(t *testing.T, dir string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy.git")
	host(t, "/", "rm -rf '"+to+"' && cp -r '"+dir+"' '"+to+"'")
	return to
}

// checkoutState returns the full state of a checkout, including uncommitted
// changes.
func checkoutState(t *testing.T, dir string) string {
	t.Helper()
	git, err := exec.LookPath("/usr/bin/git")
	if err != nil {
		t.Fatal(err)
	}
	return host(t, dir, strings.ReplaceAll("GIT for-each-ref && GIT symbolic-ref -q HEAD; GIT status --porcelain; cat a; cat .git/agent-sessionizer/known .git/agent-sessionizer/base; GIT config --get-regexp 'remote|branch'", "GIT", git))
}

func refsOf(t *testing.T, g *localGuest, dir string) string {
	t.Helper()
	return g.sh(t, "git -C "+ssh.Quote(dir)+" for-each-ref && git -C "+ssh.Quote(dir)+" symbolic-ref HEAD")
}
