package gateway

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway/intercept"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/meter"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// provider is a scripted model provider, whose tokens cost a dollar per million.
type provider struct {
	*world
	*http.Client // of the guest
	host         string
	store        *store.Store
	metering     Metering
}

func newProvider(t *testing.T, host string, budget Budget, h http.HandlerFunc) *provider {
	t.Helper()
	p := &provider{world: newWorld(t, config{policy: allow(host)}), host: host}
	authority, err := intercept.NewAuthority([]string{host})
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := authority.Certificate(host)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(h)
	s.EnableHTTP2 = true
	s.TLS = &tls.Config{Certificates: []tls.Certificate{*certificate}, MinVersion: tls.VersionTLS12}
	s.StartTLS()
	t.Cleanup(s.Close)
	p.internet(host, 443, s.Listener.Addr().String())
	p.g.roots = x509.NewCertPool()
	p.g.roots.AppendCertsFromPEM(authority.PEM())
	p.metering = Metering{
		Store: filepath.Join(t.TempDir(), "state", "store.db"), Session: "0123456789ab", RepoKey: "github.com/o/r", Task: "ba9876543210", Budget: budget,
		Prices: meter.Prices{Models: []meter.Price{{Model: "m", Input: 1, Output: 1}, {Model: "dear", Input: 100, Output: 100}}},
	}
	if p.store, err = store.Open(t.Context(), p.metering.Store); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.store.Close() })
	if err := p.g.SetMetering(p.metering); err != nil {
		t.Fatal(err)
	}
	if budget == (Budget{}) { // otherwise the budget is enough to read the requests
		if _, err := p.g.SetSecrets([]Secret{{Name: "KEY", Hosts: []string{host}}}); err != nil {
			t.Fatal(err)
		}
	}
	p.Client = p.trustful(p.g.Interception(), true)
	return p
}

func (p *provider) post(path, body string) (*http.Response, error) {
	p.t.Helper()
	r, err := http.NewRequestWithContext(p.ctx(), http.MethodPost, "https://"+p.host+path, strings.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	return p.Do(r)
}

// ask returns the status and the text of the answer, or the beginning of it if it was cut.
func (p *provider) ask(path, body string) (int, string) {
	p.t.Helper()
	a, err := p.post(path, body)
	if err != nil {
		p.t.Error(err)
		return 0, ""
	}
	defer a.Body.Close()
	text, _ := io.ReadAll(a.Body)
	return a.StatusCode, string(text)
}

func (p *provider) used(by string) store.UsageSum {
	p.t.Helper()
	all, err := p.store.UsageSums(p.t.Context(), by, store.UsageQuery{})
	if err != nil || len(all) > 1 {
		p.t.Fatal(all, err)
	}
	if len(all) == 0 {
		return store.UsageSum{}
	}
	return all[0]
}

func TestMetering(t *testing.T) {
	message := func(out int) string {
		return fmt.Sprintf(`{"type":"message","model":"m","usage":{"input_tokens":10,"output_tokens":%d}}`, out)
	}
	stream := "data: {\"type\":\"message_start\",\"message\":{\"model\":\"m\",\"usage\":{\"input_tokens\":10,\"output_tokens\":1}}}\n\n"
	for name, c := range map[string]struct {
		path, request string
		answer        func(http.ResponseWriter, *http.Request)
		least, most   int64 // tokens, of a dollar per million
	}{
		"a message": {"/v1/messages", `{"model":"m","max_tokens":1000}`, func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, message(5)) }, 15, 15},
		"compressed, unasked": {"/v1/messages", `{"model":"m","max_tokens":1000}`, func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Accept-Encoding") != "gzip" {
				t.Errorf("Accept-Encoding = %q", r.Header.Get("Accept-Encoding"))
			}
			io.WriteString(rw, message(6))
		}, 16, 16},
		"a stream": {"/v1/messages", `{"model":"m","max_tokens":1000,"stream":true}`, func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, stream+"data: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":15}}\n\ndata: {\"type\":\"message_stop\"}\n\n")
		}, 25, 25},
		"a stream that the provider cuts": {"/v1/messages", `{"model":"m","max_tokens":1000,"stream":true}`, func(rw http.ResponseWriter, _ *http.Request) {
			rw.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(rw, stream)
			_ = http.NewResponseController(rw).Flush()
			panic(http.ErrAbortHandler)
		}, 10 + int64(len(stream)), 1010},
		"no answer":      {"/v1/messages", `{"model":"m","max_tokens":1000}`, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 31, 1031},
		"an error":       {"/v1/messages", `{"model":"m","max_tokens":1000}`, func(rw http.ResponseWriter, _ *http.Request) { http.Error(rw, message(5), 529) }, 0, 0},
		"tokens counted": {"/v1/messages/count_tokens", `{"model":"m"}`, func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, `{"input_tokens":7}`) }, 0, 0},
		"another model": {"/v1/messages", `{"model":"m","max_tokens":1}`, func(rw http.ResponseWriter, _ *http.Request) {
			io.WriteString(rw, strings.ReplaceAll(message(5), `"m"`, `"dear"`))
		}, 1500, 1500},
		"no price": {"/v1/messages", `{"model":"m","max_tokens":1}`, func(rw http.ResponseWriter, _ *http.Request) {
			io.WriteString(rw, strings.ReplaceAll(message(5), `"m"`, `"new"`))
		}, 1500, 1500},
		"a long request": {"/v1/messages", `{"model":"m","max_tokens":1,"x":"` + strings.Repeat("x", maxParsed) + `"}`, func(rw http.ResponseWriter, r *http.Request) {
			n, _ := io.Copy(io.Discard, r.Body)
			io.WriteString(rw, message(int(n-maxParsed)))
		}, 10 + 35, 10 + 35},
		"no answer known": {"/v1/messages", `{"model":"m","max_tokens":100}`, func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "<html>") }, 36, 130},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProvider(t, "api.anthropic.com", Budget{}, c.answer)
			p.ask(c.path, c.request)
			got := p.used("session")
			if cost := got.Cost / 1000; cost < c.least || cost > c.most {
				t.Errorf("used %+v, want %d to %d millionths of a dollar", got, c.least, c.most)
			}
			if c.most > 0 && (got.Of != p.metering.Session || p.used("task").Of != p.metering.Task || p.used("repo").Of != p.metering.RepoKey) {
				t.Errorf("used by session %q, task %q, repo %q", got.Of, p.used("task").Of, p.used("repo").Of)
			}
			if err := p.g.usageError(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A compressed request is bounded by what it contains.
func TestMeteringCompressed(t *testing.T) {
	p := newProvider(t, "api.openai.com", Budget{}, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	for _, c := range []struct {
		encoding, body string
		most           int64 // millionths of a dollar, of all requests until then
	}{
		{"zstd", `{"model":"m","max_output_tokens":5,"input":"` + strings.Repeat("x", 50_000) + `"}`, 60_000},
		{"zstd", strings.Repeat("x", maxDecoded+1), 250_000_000},
		{"br", "{}", 500_000_000},
	} {
		body := []byte(c.body)
		if c.encoding == "zstd" {
			w, err := zstd.NewWriter(nil)
			if err != nil {
				t.Fatal(err)
			}
			body = w.EncodeAll(body, nil)
		}
		r, err := http.NewRequestWithContext(p.ctx(), http.MethodPost, "https://api.openai.com/v1/responses", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Encoding", c.encoding)
		_, _, _ = do(p.Client, r) // it fails
		if used := p.used("task").Cost / 1000; used > c.most || used < c.most/20 {
			t.Errorf("used after %s of %d bytes = %d millionths, want at most %d", c.encoding, len(c.body), used, c.most)
		}
	}
}

// A client that goes away does not make its request free.
func TestMeteringCutByGuest(t *testing.T) {
	p := newProvider(t, "api.anthropic.com", Budget{}, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(rw, "data: {\"type\":\"message_start\",\"message\":{\"model\":\"m\",\"usage\":{\"input_tokens\":10}}}\n\n")
		_ = http.NewResponseController(rw).Flush()
		<-r.Context().Done()
	})
	a, err := p.post("/v1/messages", `{"model":"m","max_tokens":100,"stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	io.ReadFull(a.Body, make([]byte, 10))
	if got := p.used("session"); got.Tokens < 100 {
		t.Errorf("used during the answer: %+v, want the bound", got)
	}
	a.Body.Close()
	p.CloseIdleConnections()
	testenv.WaitFor(t, "the use to be settled", func() bool {
		n := p.used("session").Tokens
		return n >= 90 && n <= 110
	})
}

// Requests of a gateway that was killed count with their bounds, for good.
func TestMeteringKilled(t *testing.T) {
	answer := make(chan struct{})
	p := newProvider(t, "api.anthropic.com", Budget{Tokens: 1000}, func(rw http.ResponseWriter, _ *http.Request) {
		<-answer
		io.WriteString(rw, `{"model":"m","usage":{"input_tokens":1,"output_tokens":1}}`)
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.ask("/v1/messages", `{"model":"m","max_tokens":2000}`)
	}()
	testenv.WaitFor(t, "the request", func() bool { return p.used("session").Requests == 1 })
	next := newWorld(t, config{policy: allow(p.host)}).g
	if err := next.SetMetering(p.metering); err != nil {
		t.Fatal(err)
	}
	if _, err := next.metering.Load().ledger(); err != nil {
		t.Fatal(err)
	}
	close(answer) // for the first gateway, which is still there
	<-ended
	if got := p.used("session"); got.Tokens < 2000 {
		t.Errorf("used %+v, want the bound of 2000 tokens and more", got)
	}
	if status, _ := p.ask("/v1/messages", `{"model":"m","max_tokens":1}`); status != http.StatusPaymentRequired {
		t.Errorf("answer = %d, want %d", status, http.StatusPaymentRequired)
	}
}

// A chat completion's stream reports its usage to the gateway, and to the client only if it asked.
func TestMeteringChat(t *testing.T) {
	p := newProvider(t, "api.openai.com", Budget{}, func(rw http.ResponseWriter, r *http.Request) {
		var in struct {
			Options struct {
				Usage bool `json:"include_usage"`
			} `json:"stream_options"`
		}
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil || !in.Options.Usage {
			t.Errorf("request = %+v, %v, want one for the usage", in, err)
		}
		rw.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(rw, "data: {\"model\":\"m\",\"choices\":[{}]}\n\ndata: {\"model\":\"m\",\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":5}}\n\ndata: [DONE]\n\n")
	})
	if _, text := p.ask("/v1/chat/completions", ` {"model":"m","stream":true}`); text != "data: {\"model\":\"m\",\"choices\":[{}]}\n\ndata: [DONE]\n\n" {
		t.Errorf("answer = %q, want it without the usage", text)
	}
	if _, text := p.ask("/v1/chat/completions", `{"model":"m","stream":true,"stream_options":{"include_usage":true}}`); !strings.Contains(text, "usage") {
		t.Errorf("answer = %q, want it with the usage", text)
	}
	if got := p.used("session"); got.Tokens != 50 || got.Requests != 2 {
		t.Errorf("used %+v, want 50 tokens in 2 requests", got)
	}
}

func TestBudget(t *testing.T) {
	for host, c := range map[string]struct {
		path, kind string
		status     int
	}{
		"api.anthropic.com": {"/v1/messages", "billing_error", http.StatusPaymentRequired},
		"api.openai.com":    {"/v1/responses", "insufficient_quota", http.StatusBadRequest},
	} {
		t.Run(host, func(t *testing.T) {
			p := newProvider(t, host, Budget{Session: 100_000}, func(rw http.ResponseWriter, _ *http.Request) {
				io.WriteString(rw, `{"model":"m","usage":{"input_tokens":20,"output_tokens":20}}`)
			})
			for range 3 {
				if status, text := p.ask(c.path, `{"model":"m","max_tokens":1000,"max_output_tokens":1000}`); status != 200 {
					t.Fatalf("answer within the budget = %d %s", status, text)
				}
			}
			a, err := p.post(c.path, `{"model":"m"}`)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Body.Close()
			var answer struct {
				Error struct{ Type, Message string }
			}
			if err := json.NewDecoder(a.Body).Decode(&answer); err != nil {
				t.Fatal(err)
			}
			if a.StatusCode != c.status || a.Header.Get("X-Should-Retry") != "false" || answer.Error.Type != c.kind || !strings.Contains(answer.Error.Message, "budget") {
				t.Errorf("answer above the budget = %d %v %+v, want %d %s", a.StatusCode, a.Header, answer, c.status, c.kind)
			}
			if status, _ := p.ask("/v1/batches", "{}"); status != http.StatusForbidden {
				t.Errorf("answer of what cannot be counted = %d, want %d", status, http.StatusForbidden)
			}
			events, err := p.store.Events(t.Context(), p.metering.Session, 0, 10)
			if err != nil || len(events) != 2 || events[0].Kind != BudgetEvent {
				t.Fatalf("events = %v, %v, want two of the budget", events, err)
			}
			var note BudgetNote
			if err := json.Unmarshal(events[1].Data, &note); err != nil || note.Limit != LimitSession || note.Percent != 100 || note.Used.Tokens != 120 {
				t.Errorf("the last event = %s, %v", events[1].Data, err)
			}
			// The user is asked about the limit until it changes.
			for _, c := range []struct {
				budget int64
				asks   bool
			}{{p.metering.Budget.Session, true}, {p.metering.Budget.Session * 2, false}} { // a higher budget has an effect on a running session
				p.metering.Budget.Session = c.budget
				if err := p.g.SetMetering(p.metering); err != nil {
					t.Fatal(err)
				}
				if n := p.g.exhausted(); (n != nil) != c.asks || n != nil && (n.Limit != LimitSession || n.Used.Tokens != 120) {
					t.Errorf("limit that is used up, with the budget %d = %+v, want one: %v", c.budget, n, c.asks)
				}
			}
			if status, text := p.ask(c.path, `{"model":"m"}`); status != 200 {
				t.Errorf("answer with a higher budget = %d %s", status, text)
			}
		})
	}
}

// However many requests arrive at once, only one of them is above the budget.
func TestBudgetRace(t *testing.T) {
	var sent atomic.Int64
	p := newProvider(t, "api.anthropic.com", Budget{Tokens: 95}, func(rw http.ResponseWriter, _ *http.Request) {
		sent.Add(1)
		io.WriteString(rw, `{"model":"m","usage":{"input_tokens":10,"output_tokens":10}}`)
	})
	var wait sync.WaitGroup
	for range 20 {
		wait.Go(func() {
			if status, text := p.ask("/v1/messages", `{"model":"m","max_tokens":30}`); status != 200 && status != http.StatusPaymentRequired {
				t.Errorf("answer = %d %s", status, text)
			}
		})
	}
	wait.Wait()
	if n := sent.Load(); n != 5 {
		t.Errorf("requests of 20 tokens with a budget of 95 = %d, want 5", n)
	}
}

// Without its ledger, a budget lets nothing pass, and a session without one goes on.
func TestMeteringWithoutStore(t *testing.T) {
	for budget, want := range map[Budget]int{{}: 200, {Day: 1}: http.StatusServiceUnavailable} {
		p := newProvider(t, "api.anthropic.com", budget, func(rw http.ResponseWriter, _ *http.Request) {
			io.WriteString(rw, `{"model":"m","usage":{"input_tokens":10,"output_tokens":10}}`)
		})
		p.g.metering.Load().ledger = func() (*store.Store, error) { return nil, errors.New("disk full") }
		if status, text := p.ask("/v1/messages", `{"model":"m"}`); status != want {
			t.Errorf("answer with %+v = %d %s, want %d", budget, status, text, want)
		}
		if err := p.g.usageError(); err == nil {
			t.Error("usageError = nil, want the reason")
		}
	}
}

// A store that cannot be opened is opened again later.
func TestOnceOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls, full := 0, errors.New("disk full")
		open := onceOpen(func() (*store.Store, error) {
			if calls++; calls == 1 {
				return nil, full
			}
			return new(store.Store), nil
		})
		for range 2 {
			if s, err := open(); s != nil || !errors.Is(err, full) || calls != 1 {
				t.Errorf("open = %v, %v after %d calls, want %v after 1", s, err, calls, full)
			}
		}
		time.Sleep(reopenAfter)
		for range 2 {
			if s, err := open(); s == nil || err != nil || calls != 2 {
				t.Errorf("open, later = %v, %v after %d calls, want a store after 2", s, err, calls)
			}
		}
	})
}

// A WebSocket would not be counted.
func TestMeteringWebSocket(t *testing.T) {
	p := newProvider(t, "api.openai.com", Budget{}, func(http.ResponseWriter, *http.Request) { t.Error("the upgrade was passed on") })
	p.Client = p.trustful(p.g.Interception(), false)
	r, err := http.NewRequestWithContext(p.ctx(), http.MethodGet, "https://api.openai.com/v1/responses", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", "websocket")
	if status, text, err := do(p.Client, r); err != nil || status != http.StatusUpgradeRequired {
		t.Errorf("answer = %d %s, %v, want %d", status, text, err, http.StatusUpgradeRequired)
	}
}

// TestSharedBudget checks that a subtask without a budget of its own ends with that of its parent,
// of which another subtask has used a part.
func TestSharedBudget(t *testing.T) {
	p := newProvider(t, "api.anthropic.com", Budget{}, func(rw http.ResponseWriter, _ *http.Request) {
		io.WriteString(rw, `{"model":"m","usage":{"input_tokens":20,"output_tokens":20}}`)
	})
	used := store.Usage{Session: "another", Request: "1", At: time.Now(), Tree: "root/another/", Output: 60}
	if err := p.store.ReserveUsage(t.Context(), used, nil); err != nil {
		t.Fatal(err)
	}
	p.metering.Tree, p.metering.Shared = "root/"+p.metering.Task+"/", []Shared{{Tree: "root/", Budget: Budget{Tokens: 100}}}
	if err := p.g.SetMetering(p.metering); err != nil {
		t.Fatal(err)
	}
	p.Client = p.trustful(p.g.Interception(), true)
	if status, text := p.ask("/v1/messages", `{"model":"m","max_tokens":10}`); status != 200 {
		t.Fatalf("answer within the shared budget = %d %s, want 200", status, text)
	}
	if err := p.store.AbandonUsage(t.Context(), "another"); err != nil {
		t.Fatal(err)
	}
	if status, text := p.ask("/v1/messages", `{"model":"m","max_tokens":10}`); status != http.StatusPaymentRequired || !strings.Contains(text, "shares with") {
		t.Errorf("answer above the shared budget = %d %s, want %d", status, text, http.StatusPaymentRequired)
	}
	if status, _ := p.ask("/v1/batches", "{}"); status != http.StatusForbidden {
		t.Errorf("answer of what cannot be counted = %d, want %d", status, http.StatusForbidden)
	}
}
