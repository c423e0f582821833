package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestAppendAll(t *testing.T) {
	s, _ := withSession(t)
	if err := s.AppendAll(t.Context(), "one", []store.Event{event("a", 1), event("b", 2), {Kind: "c"}}); err != nil {
		t.Fatal(err)
	}
	evs, err := s.Events(t.Context(), "one", 1, 10)
	if err != nil || len(evs) != 3 || evs[0].Kind != "a" || evs[2].Seq != 4 || string(evs[2].Data) != `{}` {
		t.Fatalf("Events(one, 1, 10) = %v, %v, want 3 events from a, the last with seq 4 and data {}", evs, err)
	}
	big := store.Event{Kind: "big", Data: make([]byte, 64<<10+1)}
	if err := s.AppendAll(t.Context(), "one", []store.Event{event("d", 1), big}); err == nil || lastSeq(t, s, "one") != 4 {
		t.Fatalf("AppendAll with an oversized event = %v, last event %d, want an error, 4", err, lastSeq(t, s, "one"))
	}
	if err := s.AppendAll(t.Context(), "one", nil); err != nil || lastSeq(t, s, "one") != 4 {
		t.Fatalf("AppendAll of no events = %v, last event %d, want nil, 4", err, lastSeq(t, s, "one"))
	}
}

// numbered returns a store with the events 1 to n of "one", of which the first pruned
// events were removed.
func numbered(t *testing.T, n, pruned int) (*store.Store, string) {
	t.Helper()
	s, path := withSession(t)
	evs := make([]store.Event, n-1) // besides the first
	for i := range evs {
		evs[i] = event("count", i+1)
	}
	if err := s.AppendAll(t.Context(), "one", evs); err != nil {
		t.Fatal(err)
	}
	raw(t, path, fmt.Sprintf(`UPDATE events SET at = 0 WHERE seq <= %d`, pruned))
	if got, _, err := s.PruneEvents(t.Context(), time.UnixMilli(1), never, false); err != nil || got != pruned {
		t.Fatalf("PruneEvents = %d, %v, want %d, nil", got, err, pruned)
	}
	return s, path
}

func never(string) bool { return false }

func TestAnchors(t *testing.T) {
	s, _ := numbered(t, 10, 4)
	if oldest, newest, err := s.EventRange(t.Context(), "one"); err != nil || oldest != 5 || newest != 10 {
		t.Fatalf("EventRange(one) = %d, %d, %v, want 5, 10, nil", oldest, newest, err)
	}
	if oldest, newest, err := s.EventRange(t.Context(), "none"); err != nil || oldest != 0 || newest != 0 {
		t.Fatalf("EventRange(none) = %d, %d, %v, want 0, 0, nil", oldest, newest, err)
	}
	for _, c := range []struct {
		subject string
		after   int64
		want    error
		first   int64 // 0 means none
	}{
		{"one", store.Oldest, nil, 5},
		{"one", 0, store.ErrExpired, 0}, // use Oldest for whatever is left
		{"one", 3, store.ErrExpired, 0},
		{"one", 4, nil, 5},
		{"one", 9, nil, 10},
		{"one", 10, nil, 0},
		{"one", 11, store.ErrFuture, 0},
		{"one", 1 << 62, store.ErrFuture, 0},
		{"none", store.Oldest, nil, 0},
		{"none", 0, nil, 0},
		{"none", 1, store.ErrFuture, 0},
	} {
		check := func(how string, first int64, err error) {
			var anchor *store.AnchorError
			switch {
			case first != c.first || !errors.Is(err, c.want):
				t.Errorf("%s of %s after %d = first event %d, %v, want %d, %v", how, c.subject, c.after, first, err, c.first, c.want)
			case c.want == nil:
			case !errors.As(err, &anchor) || anchor.Subject != c.subject || anchor.After != c.after:
				t.Errorf("%s of %s after %d = %#v, want an error with that subject and number", how, c.subject, c.after, err)
			case c.subject == "one" && (anchor.Oldest != 5 || anchor.Newest != 10):
				t.Errorf("%s of %s after %d = %#v, want events 5 to 10 in the error", how, c.subject, c.after, anchor)
			}
		}
		evs, err := s.Events(t.Context(), c.subject, c.after, 100)
		var first int64
		if len(evs) > 0 {
			first = evs[0].Seq
		}
		check("events", first, err)
		if c.want == nil && c.first == 0 {
			continue // a follower would wait
		}
		for ev, err := range s.Follow(t.Context(), c.subject, c.after) {
			check("follow", ev.Seq, err)
			break
		}
	}
}

// A follower gets an error if it is so slow that its next event was pruned.
func TestPrunedFollower(t *testing.T) {
	s, _ := numbered(t, 600, 0) // more than a follower reads at a time
	seen := int64(0)
	for ev, err := range s.Follow(t.Context(), "one", 0) {
		if err != nil {
			if !errors.Is(err, store.ErrExpired) || seen == 0 || seen == 600 {
				t.Fatalf("Follow ended after event %d with %v, want %v between 1 and 599", seen, err, store.ErrExpired)
			}
			return
		}
		if ev.Seq != seen+1 {
			t.Fatalf("followed event = %d, want %d", ev.Seq, seen+1)
		}
		if seen = ev.Seq; seen == 1 {
			if n, _, err := s.PruneEvents(t.Context(), time.Now().Add(time.Hour), never, false); err != nil || n != 599 {
				t.Fatalf("PruneEvents = %d, %v, want 599, nil", n, err)
			}
		}
	}
}

// A follower's memory does not grow with the number of events.
func TestFollowerIsBounded(t *testing.T) {
	s, _ := withSession(t)
	evs := make([]store.Event, 20)
	for i := range evs {
		evs[i] = store.Event{Kind: "large", Data: fmt.Appendf(nil, "%q", strings.Repeat("x", 60<<10))}
	}
	if err := s.AppendAll(t.Context(), "one", evs); err != nil {
		t.Fatal(err)
	}
	for after := int64(0); after < 21; {
		batch, err := s.Batch(t.Context(), "one", after)
		size := 0
		for _, ev := range batch {
			size += len(ev.Data)
		}
		if err != nil || len(batch) == 0 || batch[0].Seq != after+1 || size > store.FollowBytes {
			t.Fatalf("batch after %d = %d events of %d bytes, %v, want some, from the next, of at most %d bytes", after, len(batch), size, err, store.FollowBytes)
		}
		after = batch[len(batch)-1].Seq
	}
}

const (
	ingestSubjects = 5
	ingestWriters  = 4
)

// ingest acts as one of several writers: it appends n events to each subject, some at
// a time.
func ingest(ctx context.Context, s *store.Store, n int) error {
	for done, part := 0, 0; done < n; part++ {
		var evs []store.Event
		for range min(1+part%20, n-done) {
			evs = append(evs, store.Event{Kind: "in", Data: fmt.Appendf(nil, `{"writer":%d,"n":%d}`, os.Getpid(), done+len(evs))})
		}
		done += len(evs)
		for i := range ingestSubjects {
			if err := s.AppendAll(ctx, fmt.Sprint("t", i), evs); err != nil {
				return err
			}
		}
	}
	return nil
}

// 50 followers read 10,000 events that several processes write. Some are so slow that
// they continue only when all the others are done, and still miss nothing.
func TestManyFollowers(t *testing.T) {
	const followers, each = 50, 500
	s, path := newStore(t)
	for i := range ingestSubjects {
		mustTask(t, s, task(fmt.Sprint("t", i)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var fast, all sync.WaitGroup
	othersDone := make(chan struct{})
	for i := range followers {
		slow := i%10 < 2
		if !slow {
			fast.Add(1)
		}
		all.Go(func() {
			if !slow {
				defer fast.Done()
			}
			last, of := int64(1), map[int]int{}
			for ev, err := range s.Follow(ctx, fmt.Sprint("t", i%ingestSubjects), 1) {
				if err != nil {
					t.Errorf("follower %d after event %d = %v, want nil", i, last, err)
					return
				}
				var data struct{ Writer, N int }
				if err := json.Unmarshal(ev.Data, &data); err != nil || ev.Seq != last+1 || data.N != of[data.Writer] {
					t.Errorf("follower %d: event = %d %s, %v, want seq %d and number %d of its writer", i, ev.Seq, ev.Data, err, last+1, of[data.Writer])
					return
				}
				last = ev.Seq
				of[data.Writer]++
				if slow && last == 2 {
					<-othersDone
				}
				if last == 1+each*ingestWriters {
					return
				}
			}
		})
	}
	var ps []*process
	for range ingestWriters {
		ps = append(ps, spawn(t, fmt.Sprint("ingest ", each), path))
	}
	for _, p := range ps {
		p.shoot(t)
	}
	for _, p := range ps {
		if out, err := p.finish(); err != nil {
			t.Errorf("child: %v, output %q", err, out)
			cancel()
		}
	}
	fast.Wait()
	close(othersDone)
	all.Wait()
	if n, running := s.Watched(); n != 0 || running {
		t.Errorf("Watched = %d, %t, want 0, false", n, running)
	}
}

// However many followers wait, one watcher runs.
func TestOneWatcher(t *testing.T) {
	s, _ := numbered(t, 3, 0)
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	for i := range 20 {
		wait.Go(func() {
			for _, err := range s.Follow(ctx, fmt.Sprint("t", i%4), 0) {
				if !errors.Is(err, context.Canceled) {
					t.Errorf("Follow with a cancelled context = %v, want %v", err, context.Canceled)
				}
			}
		})
	}
	for {
		if n, running := s.Watched(); n == 4 && running {
			break
		}
		time.Sleep(time.Millisecond)
	}
	cancel()
	wait.Wait()
	if n, running := s.Watched(); n != 0 || running {
		t.Errorf("Watched = %d, %t, want 0, false", n, running)
	}
	// Repeat with a follower that is woken for every single event: each event is
	// written after the previous one was seen.
	ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	seen := make(chan int64)
	wait.Go(func() {
		for ev, err := range s.Follow(ctx, "one", 2) {
			if err != nil {
				t.Error(err)
				close(seen)
				return
			}
			seen <- ev.Seq
			if ev.Seq == 20 {
				return
			}
		}
	})
	for want := int64(3); ; want++ {
		if got := <-seen; got != want {
			t.Fatalf("events of the follower = %v, want %v", got, want)
		}
		if want == 20 {
			break
		}
		if err := s.Append(t.Context(), "one", event("more", 0)); err != nil {
			t.Fatal(err)
		}
	}
	wait.Wait()
}
