package cluster_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// hosts returns the heartbeats of a cluster with one core.
func hosts(t *testing.T) *cluster.Hosts {
	t.Helper()
	c := testcluster.Alone(t)
	js := c.JetStream()
	var h *cluster.Hosts
	testenv.WaitFor(t, "the heartbeats", func() (ok bool) {
		var err error
		h, err = cluster.OpenHosts(t.Context(), js, "test", 1)
		return err == nil
	})
	return h
}

func TestLease(t *testing.T) {
	h := hosts(t)
	var now time.Duration
	lease := cluster.NewLease(h, func() time.Duration { return now })
	if lease.Valid() {
		t.Error("lease without a heartbeat is valid, want it invalid")
	}
	is := cluster.Host{Name: "one", Incarnation: "first"}
	if _, err := lease.Renew(t.Context(), is); err != nil {
		t.Fatal(err)
	}
	now += cluster.LeaseFor - 1
	if !lease.Valid() {
		t.Error("lease just before its end is invalid, want it valid")
	}
	now++
	if lease.Valid() {
		t.Error("lease at its end is valid, want it invalid")
	}

	// A new process of the host continues. The old one can renew no more: it is outdated.
	again := cluster.NewLease(h, func() time.Duration { return now })
	if _, err := again.Renew(t.Context(), is); err != nil || !again.Valid() {
		t.Errorf("heartbeat of a new process = %v, valid %t, want nil, true", err, again.Valid())
	}

	// A core that saw an earlier heartbeat cannot revoke.
	found, seq, err := h.Get(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.Renew(t.Context(), is); err != nil {
		t.Fatal(err)
	}
	if err := h.Revoke(t.Context(), found, seq, "core"); !errors.Is(err, cluster.ErrConflict) {
		t.Errorf("Revoke after another heartbeat = %v, want %v", err, cluster.ErrConflict)
	}
	found, seq, err = h.Get(t.Context(), "one")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Revoke(t.Context(), found, seq, "core"); err != nil {
		t.Fatal(err)
	}
	if _, err := again.Renew(t.Context(), is); !errors.Is(err, cluster.ErrRevoked) {
		t.Errorf("heartbeat of a revoked host = %v, want %v", err, cluster.ErrRevoked)
	}
	is.Incarnation = "second"
	if _, err := again.Renew(t.Context(), is); err != nil {
		t.Errorf("heartbeat of the host's next incarnation = %v, want nil", err)
	}
}

// Streams that were restored from a backup lack entries that hosts have read. They get no lease of them.
func TestRestoredStreams(t *testing.T) {
	c := testcluster.Alone(t)
	js := c.JetStream()
	h := testcluster.Open(t, func() (*cluster.Hosts, error) { return cluster.OpenHosts(t.Context(), js, "a", 1) })
	lease, is := cluster.NewLease(h, bootclock.Now), cluster.Host{Name: "one", Incarnation: "first"}
	renew := func() error {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err := lease.Renew(ctx, is)
		return err
	}
	if err := renew(); err != nil {
		t.Fatal(err)
	}
	var backup *jetstream.RawStreamMsg
	s, err := js.Stream(t.Context(), "HOSTS")
	if err == nil {
		backup, err = s.GetLastMsgForSubject(t.Context(), "host.one")
	}
	if err := errors.Join(err, renew(), renew()); err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), "HOSTS"); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.OpenHosts(t.Context(), js, "a", 1); err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{"none", "one"} {
		if err := renew(); fail.CodeOf(err) != fail.Conflict || fail.HintOf(err) == "" {
			t.Errorf("heartbeat to restored streams with %s = %v, want code CONFLICT with a hint", what, err)
		}
		if _, err := js.Publish(t.Context(), "host.one", backup.Data); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSilence(t *testing.T) {
	var s cluster.Silence
	var now time.Duration
	look := func(after time.Duration, one, two uint64) []string {
		now += after
		return s.Look(now, map[string]uint64{"one": one, "two": two})
	}
	seq := uint64(1)
	look(0, 1, seq)
	for range 17 {
		seq++
		if silent := look(cluster.HeartbeatEvery, 1, seq); len(silent) > 0 {
			t.Fatalf("silent after %v = %v, want none", now, silent)
		}
	}
	if silent := look(cluster.HeartbeatEvery, 1, seq+1); len(silent) != 1 || silent[0] != "one" {
		t.Errorf("silent after %v = %v, want one", now, silent)
	}
	// An hour without contact says nothing about the hosts.
	s = cluster.Silence{}
	look(0, 1, 1)
	if silent := look(time.Hour, 1, 1); len(silent) > 0 {
		t.Errorf("silent after an hour without contact = %v, want none", silent)
	}
}

// A host cannot hide others with a heartbeat that is damaged or names another host.
func TestDamagedHeartbeats(t *testing.T) {
	c := testcluster.Alone(t)
	js := c.JetStream()
	hosts := testcluster.Open(t, func() (*cluster.Hosts, error) { return cluster.OpenHosts(t.Context(), js, "a", 1) })
	beat := func(name string) {
		if _, err := cluster.NewLease(hosts, bootclock.Now).Renew(t.Context(), cluster.Host{Name: name, Incarnation: "i"}); err != nil {
			t.Fatal(err)
		}
	}
	beat("good")
	for name, text := range map[string]string{"damaged": "{", "liar": `{"format":1,"body":{"name":"good","incarnation":"i"}}`} {
		if _, err := js.Publish(t.Context(), "host."+name, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	seqs, all, err := hosts.All(t.Context())
	if err != nil || len(all) != 3 || seqs["good"] != 1 || seqs["damaged"] == 0 || seqs["liar"] == 0 {
		t.Errorf("All = %v, %+v, %v, want three hosts by the names of their subjects", seqs, all, err)
	}
	is, seq, err := hosts.Get(t.Context(), "damaged")
	if err == nil {
		err = hosts.Revoke(t.Context(), is, seq, "a")
	}
	if err != nil {
		t.Errorf("Revoke of a host with a damaged heartbeat = %v, want nil", err)
	}
}
