package repo

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// prune performs all the steps of the "prune" command for mirrors.
func prune(t *testing.T, m *Mirrors, o PruneOptions) map[string]Unused {
	t.Helper()
	if o.Before.IsZero() {
		o.Before = time.Now().Add(time.Minute)
	}
	if o.InUse == nil {
		o.InUse = func(string) (bool, error) { return false, nil }
	}
	all, err := m.Prune(t.Context(), o)
	swept, serr := m.Sweep(o.DryRun)
	if err = errors.Join(err, serr); err != nil {
		t.Fatal(err)
	}
	found := map[string]Unused{}
	for _, u := range append(all, swept...) {
		found[u.Dir] = u
	}
	return found
}

func TestPruneKeepsWhatMayBeNeeded(t *testing.T) {
	isolate(t)
	m := mirrors(t)
	equal(t, "of a directory that is not there", len(prune(t, m, PruneOptions{})), 0)
	ref, bare := upstream(t)
	mirror := ensure(t, m, ref)

	equal(t, "used just now", len(prune(t, m, PruneOptions{Before: time.Now().Add(-time.Hour)})), 0)
	inUse := PruneOptions{InUse: func(key string) (bool, error) { return key == ref.Key, nil }}
	equal(t, "has a session", len(prune(t, m, inUse)), 0)
	unlock, err := m.lock(t.Context(), ref, nil)
	if err != nil {
		t.Fatal(err)
	}
	equal(t, "while a fetch runs", len(prune(t, m, PruneOptions{})), 0)
	unlock()
	broken := errors.New("unknown")
	if _, err := m.Prune(t.Context(), PruneOptions{Before: time.Now().Add(time.Minute), InUse: func(string) (bool, error) { return false, broken }}); !errors.Is(err, broken) {
		t.Errorf("Prune when InUse fails = %v, want %v", err, broken)
	}

	// Agents' commits that exist nowhere else keep the mirror; merged ones do not.
	host(t, mirror.Dir, `git update-ref refs/agents/s/heads/main "$(git commit-tree -p main -m agent main^{tree})"`)
	if u := prune(t, m, PruneOptions{})[mirror.Dir]; u.Stays == "" || u.Repo != ref.Key || u.Size == 0 {
		t.Errorf("Prune of a mirror with agents' work = %+v, want it kept, of %s, with a size", u, ref.Key)
	}
	host(t, bare, "git fetch -q '"+mirror.Dir+"' refs/agents/s/heads/main:refs/heads/merged")
	ensure(t, m, ref)
	if u, ok := prune(t, m, PruneOptions{DryRun: true})[mirror.Dir]; !ok || u.Stays != "" {
		t.Errorf("Prune of a mirror with merged work = %+v, %t, want it removable", u, ok)
	}
	if _, err := os.Stat(filepath.Join(mirror.Dir, "HEAD")); err != nil {
		t.Fatalf("mirror after a dry run: %v, want it kept", err)
	}

	// A damaged or foreign repository does not count as a mirror.
	host(t, m.Dir, "git init -q --bare other/strange.git && git -C other/strange.git config remote.origin.url https://example.org/o/r")
	host(t, mirror.Dir, "echo broken >packed-refs && mkdir -p refs/agents/s && echo broken >refs/agents/s/x")
	found := prune(t, m, PruneOptions{})
	if u := found[mirror.Dir]; u.Stays == "" || len(found) != 1 {
		t.Errorf("Prune = %+v, want %s alone, kept", found, mirror.Dir)
	}
}

func TestPruneRemoves(t *testing.T) {
	isolate(t)
	m := mirrors(t)
	ref, _ := upstream(t)
	mirror := ensure(t, m, ref)
	cut := filepath.Join(m.Dir, tmpDir, "0123456789abcdef")
	if err := os.MkdirAll(filepath.Join(cut, "half"), 0o700); err != nil {
		t.Fatal(err)
	}
	equal(t, "found by a dry run", len(prune(t, m, PruneOptions{DryRun: true})), 2)
	found := prune(t, m, PruneOptions{})
	equal(t, "removed", len(found), 2)
	for _, dir := range []string{mirror.Dir, cut} {
		if u, ok := found[dir]; !ok || u.Stays != "" {
			t.Errorf("Prune of %s = %+v, %t, want it removed", dir, u, ok)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("pruned mirror %s: %v, want it removed", dir, err)
		}
	}
	equal(t, "again", len(prune(t, m, PruneOptions{})), 0)

	// If Prune is killed between the move and the deletion, the next one finishes.
	mirror = ensure(t, m, ref)
	if err := os.MkdirAll(m.temporary(ref), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(mirror.Dir, filepath.Join(m.temporary(ref), "gone")); err != nil {
		t.Fatal(err)
	}
	if _, ok := prune(t, m, PruneOptions{})[m.temporary(ref)]; !ok {
		t.Errorf("Prune without %s, want it: a killed prune left it", m.temporary(ref))
	}
	ensure(t, m, ref) // it is cloned again

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.Prune(ctx, PruneOptions{Before: time.Now().Add(time.Minute), InUse: func(string) (bool, error) { return false, nil }}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled Prune = %v, want %v", err, context.Canceled)
	}
}
