package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Bounds on what an agent can make a Parser keep or report.
const (
	MaxLine    = 1 << 20 // bytes of a line; a longer one is skipped
	maxCalls   = 64      // tool calls at the same time
	maxSeen    = 64      // ids of messages whose tokens are counted
	maxChanges = 32      // changes reported for one line
	maxWord    = 128     // bytes of a name or an id
	maxText    = 4096    // bytes of a text
	maxCount   = 1 << 53 // any count; the largest integer that every JSON reader represents exactly
	maxCost    = 1e9
)

// Usage is what an agent reports to have used since it was first started.
type Usage struct {
	Turns            int64   `json:"turns"`
	InputTokens      int64   `json:"input_tokens"` // excluding tokens read from or written to the cache
	OutputTokens     int64   `json:"output_tokens"`
	CacheReadTokens  int64   `json:"cache_read_tokens"`
	CacheWriteTokens int64   `json:"cache_write_tokens"`
	CostUSD          float64 `json:"cost_usd"` // the agent's own estimate; Codex reports none
}

// Progress is how far an agent has come, by its own account. All its texts come from a
// guest and are cleaned. It is stored with a task, and it is all that a new Parser needs to
// continue.
type Progress struct {
	Usage

	ToolCalls   int    `json:"tool_calls"`
	CurrentTool string `json:"current_tool,omitempty"` // name of the latest call without a result
	Model       string `json:"model,omitempty"`
	Thread      string `json:"thread,omitempty"` // the agent's own id of the conversation
	Result      string `json:"result,omitempty"` // the agent's last answer
	Error       string `json:"error,omitempty"`  // why the agent gave up

	Offset  int64 `json:"offset"`            // bytes of output that Feed has read as complete lines
	Skipped int64 `json:"skipped,omitempty"` // lines that could not be parsed

	Calls []Call   `json:"calls,omitempty"` // calls without a result, oldest first
	Seen  []string `json:"seen,omitempty"`  // ids of messages that were counted, oldest first
	Run   Usage    `json:"run"`             // usage in the conversation that Thread names
}

// Call is a tool call.
type Call struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

// The kinds of changes.
const (
	Tool    = "tool"    // the agent calls a tool
	Message = "message" // the agent says something
	Result  = "result"  // the agent has finished
	Failure = "error"   // the agent ran into an error
)

// Change is something that an agent did and that a person may want to see.
type Change struct {
	Kind string `json:"kind"`
	Name string `json:"name,omitempty"` // of a tool
	Text string `json:"text,omitempty"` // the tool's argument, or the agent's message
}

// Parser reads the output of an agent as it arrives. The same bytes produce the same
// Progress, however they are split, and even if another Parser continues in between. It is
// not safe for concurrent use.
type Parser struct {
	kind    manifest.Kind
	p       Progress
	partial []byte // the incomplete last line; empty if it is too long
	pending int64  // length of that line in bytes
	changes []Change
}

// NewParser returns a Parser for an agent of that kind that continues from a stored
// Progress. Its first input must start at from.Offset.
func NewParser(kind manifest.Kind, from Progress) *Parser {
	from.Calls, from.Seen = slices.Clone(from.Calls), slices.Clone(from.Seen)
	return &Parser{kind: kind, p: from}
}

// Progress returns a copy of the progress so far.
func (r *Parser) Progress() Progress {
	p := r.p
	p.Calls, p.Seen = slices.Clone(p.Calls), slices.Clone(p.Seen)
	return p
}

// Feed reads the next bytes of the output, and returns the changes. It keeps the bytes
// after the last newline until their line is complete; until then neither Progress nor its
// Offset includes them.
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

// Line reads one line, without its newline, and returns the changes. It does not advance
// Offset: a caller that splits lines itself must also track its own position.
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

func (r *Parser) emit(kind, name, text string) {
	if len(r.changes) < maxChanges {
		r.changes = append(r.changes, Change{Kind: kind, Name: name, Text: text})
	}
}

// setThread records which conversation the output belongs to. A different conversation is a
// new run of the agent: its usage is added to the total, and open calls are dropped.
func (r *Parser) setThread(id string) {
	if id = oneWord(id); id != r.p.Thread {
		r.p.Thread, r.p.Run, r.p.Calls, r.p.Seen = id, Usage{}, nil, nil
	}
}

// startCall records the start of a tool call.
func (r *Parser) startCall(id, name, with string) {
	name = oneWord(name)
	r.p.ToolCalls = min(r.p.ToolCalls+1, maxCount)
	r.p.Calls = latest(append(r.p.Calls, Call{oneWord(id), name}), maxCalls)
	r.emit(Tool, name, line(with))
}

// endCall records that a call has its result, and reports whether it was open.
func (r *Parser) endCall(id string) bool {
	id = oneWord(id)
	i := slices.IndexFunc(r.p.Calls, func(c Call) bool { return c.ID == id })
	if i < 0 {
		return false
	}
	if r.p.Calls = slices.Delete(r.p.Calls, i, i+1); len(r.p.Calls) == 0 {
		r.p.Calls = nil // as decoded from JSON
	}
	return true
}

// alreadyCounted reports whether a message's usage was counted before, and marks it as counted.
func (r *Parser) alreadyCounted(id string) bool {
	if id = oneWord(id); slices.Contains(r.p.Seen, id) {
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

// grow raises the usage of this run to now, and the total by the same amount. No number
// ever shrinks, because an agent's final account may cover less than it reported live.
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

// plus returns the sum of u and more, whose values are not trusted. It leaves the cost
// alone.
func (u Usage) plus(more Usage) Usage {
	return Usage{
		Turns: min(u.Turns+count(more.Turns), maxCount), InputTokens: min(u.InputTokens+count(more.InputTokens), maxCount),
		OutputTokens:     min(u.OutputTokens+count(more.OutputTokens), maxCount),
		CacheReadTokens:  min(u.CacheReadTokens+count(more.CacheReadTokens), maxCount),
		CacheWriteTokens: min(u.CacheWriteTokens+count(more.CacheWriteTokens), maxCount),
		CostUSD:          u.CostUSD,
	}
}

// count clamps n to the range of a count.
func count(n int64) int64 { return max(0, min(n, maxCount)) }

// decode parses JSON. It leaves out a value of an unexpected type, so that a new version of
// an agent costs no more than that value.
func decode(data []byte, into any) bool {
	err := json.Unmarshal(data, into)
	if err == nil {
		return true
	}
	_, partly := errors.AsType[*json.UnmarshalTypeError](err)
	return partly
}

// oneWord cleans a short text of a guest: a name or an id.
func oneWord(s string) string { return guestproto.Clean(termtext.Head(s, maxWord)) }

// line cleans a guest's text and joins it into one line.
func line(s string) string {
	return guestproto.Clean(strings.Join(strings.Fields(termtext.Head(s, maxText)), " "))
}

// lines cleans a guest's text line by line and keeps its line breaks.
func lines(s string) string {
	all := strings.Split(strings.TrimSpace(termtext.Head(s, maxText)), "\n")
	for i, one := range all {
		all[i] = guestproto.Clean(strings.ReplaceAll(strings.TrimRight(one, " \t\r"), "\t", "    "))
	}
	return strings.Join(all, "\n")
}
