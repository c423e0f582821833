package script

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestSessionRecordings records the tmux windows of a session's guest: while the settings ask for it, over
// a restart of the keeper, without its secrets, and for longer than the session exists.
func TestSessionRecordings(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Fatal("tmux is needed: apt install tmux")
	}
	const value = "the-seed-of-the-session"
	h := newHome(t)
	settings := filepath.Join(h.dir, ".config/agent-sessionizer/config.yaml")
	write := func(record string) {
		t.Helper()
		text := "record: " + record + "\nsecrets: {SEED: {from: \"file:" + h.dir + "/seed\", guest: true}}\n"
		if err := errors.Join(os.MkdirAll(filepath.Dir(settings), 0o700), os.WriteFile(settings, []byte(text), 0o600), os.WriteFile(filepath.Join(h.dir, "seed"), []byte(value+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("on")
	t.Cleanup(func() { _, _ = h.run("destroy", "--force", "repo") }) // a tmux in the guest would survive a test that fails
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := exec.Command("sh", "-c", "cat "+h.dir+"/.local/state/agent-sessionizer/sessions/*/keeper.log "+h.dir+"/.local/state/agent-sessionizer/recordings/*/*").CombinedOutput() //nolint:gosec // our own directory
			t.Logf("keeper's log and recordings: %s", out)
		}
	})
	h.must(t, "open", "-d", "./repo")
	inGuest := func(script string) { t.Helper(); h.must(t, "exec", "repo", "--", "sh", "-ec", script) }
	type found struct {
		Matches []struct{ Recording, Title, Line, Name string }
	}
	search := func(text string) (f found) {
		t.Helper()
		if err := json.Unmarshal([]byte(h.must(t, "recordings", "search", "--json", text)), &f); err != nil {
			t.Fatal(err)
		}
		return f
	}
	sees := func(text string) (f found) {
		t.Helper()
		h.until(t, text+" is recorded", func() bool { f = search(text); return len(f.Matches) > 0 })
		return f
	}
	inGuest(`tmux -f /dev/null new-session -d -s agent -n first -x 80 -y 24 "PS1='$ ' sh"`)
	sees("$")
	inGuest(`tmux send-keys -t agent:first "echo first-\$((40+2)); cat ` + h.dir + `/seed" Enter`)
	first := sees("first-42")
	if m := first.Matches[0]; m.Title != "first" || !strings.HasPrefix(m.Name, "agent-") {
		t.Errorf("match = %+v, want one of the window first", m)
	}
	sees("[redacted]")
	// Its end cannot be the beginning of the session's token, which would be held back.
	inGuest(`tmux new-window -d -t agent -n second "echo in-the-second-window; cat"`)
	sees("in-the-second-window")

	// A killed keeper: the next one continues.
	for _, pid := range processes(h.dir, "keeper") {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatalf("kill keeper %d: %v", pid, err)
		}
	}
	h.until(t, "the keeper is gone", func() bool { return len(processes(h.dir, "keeper")) == 0 })
	h.must(t, "list")
	inGuest(`tmux send-keys -t agent:first "echo again-\$((50+1))" Enter`)
	if again := sees("again-51"); again.Matches[0].Recording != first.Matches[0].Recording {
		t.Errorf("after the keeper's end the window is recorded in %s, want %s", again.Matches[0].Recording, first.Matches[0].Recording)
	}

	// Turned off.
	write("off")
	h.until(t, "the recording ends", func() bool {
		_, err := h.run("exec", "repo", "--", "sh", "-c", "tmux list-clients -F '#{client_control_mode}' | grep -q 1")
		return err != nil
	})
	h.must(t, "destroy", "--force", "repo")
	if text := h.must(t, "recordings", "export", "--format", "text", first.Matches[0].Recording); !strings.Contains(text, "first-42") {
		t.Errorf("text of the recording = %q, want it after the session's end", text)
	}
	err := filepath.WalkDir(filepath.Join(h.dir, ".local/state/agent-sessionizer"), func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		content, err := os.ReadFile(path)
		if strings.Contains(string(content), value) {
			t.Errorf("%s contains the secret", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
