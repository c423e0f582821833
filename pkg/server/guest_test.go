package server

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// guest is a session's guest with the real guest agent, in whose tmux runs a program that looks
// like a coding agent.
type guest struct {
	*rig
	id, root string
}

// agent creates the guest of a session. Its agent is done, and appends what it reads to the file
// prompts.
func (r *rig) agent(id string) guest {
	t := r.t
	t.Helper()
	tmux := r.tmux(id)
	g := guest{r, id, r.root(id)}
	s, err := r.engine.Session(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := session.Connections{Paths: r.tasks.Sessions.Config.Paths}.Dial(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	p, err := session.Net{Sessions: r.tasks.Sessions}.Policy(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Guest(conn).Install(t.Context(), vm.HostArch(), "", p); err != nil {
		t.Fatal(err)
	}
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	shell, err := os.ReadFile(sh)
	if err != nil {
		t.Fatal(err)
	}
	claude := filepath.Join(g.root, "usr", "local", "bin", "claude")
	if err := os.WriteFile(claude, shell, 0o700); err != nil {
		t.Fatal(err)
	}
	const agent = `export AGENT_GUEST_ROOT="$1"
echo '{"hook_event_name":"Stop"}' | "$1/usr/local/bin/agent-guest" hook claude
: >"$1/prompts"
while read -r line; do printf '%s\n' "$line" >>"$1/prompts"; done`
	tmux("new-window", "-d", "-n", "agent", ssh.Quote(claude, "-c", agent, "claude", g.root))
	g.awaitPrompt("")
	return g
}

// awaitPrompt waits until the agent has read that text.
func (g guest) awaitPrompt(want string) {
	g.t.Helper()
	testenv.WaitFor(g.t, "the agent has read "+want, func() bool {
		text, err := os.ReadFile(filepath.Join(g.root, "prompts"))
		return err == nil && string(text) == want
	})
}

// observe saves an observation, as the session's keeper does.
func (g guest) observe(o guestproto.Observation) {
	g.t.Helper()
	text, err := json.Marshal(o)
	if err != nil {
		g.t.Fatal(err)
	}
	if err := os.WriteFile(g.tasks.Sessions.Config.Paths.Observation(g.id), text, 0o600); err != nil {
		g.t.Fatal(err)
	}
}

// clone makes the checkout and its mirror on the host, and a commit in the checkout, with the file
// new.txt. It returns the commit before.
func (g guest) clone() (base string) {
	t := g.t
	t.Helper()
	s, err := g.engine.Session(t.Context(), g.id)
	if err != nil {
		t.Fatal(err)
	}
	mirror := filepath.Join(testenv.ShortDir(t), "app.git")
	git := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "git", append([]string{"-C", s.Status.Dir, "-c", "user.name=Test", "-c", "user.email=test@example.invalid"}, args...)...)
		cmd.Env = append(os.Environ(), "GIT_AUTHOR_DATE=2026-01-02T03:04:05Z", "GIT_COMMITTER_DATE=2026-01-02T03:04:05Z")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %v = %s, %v, want success", args, out, err)
		}
		return strings.TrimSpace(string(out))
	}
	git("init", "-q", "-b", "main")
	git("commit", "-q", "--allow-empty", "-m", "first")
	git("clone", "-q", "--bare", ".", mirror)
	base = git("rev-parse", "HEAD")
	if err := os.WriteFile(filepath.Join(s.Status.Dir, "new.txt"), []byte("by the agent\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	git("add", "-A")
	git("commit", "-q", "-m", "second")
	s.Status.Base, s.Status.Target = &repo.Base{Commit: base, Branch: "main"}, repo.Target{Mirror: mirror}
	status, err := json.Marshal(s.Status)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.store.Update(t.Context(), g.id, func(row *store.Session) (store.Event, error) {
		row.Status = status
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	return base
}
