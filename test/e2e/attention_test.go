//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestAttention runs the real Claude Code in a guest, with a model of the test's own,
// and checks what the host learns about it.
func TestAttention(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.Repo("project")
	m := newModel(t)
	settings := fmt.Sprintf(`
network: {ask: ["*.asked.example"]}
secrets:
  ANTHROPIC_BASE_URL: {from: "cmd:printf http://host.lima.internal:%d", guest: true}
  ANTHROPIC_AUTH_TOKEN: {from: "cmd:printf pretend-%s", guest: true}
`, m.port, random())
	configure := func(more string) { b.Write(".config/agent-sessionizer/config.yaml", settings+more) }
	configure("")
	name := b.open("--host-service", fmt.Sprintf("localhost:%d", m.port), "./project")
	base := b.MustIn(name, "git rev-parse HEAD")
	dir := b.MustIn(name, "pwd")

	w := newAttention(t, b, name, dir, base)
	typed := func(keys ...string) {
		t.Helper()
		b.MustIn(name, "tmux send-keys -t agent:claude '"+strings.Join(keys, "' '")+"'")
	}
	// say types a prompt, and sends it once it is on the screen.
	say := func(text string) {
		t.Helper()
		typed("-l", text)
		w.until("the typed prompt", func(g guestproto.Observation) bool { return strings.Contains(strings.Join(g.Screen, "\n"), text) })
		typed("Enter")
	}
	start := w.agent(guestproto.AgentIdle, "")
	if start.Name != "claude" || start.PID == 0 {
		t.Errorf("first agent = %+v, want claude with its pid", start)
	}
	if comm := b.MustIn(name, fmt.Sprintf("cat /proc/%d/comm", start.PID)); comm != "claude" {
		t.Errorf("comm of process %d = %q, want \"claude\"", start.PID, comm)
	}

	t.Run("a question", func(t *testing.T) {
		say("ASKME one, THINK first")
		w.agent(guestproto.AgentWorking, "")
		close(m.think)
		w.arrives("the question", w.agent(guestproto.AgentBlocked, "question: Which DB?"))
		w.until("it on the screen", func(g guestproto.Observation) bool {
			return g.Window == "claude" && strings.Contains(strings.Join(g.Screen, "\n"), "Which DB?")
		})
		typed("Enter")
		w.agent(guestproto.AgentDone, "")
		say("ASKME two")
		w.agent(guestproto.AgentBlocked, "question: Which DB?")
		typed("Escape")
		w.leaves("Esc")
	})
	t.Run("the end", func(t *testing.T) {
		say("/exit")
		w.agent(guestproto.AgentGone, "")
		// When it exits, it drops what was typed; the shell appears afterwards.
		w.until("the shell's prompt", func(g guestproto.Observation) bool {
			return strings.HasSuffix(strings.TrimSpace(strings.Join(g.Screen, "\n")), "%")
		})
	})
	t.Run("a permission", func(t *testing.T) {
		typed("-l", "clear; claude --permission-mode default")
		typed("Enter")
		again := w.until("another one", func(g guestproto.Observation) bool {
			return len(g.Agents) > 0 && g.Agents[0].State == guestproto.AgentIdle && g.Agents[0].PID != start.PID
		}).Agents[0]
		say("RUNBASH one")
		blocked := w.agent(guestproto.AgentBlocked, "permission: Bash: touch made-by-the-agent")
		w.arrives("the permission", blocked)
		if blocked.PID != again.PID {
			t.Errorf("agent = %+v, want the process of %+v", blocked, again)
		}
		typed("Enter")
		w.agent(guestproto.AgentDone, "")
		w.until("the new file among the changes", func(g guestproto.Observation) bool {
			return g.Changes != nil && *g.Changes == guestproto.Changes{Branch: "main", Files: 1}
		})
		b.MustIn(name, "test -e made-by-the-agent")
		say("RUNBASH two")
		w.agent(guestproto.AgentBlocked, "permission: Bash: touch made-by-the-agent")
		typed("Escape")
		w.leaves("Esc")
	})
	testAnswers(t, b, name, m, w, say, typed, configure)
	t.Run("Codex", func(t *testing.T) {
		say("/exit")
		w.agent(guestproto.AgentGone, "")
		provider := fmt.Sprintf(`{name="pretend",base_url="http://host.lima.internal:%d/v1",wire_api="responses",env_key="ANTHROPIC_AUTH_TOKEN"}`, m.port)
		b.Write("codex.sh", "clear\nexec codex -m gpt-5.1-codex -c check_for_update_on_startup=false -c approval_policy=on-request -c sandbox_mode=read-only"+
			" -c model_provider=pretend -c 'model_providers.pretend="+provider+"' -c 'projects={\""+dir+"\"={trust_level=\"trusted\"}}'\n")
		b.Asz("cp", "codex.sh", name+":/tmp/codex.sh")
		typed("-l", "sh /tmp/codex.sh")
		typed("Enter")
		w.until("its screen", func(g guestproto.Observation) bool {
			return strings.Contains(strings.Join(g.Screen, "\n"), "OpenAI Codex")
		})
		say("RUNBASH")
		blocked := w.agent(guestproto.AgentBlocked, "permission: Bash: touch made-by-the-agent")
		w.arrives("Codex's permission", blocked)
		if comm := b.MustIn(name, fmt.Sprintf("cat /proc/%d/comm", blocked.PID)); blocked.Name != "codex" || comm != "codex" {
			t.Errorf("blocked agent = %+v, comm %q, want codex", blocked, comm)
		}
		// Its hook reports the permission before its dialog takes keys.
		w.until("its dialog", func(g guestproto.Observation) bool {
			return strings.Contains(strings.Join(g.Screen, "\n"), "Would you like to run")
		})
		typed("Escape")
		w.leaves("Esc")
		if !testing.Short() {
			testCodexAnswers(t, b, name, w, say)
		}
		say("hello")
		w.agent(guestproto.AgentDone, "")
		b.MustIn(name, "pkill -KILL -u agent -x codex")
		w.agent(guestproto.AgentGone, "")
	})
	t.Run("a task that asks", func(t *testing.T) { testTaskAsks(t, b, name, m) })
	t.Run("tools for an agent on the host", func(t *testing.T) { testMCP(t, b, name, m) })
	t.Run("a bell", func(t *testing.T) {
		long(t)
		b.MustIn(name, `tmux send-keys -t agent:scratch "printf '\\a'" Enter`)
		w.until("the bell", func(g guestproto.Observation) bool {
			return len(g.Agents) > 0 && g.Agents[0].On == "bell in window scratch" && g.Agents[0].State == guestproto.AgentBlocked
		})
		typed("-l", "clear; claude")
		typed("Enter")
		b.MustIn(name, "tmux select-window -t agent:scratch && tmux select-window -t agent:claude")
		w.agent(guestproto.AgentIdle, "")
	})
	t.Run("it costs little", func(t *testing.T) {
		long(t)
		// Its own processor time and its children's; the amount depends on the
		// machine.
		b.Write("cost.sh", `pid=$(pgrep -o -u agent -f '^/usr/local/bin/agent-guest watch')
awk -v hz=$(getconf CLK_TCK) -v up=$(cut -d' ' -f1 /proc/uptime) '{ printf "%.1f%% of a processor, ", ($14 + $15 + $16 + $17) / (up * hz - $22) * 100 }' /proc/$pid/stat
awk '/^Pss:/ { print $2, $3 }' /proc/$pid/smaps_rollup
`)
		b.Asz("cp", "cost.sh", name+":/tmp/cost.sh")
		t.Log(b.MustIn(name, "sh /tmp/cost.sh"))
	})
	t.Run("a killed agent", func(t *testing.T) {
		long(t)
		b.MustIn(name, "pkill -KILL -u agent -x claude")
		w.until("its end", func(g guestproto.Observation) bool {
			for _, a := range g.Agents {
				if a.State != guestproto.AgentGone {
					return false
				}
			}
			return len(g.Agents) > 0
		})
	})
	t.Run("nothing stays when the watcher ends", func(t *testing.T) {
		before := strings.TrimSpace(b.In(name, "pgrep -c -u agent -f 'agent-guest watch'").Stdout)
		w.stop()
		testenv.WaitFor(t, "one watch less", func() bool {
			return strings.TrimSpace(b.In(name, "pgrep -c -u agent -f 'agent-guest watch'").Stdout) < before
		})
	})
}

// attention is what the host sees of a guest.
type attention struct {
	t     *testing.T
	seen  chan guestproto.Observation
	came  chan time.Time // arrival times of seen
	last  guestproto.Observation
	at    time.Time     // arrival time of the last one
	ahead time.Duration // how far the guest's clock is ahead
	stop  func()
}

func newAttention(t *testing.T, b *box, name, dir, base string) *attention {
	conf := map[string]string{}
	for line := range strings.Lines(b.Asz("ssh-config", name)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			conf[key] = strings.Trim(value, `"`)
		}
	}
	key, err := os.ReadFile(conf["IdentityFile"])
	if err != nil {
		t.Fatal(err)
	}
	known, err := os.ReadFile(conf["UserKnownHostsFile"])
	if err != nil {
		t.Fatal(err)
	}
	_, hostKey, _ := strings.Cut(strings.TrimSpace(string(known)), " ")
	c, err := ssh.Dial(t.Context(), ssh.Target{
		Addr: net.JoinHostPort(conf["HostName"], conf["Port"]), User: conf["User"], Key: key, HostKey: hostKey, Patience: 2 * time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	asked := time.Now()
	clock, err := c.Output(t.Context(), "date +%s%N", nil, 100)
	if err != nil {
		t.Fatal(err)
	}
	var there int64
	if _, err := fmt.Sscan(string(clock), &there); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	a := &attention{t: t, seen: make(chan guestproto.Observation, 10000), came: make(chan time.Time, 10000), ahead: time.Unix(0, there).Sub(asked.Add(time.Since(asked) / 2))}
	done := make(chan error, 1)
	go func() {
		done <- guestclient.Guest{SSH: c}.Watch(ctx, dir, base, nil, func(g guestproto.Observation) error {
			a.came <- time.Now()
			a.seen <- g
			return nil
		})
		close(a.seen)
	}()
	a.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err == nil {
			t.Error("end of watching = nil, want an error with its reason")
		}
		_ = c.Close()
	})
	t.Cleanup(a.stop)
	return a
}

// until waits for a matching snapshot; the last one may match.
func (a *attention) until(what string, ok func(guestproto.Observation) bool) guestproto.Observation {
	a.t.Helper()
	deadline := time.After(3 * time.Minute)
	for !ok(a.last) {
		select {
		case g, open := <-a.seen:
			if !open {
				a.t.Fatalf("%s: watching ended, last observation %+v", what, a.last)
			}
			a.last, a.at = g, <-a.came
		case <-deadline:
			a.t.Fatalf("%s: not in time, last agents %+v\n%s", what, a.last.Agents, strings.Join(a.last.Screen, "\n"))
		}
	}
	return a.last
}

// agent waits until the most urgent agent is in a state.
func (a *attention) agent(state guestproto.AgentState, on string) guestproto.Agent {
	a.t.Helper()
	return a.until(fmt.Sprintf("%s %q", state, on), func(g guestproto.Observation) bool {
		return len(g.Agents) > 0 && g.Agents[0].State == state && g.Agents[0].On == on
	}).Agents[0]
}

// leaves waits for the end of a block.
func (a *attention) leaves(why string) {
	a.t.Helper()
	seen := a.until("the end of the block by "+why, func(g guestproto.Observation) bool {
		return len(g.Agents) > 0 && g.Agents[0].State != guestproto.AgentBlocked
	})
	a.arrives(why, seen.Agents[0])
}

// arrives logs how long after the agent's own timestamp the host knew.
func (a *attention) arrives(what string, seen guestproto.Agent) {
	a.t.Helper()
	a.t.Logf("%s: %s here %s after it was there, by the guest's clock", what, seen.State, a.at.Add(a.ahead).Sub(seen.Since).Round(time.Millisecond))
}

// model is a stand-in for the model's API, on loopback. It answers a prompt with ASKME by
// a question, one with PLANME by a plan, one with RUNBASH by a command, one with RUNTOOL or RUNPLUGIN
// by a tool of ours, one with EVERYKIND by a plan, a question and two commands, and others by a word.
// It answers one with THINK when the test allows it.
type model struct {
	port  int
	think chan struct{}

	mu     sync.Mutex
	result string // the last message with the result of a tool
}

func newModel(t *testing.T) *model {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &model{port: ln.Addr().(*net.TCPAddr).Port, think: make(chan struct{})}
	s := &http.Server{Handler: m, ReadHeaderTimeout: time.Minute}
	go s.Serve(ln) //nolint:errcheck // it ends with the test
	t.Cleanup(func() { _ = s.Close() })
	return m
}

// planFile matches the path of the file into which Claude Code's model writes its plan.
var planFile = regexp.MustCompile(`/home/agent/\.claude/plans/[\w-]+\.md`)

// commitPrompt matches a prompt to run a part of the script /tmp/agent.sh.
var commitPrompt = regexp.MustCompile(`COMMIT (\w+)`)

type block map[string]any

func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost && r.URL.Path == "/v1/responses" {
		responses(w, r)
		return
	}
	if r.Method != http.MethodPost || !strings.HasPrefix(r.URL.Path, "/v1/messages") || strings.HasSuffix(r.URL.Path, "count_tokens") {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"input_tokens":10}`))
		return
	}
	var ask struct {
		Model    string
		Stream   bool
		Tools    []block
		Messages []struct {
			Role    string
			Content json.RawMessage
		}
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(body, &ask)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	last := ""
	for _, said := range ask.Messages {
		if said.Role == "user" {
			last = string(said.Content)
		}
	}
	if strings.Contains(last, `"tool_result"`) {
		m.mu.Lock()
		m.result = last
		m.mu.Unlock()
	}
	if strings.Contains(last, "THINK") {
		select {
		case <-m.think:
		case <-r.Context().Done():
			return
		}
	}
	// A prompt may follow the result of a tool that was interrupted.
	last = last[max(0, strings.LastIndex(last, `"tool_result"`)):]
	content, reason := block{"type": "text", "text": "All done."}, "end_turn"
	id := fmt.Sprintf("toolu_%d", time.Now().UnixNano())
	every := strings.Contains(string(body), "EVERYKIND")
	switch {
	case len(ask.Tools) == 0:
	case commitPrompt.MatchString(last):
		content, reason = block{"type": "tool_use", "id": id, "name": "Bash", "input": block{"command": "sh /tmp/agent.sh " + commitPrompt.FindStringSubmatch(last)[1], "description": "Commit", "timeout": 600000}}, "tool_use"
	case strings.Contains(last, "RUNTOOL"):
		content, reason = block{"type": "tool_use", "id": id, "name": "mcp__asz__exec", "input": block{"session": "project", "command": "echo from the guest; uname -n"}}, "tool_use"
	case strings.Contains(last, "RUNPLUGIN"):
		content, reason = block{"type": "tool_use", "id": id, "name": "mcp__plugin_agent-sessionizer_agent-sessionizer__exec", "input": block{"session": "project", "command": "echo by the plugin; uname -n"}}, "tool_use"
	case strings.Contains(last, "EVERYKIND"):
		content, reason = block{"type": "tool_use", "id": id, "name": "EnterPlanMode", "input": block{}}, "tool_use"
	case strings.Contains(last, "RUNBASH") || every && (strings.Contains(last, "have been answered") || strings.Contains(last, "use the other directory")):
		content, reason = block{"type": "tool_use", "id": id, "name": "Bash", "input": block{"command": "touch made-by-the-agent", "description": "Make a file"}}, "tool_use"
	case strings.Contains(last, "PLANME"), strings.Contains(last, "Entered plan mode"): // the prompt names the file for the plan
		content, reason = block{"type": "tool_use", "id": id, "name": "Write", "input": block{"file_path": string(planFile.Find(body)), "content": "First the tests, then the code."}}, "tool_use"
	case strings.Contains(last, "created successfully"), strings.Contains(last, "has been updated"): // the plan, also a second one
		content, reason = block{"type": "tool_use", "id": id, "name": "ExitPlanMode", "input": block{}}, "tool_use"
	case strings.Contains(last, "ASKME"), every && strings.Contains(last, "approved your plan"):
		content, reason = block{"type": "tool_use", "id": id, "name": "AskUserQuestion", "input": block{"questions": []block{{
			"question": "Which DB?", "header": "DB", "multiSelect": false,
			"options": []block{{"label": "Postgres", "description": "large"}, {"label": "SQLite", "description": "small"}},
		}}}}, "tool_use"
	}
	message := block{
		"id": "msg_" + id, "type": "message", "role": "assistant", "model": ask.Model, "content": []block{content},
		"stop_reason": reason, "stop_sequence": nil, "usage": block{"input_tokens": 10, "output_tokens": 10},
	}
	if !ask.Stream {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(message)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	send := func(kind string, fields block) {
		fields["type"] = kind
		text, _ := json.Marshal(fields)
		fmt.Fprintf(w, "event: %s\ndata: %s\n\n", kind, text)
	}
	message["content"], message["stop_reason"] = []block{}, nil
	begin, delta := block{"type": "text", "text": ""}, block{"type": "text_delta", "text": content["text"]}
	if content["type"] == "tool_use" {
		input, _ := json.Marshal(content["input"])
		begin = block{"type": "tool_use", "id": id, "name": content["name"], "input": block{}}
		delta = block{"type": "input_json_delta", "partial_json": string(input)}
	}
	send("message_start", block{"message": message})
	send("content_block_start", block{"index": 0, "content_block": begin})
	send("content_block_delta", block{"index": 0, "delta": delta})
	send("content_block_stop", block{"index": 0})
	send("message_delta", block{"delta": block{"stop_reason": reason, "stop_sequence": nil}, "usage": block{"output_tokens": 10}})
	send("message_stop", block{})
}

// responses implements the API that Codex uses.
func responses(w http.ResponseWriter, r *http.Request) {
	var ask struct{ Input []json.RawMessage }
	if err := json.NewDecoder(r.Body).Decode(&ask); err != nil || len(ask.Input) == 0 {
		http.Error(w, "what?", http.StatusBadRequest)
		return
	}
	id := fmt.Sprint(time.Now().UnixNano())
	item := block{"type": "message", "role": "assistant", "id": "m" + id, "content": []block{{"type": "output_text", "text": "All done."}}}
	if last := string(ask.Input[len(ask.Input)-1]); strings.Contains(last, `"message"`) && strings.Contains(last, "RUNBASH") && !strings.Contains(last, "title") {
		args, _ := json.Marshal(block{"cmd": "touch made-by-the-agent", "sandbox_permissions": "require_escalated", "justification": "to try"})
		item = block{"type": "function_call", "id": "f" + id, "call_id": "c" + id, "name": "exec_command", "arguments": string(args)}
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for _, e := range []block{
		{"type": "response.created", "response": block{"id": "r" + id}},
		{"type": "response.output_item.done", "output_index": 0, "item": item},
		{"type": "response.completed", "response": block{"id": "r" + id, "usage": block{"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}}},
	} {
		text, _ := json.Marshal(e)
		fmt.Fprintf(w, "event: %s\ndata: %s\n\n", e["type"], text)
	}
}
