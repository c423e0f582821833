package app

import (
	"bytes"
	"context"
	"iter"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// finished is a host with one session, whose work ended before anybody followed it.
type finished struct {
	ops.Host
	session session.View
	events  []store.Event
}

func (h finished) Perform(_ context.Context, c ops.Call) error {
	switch r := c.Result.(type) {
	case *ops.Progress:
		*r = ops.Progress{Session: h.session, After: store.Oldest, Newest: int64(len(h.events))}
	case *session.View:
		*r = h.session
	}
	return nil
}

func (h finished) Events(context.Context, ops.Subject, int64, bool) iter.Seq2[store.Event, error] {
	return func(yield func(store.Event, error) bool) {
		for _, ev := range h.events {
			if !yield(ev, nil) {
				return
			}
		}
	}
}

// The warnings of a stop are shown, even if it ends before the command follows its events.
func TestFollowFinishedWork(t *testing.T) {
	was := session.View{ID: "aaaa11112222", State: session.Ready, Desired: session.Stopped}
	now := was
	now.State = session.Stopped
	h := finished{session: now, events: []store.Event{
		store.NewEvent(session.EventPhase, session.PhaseChange{From: session.Ready, To: session.Ready, Desired: session.Stopped}),
		store.NewEvent(session.EventPhase, session.PhaseChange{From: session.Ready, To: session.Stopping, Desired: session.Stopped}),
		store.NewEvent(session.EventWarning, lifecycle.Warning{Message: "home not saved"}),
		store.NewEvent(session.EventPhase, session.PhaseChange{From: session.Stopping, To: session.Stopped, Desired: session.Stopped}),
		store.NewEvent(session.EventWarning, lifecycle.Warning{Message: "of the next start"}),
	}}
	for _, c := range []struct {
		seen  session.View
		shown []string
	}{{was, []string{"warning: home not saved"}}, {now, nil}} {
		var out bytes.Buffer
		a := &App{Con: console.New(&out, &out, func(string) string { return "" })}
		s, err := Follow(t.Context(), a, h, c.seen, session.Stopped)
		got := strings.FieldsFunc(out.String(), func(r rune) bool { return r == '\n' })
		if err != nil || s.State != session.Stopped || !slices.Equal(got, c.shown) {
			t.Errorf("follow of a session that was %s = %s, %v, shows %q, want stopped, nil, %q", c.seen.State, s.State, err, got, c.shown)
		}
	}
}
