package session

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
)

// TestSubtasksShareTheBudget checks what the gateway of a subtask's session counts: its own use, and
// that of every tree that it belongs to, by the budgets as they are now.
func TestSubtasksShareTheBudget(t *testing.T) {
	m := newManager(t)
	net := Net{Sessions: m}
	root := put(t, m, "aaaaaaaaaaaa", "acme/root", Stopped, Stopped, Status{Budget: config.Budget{Session: 5e9}})
	mid := put(t, m, "bbbbbbbbbbbb", "acme/mid", Stopped, Stopped, Status{})
	mid.Task, mid.Spec.Within = "b0b0b0b0b0b0", &Bounds{Tree: root.Tree(), Sessions: []string{root.ID}}
	bounds, err := net.Bounds(t.Context(), root)
	if err != nil || bounds.Tree != "aaaaaaaaaaaa/" {
		t.Fatalf("Bounds(root) = %+v, %v, want the tree aaaaaaaaaaaa/", bounds, err)
	}
	leaf := put(t, m, "cccccccccccc", "acme/leaf", Stopped, Stopped, Status{Budget: config.Budget{Tokens: 7}})
	leaf.Task, leaf.Spec.Within = "c0c0c0c0c0c0", &Bounds{Tree: mid.Tree(), Sessions: []string{root.ID, mid.ID}}
	metering := func() (got gateway.Metering) {
		t.Helper()
		g, err := net.gateway(t.Context(), leaf)
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(g.Dir, "metering.json"))
		if err == nil {
			err = json.Unmarshal(text, &got)
		}
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	got := metering()
	if want := "aaaaaaaaaaaa/b0b0b0b0b0b0/c0c0c0c0c0c0/"; got.Tree != want || got.Budget.Tokens != 7 {
		t.Errorf("metering = tree %s, %+v, want %s with 7 tokens", got.Tree, got.Budget, want)
	}
	want := []gateway.Shared{{Tree: "aaaaaaaaaaaa/", Budget: gateway.Budget{Session: 5e9}}}
	if diff := cmp.Diff(want, got.Shared); diff != "" {
		t.Errorf("shared budgets mismatch (-want +got):\n%s", diff)
	}
	root.Spec.Enforced = true // as the row of a session with a gateway says
	if _, err := net.SetBudget(t.Context(), root, config.Budget{Session: 2e9}); err != nil {
		t.Fatal(err)
	}
	if got := metering().Shared; len(got) != 1 || got[0].Budget.Session != 2e9 {
		t.Errorf("shared budgets after a change = %+v, want the new one", got)
	}
}
