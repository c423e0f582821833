package cluster_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// serve starts a node and its part in the cluster. stop ends both.
func serve(t *testing.T, dir string) (n *cluster.Node, stop func()) {
	t.Helper()
	starting, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	n, err := cluster.Start(starting, dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- n.Serve(ctx) }()
	stop = sync.OnceFunc(func() {
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		n.Close()
	})
	t.Cleanup(stop)
	return n, stop
}

// hello sends a word through a tunnel from one host to another.
func hello(t *testing.T, from, to *cluster.Node) {
	t.Helper()
	testenv.WaitFor(t, "a tunnel", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		c, err := from.Tunnels.Dial(ctx, to.State.Name)
		if err != nil {
			return false
		}
		defer c.Close()
		_, err = io.WriteString(c, "hello")
		return err == nil
	})
	c, err := to.Tunnels.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got := make([]byte, 5)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
		t.Errorf("through the tunnel = %q, %v, want hello", got, err)
	}
}

// TestNodes founds a cluster, lets a host join, restarts both and removes the host.
func TestNodes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, second := filepath.Join(dir, "first"), filepath.Join(dir, "second")
	if _, err := cluster.Start(t.Context(), first, slog.New(slog.DiscardHandler)); !errors.Is(err, cluster.ErrNone) {
		t.Errorf("Start without a cluster = %v, want %v", err, cluster.ErrNone)
	}
	if _, err := cluster.Found(first, "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.Found(first, "team", "one", "", "", "", nil); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Found again = %v, want a conflict", err)
	}
	one, stopOne := serve(t, first)
	token, err := one.Invite(t.Context(), cluster.Member, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the admission", func() bool { // the core hears of the token a moment later
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := cluster.Join(ctx, second, token, cluster.Applicant{Name: "two"}, nil)
		return err == nil
	})
	if _, err := cluster.Join(t.Context(), second, token, cluster.Applicant{Name: "two"}, nil); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Join again = %v, want a conflict", err)
	}
	two, stopTwo := serve(t, second)
	hello(t, one, two)
	stopOne()
	one, _ = serve(t, first)
	hello(t, one, two)
	stopTwo()
	two, _ = serve(t, second)
	hello(t, one, two)
	if two.State.Role != cluster.Member || two.State.Cluster != "team" {
		t.Errorf("state of the second host = %+v, want a member of team", two.State)
	}
	all, err := two.Members.All(t.Context())
	if err != nil || len(all) != 2 {
		t.Errorf("members = %+v, %v, want two", all, err)
	}

	if err := one.Members.Remove(t.Context(), "two", time.Now()); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the end of the removed host's access", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := two.Members.All(ctx)
		return err != nil
	})
	if err := one.Allow(cluster.Identity{Name: "two", Role: cluster.Member, Nkey: all[1].Nkey}); err == nil {
		t.Error("the removed host is allowed, want it refused")
	}
}

// TestGrow lets two cores join the first, which then is lost.
func TestGrow(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if _, err := cluster.Found(at("one"), "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	one, stopOne := serve(t, at("one"))
	seq, err := one.Tasks.Append(t.Context(), "000000000001", cluster.Entry{Kind: cluster.Submitted}, 0)
	if err != nil {
		t.Fatal(err)
	}
	var others []*cluster.Node
	for _, name := range []string{"two", "three"} {
		token, err := one.Invite(t.Context(), cluster.CoreOf, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := cluster.Join(t.Context(), at(name), token, cluster.Applicant{Name: name}, nil); fail.CodeOf(err) != fail.Usage {
			t.Errorf("Join of a core without addresses = %v, want a usage error", err)
		}
		is := cluster.Applicant{Name: name, Addr: testcluster.FreeAddr(t), Route: testcluster.FreeAddr(t)}
		testenv.WaitFor(t, "the admission of "+name, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := cluster.Join(ctx, at(name), token, is, nil)
			return err == nil
		})
		other, _ := serve(t, at(name))
		others = append(others, other)
	}
	testenv.WaitFor(t, "copies on all cores", func() bool {
		s, err := cluster.LoadState(at("one"))
		return err == nil && s.Witness == "" && !s.Retired
	})
	healthy := func(n *cluster.Node, when string, current int) {
		t.Helper()
		testenv.WaitFor(t, "the state "+when, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			h, err := n.Health(ctx)
			return err == nil && h.Newest == seq && h.Core != nil && h.Core.Leader != "" && h.Core.Current && h.Core.Store > 0 && h.Core.StoreLimit > h.Core.Store &&
				len(h.Core.Streams) == 7 && !slices.ContainsFunc(h.Core.Streams, func(s cluster.StreamHealth) bool { return s.Copies != 3 || s.Current != current })
		})
	}
	healthy(others[0], "with three cores", 3)
	stopOne()
	healthy(others[0], "with two of three cores", 2)
	testenv.WaitFor(t, "an entry without the first core", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		last, err := others[0].Tasks.Last(ctx, "000000000001")
		if err != nil || last.Seq != seq {
			return false
		}
		_, err = others[1].Tasks.Append(ctx, "000000000001", cluster.Entry{Kind: cluster.Requested}, seq)
		return err == nil
	})
	one, _ = serve(t, at("one"))
	testenv.WaitFor(t, "the entry on the first core", func() bool {
		last, err := one.Tasks.Last(t.Context(), "000000000001")
		return err == nil && last.Kind == cluster.Requested
	})
	// One of the others may admit hosts.
	if _, err := others[0].Invite(t.Context(), cluster.Member, time.Hour); err != nil {
		t.Error(err)
	}
}

// TestUnchangedMembersAreNotRead checks that a host reads the members again only after a change, and
// leaves nothing of its reading on the core.
func TestUnchangedMembersAreNotRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first, second := filepath.Join(dir, "first"), filepath.Join(dir, "second")
	if _, err := cluster.Found(first, "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	one, stop := serve(t, first)
	token, err := one.Invite(t.Context(), cluster.Member, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the admission", func() bool { // the core hears of the token a moment later
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := cluster.Join(ctx, second, token, cluster.Applicant{Name: "two"}, nil)
		return err == nil
	})
	stop()
	start := func(dir string) *cluster.Node { // without Serve, which reads the members, too
		n, err := cluster.Start(t.Context(), dir, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(n.Close)
		return n
	}
	one = start(first)
	two := start(second)

	keys, err := one.State.Keys()
	if err != nil {
		t.Fatal(err)
	}
	opts, err := keys.Login([]byte(one.State.Authority))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect("tls://"+one.State.Listen, append(opts, nats.Timeout(time.Minute))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	reads, removals := make(chan *nats.Msg, 100), make(chan *nats.Msg, 100)
	for what, requests := range map[string]chan *nats.Msg{"CREATE": reads, "DELETE": removals} {
		if _, err := nc.ChanSubscribe("$JS.API.CONSUMER."+what+".MEMBERS.>", requests); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := two.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := one.Members.Drain(t.Context(), "two", true); err != nil {
		t.Fatal(err)
	}
	if err := two.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !two.Drained() {
		t.Error("Drained after the change = false, want true")
	}
	testenv.WaitFor(t, "the removal of the consumer", func() bool { return len(removals) > 0 })
	if len(reads) != 1 {
		t.Fatalf("reads of the members = %d, want 1, after their one change", len(reads))
	}
	// Their records are those of "one" and "two", and the change of "two".
	if m := <-reads; !strings.Contains(string(m.Data), `"opt_start_seq":3,`) {
		t.Errorf("read = %s, want one of the change alone", m.Data)
	}
}

// A join that failed leaves keys for the next try with the same token. They are no cluster.
func TestFoundAfterAFailedJoin(t *testing.T) {
	t.Parallel()
	a, err := cluster.NewAuthority("other")
	if err != nil {
		t.Fatal(err)
	}
	token, _, err := cluster.NewToken([]string{testcluster.FreeAddr(t)}, a.Certificate(), cluster.Member, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := cluster.Join(ctx, dir, token, cluster.Applicant{Name: "one"}, nil); err == nil {
		t.Fatal("Join of a core that does not exist succeeded, want an error")
	}
	if _, err := cluster.Found(dir, "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Errorf("Found after a join that failed = %v, want nil", err)
	}
	if _, err := cluster.Found(dir, "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Found in a cluster = %v, want a conflict", err)
	}
}

// TestPortInUse starts a core while another program listens on one of its ports, and again when it has ended.
func TestPortInUse(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"clients", "routes", "the witness"} {
		t.Run(what, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "a")
			addrs := map[string]string{"clients": testcluster.FreeAddr(t), "routes": testcluster.FreeAddr(t), "the witness": testcluster.FreeAddr(t)}
			if _, err := cluster.Found(dir, "test", "a", addrs["clients"], addrs["routes"], addrs["the witness"], nil); err != nil {
				t.Fatal(err)
			}
			l, err := net.Listen("tcp", addrs[what])
			if err != nil {
				t.Fatal(err)
			}
			if _, err := cluster.Start(t.Context(), dir, slog.New(slog.DiscardHandler)); fail.CodeOf(err) != fail.Host || !strings.Contains(err.Error(), addrs[what]) {
				t.Errorf("Start = %v, want a fail.Host about %s", err, addrs[what])
			}
			l.Close()
			n, err := cluster.Start(t.Context(), dir, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatalf("Start afterwards = %v, want nil", err)
			}
			n.Close()
		})
	}
}
