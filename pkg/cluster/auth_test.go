package cluster_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestWorkerIsConfined checks what a worker whose key was stolen can do, and that its
// removal ends that.
func TestWorkerIsConfined(t *testing.T) {
	c := testcluster.Alone(t)
	taskLog(t, c, "a", 1)
	core := c.JetStream()
	h, err := cluster.OpenHosts(t.Context(), core, "a", 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.NewLease(h, func() time.Duration { return 0 }).Renew(t.Context(), cluster.Host{Name: "other", Incarnation: "1"}); err != nil {
		t.Fatal(err)
	}
	keys, is := testcluster.NewMember(t, c.Authority, "worker", cluster.Worker)
	c.Members = append(c.Members, is)
	if err := c.Cores["a"].Authorize(c.Members, nil); err != nil {
		t.Fatal(err)
	}
	nc := c.Login(keys)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	refused := make(chan error, 100)
	nc.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err })

	own, err := cluster.OpenHosts(t.Context(), js, "worker", 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.NewLease(own, func() time.Duration { return 0 }).Renew(t.Context(), cluster.Host{Name: "worker", Incarnation: "1"}); err != nil {
		t.Errorf("own heartbeat = %v, want nil", err)
	}
	l, err := cluster.OpenTaskLog(t.Context(), js, "worker", 1, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(t.Context(), "000000000001", cluster.Entry{Kind: cluster.Reported}, 0); err != nil {
		t.Errorf("entry in the log of a task = %v, want nil", err)
	}

	short := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	for what, f := range map[string]func() error{
		"the heartbeat of another host": func() error {
			is, seq, err := own.Get(t.Context(), "other")
			if err != nil {
				return nil //nolint:nilerr // it must be readable
			}
			return own.Revoke(short(), is, seq, "worker")
		},
		"a new stream": func() error {
			_, err := js.CreateStream(short(), jetstream.StreamConfig{Name: "MINE", Subjects: []string{"mine"}})
			return err
		},
		"the removal of a stream": func() error { return js.DeleteStream(short(), "TASKS") },
		"the purge of a stream": func() error {
			_, err := nc.RequestWithContext(short(), "$JS.API.STREAM.PURGE.TASKS", nil)
			return err
		},
		"a new member": func() error {
			m, err := cluster.OpenMembers(short(), js, "worker", 1)
			if err == nil {
				err = m.Add(short(), cluster.Membership{Name: "mine", Role: cluster.CoreOf})
			}
			return err
		},
	} {
		if f() == nil {
			t.Errorf("%s by a worker succeeded, want an error", what)
		}
	}
	for _, subject := range []string{">", "_INBOX.>", "host.>", "task.>", "tunnel.other.>", "seal.other", "seal.worker", "seal.*"} {
		for len(refused) > 0 {
			<-refused
		}
		if _, err := nc.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-refused:
			if !errors.Is(err, nats.ErrPermissionViolation) {
				t.Errorf("subscription of a worker to %s = %v, want %v", subject, err, nats.ErrPermissionViolation)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("subscription of a worker to %s was not refused", subject)
		}
	}

	if _, err := nc.RequestWithContext(short(), "seal.other", nil); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("request for secrets by a worker = %v, want that it is allowed: %v", err, nats.ErrNoResponders)
	}

	if err := c.Cores["a"].Authorize(c.Members[:len(c.Members)-1], nil); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the end of the removed host's connection", func() bool { return !nc.IsConnected() })
	opts, err := keys.Login(c.Authority.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nats.Connect("tls://"+c.Options["a"].Listen, opts...); err == nil {
		t.Error("login of a removed host succeeded, want an error")
	}
	stranger, _ := testcluster.NewMember(t, c.Authority, "stranger", cluster.CoreOf)
	if opts, err = stranger.Login(c.Authority.Certificate()); err != nil {
		t.Fatal(err)
	}
	if _, err := nats.Connect("tls://"+c.Options["a"].Listen, opts...); err == nil {
		t.Error("login of a stranger succeeded, want an error")
	}
	if _, err := nats.Connect("tls://" + c.Options["a"].Listen); err == nil {
		t.Error("login without a key succeeded, want an error")
	}
}

// TestWitnessLeaves grows a cluster, removes the witness and then loses a core.
func TestWitnessLeaves(t *testing.T) {
	c := testcluster.Three(t)
	l := taskLog(t, c, "a", 3)
	seq, err := l.Append(t.Context(), "000000000001", cluster.Entry{Kind: cluster.Submitted}, 0)
	if err != nil {
		t.Fatal(err)
	}
	c.Witness.Stop()
	for range 2 { // it may be repeated after a crash
		if err := c.Cores["b"].RemoveServer(t.Context(), "a-witness"); err != nil {
			t.Fatal(err)
		}
	}
	c.Cores["a"].Stop()
	testenv.WaitFor(t, "an entry without one core", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := l.Append(ctx, "000000000001", cluster.Entry{Kind: cluster.Reported}, seq)
		return err == nil
	})
	// Also what needs a majority of all servers still works.
	js, err := jetstream.New(c.Login(c.Options["b"].Keys))
	if err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "a new stream without one core", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := cluster.OpenHosts(ctx, js, "b", 1)
		return err == nil
	})
}

// TestMemberAnswersOnlyItsRequests checks that a member receives the requests for its own secrets, and not
// those for others'.
func TestMemberAnswersOnlyItsRequests(t *testing.T) {
	c := testcluster.Alone(t)
	keys, _ := c.Add("member", cluster.Member)
	nc := c.Login(keys)
	refused := make(chan error, 10)
	nc.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err })
	for _, subject := range []string{"seal.member", "seal.other", "seal.*"} {
		if _, err := nc.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		var err error
		if subject == "seal.member" {
			select {
			case err = <-refused:
				t.Errorf("subscription to %s = %v, want nil", subject, err)
			default:
			}
			continue
		}
		select {
		case err = <-refused:
		case <-time.After(10 * time.Second):
		}
		if !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("subscription to %s = %v, want %v", subject, err, nats.ErrPermissionViolation)
		}
	}
}
