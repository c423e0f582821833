package codexrun

import (
	"encoding/json"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/observe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// The requests of the app server that a person decides.
const (
	runCommand    = "item/commandExecution/requestApproval"
	changeFiles   = "item/fileChange/requestApproval"
	getPermission = "item/permissions/requestApproval"
	askUser       = "item/tool/requestUserInput"
)

const unknownMethod = -32601 // JSON-RPC's error code

// request is a request of the app server to its client.
type request struct {
	method string

	ThreadID string `json:"threadId"`
	TurnID   string `json:"turnId"`
	ItemID   string `json:"itemId"`
	Reason   string `json:"reason"`
	Command  string `json:"command"`
	Network  struct {
		Host     string `json:"host"`
		Protocol string `json:"protocol"`
	} `json:"networkApprovalContext"`
	Permissions json.RawMessage `json:"permissions"`
	Questions   []struct {
		observe.Choice

		ID     string `json:"id"`
		Secret bool   `json:"isSecret"`
	} `json:"questions"`

	changes string // the files that the item changes
}

func readRequest(m message) request {
	r := request{method: m.Method}
	_ = json.Unmarshal(m.Params, &r) // what has another type is left out
	return r
}

// question returns what a request asks a person; ok is false if it needs no person.
func (r request) question() (q guestproto.Question, ok bool) {
	q = guestproto.Question{Kind: guestproto.AskPermission, Agent: "codex"}
	switch r.method {
	case runCommand:
		q.Tool, q.Text = "Bash", "Bash: "+r.Command // as its hook names it
		if r.Network.Host != "" {
			q.Tool, q.Text = "network", "network: "+r.Network.Protocol+" "+r.Network.Host
		}
	case changeFiles:
		q.Tool, q.Text = "apply_patch", "apply_patch: "+r.changes
	case getPermission:
		q.Tool, q.Text = "permissions", "permissions: "+string(r.Permissions)
	case askUser:
		var choices []observe.Choice
		for _, one := range r.Questions {
			if one.Secret { // answers are stored in the clear
				return q, false
			}
			choices = append(choices, one.Choice)
		}
		return observe.AskChoices(q, choices), len(choices) > 0
	default:
		return q, false
	}
	if r.Reason != "" {
		q.Text += "\n" + r.Reason
	}
	return q, true
}

// response returns what an answer means to the app server, and what to tell the agent to do
// instead; "" for nothing.
func (r request) response(answer string) (result any, instead string) {
	if r.method == askUser {
		if answer == guestproto.Deny {
			return r.refusal(), ""
		}
		answers := map[string]any{}
		for i, text := range observe.SplitAnswer(answer, len(r.Questions)) {
			answers[r.Questions[i].ID] = map[string]any{"answers": []string{text}}
		}
		return map[string]any{"answers": answers}, ""
	}
	if answer != guestproto.Allow {
		if answer != guestproto.Deny {
			instead = answer
		}
		return r.refusal(), instead
	}
	if r.method == getPermission {
		return map[string]any{"permissions": r.granted(), "scope": "turn"}, ""
	}
	return map[string]any{"decision": "accept"}, ""
}

// granted returns the permissions that were requested, without those that are null.
func (r request) granted() map[string]json.RawMessage {
	all := map[string]json.RawMessage{}
	_ = json.Unmarshal(r.Permissions, &all) // grants nothing, if it is not an object
	for name, value := range all {
		if string(value) == "null" {
			delete(all, name)
		}
	}
	return all
}

// refusal returns the response that lets the agent continue without what it requested.
func (r request) refusal() any {
	switch r.method {
	case runCommand, changeFiles:
		return map[string]any{"decision": "decline"}
	case getPermission:
		return map[string]any{"permissions": map[string]any{}, "scope": "turn"}
	case askUser:
		return map[string]any{"answers": map[string]any{}}
	case "mcpServer/elicitation/request":
		return map[string]any{"action": "decline", "content": nil, "_meta": nil}
	}
	return &rpcError{unknownMethod, "this client does not support " + r.method}
}
