package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// imageFiles are the files that a maker must produce.
var imageFiles = []string{diskFile, KernelFile, InitrdFile, CmdlineFile}

func fakeMaker(_ context.Context, dir string, o BuildOptions) error {
	for _, f := range imageFiles {
		if err := os.WriteFile(filepath.Join(dir, f), []byte(f+" "+o.Suite+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func options(script string) BuildOptions {
	return BuildOptions{
		Provision:    fstest.MapFS{"10-a.sh": {Data: []byte(script)}},
		GuestProgram: []byte("program"),
	}
}

func TestBuildPublishesOnceAndLookupFindsIt(t *testing.T) {
	s := &Store{Dir: filepath.Join(t.TempDir(), "images"), make: fakeMaker}
	if _, err := s.Lookup(Debian, vm.HostArch()); fail.CodeOf(err) != fail.NotFound || fail.HintOf(err) == "" {
		t.Fatalf("Lookup before any build = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.NotFound)
	}
	first, err := s.Build(t.Context(), options("one"))
	if err != nil {
		t.Fatal(err)
	}
	s.make = func(context.Context, string, BuildOptions) error { return errors.New("must not run") }
	again, err := s.Build(t.Context(), options("one"))
	if err != nil || again.Path != first.Path {
		t.Fatalf("same inputs: %+v, %v; want %s", again, err, first.Path)
	}
	img, err := s.Lookup(Debian, vm.HostArch())
	if err != nil || img.Location != filepath.Join(first.Path, diskFile) || img.Cmdline != "cmdline trixie" {
		t.Fatalf("Lookup = %+v, %v, want %s with cmdline trixie", img, err, filepath.Join(first.Path, diskFile))
	}

	s.make = fakeMaker
	second, err := s.Build(t.Context(), options("two"))
	if err != nil || second.Key == first.Key {
		t.Fatalf("Build with another script = %+v, %v, want another key than %s", second, err, first.Key)
	}
	third, err := s.Build(t.Context(), BuildOptions{Provision: options("two").Provision, GuestProgram: []byte("another"), Rebuild: true})
	if err != nil || third.Key != second.Key || third.Path == second.Path {
		t.Fatalf("rebuild = %+v, %v, want key %s at another path", third, err, second.Key)
	}
	infos, err := s.List()
	if err != nil || len(infos) != 3 || infos[0].Path != third.Path || !infos[0].Ready || infos[1].Ready {
		t.Fatalf("List = %+v, %v, want 3 images, the newest first, it alone ready", infos, err)
	}
	used := func(dir string) bool { return dir == first.Path }
	would, err := s.Prune(PruneOptions{InUse: used, DryRun: true})
	if err != nil || len(would) != 1 || would[0].Size == 0 {
		t.Fatalf("dry run of Prune = %+v, %v, want 1 image with a size", would, err)
	}
	if infos, _ = s.List(); len(infos) != 3 {
		t.Fatalf("List after a dry run = %+v, want 3", infos)
	}
	did, err := s.Prune(PruneOptions{InUse: used})
	if diff := cmp.Diff(would, did); err != nil || diff != "" {
		t.Fatalf("Prune = %v, mismatch with the dry run (-want +got):\n%s", err, diff)
	}
	if infos, _ = s.List(); len(infos) != 2 || infos[1].Path != first.Path {
		t.Fatalf("prune kept %+v, want the newest and the one in use", infos)
	}
	if err := s.Remove(Debian, func(dir string) bool { return dir == first.Path }); fail.CodeOf(err) != fail.Conflict {
		t.Fatalf("Remove of a used image = %v, want code %v", err, fail.Conflict)
	}
	if infos, _ = s.List(); len(infos) != 2 {
		t.Fatalf("List after a refused Remove = %+v, want 2", infos)
	}
	for range 2 {
		if err := s.Remove(Debian, nil); err != nil {
			t.Fatal(err)
		}
	}
	if infos, _ = s.List(); len(infos) != 0 {
		t.Fatalf("List after Remove = %+v, want none", infos)
	}
}

// TestBuildCutShortAtEveryStep checks that a build that dies at any point publishes
// nothing and hides nothing, and that the next build cleans up after it.
func TestBuildCutShortAtEveryStep(t *testing.T) {
	for n := range len(imageFiles) + 1 {
		t.Run(fmt.Sprintf("after %d files", n), func(t *testing.T) {
			s := &Store{Dir: t.TempDir(), make: fakeMaker}
			before, err := s.Build(t.Context(), options("old"))
			if err != nil {
				t.Fatal(err)
			}
			died := filepath.Join(s.Dir, workPrefix+"debian-died")
			s.make = func(_ context.Context, dir string, _ BuildOptions) error {
				for _, f := range imageFiles[:n] {
					if err := os.WriteFile(filepath.Join(dir, f), []byte("x"), 0o644); err != nil {
						return err
					}
				}
				// Leave what kill -9 would leave: the directory itself.
				if err := os.CopyFS(died, os.DirFS(dir)); err != nil {
					return err
				}
				return errors.New("cut short")
			}
			if _, err := s.Build(t.Context(), options("new")); err == nil {
				t.Fatal("failing Build = nil, want an error")
			}
			if img, err := s.Lookup(Debian, vm.HostArch()); err != nil || filepath.Dir(img.Location) != before.Path {
				t.Fatalf("Lookup after a failed build = %+v, %v, want %s", img, err, before.Path)
			}
			s.make = fakeMaker
			if _, err := s.Build(t.Context(), options("new")); err != nil {
				t.Fatal(err)
			}
			if left, _ := filepath.Glob(filepath.Join(s.Dir, workPrefix+"*")); len(left) != 0 {
				t.Fatalf("work directories after the build = %q, want none", left)
			}
		})
	}
}

func TestBuildWithAPartMissingIsNotPublished(t *testing.T) {
	for _, missing := range imageFiles {
		s := &Store{Dir: t.TempDir()}
		s.make = func(ctx context.Context, dir string, o BuildOptions) error {
			return errors.Join(fakeMaker(ctx, dir, o), os.Remove(filepath.Join(dir, missing)))
		}
		if _, err := s.Build(t.Context(), options("x")); err == nil {
			t.Errorf("Build without %s = nil, want an error", missing)
		}
		if infos, err := s.List(); err != nil || len(infos) != 0 {
			t.Errorf("List after a build without %s = %+v, %v, want none", missing, infos, err)
		}
	}
}

func TestDamagedImageIsNotFoundAndPruned(t *testing.T) {
	s := &Store{Dir: t.TempDir(), make: fakeMaker}
	i, err := s.Build(t.Context(), options("x"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(i.Path, KernelFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Lookup(Debian, vm.HostArch()); fail.CodeOf(err) != fail.NotFound {
		t.Fatalf("Lookup of a damaged image = %v, want code %v", err, fail.NotFound)
	}
	if _, err := s.Prune(PruneOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(i.Path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("damaged image after Prune: %v, want it removed", err)
	}
}

func TestConcurrentBuildersShareOneBuild(t *testing.T) {
	dir := t.TempDir()
	var runs atomic.Int32
	begun, release := make(chan struct{}), make(chan struct{})
	slow := func(ctx context.Context, dir string, o BuildOptions) error {
		if runs.Add(1) == 1 {
			close(begun)
		}
		<-release
		return fakeMaker(ctx, dir, o)
	}
	var wg sync.WaitGroup
	paths := make([]string, 4)
	waiting := make(chan struct{}, len(paths))
	for n := range paths {
		wg.Go(func() {
			o := options("x")
			o.Progress = func(line string) {
				if strings.Contains(line, "waiting") {
					waiting <- struct{}{}
				}
			}
			i, err := (&Store{Dir: dir, make: slow}).Build(t.Context(), o)
			if err != nil {
				t.Error(err)
			}
			paths[n] = i.Path
		})
	}
	<-begun
	for range len(paths) - 1 {
		<-waiting
	}
	// A running build is not a leftover.
	if _, err := (&Store{Dir: dir}).Prune(PruneOptions{}); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (&Store{Dir: dir, make: slow}).Build(ctx, options("x")); !errors.Is(err, context.Canceled) {
		t.Errorf("Build cancelled while waiting = %v, want %v", err, context.Canceled)
	}
	close(release)
	wg.Wait()
	if runs.Load() != 1 {
		t.Errorf("builds run = %d, want 1", runs.Load())
	}
	for _, p := range paths {
		if p == "" || p != paths[0] {
			t.Errorf("images of all builders = %q, want one", paths)
		}
	}
}

func TestBuildRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(*BuildOptions)
	}{
		{"a cloud image", func(o *BuildOptions) { o.Name = Ubuntu }},
		{"a suite that is an option", func(o *BuildOptions) { o.Suite = "--mode=root" }},
		{"another architecture", func(o *BuildOptions) { o.Arch = "s390x" }},
		{"no guest program", func(o *BuildOptions) { o.GuestProgram = nil }},
	} {
		o := options("x")
		c.edit(&o)
		if _, err := (&Store{Dir: t.TempDir(), make: fakeMaker}).Build(t.Context(), o); err == nil {
			t.Errorf("Build with %s = nil, want an error", c.name)
		}
	}
}

func TestTemplatePinsBothArchitectures(t *testing.T) {
	template, err := sessionizer.Lima.ReadFile("lima/agent-sandbox.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s := &Store{Dir: t.TempDir(), Template: template}
	for _, arch := range []string{"x86_64", "aarch64"} {
		img, err := s.Lookup(Ubuntu, arch)
		if err != nil || !strings.HasPrefix(img.Location, "https://") || len(img.Digest) != len("sha256:")+64 {
			t.Errorf("Lookup(%s, %s) = %+v, %v, want an https location with a sha256 digest", Ubuntu, arch, img, err)
		}
	}
	if _, err := s.Lookup(Ubuntu, "riscv64"); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("Lookup(%s, riscv64) = %v, want code %v", Ubuntu, err, fail.NotFound)
	}
	s.Template = []byte("images:\n- location: https://example.com/x.img\n  arch: x86_64\n")
	if _, err := s.List(); fail.CodeOf(err) != fail.Usage {
		t.Errorf("List of a template without a digest = %v, want code %v", err, fail.Usage)
	}
	if err := s.Remove(Ubuntu, nil); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Remove of the cloud image = %v, want code %v", err, fail.Usage)
	}
}

func provision(t *testing.T) fs.FS {
	t.Helper()
	sub, err := fs.Sub(sessionizer.Provision, "provision")
	if err != nil {
		t.Fatal(err)
	}
	return sub
}

func TestScriptsParse(t *testing.T) {
	err := fs.WalkDir(provision(t), ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || (!strings.HasSuffix(p, ".sh") && !strings.HasSuffix(p, "ready-tmux")) {
			return err
		}
		b, err := fs.ReadFile(provision(t), p)
		if err != nil {
			return err
		}
		cmd := exec.CommandContext(t.Context(), "bash", "-n")
		cmd.Stdin = strings.NewReader(string(b))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("bash -n %s = %v, want nil\n%s", p, err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, script := range map[string]string{"customize.sh": customizeScript, "initramfs-hook.sh": initramfsHook, "disk.sh": diskScript} {
		cmd := exec.CommandContext(t.Context(), "sh", "-n")
		cmd.Stdin = strings.NewReader(script)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("sh -n %s = %v, want nil\n%s", name, err, out)
		}
	}
}

func TestForeignProgramsMustRun(t *testing.T) {
	o := options("x")
	o.Arch = "aarch64"
	o.GuestProgram = []byte("\x7fELF of another machine")
	if err := checkForeign(t.Context(), t.TempDir(), o); fail.CodeOf(err) != fail.Host || fail.HintOf(err) != foreignHint {
		t.Errorf("checkForeign(a program that cannot run) = %v (hint %q), want code %v and hint %q", err, fail.HintOf(err), fail.Host, foreignHint)
	}
	o.GuestProgram = []byte("#!/bin/sh\n[ $1 = version ]\n")
	if err := checkForeign(t.Context(), t.TempDir(), o); err != nil {
		t.Errorf("checkForeign(a program that runs) = %v, want nil", err)
	}
}
