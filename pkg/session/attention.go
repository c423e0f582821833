package session

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// The keeper of a ready session watches its guest. The state of the most urgent agent
// goes into the session's row, for users who wait for it; the whole observation goes
// into a file, for previews. All of it is the guest's claim, and arrives as fast as
// the guest likes.

const (
	watchRetryMin = time.Second
	watchRetryMax = 30 * time.Second
)

// statusWatcher processes the observations that a guest sends.
type statusWatcher struct {
	w          *Worker
	id         string
	last       []byte        // the file's last content
	pace       *rate.Limiter // limits all work done for observations
	eventLimit *rate.Limiter // limits events, which stay in the store
	questions  questionRelay
}

// watchGuest watches the guest until ctx ends. conn blocks until a connection exists; settings
// returns the settings as they are now.
func (w *Worker) watchGuest(ctx context.Context, s Session, settings func() *config.Config, conn func(context.Context) (*ssh.Client, error)) {
	l := statusWatcher{
		w: w, id: s.ID, questions: questionRelay{w: w, id: s.ID, settings: settings},
		pace: rate.NewLimiter(rate.Every(time.Second), 10), eventLimit: rate.NewLimiter(rate.Every(30*time.Second), 100),
	}
	again(ctx, w.Log, "failed to watch guest", watchRetryMin, watchRetryMax, func(ctx context.Context) error {
		return l.readObservations(ctx, s, conn)
	})
}

// readObservations processes one stream of observations until it ends.
func (l *statusWatcher) readObservations(ctx context.Context, s Session, conn func(context.Context) (*ssh.Client, error)) error {
	client, err := conn(ctx)
	if err != nil {
		return err
	}
	g := s.Guest(client)
	if err := l.w.guestSetup().redactSecretsOf(ctx, s, g); err != nil { // the screen may show them
		return err
	}
	// Only the latest observation counts, however fast they arrive.
	news, answers := make(chan guestproto.Observation, 1), make(chan guestproto.Answer)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return l.questions.deliver(ctx, answers) })
	group.Go(func() error {
		defer close(news)
		return g.Watch(ctx, s.Status.Dir, s.Status.Base.Commit, answers, func(seen guestproto.Observation) error {
			select {
			case <-news:
			default:
			}
			news <- seen
			return nil
		})
	})
	group.Go(func() error {
		for seen := range news {
			if err := l.pace.Wait(ctx); err != nil {
				return err
			}
			s, err := l.w.Sessions.Get(ctx, l.id)
			if err == nil {
				err = l.w.guestSetup().redactSecretsOf(ctx, s, g) // they may have been refreshed
			}
			if err == nil {
				err = l.questions.sync(ctx, s, seen)
			}
			if err == nil {
				err = l.recordObservation(ctx, s, seen)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	return group.Wait()
}

// recordObservation stores one observation.
func (l *statusWatcher) recordObservation(ctx context.Context, s Session, g guestproto.Observation) error {
	for _, q := range g.Questions { // of scripts; an agent that asks is blocked anyway
		if first, _, _ := strings.Cut(q.Text, "\n"); q.Agent == "" {
			g.Agents = append(g.Agents, guestproto.Agent{Name: "script", State: guestproto.AgentBlocked, On: "question: " + guestproto.CleanLines(first, maxEventText)})
		}
	}
	for i := range g.Agents {
		g.Agents[i].Name, g.Agents[i].On = l.w.text(g.Agents[i].Name), l.w.text(g.Agents[i].On)
	}
	g.Window, g.Screen = l.w.text(g.Window), redactLines(l.w, g.Screen)
	g.Questions, g.Taken = nil, nil // they are in the store
	text, err := json.Marshal(g)
	if err != nil {
		return err
	}
	if !bytes.Equal(text, l.last) {
		// A flush is not worth its cost: the next observation replaces this one.
		if err := atomicfile.WriteUnflushed(l.w.Sessions.Config.Paths.Observation(l.id), text, 0o600); err != nil {
			return fail.New(fail.Host, "write guest observation: %w", err)
		}
		l.last = text
	}
	now := attention(g)
	if now.same(s.Status.Attention) {
		return nil
	}
	note := func(f *Status) { f.Attention = now }
	if l.eventLimit.Allow() {
		s, err = l.w.Sessions.appendFromGuest(ctx, l.id, store.NewEvent(EventAttention, now), note)
	} else {
		s, err = l.w.Sessions.updateStatus(ctx, l.id, store.Event{}, note)
	}
	if err != nil {
		return err
	}
	if l.w.Attention != nil {
		l.w.Attention(ctx, s)
	}
	return nil
}

// redactLines returns lines of a guest that may be stored. A program that wraps lines itself
// may have split a secret over two of them; the secret is then on no single line, so
// redactLines also checks all lines joined.
func redactLines(w *Worker, lines []string) []string {
	var whole strings.Builder
	kept := make([]string, len(lines))
	for i, line := range lines {
		kept[i] = w.text(line)
		whole.WriteString(strings.TrimSpace(kept[i]))
	}
	if text := whole.String(); w.Redact.Redact(text) != text {
		return []string{"[redacted]"}
	}
	return kept
}

// attention returns the state of the most urgent agent, or nil when no agent runs.
func attention(g guestproto.Observation) *Attention {
	if len(g.Agents) == 0 {
		return nil
	}
	first := g.Agents[0]
	for _, a := range g.Agents[1:] {
		if a.State.Urgency() < first.State.Urgency() {
			first = a
		}
	}
	return &Attention{State: first.State, Agent: first.Name, On: first.On, Since: time.Now().UTC()}
}

func (a *Attention) same(b *Attention) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.State == b.State && a.Agent == b.Agent && a.On == b.On
}

// NeedsAttention reports whether an agent waits for a person: it asks something, it failed, or
// it finished since the user last attached.
func (s Session) NeedsAttention() bool { return s.View().NeedsAttention() }

// NeedsAttention reports the same as for a Session.
func (v View) NeedsAttention() bool {
	a := v.Attention
	if v.State != Ready || a == nil {
		return false
	}
	switch a.State {
	case guestproto.AgentBlocked, guestproto.AgentError:
		return true
	case guestproto.AgentDone:
		return a.Since.After(v.VisitedAt)
	}
	return false
}
