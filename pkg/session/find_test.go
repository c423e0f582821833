package session

import (
	"cmp"
	"slices"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

func openLabel(t *testing.T, m *Manager, r Request) Session {
	t.Helper()
	s, created, _, err := m.Open(t.Context(), r)
	if err != nil || !created {
		t.Fatalf("Open(%s, label %q, new %t) = created %t, %v, want true, nil", r.Repo.Key, r.Label, r.New, created, err)
	}
	return s
}

func TestLabels(t *testing.T) {
	m := newManager(t)
	r := request("o/r")
	another := func(branch, label string) Request {
		n := request("o/r")
		n.New, n.Label, n.Repo.Branch = true, label, branch
		return n
	}
	var labels []string
	for _, n := range []Request{another("", ""), another("", ""), another("", "fix"), another("", ""), another("dev", ""), another("dev", "")} {
		labels = append(labels, openLabel(t, m, n).Label)
	}
	if want := []string{"", "2", "fix", "3", "dev", "dev-2"}; !slices.Equal(labels, want) {
		t.Fatalf("labels of new sessions = %q, want %q", labels, want)
	}
	if s, created, _, err := m.Open(t.Context(), another("", "fix")); fail.CodeOf(err) != fail.Conflict || created {
		t.Errorf("Open with label fix, which is in use = %s, created %t, %v, want code %v", s.Name, created, err, fail.Conflict)
	}
	r.Label = "fix"
	if s, created, _, err := m.Open(t.Context(), r); err != nil || created || s.Label != "fix" {
		t.Errorf("Open(o/r@fix) = %s, created %t, %v, want the session with label fix", s.DisplayName(), created, err)
	}
}

// nameOf returns the name of s in all, or "".
func nameOf(all map[string]Session, s Session) string {
	for name, o := range all {
		if o.ID == s.ID {
			return name
		}
	}
	return ""
}

func TestFindByLabel(t *testing.T) {
	m := newManager(t)
	fix := request("o/r")
	fix.Label = "fix"
	open := map[string]Session{"fix": openLabel(t, m, fix)}
	dir := Request{Repo: repo.Ref{Key: "local:/x/a@b", Slug: "a@b"}}
	open["dir"] = openLabel(t, m, dir)

	check := func(find, what, want string) {
		t.Helper()
		f := m.Find
		if find == "FindExact" {
			f = m.FindExact
		}
		s, err := f(t.Context(), what)
		if got := cmp.Or(nameOf(open, s), fail.CodeOf(err).String()); got != want {
			t.Errorf("%s(%q) = %s, %v, want %s", find, what, got, err, want)
		}
	}
	none, several := fail.NotFound.String(), fail.Usage.String()
	for _, what := range []string{"o/r@fix", "github.com/o/r@fix", "O/R@fix", "r@fix", open["fix"].Name, open["fix"].ID} {
		check("Find", what, "fix")
		check("FindExact", what, "fix")
	}
	for _, what := range []string{"o/r", "r", "github.com/o/r", "https://github.com/o/r"} {
		check("Find", what, "fix") // the only one
		check("FindExact", what, none)
	}
	for _, what := range []string{"o/r@Fix", "o/r@main", "r@main", "o/r@", "@fix", "r@"} {
		check("Find", what, none)
	}
	check("FindExact", "a@b", "dir")
	check("Find", "a", none)

	main := request("o/r")
	main.Label = "main"
	open["main"] = openLabel(t, m, main)
	check("Find", "o/r", several)
	check("Find", "r", several)
	check("FindExact", "o/r", several)
	open["first"] = openLabel(t, m, request("o/r"))
	for _, what := range []string{"o/r", "r", "github.com/o/r"} {
		check("Find", what, "first")
		check("FindExact", what, "first")
	}
	check("Find", "o/r@main", "main")
	// ByLabel takes the label into account, also if there is a session without one.
	for label, want := range map[string]string{"": "first", "main": "main", "fix": "fix", "none": none} {
		s, err := m.ByLabel(t.Context(), "github.com/o/r", label)
		if got := cmp.Or(nameOf(open, s), fail.CodeOf(err).String()); got != want {
			t.Errorf("ByLabel(o/r, %q) = %s, %v, want %s", label, got, err, want)
		}
	}
	// A short name that all sessions of a repository have with labels is ambiguous with an id.
	cafe := request("x/cafe")
	cafe.Label = "2"
	open["cafe"] = openLabel(t, m, cafe)
	put(t, m, "cafe11112222", "o/other", Ready, Ready, Status{})
	check("Find", "cafe", several)
	check("FindExact", "cafe", several)
	other := Request{Repo: repo.Ref{Key: "git.example.org/t/p", Slug: "t/p"}, Label: "fix"}
	open["other"] = openLabel(t, m, other)
	check("FindExact", "git.example.org/t/p@fix", "other")
	check("Find", "t/p@fix", none)

	// A session that is gone is known by its exact name only: "destroy o/r" must not
	// report that it is gone because o/r@fix is.
	if _, err := m.Store.Advance(t.Context(), open["fix"].ID, string(Creating), string(Gone), phaseEvent(Creating, Gone, Gone), nil); err != nil {
		t.Fatal(err)
	}
	for what, want := range map[string]bool{"o/r@fix": true, "o/r": false, "o/r@main": false, open["fix"].Name: true} {
		if got, err := m.Ended(t.Context(), what); err != nil || got != want {
			t.Errorf("Ended(%q) = %t, %v, want %t, nil", what, got, err, want)
		}
	}
}
