package cluster_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestStrangersCannotRestart sends, in the place of a name, what the server says about a full disk.
func TestStrangersCannotRestart(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	const name = "critical write error"
	for _, o := range []nats.Option{nats.UserInfo(name, name), nats.Name(name)} {
		nc, err := nats.Connect("tls://"+c.Options["a"].Listen, nats.Secure(&tls.Config{InsecureSkipVerify: true}), o, nats.NoReconnect()) //nolint:gosec // an attacker
		if err == nil {
			nc.Close()
			t.Fatal("a stranger could log in")
		}
	}
	if c.Cores["a"].Failed() {
		t.Error("the core takes the text of a stranger for an error of its disk")
	}
}

// TestWorkerIsConfined checks what a worker whose key was stolen can do, and that its
// removal ends that.
func TestWorkerIsConfined(t *testing.T) {
	t.Parallel()
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
			m, err := cluster.OpenMembers(short(), js, "worker", 1, c.Authority)
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
	for _, subject := range []string{">", "_INBOX.>", "host.>", "task.>", "tunnel.other.>", "seal.other.*", "seal.worker.*", "seal.>"} {
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

	for len(refused) > 0 {
		<-refused
	}
	for _, subject := range []string{"seal.other.a", "tunnel.other.open.worker", "tunnel.other.open.a"} {
		if err := nc.Publish(subject, nil); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-refused:
			if !errors.Is(err, nats.ErrPermissionViolation) {
				t.Errorf("message of a worker to %s = %v, want %v", subject, err, nats.ErrPermissionViolation)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("message of a worker to %s was not refused", subject)
		}
	}
	if _, err := nc.RequestWithContext(short(), "seal.other.worker", nil); !errors.Is(err, nats.ErrNoResponders) {
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
	t.Parallel()
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
	t.Parallel()
	c := testcluster.Alone(t)
	keys, _ := c.Add("member", cluster.Member)
	nc := c.Login(keys)
	refused := make(chan error, 10)
	nc.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err })
	for _, subject := range []string{"seal.member.*", "seal.other.*", "seal.>"} {
		if _, err := nc.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		var err error
		if subject == "seal.member.*" {
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

// TestRedirectedAnswers lets a worker redirect answers of the server, with a text of its choice, into the
// streams that it may not write: NATS does not check where answers go. The list of members stays as it is.
func TestRedirectedAnswers(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	core := c.JetStream()
	members := testcluster.Open(t, func() (*cluster.Members, error) { return cluster.OpenMembers(t.Context(), core, "a", 1, c.Authority) })
	log := taskLog(t, c, "a", 1)
	hosts := testcluster.Open(t, func() (*cluster.Hosts, error) { return cluster.OpenHosts(t.Context(), core, "a", 1) })
	for _, m := range c.Members {
		if err := members.Add(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	if err := members.Drain(t.Context(), "a", true); err != nil {
		t.Fatal(err)
	}
	keys, is := c.Add("hostile", cluster.Worker)
	if err := members.Add(t.Context(), is); err != nil {
		t.Fatal(err)
	}
	if err := members.Remove(t.Context(), "hostile", time.Now()); err != nil {
		t.Fatal(err)
	}
	want, err := members.All(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	nc := c.Login(keys) // still, on this core
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	tasks, err := js.Stream(t.Context(), "TASKS")
	if err != nil {
		t.Fatal(err)
	}
	stored, err := core.Stream(t.Context(), "MEMBERS")
	if err != nil {
		t.Fatal(err)
	}
	old, err := stored.GetMsg(t.Context(), 1) // what a core signed before the last change of "a"
	if err != nil {
		t.Fatal(err)
	}
	evil := is
	evil.Role, evil.Removed = cluster.CoreOf, time.Time{}
	unsigned, err := json.Marshal(map[string]any{"format": 1, "id": "x", "host": "a", "body": evil})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range [][]byte{unsigned, old.Data, []byte("{")} {
		if _, err := js.Publish(t.Context(), "task.000000000001", text); err != nil {
			t.Fatal(err)
		}
	}
	pull, err := tasks.CreateConsumer(t.Context(), jetstream.ConsumerConfig{AckPolicy: jetstream.AckNonePolicy})
	if err != nil {
		t.Fatal(err)
	}
	redirect := func(subject, to, text string) {
		t.Helper()
		if err := nc.PublishMsg(&nats.Msg{Subject: subject, Reply: to, Data: []byte(text)}); err != nil {
			t.Fatal(err)
		}
	}
	redirect("$JS.API.CONSUMER.MSG.NEXT.TASKS."+pull.CachedInfo().Name, "member.hostile", `{"batch":3}`)
	redirect("$JS.API.STREAM.INFO.TASKS", "member.a", "")
	redirect("$JS.API.STREAM.INFO.TASKS", "invitation.x", "")
	redirect("$JS.API.STREAM.INFO.TASKS", "host.a", "")
	redirect("task.000000000001", "member.b", "{}")
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the redirected messages", func() bool {
		info, err := stored.Info(t.Context())
		return err == nil && info.State.LastSeq >= uint64(len(c.Members)+2)+5
	})

	all, err := members.All(t.Context())
	if err != nil || len(all) != len(want) {
		t.Fatalf("All = %+v, %v, want %+v", all, err, want)
	}
	for i := range all {
		if all[i] != want[i] {
			t.Errorf("member = %+v, want %+v", all[i], want[i])
		}
	}
	if m, err := members.Get(t.Context(), "a"); err != nil || !m.Drained {
		t.Errorf("Get of a core = %+v, %v, want it drained", m, err)
	}
	if m, err := members.Get(t.Context(), "hostile"); err != nil || m.Removed.IsZero() || m.Role != cluster.Worker {
		t.Errorf("Get of the removed worker = %+v, %v, want it removed", m, err)
	}
	if err := members.Drain(t.Context(), "a", false); err != nil {
		t.Errorf("change after a redirected message = %v, want nil", err)
	}
	if err := members.Add(t.Context(), cluster.Membership{Name: "b", Role: cluster.Worker, Nkey: "U"}); err != nil {
		t.Errorf("Add after a redirected message = %v, want nil", err)
	}
	if list, err := members.Invitations(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("invitations = %+v, %v, want none", list, err)
	}
	if _, all, err := hosts.All(t.Context()); err != nil || len(all) != 1 || all[0].Incarnation != "" {
		t.Errorf("heartbeats = %+v, %v, want only the name of one", all, err)
	}
	for _, err := range log.Latest(t.Context()) {
		if err != nil {
			t.Errorf("read of the log = %v, want nil", err)
		}
	}
}

// TestAuthorizeDuringLogin changes who may log in while a host logs in, which must succeed, and then
// changes the host's role, which its connection must not survive.
func TestAuthorizeDuringLogin(t *testing.T) {
	c := testcluster.Alone(t)
	keys, is := testcluster.NewMember(t, c.Authority, "box", cluster.Worker)
	_, other := testcluster.NewMember(t, c.Authority, "other", cluster.Worker)
	c.Members = append(c.Members, is)
	authorize := func(members ...cluster.Membership) error { return c.Cores["a"].Authorize(members, nil) }
	if err := authorize(c.Members...); err != nil {
		t.Fatal(err)
	}
	opts, err := keys.Login(c.Authority.Certificate())
	if err != nil {
		t.Fatal(err)
	}
	opts = append(opts, func(o *nats.Options) error {
		sign := o.SignatureCB
		o.SignatureCB = func(nonce []byte) ([]byte, error) {
			if err := authorize(append(c.Members, other)...); err != nil {
				return nil, err
			}
			time.Sleep(100 * time.Millisecond) // until the server would have ended the connection
			return sign(nonce)
		}
		return nil
	}, nats.NoReconnect())
	nc, err := nats.Connect("tls://"+c.Options["a"].Listen, append(opts, nats.Timeout(time.Minute))...)
	if err != nil {
		t.Fatalf("login during a change of who may log in = %v, want nil", err)
	}
	t.Cleanup(nc.Close)

	if err := authorize(append(c.Members, other)...); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Errorf("connection after an authorization that changed nothing: %v, want nil", err)
	}
	is.Role = cluster.Member
	if err := authorize(c.Members[0], is, other); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the end of the connection of a host whose role changed", nc.IsClosed)
}
