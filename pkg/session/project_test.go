package session

import (
	"context"
	"io"
	"os/exec"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// guestSays answers every command with the same words.
type guestSays string

func (g guestSays) Run(context.Context, string, ssh.IO) error { return nil }
func (g guestSays) Output(context.Context, string, io.Reader, int64) ([]byte, error) {
	return []byte(g), nil
}

func sh(t *testing.T, dir, script string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-euc", script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("sh -c %q = %v, want nil\n%s", script, err, out)
	}
	return strings.TrimSpace(string(out))
}

// A repository narrows the policy with the file of the commit that is checked out: a
// pinned one, or that of a checkout which an earlier keeper finished.
func TestProjectFileOfTheCheckout(t *testing.T) {
	t.Setenv("GIT_CONFIG_GLOBAL", "/dev/null")
	dir := t.TempDir()
	commits := strings.Fields(sh(t, dir, `git init -q -b main . && git config user.name u && git config user.email u@h
		printf 'network: {mode: isolated}\n' >`+config.ProjectFile+` && git add . && git commit -qm strict && git rev-parse HEAD
		git rm -q `+config.ProjectFile+` && git commit -qm loose && git rev-parse HEAD`))
	strict, loose := commits[0], commits[1]
	for name, c := range map[string]struct {
		guest  guestSays
		src    repo.Source
		before *config.Project
		narrow bool
	}{
		"pinned":                       {"absent\n", repo.Source{Dir: dir, Commit: strict}, nil, true},
		"the branch's tip":             {"absent\n", repo.Source{Dir: dir, Branch: "main"}, nil, false},
		"checked out before":           {guestSays("done " + strict + " main yes\n"), repo.Source{Dir: dir, Branch: "main", Commit: loose}, nil, true},
		"checked out without the file": {guestSays("done " + loose + " main yes\n"), repo.Source{Dir: dir, Branch: "main", Commit: strict}, &config.Project{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorker(t, driver{})
			s := put(t, w.Sessions, "aaaa11112222", "o/r", Creating, Ready, Status{Project: c.before})
			project, err := readProjectFile(t.Context(), s, c.src)
			if err != nil {
				t.Fatal(err)
			}
			if err := w.guestSetup().readProject(t.Context(), &s, c.guest, fetchedRepo{source: c.src, project: project}); err != nil {
				t.Fatal(err)
			}
			stored, err := w.Sessions.Get(t.Context(), s.ID)
			if err != nil || (s.Status.Project != nil) != c.narrow || (stored.Status.Project != nil) != c.narrow {
				t.Errorf("project file: returned %+v, stored %+v, %v, want one: %t", s.Status.Project, stored.Status.Project, err, c.narrow)
			}
		})
	}
}
