//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// deeper submits a subtask that does the same, until a limit stops it, and merges what comes back.
const deeper = `set -u
level=$1
git config user.name a; git config user.email a@example.invalid
if id=$(agent-guest task submit --name "level$((level + 1))" -- bash deeper.sh $((level + 1)) 2>refused.txt); then
	agent-guest task wait "$id" && agent-guest task fetch "$id" && git merge -q "agent-$id"
else
	cat refused.txt
fi
rm -f refused.txt
echo "level $level on $(hostname), branch $(git branch --show-current)" >"level$level.txt"
git add -A && git commit -qm "level $level"
`

// TestSubtasks runs a subtask in a real VM. If it is not short, the subtasks are three deep, and a task
// is cancelled with its subtask.
func TestSubtasks(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	clone := b.Repo("project")
	b.Write("project/deeper.sh", deeper)
	if out := b.RunIn(clone, "sh", "-c", "git add . && git commit -qm deeper"); out.Code != 0 {
		t.Fatal(out.All())
	}
	levels := 3
	if testing.Short() {
		levels = 1
	}
	b.Write(".config/agent-sessionizer/config.yaml", fmt.Sprintf("subtasks: {count: 4, depth: %d}\n", levels)+"tasks: {slots: 1}\nlimits: {running: 6}\n")

	id := b.submit("{kind: command, command: [bash, deeper.sh, '0']}", "")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(b.Run("agent-sessionizer", "task", "list").All(), b.Run("agent-sessionizer", "task", "logs", id).All(), b.Run("agent-sessionizer", "list").All(), b.Logs())
		}
	})
	named := func(name string) (v taskView) {
		out := b.Run("agent-sessionizer", "task", "show", "--json", name)
		_ = json.Unmarshal([]byte(out.Stdout), &v) // there may be none yet
		return v
	}
	for i := range levels {
		level := fmt.Sprintf("level%d", i+1)
		testenv.WaitFor(t, "the agent of "+level, func() bool {
			s := named(level).State
			return s != "" && s != "PENDING" && s != "STAGING" && s != "PROVISIONING"
		})
	}
	b.until(id, "COMPLETED")
	var all []struct {
		ID, Name, Root, State string
		Depth                 int
	}
	if err := json.Unmarshal([]byte(b.Asz("task", "list", "--json")), &all); err != nil {
		t.Fatal(err)
	}
	if len(all) != levels+1 {
		t.Fatalf("tasks = %+v, want %d", all, levels+1)
	}
	for _, v := range all {
		if v.State != "COMPLETED" || v.Depth > 0 && v.Root != id {
			t.Errorf("task = %+v, want it completed below %s", v, id)
		}
		if limit := fmt.Sprintf("limit of %d level", levels); v.Depth == levels && !strings.Contains(b.Asz("task", "logs", v.ID), limit) {
			t.Errorf("log of the last level = %s, want the %s", b.Asz("task", "logs", v.ID), limit)
		}
	}
	// The commits of all levels were merged in the VMs, and came to the host with the task.
	patch := b.Asz("task", "artifacts", id, "--get", id+".patch")
	for i := range levels + 1 {
		if level := fmt.Sprintf("level %d on ", i); !strings.Contains(patch, level) {
			t.Errorf("patch lacks %q:\n%s", level, patch)
		}
	}

	t.Run("cancelled with its task", func(t *testing.T) {
		long(t)
		id := b.submit(shell("agent-guest task submit --name leaf -- sleep 3600; sleep 3600"), "cancel_grace: 1s")
		testenv.WaitFor(t, "a running subtask", func() bool { return named("leaf").State == "RUNNING" })
		b.Asz("task", "cancel", "--wait", id)
		testenv.WaitFor(t, "the end of the subtask", func() bool { return named("leaf").State == "CANCELLED" })
	})
	b.nothingLeft()
}
