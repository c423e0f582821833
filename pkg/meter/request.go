package meter

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
)

// Kind says whether a request costs money.
type Kind int

// The kinds.
const (
	Free      Kind = iota // or to a host that is not a provider's
	Counted               // its answer reports what it used
	Uncounted             // it may cost money, but its answer does not report how much
)

// endpoints are the paths of a host. A path stands for itself and everything below it.
type endpoints struct {
	provider Provider
	counted  []string // exactly these
	free     []string // of the requests that change something
	rest     Kind     // of the other requests that change something
}

var hosts = map[string]endpoints{
	"api.anthropic.com": {
		Anthropic,
		[]string{"/v1/messages"},
		[]string{"/v1/messages/count_tokens", "/v1/files", "/v1/models", "/v1/oauth", "/v1/skills", "/api"},
		Uncounted,
	},
	"api.openai.com": {
		OpenAI,
		[]string{"/v1/responses", "/v1/responses/compact", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"},
		[]string{"/v1/responses", "/v1/files", "/v1/models", "/v1/moderations", "/v1/conversations"},
		Uncounted,
	},
	// What a ChatGPT subscription uses.
	"chatgpt.com": {
		OpenAI,
		[]string{"/backend-api/codex/responses", "/backend-api/codex/responses/compact"},
		nil,
		Free,
	},
}

// Hosts returns the names of the providers' hosts.
func Hosts() []string {
	var all []string
	for host := range hosts {
		all = append(all, host)
	}
	slices.Sort(all)
	return all
}

// Of returns whose API a request uses, and whether it costs money.
func Of(host, method, escapedPath string) (Provider, Kind) {
	h, ok := hosts[host]
	if !ok {
		return "", Free
	}
	p, err := url.PathUnescape(escapedPath)
	if err != nil {
		p = escapedPath
	}
	p = strings.ToLower(path.Clean("/" + p))
	switch {
	case method == http.MethodPost && slices.Contains(h.counted, p):
		return h.provider, Counted
	case slices.Contains([]string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodDelete}, method):
		return h.provider, Free
	case slices.ContainsFunc(h.free, func(at string) bool { return p == at || strings.HasPrefix(p, at+"/") }):
		return h.provider, Free
	}
	return h.provider, h.rest
}

// Request is what bounds the cost of a request.
type Request struct {
	Model      string
	Output     int64 // tokens at most; 0 if it does not say
	Background bool  // whether the provider goes on without the client
	Elsewhere  bool  // whether input comes from another place than the body
	Fast       bool
	// Whether the answer is a stream that does not report the usage, because the request does not
	// ask for that.
	Silent bool
}

type requestFields struct {
	Model         string `json:"model"`
	MaxTokens     int64  `json:"max_tokens"`
	MaxCompletion int64  `json:"max_completion_tokens"`
	MaxOutput     int64  `json:"max_output_tokens"`
	Choices       int64  `json:"n"`
	BestOf        int64  `json:"best_of"`
	Background    bool   `json:"background"`
	Stream        bool   `json:"stream"`
	StreamOptions struct {
		Usage bool `json:"include_usage"`
	} `json:"stream_options"`
	Tier         string          `json:"service_tier"`
	Speed        string          `json:"speed"`
	Previous     string          `json:"previous_response_id"`
	Conversation json.RawMessage `json:"conversation"`
	Prompt       json.RawMessage `json:"prompt"`
}

// elsewhere are the marks of input that a provider adds: files, and what its tools find.
var elsewhere = [][]byte{[]byte(`file_id`), []byte(`"web_search`), []byte(`"web_fetch`), []byte(`"mcp`)}

// ParseRequest reads a request whose answer is counted. The body may be only the first part of the
// request's; whatever it does not contain is assumed to be the worst. It also returns the
// text to insert after the body's first brace, so that the answer reports the usage.
func ParseRequest(escapedPath string, body []byte, whole bool) (r Request, insert string) {
	var f requestFields
	if !whole || json.Unmarshal(body, &f) != nil {
		return Request{Elsewhere: true, Background: true, Fast: true}, ""
	}
	r = Request{
		Model: f.Model, Background: f.Background, Fast: fast(f.Tier) || fast(f.Speed) || f.Tier == "auto" && strings.HasPrefix(f.Model, "claude"),
		Output:    min(max(f.MaxTokens, f.MaxCompletion, f.MaxOutput, 0), maxTokens) * min(max(f.Choices, f.BestOf, 1), 1000),
		Elsewhere: f.Previous != "" || given(f.Conversation) || given(f.Prompt) && f.Prompt[0] == '{',
	}
	for _, mark := range elsewhere {
		r.Elsewhere = r.Elsewhere || bytes.Contains(body, mark)
	}
	if f.Stream && !f.StreamOptions.Usage && strings.HasSuffix(strings.ToLower(escapedPath), "/completions") {
		r.Silent = true
		insert = `"stream_options":{"include_usage":true}`
	}
	return r, insert
}

func given(value json.RawMessage) bool { return len(value) > 0 && string(value) != "null" }

// fast reports whether a service tier or a speed costs more than the standard one.
func fast(tier string) bool { return tier == "priority" || tier == "fast" }
