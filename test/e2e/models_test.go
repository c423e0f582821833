//go:build e2e

package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestModels runs the real Claude Code and Codex in a guest that has only placeholders of their
// keys. Their APIs are the test's own, under the providers' names. The gateway counts what they
// use, and they stop when the budget is used up.
func TestModels(t *testing.T) {
	t.Parallel()
	useForgeAddr(t, "api.anthropic.com", "api.openai.com")
	b := newBox(t)
	b.Repo("project")
	claudeKey, codexKey := "sk-ant-api03-"+random(), "sk-proj-"+random()
	forge := newForge(t, filepath.Join(b.Home, "forge"), "", "api.anthropic.com", "api.openai.com")
	m := &model{think: make(chan struct{})}
	var asked atomic.Int64
	var valid atomic.Value // Claude Code's key
	setKey := func(key string) { valid.Store(key); b.Write("claude.key", key) }
	setKey(claudeKey)
	forge.http.HandleFunc("/v1/", func(w http.ResponseWriter, r *http.Request) {
		if key := r.Header.Get("X-Api-Key"); r.Host == "api.anthropic.com" && key != valid.Load() || r.Host == "api.openai.com" && r.Header.Get("Authorization") != "Bearer "+codexKey {
			t.Errorf("%s %s with key %q, authorization %q, want the real key", r.Host, r.URL.Path, key, r.Header.Get("Authorization"))
		}
		asked.Add(1)
		m.ServeHTTP(w, r)
	})
	b.Write("ca.pem", string(forge.ca))
	b.Env = append(b.Env, "SSL_CERT_FILE="+filepath.Join(b.Home, "ca.pem"))
	b.Write(".config/agent-sessionizer/config.yaml", `
secrets:
  ANTHROPIC_API_KEY: "file:`+filepath.Join(b.Home, "claude.key")+`"
  CODEX_API_KEY: "cmd:printf `+codexKey+`"
network: {allow: ["@openai"]}
budget: {session: 5 USD, day: 50 USD}
`)
	name := b.open("./project")
	if env := b.MustIn(name, "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'"); strings.Contains(env, claudeKey) || strings.Contains(env, codexKey) || !strings.Contains(env, "ANTHROPIC_API_KEY=sk-ant-api03-") {
		t.Errorf("environment of the guest's processes = %s, want placeholders only", env)
	}
	agents := map[string]string{
		"Claude Code": "claude -p 'say hello' --model claude-opus-4-5",
		"Codex":       "codex exec --skip-git-repo-check -m gpt-5.1-codex 'say hello' </dev/null",
	}
	usage := func() ops.Usage {
		t.Helper()
		var u ops.Usage
		if err := json.Unmarshal([]byte(b.Asz("usage", "--by", "model", "--json", name)), &u); err != nil {
			t.Fatal(err)
		}
		return u
	}
	for agent, command := range agents {
		if out := b.MustIn(name, command+" 2>&1"); !strings.Contains(out, "All done.") {
			t.Errorf("%s = %s, want an answer", agent, out)
		}
	}
	u := usage()
	t.Logf("used: %+v", u)
	for _, model := range []string{"claude-opus-4-5", "gpt-5.1-codex"} {
		found := false
		for _, use := range u.Uses {
			found = found || strings.HasPrefix(use.Of, model) && use.Tokens > 0 && use.USD > 0 && !use.Unknown
		}
		if !found {
			t.Errorf("usage = %+v, want some of %s", u, model)
		}
	}
	if b.Asz("budget", name, "--tokens", "1"); !strings.Contains(b.Asz("status"), "USD today") {
		t.Errorf("status = %q, want what was spent today", b.Asz("status"))
	}
	before := asked.Load()
	for agent, command := range agents {
		r := b.In(name, "timeout 300 "+command+" 2>&1")
		if r.Code == 0 || r.Code == 124 || !strings.Contains(r.Stdout, "budget of 1 tokens is used up") {
			t.Errorf("%s with a budget that is used up: exit %d, %s, want it to stop with the reason", agent, r.Code, r.All())
		}
		t.Logf("%s says: %s", agent, r.Stdout)
	}
	if after := usage(); asked.Load() != before || after.Total.Tokens != u.Total.Tokens {
		t.Errorf("requests above the budget = %d, used %+v, want none", asked.Load()-before, after.Total)
	}
	// Neither tries again and again.
	denied := 0
	for line := range strings.Lines(b.Asz("net", "log", name)) {
		if strings.Contains(line, "budget of 1 tokens") {
			denied++
		}
	}
	if denied == 0 || denied > 8 {
		t.Errorf("refused requests = %d, want a few", denied)
	}
	// The refusal asks the user for a new limit, once.
	q := b.question(store.QuestionBudget, "budget of 1 tokens is used up")
	b.Fails(2, "must be the new limit, or deny", "answer", q.ID, "more")
	b.Asz("answer", q.ID, "none")
	b.answered(q.ID, "none", store.QuestionDelivered)
	if out := b.MustIn(name, agents["Claude Code"]+" 2>&1"); !strings.Contains(out, "All done.") {
		t.Errorf("Claude Code with a higher budget = %s, want an answer", out)
	}

	// The key is replaced on the host. The guest keeps its placeholder.
	setKey("sk-ant-api03-" + random())
	b.Asz("secrets", "refresh", name)
	if out := b.MustIn(name, agents["Claude Code"]+" 2>&1"); !strings.Contains(out, "All done.") {
		t.Errorf("Claude Code with another key = %s, want an answer", out)
	}

	if testing.Short() {
		return
	}
	// The gateway dies while a model answers. What the request could use counts.
	u, before = usage(), asked.Load()
	ended := make(chan realvm.Result, 1)
	go func() { ended <- b.In(name, "timeout 120 claude -p THINK --model claude-opus-4-5 </dev/null") }()
	testenv.WaitFor(t, "the request", func() bool { return asked.Load() > before })
	b.kill("gateway")
	if r := <-ended; r.Code == 0 {
		t.Errorf("Claude Code without a gateway = %s, want an error", r.All())
	}
	b.WaitState("broken")
	b.Asz("start", name)
	if out := b.MustIn(name, agents["Claude Code"]+" 2>&1"); !strings.Contains(out, "All done.") {
		t.Errorf("Claude Code with a new gateway = %s, want an answer", out)
	}
	if after := usage(); after.Total.Tokens < u.Total.Tokens+1000 {
		t.Errorf("used %d tokens, then %d, want the most that the request could use in addition", u.Total.Tokens, after.Total.Tokens)
	}
}

// TestLogins runs the real Claude Code and Codex in a guest, with the subscription logins of the
// host's own clients. Their tokens end, are refused and are revoked.
func TestLogins(t *testing.T) {
	long(t)
	names := []string{"api.anthropic.com", "platform.claude.com", "chatgpt.com", "auth.openai.com", "api.openai.com"}
	useForgeAddr(t, names...)
	b := newBox(t)
	b.Repo("project")
	forge := newForge(t, filepath.Join(b.Home, "forge"), "", names...)
	m := &model{think: make(chan struct{})}
	provider := &accounts{}
	forge.http.HandleFunc("/v1/oauth/token", provider.token)
	forge.http.HandleFunc("/oauth/token", provider.token)
	forge.http.HandleFunc("/v1/messages", func(w http.ResponseWriter, r *http.Request) {
		if provider.admit(w, r) {
			m.ServeHTTP(w, r)
		}
	})
	forge.http.HandleFunc("/backend-api/codex/responses", func(w http.ResponseWriter, r *http.Request) {
		if provider.admit(w, r) {
			body, err := zstd.NewReader(r.Body) // as Codex sends it
			if err != nil {
				t.Error(err)
				return
			}
			defer body.Close()
			r.Body = io.NopCloser(body)
			responses(w, r)
		}
	})
	// Codex asks where the account's workspace is served.
	forge.http.HandleFunc("/backend-api/wham/accounts/check", func(w http.ResponseWriter, r *http.Request) {
		if provider.admit(w, r) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"accounts":[{"id":"account","name":null,"structure":"personal","plan_type":"pro","is_deactivated":false,"can_access_with_session":true,`+
				`"is_fedramp_compliant_workspace":false,"sso_connection_name":null,"workspace_backend_origin":"https://chatgpt.com","account_routing_override":"NO_CONSTRAINT","profile_picture_url":null}],`+
				`"account_ordering":["account"],"default_account_id":"account"}`)
		}
	})
	b.Write("ca.pem", string(forge.ca))
	b.Env = append(b.Env, "SSL_CERT_FILE="+filepath.Join(b.Home, "ca.pem"))
	b.Write(".config/agent-sessionizer/config.yaml", "network: {allow: [\"@openai\"]}\n")
	// Both tokens have ended.
	jwt := func(claims string) string {
		return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
	}
	b.Write(".claude/.credentials.json", `{"claudeAiOauth":{"accessToken":"real-access-old","refreshToken":"real-refresh-0","expiresAt":1000,"scopes":["user:inference","user:profile"],"subscriptionType":"max"}}`)
	b.Write(".codex/auth.json", `{"auth_mode":"chatgpt","OPENAI_API_KEY":null,"tokens":{"id_token":"`+jwt(`{"email":"a@b.c","https://api.openai.com/auth":{"chatgpt_account_id":"account","chatgpt_plan_type":"pro"}}`)+
		`","access_token":"`+jwt(`{"exp":1000}`)+`","refresh_token":"real-refresh-0","account_id":"account"},"last_refresh":"2026-01-02T03:04:05Z"}`)
	name := b.open("./project")
	agents := map[string]string{
		"Claude Code": "claude -p 'say hello' --model claude-opus-4-5",
		"Codex":       "codex exec --skip-git-repo-check -m gpt-5.1-codex 'say hello' </dev/null",
	}
	works := func(when string) {
		t.Helper()
		for agent, command := range agents {
			if r := b.In(name, "timeout 300 "+command+" 2>&1"); !strings.Contains(r.Stdout, "All done.") {
				t.Errorf("%s %s = %s, want an answer", agent, when, r.All())
			}
		}
	}
	works("after the tokens had ended")
	if n := provider.issued.Load(); n != int64(len(agents)) {
		t.Errorf("refreshed %d times, want once for each", n)
	}
	if found := b.In(name, "sudo grep -rlE 'real-(access|refresh)-' /home /root /run /tmp /etc 2>/dev/null; cat /proc/*/environ | tr '\\0' '\\n' | grep -E 'real-(access|refresh)-'"); strings.Contains(found.Stdout, "/") || strings.Contains(found.Stdout, "real-") {
		t.Errorf("real tokens in the guest: %s", found.All())
	}
	provider.refuse.Store(provider.issued.Load()) // what was issued until now
	works("after the provider had refused the tokens")
	// The host's own clients are still logged in: their files have the latest tokens.
	for agent, file := range map[string]string{"Claude Code": ".claude/.credentials.json", "Codex": ".codex/auth.json"} {
		if agents[agent] == "" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(b.Home, file))
		if err != nil {
			t.Fatal(err)
		}
		if text := string(text); !strings.Contains(text, "real-refresh-") || strings.Contains(text, "real-refresh-0\"") {
			t.Errorf("%s = %s, want the latest refresh token", file, text)
		}
	}
	provider.revoked.Store(true)
	provider.refuse.Store(provider.issued.Load())
	b.Asz("secrets", "refresh", name) // reads the logins again
	for agent, command := range agents {
		r := b.In(name, "timeout 300 "+command+" 2>&1")
		if r.Code == 0 || r.Code == 124 {
			t.Errorf("%s with a revoked login: exit %d, %s, want it to stop", agent, r.Code, r.All())
		}
		t.Logf("%s says: %s", agent, r.Stdout)
	}
}

// accounts issues tokens, and admits requests with them.
type accounts struct {
	issued, refuse atomic.Int64 // numbers of tokens
	revoked        atomic.Bool
}

func (a *accounts) token(w http.ResponseWriter, r *http.Request) {
	var ask map[string]string
	if err := json.NewDecoder(r.Body).Decode(&ask); err != nil || !strings.HasPrefix(ask["refresh_token"], "real-refresh-") || a.revoked.Load() {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, `{"error":"invalid_grant"}`)
		return
	}
	n := a.issued.Add(1)
	claims := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"exp":%d}`, time.Now().Add(time.Hour).Unix()))
	fmt.Fprintf(w, `{"access_token":"e30.%s.real-access-%d","refresh_token":"real-refresh-%d","expires_in":3600}`, claims, n, n)
}

// admit answers requests without a token that is still valid.
func (a *accounts) admit(w http.ResponseWriter, r *http.Request) bool {
	_, number, _ := strings.Cut(r.Header.Get("Authorization"), "real-access-")
	n, err := strconv.ParseInt(number, 10, 64)
	if err == nil && n > a.refuse.Load() {
		return true
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusUnauthorized)
	fmt.Fprint(w, `{"type":"error","error":{"type":"authentication_error","message":"OAuth token has expired","code":"token_expired"}}`)
	return false
}
