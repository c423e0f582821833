package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/recording"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/fake"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// host is an implementation of ops.Host with the caller's scope.
type host struct {
	ops.Host
	*rig
	said *strings.Builder // what the operations answered, for comparison
}

// ask performs an operation and writes down the answer.
func ask[Request, Result any](h host, op ops.Operation[Request, Result], r Request) (Result, error) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(traceid.With(h.t.Context(), traceID), deadline)
	defer cancel()
	result, err := op.On(ctx, h.Host, r)
	if err != nil {
		fmt.Fprintf(h.said, "%s: %s %v (%s)\n", op.ID, fail.CodeOf(err), err, fail.HintOf(err))
		return result, err
	}
	text, err := json.Marshal(result)
	if err != nil {
		h.t.Fatal(err)
	}
	fmt.Fprintf(h.said, "%s: %s\n", op.ID, text)
	return result, nil
}

// mustAsk performs an operation that must succeed.
func mustAsk[Request, Result any](h host, op ops.Operation[Request, Result], r Request) Result {
	h.t.Helper()
	result, err := ask(h, op, r)
	if err != nil {
		h.t.Fatalf("%s = %v (%s), want success", op.ID, err, fail.HintOf(err))
	}
	return result
}

// refused performs an operation that must fail with a code.
func refused[Request, Result any](h host, code fail.Code, op ops.Operation[Request, Result], r Request) {
	h.t.Helper()
	if result, err := ask(h, op, r); fail.CodeOf(err) != code || fail.HintOf(err) == "" {
		h.t.Errorf("%s = %+v, %v (hint %q), want code %s with a hint", op.ID, result, err, fail.HintOf(err), code)
	}
}

// TestOperations checks that the engine and a client of its API answer every operation alike.
func TestOperations(t *testing.T) {
	implementations := map[string]func(r *rig, scope ops.Scope) ops.Host{
		"engine": func(r *rig, scope ops.Scope) ops.Host {
			caller := ops.Caller{Name: "token:" + string(scope), Scope: scope}
			if scope != ops.Admin {
				caller.Permission = &task.Permission{Repositories: []string{"github.com/acme/app"}}
			}
			return r.engine.As(caller)
		},
		"client over an address": func(r *rig, scope ops.Scope) ops.Host {
			c, err := client.New(client.Target{URL: "http://" + r.addr, Token: r.token[scope]})
			if err != nil {
				t.Fatal(err)
			}
			return c
		},
	}
	answers := map[string]string{}
	for name, of := range implementations {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Limits{})
			r.engine.Images = &image.Store{Dir: r.tasks.Sessions.Config.Paths.Images()}
			r.engine.Redact = secret.NewRedactor()
			r.engine.Preflight = func(context.Context, string) error { return nil }
			driver, err := fake.New(fake.Options{Dir: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			r.engine.Driver = func() (vm.Driver, error) { return driver, nil }
			var said strings.Builder
			uses := map[string]bool{}
			as := func(scope ops.Scope) host { return host{recordingHost{of(r, scope), uses}, r, &said} }
			checkSessions(as)
			checkTasks(as)
			checkTaskFiles(as)
			checkRecordings(as)
			checkRest(as)
			checkGuest(as)
			checkQuestions(as)
			checkGatewayQuestions(as)
			checkCluster(as)
			answers[name] = normal(said.String())
			checkUses(t, uses)
		})
	}
	if diff := cmp.Diff(answers["engine"], answers["client over an address"]); diff != "" {
		t.Errorf("answers differ (-engine +client):\n%s", diff)
	}
}

// recordingHost records which operations and methods of a Host were used, and whether once
// successfully.
type recordingHost struct {
	ops.Host
	uses map[string]bool
}

func (h recordingHost) record(use string, err error) { h.uses[use] = h.uses[use] || err == nil }

func (h recordingHost) Perform(ctx context.Context, c ops.Call) error {
	err := h.Host.Perform(ctx, c)
	h.record("Perform", err)
	h.record(c.ID, err)
	return err
}

func (h recordingHost) Events(ctx context.Context, of ops.Subject, after int64, follow bool) iter.Seq2[store.Event, error] {
	return func(yield func(store.Event, error) bool) {
		for ev, err := range h.Host.Events(ctx, of, after, follow) {
			h.record("Events", err)
			if !yield(ev, err) {
				return
			}
		}
	}
}

func (h recordingHost) Read(ctx context.Context, f ops.File) (io.ReadCloser, error) {
	r, err := h.Host.Read(ctx, f)
	h.record("Read", err)
	return r, err
}

func (h recordingHost) Dial(ctx context.Context, id string, shared bool) (*ssh.Client, error) {
	c, err := h.Host.Dial(ctx, id, shared)
	h.record("Dial", err)
	return c, err
}

// onlyRefused are the operations that do not succeed in this test, because they wait for the
// session's keeper, and the script in which each succeeds instead.
var onlyRefused = map[string]string{
	"createCheckpoint": "checkpoint", "removeCheckpoint": "checkpoint", "restoreCheckpoint": "checkpoint", "forkSession": "fork",
	"publishPorts": "enforce", "renewLease": "lifetime", "rebindWorkspace": "workspace",
}

// checkUses checks that each operation of package ops, and each method of ops.Host, was used
// successfully, so that a new one must get a case here.
func checkUses(t *testing.T, uses map[string]bool) {
	t.Helper()
	known := operationIDs(t)
	for m := range reflect.TypeFor[ops.Host]().Methods() {
		known = append(known, m.Name)
	}
	for _, name := range known {
		succeeded, used := uses[name]
		reason := onlyRefused[name]
		switch {
		case !used:
			t.Errorf("%s has no case, want one in TestOperations", name)
		case !succeeded && reason == "":
			t.Errorf("%s never succeeded, want a case in which it does", name)
		case succeeded && reason != "":
			t.Errorf("%s succeeded, want it removed from onlyRefused", name)
		}
	}
	for name, script := range onlyRefused {
		if _, err := os.Stat("../../test/script/testdata/" + script + ".txtar"); err != nil || !slices.Contains(known, name) {
			t.Errorf("%s in onlyRefused: %v, want an operation and its script", name, err)
		}
	}
}

// operationIDs returns the ids of all operations in the source of package ops.
func operationIDs(t *testing.T) (ids []string) {
	t.Helper()
	files, err := filepath.Glob("../ops/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			lit, ok := n.(*ast.CompositeLit)
			if !ok {
				return true
			}
			if of, ok := lit.Type.(*ast.IndexListExpr); !ok || fmt.Sprint(of.X) != "Operation" || len(lit.Elts) == 0 {
				return true
			}
			spec, ok := lit.Elts[0].(*ast.CompositeLit)
			for i := 0; ok && i < len(spec.Elts); i++ {
				if kv, ok := spec.Elts[i].(*ast.KeyValueExpr); ok && fmt.Sprint(kv.Key) == "ID" {
					id, err := strconv.Unquote(kv.Value.(*ast.BasicLit).Value)
					if err != nil || slices.Contains(ids, id) {
						t.Fatalf("operation id %q in %s: %v, want another one for each", id, name, err)
					}
					ids = append(ids, id)
					return true
				}
			}
			t.Fatalf("an operation in %s has no id that can be read", name)
			return true
		})
	}
	if len(ids) < 60 {
		t.Fatalf("operations in the source = %v, want more", ids)
	}
	return ids
}

var (
	anyTime = regexp.MustCompile(`\d{4}-\d\d-\d\dT[\d:.]+Z?([+-]\d\d:\d\d)?`)
	anyID   = regexp.MustCompile(`\b[0-9a-f]{12}\b|\b[0-9a-f]{32}\b|-[0-9a-f]{6}\b`)
	anyLink = regexp.MustCompile(`http://[^"]+#code=[\w-]+`)
	figures = regexp.MustCompile(`"(seq|images|vms|mirrors|tasks|sessions|free)":\d+`)
	anyPath = regexp.MustCompile(`"(sha256|digest)":"[0-9a-f]+"`)
	anyDir  = regexp.MustCompile(`"(dir|root)":"[^"]*/agent-`)
	anyPort = regexp.MustCompile(`"127\.0\.0\.1:\d+"`)
)

// normal replaces what differs between two runs.
func normal(text string) string {
	ids := map[string]string{}
	text = figures.ReplaceAllString(text, `"$1":N`)
	text = anyLink.ReplaceAllString(text, "LINK")
	text = anyPort.ReplaceAllString(anyDir.ReplaceAllString(text, `"$1":"DIR/agent-`), `"PORT"`)
	text = anyPath.ReplaceAllString(anyTime.ReplaceAllString(text, "TIME"), `"DIGEST"`)
	return anyID.ReplaceAllStringFunc(text, func(id string) string {
		key := strings.TrimPrefix(id, "-")
		key = key[:6] // a name has the first digits of the id
		if ids[key] == "" {
			ids[key] = fmt.Sprintf("ID%d", len(ids))
		}
		return ids[key]
	})
}

func checkSessions(as func(ops.Scope) host) {
	h, reader := as(ops.Admin), as(ops.Read)
	t := h.t
	if list := mustAsk(reader, ops.ListSessions, struct{}{}); len(list.Sessions) != 0 {
		t.Errorf("sessions = %v, want none", list.Sessions)
	}
	refused(reader, fail.NotFound, ops.GetSession, ops.SessionPath{ID: "0123456789ab"})
	refused(reader, fail.NotFound, ops.GetSession, ops.SessionPath{ID: "../x"})

	create := ops.CreateRequest{Body: ops.NewSession{Repo: "acme/app@main", SessionOptions: ops.SessionOptions{Network: "allowlist"}}}
	refused(reader, fail.Policy, ops.CreateSession, create)
	refused(h, fail.Usage, ops.CreateSession, ops.CreateRequest{Body: ops.NewSession{Repo: "no repository"}})
	refused(h, fail.Usage, ops.CreateSession, ops.CreateRequest{Body: ops.NewSession{Repo: "./app"}})
	mustAsk(h, ops.CheckSession, create)
	if list := mustAsk(reader, ops.ListSessions, struct{}{}); len(list.Sessions) != 0 {
		t.Errorf("sessions after a check = %v, want none", list.Sessions)
	}
	made := mustAsk(h, ops.CreateSession, create)
	again := mustAsk(h, ops.CreateSession, create)
	if !made.Created || again.Created || again.ID != made.ID || made.State != session.Creating {
		t.Errorf("sessions created = %+v and %+v, want one, in state creating", made, again)
	}
	// Another session of the repository. A repeated request makes no other one.
	another := create
	another.Key, another.Body.New = "k1", true
	second, repeated := mustAsk(h, ops.CreateSession, another), mustAsk(h, ops.CreateSession, another)
	if second.ID == made.ID || second.Label != "main-2" || repeated.ID != second.ID {
		t.Errorf("new sessions = %s (label %q), then with the same key %s, want another of %s with label main-2, twice", second.Name, second.Label, repeated.Name, made.Name)
	}
	other := another
	other.Body.Label = "fix"
	refused(h, fail.Conflict, ops.CreateSession, other) // the key of another request
	other.Key, other.Body.New = "", false
	refused(h, fail.Usage, ops.CreateSession, other)
	other.Body.New = true
	if v := mustAsk(h, ops.CreateSession, other); v.DisplayName() != "acme/app@fix" {
		t.Errorf("session with a label = %s, want acme/app@fix", v.DisplayName())
	}
	other.Key = "k2"
	refused(h, fail.Conflict, ops.CreateSession, other)
	like := ops.CreateRequest{Body: ops.NewSession{New: true, Like: second.ID}}
	third := mustAsk(h, ops.CreateSession, like)
	if third.DisplayName() != "acme/app@main-3" || third.RequestedBranch != "main" {
		t.Errorf("session like %s = %s of branch %q, want acme/app@main-3 of main", second.Name, third.DisplayName(), third.RequestedBranch)
	}
	plain := ops.CreateRequest{Once: ops.Once{Key: "k3"}, Body: ops.NewSession{Repo: "acme/app"}}
	refused(h, fail.Usage, ops.CreateSession, plain) // every session has a label
	plain.Body.New = true
	refused(h, fail.Usage, ops.CreateSession, ops.CreateRequest{Body: ops.NewSession{New: true}})
	if v := mustAsk(h, ops.CreateSession, plain); v.DisplayName() != "acme/app" {
		t.Errorf("new session = %s, want acme/app", v.DisplayName())
	}
	// A session without a label does not hide those with one.
	if v := mustAsk(h, ops.CreateSession, create); v.ID != made.ID {
		t.Errorf("session of acme/app@main = %s, want %s", v.Name, made.Name)
	}
	// A key that found a session stays bound to it.
	found := create
	found.Key = "k4"
	for range 2 {
		if v := mustAsk(h, ops.CreateSession, found); v.ID != made.ID || v.Created {
			t.Errorf("session of acme/app@main = %s, created %t, want %s, not created", v.Name, v.Created, made.Name)
		}
	}
	for _, name := range []string{"acme/app", "acme/app@fix", "acme/app@main-2", "acme/app@main-3"} {
		v := mustAsk(h, ops.FindSession, ops.FindRequest{Name: name, Gone: true})
		mustAsk(h, ops.DestroySession, ops.DestroyRequest{SessionPath: ops.SessionPath{ID: v.ID}, Force: true})
	}

	at := ops.SessionPath{ID: made.ID}
	if v := mustAsk(reader, ops.GetSession, at); v.Name != made.Name || v.RepoKey != "github.com/acme/app" {
		t.Errorf("session = %+v, want that of acme/app", v)
	}

	refused(reader, fail.Policy, ops.VisitSession, at)
	if v := mustAsk(h, ops.VisitSession, at); v.ID != made.ID {
		t.Errorf("visited session = %s, want %s", v.ID, made.ID)
	}
	if p := mustAsk(reader, ops.GetProgress, at); p.Session.ID != made.ID || p.Newest < 1 || p.After >= p.Newest {
		t.Errorf("progress = %+v, want the session, and its work after an event before the newest", p)
	}
	refused(reader, fail.NotFound, ops.GetProgress, ops.SessionPath{ID: "0123456789ab"})
	refused(reader, fail.Policy, ops.TendSession, at)
	if v := mustAsk(h, ops.TendSession, at); v.State != session.Creating {
		t.Errorf("session with a keeper = %+v, want it in state creating", v)
	}
	refused(h, fail.NotFound, ops.TendSession, ops.SessionPath{ID: "0123456789ab"})
	open := ops.OpenRequest{SessionPath: at}
	refused(reader, fail.Policy, ops.OpenSession, open)
	if a := mustAsk(h, ops.OpenSession, open); a.ID != made.ID || a.Created {
		t.Errorf("opened session = %+v, want %s, not created", a, made.ID)
	}
	refused(h, fail.NotFound, ops.OpenSession, ops.OpenRequest{SessionPath: ops.SessionPath{ID: "0123456789ab"}})

	renew := ops.LeaseRequest{SessionPath: at}
	refused(reader, fail.Policy, ops.RenewLease, renew)
	refused(h, fail.Conflict, ops.RenewLease, renew) // the settings have no lease
	renew.Body.For = "soon"
	refused(h, fail.Usage, ops.RenewLease, renew)

	login := ops.LoginRequest{SessionPath: at}
	_, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	login.Body.PublicKey = public
	refused(reader, fail.Policy, ops.LoginSession, login)
	refused(h, fail.Conflict, ops.LoginSession, login) // it has no VM
	refused(h, fail.NotFound, ops.LoginSession, ops.LoginRequest{SessionPath: ops.SessionPath{ID: "0123456789ab"}, Body: login.Body})

	keep := ops.CheckpointRequest{SessionPath: at}
	kept := ops.CheckpointPath{SessionPath: at, Name: "one"}
	refused(reader, fail.Policy, ops.CreateCheckpoint, keep)
	refused(h, fail.Conflict, ops.CreateCheckpoint, keep) // it does not run
	if l := mustAsk(reader, ops.ListCheckpoints, at); len(l.Checkpoints) != 0 {
		t.Errorf("checkpoints = %+v, want none", l)
	}
	refused(reader, fail.Policy, ops.RestoreCheckpoint, kept)
	refused(h, fail.Conflict, ops.RestoreCheckpoint, kept)
	refused(h, fail.NotFound, ops.RemoveCheckpoint, kept)
	fork := ops.ForkRequest{SessionPath: at}
	refused(reader, fail.Policy, ops.ForkSession, fork)
	refused(h, fail.Conflict, ops.ForkSession, fork)
	fork.Body.Checkpoint = "one"
	refused(h, fail.NotFound, ops.ForkSession, fork)
	fork.Body.Label = "a b"
	refused(h, fail.Usage, ops.ForkSession, fork)
	refused(h, fail.Conflict, ops.StopSession, ops.StopRequest{SessionPath: at, Suspend: true})

	scratch := ops.WorkspacePath{Name: "scratch"}
	var workspace ops.WorkspaceRequest
	workspace.Body.Name = "scratch"
	refused(reader, fail.Policy, ops.CreateWorkspace, workspace)
	if ws := mustAsk(h, ops.CreateWorkspace, workspace); ws.Size != session.DefaultWorkspace || ws.Session != "" {
		t.Errorf("workspace = %+v, want an unused one of the default size", ws)
	}
	refused(h, fail.Conflict, ops.CreateWorkspace, workspace)
	attach := ops.AttachWorkspaceRequest{WorkspacePath: scratch}
	attach.Body.Session = made.ID
	refused(reader, fail.Policy, ops.AttachWorkspace, attach)
	refused(h, fail.Conflict, ops.AttachWorkspace, attach) // it is not stopped
	grow := ops.ResizeWorkspaceRequest{WorkspacePath: scratch}
	grow.Body.Size = 100 << 30
	refused(reader, fail.Policy, ops.ResizeWorkspace, grow)
	if ws := mustAsk(h, ops.ResizeWorkspace, grow); ws.Size != 100<<30 {
		t.Errorf("workspace = %+v, want the new size", ws)
	}
	rebind := ops.RebindWorkspaceRequest{WorkspacePath: scratch}
	refused(reader, fail.Policy, ops.RebindWorkspace, rebind)
	refused(h, fail.Conflict, ops.RebindWorkspace, rebind) // no session has it
	mustAsk(h, ops.DetachWorkspace, scratch)
	if l := mustAsk(reader, ops.ListWorkspaces, struct{}{}); len(l.Workspaces) != 1 || l.Workspaces[0] != mustAsk(reader, ops.GetWorkspace, scratch) {
		t.Errorf("workspaces = %+v, want the one", l)
	}
	refused(reader, fail.Policy, ops.DeleteWorkspace, scratch)
	mustAsk(h, ops.DeleteWorkspace, scratch)
	refused(h, fail.NotFound, ops.GetWorkspace, scratch)

	// What a session may reach.
	files := ops.NamesRequest{SessionPath: at}
	files.Body.Names = []string{"files.example.org"}
	explain := ops.ExplainRequest{SessionPath: at, Target: "files.example.org:443"}
	allowed := func() bool { t.Helper(); return mustAsk(reader, ops.ExplainName, explain).Decisions[0].Allowed }
	if allowed() {
		t.Error("files.example.org is allowed, want denied")
	}
	refused(reader, fail.Policy, ops.AllowNames, files)
	mustAsk(h, ops.AllowNames, files)
	if !allowed() {
		t.Error("files.example.org is denied after net allow")
	}
	mustAsk(h, ops.DenyNames, files)
	if allowed() {
		t.Error("files.example.org is allowed after net deny")
	}
	refused(reader, fail.Policy, ops.ReloadNetwork, at)
	refused(h, fail.Conflict, ops.ReloadNetwork, at) // it is not running
	bad := files
	bad.Body.Names = []string{"not a name"}
	if _, err := ask(h, ops.AllowNames, bad); fail.CodeOf(err) != fail.Usage {
		t.Errorf("allow of a wrong name = %v, want code %s", err, fail.Usage)
	}
	if n := mustAsk(reader, ops.GetNetwork, at); n.Policy == nil || len(n.Policy.Denied) != 1 || n.Gateway != nil {
		t.Errorf("network = %+v, want one denied name and no gateway", n)
	}
	mustAsk(reader, ops.ListDenials, ops.DenialQuery{SessionPath: at})
	mustAsk(reader, ops.ListDecisions, ops.DecisionQuery{SessionPath: at, Limit: 10})
	for range cap(h.engine.Costly) { // as many as are allowed
		h.engine.Costly <- struct{}{}
	}
	refused(reader, fail.Conflict, ops.ListDecisions, ops.DecisionQuery{SessionPath: at, Limit: 10})
	for range cap(h.engine.Costly) {
		<-h.engine.Costly
	}

	// What models may be used for, and were.
	limit := ops.BudgetRequest{SessionPath: at}
	limit.Body.Session, limit.Body.Tokens = "5 USD", "2M"
	refused(reader, fail.Policy, ops.SetBudget, limit)
	mustAsk(h, ops.SetBudget, limit)
	limit.Body.Session, limit.Body.Tokens = "", "none"
	mustAsk(h, ops.SetBudget, limit)
	use := store.Usage{Session: made.ID, Request: "1", At: time.Now(), RepoKey: "github.com/acme/app", Model: "m", Input: 10, Cost: 2e9}
	if err := h.store.ReserveUsage(t.Context(), use, nil); err != nil {
		t.Fatal(err)
	}
	if b := mustAsk(reader, ops.GetBudget, at); b.Budget != (config.Budget{Session: 5e9}) || b.Used == nil || b.Used.USD != 2 || b.Today.Tokens != 10 {
		t.Errorf("budget = %+v, want 5 USD without a limit of tokens, 2 USD of 10 tokens used", b)
	}
	if u := mustAsk(reader, ops.GetUsage, ops.UsageRequest{By: "session", Repo: "acme/app"}); len(u.Uses) != 1 || u.Uses[0].Name != made.Name || u.Uses[0].USD != 2 {
		t.Errorf("usage = %+v, want 2 USD of %s", u, made.Name)
	}
	if u := mustAsk(reader, ops.GetUsage, ops.UsageRequest{By: "model", Since: time.Now().Add(time.Hour)}); len(u.Uses) != 0 || u.Total != nil {
		t.Errorf("usage in an hour = %+v, want none", u)
	}
	if v := mustAsk(reader, ops.GetSession, at); v.Usage == nil || v.Usage.Tokens != 10 {
		t.Errorf("usage of the session = %+v, want 10 tokens", v.Usage)
	}
	limit.Body.Tokens = "many"
	if _, err := ask(h, ops.SetBudget, limit); fail.CodeOf(err) != fail.Usage {
		t.Errorf("budget of many tokens = %v, want code %s", err, fail.Usage)
	}

	// What needs a running VM.
	refused(reader, fail.Policy, ops.RefreshSecrets, at)
	refused(h, fail.Conflict, ops.RefreshSecrets, at)
	refused(h, fail.Conflict, ops.DiffSession, at)
	refused(h, fail.Conflict, ops.FetchSession, at)
	refused(reader, fail.Conflict, ops.GetScreen, at)
	prompt := ops.PromptRequest{SessionPath: at}
	prompt.Body.Text = "go on"
	refused(reader, fail.Policy, ops.SendPrompt, prompt)
	refused(h, fail.Conflict, ops.SendPrompt, prompt)
	prompt.Body.Text = "\n"
	refused(h, fail.Usage, ops.SendPrompt, prompt)
	run := ops.RunRequest{SessionPath: at}
	run.Body.Command = "ls"
	refused(reader, fail.Policy, ops.RunCommand, run)
	refused(h, fail.Conflict, ops.RunCommand, run)
	run.Body.Command = " "
	refused(h, fail.Usage, ops.RunCommand, run)
	ports := ops.PortsRequest{SessionPath: at}
	ports.Body.Ports = []uint16{3000}
	refused(h, fail.Conflict, ops.PublishPorts, ports)
	mustAsk(h, ops.UnpublishPort, ops.PortRequest{SessionPath: at, Port: 3000})

	// Desired phases, and the events that report them.
	mustAsk(h, ops.StopSession, ops.StopRequest{SessionPath: at})
	if v := mustAsk(h, ops.StartSession, at); v.Desired != session.Ready {
		t.Errorf("desired phase after start = %s, want %s", v.Desired, session.Ready)
	}
	if lost := mustAsk(reader, ops.GetUnsaved, at); lost.What != "" {
		t.Errorf("unsaved work = %+v, want none", lost)
	}
	if v := mustAsk(h, ops.DestroySession, ops.DestroyRequest{SessionPath: at}); v.Desired != session.Gone {
		t.Errorf("desired phase after destroy = %s, want %s", v.Desired, session.Gone)
	}
	ctx, cancel := context.WithTimeout(traceid.With(t.Context(), traceID), deadline)
	defer cancel()
	var kinds []string
	for ev, err := range reader.Events(ctx, ops.Session(made.ID), store.Oldest, true) {
		if err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, ev.Kind)
		if len(kinds) == 6 { // created, allow, deny, stop, start, destroy
			break
		}
	}
	if got, want := strings.Join(kinds, " "), "phase net net phase phase phase"; got != want {
		t.Errorf("events = %s, want %s", got, want)
	}
}

func checkTasks(as func(ops.Scope) host) {
	h, client, reader := as(ops.Admin), as(ops.Submit), as(ops.Read)
	t := h.t
	submit := func(text, key string) ops.SubmitRequest {
		return ops.SubmitRequest{Once: ops.Once{Key: key}, ContentType: "application/yaml", RawBody: []byte(text)}
	}
	refused(reader, fail.Policy, ops.SubmitTask, submit(manifestYAML, ""))
	refused(client, fail.Usage, ops.SubmitTask, submit("version: 9\n", ""))
	refused(client, fail.Policy, ops.SubmitTask, submit(strings.Replace(manifestYAML, "acme/app", "other/app", 1), ""))
	refused(reader, fail.Policy, ops.CheckTask, submit(manifestYAML, ""))
	refused(client, fail.Usage, ops.CheckTask, submit("version: 9\n", ""))
	if c := mustAsk(client, ops.CheckTask, submit(manifestYAML, "")); c.Repository != "acme/app" || !strings.Contains(string(c.Manifest), `"retries"`) {
		t.Errorf("checked manifest of %s = %s, want one of acme/app with defaults", c.Repository, c.Manifest)
	}
	made := mustAsk(client, ops.SubmitTask, submit(manifestYAML, "once"))
	if again := mustAsk(client, ops.SubmitTask, submit(manifestYAML, "once")); again.ID != made.ID {
		t.Errorf("repeated submission = task %s, want %s", again.ID, made.ID)
	}
	if _, err := ask(client, ops.SubmitTask, submit(manifestYAML+"# other\n", "once")); err == nil {
		t.Error("a key was accepted for another manifest")
	}
	mustAsk(client, ops.SubmitTask, submit(manifestYAML, ""))
	page := mustAsk(reader, ops.ListTasks, ops.TaskQuery{Limit: 1, Label: "team=platform"})
	rest := mustAsk(reader, ops.ListTasks, ops.TaskQuery{Limit: 50, After: page.Next})
	if len(page.Tasks) != 1 || len(rest.Tasks) != 1 || rest.Tasks[0].ID != made.ID || rest.Next != "" {
		t.Errorf("pages = %+v and %+v, want one task each", page, rest)
	}
	refused(reader, fail.Usage, ops.ListTasks, ops.TaskQuery{Limit: 1, State: "ASLEEP"})
	at := ops.TaskPath{ID: made.ID}
	if v := mustAsk(reader, ops.GetTask, at); v.Actor != "token:submit" {
		t.Errorf("actor of the task = %q, want token:submit", v.Actor)
	}
	refused(client, fail.Conflict, ops.RetryTask, ops.RetryRequest{TaskPath: at})
	if a := mustAsk(client, ops.CancelTask, at); a.State != task.Cancelled {
		t.Errorf("state of a cancelled task = %s, want %s", a.State, task.Cancelled)
	}
	if a := mustAsk(client, ops.RetryTask, ops.RetryRequest{TaskPath: at}); a.RetryOf != made.ID {
		t.Errorf("retry of = %q, want %s", a.RetryOf, made.ID)
	}
	mustAsk(h, ops.DestroyTask, at)
	refused(reader, fail.NotFound, ops.GetTask, ops.TaskPath{ID: "0123456789ab"})
}

func checkTaskFiles(as func(ops.Scope) host) {
	h, reader := as(ops.Admin), as(ops.Read)
	t := h.t
	id := h.submit().ID
	at := ops.TaskPath{ID: id}
	if v := mustAsk(reader, ops.FindTask, ops.FindTaskRequest{Name: id[:8]}); v.ID != id {
		t.Errorf("task %s = %s, want %s", id[:8], v.ID, id)
	}
	refused(reader, fail.NotFound, ops.FindTask, ops.FindTaskRequest{Name: "nothing"})
	refused(reader, fail.Usage, ops.FindTask, ops.FindTaskRequest{Name: "try"}) // several tasks have that name
	if l := mustAsk(reader, ops.ListArtifacts, at); len(l.Artifacts)+len(l.Skipped) != 0 {
		t.Errorf("artifacts of a waiting task = %+v, want none", l)
	}
	const patch = "diff --git a b\n"
	h.bring(id, map[string][]byte{"files/a b.patch": []byte(patch)})
	if l := mustAsk(reader, ops.ListArtifacts, at); len(l.Artifacts) != 1 || l.Artifacts[0].Size != int64(len(patch)) || len(l.Skipped) != 1 {
		t.Errorf("artifacts = %+v, want the patch, and one that was skipped", l)
	}
	refused(reader, fail.NotFound, ops.ListArtifacts, ops.TaskPath{ID: "0123456789ab"})
	dir := h.tasks.Dir(id)
	if err := errors.Join(os.WriteFile(dir.Stdout(), []byte("out"), 0o600), os.WriteFile(dir.Stderr(), []byte("err"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		file ops.File
		want string
		code fail.Code
	}{
		{ops.File{Artifact: "files/a b.patch"}, patch, 0},
		{ops.File{Stream: "stdout"}, "out", 0},
		{ops.File{Stream: "stderr", Follow: true}, "err", 0},
		{ops.File{Artifact: "../task.json"}, "", fail.NotFound},
		{ops.File{Artifact: "nothing"}, "", fail.NotFound},
		{ops.File{Task: "0123456789ab", Stream: "stdout"}, "", fail.NotFound},
	} {
		if c.file.Task == "" {
			c.file.Task = id
		}
		text, err := readAll(reader, c.file)
		if text != c.want || err == nil != (c.code == 0) || err != nil && (fail.CodeOf(err) != c.code || fail.HintOf(err) == "") {
			t.Errorf("file %+v = %q, %v (hint %q), want %q, code %v with a hint", c.file, text, err, fail.HintOf(err), c.want, c.code)
		}
	}
}

func checkRecordings(as func(ops.Scope) host) {
	h, reader := as(ops.Admin), as(ops.Read)
	t := h.t
	id := h.submit().ID
	rec := &recording.Recorder{Dir: recording.Store{Dir: h.tasks.Sessions.Config.Paths.Recordings()}.Subject(id), Limit: 1 << 20}
	l := recording.NewLog(rec, 0, "claude")
	if _, err := l.Write([]byte("first line\nFAIL: TestX\n")); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	// Not with mustAsk: the answers have times.
	list, err := ops.ListRecordings.On(t.Context(), reader.Host, ops.RecordingQuery{Subject: id})
	if err != nil || len(list.Recordings) != 1 || list.Recordings[0].ID != id+"-0" || list.Recordings[0].Title != "claude" || list.Recordings[0].Parts != 1 {
		t.Fatalf("recordings = %+v, %v, want that of the task", list, err)
	}
	found, err := ops.SearchRecordings.On(t.Context(), reader.Host, ops.RecordingSearch{Text: "fail", IgnoreCase: true})
	if err != nil || len(found.Matches) != 1 || found.Matches[0].Line != "FAIL: TestX" || found.Matches[0].Recording != id+"-0" || found.More {
		t.Errorf("matches = %+v, %v, want the line", found, err)
	}
	if found := mustAsk(reader, ops.SearchRecordings, ops.RecordingSearch{Text: "fail"}); len(found.Matches) != 0 {
		t.Errorf("matches = %+v, want none in lower case", found)
	}
	refused(reader, fail.Usage, ops.SearchRecordings, ops.RecordingSearch{Text: "a\tb"})
	for _, c := range []struct {
		format, want string
	}{{ops.PlainText, "first line\nFAIL: TestX\n"}, {ops.Asciicast, `"first line\r\nFAIL: TestX\r\n"]`}} {
		if text, err := readAll(reader, ops.File{Recording: id + "-0", Format: c.format}); err != nil || !strings.Contains(text, c.want) {
			t.Errorf("recording as %s = %q, %v, want %q", c.format, text, err, c.want)
		}
	}
	for file, code := range map[ops.File]fail.Code{
		{Recording: id + "-1", Format: ops.Asciicast}:  fail.NotFound,
		{Recording: "../" + id, Format: ops.PlainText}: fail.NotFound,
	} {
		if _, err := readAll(reader, file); fail.CodeOf(err) != code {
			t.Errorf("file %+v = %v, want code %v", file, err, code)
		}
	}
	refused(reader, fail.Policy, ops.RemoveRecordings, ops.RecordingsOf{ID: id})
	if removed, err := ops.RemoveRecordings.On(t.Context(), h.Host, ops.RecordingsOf{ID: id}); err != nil || removed.Size == 0 {
		t.Errorf("removed = %+v, %v, want its size", removed, err)
	}
	refused(h, fail.NotFound, ops.RemoveRecordings, ops.RecordingsOf{ID: id + "-0"})
}

// readAll reads a file of a task.
func readAll(h host, f ops.File) (string, error) {
	ctx, cancel := context.WithTimeout(traceid.With(h.t.Context(), traceID), deadline)
	defer cancel()
	r, err := h.Read(ctx, f)
	if err != nil {
		return "", err
	}
	defer r.Close()
	text, err := io.ReadAll(r)
	return string(text), err
}

func checkRest(as func(ops.Scope) host) {
	h, reader := as(ops.Admin), as(ops.Read)
	t := h.t
	refused(reader, fail.Policy, ops.CreateDashboardLink, struct{}{})
	link, err := ask(h, ops.CreateDashboardLink, struct{}{})
	if err != nil || !strings.HasPrefix(link.URL, "http://"+h.addr+"/dashboard/#code=") || time.Until(link.ExpiresAt) > linkTime {
		t.Errorf("link = %+v, %v, want one of http://%s for %v", link, err, h.addr, linkTime)
	}
	mustAsk(reader, ops.ListImages, struct{}{})
	refused(reader, fail.Policy, ops.ListSecrets, ops.SecretQuery{})
	mustAsk(h, ops.ListSecrets, ops.SecretQuery{Repo: "acme/app"})
	mustAsk(h, ops.CheckSecrets, ops.SecretQuery{})
	refused(h, fail.Usage, ops.ListSecrets, ops.SecretQuery{Repo: "no repository"})

	disk := mustAsk(reader, ops.GetDisk, struct{}{})
	if disk.Free <= 0 || disk.Reserve != 1<<20 || mustAsk(reader, ops.GetDisk, struct{}{}) != disk {
		t.Errorf("disk use = %+v, want free space, a reserve of 1 MiB, and no second measurement", disk)
	}
	before := mustAsk(reader, ops.GetOverview, struct{}{})

	// Commands, and a login, in a guest.
	const id = "aaaa11112222"
	h.session(id)
	if o := mustAsk(reader, ops.GetOverview, struct{}{}); len(o.Sessions) != len(before.Sessions)+1 || len(o.Tasks) != len(mustAsk(reader, ops.ListTasks, ops.TaskQuery{Limit: 100}).Tasks) || len(o.Questions) != 0 || o.Seq < before.Seq {
		t.Errorf("overview = %+v, want one session more than %+v, all tasks and no question", o, before)
	}
	refused(reader, fail.Conflict, ops.ListWindows, ops.SessionPath{ID: id})
	h.vm(id)
	if l := mustAsk(reader, ops.ListWindows, ops.SessionPath{ID: id}); len(l.Windows) != 0 {
		t.Errorf("windows = %+v, want none without tmux", l)
	}
	refused(reader, fail.NotFound, ops.ListWindows, ops.SessionPath{ID: "0123456789ab"})
	start := ops.StartExecRequest{SessionPath: ops.SessionPath{ID: id}, Body: ops.ExecRequest{Argv: []string{"echo", "hello"}}}
	refused(reader, fail.Policy, ops.StartExec, start)
	ctx, cancel := context.WithTimeout(traceid.With(t.Context(), traceID), deadline)
	defer cancel()
	x, err := ops.StartExec.On(ctx, h.Host, start)
	if err != nil {
		t.Fatal(err)
	}
	for x.State == ops.ExecRunning {
		time.Sleep(20 * time.Millisecond)
		if x, err = ops.GetExec.On(ctx, h.Host, ops.ExecPath{SessionPath: start.SessionPath, Exec: x.ID}); err != nil {
			t.Fatal(err)
		}
	}
	if all := mustAsk(reader, ops.ListExecs, start.SessionPath); len(all.Execs) != 1 || all.Execs[0].ID != x.ID || all.Execs[0].Argv != nil {
		t.Errorf("commands for a reader = %+v, want %s without its command line", all, x.ID)
	}
	if all := mustAsk(h, ops.ListExecs, start.SessionPath); len(all.Execs) != 1 || len(all.Execs[0].Argv) != 2 {
		t.Errorf("commands = %+v, want one with its command line", all)
	}
	start.Body.Argv = []string{"sleep", "600"}
	if x, err = ops.StartExec.On(ctx, h.Host, start); err != nil {
		t.Fatal(err)
	}
	running := ops.ExecPath{SessionPath: start.SessionPath, Exec: x.ID}
	refused(reader, fail.Policy, ops.CancelExec, running)
	refused(h, fail.NotFound, ops.CancelExec, ops.ExecPath{SessionPath: start.SessionPath, Exec: "0123456789ab"})
	if _, err := ops.CancelExec.On(ctx, h.Host, running); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the end of the cancelled command", func() bool {
		x, err = ops.GetExec.On(ctx, h.Host, running)
		return err != nil || x.State != ops.ExecRunning
	})
	if err != nil || x.State != ops.ExecCancelled {
		t.Errorf("cancelled command = %+v, %v, want state %s", x, err, ops.ExecCancelled)
	}
	conn, err := h.Dial(ctx, id, true)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var out bytes.Buffer
	err = conn.Run(ctx, "cat; exit 3", ssh.IO{Stdin: strings.NewReader("through"), Stdout: &out})
	if exit, ok := err.(*ssh.ExitError); !ok || exit.Code != 3 || out.String() != "through" { //nolint:errorlint // Run's own error
		t.Errorf("command over the login = %q, %v, want %q and exit status 3", out.String(), err, "through")
	}
	if _, err := reader.Dial(ctx, id, true); fail.CodeOf(err) != fail.Policy {
		t.Errorf("login with the scope read = %v, want code %s", err, fail.Policy)
	}
	if _, err := h.Dial(ctx, "0123456789ab", false); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("login to an unknown session = %v, want code %s", err, fail.NotFound)
	}
}

// checkGuest checks what needs a guest that runs.
func checkGuest(as func(ops.Scope) host) {
	h, reader := as(ops.Admin), as(ops.Read)
	t := h.t
	const id = "dddd11112222"
	h.session(id)
	guest := h.agent(id)
	at := ops.SessionPath{ID: id}

	run := ops.RunRequest{SessionPath: at}
	run.Body.Command = "echo out; echo err >&2; exit 3"
	if r := mustAsk(h, ops.RunCommand, run); r.ExitCode == nil || *r.ExitCode != 3 || r.Stdout != "out\n" || r.Stderr != "err\n" {
		t.Errorf("result of a command = %+v, want out, err and exit status 3", r)
	}
	run.Body.Command, run.Body.Seconds = "sleep 60", 1
	if r := mustAsk(h, ops.RunCommand, run); !r.TimedOut || r.ExitCode != nil {
		t.Errorf("result of a slow command = %+v, want that it timed out", r)
	}

	mustAsk(h, ops.ReloadNetwork, at)
	program := filepath.Join(guest.root, "usr/local/bin/agent-guest")
	if err := errors.Join(os.Rename(program, program+".away"), os.WriteFile(program, []byte("#!/bin/sh\nexit 3\n"), 0o700)); err != nil {
		t.Fatal(err)
	}
	refused(h, fail.Conflict, ops.ReloadNetwork, at)
	if err := os.Rename(program+".away", program); err != nil {
		t.Fatal(err)
	}
	refused(h, fail.Conflict, ops.DiffSession, at) // nothing is cloned
	refused(h, fail.Conflict, ops.FetchSession, at)
	commit := guest.clone()
	if c := mustAsk(reader, ops.DiffSession, at); c.Base != commit || len(c.Files) != 1 || c.Files[0].Path != "new.txt" || !strings.Contains(c.Patch, "+by the agent") {
		t.Errorf("changes = %+v, want new.txt since %s", c, commit)
	}
	refused(reader, fail.Policy, ops.FetchSession, at)
	if f, err := ops.FetchSession.On(t.Context(), h.Host, at); err != nil || f.Commits != 1 || len(f.Refs) == 0 { // sizes differ
		t.Errorf("fetched = %+v, %v, want one commit", f, err)
	}

	refused(reader, fail.NotFound, ops.GetScreen, at) // the keeper saves it
	guest.observe(guestproto.Observation{Screen: []string{"$ make", "ok"}, Agents: []guestproto.Agent{{Name: "claude", State: guestproto.AgentDone}}})
	if s := mustAsk(reader, ops.GetScreen, at); len(s.Screen) != 2 || len(s.Agents) != 1 || s.Agents[0].State != guestproto.AgentDone || s.At.IsZero() {
		t.Errorf("screen = %+v, want two lines, and an agent that is done", s)
	}
	prompt := ops.PromptRequest{SessionPath: at}
	prompt.Body.Text = "go on\nwith it"
	mustAsk(h, ops.SendPrompt, prompt)
	guest.awaitPrompt("go on\nwith it\n")
	result := ops.ResultRequest{SessionPath: at}
	result.Body.ExitCode = 2
	refused(h, fail.Usage, ops.RecordResult, result)
	result.Body.Name, result.Body.Command = "tests", "make test"
	refused(reader, fail.Policy, ops.RecordResult, result)
	if s := mustAsk(h, ops.RecordResult, result); len(s.Results) != 1 || s.Results[0].Name != "tests" || s.Results[0].ExitCode != 2 || s.Results[0].Commit == "" {
		t.Errorf("results = %+v, want one of the tests with exit code 2 and a commit", s.Results)
	}
	result.Body.ExitCode = 0
	if s := mustAsk(h, ops.RecordResult, result); len(s.Results) != 1 || !s.Results[0].OK() {
		t.Errorf("results = %+v, want one that replaces the first", s.Results)
	}
	if l := mustAsk(reader, ops.ListWindows, at); len(l.Windows) == 0 {
		t.Error("windows = none, want those of tmux")
	}
	mustAsk(h, ops.RefreshSecrets, at)

	login := ops.LoginRequest{SessionPath: at}
	_, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	login.Body.PublicKey = public
	if l, err := ops.LoginSession.On(t.Context(), h.Host, login); err != nil || l.Certificate == "" || time.Until(l.Expires) <= 0 { // keys differ
		t.Errorf("login = %+v, %v, want a certificate", l, err)
	}

	var workspace ops.WorkspaceRequest
	workspace.Body.Name = "data"
	mustAsk(h, ops.CreateWorkspace, workspace)
	attach := ops.AttachWorkspaceRequest{WorkspacePath: ops.WorkspacePath{Name: "data"}}
	attach.Body.Session = id
	if _, err := h.store.Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
		row.Phase, row.Desired = string(session.Stopped), string(session.Stopped)
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	if ws := mustAsk(h, ops.AttachWorkspace, attach); ws.Session == "" {
		t.Errorf("workspace = %+v, want it attached", ws)
	}
	refused(h, fail.Conflict, ops.DeleteWorkspace, attach.WorkspacePath)
	mustAsk(h, ops.DetachWorkspace, attach.WorkspacePath)
}

// checkCluster checks the operations on a cluster: on a host outside of one, and on its core.
func checkCluster(as func(ops.Scope) host) {
	h, reader := as(ops.Admin), as(ops.Read)
	t := h.t.(*testing.T)
	invite := ops.InviteRequest{}
	invite.Body.Role = cluster.Worker
	drain := ops.DrainRequest{ClusterHostPath: ops.ClusterHostPath{Name: "two"}}
	drain.Body.Drained = true
	refused(reader, fail.Conflict, ops.ListClusterHosts, struct{}{})
	refused(h, fail.Conflict, ops.InviteHost, invite)
	refused(h, fail.Conflict, ops.DrainHost, drain)
	refused(h, fail.Conflict, ops.RemoveHost, drain.ClusterHostPath)

	if _, err := cluster.Found(h.tasks.Sessions.Config.Paths.Cluster(), "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	one := h.join()
	h, reader = as(ops.Admin), as(ops.Read) // the engine has changed
	refused(reader, fail.Policy, ops.InviteHost, invite)
	refused(reader, fail.Policy, ops.DrainHost, drain)
	refused(reader, fail.Policy, ops.RemoveHost, drain.ClusterHostPath)
	refused(h, fail.NotFound, ops.DrainHost, drain) // two is not admitted yet
	refused(h, fail.NotFound, ops.RemoveHost, drain.ClusterHostPath)
	invite.Body.Valid = "soon"
	refused(h, fail.Usage, ops.InviteHost, invite)
	invite.Body.Valid = "2h"

	// The answers have keys, times and figures, so they are not compared.
	ctx, cancel := context.WithTimeout(traceid.With(t.Context(), traceID), deadline)
	defer cancel()
	invitation, err := ops.InviteHost.On(ctx, h.Host, invite)
	if err != nil {
		t.Fatal(err)
	}
	token, err := cluster.ParseToken(invitation.Token)
	if left := time.Until(invitation.ExpiresAt); err != nil || left > 2*time.Hour || left < time.Hour {
		t.Fatalf("invitation = token %v, %v, valid for %v, want 2h", token, err, left)
	}
	dir := testenv.ShortDir(t)
	testenv.WaitFor(t, "the admission of two", func() bool { // the core hears of the token a moment later
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err := cluster.Join(try, dir, token, cluster.Applicant{Name: "two"}, nil)
		return err == nil
	})
	testenv.WaitFor(t, "that one knows two", func() bool { _, ok := one.node.Member("two"); return ok })
	names := func() (all []string) {
		list, err := ops.ListClusterHosts.On(ctx, reader.Host, struct{}{})
		if err != nil || list.Cluster != "team" || list.Host != "one" {
			t.Errorf("hosts = %+v, %v, want those of team, by one", list, err)
		}
		for _, v := range list.Hosts {
			all = append(all, v.Name)
		}
		return all
	}
	if got := names(); !slices.Equal(got, []string{"one", "two"}) {
		t.Errorf("hosts = %v, want one and two", got)
	}
	drain.Name = "one"
	for _, drained := range []bool{true, false} {
		drain.Body.Drained = drained
		if v, err := ops.DrainHost.On(ctx, h.Host, drain); err != nil || v.Name != "one" || drained != (v.State == fleet.Drains || v.State == fleet.Drained) {
			t.Errorf("host after drain %t = %+v, %v", drained, v, err)
		}
	}
	refused(h, fail.Usage, ops.RemoveHost, ops.ClusterHostPath{Name: "one"}) // itself
	if v, err := ops.RemoveHost.On(ctx, h.Host, ops.ClusterHostPath{Name: "two"}); err != nil || v.Name != "two" || v.State != fleet.Removed {
		t.Errorf("removed host = %+v, %v, want two, removed", v, err)
	}
}

func checkQuestions(as func(ops.Scope) host) {
	h, reader := as(ops.Admin), as(ops.Read)
	t := h.t
	const id = "bbbb11112222"
	h.session(id)
	const name = "agent-acme-app-bbbb11"
	if list := mustAsk(reader, ops.ListQuestions, ops.QuestionQuery{}); len(list.Questions) != 0 {
		t.Errorf("questions = %+v, want none", list)
	}
	refused(reader, fail.Conflict, ops.FindQuestion, ops.FindQuestionRequest{What: id})
	refused(reader, fail.NotFound, ops.FindQuestion, ops.FindQuestionRequest{What: "0123"})
	refused(reader, fail.NotFound, ops.GetQuestion, ops.QuestionPath{ID: "0123456789ab"})
	h.ask(id,
		store.Question{ID: "0123456789ab", GuestID: "1", Kind: "permission", Agent: "claude", Tool: "Bash", Text: "Bash: ls"},
		store.Question{ID: "0123ffffffff", GuestID: "2", Kind: "question", Agent: "claude", Text: "Which?", Choices: []string{"this", "that"}},
	)
	first := ops.QuestionPath{ID: "0123456789ab"}
	if q := mustAsk(reader, ops.GetQuestion, first); q.Text != "Bash: ls" || q.State != store.QuestionOpen {
		t.Errorf("question = %+v, want Bash: ls, open", q)
	}
	if list := mustAsk(reader, ops.ListQuestions, ops.QuestionQuery{Session: id}); len(list.Questions) != 2 || list.Questions[0].ID != first.ID || list.Questions[0].Name != name {
		t.Errorf("questions = %+v, want two of %s, the oldest first", list, name)
	}
	refused(reader, fail.Conflict, ops.FindQuestion, ops.FindQuestionRequest{What: id})
	refused(reader, fail.Conflict, ops.FindQuestion, ops.FindQuestionRequest{What: "0123"})
	if q := mustAsk(reader, ops.FindQuestion, ops.FindQuestionRequest{What: "01234"}); q.ID != first.ID {
		t.Errorf("question 01234 = %+v, want %s", q, first.ID)
	}
	allow := ops.AnswerRequest{QuestionPath: first}
	allow.Body.Answer = "yes"
	refused(reader, fail.Policy, ops.AnswerQuestion, allow)
	refused(h, fail.Usage, ops.AnswerQuestion, ops.AnswerRequest{QuestionPath: first})
	if q := mustAsk(h, ops.AnswerQuestion, allow); q.State != store.QuestionAnswered || q.Answer != "allow" || q.By == "" {
		t.Errorf("answered question = %+v, want the answer allow and who answered", q)
	}
	refused(h, fail.Conflict, ops.AnswerQuestion, allow)
	h.ask(id)
	refused(h, fail.Conflict, ops.AnswerQuestion, ops.AnswerRequest{QuestionPath: ops.QuestionPath{ID: "0123ffffffff"}, Body: allow.Body})
	if list := mustAsk(reader, ops.ListQuestions, ops.QuestionQuery{All: true}); len(list.Questions) != 2 || list.Questions[0].State != store.QuestionClosed {
		t.Errorf("all questions = %+v, want two that are closed", list)
	}
}

// checkGatewayQuestions checks that an answer to the gateway names its question: a guest could
// replace it by another one while its user decides.
func checkGatewayQuestions(as func(ops.Scope) host) {
	h := as(ops.Admin)
	const id, question = "cccc11112222", "456789abcdef"
	h.session(id)
	h.ask(id, store.Question{ID: question, GuestID: "evil.example:443@1", Kind: store.QuestionNetwork, Agent: "network", Text: "evil.example:443"})
	if q := mustAsk(h, ops.FindQuestion, ops.FindQuestionRequest{What: id}); q.ID != question {
		h.t.Errorf("question of session %s = %+v, want %s", id, q, question)
	}
	refused(h, fail.Conflict, ops.FindQuestion, ops.FindQuestionRequest{What: id, Answer: true})
	if q := mustAsk(h, ops.FindQuestion, ops.FindQuestionRequest{What: question[:4], Answer: true}); q.ID != question {
		h.t.Errorf("question %s = %+v, want %s", question[:4], q, question)
	}
	h.ask(id)
}

// ask makes the questions of a session those that its guest asks.
func (r *rig) ask(id string, questions ...store.Question) {
	r.t.Helper()
	_, err := r.tasks.Sessions.Store.SyncQuestions(r.t.Context(), id, questions, nil, func(store.Question) bool { return true }, func(*store.Session, []store.Question) ([]store.Event, error) { return nil, nil })
	if err != nil {
		r.t.Fatal(err)
	}
}
