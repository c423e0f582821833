package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// admitting returns a cluster of one core that admits hosts, and its members.
func admitting(t *testing.T) (*testcluster.Cluster, *cluster.Members) {
	t.Helper()
	c := testcluster.Alone(t)
	js := c.JetStream()
	var m *cluster.Members
	testenv.WaitFor(t, "the members", func() bool {
		var err error
		m, err = cluster.OpenMembers(t.Context(), js, "a", 1, c.Authority)
		return err == nil
	})
	if err := m.Add(t.Context(), c.Members[0]); err != nil {
		t.Fatal(err)
	}
	nc, err := c.Cores["a"].Connect()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	a := cluster.Admitter{Cluster: "test", Members: m, Authority: c.Authority, Addrs: func(context.Context) ([]string, error) { return []string{c.Options["a"].Listen}, nil }}
	go func() { ended <- a.Serve(ctx, nc) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		nc.Close()
	})
	return c, m
}

// invite makes a token and makes the core accept it.
func invite(t *testing.T, c *testcluster.Cluster, m *cluster.Members, role cluster.Role, valid time.Duration) cluster.Token {
	t.Helper()
	token, i, err := cluster.NewToken([]string{c.Options["a"].Listen}, c.Authority.Certificate(), role, valid)
	if err == nil {
		err = m.Invite(t.Context(), i)
	}
	if err != nil {
		t.Fatal(err)
	}
	authorize(t, c, m)
	again, err := cluster.ParseToken(token.String() + "\n")
	if err != nil {
		t.Fatal(err)
	}
	return again
}

// authorize makes the core accept the members and tokens of the cluster.
func authorize(t *testing.T, c *testcluster.Cluster, m *cluster.Members) {
	t.Helper()
	members, err := m.All(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	invitations, err := m.Invitations(t.Context())
	if err == nil {
		err = c.Cores["a"].Authorize(members, invitations)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestJoin(t *testing.T) {
	t.Parallel()
	c, m := admitting(t)
	token := invite(t, c, m, cluster.Worker, time.Hour)
	keys, err := cluster.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keys.Join(t.Context(), token, cluster.Applicant{Name: "Not a name"}); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Join with an invalid name = %v, want a usage error", err)
	}
	if _, err := keys.Join(t.Context(), token, cluster.Applicant{Name: "a"}); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Join with the name of another host = %v, want a conflict", err)
	}
	first, err := keys.Join(t.Context(), token, cluster.Applicant{Name: "box"})
	if err != nil {
		t.Fatal(err)
	}
	if first.Cluster != "test" || first.Role != cluster.Worker || len(first.Addrs) != 1 || first.Authority != string(c.Authority.Certificate()) {
		t.Errorf("admission = %+v, want a worker of the cluster test", first)
	}
	again, err := keys.Join(t.Context(), token, cluster.Applicant{Name: "box"}) // the answer was lost
	if err != nil || again.Certificate != first.Certificate {
		t.Errorf("Join again = %v, want the same certificate", err)
	}
	authorize(t, c, m)
	_ = c.Login(keys)

	thief, err := cluster.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := thief.Join(t.Context(), token, cluster.Applicant{Name: "thief"}); fail.CodeOf(err) != fail.Policy || !strings.Contains(err.Error(), "used before") {
		t.Errorf("Join with a used token = %v, want it refused", err)
	}
	if _, err := m.Get(t.Context(), "thief"); !errors.Is(err, cluster.ErrNone) {
		t.Errorf("member thief = %v, want none", err)
	}

	// Another cluster's authority, and a server that pretends to be of this one.
	other, err := cluster.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	forged := token
	if forged.Fingerprint, err = cluster.Fingerprint(other.Certificate()); err != nil {
		t.Fatal(err)
	}
	if _, err := thief.Join(t.Context(), forged, cluster.Applicant{Name: "thief"}); err == nil || !strings.Contains(err.Error(), "does not belong") {
		t.Errorf("Join at a server of another cluster = %v, want it refused", err)
	}

	if err := m.Remove(t.Context(), "box", time.Now()); err != nil {
		t.Fatal(err)
	}
	authorize(t, c, m)
	if _, err := keys.Join(t.Context(), token, cluster.Applicant{Name: "box"}); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Join of a removed host with its old token = %v, want a conflict", err)
	}
	if err := m.Remove(t.Context(), "nothing", time.Now()); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("Remove of an unknown host = %v, want not found", err)
	}
}

// TestForeignNATS attacks as users of the NATS servers of cluster.url can: it writes an invitation, and answers
// a host that wants to join.
func TestForeignNATS(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	js := c.JetStream()
	m := testcluster.Open(t, func() (*cluster.Members, error) { return cluster.OpenMembers(t.Context(), js, "a", 1, c.Authority) })
	if err := m.Add(t.Context(), c.Members[0]); err != nil {
		t.Fatal(err)
	}
	token, i, err := cluster.NewToken([]string{c.Options["a"].Listen}, c.Authority.Certificate(), cluster.CoreOf, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(i)
	if err == nil {
		_, err = js.Publish(t.Context(), "invitation."+i.Nkey, []byte(`{"format":1,"body":`+string(text)+`}`))
	}
	if err != nil {
		t.Fatal(err)
	}
	if all, err := m.Invitations(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("invitations = %+v, %v, want none: no core wrote one", all, err)
	}

	nc, err := c.Cores["a"].Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	other, err := cluster.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	defer func() { stop(); serving.Wait() }()
	serving.Go(func() {
		a := cluster.Admitter{Cluster: "test", Members: m, Authority: other, Addrs: func(context.Context) ([]string, error) { return token.Addrs, nil }}
		if err := a.Serve(ctx, nc); err != nil {
			t.Error(err)
		}
	})
	token = invite(t, c, m, cluster.Member, time.Hour)
	keys, err := cluster.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the answer", func() bool {
		try, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = keys.Join(try, token, cluster.Applicant{Name: "box"})
		return fail.CodeOf(err) != fail.Host // the other one does not answer yet
	})
	if fail.CodeOf(err) != fail.Policy {
		t.Errorf("Join with an answer of another authority = %v, want it refused", err)
	}
}

// TestTokenIsUsedOnce uses one token from several hosts at once.
func TestTokenIsUsedOnce(t *testing.T) {
	t.Parallel()
	c, m := admitting(t)
	token := invite(t, c, m, cluster.Member, time.Hour)
	const hosts = 8
	results := make(chan error, hosts)
	for i := range hosts {
		keys, err := cluster.NewKeys()
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, err := keys.Join(context.WithoutCancel(t.Context()), token, cluster.Applicant{Name: "host-" + string(rune(97+i))})
			results <- err
		}()
	}
	admitted := 0
	for range hosts {
		if err := <-results; err == nil {
			admitted++
		} else if fail.CodeOf(err) != fail.Policy {
			t.Errorf("Join = %v, want success or a refusal", err)
		}
	}
	members, err := m.All(t.Context())
	if err != nil || admitted != 1 || len(members) != 2 {
		t.Errorf("admitted hosts = %d, members %d, %v, want 1 and 2", admitted, len(members), err)
	}
}

func TestTokenExpires(t *testing.T) {
	t.Parallel()
	c, m := admitting(t)
	token := invite(t, c, m, cluster.Worker, time.Millisecond)
	time.Sleep(10 * time.Millisecond) // the server's clock decides
	authorize(t, c, m)
	keys, err := cluster.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := keys.Join(t.Context(), token, cluster.Applicant{Name: "late"}); err == nil {
		t.Error("Join with an expired token succeeded, want an error")
	}
	for _, text := range []string{"", "asz1.", "asz1.e30", "nonsense", token.String()[:40]} {
		if _, err := cluster.ParseToken(text); fail.CodeOf(err) != fail.Usage {
			t.Errorf("ParseToken(%q) = %v, want a usage error", text, err)
		}
	}
}
