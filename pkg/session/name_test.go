package session

import (
	"regexp"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestName(t *testing.T) {
	for _, c := range []struct {
		slug, label string
		budget      int
		want        string
	}{
		{"owner/repo", "", 58, "agent-owner-repo-0123ab"},
		{"Owner/My_Repo.js", "", 58, "agent-owner-my-repo-js-0123ab"},
		{"../../etc", "", 58, "agent-etc-0123ab"},
		{"-/-", "", 58, "agent-repo-0123ab"},
		{"", "", 58, "agent-repo-0123ab"},
		{"日本/語", "", 58, "agent-repo-0123ab"},
		{"a;rm -rf $HOME", "", 58, "agent-a-rm-rf-home-0123ab"},
		{"a\nb\x00c", "", 58, "agent-a-b-c-0123ab"},
		{strings.Repeat("x", 100), "", 58, "agent-" + strings.Repeat("x", 45) + "-0123ab"},
		{"owner/repo", "", 20, "agent-owner-r-0123ab"},
		{"owner/repo", "", 19, "agent-owner-0123ab"}, // no dash before the dash
		{"owner/repo", "", 0, "agent-o-0123ab"},
		{"owner/repo", "Fix/Login_1", 58, "agent-owner-repo-fix-login-1-0123ab"},
		{"owner/repo", "-", 58, "agent-owner-repo-0123ab"},
		{strings.Repeat("x", 100), "fix", 58, "agent-" + strings.Repeat("x", 41) + "-fix-0123ab"},
		{"owner/repo", strings.Repeat("y", 100), 58, "agent-owner-repo-" + strings.Repeat("y", 21) + "-0123ab"},
		{"owner/repo", "fix", 0, "agent-o-0123ab"},
	} {
		if got := Name(c.slug, c.label, "0123ab", c.budget); got != c.want {
			t.Errorf("Name(%q, %q) within %d bytes = %s, want %s", c.slug, c.label, c.budget, got, c.want)
		}
	}
}

var nameForm = regexp.MustCompile(`^agent-[a-z0-9]+(-[a-z0-9]+)*-[0-9a-f]{6}$`)

func FuzzName(f *testing.F) {
	f.Add("owner/repo", "", 58)
	f.Add("a-/-b", "x-/-y", 16)
	f.Add("İ\xff/ſ", "İ", 20)
	f.Fuzz(func(t *testing.T, slug, label string, budget int) {
		const least = len("agent-x-012345")
		budget = least + (budget&0xff)%(63-least)
		name := Name(slug, label, "012345", budget)
		if !nameForm.MatchString(name) || len(name) > budget {
			t.Fatalf("Name(%q, %q) = %q, want a valid name of at most %d bytes", slug, label, name, budget)
		}
		if Name(slug, label, "543210", budget) == name {
			t.Fatalf("Name(%q, %q) = %q for two suffixes, want two names", slug, label, name)
		}
	})
}

func TestNameBudget(t *testing.T) {
	if got, err := nameBudget("/home/me/.agent-vms"); err != nil || got != 104-28-19 {
		t.Errorf("nameBudget(/home/me/.agent-vms) = %d, %v, want %d", got, err, 104-28-19)
	}
	if got, err := nameBudget("/s"); err != nil || got != 58 { // the hostname's limit
		t.Errorf("nameBudget(/s) = %d, %v, want 58", got, err)
	}
	for n := 1; n < 200; n++ {
		home := "/" + strings.Repeat("h", n-1)
		budget, err := nameBudget(home)
		if err != nil {
			if n < 50 || fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "" {
				t.Fatalf("nameBudget of a home of %d bytes = %v (hint %q), want none below 50, code %v with a hint", n, err, fail.HintOf(err), fail.Host)
			}
			continue
		}
		name := Name(strings.Repeat("long/name", 20), "", "012345", budget)
		if socket := home + "/" + name + "/ssh.sock.1234567890123456"; len(socket) > 103 || len("lima-"+name) > 63 {
			t.Fatalf("socket for a home of %d bytes = %s (%d bytes), want at most 103, and a hostname of at most 63", n, socket, len(socket))
		}
	}
}

// A home path that is too long is reported before anything is created.
func TestOpenInTooLongHome(t *testing.T) {
	m := newManager(t)
	m.Config.Paths.LimaHome += strings.Repeat("/long", 20)
	_, _, _, err := m.Open(t.Context(), request("o/r"))
	if fail.CodeOf(err) != fail.Host || !strings.Contains(err.Error(), "lima_home") || !strings.Contains(fail.HintOf(err), "LIMA_HOME") {
		t.Fatalf("Open in a too long home = %v (hint %q), want code %v, lima_home, a hint with LIMA_HOME", err, fail.HintOf(err), fail.Host)
	}
	if all, err := m.List(t.Context()); err != nil || len(all) != 0 {
		t.Fatalf("List after a refused Open = %v, %v, want none", all, err)
	}
}
