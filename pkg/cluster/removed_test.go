package cluster_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestRemovedCore removes a core that goes on. The others close their connections to it, whichever side
// opened them, and accept no new ones.
func TestRemovedCore(t *testing.T) {
	c := testcluster.Three(t)
	knows := func(name, other string) bool {
		t.Helper()
		peers, err := c.Cores[name].Peers()
		if err != nil {
			t.Fatal(err)
		}
		return peers[other]
	}
	testenv.WaitFor(t, "connections between all cores", func() bool { return knows("a", "c") && knows("b", "c") && knows("a", "b") })
	for i := range c.Members {
		if c.Members[i].Name == "c" {
			c.Members[i].Removed = time.Now()
		}
	}
	for _, name := range []string{"a", "b"} {
		if err := c.Cores[name].Authorize(c.Members, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Witness.Authorize(c.Members, nil); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the end of the removed core's connections", func() bool { return !knows("a", "c") && !knows("b", "c") })
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) { // servers try again each second
		if knows("a", "c") || knows("b", "c") {
			t.Fatal("the removed core is connected again")
		}
	}
	if !knows("a", "b") {
		t.Error("the other cores lost their connection")
	}
}

// TestHostLeavesRemovedCore removes the core that a host is connected to.
func TestHostLeavesRemovedCore(t *testing.T) {
	dir := t.TempDir()
	all := nodesIn(t, dir, "two")
	if err := all["one"].Members.Remove(t.Context(), "one", time.Now()); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the end of the connection", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		h, _ := all["two"].Health(ctx)
		return !h.Connected
	})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if n, err := cluster.Start(ctx, filepath.Join(dir, "two"), slog.New(slog.DiscardHandler)); err == nil {
		n.Close()
		t.Error("a host that was started again accepts a removed core, want it refused")
	}
}
