package repo

import (
	"testing"
)

// ReadFile reads from the commit that is checked out, not from the branch's current
// tip.
func TestReadFileAtTheCommitThatIsCheckedOut(t *testing.T) {
	isolate(t)
	dir := t.TempDir()
	commits := host(t, dir, `git init -q . && echo strict >f && git add f && git commit -qm one && git rev-parse HEAD
		git rm -q f && git commit -qm two && git rev-parse --short=12 HEAD
		git switch -qc other && echo loose >f && git add f && git commit -qm three && git rev-parse HEAD && git switch -q main
		git clone -q . ../clone && git -C ../clone remote set-url origin https://example.com/o/r`)
	first, second, third := commits[:40], commits[41:53], commits[54:]
	for name, c := range map[string]struct {
		src  Source
		want string
	}{
		"a pinned commit":           {Source{Dir: dir, Commit: first}, "strict\n"},
		"a pinned commit, in short": {Source{Dir: dir, Branch: "main", Commit: second}, ""},
		"a branch":                  {Source{Dir: dir, Branch: "other"}, "loose\n"},
		"a branch at a commit":      {Source{Dir: dir, Branch: "other", Commit: first}, "strict\n"},
		"the default branch":        {Source{Dir: dir}, ""},
		"a branch of the remote":    {Source{Dir: dir + "/../clone", Local: true, URL: "https://example.com/o/r", Branch: "other"}, "loose\n"},
	} {
		got, ok, err := c.src.ReadFile(t.Context(), "f", 100)
		if err != nil || string(got) != c.want || ok != (c.want != "") {
			t.Errorf("ReadFile of %s = %q, %t, %v, want %q", name, got, ok, err, c.want)
		}
	}
	src, err := Source{Dir: dir, Branch: "other"}.Resolve(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	host(t, dir, "git switch -q other && git rm -q f && git commit -qm four && git switch -q main") // between two calls
	if text, _, err := src.ReadFile(t.Context(), "f", 100); err != nil || string(text) != "loose\n" {
		t.Errorf("ReadFile(f) after the branch moved = %q, %v, want \"loose\\n\"", text, err)
	}
	if src.Commit != third {
		t.Errorf("resolved to %s, want %s", src.Commit, third)
	}
	if _, _, err := (Source{Dir: dir, Commit: "deadbeef"}).ReadFile(t.Context(), "f", 100); err == nil {
		t.Error("ReadFile at an unknown commit = nil, want an error")
	}
	host(t, dir, "git switch -q --detach "+first+" && git commit -q --allow-empty -m detached")
	if src, err = (Source{Dir: dir, Local: true}).Resolve(t.Context()); err != nil || src.Branch != "" {
		t.Fatalf("Resolve on no branch = %+v, %v, want no branch", src, err)
	}
	if _, err := src.Resolve(t.Context()); err != nil { // on no branch, but sent anyway
		t.Error(err)
	}
}
