package session

import (
	"bufio"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

func newTurn(path string) *turn { return &turn{path: path, log: slog.New(slog.DiscardHandler)} }

// waitTurn waits for the turn, and returns how long that took and what the user saw.
func waitTurn(ctx context.Context, t *testing.T, w *turn) (took time.Duration, shown []string) {
	t.Helper()
	began := time.Now()
	if err := w.wait(ctx, func(text string) { shown = append(shown, text) }); err != nil {
		t.Errorf("wait = %v, want nil", err)
	}
	return time.Since(began), shown
}

// Forks wake one after another. The user sees a wait of more than a second.
func TestTurn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "locks", "wake")
	for name, c := range map[string]struct {
		held  time.Duration
		most  time.Duration // what the second fork may wait longer
		shown []string
		has   bool
	}{
		"free":  {0, 0, nil, true},
		"short": {turnSilent / 2, turnSilent / 2, nil, true},
		"long":  {5 * time.Second, turnSilent / 2, []string{"waiting until another VM is ready, at most 20s"}, true},
		"limit": {time.Hour, 0, []string{"waiting until another VM is ready, at most 20s"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				first, second := newTurn(path), newTurn(path)
				if took, shown := waitTurn(t.Context(), t, first); took != 0 || shown != nil {
					t.Errorf("first fork waited %v and showed %q, want no wait", took, shown)
				}
				if took, _ := waitTurn(t.Context(), t, first); took != 0 {
					t.Errorf("fork that has its turn waited %v, want no wait", took)
				}
				time.AfterFunc(c.held, first.end)
				synctest.Wait()
				least := min(c.held, turnLimit)
				took, shown := waitTurn(t.Context(), t, second)
				if took < least || took > least+c.most || !slices.Equal(shown, c.shown) {
					t.Errorf("second fork waited %v and showed %q, want %v to %v and %q", took, shown, least, least+c.most, c.shown)
				}
				if has := second.lock != nil; has != c.has {
					t.Errorf("second fork has the turn = %t, want %t", has, c.has)
				}
				second.end()
				second.end() // does nothing
				time.Sleep(c.held)
				synctest.Wait()
			})
		})
	}
}

// The kernel ends the turn of a process that was killed.
func TestTurnOfKilledProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "wake")
	cmd := exec.CommandContext(t.Context(), os.Args[0], "hold", path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatalf("line of the child = %q, %v, want \"locked\"", line, err)
	}
	killed := make(chan error, 1)
	time.AfterFunc(50*time.Millisecond, func() { killed <- cmd.Process.Kill() }) // while the fork waits
	w := newTurn(path)
	took, _ := waitTurn(t.Context(), t, w)
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if w.lock == nil || took >= turnLimit {
		t.Errorf("fork has the turn of a killed process = %t after %v, want true before %v", w.lock != nil, took, turnLimit)
	}
	w.end()
}

// A keeper that ends does not wait, and a lock that cannot be used keeps no fork from waking.
func TestTurnFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "wake")
	first, second := newTurn(path), newTurn(path)
	waitTurn(t.Context(), t, first)
	defer first.end()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errBoom)
	if err := second.wait(ctx, nil); !errors.Is(err, errBoom) {
		t.Errorf("wait with an ended context = %v, want %v", err, errBoom)
	}
	broken := newTurn(filepath.Join(path, "below-a-file"))
	if _, shown := waitTurn(t.Context(), t, broken); shown != nil || broken.lock != nil {
		t.Errorf("turn of an unusable lock = %v, showed %q, want none", broken.lock, shown)
	}
}

// Only a fork that wakes for the first time, on a host that emulates VMs, needs its turn.
func TestNeedsTurn(t *testing.T) {
	warm := Session{Status: Status{From: golden.FromWarm}}
	fork := Session{Spec: Spec{Fork: &ForkOf{}}, Status: Status{From: golden.FromFork, Resumes: "id"}}
	booted, again := fork, warm
	booted.Status.Resumes, again.Status.WasReady = "", true
	for name, c := range map[string]struct {
		s     Session
		accel string
		want  bool
	}{
		"warm":                   {warm, "tcg", true},
		"fork":                   {fork, "tcg", true},
		"fork without memory":    {booted, "tcg", false},
		"restart":                {again, "tcg", false},
		"clone":                  {Session{Status: Status{From: golden.FromGolden}}, "tcg", false},
		"warm with KVM":          {warm, "kvm", false},
		"fork with KVM":          {fork, "kvm", false},
		"warm with vz":           {warm, "vz", false},
		"warm in a fake machine": {warm, "none", false},
	} {
		if got := c.s.needsTurn(vm.Accel{Name: c.accel}); got != c.want {
			t.Errorf("%s: needsTurn = %t, want %t", name, got, c.want)
		}
	}
}
