package cluster_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestRemovedCore removes a core that goes on. The others close their connections to it, whichever side
// opened them, and accept no new ones.
func TestRemovedCore(t *testing.T) {
	t.Parallel()
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
	testenv.WaitFor(t, "the end of the removed core's connections", func() bool {
		for _, core := range []*cluster.Core{c.Cores["a"], c.Cores["b"], c.Witness} { // a node repeats it
			if err := core.Authorize(c.Members, nil); err != nil {
				t.Fatal(err)
			}
		}
		return !knows("a", "c") && !knows("b", "c")
	})
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) { // servers try again each second
		if knows("a", "c") || knows("b", "c") {
			t.Fatal("the removed core is connected again")
		}
	}
	if !knows("a", "b") {
		t.Error("the other cores lost their connection")
	}
}

// TestRemovedWhileConnecting removes a core that has begun a connection, and completes it later. The server
// learns only then which connection it is, and must end it all the same.
func TestRemovedWhileConnecting(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	core := c.Cores["a"]
	keys, is := testcluster.NewMember(t, c.Authority, "slow", cluster.CoreOf)
	if err := core.Authorize(append(slices.Clone(c.Members), is), nil); err != nil {
		t.Fatal(err)
	}
	settings, err := keys.TLS([]byte(is.Certificate), c.Authority.Certificate(), func(cluster.Identity) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	conn, err := (&tls.Dialer{Config: settings}).DialContext(t.Context(), "tcp", core.Routes())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if greeting, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.HasPrefix(greeting, "INFO ") {
		t.Fatalf("greeting of the server = %q, %v, want INFO", greeting, err)
	}
	if err := core.Authorize(c.Members, nil); err != nil {
		t.Fatal(err)
	}
	connected := func() bool {
		peers, err := core.Peers()
		return err != nil || peers["slow"]
	}
	name := c.Options["a"].Cluster
	if _, err := fmt.Fprintf(conn, "CONNECT {\"name\":\"slow\",\"cluster\":%q}\r\nINFO {\"server_id\":\"slow\",\"server_name\":\"slow\",\"cluster\":%q}\r\n", name, name); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the connection", connected)
	if err := core.Authorize(c.Members, nil); err != nil { // a node repeats it
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); connected(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the removed core is connected after a minute, want its connection ended")
		}
	}
}

// TestHostLeavesRemovedCore removes the core that a host is connected to.
func TestHostLeavesRemovedCore(t *testing.T) {
	t.Parallel()
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
