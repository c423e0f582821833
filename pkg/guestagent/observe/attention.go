// Package observe reports what happens in a guest: its agents, their screens and questions,
// the changes in the checkout, the load. It records what agents' hooks report, and passes the
// host's answers to their questions; it disturbs an agent in no other way.
package observe

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// Agents report their state through hooks. Each report is one small file per agent
// process, in the agent user's own directory in memory. The watch command reads the
// files there; if it does not run, nothing else happens.
const (
	attentionDir = sys.SecretDir + "/attention"
	bellPrefix   = "bell-" // followed by the number of a window that rang
)

// Bounds of the data that hooks deliver.
const (
	maxEvent   = 8 << 20 // bytes; some events carry a tool's output
	maxReport  = 64 << 10
	maxSummary = 160             // characters that describe what an agent waits for
	lockTime   = 2 * time.Second // a hook blocks its agent, so it waits no longer than this for another hook
	ancestors  = 32              // maximum number of ancestor processes inspected
)

var (
	agentName = lazyregexp.New(`^[a-z][a-z0-9-]{0,31}$`)
	windowID  = lazyregexp.New(`^@[0-9]{1,9}$`)
)

// agentReport is the latest report of an agent's hooks.
type agentReport struct {
	Agent   string                `json:"agent"`
	PID     int                   `json:"pid"`
	Start   string                `json:"start"` // start time of the process in kernel ticks; pids are reused
	Session string                `json:"session,omitempty"`
	File    string                `json:"file,omitempty"` // Claude Code's own file about this process
	State   guestproto.AgentState `json:"state"`
	On      string                `json:"on,omitempty"`
	Tool    string                `json:"tool,omitempty"`  // tool that asks, if the agent is blocked; "" if no tool does
	Asker   string                `json:"asker,omitempty"` // blocked subagent, "" for the agent itself
	Since   time.Time             `json:"since"`           // when the state last changed
	At      time.Time             `json:"at"`              // time of the event that reported the state
}

// file returns the report's file name in the directory.
func (n agentReport) file() string { return n.Agent + "-" + strconv.Itoa(n.PID) + ".json" }

// event is a hook's report. Hooks of Claude Code and Codex write it to stdin, with
// the same field names. Codex's notify passes it as an argument.
type event map[string]json.RawMessage

// eventFields lists the fields that the program uses; the others can be large.
var eventFields = map[string]bool{
	"hook_event_name": true, "session_id": true, "agent_id": true, "tool_name": true, "tool_input": true, "source": true, "reason": true,
	"notification_type": true, "message": true, "error": true, "error_details": true, "last_assistant_message": true, "background_tasks": true, "type": true, "thread-id": true,
}

// readEvent reads an event field by field, so that a truncated event still yields
// the fields before the cut.
func readEvent(in io.Reader) event {
	d := json.NewDecoder(io.LimitReader(in, maxEvent))
	e := event{}
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return e
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return e
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return e
		}
		if name, ok := key.(string); ok && eventFields[name] {
			e[name] = value
		}
	}
	return e
}

func (e event) text(field string) string {
	var s string
	if json.Unmarshal(e[field], &s) != nil {
		return ""
	}
	return s
}

// Runner is the variable with the process number of a client that runs an agent and answers its
// permissions. The agent runs its hooks in addition.
const Runner = "AGENT_GUEST_RUNNER"

// Hook records what an agent's hook reports. If the agent asks a question, Hook makes it known
// to the host. It prints nothing but the host's answer and never fails, because an agent would
// treat either as an answer to its pending action.
func Hook(ctx context.Context, g sys.Guest, args []string, in io.Reader, out io.Writer) {
	now := time.Now().UTC()
	if len(args) == 0 || !agentName.MatchString(args[0]) || !g.Fake && os.Geteuid() == 0 {
		return // the agent's user could not replace files of root
	}
	if len(args) > 1 {
		in = strings.NewReader(args[len(args)-1])
	}
	e := readEvent(in)
	// Read to the end: an agent may fail when its pipe is closed early.
	_, _ = io.Copy(io.Discard, io.LimitReader(in, 8*maxEvent))
	p, ok := findAgent(args[0])
	if !ok {
		return
	}
	asks := e.text("hook_event_name") == "PermissionRequest"
	if asks && os.Getenv(Runner) == strconv.Itoa(p.Parent) {
		return // its runner asks, and records that
	}
	if recordEvent(g, args[0], p, e, now) != nil {
		return
	}
	endDialogs(g, e, p)
	if !asks {
		return
	}
	q := e.question(args[0], p)
	switch args[0] {
	case "claude":
		self, ok := sys.ProcessAt(os.Getpid())
		if !ok {
			return
		}
		if q, err := q.raise(g, self); err == nil {
			if answer, ok := q.await(ctx, g, p); ok {
				_ = e.decideForClaude(q, answer, out) // otherwise the agent's dialog remains
			}
		}
	case "codex":
		if q, ok := q.inDialog(e); ok {
			_, _ = q.raise(g, p) // otherwise the agent's dialog remains
		}
	}
}

// recordEvent records what an event says about the agent in process p.
func recordEvent(g sys.Guest, agent string, p sys.Process, e event, now time.Time) error {
	unlock, err := lockAttention(g)
	if err != nil {
		return err // without the directory, nothing can watch
	}
	defer unlock()
	fresh := agentReport{Agent: agent, PID: p.PID, Start: p.Start}
	if fresh.Agent == "claude" {
		fresh.File = claudeFileOf(p.PID)
	}
	n, err := readReport(filepath.Join(g.Path(attentionDir), fresh.file()))
	if err != nil || n.Start != p.Start {
		n = fresh
	}
	next := n.afterEvent(e, now)
	if next == n || next.State == "" {
		return nil
	}
	return writeReport(g, next)
}

func readReport(path string) (agentReport, error) {
	var n agentReport
	data, err := sys.ReadFile(path, maxReport)
	if err == nil {
		err = json.Unmarshal(data, &n)
	}
	return n, err
}

func writeReport(g sys.Guest, n agentReport) error {
	data, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return sys.WriteFile(filepath.Join(g.Path(attentionDir), n.file()), data, 0o600)
}

// lockAttention creates the directory and locks out other hooks: two tools of one
// agent may end at the same time. After lockTime it continues without the lock.
func lockAttention(g sys.Guest) (unlock func(), err error) {
	dir := g.Path(attentionDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(lockTime); ; time.Sleep(5 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil || !errors.Is(err, syscall.EWOULDBLOCK) || time.Now().After(end) {
			return func() { _ = f.Close() }, nil // closing the file releases the lock
		}
	}
}

// afterEvent returns the report as it is after an event.
func (n agentReport) afterEvent(e event, now time.Time) agentReport {
	subagent := e.text("agent_id")
	if session := e.text("session_id"); session != "" && subagent == "" {
		n.Session = summarize(session)
	}
	blocked := n.State == guestproto.AgentBlocked
	next := func(state guestproto.AgentState, on string) agentReport {
		if state != n.State || on != n.On {
			n.Since = now
		}
		n.State, n.On, n.Tool, n.Asker, n.At = state, on, "", "", now
		if state == guestproto.AgentBlocked {
			n.Tool, n.Asker = summarize(e.text("tool_name")), subagent
		}
		return n
	}
	switch e.text("hook_event_name") {
	case "SessionStart":
		if e.text("source") != "compact" { // a compaction happens in the middle of a turn
			return next(guestproto.AgentIdle, "")
		}
	case "UserPromptSubmit":
		return next(guestproto.AgentWorking, "")
	case "PreToolUse":
		// Of several parallel tools, one may begin while another waits for an
		// answer.
		if !blocked && subagent == "" {
			return next(guestproto.AgentWorking, "")
		}
	case "PostToolUse", "PostToolUseFailure", "PermissionDenied":
		// A block ends with the tool that asked.
		if blocked && subagent == n.Asker && (n.Tool == "" || n.On == e.permissionText()) || !blocked && subagent == "" {
			return next(guestproto.AgentWorking, "")
		}
	case "PermissionRequest":
		return next(guestproto.AgentBlocked, e.permissionText())
	case "Notification":
		return n.acknowledged(e, next)
	case "Stop":
		switch {
		case subagent != "", blocked && n.Asker != "": // a subagent in the background may still ask
		case e.hasBackgroundAgents():
			return next(guestproto.AgentWorking, "")
		default:
			return next(guestproto.AgentDone, "")
		}
	case "StopFailure":
		if subagent == "" {
			what := cmp.Or(e.text("last_assistant_message"), e.text("error_details"), e.text("error"))
			return next(guestproto.AgentError, summarize(what))
		}
	case "Interrupt": // Codex reports Esc, Claude Code does not
		return next(guestproto.AgentIdle, "")
	case "SessionEnd":
		if reason := e.text("reason"); reason == "clear" || reason == "resume" {
			return next(guestproto.AgentIdle, "") // the program continues with another session
		}
		return next(guestproto.AgentGone, "")
	}
	switch e.text("type") { // Codex's notify
	case "agent-turn-complete":
		// Codex sends the model other requests in the middle of a turn, for example
		// for a title.
		if n.Session == "" || n.Session == summarize(e.text("thread-id")) {
			return next(guestproto.AgentDone, "")
		}
	case "approval-requested":
		return next(guestproto.AgentBlocked, summarize("permission: "+e.text("message")))
	}
	return n
}

// acknowledged applies a notification. Notifications come late, so the states that other
// hooks have reported are more precise.
func (n agentReport) acknowledged(e event, next func(guestproto.AgentState, string) agentReport) agentReport {
	switch e.text("notification_type") {
	case "permission_prompt", "elicitation_dialog":
		if n.State != guestproto.AgentBlocked {
			return next(guestproto.AgentBlocked, summarize(e.text("message")))
		}
	case "idle_prompt":
		if n.State == guestproto.AgentBlocked || n.State == guestproto.AgentWorking {
			return next(guestproto.AgentDone, "")
		}
	}
	return n
}

// hasBackgroundAgents reports whether subagents run in the background, whose end will wake the
// agent. Other background tasks, such as a server, run until they are ended.
func (e event) hasBackgroundAgents() bool {
	var tasks []struct {
		Type   string `json:"type"`
		Status string `json:"status"`
	}
	_ = json.Unmarshal(e["background_tasks"], &tasks) // no tasks, if the field has another type
	for _, t := range tasks {
		if t.Type == "subagent" && t.Status == "running" {
			return true
		}
	}
	return false
}

// permissionText describes the action that a tool needs permission for, or the question that
// a tool asks.
func (e event) permissionText() string {
	tool := e.text("tool_name")
	asks, what := e.toolUse()
	switch {
	case asks != "":
		return summarize("question: " + asks)
	case what != "":
		return summarize("permission: " + tool + ": " + what)
	}
	return summarize("permission: " + tool)
}

// toolUse returns the first question that a tool asks, and what else it is used for: a
// command, a file, an address.
func (e event) toolUse() (asks, what string) {
	var input struct {
		Command     any    `json:"command"`
		FilePath    string `json:"file_path"`
		Notebook    string `json:"notebook_path"`
		URL         string `json:"url"`
		Query       string `json:"query"`
		Description string `json:"description"`
		Questions   []struct {
			Question string `json:"question"`
		} `json:"questions"`
	}
	// A field of an unexpected type does not discard the fields that were read.
	_ = json.Unmarshal(e["tool_input"], &input)
	if len(input.Questions) > 0 {
		asks = input.Questions[0].Question
	}
	var command string
	switch c := input.Command.(type) {
	case string:
		command = c
	case []any:
		command = strings.Trim(fmt.Sprint(c), "[]")
	}
	return asks, cmp.Or(command, input.FilePath, input.Notebook, input.URL, input.Query, input.Description)
}

// summarize returns text as one short line.
func summarize(s string) string {
	s = s[:min(len(s), 4*maxSummary)]
	s = strings.Join(strings.FieldsFunc(s, unicode.IsSpace), " ")
	if r := []rune(s); len(r) > maxSummary {
		s = string(r[:maxSummary-1]) + "…"
	}
	return guestproto.Clean(s)
}

// Bell records that a tmux window rang. Like Hook, it never fails.
func Bell(g sys.Guest, window string) {
	if !windowID.MatchString(window) || !g.Fake && os.Geteuid() == 0 {
		return
	}
	dir := g.Path(attentionDir)
	if os.MkdirAll(dir, 0o700) != nil {
		return
	}
	// The first ring counts until a user visits the window.
	f, err := os.OpenFile(filepath.Join(dir, bellPrefix+window[1:]), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		_ = f.Close() // the file is empty
	}
}

// findAgent finds the agent among the ancestors of this hook's process. Shells may
// be between them.
func findAgent(agent string) (sys.Process, bool) {
	var nearest sys.Process
	for _, p := range lineage(os.Getppid()) {
		if p.Name == agent || agent == "claude" && readClaude(claudeFileOf(p.PID)).belongsTo(p) {
			return p, true
		}
		if nearest.PID == 0 && !isShell(p.Name) {
			nearest = p
		}
	}
	return nearest, nearest.PID != 0
}

// lineage returns a process and its ancestors, without pid 1.
func lineage(pid int) (line []sys.Process) {
	for pid > 1 && len(line) < ancestors {
		p, ok := sys.ProcessAt(pid)
		if !ok {
			break
		}
		line = append(line, p)
		pid = p.Parent
	}
	return line
}

func isShell(name string) bool {
	switch name {
	case "sh", "bash", "dash", "zsh", "fish", "ksh":
		return true
	}
	return false
}

// claudeFileOf returns the path of the file in which Claude Code reports its state.
func claudeFileOf(pid int) string {
	dir := os.Getenv("CLAUDE_CONFIG_DIR")
	if dir == "" {
		dir = filepath.Join(os.Getenv("HOME"), ".claude")
	}
	return filepath.Join(dir, "sessions", strconv.Itoa(pid)+".json")
}

// claude holds the fields of such a file that matter here. The format is not a
// documented interface: without the file, or without its status, only the hooks
// count.
type claude struct {
	PID        int    `json:"pid"`
	Start      string `json:"procStart"`
	Status     string `json:"status"` // busy, waiting, idle, shell
	WaitingFor string `json:"waitingFor"`
	Entrypoint string `json:"entrypoint"` // "cli", or "sdk-…" without a user interface
	ChangedMS  int64  `json:"statusUpdatedAt"`
	UpdatedMS  int64  `json:"updatedAt"`
}

func readClaude(path string) claude {
	data, err := sys.ReadFile(path, maxReport)
	var c claude
	if err != nil || json.Unmarshal(data, &c) != nil {
		return claude{}
	}
	return c
}

func (c claude) belongsTo(p sys.Process) bool {
	return c.PID == p.PID && (c.Start == "" || c.Start == p.Start)
}

// changed returns the time of the last status change.
func (c claude) changed() time.Time {
	if c.ChangedMS != 0 {
		return time.UnixMilli(c.ChangedMS).UTC()
	}
	return time.UnixMilli(c.UpdatedMS).UTC()
}

const (
	// trustHook is how long a hook's report overrides an older file that disagrees.
	trustHook = 5 * time.Second
	// awaitHook is how long to wait for a dialog's hook, which describes the dialog
	// better.
	awaitHook = time.Second
)

// mergeClaude returns the report as corrected by Claude Code's own file. Some changes fire
// no hook: Esc, an answer to a question, and dialogs that do not belong to a tool.
func (n agentReport) mergeClaude(c claude, now time.Time) agentReport {
	if c.Status == "" || n.State == guestproto.AgentGone || strings.HasPrefix(c.Entrypoint, "sdk-") {
		return n // without a user interface there is neither Esc nor a dialog
	}
	changed := c.changed()
	heard := changed.After(n.At) || now.Sub(n.At) > trustHook
	become := func(state guestproto.AgentState, on string) agentReport {
		n.State, n.On, n.Since = state, on, changed
		return n
	}
	switch c.Status {
	case "waiting":
		// A request's hook and its dialog occur together: a dialog much later is
		// another one.
		known := n.State == guestproto.AgentBlocked && !changed.After(n.At.Add(trustHook))
		if !known && now.Sub(changed) >= awaitHook {
			return become(guestproto.AgentBlocked, summarize(c.WaitingFor))
		}
	case "busy":
		if heard && n.State != guestproto.AgentWorking {
			return become(guestproto.AgentWorking, "")
		}
	case "idle", "shell":
		if heard && (n.State == guestproto.AgentWorking || n.State == guestproto.AgentBlocked) {
			return become(guestproto.AgentIdle, "")
		}
	}
	return n
}
