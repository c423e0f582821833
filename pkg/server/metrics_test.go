package server

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

var sample = regexp.MustCompile(`(?m)^([a-z_]+(?:\{.*\})?) ([0-9.e+-]+)$`)

func (r *rig) metricsNow() map[string]string {
	r.t.Helper()
	_, body := r.do(call{path: "/metrics", as: ops.Read})
	all := map[string]string{}
	for _, m := range sample.FindAllStringSubmatch(string(body), -1) {
		all[m[1]] = m[2]
	}
	return all
}

func TestMetrics(t *testing.T) {
	r := newRig(t, Limits{})
	ended, running := r.submit().ID, r.submit().ID
	r.submit() // stays in the queue
	if err := r.metrics.loadUnended(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.move(running, task.Running, nil)
	for _, p := range []task.Phase{task.Staging, task.Provisioning, task.Ready, task.Running} {
		r.move(ended, p, nil)
	}
	began := time.Now()
	r.move(ended, task.Completed, func(f *task.Status) {
		f.Started, f.Ended = began, began.Add(90*time.Second)
		f.Outcome = &task.Outcome{Result: task.Success}
	})
	quick := r.submit().ID // created and ended between two calls
	r.do(call{method: "DELETE", path: ops.TasksPath + "/" + quick})
	for range 2 { // counted tasks are not counted again
		if err := r.metrics.countEnded(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	r.session("aaaa11112222")
	if err := r.metrics.askGateways(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := r.metricsNow()
	for name, want := range map[string]string{
		`tasks_total`: "4", `tasks_active`: "1", `agents_connected`: "1", `tasks{state="PENDING"}`: "1", `tasks{state="COMPLETED"}`: "1", `tasks{state="CANCELLED"}`: "1", `tasks{state="FAILED"}`: "0",
		`task_outcomes_total{outcome="success"}`: "1", `task_outcomes_total{outcome="cancelled"}`: "1",
		`task_duration_seconds_count{state="COMPLETED"}`: "1", `task_duration_seconds_sum{state="COMPLETED"}`: "90",
		`vm_provision_duration_seconds_count`: "1", `sessions{state="ready"}`: "1", `store_up`: "1", `stream_connections{kind="ws"}`: "0",
		`gateway_decisions_total{decision="deny"}`: "0", `commands_total{result="success"}`: "0", `login_failures_total`: "0",
		`http_requests_total{method="DELETE",route="DELETE /api/v1/tasks/{id}",status="202"}`: "1", `build_info{version="test"}`: "1",
	} {
		if got["agent_sessionizer_"+name] != want {
			t.Errorf("%s = %q, want %s", name, got["agent_sessionizer_"+name], want)
		}
	}
	// Clients cannot create series without limit.
	before := len(r.metricsNow())
	for _, method := range []string{"AAA", "BBB", "CCC"} {
		for _, path := range []string{"/a", "/b", "/c"} {
			r.do(call{method: method, path: path})
		}
	}
	if after := len(r.metricsNow()); after > before+2+15 { // one more counter and histogram
		t.Errorf("series after requests with new methods and paths = %d, want at most %d", after, before+2+15)
	}
	if err := r.store.Close(); err != nil {
		t.Fatal(err)
	}
	if got := r.metricsNow(); got["agent_sessionizer_store_up"] != "0" || got["agent_sessionizer_tasks_total"] != "" {
		t.Errorf("metrics with a closed store = %v, want store_up 0 and no tasks_total", got)
	}
}

func TestMetricsAreCleanForPromtool(t *testing.T) {
	r := newRig(t, Limits{})
	r.do(call{path: ops.TasksPath})
	_, body := r.do(call{path: "/metrics"})
	problems, err := promlint.New(bytes.NewReader(body)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint = %v, %v, want no problems", problems, err)
	}
	if strings.Contains(string(body), "agentic_") {
		t.Errorf("metrics = %s, want no agentic_ names unless enabled", body)
	}
}

func TestAgenticNames(t *testing.T) {
	m := newManager(t)
	run := start(t, Options{Engine: ops.Engine{Tasks: m}, Agentic: true})
	resp, err := run.client().Get("http://localhost/metrics") //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		"agentic_tasks_total 0", `agentic_tasks_by_state{state="RUNNING"} 0`, "agentic_agents_connected 0", `agentic_commands_by_result{result="success"} 0`,
		"agentic_ws_connections_current 0", "agentic_ws_connections_total 0", `agentic_command_latency_seconds_bucket{le="1"} 0`, "agent_sessionizer_tasks_total 0",
	} {
		if !strings.Contains(string(body), "\n"+name+"\n") {
			t.Errorf("metrics = %s, want %s", body, name)
		}
	}
}

func TestUnits(t *testing.T) {
	argv := []string{"/opt/a b/agent-sessionizer", "serve", "--listen", "127.0.0.1:8122"}
	text, err := SystemdUnit(argv)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`ExecStart="/opt/a b/agent-sessionizer" serve --listen 127.0.0.1:8122`, "Type=notify", "WatchdogSec=30", "KillMode=process", "LimitNOFILE=1048576", "OOMPolicy=continue", "WantedBy=default.target",
	} {
		if !slices.Contains(strings.Split(string(text), "\n"), line) {
			t.Errorf("unit = %s, want the line %s", text, line)
		}
	}
	if path, err := exec.LookPath("systemd-analyze"); err == nil {
		file := t.TempDir() + "/agent-sessionizer.service"
		unit, err := SystemdUnit([]string{"/bin/true", "serve"})
		if err = errors.Join(err, os.WriteFile(file, unit, 0o600)); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), path, "--man=no", "verify", file).CombinedOutput(); err != nil || bytes.Contains(out, []byte("agent-sessionizer.service")) {
			t.Errorf("systemd-analyze verify = %s, %v, want no complaint", out, err)
		}
	}
}
