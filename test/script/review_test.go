package script

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A user chooses everything in the interface, lands it, and ends the review while it lands.
func TestReviewOnATerminal(t *testing.T) {
	t.Parallel()
	h := newHome(t)
	h.must(t, "open", "-d", "./repo")
	h.must(t, "exec", "repo", "--", "sh", "-c", "git config user.name agent && git config user.email a@example.invalid && echo x >"+guestWord+".txt && git add -A && git commit -qm work")
	seen := h.onTerminal(t, "AL\r\rq", "review", "repo")
	out, err := exec.CommandContext(t.Context(), "git", "-C", filepath.Join(h.dir, "repo"), "for-each-ref", "refs/heads/review", "--format=%(refname:lstrip=2) %(subject)").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "review/agent-repo-") || !strings.Contains(string(out), " Land the work of agent-repo-") {
		t.Fatalf("branches of the clone = %q, %v, want one with the landing; the terminal showed\n%q", out, err, seen)
	}
	if left := h.must(t, "review", "repo"); strings.Contains(left, guestWord) {
		t.Errorf("files under review = %q, want none left", left)
	}
}

// TestReviewInTmux reviews an agent's commits with keys, on a small terminal: it lands a hunk,
// sees what the agent changed meanwhile, and keeps marks and notes when it ends.
func TestReviewInTmux(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.env = append(w.env, "LC_ALL=C.UTF-8")
	w.run("sh", "-ec", `git init -q repo; cd repo; seq 40 >numbers; git add .; git commit -qm first`)
	w.run("agent-sessionizer", "open", "-d", "./repo")
	agent := func(line string) {
		t.Helper()
		w.run("agent-sessionizer", "exec", "repo", "--", "sh", "-ec", line+`; git add .; git -c user.name=Agent -c user.email=agent@example.com commit -qm work`)
	}
	agent(`sed -i 's/^5$/five/; s/^35$/thirty five/' numbers; echo new >other`)
	w.run("agent-sessionizer", "exec", "--record=tests", "repo", "--", "true")

	s := w.term("agent-sessionizer review repo")
	w.run("tmux", "-S", s.socket, "resize-window", "-t", "t", "-x", "80", "-y", "24")
	s.sees(`^repo → review/agent-repo-\w+ +2 files`)
	s.sees(`✓ tests`)
	s.sees(`○ M numbers +\+2 -2`)
	s.sees(`^○ A other`)
	s.sees(`│○ +5 \+five`)
	s.keys("Tab", "]", "Space") // the second hunk
	s.sees(`^◐ M numbers`)
	s.sees(`│○ +5 \+five`)
	s.sees(`│●▎35 \+thirty five`)
	s.keys("g", "Down", "n")
	s.sees(`note on numbers:2: `)
	s.typed("Why?")
	s.keys("Enter")
	s.sees(`✎ Why\?`)
	s.keys("q")
	s.sees(`left with 0`)

	s = w.term("agent-sessionizer review repo")
	s.sees(`^◐ M numbers`) // as it was
	s.keys("L")
	s.sees(`landing the chosen changes in 1 file`)
	s.sees(`message: Land the work of agent-repo`)
	s.keys("C-u")
	s.typed("Take one hunk")
	s.keys("Enter")
	s.sees(`branch: review/agent-repo-`)
	s.keys("C-u")
	s.typed("taken")
	s.keys("Enter")
	s.sees(`1 file landed on taken, [0-9a-f]{10}`)
	s.misses(`thirty five`)
	s.sees(`five`)
	if got, want := w.run("git", "-C", "repo", "log", "-1", "--format=%an/%s", "taken"), "Test/Take one hunk\n"; got != want {
		t.Errorf("commit = %q, want %q", got, want)
	}
	if diff := w.run("git", "-C", "repo", "show", "--format=", "taken"); !strings.Contains(diff, "+thirty five") || strings.Contains(diff, "+five") {
		t.Errorf("the commit has %s, want the second hunk", diff)
	}
	if got := w.run("git", "-C", "repo", "status", "--porcelain", "--branch"); !regexp.MustCompile(`^## \w+\n$`).MatchString(got) {
		t.Errorf("status of the clone = %q, want it as it was", got)
	}

	agent(`sed -i 's/^thirty five$/35!/' numbers`)
	s.keys("r") // fetches from the VM
	s.sees(`-thirty five`)
	s.sees(`\+35!`)
	s.keys("s")
	s.sees(`35 -thirty five +│ *35 \+35!`)
	s.keys("C-c")
	s.sees(`left with 0`)
}
