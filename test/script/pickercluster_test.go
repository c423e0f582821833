package script

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
)

// serves starts serve, and waits until it answers.
func (w *world) serves(args ...string) {
	w.t.Helper()
	cmd := exec.CommandContext(w.t.Context(), binary, append([]string{"serve"}, args...)...)
	cmd.Dir, cmd.Env = w.home, append(os.Environ(), w.env...)
	log, err := os.Create(w.path("serve.log"))
	if err != nil {
		w.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if w.t.Failed() {
			text, _ := os.ReadFile(w.path("serve.log"))
			w.t.Logf("serve in %s:\n%s", w.home, text)
		}
	})
	w.until("serve answers", func() bool {
		out, err := w.try("agent-sessionizer", "cluster", "list")
		return err == nil && strings.Contains(out, " up ")
	})
}

// TestPickerOfACluster checks that the picker shows the sessions of another host, and that its keys work on
// them.
func TestPickerOfACluster(t *testing.T) {
	first, second := newWorld(t), newWorld(t)
	second.clone("there")
	first.serves("--cluster", "--name", "first", "--cluster-address", testcluster.FreeCoreAddr(t))
	first.write("token", first.run("agent-sessionizer", "cluster", "token"))
	second.serves("--join", first.path("token"), "--name", "second")
	first.put("000000000001", "o/here", session.Stopped, session.Status{})
	second.put("000000000002", "o/here", session.Stopped, session.Status{})
	second.run("agent-sessionizer", "open", "-d", "./there")

	s := first.term("agent-sessionizer")
	s.sees(`^ +o there +second +ready`)
	s.sees(`^> +\. o/here +stopped`) // the cursor stays on its row
	s.sees(`^ +\. o/here +second +stopped`)
	s.types("there", `^> +o there +second +ready`)
	s.sees(`second:agent-there-[0-9a-f]+`) // the preview
	s.presses(`copied: agent-sessionizer ssh second:agent-there-`, "C-y")
	s.presses(`^> +\. there +second +stopped`, "C-s")
	if got := second.states()["there"]; got != session.Stopped {
		t.Errorf("state on the second host = %s, want %s", got, session.Stopped)
	}
	s.presses(`Destroy second:agent-there-.*\[y/N\]`, "C-x")
	s.typed("y")
	s.keys("Enter")
	second.until("destroyed", func() bool { return second.states()["there"] == "" })
	s.sees(`^> there`)
	s.presses(`o/here +second +stopped`, "C-u")
	s.presses(`left with 130`, "Escape")

	// Enter attaches to a session there. The terminal says what a fake VM lacks.
	second.run("agent-sessionizer", "open", "-d", "./there")
	s = first.term("agent-sessionizer")
	s.sees(`^ +o there +second +ready`)
	s.types("there", `^> +o there +second +ready`)
	s.leaves("Enter")
	s.sees(`Enter to close`)
	s.presses(`left with 0`, "Enter")
}
