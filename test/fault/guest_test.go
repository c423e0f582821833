//go:build fault

package fault

import (
	"syscall"
	"testing"
	"time"
)

// TestGuestVanishes kills the VM and everything in it, at each point of the keepers'
// work.
func TestGuestVanishes(t *testing.T) {
	trouble{
		name: "guest killed", kase: slow, who: []string{"task-keeper", "keeper"}, marks: commits[1:], step: every(3),
		act: (*world).vanish, may: again,
	}.everywhere(t)
}

// freeze stops the processes that f selects, and resumes them after d.
func freeze(f func(string) bool, d time.Duration) func(w *world) {
	return func(w *world) {
		w.signal(syscall.SIGSTOP, f)
		w.later(d, func() { w.signal(syscall.SIGCONT, f) })
	}
}

// TestGuestFreezes freezes the whole guest for some seconds.
func TestGuestFreezes(t *testing.T) {
	trouble{
		name: "guest frozen", kase: slow, who: []string{"task-keeper", "keeper"}, marks: commits[1:], step: every(6),
		act: freeze(isGuest, 3*time.Second),
	}.everywhere(t)
}

// frozen is slow with less patience for a guest that does not respond.
var frozen = func() kase {
	k := slow
	k.name, k.lifecycle = "frozen", `"retries": {"connect": "10s"}`
	return k
}()

// TestGuestStaysFrozen freezes the guest forever while its agent runs, or while its
// work is collected: another VM is started on the disk.
func TestGuestStaysFrozen(t *testing.T) {
	if testing.Short() {
		t.Skip("a guest is given up after minutes; the whole run has it")
	}
	t.Parallel() // the test only waits
	trouble{
		name: "guest frozen for good", kase: frozen, who: []string{"task-keeper"}, marks: commits[1:], step: 5,
		act: func(w *world) { w.signal(syscall.SIGSTOP, isGuest) }, may: again,
	}.everywhere(t)
}

// TestStalls interrupts the communication with the guest for some seconds, while the
// agent keeps running.
func TestStalls(t *testing.T) {
	trouble{
		name: "stalled", kase: slow, who: []string{"task-keeper", "keeper"}, marks: commits[1:], step: every(6),
		act: freeze(isVM, 4*time.Second),
	}.everywhere(t)
}

// TestLongStalls does so for longer than any client waits for an answer.
func TestLongStalls(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes minutes; the whole run has it")
	}
	t.Parallel()
	trouble{
		name: "stalled for long", kase: slow, who: []string{"task-keeper", "keeper"}, marks: commits[1:], step: 12,
		act: freeze(isVM, 80*time.Second),
	}.everywhere(t)
}

// TestStallingLogins accepts new connections and sends nothing on them.
func TestStallingLogins(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]string{
		"each for a second":                `{"connect": {"stall": "1s"}}`,
		"some for longer than a login may": `{"connect": {"stall": "70s", "count": 2}}`,
	} {
		if testing.Short() && name != "each for a second" {
			continue
		}
		want := calmly(t, slow).ending
		t.Run("booting/"+name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			defer w.remove()
			w.write("faults.json", fault)
			got, err := w.play(slow)
			disturbed(t, w, t.Name(), got, want, err)
		})
		t.Run("running/"+name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			defer w.remove()
			k := slow
			k.running = func(w *world, _ string) error {
				w.write("faults.json", fault)
				w.signal(syscall.SIGKILL, isKeeper) // also closes their connections
				return nil
			}
			got, err := w.play(k)
			disturbed(t, w, t.Name(), got, want, err)
		})
	}
}
