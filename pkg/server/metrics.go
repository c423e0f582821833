package server

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// metrics holds the metrics for Prometheus. State in the store is read on each
// scrape, so that a restarted serve reports the same values. Counters of observed
// events start with this server.
type metrics struct {
	server   *Server
	registry *prometheus.Registry
	handler  http.Handler

	requests       *prometheus.CounterVec
	requestSeconds *prometheus.HistogramVec
	wrong          prometheus.Counter
	open           *prometheus.GaugeVec
	opened         *prometheus.CounterVec
	commands       *prometheus.CounterVec
	commandSeconds prometheus.Histogram
	taskSeconds    *prometheus.HistogramVec
	vmSeconds      prometheus.Histogram
	decisions      *prometheus.CounterVec
	outcomes       *prometheus.CounterVec

	// Only observe uses the fields below.
	cursor   string              // the newest task seen so far
	pending  map[string]struct{} // tasks that were seen and have not ended
	gateways map[string]gateway.Status
}

const namespace = "agent_sessionizer"

func newMetrics(s *Server, agentic bool) (*metrics, error) {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: namespace, Name: name, Help: help}
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts(opts(name, help)), labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels)
	}
	runs := []float64{10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400}
	boots := []float64{.5, 1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600}
	m := &metrics{
		server: s, registry: prometheus.NewRegistry(),
		requests:       counter("http_requests_total", "Answered requests.", "method", "route", "status"),
		requestSeconds: histogram("http_request_duration_seconds", "Time from a request's header to the end of its response; streams take long.", []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30}, "route"),
		wrong:          counter("login_failures_total", "Requests without a valid token.").WithLabelValues(),
		open:           prometheus.NewGaugeVec(prometheus.GaugeOpts(opts("stream_connections", "Open streams: ws is WebSocket, sse is server-sent events, log is a followed log.")), []string{"kind"}),
		opened:         counter("stream_connections_opened_total", "Opened streams.", "kind"),
		commands:       counter("commands_total", "Ended commands that clients of the API ran in sessions.", "result"),
		commandSeconds: histogram("command_duration_seconds", "Run time of those commands.", []float64{.1, .5, 1, 5, 10, 30, 60, 300, 600, 3600}).WithLabelValues().(prometheus.Histogram),
		taskSeconds:    histogram("task_duration_seconds", "Run time of the agents of ended tasks.", runs, "state"),
		vmSeconds:      histogram("vm_provision_duration_seconds", "Time to create the VMs of ended tasks.", boots).WithLabelValues().(prometheus.Histogram),
		decisions:      counter("gateway_decisions_total", "Decisions of the gateways.", "decision"),
		outcomes:       counter("task_outcomes_total", "Ended tasks.", "outcome"),
		pending:        map[string]struct{}{}, gateways: map[string]gateway.Status{},
	}
	all := []prometheus.Collector{
		m.requests, m.requestSeconds, m.wrong, m.open, m.opened, m.commands, m.commandSeconds, m.taskSeconds, m.vmSeconds, m.decisions, m.outcomes,
		stored{m},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: namespace, Name: "build_info", Help: "Always 1.", ConstLabels: prometheus.Labels{"version": s.o.Version},
		}, func() float64 { return 1 }),
	}
	if s.engine.Cluster != nil {
		all = append(all, clustered{s.engine.Cluster, s.log})
	}
	var errs []error
	for _, c := range all {
		errs = append(errs, m.registry.Register(c))
	}
	// Create all known series at the start, with the value zero.
	for _, kind := range []string{"ws", "sse", "log"} {
		m.open.WithLabelValues(kind)
		m.opened.WithLabelValues(kind)
	}
	for _, decision := range []string{"allow", "deny"} {
		m.decisions.WithLabelValues(decision)
	}
	for _, result := range []string{"success", "failure", "timeout", "cancelled"} {
		m.commands.WithLabelValues(result)
	}
	var g prometheus.Gatherer = m.registry
	if agentic {
		g = agenticToo(g)
	}
	m.handler = promhttp.HandlerFor(g, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: 4, DisableCompression: true})
	return m, errors.Join(errs...)
}

// methods lists the methods with their own label: a client could invent others.
var methods = map[string]bool{http.MethodGet: true, http.MethodHead: true, http.MethodPost: true, http.MethodDelete: true}

func (m *metrics) request(method, route string, status int, took time.Duration) {
	if !methods[method] {
		method = "other"
	}
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Inc()
	m.requestSeconds.WithLabelValues(route).Observe(took.Seconds())
}

// stream counts a stream as open until gone is called.
func (m *metrics) stream(kind string) (gone func()) {
	m.opened.WithLabelValues(kind).Inc()
	m.open.WithLabelValues(kind).Inc()
	return m.open.WithLabelValues(kind).Dec
}

func (m *metrics) command(e ops.Exec) {
	result := "failure"
	switch {
	case e.State == ops.ExecExited && e.ExitCode != nil && *e.ExitCode == 0:
		result = "success"
	case e.State == ops.ExecTimeout, e.State == ops.ExecCancelled:
		result = string(e.State)
	}
	m.commands.WithLabelValues(result).Inc()
	if e.EndedAt != nil {
		m.commandSeconds.Observe(e.EndedAt.Sub(e.StartedAt).Seconds())
	}
}

const observeEvery = 5 * time.Second

// observe watches changes that leave no record: the ends of tasks and the decisions
// of gateways.
func (m *metrics) observe(ctx context.Context) {
	tick := time.NewTicker(observeEvery)
	defer tick.Stop()
	begun := false
	for {
		var err error
		if !begun {
			err = m.loadUnended(ctx)
			begun = err == nil
		} else {
			err = m.countEnded(ctx)
		}
		if err == nil {
			err = m.askGateways(ctx)
		}
		if err != nil && ctx.Err() == nil {
			m.server.log.Warn("failed to watch tasks for metrics", "error", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// loadUnended records the tasks that have not ended.
func (m *metrics) loadUnended(ctx context.Context) error {
	newest, err := m.server.store.Tasks(ctx, store.TaskFilter{Limit: 1})
	if err != nil {
		return err
	}
	if len(newest) > 0 {
		m.cursor = newest[0].ID
	}
	m.pending, err = m.unended(ctx)
	return err
}

// page is the number of tasks in memory at a time, because a manifest may be large.
const page = 100

// unended returns the ids of all tasks that have not ended.
func (m *metrics) unended(ctx context.Context) (map[string]struct{}, error) {
	ids := map[string]struct{}{}
	return ids, m.pages(ctx, store.TaskFilter{Phases: task.Unended()}, func(t store.Task) { ids[t.ID] = struct{}{} })
}

func (m *metrics) pages(ctx context.Context, f store.TaskFilter, each func(store.Task)) error {
	for f.Limit = page; ; {
		rows, err := m.server.store.Tasks(ctx, f)
		if err != nil {
			return err
		}
		for _, t := range rows {
			each(t)
			f.After = t.ID
		}
		if len(rows) < page {
			return nil
		}
	}
}

// countEnded counts the tasks that have ended since the last call, including those that
// were also created since then.
func (m *metrics) countEnded(ctx context.Context) error {
	if err := m.pages(ctx, store.TaskFilter{OldestFirst: true, After: m.cursor}, func(t store.Task) {
		m.pending[t.ID] = struct{}{}
		m.cursor = t.ID
	}); err != nil {
		if fail.CodeOf(err) == fail.NotFound { // the newest task has been removed
			m.cursor = ""
			return m.loadUnended(ctx)
		}
		return err
	}
	if len(m.pending) == 0 {
		return nil
	}
	left, err := m.unended(ctx)
	if err != nil {
		return err
	}
	for id := range m.pending {
		if _, ok := left[id]; ok {
			continue
		}
		t, err := m.server.tasks.Get(ctx, id)
		if err != nil && fail.CodeOf(err) != fail.NotFound {
			return err
		}
		delete(m.pending, id)
		if err == nil {
			if err := m.count(ctx, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// count counts a task that has ended.
func (m *metrics) count(ctx context.Context, t task.Task) error {
	if t.Status.Outcome != nil {
		m.outcomes.WithLabelValues(string(t.Status.Outcome.Result)).Inc()
	}
	if !t.Status.Started.IsZero() && t.Status.Ended.After(t.Status.Started) {
		m.taskSeconds.WithLabelValues(string(t.Phase)).Observe(t.Status.Ended.Sub(t.Status.Started).Seconds())
	}
	// The first events are about the VM; the agent's events follow.
	evs, err := m.server.store.Events(ctx, t.ID, store.Oldest, 1000)
	if err != nil {
		return err
	}
	var since time.Time
	for _, ev := range evs {
		var p task.PhaseChange
		if ev.Kind != task.EventPhase || json.Unmarshal(ev.Data, &p) != nil || p.From == p.To {
			continue
		}
		switch {
		case p.To == task.Provisioning:
			since = ev.At
		case p.To == task.Ready && !since.IsZero():
			m.vmSeconds.Observe(max(0, ev.At.Sub(since).Seconds()))
		}
	}
	return nil
}

// askGateways adds the decisions made since the last call. A restarted gateway
// counts from zero again.
func (m *metrics) askGateways(ctx context.Context) error {
	all, err := m.server.tasks.Sessions.List(ctx)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	now := map[string]gateway.Status{}
	var asking errgroup.Group
	asking.SetLimit(8)
	for _, s := range all {
		if !s.Spec.Enforced || s.Phase != session.Ready {
			continue
		}
		asking.Go(func() error {
			st, err := m.server.tasks.Sessions.Gateway(s).Status(ctx)
			if err == nil { // its keeper handles a gateway that does not answer
				mu.Lock()
				now[s.ID] = st
				mu.Unlock()
			}
			return nil
		})
	}
	_ = asking.Wait() // the functions return no errors
	for id, st := range now {
		before, ok := m.gateways[id]
		if !ok || !before.Started.Equal(st.Started) || before.Stats.Allowed > st.Stats.Allowed || before.Stats.Denied > st.Stats.Denied {
			before = gateway.Status{}
		}
		m.decisions.WithLabelValues("allow").Add(float64(st.Stats.Allowed - before.Stats.Allowed))
		m.decisions.WithLabelValues("deny").Add(float64(st.Stats.Denied - before.Stats.Denied))
	}
	m.gateways = now
	return nil
}

// stored collects the metrics that are read from the store.
type stored struct{ *metrics }

var (
	tasksTotal    = prometheus.NewDesc(namespace+"_tasks_total", "Submitted tasks that are in the store.", nil, nil)
	tasksByState  = prometheus.NewDesc(namespace+"_tasks", "Tasks by state.", []string{"state"}, nil)
	tasksActive   = prometheus.NewDesc(namespace+"_tasks_active", "Tasks that hold a slot.", nil, nil)
	agents        = prometheus.NewDesc(namespace+"_agents_connected", "Running agents of tasks.", nil, nil)
	sessionsState = prometheus.NewDesc(namespace+"_sessions", "Sessions by state.", []string{"state"}, nil)
	modelTokens   = prometheus.NewDesc(namespace+"_model_tokens_total", "Tokens that models used, as the gateways counted them.", []string{"model"}, nil)
	modelCost     = prometheus.NewDesc(namespace+"_model_cost_usd_total", "What that costs at list prices, in US dollars.", []string{"model"}, nil)
	storeUp       = prometheus.NewDesc(namespace+"_store_up", "Whether the store could be read.", nil, nil)
)

// Describe implements prometheus.Collector. The set is fixed, except for the
// states.
func (c stored) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{tasksTotal, tasksByState, tasksActive, agents, sessionsState, modelTokens, modelCost, storeUp} {
		ch <- d
	}
}

const collectTimeout = 5 * time.Second

// Collect implements prometheus.Collector.
func (c stored) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout) // the interface provides no context
	defer cancel()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counts, err1 := c.server.store.TaskCounts(ctx)
	sessions, err2 := c.server.store.Sessions(ctx, false)
	models, err3 := c.server.store.UsageSums(ctx, "model", store.UsageQuery{})
	if err := errors.Join(err1, err2, err3); err != nil {
		c.server.log.Warn("failed to read the store for the metrics", "error", err)
		gauge(storeUp, 0)
		return
	}
	gauge(storeUp, 1)
	total, active := 0, 0
	for _, p := range task.Phases() {
		n := counts[string(p)]
		total += n
		if p.Active() {
			active += n
		}
		gauge(tasksByState, float64(n), string(p))
	}
	ch <- prometheus.MustNewConstMetric(tasksTotal, prometheus.CounterValue, float64(total))
	gauge(tasksActive, float64(active))
	gauge(agents, float64(counts[string(task.Running)]))
	states := map[string]int{}
	for _, s := range sessions {
		states[s.Phase]++
	}
	for state, n := range states {
		gauge(sessionsState, float64(n), state)
	}
	used := map[string]store.UsageSum{}
	for _, sum := range models {
		name := sum.Of
		if !c.server.tasks.Sessions.Config.Prices.Known(name) { // a guest could invent others
			name = "other"
		}
		used[name] = store.UsageSum{Tokens: used[name].Tokens + sum.Tokens, Cost: used[name].Cost + sum.Cost}
	}
	for model, sum := range used {
		ch <- prometheus.MustNewConstMetric(modelTokens, prometheus.CounterValue, float64(sum.Tokens), model)
		ch <- prometheus.MustNewConstMetric(modelCost, prometheus.CounterValue, float64(sum.Cost)/1e9, model)
	}
}

// agenticNames lists the metric names that dashboards made for the reference use.
// If label is set, only the series with that label value are exported.
var agenticNames = []struct{ from, label, to string }{
	{namespace + "_tasks_total", "", "agentic_tasks_total"},
	{namespace + "_tasks", "", "agentic_tasks_by_state"},
	{namespace + "_task_outcomes_total", "", "agentic_task_outcomes_total"},
	{namespace + "_agents_connected", "", "agentic_agents_connected"},
	{namespace + "_commands_total", "", "agentic_commands_by_result"},
	{namespace + "_command_duration_seconds", "", "agentic_command_latency_seconds"},
	{namespace + "_stream_connections", "ws", "agentic_ws_connections_current"},
	{namespace + "_stream_connections_opened_total", "ws", "agentic_ws_connections_total"},
}

// agenticToo returns a gatherer that exports everything from g, and part of it
// again under the other names.
func agenticToo(g prometheus.Gatherer) prometheus.Gatherer {
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		all, err := g.Gather()
		for _, alias := range agenticNames {
			for _, f := range all {
				if f.GetName() != alias.from {
					continue
				}
				again := &dto.MetricFamily{Name: &alias.to, Help: f.Help, Type: f.Type}
				for _, m := range f.GetMetric() {
					if alias.label == "" {
						again.Metric = append(again.Metric, m)
					} else if len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == alias.label {
						again.Metric = append(again.Metric, &dto.Metric{Gauge: m.Gauge, Counter: m.Counter})
					}
				}
				all = append(all, again)
				break
			}
		}
		return all, err
	})
}
