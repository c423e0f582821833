package meter

import (
	"strings"
	"testing"

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
			Usage{"claude-x", Tokens{10, 100, 4, 3, 5}, true},
		},
		"message stream": {
			Anthropic, events,
			"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-x\",\"usage\":{\"input_tokens\":10,\"cache_creation_input_tokens\":2,\"cache_read_input_tokens\":3,\"output_tokens\":1}}}\n\n" +
				"event: content_block_delta\r\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"usage\"}}\r\n\r\n" +
				"data: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":15}}\n\ndata: {\"type\":\"message_stop\"}\n\n",
			false,
			Usage{"claude-x", Tokens{Input: 10, CacheRead: 3, CacheWrite: 2, Output: 15}, true},
		},
		"message stream that is cut": {
			Anthropic, events,
			"data: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-x\",\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\ndata: {\"type\":\"content",
			true,
			Usage{"claude-x", Tokens{Input: 10}, false},
		},
		"chat": {
			OpenAI, text,
			`{"model":"gpt-x","usage":{"prompt_tokens":20,"completion_tokens":5,"total_tokens":25,"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":{"reasoning_tokens":3}}}`,
			false,
			Usage{"gpt-x", Tokens{Input: 12, CacheRead: 8, Output: 5}, true},
		},
		"chat stream": {
			OpenAI, events,
			"data: {\"model\":\"gpt-x\",\"choices\":[{}],\"usage\":null}\n\ndata: {\"model\":\"gpt-x\",\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":5}}\n\ndata: [DONE]\n\n",
			false,
			Usage{"gpt-x", Tokens{Input: 20, Output: 5}, true},
		},
		"chat stream without usage": {
			OpenAI, events, "data: {\"model\":\"gpt-x\",\"choices\":[{}]}\n\ndata: [DONE]\n\n",
			false,
			Usage{"gpt-x", Tokens{}, false},
		},
		"response": {
			OpenAI, text,
			`{"model":"gpt-x","usage":{"input_tokens":30,"input_tokens_details":{"cached_tokens":10},"output_tokens":4}}`,
			false,
			Usage{"gpt-x", Tokens{Input: 20, CacheRead: 10, Output: 4}, true},
		},
		"response stream": {
			OpenAI, events,
			"data: {\"type\":\"response.created\",\"response\":{\"model\":\"gpt-x\",\"usage\":null}}\n\ndata: {\"type\":\"response.completed\",\"response\":{\"model\":\"gpt-x\",\"usage\":{\"input_tokens\":30,\"output_tokens\":4}}}\n\n",
			false,
			Usage{"gpt-x", Tokens{Input: 30, Output: 4}, true},
		},
		"an error":        {Anthropic, text, `{"type":"error","error":{"type":"overloaded_error"}}`, false, Usage{}},
		"no JSON":         {Anthropic, text, "<html>", false, Usage{}},
		"absurd counts":   {OpenAI, text, `{"usage":{"input_tokens":-5,"output_tokens":9000000000000000000,"input_tokens_details":{"cached_tokens":7}}}`, false, Usage{"", Tokens{Output: maxTokens}, true}},
		"a too long text": {Anthropic, text, strings.Repeat(" ", maxJSON+1), false, Usage{}},
		"a too long event": {
			Anthropic, events, "data: " + strings.Repeat("x", maxLine) + "\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":5}}\ndata: {\"type\":\"message_stop\"}\n",
			false,
			Usage{"", Tokens{Output: 5}, true},
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
	for request, want := range map[string]Provider{
		"api.anthropic.com POST /v1/messages":              Anthropic,
		"api.anthropic.com POST /v1/messages/count_tokens": "",
		"api.anthropic.com GET /v1/messages":               "",
		"api.openai.com POST /v1/responses":                OpenAI,
		"api.openai.com POST /v1/chat/completions":         OpenAI,
		"example.com POST /v1/messages":                    "",
	} {
		f := strings.Fields(request)
		if got, ok := Of(f[0], f[1], f[2]); got != want || ok != (want != "") {
			t.Errorf("Of(%s) = %q, want %q", request, got, want)
		}
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
			u := r.Usage(true).Tokens
			if u.Input < 0 || u.Output < 0 || u.CacheRead < 0 || u.CacheWrite < 0 || u.CacheWrite1 < 0 || u.Total() > 5*maxTokens {
				t.Errorf("tokens of %q = %+v", answer, u)
			}
		}
	})
}
