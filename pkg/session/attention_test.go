package session

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

func newLookout(t *testing.T) (*statusWatcher, Session, *[]Attention) {
	t.Helper()
	w := newWorker(t, driver{})
	w.Redact = secret.NewRedactor(secret.NewValue("sw0rdfish-0123456789"))
	s := put(t, w.Sessions, "0a1b2c3d4e5f", "acme/app", Ready, Ready, Status{})
	if err := os.MkdirAll(w.Sessions.Config.Paths.SessionDir(s.ID), 0o700); err != nil {
		t.Fatal(err)
	}
	var told []Attention
	w.Attention = func(_ context.Context, s Session) {
		if s.Status.Attention != nil {
			told = append(told, *s.Status.Attention)
		}
	}
	return &statusWatcher{w: w, id: s.ID, pace: rate.NewLimiter(rate.Inf, 1), eventLimit: rate.NewLimiter(0, 3)}, s, &told
}

func agents(of ...guestproto.Agent) guestproto.Observation {
	return guestproto.Observation{Version: guestproto.Version, Agents: of}
}

func TestTheMostUrgentAgentCounts(t *testing.T) {
	l, s, told := newLookout(t)
	for _, g := range []guestproto.Observation{
		agents(guestproto.Agent{Name: "claude", State: guestproto.AgentWorking}),
		agents(guestproto.Agent{Name: "claude", State: guestproto.AgentWorking}, guestproto.Agent{Name: "codex", State: guestproto.AgentBlocked, On: "a question"}),
		agents(guestproto.Agent{Name: "codex", State: guestproto.AgentBlocked, On: "a question"}), // no change
		agents(guestproto.Agent{Name: "codex", State: guestproto.AgentBlocked, On: "another"}),
		agents(),
		agents(guestproto.Agent{Name: "claude", State: guestproto.AgentDone}),
	} {
		if err := record(t, l, g); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for _, a := range *told {
		got = append(got, strings.Join([]string{a.Agent, string(a.State), a.On}, " "))
	}
	want := "claude working |codex blocked a question|codex blocked another|claude done "
	if strings.Join(got, "|") != want {
		t.Errorf("reports = %q, want %q", got, want)
	}
	now, err := l.w.Sessions.Get(t.Context(), s.ID)
	if err != nil || !now.NeedsAttention() || now.View().Attention.State != guestproto.AgentDone {
		t.Fatalf("attention of a done agent = %+v, %v, want %s, and the need for attention", now.Status.Attention, err, guestproto.AgentDone)
	}
	if err := l.w.Sessions.MarkVisited(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	if now, err = l.w.Sessions.Get(t.Context(), s.ID); err != nil || now.NeedsAttention() {
		t.Errorf("status of a done agent after a visit = %+v, %v, want no need for attention", now.Status, err)
	}
	evs, err := l.w.Sessions.Store.Events(t.Context(), s.ID, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	kept := 0
	for _, ev := range evs {
		if ev.Kind == EventAttention {
			kept++
		}
	}
	if kept != 3 { // as many as the limiter allows
		t.Errorf("attention events stored = %d, want 3, the limiter's burst", kept)
	}
}

// An observation is stored on disk, so its screen must not contain a secret, whole or
// split over two lines.
func TestObservationsHoldNoSecret(t *testing.T) {
	l, s, told := newLookout(t)
	g := agents(guestproto.Agent{Name: "claude", State: guestproto.AgentBlocked, On: "permission: Bash: echo sw0rdfish-0123456789"})
	g.Window, g.Screen = "claude", []string{"$ env", "TOKEN=sw0rdfish-0123456789", "\x1b[31mred\x1b[0m"}
	if err := record(t, l, g); err != nil {
		t.Fatal(err)
	}
	got, at, err := Observation(l.w.Sessions.Config.Paths, s)
	if err != nil || time.Since(at) > time.Hour {
		t.Fatalf("Observation = %v ago, %v, want at most an hour ago", time.Since(at), err)
	}
	text, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text)+(*told)[0].On, "sw0rdfish") {
		t.Errorf("observation = %s, attention %+v, want no secret", text, *told)
	}
	if len(got.Screen) != 3 || strings.Contains(got.Screen[2], "\x1b") {
		t.Errorf("screen = %q, want 3 lines without escapes", got.Screen)
	}
	g.Screen = []string{"  TOKEN=sw0rdfish-  ", "  0123456789 and more"}
	if err := record(t, l, g); err != nil {
		t.Fatal(err)
	}
	if got, _, err = Observation(l.w.Sessions.Config.Paths, s); err != nil || strings.Join(got.Screen, "") != "[redacted]" {
		t.Errorf("screen with a secret on two lines = %q, %v, want [redacted]", got.Screen, err)
	}
}

func TestObservationOfNothing(t *testing.T) {
	l, s, _ := newLookout(t)
	if _, _, err := Observation(l.w.Sessions.Config.Paths, s); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("Observation of a session never observed = %v, want %v", err, fail.NotFound)
	}
	if err := os.WriteFile(l.w.Sessions.Config.Paths.Observation(s.ID), nil, 0o600); err != nil { // as after a power cut
		t.Fatal(err)
	}
	if _, _, err := Observation(l.w.Sessions.Config.Paths, s); err == nil {
		t.Error("Observation of an empty file = nil, want an error")
	}
}

// The total size of the events that a guest can add to its session is limited.
func TestEventsOfAGuestInAll(t *testing.T) {
	l, s, told := newLookout(t)
	l.eventLimit = rate.NewLimiter(rate.Inf, 1)
	_, err := l.w.Sessions.Store.Update(t.Context(), s.ID, func(row *store.Session) (store.Event, error) {
		row.Status = fmt.Appendf(nil, `{"events": {"bytes": %d}}`, 64<<20-1000)
		return store.Event{}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		if err := record(t, l, agents(guestproto.Agent{Name: "claude", State: guestproto.AgentBlocked, On: fmt.Sprintf("question %d", i)})); err != nil {
			t.Fatal(err)
		}
	}
	err = l.w.step(t.Context(), s.ID, "boot", func(_ context.Context, p vm.Progress) error {
		p("words of the guest")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	evs, err := l.w.Sessions.Store.Events(t.Context(), s.ID, 0, 1000)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, ev := range evs {
		count[ev.Kind]++
	}
	if count[EventAttention] == 0 || count[EventAttention] > 10 || count[EventWarning] != 1 {
		t.Errorf("events stored = %v, want 1 to 10 %s, 1 %s", count, EventAttention, EventWarning)
	}
	if count[EventStep] != 2 { // its start and its end, which the host causes
		t.Errorf("%s events stored = %d, want 2", EventStep, count[EventStep])
	}
	if now, err := l.w.Sessions.Get(t.Context(), s.ID); err != nil || now.Status.Attention.On != "question 49" || len(*told) != 50 {
		t.Errorf("last attention = %+v, %v, %d reported, want question 49, 50", now.Status.Attention, err, len(*told))
	}
}

// record stores an observation of the session as it is now.
func record(t *testing.T, l *statusWatcher, seen guestproto.Observation) error {
	t.Helper()
	s, err := l.w.Sessions.Get(t.Context(), l.id)
	if err != nil {
		return err
	}
	return l.recordObservation(t.Context(), s, seen)
}
