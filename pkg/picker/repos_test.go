package picker

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// TestRepositories checks that each repository without a session is shown once: those
// that are listed, those that recently had a session, and those on the disk.
func TestRepositories(t *testing.T) {
	p := newPicker(t)
	home := os.Getenv("HOME")
	for _, r := range []row{
		{id: "000000000001", slug: "o/live", url: "https://github.com/o/live.git", phase: session.Stopped},
		{id: "000000000002", slug: "o/first", url: "https://github.com/o/first.git", phase: session.Gone},
		{id: "000000000003", key: "git.example.org/t/other", slug: "t/other", url: "https://git.example.org/t/other", phase: session.Gone},
		{id: "000000000004", key: "local:/srv/app", slug: "app", path: "/srv/app", phase: session.Gone},
		{id: "000000000005", slug: "o/listed", url: "https://github.com/o/listed.git", phase: session.Gone},
		{id: "000000000006", slug: "o/first", url: "https://github.com/o/first.git", phase: session.Gone},
		{id: "000000000007", slug: "o/labels", label: "dev", url: "https://github.com/o/labels.git", phase: session.Stopped},
	} {
		p.put(t, r)
	}
	p.Listed = []string{"o/new", "O/Listed@dev", "o/live", "o/labels", "o/labels@dev", "o/labels@next", "https://github.com/o/new.git", "~/src/clone", "/srv/none", "what is this"}
	p.clones = cloneCacheReader{roots: []string{"/x"}, last: []Clone{
		{Path: filepath.Join(home, "src/clone"), Key: "github.com/o/clone", Slug: "o/clone"},
		{Path: "/src/live", Key: "github.com/o/live", Slug: "o/live"},
		{Path: "/src/first", Key: "github.com/o/first", Slug: "o/first"},
		{Path: "/src/fork", Key: "local:/src/fork", Slug: "fork"},
	}}
	_, repos, err := p.read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range repos {
		got = append(got, r.name+" = "+r.open)
	}
	want := []string{
		"o/new = o/new", "O/Listed@dev = O/Listed@dev", "o/labels@next = o/labels@next", "~/src/clone = " + home + "/src/clone", "/srv/none = /srv/none", "what is this = what is this",
		"o/first = https://github.com/o/first.git", "app = /srv/app", "git.example.org/t/other = https://git.example.org/t/other",
		"fork = /src/fork",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("repositories mismatch (-want +got):\n%s", diff)
	}
	for _, r := range repos {
		switch r.name {
		case "O/Listed@dev":
			if !r.listed || r.used.IsZero() {
				t.Errorf("listed repository = %+v, want its last use", r)
			}
		case "o/first":
			if r.path != "/src/first" || r.listed {
				t.Errorf("used repository = %+v, want path /src/first, not listed", r)
			}
		}
	}

	// A repository whose session ends is shown at once.
	if len(repos) > 0 {
		if _, err := p.Manager.Store.Update(t.Context(), "000000000001", gone); err != nil {
			t.Fatal(err)
		}
		if _, repos, err = p.read(t.Context()); err != nil || !slices.ContainsFunc(repos, func(r repository) bool { return r.open == "o/live" && !r.used.IsZero() }) {
			t.Errorf("repositories = %+v, %v, want o/live of the ended session", repos, err)
		}
	}
}

func TestKeys(t *testing.T) {
	for _, want := range []Target{{Session: "0123456789ab"}, {Session: "0123456789ab", Host: "box-2"}, {Repo: "o/r"}, {Repo: "/tmp/x'$(y)`\n\tü"}} {
		key := sessionKey(want.Host, want.Session)
		if want.Repo != "" {
			key = repositoryKey(want.Repo)
		}
		if got, ok := ParseKey(key); !ok || got != want || !keyRE.MatchString(key) {
			t.Errorf("ParseKey(%q) = %+v, %t, want %+v", key, got, ok, want)
		}
	}
	for _, bad := range []string{"", "-", "s:", "r:", "r:*", "x:y", "s"} {
		if got, ok := ParseKey(bad); ok {
			t.Errorf("ParseKey(%q) = %+v, true, want false", bad, got)
		}
	}
}

func TestTyped(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	clone := filepath.Join(home, "clone")
	git(t, home, "init", "-q", clone)
	for text, want := range map[string]string{
		"o/r": "o/r", " o/r@dev ": "o/r@dev", "https://git.example.org/t/p.git": "https://git.example.org/t/p.git",
		"git@github.com:o/r": "git@github.com:o/r", "~/clone": clone, clone: clone,
		"": "", "word": "", "two words": "", "-x/y": "", "~/nothing": "", "o/r; rm": "", "$(id)/x": "",
	} {
		open, ok := Typed(text)
		if ok != (want != "") || ok && open != want {
			t.Errorf("Typed(%q) = %q, %t, want %q", text, open, ok, want)
		}
	}
}

func TestPicked(t *testing.T) {
	a, b := sessionKey("", "0123456789ab"), repositoryKey("o/r")
	for _, c := range []struct {
		code int
		out  []string
		want []Target
	}{
		{0, []string{"", a}, []Target{{Session: "0123456789ab"}}},
		{0, []string{"x", b, a}, []Target{{Repo: "o/r"}, {Session: "0123456789ab"}}},
		{1, []string{"o/new@dev", "typed"}, []Target{{Repo: "o/new@dev"}}},
		{0, []string{"o/new", "typed", a}, []Target{{Repo: "o/new"}}}, // typed explicitly, in spite of the matching row
		{0, []string{"", "-"}, nil},
		{0, []string{"", "new", b}, []Target{{Repo: "o/r"}}},
		{0, []string{"", "open", b}, []Target{{Repo: "o/r"}}},
		{130, nil, nil},
		{1, []string{""}, nil},
	} {
		got, err := picked(c.code, c.out)
		if err != nil || !slices.Equal(got.Open, c.want) || got.New != slices.Contains(c.out, "new") || len(c.want) == 0 && got.Exit == 0 {
			t.Errorf("picked(%d, %q) = %+v, %v, want %q", c.code, c.out, got, err, c.want)
		}
	}
	// The row of the first action had disappeared.
	if got, err := picked(0, []string{"", "new", "open", b}); err != nil || got.New {
		t.Errorf("picked after two actions = %+v, %v, want that of the last", got, err)
	}
	if _, err := picked(0, []string{"no such thing", "typed"}); err == nil {
		t.Error("picked of an unknown row = nil, want an error")
	}
}

// TestSayIsOneAction checks that fzf reads the result of Say as a single action.
func TestSayIsOneAction(t *testing.T) {
	for _, text := range []string{"a]+abort", "x\n+execute(touch y)", "](abort)+", ""} {
		got := Say(text)
		if strings.Count(got, "]") != 1 || !strings.HasSuffix(got, "]") || strings.Contains(got, "\n") {
			t.Errorf("Say(%q) = %q, want one action on one line", text, got)
		}
	}
}

func git(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("git %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

func gone(row *store.Session) (store.Event, error) {
	row.Phase, row.Desired = string(session.Gone), string(session.Gone)
	return store.Event{Kind: "phase", Data: []byte("{}")}, nil
}
