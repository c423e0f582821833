//go:build bench

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

const (
	dashboards     = 50
	dashSessions   = 100
	dashEvents     = 200 // of each session
	dashWriters    = 4
	theDashboards  = "50 dashboards"
	rowDashEvents  = "events read, of 100 sessions' events"
	rowDashLost    = "events lost, twice, or out of order"
	rowOverviews   = "overviews read by each, 1/s"
	aimDashMemory  = 150 // MB
	keySession     = "dddd%08x"
	dashboardSpec  = `{"repo":{"key":"github.com/acme/%[1]s","slug":"acme/%[1]s"},"image":"none","resources":{"cpus":1,"memory":536870912,"disk":4294967296}}`
	dashboardEvent = `{"text": "the agent says one thing after another, at the length of an ordinary line"}`
)

// TestTasksDashboards logs fifty browsers in to the dashboard. Each follows the overview and the
// events of one session, while another process writes events of a hundred sessions and changes
// what the overview shows.
func TestTasksDashboards(t *testing.T) {
	table := results.table(table{title: titleDash, rows: []row{
		{name: rowEvent, unit: "ms", comparisons: []comparison{{key: "dashboard_event_median", mine: theDashboards}}},
		{name: rowEvent95, unit: "ms", comparisons: []comparison{{key: "dashboard_event_p95", mine: theDashboards}}},
		{name: rowDashEvents, whole: true, comparisons: []comparison{{key: "dashboard_events", mine: theDashboards}}},
		{name: rowDashLost, whole: true, comparisons: []comparison{{key: "dashboard_lost", mine: theDashboards, aim: aim{absolute, 0}}}},
		{name: rowOverviews, unit: "1/s", comparisons: []comparison{{key: "dashboard_overviews", mine: theDashboards}}},
		{name: rowMost, unit: "MB", comparisons: []comparison{{key: "dashboard_serve_rss", mine: theDashboards, aim: aim{absolute, aimDashMemory}}}},
		{name: rowMostShare, unit: "MB", comparisons: []comparison{{key: "dashboard_serve_pss", mine: theDashboards}}},
	}})
	for range runs() {
		t.Run("", func(t *testing.T) { table.add(theDashboards, watchSessions(t)) }) // a subtest, so that one ends before the next begins
	}
	table.done(t, runs(), theDashboards)
}

// watchSessions lets the dashboards of a new serve follow the sessions once.
func watchSessions(t *testing.T) sample {
	f := newFarmWith(t, fakes(t), []string{"serve", "--listen", "127.0.0.1:0"})
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()
	st, err := store.Open(ctx, filepath.Join(f.state(), "store.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var ids []string
	for n := range dashSessions {
		id, name := fmt.Sprintf(keySession, n), fmt.Sprintf("app%d", n)
		ids = append(ids, id)
		if _, _, err := st.Create(ctx, store.Session{
			ID: id, Name: "agent-acme-" + name + "-" + id[6:], RepoKey: "github.com/acme/" + name, Repo: "acme/" + name, Phase: "stopped", Desired: "stopped", // needs no keeper
			Spec: fmt.Appendf(nil, dashboardSpec, name),
		}, store.Event{Kind: "message", Data: json.RawMessage(dashboardEvent)}, func([]store.Session) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}

	var lost atomic.Int64
	var ready, reading sync.WaitGroup
	var all []*dashboard
	for n := range dashboards {
		d := f.logIn(ctx)
		all = append(all, d)
		ready.Add(2)
		reading.Go(func() {
			if err := d.events(ctx, ids[n*dashSessions/dashboards], 1+dashEvents, ready.Done); err != nil {
				lost.Add(1)
				t.Error(err)
			}
		})
		reading.Go(func() {
			if err := d.overview(ctx, ready.Done); err != nil {
				t.Error(err)
			}
		})
	}
	ready.Wait()
	began := time.Now()
	var writing sync.WaitGroup
	for w := range dashWriters {
		writing.Go(func() {
			for round := range dashEvents {
				for n := w; n < dashSessions; n += dashWriters {
					if err := st.Append(ctx, ids[n], store.Event{Kind: "message", Data: json.RawMessage(dashboardEvent)}); err != nil {
						t.Error(err)
						return
					}
				}
				if _, err := st.Update(ctx, ids[w], func(row *store.Session) (store.Event, error) {
					row.Status = fmt.Appendf(nil, `{"dir":"/home/agent/app%d"}`, round)
					return store.Event{}, nil
				}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	writing.Wait()
	last := fmt.Sprintf("/home/agent/app%d", dashEvents-1)
	for _, d := range all {
		if err := d.await(ctx, last); err != nil {
			t.Error(err)
		}
	}
	took := time.Since(began)
	for _, d := range all {
		d.stop()
	}
	reading.Wait()
	var delays series
	overviews := 0
	for _, d := range all {
		delays = append(delays, d.delays...)
		overviews += d.seen - 1 // without the first
	}
	slices.Sort(delays)
	if len(delays) == 0 {
		t.Fatal("no event was read, want all")
	}
	m := f.resident()
	return sample{
		rowEvent: delays.at(.5), rowEvent95: delays.at(.95), rowDashEvents: float64(len(delays)), rowDashLost: float64(lost.Load()),
		rowOverviews: float64(overviews) / dashboards / took.Seconds(), rowMost: m[rowResident], rowMostShare: m[rowShare],
	}
}

// dashboard is a browser that logged in.
type dashboard struct {
	base, cookie, key string
	client            *http.Client
	over              context.Context
	stop              context.CancelFunc

	delays series // of events, in ms

	mu      sync.Mutex
	seen    int // overviews
	latest  string
	changed chan struct{}
}

// logIn logs a browser in by a link.
func (f *farm) logIn(ctx context.Context) *dashboard {
	f.t.Helper()
	resp, err := f.client.Post("http://localhost/api/v1/dashboard/links", "", nil)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	var link struct{ URL string }
	if err := json.NewDecoder(resp.Body).Decode(&link); err != nil {
		f.t.Fatal(err)
	}
	base, code, _ := strings.Cut(link.URL, "/dashboard/#code=")
	d := &dashboard{base: base, client: &http.Client{Transport: &http.Transport{}}, changed: make(chan struct{}, 1)}
	d.over, d.stop = context.WithCancel(ctx)
	resp, err = d.client.Post(base+"/dashboard/login", "application/json", strings.NewReader(`{"code":"`+code+`"}`))
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	var login struct{ Key string }
	if err := json.NewDecoder(resp.Body).Decode(&login); err != nil || login.Key == "" {
		f.t.Fatalf("login = %s, %v, want a key", resp.Status, err)
	}
	d.key = login.Key
	d.cookie, _, _ = strings.Cut(resp.Header.Get("Set-Cookie"), ";")
	return d
}

// stream reads server-sent events until take returns false or ctx ends.
func (d *dashboard) stream(ctx context.Context, path string, take func(name string, data []byte) (bool, error)) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.base+path, nil)
	if err != nil {
		return err
	}
	for key, value := range map[string]string{"Accept": "text/event-stream", "Cookie": d.cookie, "X-Dashboard-Key": d.key, "Sec-Fetch-Site": "same-origin"} {
		req.Header.Set(key, value)
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(path + ": " + resp.Status)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 4<<20)
	name := ""
	for lines.Scan() {
		switch key, value, _ := strings.Cut(lines.Text(), ": "); key {
		case "":
			name = ""
		case "event":
			name = value
		case "data":
			if more, err := take(name, []byte(value)); err != nil || !more {
				return err
			}
		}
	}
	return errors.Join(lines.Err(), io.ErrUnexpectedEOF)
}

// events reads a session's events, each once and in order.
func (d *dashboard) events(ctx context.Context, id string, until int64, ready func()) error {
	next := int64(1)
	return d.stream(ctx, "/api/v1/sessions/"+id+"/events", func(name string, data []byte) (bool, error) {
		var ev event
		if err := json.Unmarshal(data, &ev); err != nil || name != "" || ev.Subject != id || ev.Seq != next {
			return false, fmt.Errorf("message %s = %s, %w, want event %d of %s", name, data, err, next, id)
		}
		if next == 1 {
			ready()
		} else {
			d.delays = append(d.delays, float64(time.Since(ev.At))/float64(time.Millisecond))
		}
		next++
		return next <= until, nil
	})
}

// overview reads overviews until the dashboard is stopped.
func (d *dashboard) overview(ctx context.Context, ready func()) error {
	before := int64(0)
	err := d.stream(d.over, "/api/v1/overview", func(name string, data []byte) (bool, error) {
		var o struct {
			Seq      int64
			Sessions []json.RawMessage
		}
		if err := json.Unmarshal(data, &o); err != nil || name != "overview" || len(o.Sessions) != dashSessions || o.Seq <= before {
			return false, fmt.Errorf("message %s of %d bytes, %w, with %d sessions, want a newer overview of %d", name, len(data), err, len(o.Sessions), dashSessions)
		}
		if before == 0 {
			ready()
		}
		before = o.Seq
		d.mu.Lock()
		d.seen++
		d.latest = string(data)
		d.mu.Unlock()
		select {
		case d.changed <- struct{}{}:
		default:
		}
		return true, nil
	})
	if d.over.Err() != nil && ctx.Err() == nil {
		return nil
	}
	return err
}

// await waits until an overview shows a text for every writer.
func (d *dashboard) await(ctx context.Context, text string) error {
	for {
		d.mu.Lock()
		n := strings.Count(d.latest, `"`+text+`"`)
		d.mu.Unlock()
		if n == dashWriters {
			return nil
		}
		select {
		case <-d.changed:
		case <-ctx.Done():
			return fmt.Errorf("the last overview does not show %s: %w", text, ctx.Err())
		}
	}
}
