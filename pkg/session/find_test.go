package session

import (
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
		got := fail.CodeOf(err).String()
		for name, o := range open {
			if err == nil && o.ID == s.ID {
				got = name
			}
		}
		if got != want {
			t.Errorf("%s(%q) = %s, %v, want %s", find, what, got, err, want)
		}
	}
	none, several := fail.NotFound.String(), fail.Usage.String()
	for _, what := range []string{"o/r@fix", "O/R@fix", "r@fix", open["fix"].Name, open["fix"].ID} {
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
