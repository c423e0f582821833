package agent

import (
	"cmp"
	"strings"
)

// codexLine is one line of `codex exec --json`, reduced to the fields that are used here, or a
// notification of Codex's app server.
type codexLine struct {
	Type   string     `json:"type"`
	Thread string     `json:"thread_id"`
	Usage  codexUsage `json:"usage"` // of the whole thread so far
	Error  struct {
		Message string `json:"message"`
	} `json:"error"` // of type turn.failed
	Message string    `json:"message"` // of type error
	Item    codexItem `json:"item"`

	Method string     `json:"method"` // of a notification
	Params codexEvent `json:"params"`
}

// codexEvent has the parameters of a notification of the app server, see
// https://developers.openai.com/codex/app-server.
type codexEvent struct {
	Thread struct {
		ID     string `json:"id"`
		Parent string `json:"parentThreadId"` // of a subagent
	} `json:"thread"`
	ThreadID string    `json:"threadId"`
	Item     codexItem `json:"item"`
	Turn     struct {
		Status string `json:"status"`
		Error  struct {
			Message string `json:"message"`
		} `json:"error"`
	} `json:"turn"`
	TokenUsage struct {
		Total struct {
			Input  int64 `json:"inputTokens"`
			Read   int64 `json:"cachedInputTokens"`
			Write  int64 `json:"cacheWriteInputTokens"`
			Output int64 `json:"outputTokens"`
		} `json:"total"`
	} `json:"tokenUsage"`
	Error struct {
		Message string `json:"message"`
	} `json:"error"`
	Message string `json:"message"`
}

// itemTypes maps the app server's types of items to those of `codex exec`.
var itemTypes = map[string]string{
	"agentMessage": "agent_message", "commandExecution": "command_execution", "fileChange": "file_change",
	"mcpToolCall": "mcp_tool_call", "collabAgentToolCall": "collab_tool_call", "webSearch": "web_search",
}

// asExec returns what `codex exec` prints in place of a notification. Its type is "" if that is
// nothing.
func (l codexLine) asExec(thread string) codexLine {
	p := l.Params
	own := thread == "" || oneWord(p.ThreadID) == thread // not of a subagent
	out := codexLine{Item: p.Item, Message: p.Error.Message}
	out.Item.Type = itemTypes[p.Item.Type]
	switch l.Method {
	case "thread/started":
		if p.Thread.Parent == "" {
			out.Type, out.Thread = "thread.started", p.Thread.ID
		}
	case "turn/started":
		if own {
			out.Type = "turn.started"
		}
	case "item/started":
		out.Type = "item.started"
	case "item/completed":
		if own || out.Item.Type != "agent_message" {
			out.Type = "item.completed"
		}
	case "thread/tokenUsage/updated":
		if own {
			out.Type, out.Usage = "usage", codexUsage(p.TokenUsage.Total)
		}
	case "warning":
		out.Type, out.Item = "item.completed", codexItem{Type: "error", Message: p.Message}
	case "error":
		out.Type = "error"
	case "turn/completed":
		switch {
		case !own:
		case p.Turn.Status == "completed":
			out.Type = "turn.completed"
		default:
			out.Type, out.Error.Message = "turn.failed", cmp.Or(p.Turn.Error.Message, p.Turn.Status)
		}
	}
	return out
}

type codexUsage struct {
	Input  int64 `json:"input_tokens"` // includes tokens read from and written to the cache
	Read   int64 `json:"cached_input_tokens"`
	Write  int64 `json:"cache_write_input_tokens"`
	Output int64 `json:"output_tokens"`
}

// codexItem is something that the agent does or says.
type codexItem struct {
	ID      string `json:"id"`
	Type    string `json:"type"`
	Text    string `json:"text"`
	Command string `json:"command"`
	Server  string `json:"server"`
	Tool    string `json:"tool"`
	Query   string `json:"query"`
	Prompt  string `json:"prompt"`
	Message string `json:"message"`
	Changes []struct {
		Path string `json:"path"`
	} `json:"changes"`
}

// tool returns the name of the tool that the item calls and its main argument; name is ""
// if the item is not a tool call.
func (i codexItem) tool() (name, with string) {
	switch i.Type {
	case "command_execution":
		return "shell", i.Command
	case "file_change":
		var paths []string
		for _, c := range i.Changes[:min(len(i.Changes), 10)] {
			paths = append(paths, c.Path)
		}
		return "file_change", strings.Join(paths, " ")
	case "mcp_tool_call":
		return oneWord(i.Server) + "." + oneWord(i.Tool), ""
	case "collab_tool_call":
		return cmp.Or(i.Tool, i.Type), i.Prompt
	case "web_search":
		return "web_search", i.Query
	}
	return "", ""
}

// codex parses one line, and reports whether it was understood.
func (r *Parser) codex(data []byte) bool {
	var l codexLine
	if !decode(data, &l) || l.Type == "" && l.Method == "" {
		return false
	}
	if l.Method != "" {
		l = l.asExec(r.p.Thread)
	}
	switch l.Type {
	case "thread.started":
		r.setThread(l.Thread)
	case "turn.started":
		r.grow(r.p.Run.plus(Usage{Turns: 1}))
	case "item.started":
		if name, with := l.Item.tool(); name != "" {
			r.startCall(l.Item.ID, name, with)
		}
	case "item.completed":
		r.codexItem(l.Item)
	case "usage":
		r.codexUsage(l.Usage)
	case "turn.completed":
		r.codexUsage(l.Usage)
		r.p.Calls, r.p.Error = nil, ""
		r.emit(Result, "", r.p.Result)
	case "error": // Codex may retry
		r.codexError(l.Message)
	case "turn.failed":
		r.p.Calls = nil
		r.codexError(l.Error.Message)
	}
	return true
}

func (r *Parser) codexUsage(u codexUsage) {
	r.grow(Usage{
		InputTokens: count(u.Input) - count(u.Read) - count(u.Write), OutputTokens: u.Output, CacheReadTokens: u.Read, CacheWriteTokens: u.Write,
	})
}

// codexError records an error. Codex reports a fatal error twice, so a repetition is
// dropped.
func (r *Parser) codexError(why string) {
	if why = lines(cmp.Or(why, "no reason given")); why != r.p.Error {
		r.p.Error = why
		r.emit(Failure, "", why)
	}
}

func (r *Parser) codexItem(i codexItem) {
	name, with := i.tool()
	switch {
	case name != "":
		if !r.endCall(i.ID) { // Codex reports only the end of some items
			r.startCall(i.ID, name, with)
			r.endCall(i.ID)
		}
	case i.Type == "agent_message":
		r.p.Result = lines(i.Text)
		r.emit(Message, "", r.p.Result)
	case i.Type == "error":
		r.emit(Failure, "", line(i.Message))
	}
}
