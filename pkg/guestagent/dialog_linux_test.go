package guestagent_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// fakeCodexTerminal is a Codex in a terminal. Each line of the file "script" is a hook's event and
// the command, or "dialog" and the command. It writes the key that each dialog received to the file
// "keys".
const fakeCodexTerminal = `#!/bin/sh
cd "$(dirname "$0")"
stty -icanon -echo min 1
exec 3<script
while read -r what command <&3; do
	if [ "$what" != dialog ]; then
		printf '{"session_id":"s","hook_event_name":"%s","tool_name":"Bash","tool_input":{"command":"%s"}}' "$what" "$command" | "$GUEST" hook codex
		continue
	fi
	printf '\033[2J\033[HWould you like to run the following command?\n\n  $ %s\n\n› 1. Yes, proceed (y)\n  3. No (esc)\n' "$command"
	printf '%s:%s\n' "$(dd bs=1 count=1 2>/dev/null | od -An -c | tr -d ' ')" "$command" >>keys
done
printf '\033[2J'
cat >/dev/null
`

// TestDialogsAreNotConfused checks that an answer is typed into one dialog of Codex only, although
// the next one looks the same, or like it.
func TestDialogsAreNotConfused(t *testing.T) {
	const long = "cd /home/agent/a/rather/long/directory/name && make "
	for _, c := range []struct {
		name, script, want string
	}{
		{
			"one after the other", `PreToolUse touch x
PermissionRequest touch x
dialog touch x
PreToolUse touch x
PermissionRequest touch x
dialog touch x
`, "y:touch x\n033:touch x\n",
		},
		{"both at once", "PermissionRequest touch x\nPermissionRequest touch x\ndialog touch x\ndialog touch x\n", "y:touch x\n033:touch x\n"},
		{"contains the first", "PermissionRequest ls\nPermissionRequest rm -rf tools\ndialog ls\ndialog rm -rf tools\n", "y:ls\n033:rm -rf tools\n"},
		{
			"begins like the first", "PermissionRequest " + long + "one\nPermissionRequest " + long + "two\ndialog " + long + "two\ndialog " + long + "one\n",
			"033:" + long + "two\ny:" + long + "one\n",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newFakeGuest(t)
			s := newSession(g, "")
			dir := t.TempDir()
			for name, text := range map[string]string{"codex": fakeCodexTerminal, "script": c.script} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			w := g.watch(s.env)
			s.tmux("new-window", "-t", "agent", "-e", "GUEST="+g.program, "-e", "AGENT_GUEST_ROOT="+g.root, filepath.Join(dir, "codex"))
			var ids []string
			w.until("two questions", func(o guestproto.Observation) bool { // the first is allowed, the other one is denied
				for _, q := range o.Questions {
					if !slices.Contains(ids, q.ID) {
						ids = append(ids, q.ID)
						w.answer(q.ID, []string{"allow", "deny"}[len(ids)-1])
					}
				}
				return len(ids) == 2
			})
			testenv.WaitFor(t, "both dialogs' keys", func() bool {
				keys, _ := os.ReadFile(filepath.Join(dir, "keys"))
				return strings.Count(string(keys), "\n") == 2
			})
			keys, err := os.ReadFile(filepath.Join(dir, "keys"))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, string(keys)); diff != "" {
				t.Errorf("keys (-want +got):\n%s", diff)
			}
		})
	}
}
