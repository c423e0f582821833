package task

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func parentRights() rights {
	return rights{
		url: "https://github.com/acme/app", key: "github.com/acme/app", profile: "small", base: repo.Base{Commit: strings.Repeat("a", 40), Branch: "main"},
		size: config.Resources{CPUs: 2, Memory: 1 << 30, Disk: 8 << 30}, mode: policy.Allowlist, lifecycle: manifest.DefaultLifecycle(), remaining: time.Hour,
	}
}

func subtaskManifest(t testing.TB, fields string) *manifest.Task {
	t.Helper()
	if !strings.Contains(fields, "agent: ") && !strings.Contains(fields, "claude: ") {
		fields += "\nagent: {kind: command, command: [a]}"
	}
	asked, _, err := manifest.ParseSubtask("m", []byte("version: \"1\"\nkind: Task\n"+fields+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	return asked
}

func TestSubtaskHasItsParentsRights(t *testing.T) {
	out, notices, faults := narrow(subtaskManifest(t, ""), parentRights())
	if len(faults) > 0 {
		t.Fatalf("narrow(nothing) = %v, want no fault", faults)
	}
	if out.Repository.URL != "https://github.com/acme/app" || out.Repository.Commit != strings.Repeat("a", 40) || out.VM.Profile != "small" ||
		out.VM.CPUs != 2 || out.VM.Memory != 1<<30 || out.VM.Disk != 8<<30 || out.VM.NetworkMode != "allowlist" || time.Duration(out.Lifecycle.Timeout) != time.Hour || len(notices) != 1 {
		t.Errorf("narrow(nothing) = %+v, notices %v, want what the parent has", out, notices)
	}
	for _, less := range []string{
		"repository: {url: acme/app, branch: other}", "repository: {commit: abcd}", "vm: {cpus: 1, memory: 512M, disk: 4G, profile: small}", "vm: {network_mode: isolated}",
		"metadata: {priority: -1}", "lifecycle: {timeout: 1m, cancel_grace: 1s}", "subtasks: {count: 0}", "claude: {prompt: p, permissions: ask}",
	} {
		if _, _, faults := narrow(subtaskManifest(t, less), parentRights()); len(faults) > 0 {
			t.Errorf("narrow(%s) = %v, want no fault", less, faults)
		}
	}
}

// TestSubtaskDefaultsAreNotTooMuch checks that a parent with less than the defaults can have
// subtasks whose manifests do not mention them.
func TestSubtaskDefaultsAreNotTooMuch(t *testing.T) {
	r := parentRights()
	r.priority, r.lifecycle.CancelGrace, r.lifecycle.MaxArtifactBytes = -5, measure.Duration(time.Second), 1<<20
	out, _, faults := narrow(subtaskManifest(t, ""), r)
	if l := out.Lifecycle; len(faults) > 0 || out.Metadata.Priority != -5 || l.CancelGrace != r.lifecycle.CancelGrace || l.MaxArtifactBytes != 1<<20 {
		t.Errorf("narrow(nothing) = priority %d, %+v, %v, want the parent's", out.Metadata.Priority, l, faults)
	}
}

func TestSubtaskCannotHaveMore(t *testing.T) {
	asks := parentRights()
	asks.agent = manifest.Agent{Kind: manifest.Claude, Permissions: manifest.AskPermissions}
	limited := parentRights()
	limited.agent = manifest.Agent{Kind: manifest.Claude, AllowedTools: []string{"Read"}}
	isolated := parentRights()
	isolated.mode = policy.Isolated
	for _, c := range []struct {
		asked, field string
		of           rights
	}{
		{"repository: {url: acme/other}", "repository.url", parentRights()},
		{"repository: {url: /etc}", "repository.url", parentRights()},
		{"vm: {profile: large}", "vm.profile", parentRights()},
		{"vm: {cpus: 3}", "vm.cpus", parentRights()},
		{"vm: {memory: 2G}", "vm.memory", parentRights()},
		{"vm: {disk: 9G}", "vm.disk", parentRights()},
		{"vm: {network_mode: open}", "vm.network_mode", parentRights()},
		{"vm: {network_mode: full}", "vm.network_mode", parentRights()},
		{"vm: {network_mode: allowlist}", "vm.network_mode", isolated},
		{"vm: {session: mine}", "vm.session", parentRights()},
		{"metadata: {priority: 1}", "metadata.priority", parentRights()},
		{"secrets: [{name: A, source: env, key: HOME}]", "secrets", parentRights()},
		{"secrets: [{name: A, source: cmd, key: id}]", "secrets", parentRights()},
		{"lifecycle: {cancel_grace: 1h}", "lifecycle.cancel_grace", parentRights()},
		{"lifecycle: {preserve_for: 30d}", "lifecycle.preserve_for", parentRights()},
		{"lifecycle: {max_artifact_bytes: 5G}", "lifecycle.max_artifact_bytes", parentRights()},
		{"lifecycle: {failure_action: preserve}", "lifecycle.failure_action", parentRights()},
		{"lifecycle: {hang_action: preserve}", "lifecycle.hang_action", parentRights()},
		{"", "agent", asks},
		{"claude: {prompt: p}", "agent", asks},
		{"claude: {prompt: p}", "agent", limited},
		{"claude: {prompt: p, allowed_tools: [Read, Bash]}", "agent", limited},
	} {
		_, _, faults := narrow(subtaskManifest(t, c.asked), c.of)
		if len(faults) != 1 || faults[0].Field != c.field || fail.CodeOf(faults[0].Err) != fail.Policy || fail.HintOf(faults[0].Err) == "" {
			t.Errorf("narrow(%s) = %v, want a fault of %s with a hint", c.asked, faults, c.field)
		}
	}
}

// FuzzNarrow checks that no manifest gets more than its parent has.
func FuzzNarrow(f *testing.F) {
	for _, seed := range []string{"vm: {cpus: 3}", "vm: {network_mode: full}\nclaude: {prompt: x}", "repository: {url: /etc}", "secrets: [{name: A, source: env, key: B}]"} {
		f.Add("version: \"1\"\nkind: Task\nagent: {kind: command, command: [a]}\n" + seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		asked, _, err := manifest.ParseSubtask("m", []byte(text))
		if err != nil {
			return
		}
		r := parentRights()
		out, _, faults := narrow(asked, r)
		if len(faults) > 0 {
			return
		}
		v := out.VM
		if out.Repository.URL != r.url || v.Session != "" || v.Profile != r.profile || v.CPUs > r.size.CPUs || config.Size(v.Memory) > r.size.Memory || config.Size(v.Disk) > r.size.Disk ||
			policy.Mode(v.Network()).Wider(r.mode) || v.NetworkMode == "" || len(out.Secrets) > 0 || time.Duration(out.Lifecycle.Timeout) > r.remaining ||
			out.Metadata.Priority > r.priority || out.Lifecycle.FailureAction == "preserve" || out.Lifecycle.HangAction == "preserve" {
			t.Errorf("narrow(%q) = %+v, want at most the parent's rights", text, out)
		}
	})
}

// withSubtasks allows subtasks in the settings of m.
func withSubtasks(t *testing.T, m *Manager, text string) {
	t.Helper()
	if err := os.MkdirAll(m.Sessions.Config.Paths.Config, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.Sessions.Config.Paths.Config, "config.yaml"), []byte("subtasks: "+text+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := m.Sessions.Config.Reload()
	if err != nil {
		t.Fatal(err)
	}
	m.Sessions.Config = c
}

// parent adds a ready session, of a task or of a user.
func parent(t *testing.T, m *Manager, id, task string, spec session.Spec, status session.Status) session.Session {
	t.Helper()
	spec.Repo, spec.Enforced = repo.Ref{URL: "https://github.com/acme/app.git", Key: "github.com/acme/app", Slug: "acme/app"}, true
	spec.Resources = config.Resources{CPUs: 1, Memory: 512 << 20, Disk: 4 << 30}
	status.Base = &repo.Base{Commit: strings.Repeat("a", 40), Branch: "main"}
	rawSpec, err1 := json.Marshal(spec)
	rawStatus, err2 := json.Marshal(status)
	_, _, err3 := m.store().Create(t.Context(), store.Session{
		ID: id, Name: "agent-acme-app-" + id, RepoKey: "github.com/acme/app", Repo: "acme/app", Task: task, Phase: "ready", Desired: "ready", Spec: rawSpec, Status: rawStatus,
	}, store.Event{Kind: "made"}, func([]store.Session) error { return nil })
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	s, err := m.Sessions.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func submitBelow(t *testing.T, m *Manager, session, fields string) (Task, error) {
	t.Helper()
	task, _, err := m.Submit(t.Context(), subtaskManifest(t, fields), Submission{Session: session, Actor: "session:" + session})
	return task, err
}

// run makes a task run, in a session with that id.
func (m *Manager) run(t *testing.T, task Task, id string) {
	t.Helper()
	for _, to := range []Phase{Staging, Provisioning, Ready, Running} {
		from := map[Phase]Phase{Staging: Pending, Provisioning: Staging, Ready: Provisioning, Running: Ready}[to]
		if _, err := m.store().AdvanceTask(t.Context(), task.ID, string(from), string(to), store.Event{Kind: "phase"}, func(row *store.Task) { row.SessionID = id }); err != nil {
			t.Fatal(err)
		}
	}
	r, err := task.sessionRequest()
	if err != nil {
		t.Fatal(err)
	}
	parent(t, m, id, task.ID, session.Spec{Profile: r.Profile, NetworkMode: r.NetworkMode, Within: r.Within}, session.Status{})
}

func TestParallelSubmissionsStopAtTheLimit(t *testing.T) {
	m := newManager(t, 2, 100)
	withSubtasks(t, m, "{count: 7, depth: 3, running: 2}")
	parent(t, m, "aaaaaaaaaaaa", "", session.Spec{}, session.Status{})
	var accepted, refused int
	var mu sync.Mutex
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			_, err := submitBelow(t, m, "aaaaaaaaaaaa", "")
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				accepted++
			case fail.CodeOf(err) == fail.Policy && strings.Contains(err.Error(), "limit of 7 subtasks"):
				refused++
			default:
				t.Errorf("Submit = %v, want the limit", err)
			}
		})
	}
	all.Wait()
	if accepted != 7 || refused != 43 {
		t.Errorf("50 submissions = %d accepted, %d refused, want 7, 43", accepted, refused)
	}
	// Only some of them run at once, and other tasks have their slots.
	other := submit(t, m, "other", "small", 0)
	if names := started(t, m); len(names) != 3 || names[2] != other.Name {
		t.Errorf("started = %v, want 2 subtasks and %s", names, other.Name)
	}
	evs, err := m.store().Events(t.Context(), "aaaaaaaaaaaa", store.Oldest, 100)
	if err != nil || len(evs) != 8 {
		t.Errorf("events of the parent = %d, %v, want 1 and one of each subtask", len(evs), err)
	}
}

func TestSubmissionsAreLimitedByTime(t *testing.T) {
	m := newManager(t, 2, 100)
	withSubtasks(t, m, "{count: 1000, depth: 3, running: 2}")
	parent(t, m, "aaaaaaaaaaaa", "", session.Spec{}, session.Status{})
	for i := range submitsPerMinute + 1 {
		_, err := submitBelow(t, m, "aaaaaaaaaaaa", "")
		if want := i == submitsPerMinute; (fail.CodeOf(err) == fail.Conflict) != want || (err != nil) != want {
			t.Fatalf("submission %d = %v, want an error: %t", i+1, err, want)
		}
	}
}

func TestTreeOfSubtasks(t *testing.T) {
	m := newManager(t, 1, 100)
	withSubtasks(t, m, "{count: 100, depth: 3, running: 1}")
	top := submit(t, m, "top", "small", 0)
	started(t, m)
	parent(t, m, "000000000001", top.ID, session.Spec{Profile: "small"}, session.Status{})
	if _, err := m.store().AdvanceTask(t.Context(), top.ID, "STAGING", "RUNNING", store.Event{Kind: "phase"}, func(row *store.Task) { row.SessionID = "000000000001" }); err != nil {
		t.Fatal(err)
	}
	at, chain := "000000000001", []Task{}
	for depth := 1; depth <= 3; depth++ {
		task, err := submitBelow(t, m, at, fmt.Sprintf("metadata: {name: level%d}\nsubtasks: {count: 2}", depth))
		if err != nil || task.Depth != depth || task.Root != top.ID {
			t.Fatalf("subtask of depth %d = %+v, %v, want root %s", depth, task.Task, err, top.ID)
		}
		// With one slot and one subtask of each parent, all can run.
		at = fmt.Sprintf("00000000001%d", depth)
		m.run(t, task, at)
		chain = append(chain, task)
	}
	if _, err := submitBelow(t, m, at, ""); err == nil || !strings.Contains(err.Error(), "limit of 3 levels") {
		t.Errorf("the fourth level = %v, want the limit", err)
	}
	if _, err := submitBelow(t, m, "000000000011", ""); err == nil || !strings.Contains(err.Error(), "limit of 2 subtasks of "+chain[0].ID) {
		t.Errorf("a third subtask below level 1 = %v, want its own limit", err)
	}
	s, err := m.Sessions.Get(t.Context(), at)
	if want := top.ID + "/" + chain[0].ID + "/" + chain[1].ID + "/" + chain[2].ID + "/"; err != nil || s.Tree() != want {
		t.Errorf("tree of the deepest session = %s, %v, want %s", s.Tree(), err, want)
	}
	if kin, err := m.Below(t.Context(), chain[0].ID); err != nil || len(kin) != 2 {
		t.Errorf("below level 1 = %v, %v, want 2", kin, err)
	}
	// A cancelled task ends everything below it, however often the cascade is repeated.
	if _, err := m.SetDesired(t.Context(), chain[0], Cancel, Client{}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := m.Cascade(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, task := range chain {
		if now, err := m.Get(t.Context(), task.ID); err != nil || now.Desired != Cancel {
			t.Errorf("%s = desired %s, %v, want %s", task.Name, now.Desired, err, Cancel)
		}
	}
	if now, _ := m.Get(t.Context(), top.ID); now.Desired != Run {
		t.Errorf("desired phase of the top = %s, want %s", now.Desired, Run)
	}
	if _, err := submitBelow(t, m, "000000000011", ""); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("a subtask of a cancelled task = %v, want %v", err, fail.Conflict)
	}
}

func TestOrphans(t *testing.T) {
	for _, c := range []struct {
		orphans string
		want    DesiredPhase
	}{{"cancel", Cancel}, {"keep", Run}} {
		m := newManager(t, 1, 100)
		withSubtasks(t, m, "{count: 100, depth: 3, running: 2}")
		root := parent(t, m, "aaaaaaaaaaaa", "", session.Spec{}, session.Status{})
		mid, err := submitBelow(t, m, root.ID, "subtasks: {orphans: "+c.orphans+"}")
		if err != nil {
			t.Fatal(err)
		}
		m.run(t, mid, "000000000011")
		leaf, err := submitBelow(t, m, "000000000011", "")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.store().UpdateTask(t.Context(), mid.ID, func(row *store.Task) ([]store.Event, error) { row.Phase = string(Completed); return nil, nil }); err != nil {
			t.Fatal(err)
		}
		if err := m.Schedule(t.Context()); err != nil {
			t.Fatal(err)
		}
		if now, err := m.Get(t.Context(), leaf.ID); err != nil || now.Desired != c.want {
			t.Errorf("orphans: %s = desired %s, %v, want %s", c.orphans, now.Desired, err, c.want)
		}
		// The end of the root ends it in any case.
		if _, err := m.Sessions.SetDesired(t.Context(), root, session.Gone); err != nil {
			t.Fatal(err)
		}
		if err := m.Schedule(t.Context()); err != nil {
			t.Fatal(err)
		}
		if now, err := m.Get(t.Context(), leaf.ID); err != nil || now.Desired != Cancel {
			t.Errorf("orphans: %s, after its root = desired %s, %v, want %s", c.orphans, now.Desired, err, Cancel)
		}
	}
}

// TestNetworkIsNeverWider checks what a subtask reaches of what its parent reaches.
func TestNetworkIsNeverWider(t *testing.T) {
	m := newManager(t, 1, 100)
	if err := os.MkdirAll(m.Sessions.Config.Paths.Config, 0o700); err != nil {
		t.Fatal(err)
	}
	text := "subtasks: {count: 10, depth: 3, running: 2}\nnetwork: {allow: [a.example.org, b.example.org, c.example.org]}\n"
	if err := os.WriteFile(filepath.Join(m.Sessions.Config.Paths.Config, "config.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := m.Sessions.Config.Reload()
	if err != nil {
		t.Fatal(err)
	}
	m.Sessions.Config = c
	rule := func(name string) policy.Rule { return policy.Rule{Pattern: name, Source: "net"} }
	project := &config.Project{}
	project.Network.Deny = []config.Name{"c.example.org"}
	root := parent(t, m, "aaaaaaaaaaaa", "", session.Spec{HostServices: []netip.AddrPort{netip.MustParseAddrPort("192.168.1.2:80")}}, session.Status{
		Project: project, Net: config.Additions{Allow: []policy.Rule{rule("own.example.org")}, Deny: []policy.Rule{rule("b.example.org")}},
	})
	child, err := submitBelow(t, m, root.ID, "")
	if err != nil {
		t.Fatal(err)
	}
	m.run(t, child, "000000000011")
	s, err := m.Sessions.Get(t.Context(), "000000000011")
	if err != nil {
		t.Fatal(err)
	}
	p, err := session.Net{Sessions: m.Sessions}.Policy(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	public := netip.MustParseAddr("93.184.216.34")
	for name, want := range map[string]bool{
		"a.example.org":   true,
		"b.example.org":   false, // net deny of the parent
		"c.example.org":   false, // the parent's repository
		"own.example.org": false, // net allow of the parent, for it alone
	} {
		if d := p.Decide(policy.Question{Name: name, Addr: public, Port: 443}); d.Allowed != want {
			t.Errorf("%s = %+v, want allowed: %t", name, d, want)
		}
	}
	// A later denial of the parent applies too, and may be taken back.
	net, a := session.Net{Sessions: m.Sessions}, policy.Question{Name: "a.example.org", Addr: public, Port: 443}
	for _, c := range []struct {
		change func(context.Context, session.Session, []string) (session.Session, error)
		want   bool
		told   int // gateways
	}{{net.Deny, false, 2}, {net.Allow, true, 1}} {
		// It is stored, although no gateway runs.
		if _, err := c.change(t.Context(), root, []string{a.Name}); strings.Count(fmt.Sprint(err), "gateway is not running") != c.told {
			t.Errorf("change of the parent = %v, want that %d gateways do not run", err, c.told)
		}
		if root, err = m.Sessions.Get(t.Context(), root.ID); err != nil {
			t.Fatal(err)
		}
		after, err := net.Policy(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		if d := after.Decide(a); d.Allowed != c.want {
			t.Errorf("%s after a change of the parent = %+v, want allowed: %t", a.Name, d, c.want)
		}
	}
	if len(p.HostServices) > 0 {
		t.Errorf("host services = %v, want none: they were opened for the parent alone", p.HostServices)
	}
}
