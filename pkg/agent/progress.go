package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/plain"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

// Bounds of what an agent can make a Parser keep or tell.
const (
	MaxLine    = 1 << 20 // bytes of a line; a longer one is passed over
	maxCalls   = 64      // tool calls at once
	maxSeen    = 64      // messages whose tokens are counted
	maxChanges = 32      // of one line
	maxWord    = 128     // bytes of a name or an id
	maxText    = 4096    // bytes of a text
	maxCount   = 1 << 53 // of anything; what all readers of JSON take for a whole number
	maxCost    = 1e9
)

// Usage is what an agent says it used, since it was first started.
type Usage struct {
	Turns            int64   `json:"turns"`
	InputTokens      int64   `json:"input_tokens"` // without those that came from or went to the cache
	OutputTokens     int64   `json:"output_tokens"`
	CacheReadTokens  int64   `json:"cache_read_tokens"`
	CacheWriteTokens int64   `json:"cache_write_tokens"`
	CostUSD          float64 `json:"cost_usd"` // as the agent reckons it; Codex says nothing of it
}

// Progress is how far an agent has come, by its own account: all its texts are
// a guest's words, cleaned. It is stored with a task, and is all that a Parser
// needs to go on.
type Progress struct {
	Usage

	ToolCalls   int    `json:"tool_calls"`
	CurrentTool string `json:"current_tool,omitempty"` // of the latest call that has no result yet
	Model       string `json:"model,omitempty"`
	Thread      string `json:"thread,omitempty"` // the agent's own id of its conversation
	Result      string `json:"result,omitempty"` // its last answer
	Error       string `json:"error,omitempty"`  // why it gave up

	Offset  int64 `json:"offset"`            // bytes of the output that Feed has read as whole lines
	Skipped int64 `json:"skipped,omitempty"` // lines that nothing could be made of

	Calls []Call   `json:"calls,omitempty"` // that have no result yet, oldest first
	Seen  []string `json:"seen,omitempty"`  // messages that were counted, oldest first
	Run   Usage    `json:"run"`             // of the conversation that Thread names
}

// Call is a call of a tool.
type Call struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

// The kinds of changes.
const (
	Tool    = "tool"    // the agent calls a tool
	Message = "message" // the agent says something
	Result  = "result"  // the agent is done
	Failure = "error"   // something went wrong for the agent
)

// Change is something that an agent did and a person may want to know.
type Change struct {
	Kind string `json:"kind"`
	Name string `json:"name,omitempty"` // of the tool
	Text string `json:"text,omitempty"` // what it was called with; what the agent said
}

// Parser reads the output of an agent as it comes. The same bytes make the same
// Progress, however they are cut up, and whether or not another Parser went on
// in between. It is for one goroutine.
type Parser struct {
	kind    manifest.Kind
	p       Progress
	partial []byte // of a line that has no end yet, unless it is too long
	pending int64  // bytes of that line
	changes []Change
}

// NewParser is a Parser for an agent of that kind which goes on from where from
// was taken: what it is fed next is what stands at from.Offset.
func NewParser(kind manifest.Kind, from Progress) *Parser {
	from.Calls, from.Seen = slices.Clone(from.Calls), slices.Clone(from.Seen)
	return &Parser{kind: kind, p: from}
}

// Progress is what was read so far.
func (r *Parser) Progress() Progress {
	p := r.p
	p.Calls, p.Seen = slices.Clone(p.Calls), slices.Clone(p.Seen)
	return p
}

// Feed reads the next bytes of the output, and says what they changed. What
// comes after the last newline is kept until the rest of its line comes; until
// then it is not in Progress, nor in its Offset.
func (r *Parser) Feed(chunk []byte) []Change {
	var all []Change
	for len(chunk) > 0 {
		line, rest, whole := bytes.Cut(chunk, []byte{'\n'})
		if r.pending += int64(len(line)); r.pending <= MaxLine {
			r.partial = append(r.partial, line...)
		} else {
			r.partial = nil
		}
		if whole {
			if r.pending <= MaxLine {
				all = append(all, r.Line(r.partial)...)
			} else {
				r.p.Skipped++
			}
			r.p.Offset += r.pending + 1
			r.partial, r.pending = r.partial[:0], 0
		}
		chunk = rest
	}
	return all
}

// Line reads one line, without its newline, and says what it changed. Who splits
// lines by himself has to remember where he was by himself, too.
func (r *Parser) Line(data []byte) []Change {
	r.changes = nil
	data = bytes.TrimSpace(data)
	understood := true
	switch {
	case len(data) == 0:
	case len(data) > MaxLine:
		understood = false
	case r.kind == manifest.Claude:
		understood = r.claude(data)
	case r.kind == manifest.Codex:
		understood = r.codex(data)
	}
	if !understood {
		r.p.Skipped++
	}
	r.p.CurrentTool = ""
	if n := len(r.p.Calls); n > 0 {
		r.p.CurrentTool = r.p.Calls[n-1].Name
	}
	return r.changes
}

func (r *Parser) tell(kind, name, text string) {
	if len(r.changes) < maxChanges {
		r.changes = append(r.changes, Change{Kind: kind, Name: name, Text: text})
	}
}

// thread notes whose output this is. Another conversation is another run of the
// agent: what it counts comes on top, and what was open is no more.
func (r *Parser) thread(id string) {
	if id = word(id); id != r.p.Thread {
		r.p.Thread, r.p.Run, r.p.Calls, r.p.Seen = id, Usage{}, nil, nil
	}
}

// call notes the beginning of a tool's call.
func (r *Parser) call(id, name, with string) {
	name = word(name)
	r.p.ToolCalls = min(r.p.ToolCalls+1, maxCount)
	r.p.Calls = latest(append(r.p.Calls, Call{word(id), name}), maxCalls)
	r.tell(Tool, name, line(with))
}

// returned notes that a call has its result, and reports whether it was open.
func (r *Parser) returned(id string) bool {
	id = word(id)
	i := slices.IndexFunc(r.p.Calls, func(c Call) bool { return c.ID == id })
	if i < 0 {
		return false
	}
	if r.p.Calls = slices.Delete(r.p.Calls, i, i+1); len(r.p.Calls) == 0 {
		r.p.Calls = nil // as it is read back from JSON
	}
	return true
}

// counted reports whether a message was counted already, and notes that it is now.
func (r *Parser) counted(id string) bool {
	if id = word(id); slices.Contains(r.p.Seen, id) {
		return true
	}
	r.p.Seen = latest(append(r.p.Seen, id), maxSeen)
	return false
}

func latest[T any](list []T, most int) []T {
	if len(list) > most {
		list = slices.Clone(list[len(list)-most:])
	}
	return list
}

// grow brings the usage of this run up to now, and the whole by as much. Nothing
// ever shrinks: an agent's final account is of fewer things than it told live.
func (r *Parser) grow(now Usage) {
	all, run := &r.p.Usage, &r.p.Run
	for _, n := range []struct{ all, run, now *int64 }{
		{&all.Turns, &run.Turns, &now.Turns},
		{&all.InputTokens, &run.InputTokens, &now.InputTokens},
		{&all.OutputTokens, &run.OutputTokens, &now.OutputTokens},
		{&all.CacheReadTokens, &run.CacheReadTokens, &now.CacheReadTokens},
		{&all.CacheWriteTokens, &run.CacheWriteTokens, &now.CacheWriteTokens},
	} {
		if more := min(*n.now, maxCount) - *n.run; more > 0 {
			*n.run += more
			*n.all = min(*n.all+more, maxCount)
		}
	}
	if more := min(now.CostUSD, maxCost) - run.CostUSD; more > 0 {
		run.CostUSD += more
		all.CostUSD = min(all.CostUSD+more, maxCost)
	}
}

// plus is u and more of it, which nobody has checked.
func (u Usage) plus(more Usage) Usage {
	return Usage{
		Turns: min(u.Turns+count(more.Turns), maxCount), InputTokens: min(u.InputTokens+count(more.InputTokens), maxCount),
		OutputTokens:     min(u.OutputTokens+count(more.OutputTokens), maxCount),
		CacheReadTokens:  min(u.CacheReadTokens+count(more.CacheReadTokens), maxCount),
		CacheWriteTokens: min(u.CacheWriteTokens+count(more.CacheWriteTokens), maxCount),
		CostUSD:          u.CostUSD,
	}
}

// count is a number that counts something.
func count(n int64) int64 { return max(0, min(n, maxCount)) }

// decode reads JSON. A part that is of another type than is known is left out,
// so that a new version of an agent costs no more than that part.
func decode(data []byte, into any) bool {
	err := json.Unmarshal(data, into)
	if err == nil {
		return true
	}
	_, partly := errors.AsType[*json.UnmarshalTypeError](err)
	return partly
}

// word is a short text of a guest: a name or an id.
func word(s string) string { return wire.Clean(plain.Head(s, maxWord)) }

// line is a text of a guest on one line.
func line(s string) string {
	return wire.Clean(strings.Join(strings.Fields(plain.Head(s, maxText)), " "))
}

// lines is a text of a guest as it is, but for what is no text.
func lines(s string) string {
	all := strings.Split(strings.TrimSpace(plain.Head(s, maxText)), "\n")
	for i, one := range all {
		all[i] = wire.Clean(strings.ReplaceAll(strings.TrimRight(one, " \t\r"), "\t", "    "))
	}
	return strings.Join(all, "\n")
}
