//go:build browser

package browser

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// intruder is a host of the cluster that says of itself what the test likes.
type intruder struct {
	*cluster.Node
	t     *testing.T
	lease *cluster.Lease

	mu sync.Mutex
	is cluster.Host
}

// join makes an intruder join the cluster of h, and sends its heartbeats.
func join(t *testing.T, h *host, name string) *intruder {
	t.Helper()
	token, err := cluster.ParseToken(strings.TrimSpace(h.must("cluster", "token")))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), name)
	testenv.WaitFor(t, "the admission of "+name, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := cluster.Join(ctx, dir, token, cluster.Applicant{Name: name}, nil)
		return err == nil
	})
	starting, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	n, err := cluster.Start(starting, dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	in := &intruder{Node: n, t: t, lease: cluster.NewLease(n.Hosts, bootclock.Now), is: cluster.Host{Name: name, Incarnation: "1", Version: "1", Slots: 4, FreeSlots: 3, FreeMemory: 5 << 30, FreeDisk: 7 << 30}}
	ctx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	var all sync.WaitGroup
	all.Go(func() { _ = n.Serve(ctx) }) // it fails once the host is removed
	all.Go(func() {
		for ctx.Err() == nil {
			in.beat(ctx)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
		}
	})
	t.Cleanup(func() { end(); all.Wait(); n.Close() })
	return in
}

// beat sends a heartbeat; the next one follows if that fails.
func (in *intruder) beat(ctx context.Context) {
	in.mu.Lock()
	defer in.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	in.is.Drained = in.Drained()
	_, _ = in.lease.Renew(ctx, in.is)
}

// claim writes into the log that a host with that name runs a task with that name.
func (in *intruder) claim(id, name, host string) {
	in.t.Helper()
	m, _, err := manifest.Parse("test", []byte("version: '1'\nkind: Task\nrepository: {url: owner/repo}\nagent: {kind: command, command: ['true']}\n"), "/")
	if err != nil {
		in.t.Fatal(err)
	}
	text, err := m.Encode()
	if err != nil {
		in.t.Fatal(err)
	}
	now := time.Now().UTC()
	ev := store.NewEvent(task.EventPhase, task.PhaseChange{To: task.Running})
	ev.Subject, ev.Seq, ev.At = id, 1, now
	row := store.Task{ID: id, Name: name, Phase: string(task.Running), Desired: string(task.Run), Manifest: text, Status: []byte("{}"), CreatedAt: now, StateChangedAt: now}
	data, err := json.Marshal(struct {
		fleet.State
		Events []store.Event `json:"events"`
		Text   []byte        `json:"text"`
	}{fleet.State{Row: row, Host: host, Incarnation: "1", Newest: 1}, []store.Event{ev}, text})
	if err != nil {
		in.t.Fatal(err)
	}
	if _, err := in.Tasks.Append(in.t.Context(), id, cluster.Entry{Kind: cluster.Submitted, Data: data}, 0); err != nil {
		in.t.Fatal(err)
	}
}

// TestHosts shows the hosts of a cluster, and drains and removes one of them.
func TestHosts(t *testing.T) {
	h := newHost(t)
	h.open("repo")
	h.serve("--cluster", "--name", "first", "--cluster-address", testcluster.FreeAddr(t))
	testenv.WaitFor(t, "the cluster", func() bool { out, err := h.run("cluster", "list"); return err == nil && strings.Contains(out, " up ") })
	second := join(t, h, "second")
	h.task("sleeper", "repo", "exec sleep 600")
	second.claim("00000000aaaa", "elsewhere", "second")

	p := driver.Start(t).Open(t)
	p.LogIn(h.link())
	p.Sees("on second")
	p.Click("Hosts")
	p.Sees("cluster first · 2 up")
	p.Sees("3 of 4")
	p.Sees("5.0 GiB")
	badge := func(host, state string) {
		t.Helper()
		p.Until(host+" "+state, fmt.Sprintf(`document.querySelector("[data-host=%s] .badge")?.textContent === %q`, host, state))
	}
	p.Click("Drain second")
	badge("second", "drained")
	if out := h.must("cluster", "list"); !strings.Contains(out, "drained") {
		t.Errorf("cluster list = %s, want a drained host", out)
	}
	p.Until("an announcement", `document.getElementById("announcements").textContent === "second takes no more tasks"`)
	p.Click("Undrain second")
	badge("second", "up")
	p.Eval(`document.querySelector("h1").focus()`, nil)
	p.Tab("Drain second", 8)
	p.Press("\r")
	badge("second", "drained")
	p.Tab("Remove second…", 8) // the focus was kept, although the button changed

	p.Click("Tasks of first (1 running)")
	p.Sees("sleeper")
	p.Sees("Host first")
	if text := p.Text(); strings.Contains(text, "elsewhere") {
		t.Errorf("tasks of first = %s, want none of second", text)
	}
	p.Click("All hosts")
	p.Click("Tasks of second (1 running)")
	p.Click("elsewhere")
	p.Click("second") // the host of the task
	p.Sees("Host second")

	source := axe(t)
	for _, view := range []string{"#/hosts", "#/hosts/second"} {
		p.Show(view)
		p.Sees("3 of 4")
		for _, width := range []int64{1280, 390} {
			p.Size(width, 900)
			for _, dark := range []bool{false, true} {
				p.Dark(dark)
				name := fmt.Sprintf("%s at %d px, dark: %v", view, width, dark)
				for _, found := range p.Axe(source) {
					t.Errorf("%s: %s", name, found)
				}
				if extra := p.Overflow(); extra > 0 {
					t.Errorf("%s is %d px wider than the window, want no scrolling", name, extra)
				}
				if dir := os.Getenv("BROWSER_LOOK"); dir != "" {
					file := fmt.Sprintf("%s-%d-%v.png", strings.ReplaceAll(strings.TrimPrefix(view, "#/"), "/", "-"), width, dark)
					if err := os.WriteFile(filepath.Join(dir, file), p.Picture(), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
	}

	p.Size(1280, 900)
	p.Show("#/hosts")
	p.Click("Remove second…")
	p.Sees("This cannot be undone")
	p.Click("Cancel")
	p.Misses("This cannot be undone")
	p.Click("Remove second…")
	p.Click("Remove it for good")
	p.Until("no host second", `!document.querySelector("[data-host=second]")`)
	p.Click("Show 1 removed host")
	badge("second", "removed")
	p.CheckHarmless()

	// A client that may only read.
	token := strings.TrimSpace(h.must("serve", "token", "add", "viewer", "--scope", "read"))
	p.Click("Log out")
	p.Fill("#token", token)
	p.Press("\r")
	p.Click("Hosts")
	p.Sees("cluster first")
	if text := p.Text(); strings.Contains(text, "Drain") || strings.Contains(text, "Remove") {
		t.Errorf("hosts with the scope read = %s, want no control for the scope admin", text)
	}
}

// TestHostileHost has a host of the cluster send 100 hostile texts, as what it says of itself and in the
// log of tasks.
func TestHostileHost(t *testing.T) {
	h := newHost(t)
	h.serve("--cluster", "--name", "first", "--cluster-address", testcluster.FreeAddr(t))
	testenv.WaitFor(t, "the cluster", func() bool { out, err := h.run("cluster", "list"); return err == nil && strings.Contains(out, " up ") })
	in := join(t, h, "second")
	p := driver.Start(t).Open(t)
	p.LogIn(h.link())
	p.Show("#/hosts")
	texts := corpus()
	const most = 20 // labels that the page shows
	for from := 0; from < len(texts); from += most {
		round := texts[from:min(from+most, len(texts))]
		in.mu.Lock()
		in.is.Version, in.is.Arch, in.is.Accel, in.is.Images, in.is.Labels = round[0], round[1], round[2], round, map[string]string{}
		for i, text := range round {
			in.is.Labels[text] = texts[len(texts)-1-from-i]
		}
		in.mu.Unlock()
		p.Sees(mark99(round))
		page := p.Text()
		for i := range round {
			if !strings.Contains(page, mark(from+i)) {
				t.Errorf("hosts do not show %q, want it as text", mark(from+i))
			}
		}
		p.CheckHarmless()
	}
	in.mu.Lock()
	for i := range 2000 {
		in.is.Labels[fmt.Sprintf("%04d%s", i, strings.Repeat("w", 100))] = texts[0]
	}
	in.mu.Unlock()
	p.Sees("and 20") // 2,000 more
	for i, text := range texts {
		in.claim(fmt.Sprintf("%012x", i+1), text, text)
	}
	p.Show("#/")
	sees := func(text string) {
		t.Helper()
		if literal(text) && len(text) < 60 {
			p.Sees("on " + text)
		} else {
			p.Sees("on " + text[:len(mark(0))])
		}
		p.CheckHarmless()
	}
	for _, text := range texts {
		sees(text)
	}
	for i := 0; i < len(texts); i += 9 {
		p.Show(fmt.Sprintf("#/tasks/%012x", i+1))
		p.Until("the host of the task", fmt.Sprintf(`document.querySelector(".facts")?.innerText.includes(%q)`, mark(i)))
		p.CheckHarmless()
	}
	for _, width := range []int64{1280, 390} {
		p.Size(width, 900)
		for _, at := range []string{"#/", "#/hosts", "#/hosts/second", "#/tasks/000000000001"} {
			if p.Show(at); p.Overflow() > 0 {
				t.Errorf("%s with hostile texts is %d px wider than the window of %d px, want no scrolling", at, p.Overflow(), width)
			}
		}
	}
	for _, found := range p.Axe(axe(t)) {
		t.Error(found)
	}
	p.CheckHarmless()
}
