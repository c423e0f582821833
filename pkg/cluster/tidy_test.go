package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
)

// TestFullStreams fills the streams that every host can put answers into. What is written to them then
// fails at once, and succeeds after a core has removed what does not belong there.
func TestFullStreams(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := cluster.Found(dir, "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	one, err := cluster.Start(t.Context(), dir, slog.New(slog.DiscardHandler)) // without Serve, which tidies, too
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(one.Close)
	keys, err := one.State.Keys()
	if err != nil {
		t.Fatal(err)
	}
	opts, err := keys.Login([]byte(one.State.Authority))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect("tls://"+one.State.Listen, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	lease := cluster.NewLease(one.Hosts, func() time.Duration { return 0 })
	n := 0
	for _, is := range []struct {
		stream, subject string
		use             func(context.Context) error
	}{
		{"MEMBERS", "member.x%d", func(ctx context.Context) error { return one.Members.Drain(ctx, "one", n%2 == 0) }},
		{"INVITATIONS", "invitation.x%d", func(ctx context.Context) error { _, err := one.Invite(ctx, cluster.Worker, time.Hour); return err }},
		{"HOSTS", "host.x%d", func(ctx context.Context) error {
			_, err := lease.Renew(ctx, cluster.Host{Name: "one", Incarnation: "1", Labels: map[string]string{"n": strings.Repeat("x", n<<12)}})
			return err
		}},
		{"QUEUE", "queue.x%d.normal", func(ctx context.Context) error {
			return one.Queue.Offer(ctx, "000000000001", 0, cluster.NewLine(cluster.Need{}, cluster.Normal))
		}},
	} {
		s, err := js.Stream(t.Context(), is.stream)
		if err != nil {
			t.Fatal(err)
		}
		c := s.CachedInfo().Config
		if c.MaxBytes <= 0 || c.Discard != jetstream.DiscardNew {
			t.Errorf("limit of %s = %d bytes, %v, want one, and new messages refused", is.stream, c.MaxBytes, c.Discard)
		}
		if err := is.use(t.Context()); err != nil {
			t.Errorf("write to %s = %v, want nil", is.stream, err)
		}
		c.MaxBytes = 64 << 10
		if _, err := js.UpdateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		for i := 0; err == nil && i < 1000; i++ {
			size := 1000
			if i%10 == 0 {
				size = 10 // the last bytes, too
			}
			_, err = js.Publish(t.Context(), fmt.Sprintf(is.subject, i), make([]byte, size))
		}
		for i := 0; i < 1000; i++ {
			if _, err = js.Publish(t.Context(), fmt.Sprintf(is.subject, 1000+i), nil); err != nil {
				break
			}
		}
		if err == nil {
			t.Fatalf("%s is not full after 1000 messages", is.stream)
		}
		n++
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := is.use(ctx); !errors.Is(err, cluster.ErrFull) || fail.HintOf(err) == "" {
			t.Errorf("write to %s that is full = %v, want %v and a hint", is.stream, err, cluster.ErrFull)
		}
		cancel()
		if err := one.Tidy(t.Context()); err != nil {
			t.Errorf("Tidy of %s = %v, want nil", is.stream, err)
		}
		if err := is.use(t.Context()); err != nil {
			t.Errorf("write to %s after Tidy = %v, want nil", is.stream, err)
		}
		n++
	}
	if m, err := one.Members.Get(t.Context(), "one"); err != nil || m.Role != cluster.CoreOf {
		t.Errorf("membership = %+v, %v, want it kept", m, err)
	}
	if list, err := one.Members.Invitations(t.Context()); err != nil || len(list) != 2 {
		t.Errorf("invitations = %d, %v, want both", len(list), err)
	}
}
