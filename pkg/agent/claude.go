package agent

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
)

// claudeLine is one line of Claude Code's stream-json, reduced to the fields that are used
// here. A message spans as many lines as it has parts, and all of them repeat the same
// usage. There can be several results, each with the total usage up to then.
type claudeLine struct {
	Type    string  `json:"type"`
	Subtype string  `json:"subtype"`
	Session string  `json:"session_id"`
	Model   string  `json:"model"`              // of type system
	Parent  *string `json:"parent_tool_use_id"` // the tool call that started this subagent
	Message struct {
		ID      string          `json:"id"`
		Content json.RawMessage `json:"content"` // of type user, it may be plain text
		Usage   claudeUsage     `json:"usage"`
	} `json:"message"`
	Error   string `json:"error"`   // of type assistant and subtype api_retry
	Attempt int64  `json:"attempt"` // this and the next two are of subtype api_retry
	Most    int64  `json:"max_retries"`
	Status  int64  `json:"error_status"`

	Failed  bool                        `json:"is_error"` // this and the rest are of type result
	Turns   int64                       `json:"num_turns"`
	Cost    float64                     `json:"total_cost_usd"`
	Usage   claudeUsage                 `json:"usage"`
	Models  map[string]claudeModelUsage `json:"modelUsage"`
	Result  string                      `json:"result"`
	Reasons []string                    `json:"errors"`
}

type claudeUsage struct {
	Input      int64 `json:"input_tokens"`
	Output     int64 `json:"output_tokens"`
	CacheRead  int64 `json:"cache_read_input_tokens"`
	CacheWrite int64 `json:"cache_creation_input_tokens"`
}

func (u claudeUsage) usage() Usage {
	return Usage{InputTokens: u.Input, OutputTokens: u.Output, CacheReadTokens: u.CacheRead, CacheWriteTokens: u.CacheWrite}
}

// claudeModelUsage is the usage of one model, including that of subagents.
type claudeModelUsage struct {
	Input      int64 `json:"inputTokens"`
	Output     int64 `json:"outputTokens"`
	CacheRead  int64 `json:"cacheReadInputTokens"`
	CacheWrite int64 `json:"cacheCreationInputTokens"`
}

// claudeBlock is one part of a message.
type claudeBlock struct {
	Type  string `json:"type"`
	ID    string `json:"id"`
	Name  string `json:"name"`
	Text  string `json:"text"`
	Of    string `json:"tool_use_id"`
	Input struct {
		Command     string `json:"command"`
		File        string `json:"file_path"`
		Notebook    string `json:"notebook_path"`
		Path        string `json:"path"`
		Pattern     string `json:"pattern"`
		URL         string `json:"url"`
		Query       string `json:"query"`
		Description string `json:"description"`
		Prompt      string `json:"prompt"`
	} `json:"input"`
}

// summary returns the tool's most telling argument.
func (b claudeBlock) summary() string {
	in := b.Input
	return cmp.Or(in.Command, in.File, in.Notebook, in.Pattern, in.Path, in.URL, in.Query, in.Description, in.Prompt)
}

// claude parses one line, and reports whether it was understood.
func (r *Parser) claude(data []byte) bool {
	var l claudeLine
	if !decode(data, &l) || l.Type == "" {
		return false
	}
	switch l.Type {
	case "system":
		switch l.Subtype {
		case "init":
			r.setThread(l.Session)
			r.p.Model = oneWord(l.Model)
		case "api_retry":
			r.emit(Failure, "api", fmt.Sprintf("%s (%d), attempt %d of %d", oneWord(l.Error), l.Status, l.Attempt, l.Most))
		}
	case "assistant":
		r.claudeMessage(l)
	case "user":
		for _, b := range l.blocks() {
			if strings.HasSuffix(b.Type, "tool_result") {
				r.endCall(b.Of)
			}
		}
	case "result":
		r.claudeResult(l)
	}
	return true
}

func (l claudeLine) blocks() []claudeBlock {
	var blocks []claudeBlock
	if len(l.Message.Content) > 0 {
		decode(l.Message.Content, &blocks)
	}
	return blocks
}

func (r *Parser) claudeMessage(l claudeLine) {
	if id := l.Message.ID; id != "" && !r.alreadyCounted(id) {
		used := l.Message.Usage.usage()
		if l.Parent == nil { // a subagent's turns do not count as the agent's
			used.Turns = 1
		}
		r.grow(r.p.Run.plus(used))
	}
	for _, b := range l.blocks() {
		switch {
		case b.Type == "text" && strings.TrimSpace(b.Text) != "":
			r.emit(Message, "", lines(b.Text))
		case strings.HasSuffix(b.Type, "tool_use"):
			r.startCall(b.ID, b.Name, b.summary())
		case strings.HasSuffix(b.Type, "tool_result"): // of tools that run on the model's side
			r.endCall(b.Of)
		}
	}
	if l.Error != "" {
		r.emit(Failure, "", line(l.Error))
	}
}

func (r *Parser) claudeResult(l claudeLine) {
	used := l.Usage.usage()
	if len(l.Models) > 0 {
		used = Usage{}
		for _, m := range l.Models {
			used = used.plus(Usage{
				InputTokens: m.Input, OutputTokens: m.Output, CacheReadTokens: m.CacheRead, CacheWriteTokens: m.CacheWrite,
			})
		}
	}
	used.Turns, used.CostUSD = l.Turns, l.Cost
	r.grow(used)
	r.p.Calls = nil
	if l.Failed || l.Subtype != "success" {
		r.p.Error = lines(cmp.Or(l.Result, strings.Join(l.Reasons, "\n"), l.Subtype))
		r.emit(Failure, oneWord(l.Subtype), r.p.Error)
		return
	}
	r.p.Result, r.p.Error = lines(l.Result), ""
	r.emit(Result, "", r.p.Result)
}
