package session

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// A directory that names a repository gets what belongs to that repository only after
// a person confirmed this directory for this repository.
func TestLocalCloneMustBeConfirmed(t *testing.T) {
	m := newManager(t)
	dir := t.TempDir()
	sh(t, dir, "git init -q a && git init -q b && git init -q --bare c.git")
	ref := func(name, key string) repo.Ref {
		return repo.Ref{Key: key, Slug: "o/r", Path: filepath.Join(dir, name), URL: "https://" + key}
	}
	const key = "github.com/o/r"
	refused := func(what string, r repo.Ref) {
		t.Helper()
		_, cerr := m.Check(Request{Repo: r})
		_, _, _, oerr := m.Open(t.Context(), Request{Repo: r})
		for _, err := range []error{cerr, oerr} {
			if !errors.Is(err, ErrUntrusted) || fail.CodeOf(err) != fail.Policy || fail.HintOf(err) != "agent-sessionizer trust "+r.Path {
				t.Errorf("%s: error = %v (hint %q), want %v with code %v and a hint to trust %s", what, err, fail.HintOf(err), ErrUntrusted, fail.Policy, r.Path)
			}
		}
		if all, err := m.List(t.Context()); err != nil || len(all) != 0 {
			t.Errorf("%s: sessions = %d, %v, want 0", what, len(all), err)
		}
	}
	refused("never confirmed", ref("a", key))
	refused("a bare one", ref("c.git", key))
	for _, name := range []string{"a", "c.git"} {
		for range 2 {
			if err := (Clones{Paths: m.Config.Paths}).Trust(ref(name, key)); err != nil {
				t.Fatal(err)
			}
		}
		if err := (Clones{Paths: m.Config.Paths}).Check(ref(name, key)); err != nil {
			t.Errorf("Check of the confirmed clone = %v, want nil", err)
		}
	}
	refused("another directory", ref("b", key))
	refused("another repository", ref("a", "github.com/o/other"))
	sh(t, dir, "mv a/.git old && cp -r old a/.git")
	refused("another clone at its place", ref("a", key))
	if err := os.WriteFile(Clones{Paths: m.Config.Paths}.file(ref("a", key)), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused("a damaged record", ref("a", key))
	if err := (Clones{Paths: m.Config.Paths}).Check(ref("missing", key)); err == nil || (Clones{Paths: m.Config.Paths}).Trust(ref("missing", key)) == nil {
		t.Errorf("Check of a missing clone = %v, want an error, also from Trust", err)
	}
	// A reference that claims no remote needs no confirmation.
	for _, r := range []repo.Ref{{Key: "local:" + dir + "/b", Path: dir + "/b"}, {Key: key, URL: "https://" + key}} {
		if err := (Clones{Paths: m.Config.Paths}).Check(r); err != nil {
			t.Errorf("Check(%+v) = %v, want nil", r, err)
		}
	}
	if err := (Clones{Paths: m.Config.Paths}).Trust(ref("a", key)); err != nil {
		t.Fatal(err)
	}
	if _, created, _, err := m.Open(t.Context(), Request{Repo: ref("a", key)}); err != nil || !created {
		t.Errorf("Open of a trusted clone = created %t, %v, want true, nil", created, err)
	}
}
