//go:build fault

package fault

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// expire opens a session that commits and then is idle, until it is stopped and destroyed. Each
// check is a command like a user's. kill is in the environment of the commands that start the
// killed process. At the end the commit must be in the repository.
func (w *world) expire(kill ...string) error {
	w.write(".config/agent-sessionizer/config.yaml", "lifetime: {idle_ttl: 8s, cleanup_ttl: 1s}\n")
	deadline := time.Now().Add(patience)
	open := func(env []string) error {
		_, err := w.run(env, "agent-sessionizer", "open", "-d", "--cpus", "1", "--memory", "512M", "--disk", "4G", "./repo")
		return err
	}
	// A killed process makes the command fail; a person would repeat it.
	for err := open(kill); err != nil; err = open(nil) {
		if time.Now().After(deadline) {
			return err
		}
	}
	const work = `git -c user.name=Agent -c user.email=agent@example.invalid commit -q --allow-empty -m "by the agent"`
	for {
		_, err := w.run(nil, "agent-sessionizer", "exec", "repo", "--", "sh", "-c", work)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			return err
		}
		if err := open(nil); err != nil {
			return err
		}
	}
	for {
		if time.Now().After(deadline) {
			out, _ := w.run(nil, "agent-sessionizer", "list", "--json")
			logs, _ := w.run(nil, "agent-sessionizer", "logs", "repo")
			return fmt.Errorf("the session does not end: %s\n%s", out, logs)
		}
		out, err := w.run(nil, "agent-sessionizer", "list", "--json")
		if err != nil {
			return err
		}
		var all []struct{ State, Kept string }
		if err := json.Unmarshal([]byte(out), &all); err != nil {
			return err
		}
		if len(all) == 0 {
			break
		}
		// A stop that was cut short leaves unknown work, which is kept. A person then starts
		// the session, and the next stop is clean.
		if all[0].Kept != "" {
			if err := open(nil); err != nil {
				return err
			}
		}
		_, _ = w.run(kill, "agent-sessionizer", "sweep") // the killed process
		time.Sleep(200 * time.Millisecond)
	}
	subjects, err := w.run(nil, "git", "-C", filepath.Join(w.home, "repo"), "for-each-ref", "--format=%(subject)", "refs/agents/")
	if err == nil && !strings.Contains(subjects, "by the agent") {
		err = fmt.Errorf("the commit is lost; refs/agents has %q", subjects)
	}
	return err
}

// TestSessionsExpireUnderFaults kills the keeper and the sweep before and after each of their
// writes to the store, while a session is stopped for being idle and then destroyed.
func TestSessionsExpireUnderFaults(t *testing.T) {
	type place struct {
		process, mark string
		n             int
	}
	var places []place
	for process, most := range map[string]int{"keeper": 60, "sweep": 6} {
		for _, mark := range commits {
			for n := 1; n <= most; n += every(1) {
				places = append(places, place{process, mark, n})
			}
		}
	}
	came := map[string]int{}
	eachAtOnce(len(places), func(i int) {
		p := places[i]
		w := newWorld(t)
		defer w.remove()
		stop := w.breakAt(p.process, p.mark, p.n, nil)
		err := w.expire(stop.env)
		what := fmt.Sprintf("a session that expires, killed %s, %s %d", p.process, p.mark, p.n)
		if stop.came() {
			injected.Add(1)
			calmMu.Lock()
			came[p.process]++
			calmMu.Unlock()
		}
		if err != nil {
			lost.Add(1)
			t.Errorf("%s = %v, want nil", what, err)
		}
		if left := w.leftovers(); len(left) > 0 {
			leaked.Add(1)
			t.Errorf("%s: leftovers = %v, want none", what, left)
		}
	})
	for _, process := range []string{"keeper", "sweep"} {
		if came[process] == 0 {
			t.Errorf("faults in the %s = none, want some", process)
		}
	}
}
