// Package meter reads from the answers of model providers what a request used.
//
// Sources: Anthropic, "Messages" and "Streaming messages"; OpenAI, "Create chat completion",
// "Create a response" and "Streaming responses".
package meter

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"strings"
)

// Provider is a way to report usage.
type Provider string

// The providers.
const (
	Anthropic Provider = "anthropic"
	OpenAI    Provider = "openai"
)

// Tokens counts what a request used, without overlap.
type Tokens struct {
	Input       int64 `json:"input,omitempty"`          // read without the cache
	CacheRead   int64 `json:"cache_read,omitempty"`     // read from the cache
	CacheWrite  int64 `json:"cache_write,omitempty"`    // read, and kept in the cache for some minutes
	CacheWrite1 int64 `json:"cache_write_1h,omitempty"` // read, and kept for an hour
	Output      int64 `json:"output,omitempty"`
}

// Total returns the number of all tokens.
func (t Tokens) Total() int64 { return t.Input + t.CacheRead + t.CacheWrite + t.CacheWrite1 + t.Output }

// Usage is what an answer says about itself.
type Usage struct {
	Model    string
	Tokens   Tokens
	Searches int64 // of the web, by the provider
	Fast     bool  // whether the provider charges for priority or speed
	Regional bool  // whether it charges for a region
	// Whether the provider reported the end. Otherwise Output is a bound: a token has at least one
	// byte of the answer.
	Complete bool
}

// Bounds of what is kept of an answer.
const (
	maxLine = 4 << 20  // bytes of an event
	maxJSON = 16 << 20 // bytes of an answer that is one JSON text
)

// Reader collects the usage from an answer that is written to it.
type Reader struct {
	provider Provider
	stream   bool // server-sent events instead of one JSON text
	buf      []byte
	skip     bool // the rest of the line, or of the text, is too long to keep
	bytes    int64
	usage    Usage
}

// NewReader returns a reader for an answer of a content type.
func NewReader(p Provider, contentType string) *Reader {
	return &Reader{provider: p, stream: strings.HasPrefix(contentType, "text/event-stream")}
}

// Write reads a part of the answer. It never fails.
func (r *Reader) Write(p []byte) (int, error) {
	r.bytes += int64(len(p))
	if !r.stream {
		r.keep(p, maxJSON)
		return len(p), nil
	}
	for rest := p; len(rest) > 0; {
		line, after, ended := bytes.Cut(rest, []byte("\n"))
		r.keep(line, maxLine)
		if ended {
			r.line()
		}
		rest = after
	}
	return len(p), nil
}

func (r *Reader) keep(p []byte, most int) {
	if r.skip = r.skip || len(r.buf)+len(p) > most; r.skip {
		r.buf = nil
		return
	}
	r.buf = append(r.buf, p...)
}

func (r *Reader) line() {
	if data, ok := bytes.CutPrefix(bytes.TrimSpace(r.buf), []byte("data:")); ok && !r.skip {
		r.event(data)
	}
	r.buf, r.skip = r.buf[:0], false
}

// Usage returns what the answer has reported so far; end says that it has ended regularly.
func (r *Reader) Usage(end bool) Usage {
	if !r.stream && end && !r.skip {
		r.event(r.buf)
		r.usage.Complete = r.usage.Tokens != Tokens{}
	}
	u := r.usage
	if !u.Complete {
		u.Tokens.Output = max(u.Tokens.Output, r.bytes)
	}
	return u
}

// event is every field that says something about usage, in answers and events of both providers.
type event struct {
	Type string `json:"type"`
	inner
	Message  *inner `json:"message"`  // Anthropic, message_start
	Response *inner `json:"response"` // OpenAI, response.created and response.completed
}

type inner struct {
	Model string       `json:"model"`
	Tier  string       `json:"service_tier"`
	Usage *usageFields `json:"usage"`
}

type usageFields struct {
	InputTokens   *int64 `json:"input_tokens"`
	OutputTokens  *int64 `json:"output_tokens"`
	CacheRead     *int64 `json:"cache_read_input_tokens"`
	CacheCreation *int64 `json:"cache_creation_input_tokens"`
	CacheKinds    *struct {
		Hour int64 `json:"ephemeral_1h_input_tokens"`
	} `json:"cache_creation"`
	Tools *struct {
		Searches int64 `json:"web_search_requests"`
	} `json:"server_tool_use"`
	Speed string `json:"speed"`
	Geo   string `json:"inference_geo"`

	PromptTokens     *int64        `json:"prompt_tokens"`
	CompletionTokens *int64        `json:"completion_tokens"`
	PromptDetails    *inputDetails `json:"prompt_tokens_details"`
	InputDetails     *inputDetails `json:"input_tokens_details"`
}

type inputDetails struct {
	Cached  int64 `json:"cached_tokens"`
	Written int64 `json:"cache_write_tokens"`
}

func (r *Reader) event(text []byte) {
	var e event
	if json.Unmarshal(text, &e) != nil {
		return
	}
	for _, in := range []*inner{&e.inner, e.Message, e.Response} {
		if in == nil {
			continue
		}
		if in.Model != "" {
			r.usage.Model = in.Model
		}
		r.usage.Fast = r.usage.Fast || fast(in.Tier)
		if in.Usage == nil {
			continue
		}
		if r.provider == Anthropic {
			r.anthropic(*in.Usage)
		} else {
			r.openAI(*in.Usage)
		}
	}
	switch e.Type {
	case "message_stop", "response.completed", "response.incomplete", "response.failed":
		r.usage.Complete = true
	case "":
		// A chunk of a chat completion has no type; the last one has the usage.
		r.usage.Complete = r.usage.Complete || r.stream && e.Usage != nil
	}
}

// anthropic applies counts, which are cumulative.
func (r *Reader) anthropic(u usageFields) {
	t := &r.usage.Tokens
	set(&t.Input, u.InputTokens)
	set(&t.Output, u.OutputTokens)
	set(&t.CacheRead, u.CacheRead)
	if u.Tools != nil {
		set(&r.usage.Searches, &u.Tools.Searches)
	}
	r.usage.Fast = r.usage.Fast || fast(u.Speed)
	r.usage.Regional = r.usage.Regional || u.Geo != "" && u.Geo != "global" && u.Geo != "not_available"
	if u.CacheCreation == nil {
		return
	}
	set(&t.CacheWrite, u.CacheCreation)
	if u.CacheKinds != nil {
		t.CacheWrite1 = min(max(u.CacheKinds.Hour, 0), t.CacheWrite)
		t.CacheWrite -= t.CacheWrite1
	}
}

// openAI applies counts, of which those of the input include what was cached.
func (r *Reader) openAI(u usageFields) {
	t := &r.usage.Tokens
	set(&t.Input, u.InputTokens)
	set(&t.Input, u.PromptTokens)
	set(&t.Output, u.OutputTokens)
	set(&t.Output, u.CompletionTokens)
	for _, d := range []*inputDetails{u.PromptDetails, u.InputDetails} {
		if d != nil {
			t.CacheRead = min(max(d.Cached, 0), t.Input)
			t.Input -= t.CacheRead
			t.CacheWrite = min(max(d.Written, 0), t.Input)
			t.Input -= t.CacheWrite
		}
	}
}

// maxTokens bounds a count that a server reports.
const maxTokens = 1 << 40

func set(to, from *int64) {
	if from != nil {
		*to = min(max(*from, 0), maxTokens)
	}
}

// WithoutUsage returns a stream of server-sent events without those that report only the usage of
// a chat completion, for a client that did not ask for them.
func WithoutUsage(r io.Reader) io.Reader {
	return &chatFilter{lines: bufio.NewReaderSize(r, 64<<10)}
}

// chatFilter drops events. It passes on lines that are too long for its buffer.
type chatFilter struct {
	lines *bufio.Reader
	rest  []byte // of the buffer, to pass on
	err   error
	after bool // after an event that was dropped: its empty line is dropped too
	part  bool // of a line that was too long
}

func (f *chatFilter) Read(p []byte) (int, error) {
	for len(f.rest) == 0 {
		if f.err != nil {
			return 0, f.err
		}
		var line []byte
		line, f.err = f.lines.ReadSlice('\n')
		if f.err == bufio.ErrBufferFull { //nolint:errorlint // ReadSlice returns it as it is
			f.err = nil
		}
		whole := !f.part && bytes.HasSuffix(line, []byte("\n"))
		f.part = !bytes.HasSuffix(line, []byte("\n"))
		drop := whole && (onlyUsage(line) || f.after && len(bytes.TrimSpace(line)) == 0)
		if f.after = drop && !f.after; !drop {
			f.rest = line
		}
	}
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	return n, nil
}

// onlyUsage reports whether a line is an event with a chat completion's usage and no choices.
func onlyUsage(line []byte) bool {
	data, ok := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data:"))
	if !ok || !bytes.Contains(data, []byte(`"usage"`)) {
		return false
	}
	var e struct {
		Choices *[]json.RawMessage `json:"choices"`
		Usage   *json.RawMessage   `json:"usage"`
	}
	return json.Unmarshal(data, &e) == nil && e.Usage != nil && e.Choices != nil && len(*e.Choices) == 0
}
