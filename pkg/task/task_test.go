package task

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Every phase except the final ones leads to an end, and only to known phases.
func TestTransitions(t *testing.T) {
	for from, tos := range next {
		for _, to := range tos {
			if !slices.Contains(Phases(), to) {
				t.Errorf("transition from %s to %s, want a known phase", from, to)
			}
		}
		if from.Over() && from != FailedPreserved {
			t.Errorf("transitions from the final phase %s = %v, want none", from, tos)
		}
	}
	for _, p := range Phases() {
		if len(next[p]) == 0 != AtRest(p) && p != Pending {
			t.Errorf("AtRest(%s) = %t with transitions to %v, want it at rest only without any", p, AtRest(p), next[p])
		}
		if p.Over() && p.Active() {
			t.Errorf("%s is over and active, want at most one", p)
		}
	}
	for _, p := range []Phase{Pending, Staging, Provisioning, Ready, Completing} {
		if !next.Allow(p, Cancelled) {
			t.Errorf("next.Allow(%s, %s) = false, want true", p, Cancelled)
		}
	}
}

func TestExitStatus(t *testing.T) {
	code := 3
	for _, c := range []struct {
		phase Phase
		o     *Outcome
		want  fail.Code
	}{
		{Completed, &Outcome{Result: Success}, 0},
		{Failed, &Outcome{Result: Failure, ExitCode: &code}, fail.Failure},
		{FailedPreserved, &Outcome{Result: Failure, ExitCode: &code}, fail.Preserved},
		{Failed, &Outcome{Result: TimedOut}, fail.Timeout},
		{FailedPreserved, &Outcome{Result: TimedOut}, fail.Timeout},
		{Failed, &Outcome{Result: Hung}, fail.Failure},
		{Cancelled, &Outcome{Result: CancelledByUser}, fail.Failure},
	} {
		if got := c.o.ExitStatus(c.phase); got != c.want {
			t.Errorf("ExitStatus(%s) with result %s = %d, want %d", c.phase, c.o.Result, got, c.want)
		}
	}
}

// events.jsonl is complete after being cut anywhere.
func TestEventsFileAfterACut(t *testing.T) {
	var all []store.Event
	for i := range 40 {
		all = append(all, store.Event{Subject: "aaaabbbbcccc", Seq: int64(i + 1), Kind: "tool", Data: json.RawMessage(`{"n":` + strings.Repeat("1", i+1) + `}`)})
	}
	have := 0
	after := func(seq int64, limit int) ([]store.Event, error) {
		return all[min(int(seq), have):min(have, int(seq)+7)], nil
	}
	dir := Dir(t.TempDir())
	if err := dir.create(nil, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(string(dir), "outbox", "progress", "events.jsonl")
	check := func() []byte {
		t.Helper()
		if err := dir.appendEvents(after); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
		if len(lines) != have {
			t.Fatalf("lines of the events file = %d, want %d", len(lines), have)
		}
		for i, line := range lines {
			var ev store.Event
			if err := json.Unmarshal([]byte(line), &ev); err != nil || ev.Seq != int64(i+1) {
				t.Fatalf("line %d = %q, %v, want seq %d", i, line, err, i+1)
			}
		}
		return text
	}
	have = 3
	check()
	have = 20
	whole := check()
	have = 21
	for cut := range len(whole) {
		if err := os.WriteFile(file, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		check()
	}
	// A full disk lost a line in the middle of the file, so none of it is trusted.
	if err := os.WriteFile(file, []byte("{\"seq\":5}\n\x00\x00\x00\x00\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	have = 40
	check()
}
