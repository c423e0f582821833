package meter

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

func TestUsage(t *testing.T) {
	const events, text = "text/event-stream; charset=utf-8", "application/json"
	for name, c := range map[string]struct {
		provider Provider
		kind     string
		answer   string
		cut      bool
		want     Usage
	}{
		"message": {
			Anthropic, text,
			`{"type":"message","model":"claude-x","content":[{"type":"text","text":"hi"}],"usage":{"input_tokens":10,"cache_creation_input_tokens":7,"cache_creation":{"ephemeral_5m_input_tokens":4,"ephemeral_1h_input_tokens":3},"cache_read_input_tokens":100,"output_tokens":5}}`,
			false,
			Usage{Model: "claude-x", Tokens: Tokens{10, 100, 4, 3, 5}, Complete: true},
		},
		"message with a search, in a region, fast": {
			Anthropic, text,
			`{"model":"claude-x","usage":{"input_tokens":1,"output_tokens":1,"server_tool_use":{"web_search_requests":2},"speed":"fast","inference_geo":"us"}}`,
			false,
			Usage{Model: "claude-x", Tokens: Tokens{Input: 1, Output: 1}, Searches: 2, Fast: true, Regional: true, Complete: true},
		},
		"response with priority": {
			OpenAI, text, `{"model":"gpt-x","service_tier":"priority","usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":2,"cache_write_tokens":3},"output_tokens":1}}`,
			false,
			Usage{Model: "gpt-x", Tokens: Tokens{Input: 4, CacheRead: 2, CacheWrite: 3, Output: 1}, Fast: true, Complete: true},
		},
		"message stream": {
			Anthropic, events,
			"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-x\",\"usage\":{\"input_tokens\":10,\"cache_creation_input_tokens\":2,\"cache_read_input_tokens\":3,\"output_tokens\":1}}}\n\n" +
				"event: content_block_delta\r\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"usage\"}}\r\n\r\n" +
				"data: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":15}}\n\ndata: {\"type\":\"message_stop\"}\n\n",
			false,
			Usage{Model: "claude-x", Tokens: Tokens{Input: 10, CacheRead: 3, CacheWrite: 2, Output: 15}, Complete: true},
		},
		"message stream that is cut": {
			Anthropic, events,
			"data: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-x\",\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\ndata: {\"type\":\"content",
			true,
			Usage{Model: "claude-x", Tokens: Tokens{Input: 10}, Complete: false},
		},
		"chat": {
			OpenAI, text,
			`{"model":"gpt-x","usage":{"prompt_tokens":20,"completion_tokens":5,"total_tokens":25,"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":{"reasoning_tokens":3}}}`,
			false,
			Usage{Model: "gpt-x", Tokens: Tokens{Input: 12, CacheRead: 8, Output: 5}, Complete: true},
		},
		"chat stream": {
			OpenAI, events,
			"data: {\"model\":\"gpt-x\",\"choices\":[{}],\"usage\":null}\n\ndata: {\"model\":\"gpt-x\",\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":5}}\n\ndata: [DONE]\n\n",
			false,
			Usage{Model: "gpt-x", Tokens: Tokens{Input: 20, Output: 5}, Complete: true},
		},
		"chat stream without usage": {
			OpenAI, events, "data: {\"model\":\"gpt-x\",\"choices\":[{}]}\n\ndata: [DONE]\n\n",
			false,
			Usage{Model: "gpt-x", Tokens: Tokens{}, Complete: false},
		},
		"response": {
			OpenAI, text,
			`{"model":"gpt-x","usage":{"input_tokens":30,"input_tokens_details":{"cached_tokens":10},"output_tokens":4}}`,
			false,
			Usage{Model: "gpt-x", Tokens: Tokens{Input: 20, CacheRead: 10, Output: 4}, Complete: true},
		},
		"response stream": {
			OpenAI, events,
			"data: {\"type\":\"response.created\",\"response\":{\"model\":\"gpt-x\",\"usage\":null}}\n\ndata: {\"type\":\"response.completed\",\"response\":{\"model\":\"gpt-x\",\"usage\":{\"input_tokens\":30,\"output_tokens\":4}}}\n\n",
			false,
			Usage{Model: "gpt-x", Tokens: Tokens{Input: 30, Output: 4}, Complete: true},
		},
		"an error":        {Anthropic, text, `{"type":"error","error":{"type":"overloaded_error"}}`, false, Usage{}},
		"no JSON":         {Anthropic, text, "<html>", false, Usage{}},
		"absurd counts":   {OpenAI, text, `{"usage":{"input_tokens":-5,"output_tokens":9000000000000000000,"input_tokens_details":{"cached_tokens":7}}}`, false, Usage{Model: "", Tokens: Tokens{Output: maxTokens}, Complete: true}},
		"a too long text": {Anthropic, text, strings.Repeat(" ", maxJSON+1), false, Usage{}},
		"a too long event": {
			Anthropic, events, "data: " + strings.Repeat("x", maxLine) + "\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":5}}\ndata: {\"type\":\"message_stop\"}\n",
			false,
			Usage{Model: "", Tokens: Tokens{Output: 5}, Complete: true},
		},
	} {
		if !c.want.Complete { // one token per byte is the bound
			c.want.Tokens.Output = int64(len(c.answer))
		}
		for _, size := range []int{1, 7, 1 << 20} {
			if size == 1 && len(c.answer) > 1<<20 {
				continue
			}
			r := NewReader(c.provider, c.kind)
			for rest := c.answer; rest != ""; rest = rest[min(size, len(rest)):] {
				if n, err := r.Write([]byte(rest[:min(size, len(rest))])); err != nil || n != min(size, len(rest)) {
					t.Fatal(n, err)
				}
			}
			if diff := cmp.Diff(c.want, r.Usage(!c.cut)); diff != "" {
				t.Errorf("usage of %s in parts of %d bytes mismatch (-want +got):\n%s", name, size, diff)
			}
		}
	}
}

func TestOf(t *testing.T) {
	for request, want := range map[string]struct {
		provider Provider
		kind     Kind
	}{
		"api.anthropic.com POST /v1/messages":              {Anthropic, Counted},
		"api.anthropic.com POST //v1/./%4Dessages/":        {Anthropic, Counted},
		"api.anthropic.com POST /v1/messages/count_tokens": {Anthropic, Free},
		"api.anthropic.com POST /v1/messages/batches":      {Anthropic, Uncounted},
		"api.anthropic.com POST /api/event_logging/batch":  {Anthropic, Free},
		"api.anthropic.com POST /api/../v1/complete":       {Anthropic, Uncounted},
		"api.anthropic.com GET /v1/messages":               {Anthropic, Free},
		"api.anthropic.com PUT /v1/messages":               {Anthropic, Uncounted},
		"api.openai.com POST /v1/responses":                {OpenAI, Counted},
		"api.openai.com POST /v1/responses/resp_1/cancel":  {OpenAI, Free},
		"api.openai.com POST /v1/chat/completions":         {OpenAI, Counted},
		"api.openai.com POST /v1/images/generations":       {OpenAI, Uncounted},
		"chatgpt.com POST /backend-api/codex/responses":    {OpenAI, Counted},
		"chatgpt.com POST /backend-api/wham/tasks":         {OpenAI, Free},
		"example.com POST /v1/messages":                    {"", Free},
	} {
		f := strings.Fields(request)
		if p, kind := Of(f[0], f[1], f[2]); p != want.provider || kind != want.kind {
			t.Errorf("Of(%s) = %q, %d, want %v", request, p, kind, want)
		}
	}
}

func TestParseRequest(t *testing.T) {
	worst := Request{Elsewhere: true, Background: true, Fast: true}
	for _, c := range []struct {
		path, body string
		part       bool
		want       Request
		insert     bool
	}{
		{"/v1/messages", `{"model":"claude-x","max_tokens":100,"stream":true}`, false, Request{Model: "claude-x", Output: 100}, false},
		{"/v1/messages", `{"model":"claude-x","speed":"fast"}`, false, Request{Model: "claude-x", Fast: true}, false},
		{"/v1/messages", `{"model":"claude-x","service_tier":"auto"}`, false, Request{Model: "claude-x", Fast: true}, false},
		{"/v1/messages", `{"model":"claude-x","tools":[{"type":"web_search_20250305"}]}`, false, Request{Model: "claude-x", Elsewhere: true}, false},
		{"/v1/responses", `{"model":"gpt-x","max_output_tokens":7,"background":true,"previous_response_id":"r"}`, false, Request{Model: "gpt-x", Output: 7, Background: true, Elsewhere: true}, false},
		{"/v1/responses", `{"model":"gpt-x","conversation":null,"prompt":{"id":"p"}}`, false, Request{Model: "gpt-x", Elsewhere: true}, false},
		{"/v1/completions", `{"model":"gpt-x","prompt":"hi"}`, false, Request{Model: "gpt-x"}, false},
		{"/v1/chat/completions", `{"model":"gpt-x","max_completion_tokens":5,"n":3}`, false, Request{Model: "gpt-x", Output: 15}, false},
		{"/v1/chat/completions", `{"model":"gpt-x","stream":true}`, false, Request{Model: "gpt-x", Silent: true}, true},
		{"/v1/chat/completions", `{"model":"gpt-x","stream":true,"stream_options":{"include_usage":true}}`, false, Request{Model: "gpt-x"}, false},
		{"/v1/messages", `{"model":"claude-x"}`, true, worst, false},
		{"/v1/messages", `{"model":7}`, false, worst, false},
		{"/v1/messages", `model`, false, worst, false},
		{"/v1/messages", ``, false, worst, false},
		{"/v1/messages", `{"max_tokens":-5,"n":9000000000000000000}`, false, Request{}, false},
	} {
		got, insert := ParseRequest(c.path, []byte(c.body), !c.part)
		if diff := cmp.Diff(c.want, got); diff != "" || c.insert != (insert != "") {
			t.Errorf("ParseRequest(%s) inserts %q, mismatch (-want +got):\n%s", c.body, insert, diff)
		}
	}
}

func TestCost(t *testing.T) {
	p := Prices{
		Search: 0.01, Regional: 1.1,
		Models: []Price{
			{Model: "cheap-*", Input: 1, Output: 2},
			{Model: "big*", Input: 3, Output: 15, CacheRead: 0.3, CacheWrite: 3.75, CacheWrite1h: 6, Long: Long{200_000, 2, 1.5}, Fast: 6},
		},
	}
	for name, c := range map[string]struct {
		use  Usage
		want int64
	}{
		"nothing":           {Usage{Model: "cheap-1"}, 0},
		"plain":             {Usage{Model: "cheap-1", Tokens: Tokens{Input: 10, Output: 5}}, 20_000},
		"cache as input":    {Usage{Model: "cheap-1", Tokens: Tokens{1, 1, 1, 1, 0}}, 4_000},
		"cache":             {Usage{Model: "big", Tokens: Tokens{1, 10, 100, 1000, 0}}, 3_000 + 3_000 + 375_000 + 6_000_000},
		"fast":              {Usage{Model: "big", Tokens: Tokens{Output: 1}, Fast: true}, 90_000},
		"fast, no factor":   {Usage{Model: "cheap-1", Tokens: Tokens{Output: 1}, Fast: true}, 12_000},
		"regional":          {Usage{Model: "cheap-1", Tokens: Tokens{Output: 10}, Regional: true}, 22_000},
		"searches":          {Usage{Model: "cheap-1", Searches: 2}, 20_000_000},
		"long":              {Usage{Model: "big", Tokens: Tokens{Input: 100_000, CacheRead: 100_001, Output: 1}}, 660_023_100},
		"the most long":     {Usage{Model: "big", Tokens: Tokens{Input: 200_000}}, 600_000_000},
		"unknown":           {Usage{Model: "other", Tokens: Tokens{1, 1, 1, 1, 1}}, 3_000 + 1_000 + 3_750 + 6_000 + 15_000},
		"unknown, and fast": {Usage{Model: "other", Tokens: Tokens{Output: 1}, Fast: true}, 90_000},
		"absurd":            {Usage{Model: "other", Tokens: Tokens{Output: maxTokens}, Fast: true}, 98_956_046_499_840_000},
	} {
		if got := p.Cost(c.use); got != c.want {
			t.Errorf("cost of %s = %d, want %d", name, got, c.want)
		}
	}
	for _, bad := range []Price{{}, {Model: "["}, {Model: "m", Input: -1}, {Model: "m", Long: Long{1, 0, 0}}} {
		if err := (Prices{Models: []Price{bad}}).Validate(); err == nil {
			t.Errorf("Validate(%+v) = nil, want an error", bad)
		}
	}
}

func TestWithoutUsage(t *testing.T) {
	chunk := "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\"\"}}],\"usage\":null}\n\n"
	long := "data: {\"choices\":[{}],\"usage\":\"" + strings.Repeat("x", 200<<10) + "\"}\n\n"
	usage := "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\r\n\r\n"
	got, err := io.ReadAll(iotest.OneByteReader(WithoutUsage(strings.NewReader(chunk + long + usage + "data: [DONE]\n\ndata: {"))))
	if diff := cmp.Diff(chunk+long+"data: [DONE]\n\ndata: {", string(got)); err != nil || diff != "" {
		t.Errorf("stream = %v (-want +got):\n%s", err, diff)
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte("data: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":5}}\n"), true)
	f.Add([]byte(`{"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":2}}}`), false)
	f.Fuzz(func(t *testing.T, answer []byte, stream bool) {
		kind := "application/json"
		if stream {
			kind = "text/event-stream"
		}
		for _, p := range []Provider{Anthropic, OpenAI} {
			r := NewReader(p, kind)
			_, _ = r.Write(answer)
			_, _ = io.ReadAll(WithoutUsage(bytes.NewReader(answer)))
			ParseRequest("/v1/chat/completions", answer, true)
			u := r.Usage(true).Tokens
			if u.Input < 0 || u.Output < 0 || u.CacheRead < 0 || u.CacheWrite < 0 || u.CacheWrite1 < 0 || u.Total() > 5*maxTokens {
				t.Errorf("tokens of %q = %+v", answer, u)
			}
		}
	})
}
