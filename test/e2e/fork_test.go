//go:build e2e

package e2e

import (
	"encoding/json"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// checkForks forks a session in which Claude Code runs as process pid, from its checkpoint "talk"
// and from its present state. The conversations go on in different directions.
func checkForks(t *testing.T, k talk, name, pid string) {
	t.Helper()
	forked := func(args ...string) (names []string) {
		t.Helper()
		var forks []session.View
		if err := json.Unmarshal([]byte(k.Asz(append([]string{"fork", "--json"}, args...)...)), &forks); err != nil {
			t.Fatal(err)
		}
		for _, f := range forks {
			names = append(names, f.Name)
			if !f.Resumed || f.From != "fork" || f.ForkOf == "" {
				t.Errorf("fork %s: resumed %t, from %q, fork of %q, want its programs to continue", f.Name, f.Resumed, f.From, f.ForkOf)
			}
		}
		return names
	}
	number := "2"
	if testing.Short() { // each is one more VM with Claude Code on the host's processors
		number = "1"
	}
	ways := forked(name+"@talk", "-n", number, "--label", "way")
	ahead := forked(name)[0]
	all := append(append([]string{name}, ways...), ahead)

	seen := map[string]string{}
	for _, one := range all {
		id := whoWithin(t, k.box, one, 20) // two forks start at once
		id["token"] = k.MustIn(one, "sudo cat /run/agent/token | sha256sum")
		id["journal"] = k.MustIn(one, "ls /run/log/journal")
		for what, value := range id {
			if was := seen[what+value]; was != "" {
				t.Errorf("%s and %s both have the %s %q", was, one, what, value)
			}
			seen[what+value] = one
		}
		if keys := k.MustIn(one, "ls /etc/ssh/ssh_host_*"); keys != "/etc/ssh/ssh_host_ed25519_key\n/etc/ssh/ssh_host_ed25519_key.pub" {
			t.Errorf("%s: host keys = %q, want the new one alone", one, keys)
		}
		if got := k.MustIn(one, "cat notes"); got != "mine" {
			t.Errorf("%s: notes = %q, want mine", one, got)
		}
		if now := k.claude(one); now != pid {
			t.Errorf("%s: Claude Code = process %s, want %s", one, now, pid)
		}
	}
	for i, one := range all[1:] {
		said := k.say(t, one, "go FORK"+strconv.Itoa(i))
		for word, want := range map[string]bool{"ALPHA": true, "DELTA": one == ahead, "FORK0": i == 0, "FORK1": i == 1, "FORK2": i == 2} {
			if strings.Contains(said, word) != want {
				t.Errorf("%s: conversation = %s, want %s in it: %t", one, said, word, want)
			}
		}
	}
	if pid := k.claude(name); pid == "" {
		t.Error("Claude Code no longer runs in the session that was forked")
	}

	if testing.Short() {
		k.Asz(append([]string{"destroy", "--force"}, all[1:]...)...)
		return
	}
	// A fork has its own files: it outlives the checkpoint and another fork, and boots.
	k.Asz("destroy", "--force", ways[0])
	k.MustIn(all[2], "git commit -q --allow-empty -m right && sync")
	k.Asz("fetch", all[2])
	k.Asz("stop", all[2])
	k.Asz("start", all[2])
	if got := k.MustIn(all[2], "git log -1 --format=%s; cat notes"); got != "right\nmine" {
		t.Errorf("%s: after a new start: %q, want the commit and the notes", all[2], got)
	}
	left, err := filepath.Glob(filepath.Join(k.Home, ".agent-vms", all[2], "agent-sessionizer-state-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("memory on the disk of a fork = %v, %v, want none", left, err)
	}
	k.Asz(append([]string{"destroy", "--force"}, all[2:]...)...)
}
