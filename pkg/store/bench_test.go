package store_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// timed appends n events to "one" and prints how many microseconds each took.
func timed(ctx context.Context, s *store.Store, n int) error {
	for i := range n {
		began := time.Now()
		if err := s.Append(ctx, "one", event("timed", i)); err != nil {
			return err
		}
		fmt.Println("us", time.Since(began).Microseconds())
	}
	return nil
}

func report(b *testing.B, all []float64, what string) {
	slices.Sort(all)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(all[len(all)/2], "p50-"+what)
	b.ReportMetric(all[len(all)*95/100], "p95-"+what)
	b.ReportMetric(all[len(all)-1], "max-"+what)
}

func BenchmarkAppend(b *testing.B) {
	for _, processes := range []int{1, 8} {
		b.Run(fmt.Sprint("processes=", processes), func(b *testing.B) {
			_, path := withSession(b)
			var ps []*process
			for range processes {
				ps = append(ps, spawn(b, fmt.Sprint("timed ", 1+b.N/processes), path))
			}
			for _, p := range ps {
				p.shoot(b)
			}
			var all []float64
			for _, p := range ps {
				out, err := p.finish()
				if err != nil {
					b.Fatalf("child: %v, output %q", err, out)
				}
				for _, line := range out {
					us, err := strconv.Atoi(strings.TrimPrefix(line, "us "))
					if err != nil {
						b.Fatalf("line of the child = %q, want \"us NUMBER\"", line)
					}
					all = append(all, float64(us))
				}
			}
			report(b, all, "µs")
		})
	}
}

// One batch of 20 is what a stream delivers at a time.
func BenchmarkIngest(b *testing.B) {
	s, _ := withSession(b)
	evs := make([]store.Event, 20)
	for i := range evs {
		evs[i] = store.Event{Kind: "tool", Data: fmt.Appendf(nil, "%q", strings.Repeat("x", 300))}
	}
	var all []float64
	for b.Loop() {
		began := time.Now()
		if err := s.AppendAll(b.Context(), "one", evs); err != nil {
			b.Fatal(err)
		}
		all = append(all, float64(time.Since(began).Microseconds()))
	}
	report(b, all, "µs")
}

func BenchmarkSubmit(b *testing.B) {
	s, _ := tenThousand(b)
	var all []float64
	for b.Loop() {
		began := time.Now()
		if _, err := s.CreateTask(b.Context(), task(fmt.Sprint("t", len(all))), nil, phase("", "PENDING")); err != nil {
			b.Fatal(err)
		}
		all = append(all, float64(time.Since(began).Microseconds()))
	}
	report(b, all, "µs")
}

func BenchmarkList(b *testing.B) {
	s, _ := tenThousand(b)
	for name, f := range map[string]store.TaskFilter{
		"newest": {}, "phases": {Phases: []string{"PENDING", "RUNNING", "COMPLETED"}}, "label": {Label: store.Label{Key: "team", Value: "team0"}},
	} {
		f.Limit = 50
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := s.Tasks(b.Context(), f); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkFollow measures from another process's commit to the follower receiving
// the event.
func BenchmarkFollow(b *testing.B) {
	s, path := withSession(b)
	other := reopen(b, path)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	seen := make(chan time.Time)
	go func() {
		defer close(seen)
		for _, err := range s.Follow(ctx, "one", 1) {
			if err != nil {
				return
			}
			seen <- time.Now()
		}
	}()
	var all []float64
	for b.Loop() {
		if err := other.Append(b.Context(), "one", event("x", 0)); err != nil {
			b.Fatal(err)
		}
		written := time.Now()
		at := <-seen
		all = append(all, max(0, float64(at.Sub(written).Microseconds())/1000))
	}
	cancel()
	for range seen {
	}
	report(b, all, "ms")
}
