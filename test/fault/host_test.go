//go:build fault

package fault

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// ownDisk puts the world's state on a small disk of its own.
func (w *world) ownDisk() {
	if err := os.MkdirAll(w.state(), 0o700); err != nil {
		w.t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", w.state(), "tmpfs", 0, "size=32m,mode=700"); err != nil {
		w.t.Fatalf("mount a small disk: %v", err)
	}
	w.full = true
}

func (w *world) filler() string { return filepath.Join(w.state(), "filler") }

// fill leaves no free byte on the world's disk. Commands may fail from then on.
func (w *world) fill() {
	w.ill.Add(1)
	f, err := os.OpenFile(w.filler(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		w.t.Error(err)
		return
	}
	defer f.Close()
	block := make([]byte, 64<<10)
	for len(block) > 0 {
		if _, err := f.Write(block); errors.Is(err, syscall.ENOSPC) {
			block = block[:len(block)/2]
		} else if err != nil {
			w.t.Error(err)
			return
		}
	}
}

// free frees the space again.
func (w *world) free() {
	if err := os.Remove(w.filler()); err != nil {
		w.t.Error(err)
	}
	w.ill.Add(1)
}

// TestFullDisk fills the disk with the program's state, at each point where something
// is written to it, and frees the space two seconds later.
func TestFullDisk(t *testing.T) {
	x := trouble{
		name: "full disk", kase: cases[0], who: []string{"task", "task-keeper"}, step: every(3), ready: (*world).ownDisk,
		act: func(w *world) {
			w.fill()
			w.later(2*time.Second, w.free)
		},
	}
	x.marks = []string{"before-commit", "before-file"}
	x.everywhere(t)
	x.who, x.step = []string{"keeper"}, every(6)
	x.everywhere(t)
}

// TestDiskThatStaysFull checks that a task is refused when the disk is full, and that
// an existing task waits for as long as it takes.
func TestDiskThatStaysFull(t *testing.T) {
	t.Parallel()
	k := cases[0]
	want := calmly(t, k).ending
	t.Run("refused", func(t *testing.T) {
		w := newWorld(t)
		defer w.remove()
		w.ownDisk()
		w.must("agent-sessionizer", "list") // creates the store
		w.write("task.json", k.manifest(w.home))
		w.fill()
		for range 3 {
			_, err := w.run(nil, "agent-sessionizer", "task", "submit", "-f", "task.json")
			if err == nil || !strings.Contains(err.Error(), "exit status 5") || !strings.Contains(err.Error(), "df -h") {
				t.Errorf("task submit on a full disk = %v, want exit status 5 with df -h", err)
			}
		}
		w.free()
		if left, _ := os.ReadDir(filepath.Join(w.state(), "agent-sessionizer/tasks")); len(left) > 0 {
			t.Errorf("task directories after a refused submit = %v, want none", left)
		}
		got, err := w.play(k)
		disturbed(t, w, "refused by a full disk", got, want, err)
	})
	if testing.Short() {
		return // the rest takes minutes
	}
	t.Run("given up", func(t *testing.T) {
		w := newWorld(t)
		defer w.remove()
		w.ownDisk()
		stood := w.breakAt("task-keeper", "before-commit", 6, (*world).fill)
		over := make(chan struct{})
		go func() {
			defer close(over)
			w.wait("the disk to be full", func() bool { return w.ill.Load() > 0 })
			w.wait("the keeper to give up", func() bool {
				return w.signal(0, func(line string) bool { return strings.Contains(line, " task-keeper ") }) == 0
			})
			w.free()
		}()
		w.write("task.json", k.manifest(w.home))
		if _, err := w.run([]string{stood.env}, "agent-sessionizer", "task", "submit", "-f", "task.json"); err != nil {
			t.Error(err)
		}
		<-over
		got, err := w.follow(k, "")
		if !stood.came() {
			t.Error("writes of the task's keeper: too few for the fault, want it reached")
		}
		disturbed(t, w, "given up", got, want, err)
	})
}

// clock makes the world's wall clock settable.
func (w *world) clock() {
	if runtime.GOARCH != "amd64" {
		w.t.Skip("the wrong clock is machine code, for amd64 only")
	}
	w.write("clock", strings.Repeat("\x00", 8))
	w.env = append(w.env, "FAULT_CLOCK="+filepath.Join(w.home, "clock"))
}

// jump sets the clock to d off the right time.
func (w *world) jump(d time.Duration) {
	f, err := os.OpenFile(filepath.Join(w.home, "clock"), os.O_WRONLY, 0)
	if err == nil {
		// In place, because processes have the file mapped.
		_, err = f.WriteAt(binary.LittleEndian.AppendUint64(nil, uint64(d/time.Second)), 0)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		w.t.Error(err)
	}
}

// checkLastEvent checks that the time of the task's last event is off by d.
func (w *world) checkLastEvent(d time.Duration) error {
	file, err := filepath.Glob(filepath.Join(w.state(), "agent-sessionizer/tasks/*/outbox/progress/events.jsonl"))
	if err != nil || len(file) != 1 {
		return fmt.Errorf("events of %d tasks: %w", len(file), err)
	}
	text, err := os.ReadFile(file[0])
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	var last struct{ At time.Time }
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil {
		return err
	}
	if wrong := time.Until(last.At) - d; wrong.Abs() > patience {
		return fmt.Errorf("the last event is of %v, by a clock that is off by %v", last.At, d)
	}
	return nil
}

// TestClockJumps sets the host's clock an hour forwards or back, while processes keep
// running and between two keepers.
func TestClockJumps(t *testing.T) {
	for _, d := range []time.Duration{time.Hour, -time.Hour} {
		x := trouble{
			name: fmt.Sprintf("clock %+v", d), kase: slow, who: []string{"task-keeper", "keeper"}, marks: commits[1:], step: every(7),
			ready: (*world).clock, act: func(w *world) { w.jump(d) }, check: func(w *world) error { return w.checkLastEvent(d) },
		}
		x.everywhere(t)
	}
	x := trouble{
		name: "clock there and back", kase: slow, who: []string{"task-keeper"}, marks: commits[1:], step: every(8),
		ready: (*world).clock, act: func(w *world) { w.jump(time.Hour); w.later(time.Second, func() { w.jump(0) }) },
	}
	x.everywhere(t)

	// A new keeper uses the wall clock for the time without a keeper.
	x.name, x.step = "clock back, keepers killed", every(6)
	x.act = func(w *world) { w.jump(-time.Hour); w.signal(syscall.SIGKILL, isKeeper) }
	x.check = func(w *world) error { return w.checkLastEvent(-time.Hour) }
	x.everywhere(t)
	for _, c := range []struct {
		kase kase
		d    time.Duration
	}{{slow, time.Hour}, {cases[4], -time.Hour}, {cases[4], time.Hour}} {
		t.Run(fmt.Sprintf("%s, while it runs, %+v", c.kase.name, c.d), func(t *testing.T) {
			k := c.kase
			want := calmly(t, k).ending
			w := newWorld(t)
			defer w.remove()
			w.clock()
			k.running = func(w *world, _ string) error {
				w.jump(c.d)
				w.signal(syscall.SIGKILL, isKeeper)
				return nil
			}
			got, err := w.play(k)
			if err == nil {
				err = w.checkLastEvent(c.d)
			}
			disturbed(t, w, t.Name(), got, want, err)
		})
	}
}
