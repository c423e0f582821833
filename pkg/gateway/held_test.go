package gateway

import (
	"fmt"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// asks returns a policy that asks about names.
func asks(names ...string) *policy.Policy {
	p := allow()
	p.Asked = allow(names...).Names
	return p
}

// TestHeldConnections checks that connections wait until the policy decides, and that a
// policy that still asks does not cut them.
func TestHeldConnections(t *testing.T) {
	w := newWorld(t, config{policy: asks("yes.example.org:7777", "no.example.org:7777")})
	for _, name := range []string{"yes.example.org", "no.example.org"} {
		w.server(name, 7777, echo)
	}
	type result struct {
		c   net.Conn
		err error
	}
	dial := func(name string) <-chan result {
		done := make(chan result, 1)
		go func() {
			c, err := w.guest.DialName(t.Context(), name, 7777)
			if err != nil {
				done <- result{nil, err}
				return
			}
			done <- result{c, nil}
		}()
		return done
	}
	yes, again, no := dial("yes.example.org"), dial("yes.example.org"), dial("no.example.org")
	held := func() (names []string) {
		for _, h := range w.g.held.list() {
			names = append(names, fmt.Sprintf("%s:%d", h.Name, h.Port))
			if left := h.Until.Sub(h.Since); left != holdTime || h.Rule == "" {
				t.Errorf("held target = %+v, want a rule, and %v until its end", h, holdTime)
			}
		}
		return names
	}
	testenv.WaitFor(t, "two targets that wait", func() bool { return len(held()) == 2 })
	w.g.SetPolicy(asks("yes.example.org:7777", "no.example.org:7777")) // decides nothing
	select {
	case r := <-yes:
		t.Fatalf("dial of a name that waits = %v, want that it waits", r.err)
	case <-time.After(5 * holdPoll):
	}
	p := asks("yes.example.org:7777", "no.example.org:7777")
	p.Names, p.Denied = allow("yes.example.org:7777").Names, allow("no.example.org:7777").Names
	w.g.SetPolicy(p)
	for _, done := range []<-chan result{yes, again} {
		r := <-done
		if r.err != nil {
			t.Fatalf("dial of an approved name = %v, want success", r.err)
		}
		_, _ = io.WriteString(r.c, "HELLO to the server\n")
		expectRead(t, r.c, "HELLO to the server\n")
	}
	if r := <-no; r.err == nil {
		t.Error("dial of a denied name = nil, want an error")
	}
	w.waitDenied("denied by name")
	testenv.WaitFor(t, "no target waits", func() bool { return len(held()) == 0 })
}

// TestHeldTargetsAreBounded checks that a guest can make only so many connections wait.
func TestHeldTargetsAreBounded(t *testing.T) {
	var h heldTargets
	q := func(n int) question { return question{Name: fmt.Sprint(n), Port: 1} }
	for i := range maxAsked {
		if !h.add(q(i), decision{}, time.Now()) {
			t.Fatalf("target %d was refused, want %d targets", i, maxAsked)
		}
	}
	if h.add(q(maxAsked), decision{}, time.Now()) {
		t.Errorf("one target more than %d waits, want that it is refused", maxAsked)
	}
	for i := maxAsked; i < maxHeld; i++ {
		if !h.add(q(0), decision{}, time.Now()) {
			t.Fatalf("connection %d was refused, want %d connections", i, maxHeld)
		}
	}
	if h.add(q(0), decision{}, time.Now()) {
		t.Errorf("one connection more than %d waits, want that it is refused", maxHeld)
	}
	for range maxHeld - maxAsked + 1 {
		h.remove(q(0))
	}
	if !h.add(q(maxAsked), decision{}, time.Now()) || len(h.list()) != maxAsked {
		t.Errorf("targets after one has ended = %v, want a new one among %d", h.list(), maxAsked)
	}
}

// TestHeldTime checks that a connection is refused when nothing decides.
func TestHeldTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Gateway{}
		p := asks("example.org")
		g.policy.Store(p)
		c := &conn{g: g, ctx: t.Context()}
		began := time.Now()
		q := question{Name: "example.org", Port: 443}
		d := c.hold(q, g.policy.decide(q))
		if took := time.Since(began); took != holdTime || d.Resolves() || d.Reason != "was not approved in time" {
			t.Errorf("hold = %+v after %v, want a refusal after %v", d, took, holdTime)
		}
	})
}
