package script

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// TestMCPTools has each tool succeed on fake VMs: over standard input and output, and in serve. A
// new tool must get its call here.
func TestMCPTools(t *testing.T) {
	for name, connect := range map[string]func(t *testing.T, h *home) mcp.Transport{
		"stdio": func(_ *testing.T, h *home) mcp.Transport {
			return &mcp.CommandTransport{Command: h.command(context.Background(), "mcp")}
		},
		"serve": serveTools,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHome(t)
			c, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), connect(t, h), nil)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			x := &toolClient{T: t, home: h, c: c, used: map[string]bool{}}
			x.useSessions()
			x.useTasks()
			x.endSession()
			list, err := c.ListTools(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, tool := range list.Tools {
				if !x.used[tool.Name] {
					t.Errorf("tool %s was not called, want a call with a result", tool.Name)
				}
			}
		})
	}
}

// withToken sends a token with each request.
type withToken string

func (w withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("Authorization", "Bearer "+string(w))
	return http.DefaultTransport.RoundTrip(r)
}

// serveTools starts serve, and returns how to reach its tools with a token.
func serveTools(t *testing.T, h *home) mcp.Transport {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // only to find a free port
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	serve := h.start("serve", "--listen", addr)
	t.Cleanup(func() { _ = serve.Process.Kill(); _ = serve.Wait() })
	h.until(t, "serve listens", func() bool {
		c, err := net.Dial("tcp", addr) //nolint:noctx // it answers at once
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	token, err := h.command(t.Context(), "serve", "token", "add", "mcp", "--scope", "admin").Output()
	if err != nil {
		t.Fatal(err)
	}
	return &mcp.StreamableClientTransport{Endpoint: "http://" + addr + "/mcp", HTTPClient: &http.Client{Transport: withToken(strings.TrimSpace(string(token)))}, MaxRetries: -1}
}

// toolClient calls tools.
type toolClient struct {
	*testing.T
	*home
	c    *mcp.ClientSession
	used map[string]bool // tools that succeeded
	id   string          // of the session
}

type object = map[string]any

// call calls a tool, which must succeed, and returns its text.
func (x *toolClient) call(tool string, args object) string {
	x.Helper()
	text, isError := x.try(tool, args)
	if isError {
		x.Fatalf("%s %v = error %s, want success", tool, args, text)
	}
	x.used[tool] = true
	return text
}

func (x *toolClient) try(tool string, args object) (text string, isError bool) {
	x.Helper()
	ctx, cancel := context.WithTimeout(x.Context(), 3*time.Minute)
	defer cancel()
	r, err := x.c.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		x.Fatalf("%s %v = %v, want a result", tool, args, err)
	}
	for _, c := range r.Content {
		text += c.(*mcp.TextContent).Text
	}
	return text, r.IsError
}

// get calls a tool, and decodes its result.
func (x *toolClient) get(into any, tool string, args object) {
	x.Helper()
	text := x.call(tool, args)
	if err := json.Unmarshal([]byte(text), into); err != nil {
		x.Fatalf("%s %v = %s, want JSON: %v", tool, args, text, err)
	}
}

// exec runs a command in the session, and returns its output.
func (x *toolClient) exec(command string) string {
	x.Helper()
	var r struct {
		ExitCode       *int `json:"exit_code"`
		Stdout, Stderr string
	}
	x.get(&r, "exec", object{"session": x.id, "command": command, "seconds": 60})
	if r.ExitCode == nil || *r.ExitCode != 0 {
		x.Fatalf("exec %s = %+v, want exit status 0", command, r)
	}
	return r.Stdout
}

// agent is what the guest's tmux runs: it looks like an agent that has ended its turn, and appends
// what it reads to the file prompts.
const agent = `cp "$(command -v sh)" ../claude
cat >../agent.sh <<'END'
echo '{"hook_event_name":"Stop"}' | "$AGENT_GUEST_ROOT/usr/local/bin/agent-guest" hook claude
: >../prompts
while read -r line; do printf '%s\n' "$line" >>../prompts; done
END
tmux -f /dev/null new-session -d -s agent ../claude ../agent.sh
`

func (x *toolClient) useSessions() {
	if _, err := exec.LookPath("tmux"); err != nil {
		x.Fatal("tmux is needed: apt install tmux")
	}
	var opened struct{ ID, Name, State string }
	x.get(&opened, "open_session", object{"repo": filepath.Join(x.dir, "repo")})
	if opened.State != "ready" || opened.ID == "" {
		x.Fatalf("opened session = %+v, want a ready one", opened)
	}
	x.id = opened.ID
	var list struct{ Sessions []struct{ ID, State string } }
	x.get(&list, "list_sessions", nil)
	if len(list.Sessions) != 1 || list.Sessions[0].ID != x.id || list.Sessions[0].State != "ready" {
		x.Errorf("sessions = %+v, want %s, ready", list, x.id)
	}

	x.exec(agent)
	var screen struct {
		Agents []struct{ Name, State string }
		At     time.Time
	}
	x.until(x.T, "the agent is on the screen", func() bool {
		text, isError := x.try("read_screen", object{"session": "repo"})
		if isError { // the keeper has saved none yet
			return false
		}
		x.used["read_screen"] = true
		return json.Unmarshal([]byte(text), &screen) == nil && len(screen.Agents) == 1
	})
	if a := screen.Agents[0]; a.Name != "claude" || a.State != "done" || screen.At.IsZero() {
		x.Errorf("screen = %+v, want claude, done", screen)
	}
	if text := x.call("send_prompt", object{"session": x.id, "text": "go on"}); text != "sent" {
		x.Errorf("send_prompt = %s, want sent", text)
	}
	x.until(x.T, "the agent has the prompt", func() bool { return x.exec("cat ../prompts") == "go on\n" })

	x.exec(`setsid "$AGENT_GUEST_ROOT/usr/local/bin/agent-guest" ask --choice red --choice blue 'Which colour?' >../answer 2>&1 </dev/null &`)
	var questions struct {
		Questions []struct{ ID, Text string }
	}
	x.until(x.T, "the question", func() bool {
		x.get(&questions, "list_questions", nil)
		return len(questions.Questions) == 1
	})
	var answered struct{ Answer, State string }
	x.get(&answered, "answer_question", object{"question": questions.Questions[0].ID, "answer": "2"})
	if questions.Questions[0].Text != "Which colour?" || answered.Answer != "blue" {
		x.Errorf("questions = %+v, answer %+v, want blue for Which colour?", questions, answered)
	}
	x.until(x.T, "the script has the answer", func() bool { return x.exec("cat ../answer") == "blue\n" })

	x.exec("echo by the agent >new.txt; git add -A; git -c user.name=a -c user.email=a@example.invalid commit -qm second")
	var changes struct {
		Files []struct{ Path string }
		Patch string
	}
	x.get(&changes, "diff", object{"session": opened.Name})
	if len(changes.Files) != 1 || changes.Files[0].Path != "new.txt" || !strings.Contains(changes.Patch, "+by the agent") {
		x.Errorf("changes = %+v, want new.txt", changes)
	}
	var fetched struct{ Commits int }
	x.get(&fetched, "fetch", object{"session": x.id})
	if log := x.git("log", "--all", "--format=%s"); fetched.Commits != 1 || !strings.Contains(log, "second") {
		x.Errorf("fetched = %+v, commits on the host %q, want second", fetched, log)
	}
}

func (x *toolClient) useTasks() {
	manifest := func(command string) object {
		text, err := json.Marshal(object{
			"version": "1", "kind": "Task", "repository": object{"url": filepath.Join(x.dir, "repo")}, "vm": object{"cpus": 1, "memory": "512M", "disk": "4G"},
			"agent": object{"kind": "command", "command": []string{"sh", "-c", command}}, "lifecycle": object{"artifact_patterns": []string{"out.txt"}},
		})
		if err != nil {
			x.Fatal(err)
		}
		return object{"manifest": string(text)}
	}
	var first, second, v struct {
		ID, State string
		Accepted  bool
	}
	x.get(&first, "submit_task", manifest("echo result >out.txt"))
	if !first.Accepted || first.ID == "" {
		x.Fatalf("submitted task = %+v, want it accepted", first)
	}
	x.get(&v, "watch_task", object{"task": first.ID, "seconds": 120})
	if v.ID != first.ID || v.State != "COMPLETED" {
		x.Fatalf("task after its end = %+v, want it COMPLETED", v)
	}
	var list struct{ Artifacts []struct{ Name string } }
	x.get(&list, "task_artifacts", object{"task": first.ID})
	if !slices.ContainsFunc(list.Artifacts, func(a struct{ Name string }) bool { return a.Name == "files/out.txt" }) {
		x.Errorf("artifacts = %+v, want files/out.txt", list)
	}
	if text := x.call("task_artifacts", object{"task": first.ID, "name": "files/out.txt"}); text != "result\n" {
		x.Errorf("artifact = %q, want result", text)
	}

	x.get(&second, "submit_task", manifest("sleep 600"))
	x.get(&v, "watch_task", object{"task": second.ID, "seconds": 1})
	if v.State == "COMPLETED" || strings.HasPrefix(v.State, "FAILED") {
		x.Errorf("task that sleeps = %+v, want that it runs", v)
	}
	var cancelled struct{ Success bool }
	if x.get(&cancelled, "cancel_task", object{"task": second.ID}); !cancelled.Success {
		x.Errorf("cancel_task = %+v, want success", cancelled)
	}
	if x.get(&v, "watch_task", object{"task": second.ID, "seconds": 120}); v.State != "CANCELLED" {
		x.Errorf("cancelled task = %+v, want CANCELLED", v)
	}
	var tasks struct{ Tasks []struct{ ID string } }
	if x.get(&tasks, "list_tasks", nil); len(tasks.Tasks) != 2 || tasks.Tasks[0].ID != second.ID {
		x.Errorf("tasks = %+v, want two, the latest first", tasks)
	}
}

// endSession stops and destroys the session, which has work that exists nowhere else.
func (x *toolClient) endSession() {
	x.exec("echo unsaved >unsaved.txt")
	if text, isError := x.try("destroy_session", object{"session": x.id}); !isError || !strings.Contains(text, "would lose work") {
		x.Errorf("destroy_session with unsaved work = %s (error %t), want a refusal", text, isError)
	}
	var v struct{ State, Desired string }
	state := func() string {
		text, _ := x.try("list_sessions", nil)
		var list struct{ Sessions []struct{ ID, State string } }
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			x.Fatal(err)
		}
		for _, s := range list.Sessions {
			if s.ID == x.id {
				return s.State
			}
		}
		return "gone"
	}
	if x.get(&v, "stop_session", object{"session": x.id}); v.Desired != "stopped" {
		x.Errorf("stop_session = %+v, want the desired state stopped", v)
	}
	x.until(x.T, "the session has stopped", func() bool { return state() == "stopped" })
	if x.get(&v, "destroy_session", object{"session": x.id, "force": true}); v.Desired != "gone" {
		x.Errorf("destroy_session = %+v, want the desired state gone", v)
	}
	x.until(x.T, "the session is gone", func() bool { return state() == "gone" })
	if vms, _ := filepath.Glob(filepath.Join(x.dir, ".agent-vms/agent-*")); len(vms) != 0 {
		x.Errorf("VMs at the end = %v, want none", vms)
	}
}

// git runs git in the repository on the host.
func (x *toolClient) git(args ...string) string {
	x.Helper()
	cmd := exec.CommandContext(x.Context(), "git", append([]string{"-C", filepath.Join(x.dir, "repo")}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+x.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		x.Fatalf("git %v = %s, %v, want success", args, out, err)
	}
	return string(out)
}
