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
	killSessions(t, "a session that expires", map[string]int{"keeper": 60, "sweep": 6}, (*world).expire)
}

// TestCheckpointsUnderFaults kills the keeper before and after each of its writes to the store, while
// it makes a checkpoint, restores it, suspends the session and resumes it.
func TestCheckpointsUnderFaults(t *testing.T) {
	killSessions(t, "a session that is restored and suspended", map[string]int{"keeper": 80}, (*world).restore)
}

// TestForksUnderFaults kills the command and the fork's keeper before and after each of their writes
// to the store, while a session is forked.
func TestForksUnderFaults(t *testing.T) {
	killSessions(t, "a session that is forked", map[string]int{"fork": 6, "keeper": 50}, (*world).fork)
}

// TestSetupsUnderFaults kills the keeper before and after each of its writes to the store, while it
// runs the setup of a repository and keeps the result, and while it starts a session from a result.
func TestSetupsUnderFaults(t *testing.T) {
	killSessions(t, "a session with a setup", map[string]int{"keeper": 60}, func(w *world, kill ...string) error { return w.setUp(kill, nil) })
	killSessions(t, "a session with the result of a setup", map[string]int{"keeper": 60}, func(w *world, kill ...string) error { return w.setUp(nil, kill) })
}

// TestWorkspacesUnderFaults kills the keeper, and the command that rebinds, before and after each of
// their writes to the store, while a session gets a workspace and is replaced by another one.
func TestWorkspacesUnderFaults(t *testing.T) {
	killSessions(t, "a session with a new workspace", map[string]int{"keeper": 60}, func(w *world, kill ...string) error { return w.rebind(kill, nil) })
	killSessions(t, "a session with an earlier one's workspace", map[string]int{"workspace": 8, "keeper": 60}, func(w *world, kill ...string) error { return w.rebind(nil, kill) })
}

// killSessions calls live once for each write to the store, with an environment in which a process
// is killed at that write.
func killSessions(t *testing.T, what string, most map[string]int, live func(w *world, kill ...string) error) {
	type place struct {
		process, mark string
		n             int
	}
	var places []place
	for process, most := range most {
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
		err := live(w, stop.env)
		what := fmt.Sprintf("%s, killed %s, %s %d", what, p.process, p.mark, p.n)
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
	for process := range most {
		if came[process] == 0 {
			t.Errorf("faults in the %s = none, want some", process)
		}
	}
}

// restore makes a checkpoint of a session, changes it, restores the checkpoint, undoes that, and
// suspends and resumes it. Each command is repeated, as a user would, until it succeeds. kill is in
// the environment of the command that starts the first keeper.
func (w *world) restore(kill ...string) error {
	deadline := time.Now().Add(patience)
	env := kill
	until := func(what string, args ...string) error {
		for {
			out, err := w.run(env, args...)
			env = nil
			if err == nil {
				return nil
			}
			if time.Now().After(deadline) {
				logs, _ := w.run(nil, "agent-sessionizer", "logs", "repo")
				return fmt.Errorf("%s: %w: %s\n%s", what, err, out, logs)
			}
			// A keeper that was killed is replaced by the next command.
			if _, err := w.run(nil, "agent-sessionizer", "open", "-d", "--cpus", "1", "--memory", "512M", "--disk", "4G", "./repo"); err != nil {
				time.Sleep(200 * time.Millisecond)
			}
		}
	}
	write := func(text string) error {
		return until("write", "agent-sessionizer", "exec", "repo", "--", "sh", "-c", "echo "+text+" >file")
	}
	is := func(text string) error {
		if err := until("read", "agent-sessionizer", "exec", "repo", "--", "true"); err != nil {
			return err
		}
		out, err := w.inGuest("repo", "cat file")
		if err == nil && strings.TrimSpace(out) != text {
			err = fmt.Errorf("file in the guest = %q, want %q", out, text)
		}
		return err
	}
	// made waits for a checkpoint: a command that was interrupted may have requested it.
	made := func() error {
		return until("checkpoint", "sh", "-c", `agent-sessionizer checkpoints repo --json | grep -q '"state": "complete"' || agent-sessionizer checkpoint repo one`)
	}
	restored := func(name, text string) error {
		// A command that was interrupted may have been obeyed, so look at the result.
		return until("restore "+name, "sh", "-c", `test "$(agent-sessionizer exec repo -- cat file)" = `+text+` || agent-sessionizer restore repo `+name)
	}
	for _, step := range []func() error{
		func() error {
			return until("open", "agent-sessionizer", "open", "-d", "--cpus", "1", "--memory", "512M", "--disk", "4G", "./repo")
		},
		func() error { return write("one") },
		made,
		func() error { return write("two") },
		func() error { return restored("one", "one") },
		func() error { return is("one") },
		func() error { return restored("before-restore", "two") },
		func() error { return is("two") },
		func() error {
			return until("suspend", "sh", "-c", `agent-sessionizer stop --suspend repo`)
		},
		func() error { return until("resume", "agent-sessionizer", "start", "repo") },
		func() error { return is("two") },
		func() error { return until("destroy", "agent-sessionizer", "destroy", "--force", "repo") },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// fork forks a session, once the command is repeated until it succeeds. The session and the fork have
// the same file, and each its own later. kill is in the environment of the first command that forks.
func (w *world) fork(kill ...string) error {
	deadline := time.Now().Add(patience)
	if _, err := w.run(nil, "agent-sessionizer", "open", "-d", "--cpus", "1", "--memory", "512M", "--disk", "4G", "./repo"); err != nil {
		return err
	}
	if _, err := w.run(nil, "agent-sessionizer", "exec", "repo", "--", "sh", "-c", "echo one >file"); err != nil {
		return err
	}
	for env := kill; ; env = nil {
		// The fork may exist: then exec waits for it.
		out, err := w.run(env, "sh", "-c", "agent-sessionizer fork -d repo --label other || agent-sessionizer exec repo@other -- true")
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			logs, _ := w.run(nil, "agent-sessionizer", "logs", "repo@other")
			return fmt.Errorf("fork: %w: %s\n%s", err, out, logs)
		}
	}
	for _, c := range []struct{ session, command, want string }{
		{"repo@other", "cat file", "one"},
		{"repo@other", "echo two >file", ""},
		{"repo", "cat file", "one"},
		{"repo@other", "cat file", "two"},
	} {
		out, err := w.inGuest(c.session, c.command)
		if err == nil && strings.TrimSpace(out) != c.want {
			err = fmt.Errorf("file of %s = %q, want %q", c.session, out, c.want)
		}
		if err != nil {
			return err
		}
	}
	_, err := w.run(nil, "agent-sessionizer", "destroy", "--force", "repo", "repo@other")
	return err
}

// inGuest runs a command in a session that may be repeated: it ends with the keeper whose connection it
// shares.
func (w *world) inGuest(session, command string) (out string, err error) {
	for range 3 {
		if out, err = w.run(nil, "agent-sessionizer", "exec", session, "--", "sh", "-c", command); err == nil {
			break
		}
	}
	return out, err
}

// setUp opens a session of a repository with a setup, and another one, which may start from the result.
// Both have what the setup made. first and second are in the environment of the command that opens each
// session.
func (w *world) setUp(first, second []string) error {
	w.env = append(w.env, "AGENT_SESSIONIZER_PREPARE=golden")
	w.write("repo/.agent-sessionizer.yaml", "setup: cp input.txt installed\n")
	w.must("git", "-C", "repo", "add", "-A")
	w.must("git", "-C", "repo", "commit", "-qm", "setup")
	w.must("agent-sessionizer", "image", "build", "--from", "ubuntu", "--cpus", "1", "--memory", "512MiB")
	deadline := time.Now().Add(patience)
	for _, s := range []struct {
		name string
		env  []string
	}{{"first", first}, {"second", second}} {
		for env := s.env; ; env = nil {
			// The session may exist: then exec waits for it.
			out, err := w.run(env, "sh", "-c", `agent-sessionizer open -d --cpus 1 --memory 512M --disk 4G ./repo --new "$1" || agent-sessionizer exec "repo@$1" -- true`, "sh", s.name)
			if err == nil {
				break
			}
			if time.Now().After(deadline) {
				logs, _ := w.run(nil, "agent-sessionizer", "logs", "repo@"+s.name)
				return fmt.Errorf("open %s: %w: %s\n%s", s.name, err, out, logs)
			}
		}
		out, err := w.inGuest("repo@"+s.name, "cat installed")
		if err != nil || out != "as it was\n" {
			return fmt.Errorf("result of the setup in %s = %q, %w, want the file", s.name, out, err)
		}
	}
	if out, err := w.run(nil, "agent-sessionizer", "list", "--json"); first == nil && (err != nil || !strings.Contains(out, `"reused"`)) {
		return fmt.Errorf("sessions = %s, %w, want the second with the kept result", out, err)
	}
	_, err := w.run(nil, "sh", "-c", "agent-sessionizer destroy --force repo@first repo@second && agent-sessionizer prune --unused-for 0s")
	return err
}

// rebind opens a session with its checkout in a workspace, and replaces it by another one, which has the
// files and commits, and nothing that could run. first and second are in the environment of the commands
// that open the sessions.
func (w *world) rebind(first, second []string) error {
	w.must("agent-sessionizer", "workspace", "create", "scratch", "--size", "1GiB")
	deadline := time.Now().Add(patience)
	until := func(what string, env []string, args ...string) error {
		for ; ; env = nil {
			out, err := w.run(env, args...)
			if err == nil {
				return nil
			}
			if time.Now().After(deadline) {
				logs, _ := w.run(nil, "agent-sessionizer", "logs", "repo")
				return fmt.Errorf("%s: %w: %s\n%s", what, err, out, logs)
			}
			time.Sleep(200 * time.Millisecond)
		}
	}
	const open = "agent-sessionizer open -d --cpus 1 --memory 512M --disk 4G ./repo --workspace scratch"
	if err := until("open", first, "sh", "-c", open); err != nil {
		return err
	}
	const work = `git -c user.name=a -c user.email=a@b commit -q --allow-empty -m mine && echo work >notes && echo evil >.envrc && git config core.pager evil`
	if err := until("work", nil, "agent-sessionizer", "exec", "repo", "--", "sh", "-c", work); err != nil {
		return err
	}
	// A command that was interrupted may have destroyed the session or replaced it, so look at the result.
	if err := until("rebind", second, "sh", "-c", `agent-sessionizer exec repo -- test ! -e .envrc || agent-sessionizer workspace rebind scratch || `+open+` && agent-sessionizer exec repo -- test ! -e .envrc`); err != nil {
		return err
	}
	out, err := w.inGuest("repo", "cat notes; git log -1 --format=%s; git config core.pager; git status --short")
	if want := "work\nmine\n?? notes\n"; err == nil && out != want {
		err = fmt.Errorf("in the second session = %q, want %q", out, want)
	}
	if err != nil {
		return err
	}
	out, err = w.run(nil, "agent-sessionizer", "list", "--json")
	if err == nil && strings.Count(out, `"workspace": "scratch"`) != 1 {
		err = fmt.Errorf("sessions = %s, want one with the workspace", out)
	}
	if err != nil {
		return err
	}
	_, err = w.run(nil, "sh", "-c", "agent-sessionizer destroy --force repo && agent-sessionizer workspace delete scratch")
	return err
}
