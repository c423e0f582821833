package cluster_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestExternal founds a cluster whose streams are in another NATS server, and lets a member and a core join. They use
// the streams and each other's tunnels, also after that server was down, and without the first core.
func TestExternal(t *testing.T) {
	t.Parallel()
	for _, servers := range []int{1, 3} {
		t.Run(fmt.Sprint(servers), func(t *testing.T) {
			t.Parallel()
			external(t, servers)
		})
	}
}

func external(t *testing.T, servers int) {
	x := testcluster.NewExternal(t, servers, false)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	if _, err := cluster.Found(at("one"), "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), &x.External); err != nil {
		t.Fatal(err)
	}
	one, stopOne := serve(t, at("one"))
	three := cluster.Applicant{Name: "three", Addr: testcluster.FreeAddr(t), Route: testcluster.FreeAddr(t)}
	join := func(is cluster.Applicant, role cluster.Role, external *cluster.External) (err error) {
		token, err := one.Invite(t.Context(), role, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		testenv.WaitFor(t, "the admission of "+is.Name, func() bool { // the core hears of the token a moment later
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err = cluster.Join(ctx, at(is.Name), token, is, external)
			return err == nil || fail.CodeOf(err) == fail.Conflict
		})
		return err
	}
	if err := join(cluster.Applicant{Name: "two"}, cluster.Member, nil); err != nil {
		t.Fatal(err)
	}
	if err := join(three, cluster.CoreOf, nil); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Join of a core without the external cluster = %v, want a conflict", err)
	}
	if err := join(three, cluster.CoreOf, &x.External); err != nil {
		t.Fatal(err)
	}
	two, _ := serve(t, at("two"))
	other, _ := serve(t, at("three"))

	works := func(from *cluster.Node) {
		t.Helper()
		hello(t, from, two)
		testenv.WaitFor(t, "the members", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			all, err := from.Members.All(ctx)
			return err == nil && len(all) == 3
		})
	}
	works(one)
	works(other)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := two.Tasks.Append(ctx, "000000000001", cluster.Entry{Kind: cluster.Submitted, Data: []byte("{}")}, 0); err != nil {
		t.Errorf("Append by a member = %v, want nil", err)
	}
	short, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := two.Members.Remove(short, "one", time.Now()); err == nil {
		t.Error("Remove by a member = nil, want an error: the core does not let its message pass")
	}
	testenv.WaitFor(t, "copies of the streams", func() bool {
		health, err := one.Health(ctx)
		return err == nil && health.Core.Current && len(health.Core.Streams) > 0 &&
			!slices.ContainsFunc(health.Core.Streams, func(s cluster.StreamHealth) bool { return s.Copies != servers || s.Current != servers })
	})

	if err := (&cluster.State{Role: cluster.CoreOf}).SetExternal(dir, &x.External); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("SetExternal of a cluster without = %v, want a conflict", err)
	}
	moved := x.External
	moved.CA = filepath.Join(dir, "missing")
	if err := one.State.SetExternal(at("one"), &moved); fail.CodeOf(err) != fail.Usage || one.State.External.CA == moved.CA {
		t.Errorf("SetExternal with a missing file = %v, want a usage error", err)
	}
	moved.CA = filepath.Dir(x.CA) + "/./" + filepath.Base(x.CA)
	if err := one.State.SetExternal(at("one"), &moved); err != nil {
		t.Errorf("SetExternal with another path of the file = %v, want nil", err)
	}
	if s, err := cluster.LoadState(at("one")); err != nil || *s.External != moved {
		t.Errorf("LoadState after SetExternal = %+v, %v, want %+v", s.External, err, moved)
	}
	x.Stop()
	testenv.WaitFor(t, "the loss of the server", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := two.Members.All(ctx)
		return err != nil
	})
	x.Start()
	works(one)
	stopOne()
	works(other)
}

// TestExternalSettings checks what cannot be a NATS cluster.
func TestExternalSettings(t *testing.T) {
	dir := t.TempDir()
	file := func(text string) string {
		path := filepath.Join(dir, "file")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for i, bad := range []cluster.External{
		{URL: "tls://nats.example.com:7422"},
		{URL: "nats.example.com"},
		{URL: "nats://nats.example.com:7422"},
		{URL: "tls://nats.example.com"},
		{URL: "tls://user:secret@nats.example.com:7422"},
		{URL: "tls://nats.example.com:7422/path"},
		{URL: "tls://nats.example.com:7422", CA: filepath.Join(dir, "missing")},
		{URL: "tls://nats.example.com:7422", CA: file("no certificate")},
		{URL: "tls://nats.example.com:7422", Credentials: file("no credentials")},
	} {
		if i > 0 {
			bad.Domain = "hub"
		}
		if err := bad.Check(); fail.CodeOf(err) != fail.Usage {
			t.Errorf("Check of %+v = %v, want a usage error", bad, err)
		}
		if _, err := cluster.Found(filepath.Join(dir, "x"), "team", "one", "127.0.0.1:1", "", "", &bad); err == nil {
			t.Errorf("Found with %+v = nil, want an error", bad)
		}
	}
	if _, err := cluster.Start(t.Context(), filepath.Join(dir, "x"), slog.New(slog.DiscardHandler)); err == nil {
		t.Error("Start after failures to found a cluster = nil, want an error")
	}
}
