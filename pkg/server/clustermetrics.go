package server

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// clustered collects the metrics of a host that belongs to a cluster. Hosts have no label of their
// own in them, so a cluster that grows adds no series.
type clustered struct {
	part *fleet.Part
	log  *slog.Logger
}

func clusterDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(namespace+"_cluster_"+name, help, labels, nil)
}

var (
	clusterInfo      = clusterDesc("info", "Always 1.", "cluster", "host", "role")
	clusterConnected = clusterDesc("connected", "Whether this host has a connection to the cluster.")
	clusterUp        = clusterDesc("up", "Whether the cluster answered the latest question for these metrics in time.")
	leaseValid       = clusterDesc("lease_valid", "Whether this host may run tasks of the cluster.")
	leaseAge         = clusterDesc("lease_age_seconds", "Time since this host sent the heartbeat that was acknowledged last.")
	clusterTasks     = clusterDesc("tasks", "Tasks of the cluster that have not ended, by state, as this host knows them.", "state")
	tasksWaiting     = clusterDesc("tasks_waiting", "Tasks of the cluster that no host has.")
	taskWait         = clusterDesc("task_wait_seconds", "Time that the first of these tasks has waited for a host.")
	unsettled        = clusterDesc("tasks_unsettled", "Tasks for which this host has something to do or to send. A drained host without any can be stopped.")
	eventsUnsent     = clusterDesc("events_unsent", "Events of this host's tasks that are not in the cluster's log.")
	unsentAge        = clusterDesc("unsent_age_seconds", "Age of the oldest of these events.")
	requestsUnsent   = clusterDesc("requests_unsent", "Requests of users of this host about tasks of other hosts that are not in the cluster's log.")
	replicaLag       = clusterDesc("replica_lag_entries", "Entries of the cluster's log that this host has not stored.")

	clusterHosts  = clusterDesc("hosts", "Hosts of the cluster by state.", "state")
	hostVersions  = clusterDesc("host_versions", "Different versions of the program on hosts that send heartbeats.")
	coreCurrent   = clusterDesc("core_current", "Whether this core's server knows all that the cluster has decided.")
	leaderKnown   = clusterDesc("leader_known", "Whether this core's server knows which server leads the cluster.")
	storeBytes    = clusterDesc("store_bytes", "Size of the streams on this core.")
	storeLimit    = clusterDesc("store_limit_bytes", "Maximum of that size.")
	streamBytes   = clusterDesc("stream_bytes", "Size of a stream.", "stream")
	streamLimit   = clusterDesc("stream_limit_bytes", "Maximum of that size, for streams with a limit of their own.", "stream")
	streamCopies  = clusterDesc("stream_copies", "Cores that should have a copy of a stream.", "stream")
	streamCurrent = clusterDesc("stream_copies_current", "Cores that have a complete copy of a stream.", "stream")
)

// Describe implements prometheus.Collector.
func (c clustered) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		clusterInfo, clusterConnected, clusterUp, leaseValid, leaseAge, clusterTasks, tasksWaiting, taskWait, unsettled, eventsUnsent, unsentAge, requestsUnsent, replicaLag,
		clusterHosts, hostVersions, coreCurrent, leaderKnown, storeBytes, storeLimit, streamBytes, streamLimit, streamCopies, streamCurrent,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c clustered) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout) // the interface provides no context
	defer cancel()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	state := c.part.State
	h, err := c.part.Health(ctx)
	gauge(clusterInfo, 1, state.Cluster, state.Name, string(state.Role))
	gauge(clusterConnected, asNumber(h.Cluster.Connected))
	gauge(clusterUp, asNumber(h.Answered))
	if state.Role.Allows(cluster.CoreOf) {
		collectCore(gauge, h)
	}
	if err != nil {
		c.log.WarnContext(ctx, "failed to read the store for the metrics", "error", err)
		return
	}
	gauge(leaseValid, asNumber(h.Lease.Valid(0)))
	if left, ok := h.Lease.Left(); ok {
		gauge(leaseAge, max(0, cluster.LeaseFor-left).Seconds())
	}
	for _, phase := range task.Unended() {
		gauge(clusterTasks, float64(h.Store.Phases[phase]), phase)
	}
	gauge(tasksWaiting, float64(h.Store.Waiting))
	gauge(taskWait, since(h.Store.OldestWaiting))
	gauge(unsettled, float64(h.Store.Unsettled))
	gauge(eventsUnsent, float64(h.Store.Unsent))
	gauge(unsentAge, since(h.Store.OldestUnsent))
	gauge(requestsUnsent, float64(h.Store.Wishes))
	if h.Answered || h.Cluster.Newest > 0 {
		gauge(replicaLag, max(0, float64(h.Cluster.Newest)-float64(h.Store.Position)))
	}
}

// collectCore collects what only a core knows.
func collectCore(gauge func(*prometheus.Desc, float64, ...string), h fleet.Health) {
	core := h.Cluster.Core
	if core == nil { // its server has not started
		core = &cluster.CoreHealth{}
	}
	gauge(coreCurrent, asNumber(core.Current))
	if !core.External {
		gauge(leaderKnown, asNumber(core.Leader != ""))
	}
	if core.StoreLimit > 0 {
		gauge(storeBytes, float64(core.Store))
		gauge(storeLimit, float64(core.StoreLimit))
	}
	for _, s := range core.Streams {
		gauge(streamBytes, float64(s.Bytes), s.Name)
		if s.Limit > 0 {
			gauge(streamLimit, float64(s.Limit), s.Name)
		}
		gauge(streamCopies, float64(s.Copies), s.Name)
		gauge(streamCurrent, float64(s.Current), s.Name)
	}
	if h.Hosts == nil {
		return
	}
	states, versions := map[fleet.HostState]int{}, map[string]bool{}
	for _, host := range h.Hosts {
		states[host.State]++
		if slices.Contains([]fleet.HostState{fleet.Up, fleet.Drains, fleet.Drained}, host.State) {
			versions[host.Version] = true
		}
	}
	for _, s := range fleet.HostStates() {
		gauge(clusterHosts, float64(states[s]), string(s))
	}
	gauge(hostVersions, float64(len(versions)))
}

// asNumber returns 1 for true.
func asNumber(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// since returns the seconds since a time of another host's clock; 0 for the zero time.
func since(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return max(0, time.Since(t).Seconds())
}
