package fleet_test

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
)

// call is an operation on the claim of a task.
type call struct {
	task string
	kind string // "take", "release" or "read"
	by   holder // who takes; of a release, the host that was lost
}

// holder is a host in one incarnation. The zero holder means that no host has the task.
type holder struct{ host, incarnation string }

// outcome is what a call returned.
type outcome struct {
	failed bool   // the call may have had its effect at any time since, or not at all
	took   bool   // of a take
	holder holder // of a read
}

// claims is the model of a task's claim: it is taken only while no host has it, and ends only when its host is lost.
var claims = (&porcupine.NondeterministicModel{
	Init: func() []any { return []any{holder{}} },
	Step: func(state, input, output any) []any {
		has, in, out := state.(holder), input.(call), output.(outcome)
		switch {
		case in.kind == "read":
			if out.holder == has {
				return []any{has}
			}
			return nil
		case in.kind == "release" && in.by.host == has.host:
			return []any{holder{}, has} // a release of an earlier claim has no effect
		case in.kind == "take" && has == (holder{}) && out.failed:
			return []any{has, in.by}
		case in.kind == "take" && has == (holder{}) && out.took:
			return []any{in.by}
		case in.kind == "take" && out.took:
			return nil
		}
		return []any{has}
	},
	Partition: func(history []porcupine.Operation) (parts [][]porcupine.Operation) {
		of := map[string][]porcupine.Operation{}
		for _, op := range history {
			id := op.Input.(call).task
			of[id] = append(of[id], op)
		}
		for _, part := range of {
			parts = append(parts, part)
		}
		return parts
	},
	Equal: func(a, b any) bool { return a == b },
}).ToModel()

// history records calls.
type history struct {
	mu    sync.Mutex
	calls []porcupine.Operation
}

// add records a call that began at a time, and has just returned.
func (h *history) add(began time.Time, in call, out outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	op := porcupine.Operation{Input: in, Call: began.UnixNano(), Output: out, Return: time.Now().UnixNano()}
	if out.failed {
		op.Return = math.MaxInt64
	}
	h.calls = append(h.calls, op)
}

// TestClaimsAreLinearizable lets hosts take tasks at the same time, some calls of which are cut off, while a core
// declares hosts lost. porcupine then looks for an order of all calls in which no claim was taken from another host.
func TestClaimsAreLinearizable(t *testing.T) {
	t.Parallel()
	const hosts, tasks, calls = 4, 8, 40
	c := testcluster.Alone(t)
	opened(t, c)
	st := &starts{all: map[string]int{}, seen: map[string]bool{}}
	core := newHost(t, c, "core", st)
	var known []string
	for i := range tasks {
		known = append(known, fmt.Sprintf("%012x", i+1))
		submit(t, core, known[i], task.RerunAlways)
	}
	var past history
	var working sync.WaitGroup
	var all []*claimer
	for i := range hosts {
		h := &claimer{host: newHost(t, c, fmt.Sprintf("host%d", i), st)}
		all = append(all, h)
		working.Go(func() {
			for range calls {
				h.takes(t.Context(), &past)
				h.reads(t.Context(), &past, known[rand.IntN(tasks)])
			}
		})
	}
	done := make(chan struct{})
	go func() { working.Wait(); close(done) }()
	for n := 0; ; n++ {
		select {
		case <-done:
		case <-time.After(20 * time.Millisecond):
			h := all[n%hosts]
			began := time.Now()
			released, err := core.Lost(t.Context(), h.Name, "")
			if err != nil {
				t.Fatal(err)
			}
			for _, id := range released {
				past.add(began, call{id, "release", holder{h.Name, ""}}, outcome{})
			}
			h.reincarnate(t.Context())
			continue
		}
		break
	}
	kinds := map[string]int{}
	for _, op := range past.calls {
		in, out := op.Input.(call), op.Output.(outcome)
		kinds[fmt.Sprintf("%s failed=%t took=%t", in.kind, out.failed, out.took)]++
	}
	t.Logf("calls: %v", kinds)
	if kinds["take failed=false took=true"] == 0 || kinds["take failed=true took=false"] == 0 || kinds["release failed=false took=false"] == 0 {
		t.Errorf("calls = %v, want takes that succeed and that fail, and releases", kinds)
	}
	if !porcupine.CheckOperations(claims, past.calls) {
		t.Errorf("the history of the claims is not linearizable: %+v", past.calls)
	}
	// The checker would notice a second claim.
	last := past.calls[len(past.calls)-1]
	twice := append(slices.Clone(past.calls), porcupine.Operation{Input: call{"x", "take", holder{"a", "1"}}, Output: outcome{took: true}, Call: last.Return, Return: last.Return + 1},
		porcupine.Operation{Input: call{"x", "take", holder{"b", "1"}}, Output: outcome{took: true}, Call: last.Return, Return: last.Return + 1})
	if porcupine.CheckOperations(claims, twice) {
		t.Error("CheckOperations with a task that two hosts took = true, want false")
	}
}

// claimer is a host that takes tasks and does not run them.
type claimer struct {
	*host
	mu sync.Mutex // the incarnation stays the same during a take
}

func (h *claimer) reincarnate(ctx context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, err := h.Store.Reincarnate(ctx); err != nil {
		h.t.Error(err)
	}
}

// takes takes a task that is offered. Some calls are cut off.
func (h *claimer) takes(ctx context.Context, past *history) {
	o, ok, err := h.Queue.Take(ctx, cluster.Host{Name: h.Name, FreeSlots: 1, FreeMemory: 1 << 40}, 50*time.Millisecond)
	if err != nil || !ok {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	incarnation, err := h.Store.Incarnation(ctx)
	if err != nil {
		h.t.Error(err)
		return
	}
	if rand.IntN(4) == 0 {
		var cut context.CancelFunc
		ctx, cut = context.WithTimeout(ctx, time.Duration(rand.Int64N(int64(3*time.Millisecond))))
		defer cut()
	}
	began := time.Now()
	took, err := h.Take(ctx, o)
	past.add(began, call{o.Task, "take", holder{h.Name, incarnation}}, outcome{took: took, failed: err != nil && !took})
}

// reads reads who has a task.
func (h *claimer) reads(ctx context.Context, past *history, id string) {
	began := time.Now()
	s, err := h.Get(ctx, id)
	if err != nil {
		h.t.Error(err)
		return
	}
	past.add(began, call{id, "read", holder{}}, outcome{holder: holder{s.Host, s.Incarnation}})
}
