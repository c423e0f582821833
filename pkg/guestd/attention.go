package guestd

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

// What agents tell of themselves through their hooks is kept as one small file
// for each of their processes, in the agent's own directory in memory. Whoever
// watches reads it there; without anybody who watches, nothing else is done.
const (
	attentionDir = SecretDir + "/attention"
	bellPrefix   = "bell-" // and a window's number: it rang
)

// Bounds of what hooks bring.
const (
	maxEvent  = 8 << 20 // bytes; some carry what a tool wrote
	maxNews   = 64 << 10
	maxGist   = 160             // characters of what an agent waits for
	lockTime  = 2 * time.Second // a hook stands in its agent's way, so it does not wait longer for another
	ancestors = 32              // processes that one descends from, at most
)

var (
	agentName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)
	windowID  = regexp.MustCompile(`^@[0-9]{1,9}$`)
)

// news is what an agent's hooks told last.
type news struct {
	Agent   string          `json:"agent"`
	PID     int             `json:"pid"`
	Start   string          `json:"start"` // of the process, by the kernel's count: pids are used again
	Session string          `json:"session,omitempty"`
	File    string          `json:"file,omitempty"` // Claude Code's own, about this process
	State   wire.AgentState `json:"state"`
	On      string          `json:"on,omitempty"`
	Tool    string          `json:"tool,omitempty"`  // which asks, of a blocked agent; "" when it is none
	Asker   string          `json:"asker,omitempty"` // the subagent that is blocked, "" for the agent itself
	Since   time.Time       `json:"since"`           // the state is what it is
	At      time.Time       `json:"at"`              // of the event that said so
}

// file is its name in the directory.
func (n news) file() string { return n.Agent + "-" + strconv.Itoa(n.PID) + ".json" }

// event is what a hook reports: Claude Code's and Codex's hooks on stdin, with
// the same names, Codex's notify as an argument.
type event map[string]json.RawMessage

// eventFields are those that are looked at; the others can be large.
var eventFields = map[string]bool{
	"hook_event_name": true, "session_id": true, "agent_id": true, "tool_name": true, "tool_input": true, "source": true, "reason": true,
	"notification_type": true, "message": true, "error": true, "error_details": true, "last_assistant_message": true, "background_tasks": true, "type": true, "thread-id": true,
}

// readEvent reads field by field, so that one that is cut off still says what
// stood before the cut.
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

// Hook notes what an agent's hook reports. It prints nothing and does not fail:
// an agent takes either for an answer to what it is about to do.
func (g Guest) Hook(args []string, in io.Reader) {
	now := time.Now().UTC()
	if len(args) == 0 || !agentName.MatchString(args[0]) || !g.Fake && os.Geteuid() == 0 {
		return // root's files the agent's user could not replace
	}
	if len(args) > 1 {
		in = strings.NewReader(args[len(args)-1])
	}
	e := readEvent(in)
	// An agent may mind that nobody reads to the end.
	_, _ = io.Copy(io.Discard, io.LimitReader(in, 8*maxEvent))
	p, ok := findAgent(args[0])
	if !ok {
		return
	}
	unlock, err := g.lockAttention()
	if err != nil {
		return // there is no such directory; nobody can watch
	}
	defer unlock()
	fresh := news{Agent: args[0], PID: p.pid, Start: p.start}
	if fresh.Agent == "claude" {
		fresh.File = claudeFileOf(p.pid)
	}
	n, err := readNews(filepath.Join(g.path(attentionDir), fresh.file()))
	if err != nil || n.Start != p.start {
		n = fresh
	}
	next := n.after(e, now)
	if next == n || next.State == "" {
		return
	}
	_ = g.writeNews(next) // nobody here could do anything about it
}

func readNews(path string) (news, error) {
	var n news
	data, err := readUpTo(path, maxNews)
	if err == nil {
		err = json.Unmarshal(data, &n)
	}
	return n, err
}

func (g Guest) writeNews(n news) error {
	data, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(g.path(attentionDir), n.file()), data, 0o600)
}

// lockAttention makes the directory and keeps other hooks out of it: two tools
// of one agent may end at once. One that holds the lock for long is passed by.
func (g Guest) lockAttention() (unlock func(), err error) {
	dir := g.path(attentionDir)
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
			return func() { _ = f.Close() }, nil // closing is what unlocks
		}
	}
}

// after is the news once an event happened.
func (n news) after(e event, now time.Time) news {
	subagent := e.text("agent_id")
	if session := e.text("session_id"); session != "" && subagent == "" {
		n.Session = gist(session)
	}
	blocked := n.State == wire.AgentBlocked
	next := func(state wire.AgentState, on string) news {
		if state != n.State || on != n.On {
			n.Since = now
		}
		n.State, n.On, n.Tool, n.Asker, n.At = state, on, "", "", now
		if state == wire.AgentBlocked {
			n.Tool, n.Asker = gist(e.text("tool_name")), subagent
		}
		return n
	}
	switch e.text("hook_event_name") {
	case "SessionStart":
		if e.text("source") != "compact" { // which happens in the middle of a turn
			return next(wire.AgentIdle, "")
		}
	case "UserPromptSubmit":
		return next(wire.AgentWorking, "")
	case "PreToolUse":
		// Of several tools at once, one may begin while another waits for an answer.
		if !blocked && subagent == "" {
			return next(wire.AgentWorking, "")
		}
	case "PostToolUse", "PostToolUseFailure", "PermissionDenied":
		// A block ends with the tool that asked.
		if blocked && subagent == n.Asker && (n.Tool == "" || n.On == e.asks()) || !blocked && subagent == "" {
			return next(wire.AgentWorking, "")
		}
	case "PermissionRequest":
		return next(wire.AgentBlocked, e.asks())
	case "Notification":
		return n.noticed(e, next)
	case "Stop":
		switch {
		case subagent != "", blocked && n.Asker != "": // a subagent in the background may still ask
		case e.goesOn():
			return next(wire.AgentWorking, "")
		default:
			return next(wire.AgentDone, "")
		}
	case "StopFailure":
		if subagent == "" {
			what := cmp.Or(e.text("last_assistant_message"), e.text("error_details"), e.text("error"))
			return next(wire.AgentError, gist(what))
		}
	case "Interrupt": // Codex tells of Esc, Claude Code does not
		return next(wire.AgentIdle, "")
	case "SessionEnd":
		if reason := e.text("reason"); reason == "clear" || reason == "resume" {
			return next(wire.AgentIdle, "") // the program goes on with another session
		}
		return next(wire.AgentGone, "")
	}
	switch e.text("type") { // Codex's notify
	case "agent-turn-complete":
		// Codex asks the model for other things in the middle of a turn, as for a title.
		if n.Session == "" || n.Session == gist(e.text("thread-id")) {
			return next(wire.AgentDone, "")
		}
	case "approval-requested":
		return next(wire.AgentBlocked, gist("permission: "+e.text("message")))
	}
	return n
}

// noticed is what a notification adds. It comes late: what the other hooks said
// before is more precise.
func (n news) noticed(e event, next func(wire.AgentState, string) news) news {
	switch e.text("notification_type") {
	case "permission_prompt", "elicitation_dialog":
		if n.State != wire.AgentBlocked {
			return next(wire.AgentBlocked, gist(e.text("message")))
		}
	case "idle_prompt":
		if n.State == wire.AgentBlocked || n.State == wire.AgentWorking {
			return next(wire.AgentDone, "")
		}
	}
	return n
}

// goesOn reports whether subagents run in the background, whose end will wake the
// agent. Other things there, as a server, run until somebody ends them.
func (e event) goesOn() bool {
	var tasks []struct {
		Type   string `json:"type"`
		Status string `json:"status"`
	}
	_ = json.Unmarshal(e["background_tasks"], &tasks) // none, where they are something else
	for _, t := range tasks {
		if t.Type == "subagent" && t.Status == "running" {
			return true
		}
	}
	return false
}

// asks says what a tool's permission is asked for, or which question a tool asks.
func (e event) asks() string {
	tool := e.text("tool_name")
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
	// A field of another kind leaves those that were read.
	_ = json.Unmarshal(e["tool_input"], &input)
	if len(input.Questions) > 0 && input.Questions[0].Question != "" {
		return gist("question: " + input.Questions[0].Question)
	}
	var command string
	switch c := input.Command.(type) {
	case string:
		command = c
	case []any:
		command = strings.Trim(fmt.Sprint(c), "[]")
	}
	for _, what := range []string{command, input.FilePath, input.Notebook, input.URL, input.Query, input.Description} {
		if what != "" {
			return gist("permission: " + tool + ": " + what)
		}
	}
	return gist("permission: " + tool)
}

// gist is text as one short line.
func gist(s string) string {
	s = s[:min(len(s), 4*maxGist)]
	s = strings.Join(strings.FieldsFunc(s, unicode.IsSpace), " ")
	if r := []rune(s); len(r) > maxGist {
		s = string(r[:maxGist-1]) + "…"
	}
	return wire.Clean(s)
}

// Bell notes that a window of tmux rang. It does not fail, as Hook does not.
func (g Guest) Bell(window string) {
	if !windowID.MatchString(window) || !g.Fake && os.Geteuid() == 0 {
		return
	}
	dir := g.path(attentionDir)
	if os.MkdirAll(dir, 0o700) != nil {
		return
	}
	// The first ring counts, until somebody looked.
	f, err := os.OpenFile(filepath.Join(dir, bellPrefix+window[1:]), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		_ = f.Close() // it is empty
	}
}

// process is one as the kernel describes it.
type process struct {
	pid, parent int
	name        string
	start       string // ticks since the machine booted
	ended       bool   // and nobody took notice yet
}

func processAt(pid int) (process, bool) {
	text := readBounded("/proc/" + strconv.Itoa(pid) + "/stat")
	// A name may hold anything, parentheses too.
	from, to := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if from < 0 || to < from {
		return process{}, false
	}
	f := strings.Fields(text[to+1:])
	if len(f) < 20 {
		return process{}, false
	}
	parent, err := strconv.Atoi(f[1])
	return process{pid: pid, parent: parent, name: text[from+1 : to], start: f[19], ended: strings.ContainsAny(f[0], "ZX")}, err == nil
}

// findAgent finds the agent among the processes that this hook was started by.
// There may be shells between them.
func findAgent(agent string) (process, bool) {
	var nearest process
	for _, p := range lineage(os.Getppid()) {
		if p.name == agent || agent == "claude" && readClaude(claudeFileOf(p.pid)).of(p) {
			return p, true
		}
		if nearest.pid == 0 && !isShell(p.name) {
			nearest = p
		}
	}
	return nearest, nearest.pid != 0
}

// lineage is a process and what it descends from, but for the first of all.
func lineage(pid int) (line []process) {
	for pid > 1 && len(line) < ancestors {
		p, ok := processAt(pid)
		if !ok {
			break
		}
		line = append(line, p)
		pid = p.parent
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

// claudeFileOf is where Claude Code keeps what it is doing.
func claudeFileOf(pid int) string {
	dir := os.Getenv("CLAUDE_CONFIG_DIR")
	if dir == "" {
		dir = filepath.Join(os.Getenv("HOME"), ".claude")
	}
	return filepath.Join(dir, "sessions", strconv.Itoa(pid)+".json")
}

// claude is what stands in such a file, as far as it matters here. It is
// nobody's promise: without it, or without its status, the hooks stand alone.
type claude struct {
	PID        int    `json:"pid"`
	Start      string `json:"procStart"`
	Status     string `json:"status"` // busy, waiting, idle, shell
	WaitingFor string `json:"waitingFor"`
	ChangedMS  int64  `json:"statusUpdatedAt"`
	UpdatedMS  int64  `json:"updatedAt"`
}

func readClaude(path string) claude {
	data, err := readUpTo(path, maxNews)
	var c claude
	if err != nil || json.Unmarshal(data, &c) != nil {
		return claude{}
	}
	return c
}

func (c claude) of(p process) bool {
	return c.PID == p.pid && (c.Start == "" || c.Start == p.start)
}

// changed is when the status became what it is.
func (c claude) changed() time.Time {
	if c.ChangedMS != 0 {
		return time.UnixMilli(c.ChangedMS).UTC()
	}
	return time.UnixMilli(c.UpdatedMS).UTC()
}

const (
	// trustHook is how long a hook's word stands against a file that says
	// otherwise and is older.
	trustHook = 5 * time.Second
	// awaitHook is how long a dialog's hook may take, which has better words for it.
	awaitHook = time.Second
)

// with is the news as Claude Code's own file corrects it. Some things fire no
// hook: Esc, an answer to a question, a dialog that is none of a tool's.
func (n news) with(c claude, now time.Time) news {
	if c.Status == "" || n.State == wire.AgentGone {
		return n
	}
	changed := c.changed()
	heard := changed.After(n.At) || now.Sub(n.At) > trustHook
	become := func(state wire.AgentState, on string) news {
		n.State, n.On, n.Since = state, on, changed
		return n
	}
	switch c.Status {
	case "waiting":
		// A request's hook and its dialog come together: one much later is another.
		known := n.State == wire.AgentBlocked && !changed.After(n.At.Add(trustHook))
		if !known && now.Sub(changed) >= awaitHook {
			return become(wire.AgentBlocked, gist(c.WaitingFor))
		}
	case "busy":
		if heard && n.State != wire.AgentWorking {
			return become(wire.AgentWorking, "")
		}
	case "idle", "shell":
		if heard && (n.State == wire.AgentWorking || n.State == wire.AgentBlocked) {
			return become(wire.AgentIdle, "")
		}
	}
	return n
}

// readUpTo reads a regular file of at most so many bytes.
func readUpTo(path string, most int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe must not keep us waiting
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > most {
		return nil, fmt.Errorf("%s is not a file of at most %d bytes", path, most)
	}
	var data bytes.Buffer
	_, err = io.Copy(&data, io.LimitReader(f, most))
	return data.Bytes(), err
}
