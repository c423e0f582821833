package fleet_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const (
	variable = "PRETEND_SECRET_OF_THE_SUBMITTER"
	value    = "pretend-secret-0123456789abcdef"
)

// exchanger is a host that exchanges secrets.
type exchanger struct {
	*host
	*fleet.Secrets

	mu    sync.Mutex
	audit []audit.Record
}

// exchangers returns hosts that exchange secrets, and the members of their cluster.
func exchangers(t *testing.T, c *testcluster.Cluster, names ...string) (map[string]*exchanger, *cluster.Members) {
	t.Helper()
	opened(t, c)
	members := testcluster.Open(t, func() (*cluster.Members, error) {
		return cluster.OpenMembers(t.Context(), c.JetStream(), "a", 1, c.Authority)
	})
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var all sync.WaitGroup
	t.Cleanup(func() { stop(); all.Wait() })
	hosts := map[string]*exchanger{}
	for _, name := range names {
		x := &exchanger{host: newHost(t, c, name, nil)}
		if err := members.Add(t.Context(), x.is); err != nil {
			t.Fatal(err)
		}
		nc := c.Login(x.keys)
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		own := testcluster.Open(t, func() (*cluster.Members, error) { return cluster.OpenMembers(t.Context(), js, name, 1, c.Authority) })
		x.Secrets = &fleet.Secrets{
			Tasks:    x.host.Tasks,
			Exchange: &cluster.Exchange{Conn: nc, Host: name, Keys: x.keys, Authority: c.Authority.Certificate(), Members: own},
			Resolve: func(ctx context.Context, refs []secret.Ref) (map[string]secret.Value, error) {
				return secret.Resolve(ctx, refs, secret.Options{})
			},
			Audit: func(_ context.Context, r audit.Record) {
				x.mu.Lock()
				defer x.mu.Unlock()
				x.audit = append(x.audit, r)
			},
		}
		all.Go(func() {
			if err := x.Exchange.Answer(ctx, x.Give); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		})
		testenv.WaitFor(t, name+" to answer", func() bool {
			_, err := x.Exchange.Ask(t.Context(), name, cluster.SecretsRequest{Task: "000000000000"})
			return fail.CodeOf(err) == fail.Policy
		})
		hosts[name] = x
	}
	return hosts, members
}

// needy returns the manifest of a task that needs a secret.
func needy(t *testing.T, placement, source, key string) []byte {
	t.Helper()
	m, _, err := manifest.Parse("test", fmt.Appendf(nil, `{version: '1', kind: Task, repository: {url: owner/repo}, agent: {kind: command, command: ['true']}, placement: {%s},
		secrets: [{name: TOKEN, source: %s, key: %s, guest: true}, {name: OF_THE_HOST, source: vault, key: 'a:b', guest: true}]}`, placement, source, key), "/")
	if err != nil {
		t.Fatal(err)
	}
	text, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// submit accepts a task that needs a secret, and sends it to the cluster.
func (x *exchanger) submit(t *testing.T, id, placement string) {
	t.Helper()
	ev := store.NewEvent(task.EventPhase, task.PhaseChange{To: task.Pending, Desired: task.Run})
	if _, err := x.Store.CreateTask(t.Context(), store.Task{ID: id, Name: "task", Phase: string(task.Pending), Desired: string(task.Run), Manifest: needy(t, placement, "env", variable), Host: store.Waiting}, nil, ev); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Ship(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

// take claims a task, and returns the claim.
func (x *exchanger) take(t *testing.T, id string, labels map[string]string) uint64 {
	t.Helper()
	testenv.WaitFor(t, "the offer of task "+id, func() bool {
		o, ok, err := x.Queue.Take(t.Context(), cluster.Host{Name: x.Name, FreeSlots: 1, FreeMemory: 1 << 40, Labels: labels}, 100*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			ok, err = x.Take(t.Context(), o)
		}
		return ok && err == nil && o.Task == id
	})
	c, _, err := x.Store.Claim(t.Context(), id)
	if err != nil || c.Fence == 0 {
		t.Fatalf("claim of task %s = %+v, %v, want one", id, c, err)
	}
	return c.Fence
}

// request returns what a host asks with.
func (x *exchanger) request(t *testing.T, id string, fence uint64) cluster.SecretsRequest {
	t.Helper()
	row, err := x.Store.Task(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	sum, err := fleet.Digest(row.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	return cluster.SecretsRequest{Task: id, Fence: fence, Manifest: sum}
}

// TestSecretsReachTheHostOfATask checks that only the host that runs a task gets the secrets of its
// submitter, and that nothing of them is stored in the cluster.
func TestSecretsReachTheHostOfATask(t *testing.T) {
	t.Setenv(variable, value)
	c := testcluster.Alone(t)
	hosts, members := exchangers(t, c, "one", "two", "three")
	one, two, three := hosts["one"], hosts["two"], hosts["three"]
	const id = "000000000001"
	one.submit(t, id, "")
	fence := two.take(t, id, nil)
	get := func() error {
		text, err := two.Secrets.Get(t.Context(), id)
		if err != nil {
			return err
		}
		values, err := secret.Decode(text, []secret.Ref{{Name: "TOKEN", Source: secret.SubmitterOf(id)}})
		if err == nil && values["TOKEN"].Reveal() != value {
			t.Errorf("secret on the claiming host = %q, want %q", values["TOKEN"].Reveal(), value)
		}
		if bytes.Contains(text, []byte("OF_THE_HOST")) {
			t.Errorf("secrets = %s, want only those of the submitter", text)
		}
		return err
	}
	refused := func(what string, code fail.Code, want string, err error) {
		t.Helper()
		if fail.CodeOf(err) != code || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), value) {
			t.Errorf("secrets for %s: %v (code %v), want %q (%v)", what, err, fail.CodeOf(err), want, code)
		}
	}
	ask := func(x *exchanger, host string, r cluster.SecretsRequest) error {
		_, err := x.Exchange.Ask(t.Context(), host, r)
		return err
	}
	if err := get(); err != nil {
		t.Fatal(err)
	}
	if len(one.audit) != 1 {
		t.Fatalf("audit of the submitter = %+v, want one record", one.audit)
	}
	r := one.audit[0]
	if text, err := json.Marshal(r); err != nil || r.Type != audit.SecretsSent || r.Actor != "host:two" || r.Resource != "task:"+id ||
		r.Outcome != audit.Success || !slices.Equal(r.Details["secrets"].([]string), []string{"TOKEN"}) || strings.Contains(string(text), value) {
		t.Errorf("audit = %s, %v, want that TOKEN was sent to two, without its value", text, err)
	}

	// Others get nothing.
	_, err := three.Secrets.Get(t.Context(), id)
	refused("a host without the task", fail.Conflict, "does not run task", err)
	if err := three.catchUp(t, id); err != nil {
		t.Fatal(err)
	}
	refused("a host without the task", fail.Policy, "host three does not have task", ask(three, "one", three.request(t, id, fence)))
	// Only a core can send in the name of another host.
	impostor := &cluster.Exchange{Conn: c.Login(c.Options["a"].Keys), Host: "two", Keys: three.keys, Authority: c.Authority.Certificate(), Members: three.Exchange.Members}
	_, err = impostor.Ask(t.Context(), "one", two.request(t, id, fence))
	refused("a host that says it is another one", fail.Policy, "not signed by host two", err)
	refused("a host from one that did not submit the task", fail.Policy, "was not submitted on host three", ask(two, "three", two.request(t, id, fence)))
	refused("a host from one that does not exist", fail.Host, "not connected", ask(two, "four", two.request(t, id, fence)))
	changed := two.request(t, id, fence)
	changed.Manifest = "0000"
	refused("another manifest", fail.Policy, "another manifest", ask(two, "one", changed))
	refused("an earlier claim", fail.Policy, "with the claim", ask(two, "one", two.request(t, id, fence-1)))
	refused("a later claim", fail.Host, "does not know the claim", ask(two, "one", two.request(t, id, fence+1000)))

	// A host that the manifest does not name takes the task all the same.
	for placed, placement := range map[string]string{"000000000002": "host: two", "000000000004": "labels: {host: two}"} {
		one.submit(t, placed, placement)
		wrong := three.take(t, placed, map[string]string{"host": "two"})
		refused("a host that the manifest excludes", fail.Policy, "is for another host", ask(three, "one", three.request(t, placed, wrong)))
	}

	// A variable that the submitter lacks.
	t.Setenv(variable, "")
	refused("a lost variable", fail.Secret, "on host one: secret TOKEN (env): the environment variable", get())
	t.Setenv(variable, value)

	// The claim ends; another one begins.
	if _, err := one.Lost(t.Context(), "two", ""); err != nil {
		t.Fatal(err)
	}
	refused("a claim that has ended", fail.Policy, "does not have task", ask(two, "one", two.request(t, id, fence)))
	if _, err := two.Store.Reincarnate(t.Context()); err != nil {
		t.Fatal(err)
	}
	two.lease()
	again := two.take(t, id, nil)
	refused("an ended claim of the same host", fail.Policy, "does not have task", ask(two, "one", two.request(t, id, fence)))
	if err := get(); err != nil || again <= fence {
		t.Errorf("secrets for the claim %d after %d = %v, want them", again, fence, err)
	}

	// Too often.
	var often error
	for range 40 {
		if often = ask(two, "one", two.request(t, id, again)); often != nil {
			break
		}
	}
	refused("a host that asks often", fail.Policy, "times within", often)

	if err := members.Remove(t.Context(), "two", time.Now()); err != nil {
		t.Fatal(err)
	}
	refused("a host that was removed", fail.Policy, "host two is not a member", ask(two, "one", two.request(t, id, again)))

	notStored(t, c)
}

// catchUp stores what the log has of a task.
func (x *exchanger) catchUp(t *testing.T, id string) error {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- x.Follow(ctx) }()
	testenv.WaitFor(t, "task "+id, func() bool {
		_, err := x.Store.Task(t.Context(), id)
		return err == nil
	})
	stop()
	<-done
	return nil
}

// notStored checks that neither the value nor any ciphertext of a secret is in the streams or the files
// of the cluster.
func notStored(t *testing.T, c *testcluster.Cluster) {
	t.Helper()
	found := 0 // of the reference, which shows that the search works
	search := func(where string, text []byte) {
		if bytes.Contains(text, []byte(variable)) {
			found++
		}
		for what, part := range map[string]string{
			"the value": value, "the encoded value": base64.StdEncoding.EncodeToString([]byte(value)),
			"ciphertext": "age-encryption.org/v1", "encoded ciphertext": base64.StdEncoding.EncodeToString([]byte("age-encryption.org/v1")),
		} {
			if bytes.Contains(text, []byte(part)) {
				t.Errorf("%s contains %s", where, what)
			}
		}
	}
	js := c.JetStream()
	names := js.StreamNames(t.Context())
	for name := range names.Name() {
		s, err := js.Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		info, err := s.Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
			if m, err := s.GetMsg(t.Context(), seq); err == nil {
				search("stream "+name, m.Data)
			}
		}
	}
	if err := names.Err(); err != nil {
		t.Fatal(err)
	}
	if found == 0 {
		t.Error("the search of the streams found no manifest")
	}
	found = 0
	err := filepath.WalkDir(c.Options["a"].Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		search(path, text)
		return err
	})
	if err != nil || found == 0 {
		t.Errorf("search of the files found %d manifests, %v, want some", found, err)
	}
}

// TestForgedTaskGetsNoSecrets checks that a host runs no command and reads nothing for a task that
// the log says was submitted there, but that no user of the host submitted.
func TestForgedTaskGetsNoSecrets(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	hosts, _ := exchangers(t, c, "one", "two")
	one, two := hosts["one"], hosts["two"]
	js, err := jetstream.New(c.Login(two.keys))
	if err != nil {
		t.Fatal(err)
	}
	forged, err := cluster.OpenTaskLog(t.Context(), js, "one", 1, 1<<28) // its entries name the other host
	if err != nil {
		t.Fatal(err)
	}
	const id = "000000000003"
	ran := filepath.Join(t.TempDir(), "ran")
	row := store.Task{ID: id, Name: "task", Phase: string(task.Pending), Desired: string(task.Run), Manifest: needy(t, "", "cmd", fmt.Sprintf("%q", "touch "+ran+"; echo x")), Status: []byte("{}")}
	data, err := json.Marshal(map[string]any{"row": row, "newest": 1, "events": []store.Event{{Subject: id, Seq: 1, Kind: "phase", Data: []byte("{}")}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := forged.Append(t.Context(), id, cluster.Entry{Kind: cluster.Submitted, Data: data}, 0); err != nil {
		t.Fatal(err)
	}
	if err := one.catchUp(t, id); err != nil {
		t.Fatal(err)
	}
	if err := two.Queue.Offer(t.Context(), id, 0, cluster.NewLine(cluster.Need{}, cluster.Normal)); err != nil {
		t.Fatal(err)
	}
	two.take(t, id, nil)
	if _, err := two.Secrets.Get(t.Context(), id); fail.CodeOf(err) != fail.Policy || !strings.Contains(err.Error(), "host one did not send the secrets: task "+id+" was not submitted on host one") {
		t.Errorf("secrets of a forged task = %v, want a refusal by host one", err)
	}
	if _, err := os.Stat(ran); err == nil {
		t.Error("the command of a forged task ran on the host that it names")
	}
}
