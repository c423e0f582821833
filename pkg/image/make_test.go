package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

var golden = Info{Name: Golden(Debian), Arch: "x86_64", Source: Debian, Key: strings.Repeat("a", 64)}

// write fills a directory with files.
func write(t *testing.T, dir string, files ...string) []string {
	t.Helper()
	for _, f := range files {
		if err := os.WriteFile(filepath.Join(dir, f), []byte(f), 0o644); err != nil {
			t.Error(err)
		}
	}
	return files
}

func makeGolden(t *testing.T, s *Store) Info {
	t.Helper()
	i, err := s.Make(t.Context(), golden, MakeOptions{}, func(_ context.Context, dir string) ([]string, error) {
		return write(t, dir, diskFile, KernelFile, CmdlineFile), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func warm(t *testing.T, s *Store, i Info, key string, cpus int) Warm {
	t.Helper()
	w, err := s.MakeWarm(t.Context(), i, Warm{Key: key, CPUs: cpus, Memory: 1 << 30}, MakeOptions{}, func(_ context.Context, dir string) error {
		write(t, dir, vm.StateFile, vm.DiskFile)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestMakeGoldenWithFewerFiles(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	i := makeGolden(t, s)
	img, err := s.Lookup(golden.Name, golden.Arch)
	want := vm.Image{Arch: "x86_64", Location: filepath.Join(i.Path, diskFile), Kernel: filepath.Join(i.Path, KernelFile), Cmdline: CmdlineFile}
	if err != nil || img != want {
		t.Fatalf("Lookup = %+v, %v, want %+v", img, err, want)
	}
	if _, err := s.Lookup(Debian, golden.Arch); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("Lookup(%s) with a golden image only = %v, want code %v", Debian, err, fail.NotFound)
	}
	if err := os.Remove(filepath.Join(i.Path, KernelFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Lookup(golden.Name, golden.Arch); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("Lookup(%s) without its kernel = %v, want code %v", golden.Name, err, fail.NotFound)
	}
}

// TestImageWantedAgain makes images for two versions of the program in turn, with a clock
// that is set back in between.
func TestImageWantedAgain(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	build := func(key string) Info {
		t.Helper()
		i, err := s.Make(t.Context(), Info{Name: golden.Name, Arch: golden.Arch, Key: key}, MakeOptions{}, func(_ context.Context, dir string) ([]string, error) {
			return write(t, dir, diskFile), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		found, err := s.Find(golden.Name, golden.Arch)
		if diff := cmp.Diff(i, found); err != nil || diff != "" {
			t.Fatalf("Find after Make of %s = %v, want what Make returned (-built +found):\n%s", key[:1], err, diff)
		}
		return i
	}
	one, two := strings.Repeat("1", 64), strings.Repeat("2", 64)
	first := build(one)
	second := build(two)
	if i, err := s.FindKey(golden.Name, golden.Arch, one); err != nil || i.Path != first.Path {
		t.Errorf("FindKey of 1 with a newer image = %+v, %v, want %+v", i, err, first)
	}
	if again := build(one); again.Path != first.Path || !again.CreatedAt.Equal(first.CreatedAt) {
		t.Errorf("Make of 1 again = %+v, want %+v", again, first)
	}
	if again := build(two); again.Path != second.Path {
		t.Errorf("Make of 2 again = %+v, want %+v", again, second)
	}
	future := filepath.Join(second.Path, metaFile)
	text, err := os.ReadFile(future)
	if err != nil {
		t.Fatal(err)
	}
	year := fmt.Sprint(time.Now().UTC().Year())
	if err := os.WriteFile(future, bytes.ReplaceAll(text, []byte(year), []byte("2999")), 0o644); err != nil {
		t.Fatal(err)
	}
	third := build(strings.Repeat("3", 64))
	if left, err := s.Prune(PruneOptions{}); err != nil || len(left) != 2 {
		t.Errorf("Prune = %+v, %v, want the 2 images that are not in use any more", left, err)
	}
	if i, err := s.Find(golden.Name, golden.Arch); err != nil || i.Path != third.Path {
		t.Errorf("Find after Prune = %+v, %v, want %s", i, err, third.Path)
	}
}

func TestWarmStatesOfAnImage(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	i := makeGolden(t, s)
	old := warm(t, s, i, "qemu7", 2)
	once := warm(t, s, i, "qemu7", 2)
	if once.Path != old.Path {
		t.Errorf("second warm state of the same size = %s, want %s", once.Path, old.Path)
	}
	other := warm(t, s, i, "other", 4)
	i, err := s.Find(golden.Name, golden.Arch)
	if err != nil || len(i.Warm) != 2 {
		t.Fatalf("Find = %+v, %v, want 2 warm states", i, err)
	}
	w, ok := i.Warmed("qemu7")
	img, err := i.Resumed(w)
	if !ok || err != nil || img.State != filepath.Join(old.Path, vm.StateFile) || img.Location != filepath.Join(old.Path, vm.DiskFile) || img.Kernel == "" {
		t.Fatalf("warm image = %+v, %t, %v, want state and disk in %s, with a kernel", img, ok, err, old.Path)
	}
	// Another QEMU makes a new state. Of the old ones, the state that a VM builds on
	// stays.
	next := warm(t, s, i, "qemu8", 2)
	used := func(dir string) bool { return dir == old.Path }
	if _, err := s.Prune(PruneOptions{InUse: used}); err != nil {
		t.Fatal(err)
	}
	if _, err := readWarm(old.Path); err != nil {
		t.Errorf("readWarm of a state that a VM builds on, after Prune, = %v, want nil", err)
	}
	if freed, err := s.Prune(PruneOptions{}); err != nil || len(freed) != 1 || freed[0].Size == 0 {
		t.Errorf("Prune = %+v, %v, want 1 with a size", freed, err)
	}
	for _, path := range []string{next.Path, other.Path} {
		if _, err := readWarm(path); err != nil {
			t.Errorf("readWarm of the newest state of its size, after Prune, = %v, want nil", err)
		}
	}
	if _, err := os.Stat(old.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("warm state after Prune: %v, want it removed", err)
	}
	// A state that cannot be resumed is not used any more and makes way for another
	// one.
	if err := s.Cool(next.Path); err != nil {
		t.Fatal(err)
	}
	if i, err = s.Find(golden.Name, golden.Arch); err != nil || len(i.Warm) != 1 {
		t.Errorf("warm states after Cool = %+v, %v, want 1", i.Warm, err)
	}
	if again := warm(t, s, i, "qemu8", 2); again.Path == next.Path {
		t.Errorf("warm state made after Cool = %s, want another", again.Path)
	}
	if _, err := s.Prune(PruneOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(next.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("cooled state after Prune: %v, want it removed", err)
	}
}

func TestWarmStateOfAnImageThatWent(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	i := makeGolden(t, s)
	_, err := s.MakeWarm(t.Context(), i, Warm{Key: "k", CPUs: 1, Memory: 1}, MakeOptions{}, func(_ context.Context, dir string) error {
		write(t, dir, vm.StateFile, vm.DiskFile)
		return s.Remove(golden.Name, nil)
	})
	if err == nil {
		t.Error("warm state of a removed image = nil, want an error")
	}
	if left, _ := filepath.Glob(filepath.Join(s.Dir, workPrefix+"*")); len(left) > 0 {
		t.Errorf("work directories = %q, want none", left)
	}
}

// TestFailureOfAWarmState checks that a failure to make a saved state of one size does
// not affect the image.
func TestFailureOfAWarmState(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	i := makeGolden(t, s)
	_, err := s.MakeWarm(t.Context(), i, Warm{Key: "k", CPUs: 2, Memory: 4 << 30}, MakeOptions{}, func(context.Context, string) error {
		return errors.New("disk full")
	})
	want := "save a VM of 2 CPUs and 4GiB, booted from image " + golden.Name + ": disk full"
	if f, ok := s.Failure(golden.Name); err == nil || err.Error() != want || !ok || f.Error != want {
		t.Errorf("warm state = %v, recorded failure %+v, want %q", err, f, want)
	}
}

func TestMakersOfOneImageWaitForEachOther(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	var fills atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			_, err := s.Make(t.Context(), golden, MakeOptions{}, func(_ context.Context, dir string) ([]string, error) {
				fills.Add(1)
				if making, err := s.Underway(); err != nil || len(making) != 1 || making[0].Name != golden.Name || making[0].Since.IsZero() {
					t.Errorf("Underway = %+v, %v, want %s with its time", making, err, golden.Name)
				}
				return write(t, dir, diskFile), nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if fills.Load() != 1 {
		t.Errorf("images made = %d, want 1", fills.Load())
	}
	if making, err := s.Underway(); err != nil || len(making) != 0 {
		t.Errorf("Underway at the end = %+v, %v, want none", making, err)
	}
}

func TestFailureIsKeptUntilItIsMade(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	broken := func(context.Context, string) ([]string, error) { return nil, errors.New("no space left") }
	if _, err := s.Make(t.Context(), golden, MakeOptions{}, broken); err == nil {
		t.Fatal("failing Make = nil, want an error")
	}
	if f, ok := s.Failure(golden.Name); !ok || !strings.Contains(f.Error, "no space left") || time.Since(f.At) > time.Minute {
		t.Errorf("Failure = %+v, %t, want \"no space left\", now", f, ok)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := s.Make(ctx, Info{Name: "other", Arch: "x86_64", Key: golden.Key}, MakeOptions{}, func(context.Context, string) ([]string, error) {
		cancel()
		return nil, ctx.Err()
	}); err == nil {
		t.Fatal("cancelled Make = nil, want an error")
	}
	if f, ok := s.Failure("other"); ok {
		t.Errorf("Failure of a cancelled Make = %+v, want none", f)
	}
	makeGolden(t, s)
	if f, ok := s.Failure(golden.Name); ok {
		t.Errorf("Failure after a successful Make = %+v, want none", f)
	}
}

func TestMakeSweepsAfterTheDead(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	dead := filepath.Join(s.Dir, workPrefix+golden.Name+"-1")
	if err := os.Mkdir(dead, 0o755); err != nil {
		t.Fatal(err)
	}
	var swept []string
	o := MakeOptions{Sweep: func(work string) error { swept = append(swept, work); return nil }}
	_, err := s.Make(t.Context(), golden, o, func(_ context.Context, dir string) ([]string, error) { return write(t, dir, diskFile), nil })
	if err != nil || len(swept) != 1 || swept[0] != dead {
		t.Errorf("Make = %v, swept %q, want nil, %s", err, swept, dead)
	}
	if _, err := os.Stat(dead); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("leftover after Make: %v, want it removed", err)
	}
}

// TestPruneSweepsAfterTheDead checks that Prune also cleans up after dead makers, but
// not after live ones.
func TestPruneSweepsAfterTheDead(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	dead, alive := filepath.Join(s.Dir, workPrefix+"dead-1"), filepath.Join(s.Dir, workPrefix+"alive-1")
	for _, dir := range []string{dead, alive} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	lock, ok, err := lockfile.Try(filepath.Join(s.Dir, lockPrefix+"alive"))
	if err != nil || !ok {
		t.Fatalf("Try = %t, %v, want true, nil", ok, err)
	}
	defer lock.Unlock()
	var swept []string
	o := PruneOptions{DryRun: true, Sweep: func(name, work string) error { swept = append(swept, name+" "+work); return nil }}
	found, err := s.Prune(o)
	if err != nil || len(found) != 1 || found[0].Path != dead || found[0].Why == "" || len(swept) != 0 {
		t.Fatalf("dry run of Prune = %+v, %v, swept %q, want %s with a reason, not swept", found, err, swept, dead)
	}
	if entries, _ := os.ReadDir(s.Dir); len(entries) != 3 {
		t.Errorf("entries after a dry run = %v, want 3", entries)
	}
	o.DryRun = false
	if found, err = s.Prune(o); err != nil || len(found) != 1 || len(swept) != 1 || swept[0] != "dead "+dead {
		t.Errorf("Prune = %+v, %v, swept %q, want %s swept", found, err, swept, dead)
	}
	if _, err := os.Stat(dead); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("leftover after Prune: %v, want it removed", err)
	}
	if _, err := os.Stat(alive); err != nil {
		t.Errorf("work directory of a running process after Prune: %v, want it kept", err)
	}
	if found, err = s.Prune(o); err != nil || len(found) != 0 {
		t.Errorf("second Prune = %+v, %v, want none", found, err)
	}
}

func TestMakeWithoutSpace(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	_, err := s.Make(t.Context(), golden, MakeOptions{Space: 1 << 60}, func(context.Context, string) ([]string, error) {
		t.Error("Make without space began, want it refused")
		return nil, nil
	})
	if fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "" {
		t.Errorf("Make without space = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.Host)
	}
}

// TestUseHoldsOffPrune checks that no image is removed between its lookup and the
// creation of a VM that builds on it.
func TestUseHoldsOffPrune(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	i := makeGolden(t, s)
	release, err := s.Use()
	if err != nil {
		t.Fatal(err)
	}
	again, err := s.Use() // Use is shared
	if err != nil {
		t.Fatal(err)
	}
	again()
	removed := make(chan error, 1)
	go func() { removed <- s.Remove(golden.Name, nil) }()
	// Remove waits for the lock, so another attempt to lock exclusively fails too.
	if _, ok, err := lockfile.Try(filepath.Join(s.Dir, useLock)); ok || err != nil {
		t.Errorf("Try of a used image's lock = %t, %v, want false, nil", ok, err)
	}
	if _, err := readInfo(i.Path); err != nil {
		t.Errorf("readInfo of a used image during Remove = %v, want nil", err)
	}
	release()
	if err := <-removed; err != nil {
		t.Error(err)
	}
}
