package agent

import (
	"cmp"
	"strings"
)

// codexLine is one line of `codex exec --json`, reduced to the fields that are used here.
type codexLine struct {
	Type   string `json:"type"`
	Thread string `json:"thread_id"`
	Usage  struct {
		Input  int64 `json:"input_tokens"` // includes tokens read from and written to the cache
		Read   int64 `json:"cached_input_tokens"`
		Write  int64 `json:"cache_write_input_tokens"`
		Output int64 `json:"output_tokens"`
	} `json:"usage"` // of the whole thread so far
	Error struct {
		Message string `json:"message"`
	} `json:"error"` // of type turn.failed
	Message string    `json:"message"` // of type error
	Item    codexItem `json:"item"`
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
	if !decode(data, &l) || l.Type == "" {
		return false
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
	case "turn.completed":
		u := l.Usage
		r.grow(Usage{
			InputTokens: count(u.Input) - count(u.Read) - count(u.Write), OutputTokens: u.Output, CacheReadTokens: u.Read, CacheWriteTokens: u.Write,
		})
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
