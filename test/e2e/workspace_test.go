//go:build e2e

package e2e

import (
	"strings"
	"testing"
)

// TestWorkspace puts a checkout into a workspace, whose VM then dies, and continues in another VM, which
// runs nothing that the first one left.
func TestWorkspace(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	dir := b.Repo("project")
	b.Write("project/.claude/settings.json", "{}\n")
	b.RunIn(dir, "sh", "-c", "git add . && git commit -qm settings")
	b.Asz("workspace", "create", "scratch", "--size", "1GiB")
	one := b.open("./project", "--workspace", "scratch")
	if got := b.MustIn(one, "pwd; findmnt --noheadings --output OPTIONS /work; df --output=size --block-size=1M /work | tail -1"); !strings.HasPrefix(got, "/work/project\n") ||
		!strings.Contains(got, "nosuid") || !strings.Contains(got, "nodev") {
		t.Errorf("workspace in the first session = %q, want the checkout in /work, without set-user-ID programs and devices", got)
	}
	first := who(t, b, one)
	b.MustIn(one, `echo work >notes
		printf '#!/bin/sh\ntouch /tmp/ran\n' >.git/hooks/post-commit && chmod 755 .git/hooks/post-commit
		git config core.fsmonitor 'touch /tmp/ran #' && git config core.hooksPath .git/hooks
		echo touch /tmp/ran >.envrc
		echo '{"hooks": {"SessionStart": [{"hooks": [{"type": "command", "command": "touch /tmp/ran"}]}]}}' >.claude/settings.json
		sudo cp /bin/dash ./root && sudo chmod 4755 ./root
		git init -q nested && mkdir -p nested/.git/hooks && cp .git/hooks/post-commit nested/.git/hooks/ && git -C nested config core.fsmonitor 'touch /tmp/ran #'
		git commit -q --allow-empty -m mine; sync`)
	b.kill(qemu) // the file system was mounted
	b.Asz("workspace", "resize", "scratch", "2GiB")
	two := strings.TrimSpace(b.Asz("workspace", "rebind", "scratch"))
	got := b.MustIn(two, `cat notes .claude/settings.json; git log -1 --format=%s; df --output=size --block-size=1M /work | tail -1 | tr -d " "
		git -C nested status --short; git commit -q --allow-empty -m again; ./root -p -c 'id -u'; ls /tmp/ran .envrc 2>&1 || :
		find /work/.set-aside-* -name post-commit | wc -l`)
	for _, want := range []string{"work\n{}\nmine\n19", "1000\n", "cannot access '/tmp/ran'", "cannot access '.envrc'", "\n2"} {
		if !strings.Contains(got, want) {
			t.Errorf("workspace in the second session = %q, want %q in it", got, want)
		}
	}
	for what, value := range who(t, b, two) {
		if first[what] == value {
			t.Errorf("%s of both sessions = %q, want two", what, value)
		}
	}
	b.Asz("destroy", "--force", two)
	b.Asz("workspace", "delete", "scratch")
	if left := b.Asz("workspace", "list"); strings.TrimSpace(left) != "" {
		t.Errorf("workspaces = %s, want none", left)
	}
}
