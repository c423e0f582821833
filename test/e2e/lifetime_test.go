//go:build e2e

package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestLifetime opens two sessions of one repository, lets one become idle while programs in it
// go on committing, and checks that all of their commits are on this host before it goes.
func TestLifetime(t *testing.T) {
	long(t)
	b := newBox(t)
	clone := b.Repo("project")
	b.Write(".config/agent-sessionizer/config.yaml", "limits: {running: 4}\nprofiles: {brief: {lifetime: {idle_ttl: 20s, cleanup_ttl: 1s}}}\n")
	first := b.open("./project")
	second := b.open("--profile", "brief", "./project", "--new", "fix")
	if !strings.Contains(second, "-project-fix-") {
		t.Errorf("name of the second session = %s, want one with the label fix", second)
	}
	differ(t, map[string]map[string]string{first: who(t, b, first), second: who(t, b, second)})
	b.MustIn("project", "touch of-first")
	if r := b.In("project@fix", "test -e of-first"); r.Code == 0 {
		t.Error("file of the first session in the second = exists, want a checkout of its own")
	}

	// Programs of the user and in tmux, which ignore the request to end, and a service that
	// starts another program of the user once they have ended.
	b.MustIn("project@fix", `git config user.name a; git config user.email a@localhost
		cat >/tmp/loop <<'EOF'
trap '' TERM HUP
cd ~/project
while :; do git commit -q --allow-empty -m "$1"; sleep 0.3; done
EOF
		setsid sh /tmp/loop user >/dev/null 2>&1 &
		tmux new-window -d -t agent 'sh /tmp/loop tmux'
		cat >/tmp/late <<'EOF'
while pgrep -f /tmp/loop; do sleep 0.2; done
sleep 1
exec setpriv --reuid "$1" --regid "$1" --clear-groups sh -c 'git -C "$1" commit --allow-empty -m late; sleep 60' sh "$2"
EOF
		sudo systemd-run -q sh /tmp/late "$(id -u)" ~/project`)
	view := func() (v session.View) {
		var all []session.View
		if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &all); err != nil {
			t.Fatal(err)
		}
		for _, v := range all {
			if v.Name == second {
				return v
			}
		}
		return session.View{State: session.Gone}
	}
	tip := func() string {
		r := b.Run("git", "-C", clone, "rev-parse", "refs/agents/"+second+"/heads/main")
		if r.Code != 0 {
			t.Fatalf("the fetched branch: %s", r.All())
		}
		return strings.TrimSpace(r.Stdout)
	}
	testenv.WaitFor(t, "a warning", func() bool { return len(view().Ending) > 0 || view().Ended != "" })
	testenv.WaitFor(t, "the end of the idle session", func() bool { return view().State == session.Stopped })
	if v := view(); v.Ended != session.LimitIdle {
		t.Errorf("limit that ended the session = %q, want idle", v.Ended)
	}
	fetched := tip()
	b.Asz("start", second)
	if head := b.MustIn("project@fix", "git rev-parse HEAD"); head != fetched {
		t.Errorf("last commit in the guest = %s, on this host %s, want no commit after the fetch", head, fetched)
	}
	b.Asz("stop", second)
	testenv.WaitFor(t, "the end of the stopped session", func() bool {
		b.Run("agent-sessionizer", "sweep")
		return view().State == session.Gone
	})
	if kept := tip(); kept != fetched {
		t.Errorf("commit on this host at the end = %s, want %s", kept, fetched)
	}
	b.Asz("destroy", "--force", first)
	if left := b.Leftovers(); len(left) > 0 {
		t.Errorf("processes at the end = %v, want none", left)
	}
}
