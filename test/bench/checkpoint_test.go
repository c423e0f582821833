//go:build bench

package bench

import (
	"encoding/json"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// These are the ways to and from a saved state of a running session.
const (
	theCheckpoint = "checkpoint"
	theRestore    = "restore"
	theSuspend    = "stop --suspend"
	thePlainStop  = "stop"
	theResume     = "start, suspended"
	thePlainStart = "start, stopped"
	theForks      = "fork -n 5"
	theWarmForks  = "five warm starts at once"
)

const (
	rowPause   = "pause of the session, ms"
	rowCommand = "until the command returned, s"
	rowSize    = "size, MB"
	rowFive    = "until five sessions were ready, s"
)

const five = 5

// TestLifecycleCheckpoints creates and restores checkpoints of one session, suspends and resumes it,
// stops and starts it, and compares forks with new sessions.
func TestLifecycleCheckpoints(t *testing.T) {
	_ = realvm.Prepare(t.Context()) // the session may start in any way
	b := realvm.NewBox(t)
	b.Repo("project")
	table := results.table(table{title: titleSaved, rows: []row{
		{name: rowPause, unit: "ms", comparisons: []comparison{{key: "checkpoint_pause", mine: theCheckpoint, aim: aim{absolute, 1000}}}},
		{name: rowSize, unit: "MB", comparisons: []comparison{{key: "checkpoint_size", mine: theCheckpoint}}},
		{name: rowCommand, unit: "s", comparisons: []comparison{
			{key: "checkpoint_command", mine: theCheckpoint},
			{key: "restore_command", mine: theRestore, other: thePlainStart},
			{key: "suspend_command", mine: theSuspend, other: thePlainStop},
			{key: "resume_command", mine: theResume, other: thePlainStart},
		}},
		{name: rowFive, unit: "s", comparisons: []comparison{{key: "fork_five", mine: theForks, other: theWarmForks, aim: aim{atMost, 1}}}},
	}})
	b.Asz(openArgs("project")...)
	for range runs() {
		var c session.Checkpoint
		took := func(args ...string) float64 {
			began := time.Now()
			out := b.Asz(args...)
			if args[0] == "checkpoint" {
				if err := json.Unmarshal([]byte(out), &c); err != nil {
					t.Fatal(err)
				}
			}
			return time.Since(began).Seconds()
		}
		s := sample{rowCommand: took("checkpoint", "project", "--json")}
		s[rowPause], s[rowSize] = float64(c.Pause), float64(c.Size)/1e6
		table.add(theCheckpoint, s)
		for _, step := range []struct {
			contender string
			args      []string
		}{
			{theRestore, []string{"restore", "project", c.Name}},
			{theSuspend, []string{"stop", "--suspend", "project"}},
			{theResume, []string{"start", "project"}},
			{thePlainStop, []string{"stop", "project"}},
			{thePlainStart, []string{"start", "project"}},
		} {
			table.add(step.contender, sample{rowCommand: took(step.args...)})
		}
		b.Asz("checkpoints", "project", "--remove", c.Name, "--remove", session.BeforeRestore)
		// The programs of an unfinished boot would go on in each fork.
		_ = b.In("project", "systemctl is-system-running --wait")
		destroy := func() {
			for _, s := range b.List()[1:] {
				b.Asz("destroy", "--force", s.Name)
			}
		}
		table.add(theForks, sample{rowFive: took("fork", "project", "-n", strconv.Itoa(five), "--json")})
		destroy()
		began := time.Now()
		var opening sync.WaitGroup
		for range five {
			opening.Go(func() { b.Asz(append(openArgs("project"), "--new")...) })
		}
		opening.Wait()
		table.add(theWarmForks, sample{rowFive: time.Since(began).Seconds()})
		destroy()
	}
	table.done(t, runs(), theCheckpoint, theRestore, theSuspend, theResume, thePlainStop, thePlainStart, theForks, theWarmForks)
	b.Asz("destroy", "--force", "project")
}
