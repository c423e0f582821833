package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestMakeKeepsWhatItCouldNotProve checks that files that were built but failed their
// test are tested again, not built again.
func TestMakeKeepsWhatItCouldNotProve(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	var did []string
	var refuse error
	build := func(ctx context.Context, i Info) (Info, error) {
		o := MakeOptions{Prove: func(_ context.Context, dir string, files []string) error {
			b, err := os.ReadFile(filepath.Join(dir, diskFile))
			did = append(did, fmt.Sprintf("prove %s %v", b, files))
			return errors.Join(err, refuse)
		}}
		return s.Make(ctx, i, o, func(_ context.Context, dir string) ([]string, error) {
			did = append(did, "fill")
			return []string{diskFile}, os.WriteFile(filepath.Join(dir, diskFile), []byte(i.Key), 0o600)
		})
	}
	check := func(step string, want ...string) {
		t.Helper()
		if !slices.Equal(did, want) {
			t.Errorf("%s: actions = %q, want %q", step, did, want)
		}
		did = nil
	}
	one, two := golden, golden
	one.Key, two.Key = "1aaaaaaaaaaaaaaa", "2aaaaaaaaaaaaaaa"
	prove := func(i Info) string { return fmt.Sprintf("prove %s [disk]", i.Key) }

	refuse = errors.New("a slow host")
	if _, err := build(t.Context(), one); !errors.Is(err, refuse) {
		t.Fatalf("a failed proof: %v, want %v", err, refuse)
	}
	check("first", "fill", prove(one))
	if f, ok := s.Failure(one.Name); !ok || !f.Kept {
		t.Errorf("failure: %+v, want one that has kept its files", f)
	}
	if infos, err := s.List(); err != nil || len(infos) != 0 {
		t.Errorf("List of an unverified image = %+v, %v, want none", infos, err)
	}
	refuse = nil
	i, err := build(t.Context(), one)
	if err != nil || len(i.Files) != 1 {
		t.Fatalf("second verification = %+v, %v, want 1 file", i, err)
	}
	check("again", prove(one))

	// Files with another key belong to another image.
	refuse = errors.New("a slow host")
	_, _ = build(t.Context(), two)
	one.Name = "other.golden"
	_, _ = build(t.Context(), one)
	one.Name = two.Name
	three := two
	three.Key = "3aaaaaaaaaaaaaaa"
	_, _ = build(t.Context(), three)
	check("other keys and names", "fill", prove(two), "fill", prove(one), "fill", prove(three))

	// A cancelled test does not count; too many failed tests delete the files.
	ctx, cancel := context.WithCancel(t.Context())
	refuse = context.Canceled
	s2 := MakeOptions{Prove: func(context.Context, string, []string) error { cancel(); return ctx.Err() }}
	if _, err := s.Make(ctx, three, s2, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled Make = %v, want %v", err, context.Canceled)
	}
	refuse = errors.New("does not boot")
	for range maxProofs {
		_, _ = build(t.Context(), three)
	}
	check("too often", prove(three), prove(three), "fill", prove(three))

	// Prune frees the space.
	if found, err := s.Prune(PruneOptions{}); err != nil || len(found) != 2 {
		t.Errorf("prune: %+v, %v; want both that were kept", found, err)
	}
	_, _ = build(t.Context(), three)
	check("after a prune", "fill", prove(three))
}

// TestUnderwayShowsTheLastLine checks that Underway shows the last line of a build's
// maker, however fast the lines come.
func TestUnderwayShowsTheLastLine(t *testing.T) {
	s := &Store{Dir: t.TempDir()}
	s.make = func(ctx context.Context, dir string, o BuildOptions) error {
		for n := range 9 {
			o.Progress(fmt.Sprintf("step %d of 9", n+1))
		}
		making, err := s.Underway()
		if err != nil || len(making) != 1 || making[0].Doing != "step 9 of 9" || making[0].Since.IsZero() {
			t.Errorf("underway: %+v, %v; want the last line", making, err)
		}
		return errors.Join(err, fakeMaker(ctx, dir, o))
	}
	if _, err := s.Build(t.Context(), options("x")); err != nil {
		t.Fatal(err)
	}
}
