package server

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// clusterServer is a server of a host that belongs to a cluster.
type clusterServer struct {
	*Server
	t    *testing.T
	part *fleet.Part
}

// newClusterServer returns the server of a host whose state is in dir. Its part in the cluster does not
// run yet.
func newClusterServer(t *testing.T, dir string) *clusterServer {
	t.Helper()
	m := newManager(t)
	state, err := cluster.LoadState(dir)
	if err == nil {
		_, err = m.Sessions.Store.Incarnation(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	p := fleet.NewPart(dir, state)
	p.Tasks, p.Log, p.Version, p.Images = m, slog.New(slog.DiscardHandler), "test", func() []string { return nil }
	s, err := New(Options{Engine: ops.Engine{Tasks: m, Cluster: p}, Log: p.Log, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return &clusterServer{s, t, p}
}

// serve runs the host's part until stop is called.
func (s *clusterServer) serve() (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.t.Context()))
	ended := make(chan struct{})
	go func() { s.part.Serve(ctx); close(ended) }()
	stop = func() { cancel(); <-ended }
	s.t.Cleanup(stop)
	return stop
}

// scrape returns the metrics as text and by name, which fails the test if they take too long.
func (s *clusterServer) scrape() (text []byte, all map[string]string) {
	s.t.Helper()
	began := time.Now()
	w := httptest.NewRecorder()
	s.metrics.handler.ServeHTTP(w, httptest.NewRequestWithContext(s.t.Context(), http.MethodGet, "/metrics", nil))
	if took := time.Since(began); w.Code != http.StatusOK || took > collectTimeout {
		s.t.Errorf("metrics = %d after %v, want %d within %v", w.Code, took, http.StatusOK, collectTimeout)
	}
	all = map[string]string{}
	for _, m := range sample.FindAllStringSubmatch(w.Body.String(), -1) {
		if name, ok := strings.CutPrefix(m[1], "agent_sessionizer_cluster_"); ok {
			all[name] = m[2]
		}
	}
	return w.Body.Bytes(), all
}

// await scrapes until the metrics have these values.
func (s *clusterServer) await(want map[string]string) []byte {
	s.t.Helper()
	var text []byte
	var got map[string]string
	end := time.Now().Add(deadline)
	for {
		text, got = s.scrape()
		var wrong []string
		for name, value := range want {
			if got[name] != value {
				wrong = append(wrong, fmt.Sprintf("%s = %q, want %q", name, got[name], value))
			}
		}
		if len(wrong) == 0 {
			return text
		}
		if time.Now().After(end) {
			s.t.Fatalf("metrics after %v:\n%s", deadline, strings.Join(wrong, "\n"))
		}
		time.Sleep(100 * time.Millisecond) // a user's Prometheus asks less often
	}
}

// found makes a cluster, and returns the directory of its first core.
func found(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "first")
	if _, err := cluster.Found(dir, "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	return dir
}

var clusterMetric = regexp.MustCompile(`agent_sessionizer_cluster_[a-z_]+`)

// TestClusterMetrics compares the metrics of a core with its state, with the documentation, and with the
// names in the example rules.
func TestClusterMetrics(t *testing.T) {
	t.Parallel() // it mostly waits for the next answer of the cluster
	s := newClusterServer(t, found(t))
	s.await(map[string]string{`info{cluster="team",host="one",role="core"}`: "1", "connected": "0", "up": "0", "lease_valid": "0", "lease_age_seconds": "", "core_current": "0", "leader_known": "0", `hosts{state="up"}`: ""})
	stop := s.serve()
	s.await(map[string]string{
		"connected": "1", "up": "1", "lease_valid": "1", "core_current": "1", "leader_known": "1", `hosts{state="up"}`: "1", `hosts{state="silent"}`: "0", "host_versions": "1",
		`stream_copies{stream="TASKS"}`: "1", `stream_copies_current{stream="TASKS"}`: "1", `stream_limit_bytes{stream="TASKS"}`: "1.7179869184e+10", `stream_limit_bytes{stream="HOSTS"}`: "6.7108864e+07",
		`tasks{state="PENDING"}`: "0", "tasks_waiting": "0", "task_wait_seconds": "0", "tasks_unsettled": "0", "events_unsent": "0", "unsent_age_seconds": "0", "requests_unsent": "0", "replica_lag_entries": "0",
	})

	// A task that no host can take.
	submit(t, s, "000000000001", strings.Replace(manifestYAML, "agent:", "placement: {host: nosuch}\nagent:", 1))
	text := s.await(map[string]string{`tasks{state="PENDING"}`: "1", "tasks_waiting": "1", "tasks_unsettled": "0", "events_unsent": "0"})
	if _, got := s.scrape(); got["task_wait_seconds"] == "0" || got["lease_age_seconds"] == "" || got["store_limit_bytes"] == "" {
		t.Errorf("metrics = %v, want the time that a task has waited, the age of the lease and the limit of the store", got)
	}
	problems, err := promlint.New(bytes.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint = %v, %v, want no problems", problems, err)
	}
	exported := names(string(text))
	docs, err := os.ReadFile("../../docs/observability.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range exported {
		if !strings.Contains(string(docs), "`"+strings.TrimPrefix(name, "agent_sessionizer")) {
			t.Errorf("docs/observability.md does not describe %s", name)
		}
	}
	rules, err := os.ReadFile(clusterRules)
	if err != nil {
		t.Fatal(err)
	}
	used := names(string(rules))
	for _, name := range used {
		if !slices.Contains(exported, name) {
			t.Errorf("%s uses %s, which serve does not export", clusterRules, name)
		}
	}
	if len(used) < 10 {
		t.Errorf("metrics in %s = %v, want at least 10", clusterRules, used)
	}

	stop()
	submit(t, s, "000000000002", manifestYAML)
	s.await(map[string]string{"connected": "0", "up": "0", "core_current": "0", "tasks_waiting": "2", "tasks_unsettled": "1", "events_unsent": "1"})
}

// submit accepts a task for the cluster, without sending it.
func submit(t *testing.T, s *clusterServer, id, text string) {
	t.Helper()
	asked, _, err := manifest.Parse("test", []byte(text), "")
	if err != nil {
		t.Fatal(err)
	}
	normal, err := asked.Encode()
	if err != nil {
		t.Fatal(err)
	}
	ev := store.NewEvent(task.EventPhase, task.PhaseChange{To: task.Pending, Desired: task.Run})
	row := store.Task{ID: id, Name: "task", Phase: string(task.Pending), Desired: string(task.Run), Manifest: normal, Host: store.Waiting}
	if _, err := s.store.CreateTask(t.Context(), row, []byte(text), ev); err != nil {
		t.Fatal(err)
	}
}

// names returns the names of the cluster's metrics in a text, each once.
func names(text string) []string {
	all := clusterMetric.FindAllString(text, -1)
	slices.Sort(all)
	return slices.Compact(all)
}

// TestMetricsWithoutTheCluster scrapes a member of a cluster whose only core is lost: the metrics of the host
// itself are there at once, and say so.
func TestMetricsWithoutTheCluster(t *testing.T) {
	t.Parallel() // it mostly waits for the next answer of the cluster
	dir := found(t)
	starting, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	core, err := cluster.Start(starting, dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- core.Serve(ctx) }()
	stopCore := func() {
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		core.Close()
	}
	token, err := core.Invite(t.Context(), cluster.Member, time.Hour)
	if err != nil {
		stopCore()
		t.Fatal(err)
	}
	member := filepath.Join(t.TempDir(), "second")
	testenv.WaitFor(t, "the admission", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := cluster.Join(ctx, member, token, cluster.Applicant{Name: "two"}, nil)
		return err == nil
	})
	s := newClusterServer(t, member)
	s.serve()
	s.await(map[string]string{`info{cluster="team",host="two",role="member"}`: "1", "connected": "1", "up": "1", "lease_valid": "1", "replica_lag_entries": "0", "leader_known": "", `hosts{state="up"}`: "", `stream_copies{stream="TASKS"}`: ""})
	stopCore()
	s.await(map[string]string{"connected": "0", "up": "0", "replica_lag_entries": "", "tasks_waiting": "0"})
	if err := s.store.SetLease(t.Context(), incarnation(t, s), bootclock.Now()-10*time.Second); err != nil {
		t.Fatal(err)
	}
	_, got := s.scrape()
	if age, err := strconv.ParseFloat(got["lease_age_seconds"], 64); err != nil || age < 40 || age > 50 || got["lease_valid"] != "0" {
		t.Errorf("lease that ended 10 s ago: valid = %q, age = %q, want 0 and 40 s", got["lease_valid"], got["lease_age_seconds"])
	}
	if err := s.store.Close(); err != nil {
		t.Fatal(err)
	}
	s.await(map[string]string{"up": "0", "lease_valid": "", "tasks_waiting": ""})
}

func incarnation(t *testing.T, s *clusterServer) string {
	t.Helper()
	is, err := s.store.Incarnation(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return is
}

func TestNoClusterMetricsWithoutACluster(t *testing.T) {
	r := newRig(t, Limits{})
	for name := range r.metricsNow() {
		if clusterMetric.MatchString(name) {
			t.Errorf("a host without a cluster exports %s", name)
		}
	}
}

const clusterRules = "../../examples/prometheus/cluster.rules.yaml"

// TestClusterRules has promtool test the example rules.
func TestClusterRules(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		if promtool, err = filepath.Abs("../../.tools/promtool"); err == nil {
			_, err = os.Stat(promtool)
		}
	}
	if err != nil {
		t.Fatalf("promtool is needed: %v; run: make setup", err)
	}
	tests := strings.TrimSuffix(clusterRules, ".yaml") + ".test.yaml"
	for _, args := range [][]string{{"check", "rules", clusterRules}, {"test", "rules", tests}} {
		if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s = %v, want nil\n%s", strings.Join(args, " "), err, out)
		}
	}
	rules, err := os.ReadFile(clusterRules)
	if err != nil {
		t.Fatal(err)
	}
	tested, err := os.ReadFile(tests)
	if err != nil {
		t.Fatal(err)
	}
	alerts := regexp.MustCompile(`(?m)^  - alert: (\w+)$`).FindAllStringSubmatch(string(rules), -1)
	for _, a := range alerts {
		if !regexp.MustCompile(`(?m)^    alertname: ` + a[1] + `$`).Match(tested) {
			t.Errorf("no test has the alert %s fire", a[1])
		}
	}
	if len(alerts) < 10 {
		t.Errorf("alerts in %s = %d, want at least 10", clusterRules, len(alerts))
	}
}
