//go:build fault

package fault

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// landing is a review of a session whose work lands on a branch.
type landing struct {
	name   string
	user   string   // commits of the user, a shell script, after the agent began
	agent  string   // commits of the agent
	args   []string // of the command that lands
	marks  []string // at which it is killed
	merged string   // what input.txt has on the branch
}

const landingBranch = "review/x"

var landings = []landing{
	{
		name:   "clean",
		user:   "echo user >user.txt; git add -A; git commit -qm user",
		agent:  "echo agent >>input.txt; echo new >new.txt; git add -A; git commit -qm agent",
		marks:  append(files, commits...),
		merged: "as it was\nagent\n",
	},
	{
		// The tool's result contains the agent's lines, so landing it twice would show.
		name: "conflict",
		user: `echo user >input.txt; git commit -qam user; git config merge.tool both; git config mergetool.both.cmd 'cat "$LOCAL" "$REMOTE" >"$MERGED"'
git config mergetool.both.trustExitCode true; git config mergetool.prompt false`,
		agent:  "echo agent >input.txt; echo new >new.txt; git add -A; git commit -qm agent",
		args:   []string{"--mergetool"},
		marks:  files[:1],
		merged: "user\nagent\n",
	},
}

// prepare opens a session whose agent has committed, and leaves work of the user in the clone.
func (w *world) prepare(l landing) error {
	const identity = "git config user.name Agent; git config user.email agent@example.invalid; "
	for _, argv := range [][]string{
		{"agent-sessionizer", "open", "-d", "--cpus", "1", "--memory", "512M", "--disk", "4G", "./repo"},
		{"agent-sessionizer", "exec", "repo", "--", "sh", "-ec", identity + l.agent},
		{"sh", "-ec", "cd repo; " + l.user + "; echo staged >staged.txt; git add staged.txt; echo changed >>staged.txt; echo untracked >untracked.txt"},
	} {
		if _, err := w.run(nil, argv...); err != nil {
			return err
		}
	}
	return nil
}

// land lands the agent's work, as a user does.
func (w *world) land(l landing, env ...string) error {
	argv := append([]string{"agent-sessionizer", "review", "--land", "--branch", landingBranch}, l.args...)
	_, err := w.run(env, append(argv, "repo")...)
	return err
}

// clone returns what a landing must not touch.
func (w *world) clone() (string, error) {
	return w.run(nil, "sh", "-ec", "cd repo; git rev-parse --symbolic-full-name HEAD; git rev-parse HEAD; sha256sum .git/index .git/config *.txt; git stash list")
}

// landed checks that the work landed exactly once, and that nothing is left to land.
func (w *world) landed(l landing) error {
	for _, c := range []struct{ what, script, want string }{
		{"commits on the branch", "git rev-list --count main.." + landingBranch, "1\n"},
		{"trailers", "git log --format=%B main.." + landingBranch + " | grep -c ^Agent-Session:", "1\n"},
		{"input.txt", "git show " + landingBranch + ":input.txt", l.merged},
		{"new.txt", "git show " + landingBranch + ":new.txt", "new\n"},
		{"files that landed", "git diff --name-only main " + landingBranch, "input.txt\nnew.txt\n"},
		{"broken objects", "git fsck --connectivity-only --no-dangling 2>/dev/null", ""},
		{"locks", "find .git -name '*.lock'", ""},
	} {
		if got, err := w.run(nil, "sh", "-ec", "cd repo; "+c.script); err != nil || got != c.want {
			return fmt.Errorf("%s = %q, %w, want %q", c.what, got, err, c.want)
		}
	}
	out, err := w.run(nil, "agent-sessionizer", "review", "--json", "--branch", landingBranch, "repo")
	if err != nil {
		return err
	}
	var attempts []struct {
		Files  []any
		Landed []string
	}
	if err := json.Unmarshal([]byte(out), &attempts); err != nil {
		return err
	}
	if len(attempts) != 1 || len(attempts[0].Files) > 0 || len(attempts[0].Landed) != 2 {
		return fmt.Errorf("review = %s, want two files that landed, and no other", out)
	}
	return nil
}

// age makes all files of killed commands old enough to be abandoned.
func (w *world) age() error {
	past := time.Now().Add(-48 * time.Hour)
	for _, dir := range []string{"tmp", ".cache/agent-sessionizer", ".local/state/agent-sessionizer/reviews"} {
		err := filepath.WalkDir(filepath.Join(w.home, dir), func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.Type().IsRegular() || err == nil && filepath.Base(filepath.Dir(path)) == "tmp" {
				err = os.Chtimes(path, past, past)
			}
			if errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// temporary returns the temporary files that later commands did not remove.
func (w *world) temporary() (left []string) {
	for _, pattern := range []string{"tmp/*", ".cache/agent-sessionizer/*.pack", ".local/state/agent-sessionizer/reviews/.*.tmp"} {
		found, _ := filepath.Glob(filepath.Join(w.home, pattern))
		left = append(left, found...)
	}
	return left
}

// interrupted lands work with a command that interrupt may kill, repeats the command, and checks the result.
func (l landing) interrupted(w *world, interrupt func() (env []string, came func() bool)) (came bool, err error) {
	if err := w.prepare(l); err != nil {
		return false, err
	}
	before, err := w.clone()
	if err != nil {
		return false, err
	}
	env, killed := interrupt()
	first := w.land(l, env...)
	came = killed()
	if err := first; err != nil && (!came || !strings.Contains(err.Error(), "signal: killed")) {
		return came, err
	}
	if err := w.age(); err != nil {
		return came, err
	}
	// It has landed already if the command was killed at its end.
	if err := w.land(l); err != nil && !strings.Contains(err.Error(), "nothing to land") {
		return came, fmt.Errorf("repeated: %w", err)
	}
	if err := w.age(); err != nil { // again: a git that outlived the killed command may have written since
		return came, err
	}
	if err := w.landed(l); err != nil {
		return came, err
	}
	after, err := w.clone()
	if err == nil && after != before {
		err = fmt.Errorf("the user's clone = %s, want %s", after, before)
	}
	if err != nil {
		return came, err
	}
	if _, err := w.run(nil, "agent-sessionizer", "prune"); err != nil {
		return came, err
	}
	_, err = w.run(nil, "agent-sessionizer", "destroy", "--force", "repo")
	return came, err
}

// reportLanding counts the result of an interrupted landing.
func reportLanding(t *testing.T, w *world, what string, err error) {
	t.Helper()
	injected.Add(1)
	if err != nil {
		lost.Add(1)
		t.Errorf("%s = %v, want nil", what, err)
		return // with its session
	}
	if left := append(w.temporary(), w.leftovers()...); len(left) > 0 {
		leaked.Add(1)
		t.Errorf("%s: leftovers = %v, want none", what, left)
	}
}

// undisturbed lands work without a fault, and returns how many marks the command reaches and how long it takes.
func (l landing) undisturbed(t *testing.T) (marks map[string]int, took time.Duration) {
	t.Helper()
	w := newWorld(t)
	defer w.remove()
	told := filepath.Join(w.home, "marks")
	var began time.Time
	if _, err := l.interrupted(w, func() ([]string, func() bool) {
		began = time.Now()
		return []string{"AGENT_SESSIONIZER_CRASH=:::tell:" + told}, func() bool { took = time.Since(began); return false }
	}); err != nil {
		t.Fatalf("landing, undisturbed = %v, want nil", err)
	}
	if left := append(w.temporary(), w.leftovers()...); len(left) > 0 {
		t.Fatalf("landing, undisturbed: leftovers = %v, want none", left)
	}
	return countMarks(t, told), took
}

// TestLandingKilled kills a command that lands work at each of its writes. The repeated command completes the
// landing, or finds that it is complete.
func TestLandingKilled(t *testing.T) {
	for _, l := range landings {
		t.Run(l.name, func(t *testing.T) {
			marks, _ := l.undisturbed(t)
			var places []place
			for _, mark := range l.marks {
				for n := 1; n <= marks["review "+mark]; n += min(every(1), 4) {
					places = append(places, place{mark, n})
				}
			}
			atEach(t, places, func(w *world, p place) (bool, error) {
				return l.interrupted(w, func() ([]string, func() bool) {
					stop := w.breakAt("review", p.mark, p.n, nil)
					return []string{stop.env}, stop.came
				})
			}, func(w *world, p place, err error) {
				reportLanding(t, w, fmt.Sprintf("landing killed at %s %d", p.mark, p.n), err)
			})
		})
	}
}

// TestLandingKilledAtMoments kills such a command at moments, also while one of its gits runs.
func TestLandingKilledAtMoments(t *testing.T) {
	l := landings[0]
	_, took := l.undisturbed(t)
	moments := some(16)
	eachAtOnce(moments, func(i int) {
		w := newWorld(t)
		defer w.remove()
		at := 2 * took * time.Duration(i+1) / time.Duration(moments+1) // the others slow it down
		came, err := l.interrupted(w, func() ([]string, func() bool) {
			killed := make(chan bool, 1)
			kill := time.AfterFunc(at, func() {
				killed <- w.signal(syscall.SIGKILL, func(line string) bool { return strings.Contains(line, "agent-sessionizer review --land ") }) > 0
			})
			return nil, func() bool { return !kill.Stop() && <-killed }
		})
		if came || err != nil {
			reportLanding(t, w, fmt.Sprintf("landing killed after %v", at), err)
		}
	})
}
