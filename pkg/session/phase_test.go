package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

func TestAtRest(t *testing.T) {
	rest := map[Phase][]Phase{
		Gone:    {Ready, Stopped, Gone},
		Stopped: {Stopped},
		Broken:  {Ready, Stopped}, // a failed stop is not repeated forever
	}
	for _, p := range phases {
		for _, desired := range []Phase{Ready, Stopped, Gone} {
			if got := AtRest(p, desired); got != slices.Contains(rest[p], desired) {
				t.Errorf("AtRest(%s, %s) = %t, want %t", p, desired, got, !got)
			}
		}
	}
}

func TestTableOfTransitions(t *testing.T) {
	if len(next) != len(phases) {
		t.Errorf("phases in the transition table = %d, want %d", len(next), len(phases))
	}
	reached := map[Phase]bool{Creating: true}
	for todo := []Phase{Creating}; len(todo) > 0; todo = todo[1:] {
		for _, p := range next[todo[0]] {
			if !slices.Contains(phases, p) || p == todo[0] {
				t.Errorf("transition from %s to %s in the table, want known and different phases", todo[0], p)
			}
			if !reached[p] {
				reached[p] = true
				todo = append(todo, p)
			}
		}
	}
	for _, p := range phases {
		if !reached[p] {
			t.Errorf("phase %s is unreachable, want a transition that leads to it", p)
		}
		if destroy := p != Gone && p != Destroying; next.Allow(p, Destroying) != destroy {
			t.Errorf("next.Allow(%s, %s) = %t, want %t", p, Destroying, !destroy, destroy)
		}
	}
	if len(next[Gone]) != 0 || !slices.Equal(next[Destroying], []Phase{Gone}) {
		t.Errorf("transitions from %s = %v, from %s = %v, want none, %s alone", Gone, next[Gone], Destroying, next[Destroying], Gone)
	}
}

// Every transition of the table occurs in some case, and no other does.
func TestEveryTransitionIsUsed(t *testing.T) {
	seen := map[string]bool{}
	gone := func(context.Context) (vm.Machine, error) { return vm.Machine{}, vm.ErrNotFound }
	off := func(context.Context) (vm.Machine, error) { return vm.Machine{State: vm.Stopped}, nil }
	fails := func(context.Context) error { return errBoom }
	whole := Status{Base: &repo.Base{}} // nothing to fetch
	// Starting a VM needs a real one; this does the step that follows a successful
	// start.
	ready := func(w *Worker, s Session) (Session, error) { return w.advance(t.Context(), s, Ready, nil) }
	do := func(w *Worker, s Session) (Session, error) { return w.Next(t.Context(), s) }
	request := func(p Phase) func(*Worker, Session) (Session, error) {
		return func(w *Worker, s Session) (Session, error) { return w.Sessions.SetDesired(t.Context(), s, p) }
	}
	for i, c := range []struct {
		from, desired Phase
		status        Status
		driver        driver
		do            func(*Worker, Session) (Session, error)
		to            Phase
	}{
		{Creating, Ready, whole, driver{}, ready, Ready},
		{Creating, Ready, whole, driver{}, do, Broken}, // no such image
		{Creating, Stopped, whole, driver{}, do, Stopped},
		{Creating, Stopped, Status{}, driver{stop: func(context.Context) error { return vm.ErrNotFound }}, do, Stopped}, // before the VM existed
		{Creating, Gone, whole, driver{}, do, Gone},
		{Starting, Ready, whole, driver{}, ready, Ready},
		{Starting, Ready, Status{WasReady: true}, driver{inspect: gone}, do, Broken},
		{Starting, Stopped, whole, driver{}, do, Stopped},
		{Starting, Gone, whole, driver{}, do, Gone},
		{Ready, Ready, whole, driver{inspect: off}, do, Stopped}, // without a request
		{Ready, Ready, whole, driver{inspect: gone}, do, Broken},
		{Ready, Stopped, Status{WasReady: true}, driver{stop: func(context.Context) error { return vm.ErrNotFound }}, do, Broken},
		{Ready, Gone, whole, driver{}, do, Gone},
		{Stopping, Stopped, whole, driver{stop: fails}, do, Broken},
		{Stopping, Ready, whole, driver{}, do, Stopped}, // cannot be undone
		{Stopping, Gone, whole, driver{}, do, Gone},
		{Stopped, Ready, whole, driver{}, do, Starting},
		{Stopped, Gone, whole, driver{}, do, Gone},
		{Broken, Ready, whole, driver{}, request(Ready), Creating},
		{Broken, Ready, Status{WasReady: true}, driver{}, request(Ready), Starting},
		{Broken, Ready, whole, driver{}, request(Stopped), Stopping},
		{Broken, Gone, whole, driver{}, do, Gone},
		{Destroying, Gone, whole, driver{remove: fails}, do, Destroying},
		{Destroying, Gone, whole, driver{}, do, Gone},
	} {
		t.Run(fmt.Sprintf("%d %s to %s", i, c.from, c.to), func(t *testing.T) {
			w := newWorker(t, c.driver)
			s := put(t, w.Sessions, "aaaa11112222", "o/r", c.from, c.desired, c.status)
			before := lastSeq(t, w.Sessions.Store, s.ID)
			got, err := c.do(w, s)
			if (err != nil) != (c.to == c.from) {
				t.Fatalf("step from %s to %s = %v, want an error only without a transition", c.from, c.to, err)
			}
			if stored, err := w.Sessions.Get(t.Context(), s.ID); err != nil || stored.Phase != c.to || c.to != c.from && got.Phase != c.to {
				t.Fatalf("session = stored phase %s, returned %s (%s), %v, want %s", stored.Phase, got.Phase, stored.ErrorMessage, err, c.to)
			} else if failed := c.to == Broken || c.to == c.from || c.from == Ready && c.to == Stopped && c.desired == Ready; (stored.ErrorCode != "") != failed {
				t.Errorf("error of the row = %q (%s), want an error: %t", stored.ErrorCode, stored.ErrorMessage, failed)
			}
			for _, p := range changes(t, w.Sessions, s.ID, before) {
				if !next.Allow(p.From, p.To) {
					t.Errorf("transition from %s to %s, want one of the table", p.From, p.To)
				}
				seen[string(p.From+" "+p.To)] = true
			}
			if c.to == Gone {
				if _, err := os.Stat(w.Sessions.Config.Paths.SessionDir(s.ID)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("session directory: %v, want it removed", err)
				}
			}
		})
	}
	for from, tos := range next {
		for _, to := range tos {
			if !seen[string(from+" "+to)] {
				t.Errorf("transition from %s to %s has no case, want one", from, to)
			}
		}
	}
}

func TestNoWayThere(t *testing.T) {
	w := newWorker(t, driver{})
	s := put(t, w.Sessions, "aaaa11112222", "o/r", Destroying, Ready, Status{})
	if got, err := w.Next(t.Context(), s); err == nil || got.Phase != Destroying {
		t.Errorf("Next = phase %s, %v, want %s, an error", got.Phase, err, Destroying)
	}
	if _, err := w.advance(t.Context(), s, Ready, nil); err == nil {
		t.Error("advance outside of the table = nil, want an error")
	}
	stale := s
	stale.Phase = Creating
	if _, err := w.advance(t.Context(), stale, Ready, nil); !errors.Is(err, store.ErrStale) {
		t.Errorf("advance of a stale session = %v, want %v", err, store.ErrStale)
	}
}

// A request to destroy a session holds even if its VM ends at the same time.
func TestDestroyWinsOverVMThatEnded(t *testing.T) {
	w := newWorker(t, driver{})
	s := put(t, w.Sessions, "aaaa11112222", "o/r", Ready, Ready, Status{})
	if _, err := w.Sessions.SetDesired(t.Context(), s, Gone); err != nil {
		t.Fatal(err)
	}
	if got, err := w.markPoweredOff(t.Context(), s, errPoweredOff); err != nil || got.Phase != Stopped || got.Desired != Gone {
		t.Fatalf("markPoweredOff = phase %s, desired %s, %v, want %s, %s", got.Phase, got.Desired, err, Stopped, Gone)
	}
}

func TestDestroyRevokesTheTokenFirst(t *testing.T) {
	w := newWorker(t, driver{remove: func(context.Context) error { return fail.New(fail.Host, "busy").WithHint("wait") }})
	s := put(t, w.Sessions, "aaaa11112222", "o/r", Ready, Gone, Status{})
	if _, err := w.Sessions.Store.Update(t.Context(), s.ID, func(row *store.Session) (store.Event, error) {
		row.TokenSHA256 = "0123"
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Next(t.Context(), s); err == nil {
		t.Fatal("Next when deleting the VM fails = nil, want an error")
	}
	got, err := w.Sessions.Get(t.Context(), s.ID)
	if err != nil || got.TokenSHA256 != "" || got.ErrorCode != "HOST" || got.ErrorHint != "wait" {
		t.Fatalf("session = token %q, error code %q, hint %q, %v, want no token, HOST, wait", got.TokenSHA256, got.ErrorCode, got.ErrorHint, err)
	}
}

// A VM that ended or vanished has no address that clients could still use.
func TestEndedVMHasNoEndpoint(t *testing.T) {
	for name, inspect := range map[string]func(context.Context) (vm.Machine, error){
		"ended": func(context.Context) (vm.Machine, error) { return vm.Machine{State: vm.Stopped}, nil },
		"gone":  nil,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorker(t, driver{inspect: inspect})
			s := put(t, w.Sessions, "aaaa11112222", "o/r", Ready, Ready, Status{WasReady: true, Dir: "/d", Endpoint: vm.Endpoint{Addr: "127.0.0.1:22"}})
			got, err := w.Next(t.Context(), s)
			if err != nil || got.Phase == Ready || got.Status.Endpoint.Addr != "" || got.Status.Dir != "/d" {
				t.Fatalf("Next = phase %s, endpoint %q, dir %q, %v, want not %s, no endpoint, /d", got.Phase, got.Status.Endpoint.Addr, got.Status.Dir, err, Ready)
			}
			if _, err := (Connections{Paths: w.Sessions.Config.Paths}).SSHConfig(got); err == nil {
				t.Error("SSHConfig of an ended VM = nil, want an error")
			}
		})
	}
}
