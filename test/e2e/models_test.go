//go:build e2e

package e2e

import (
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// TestModels runs the real Claude Code and Codex in a guest that has only placeholders of their
// keys. Their APIs are the test's own, under the providers' names. The gateway counts what they
// use, and they stop when the budget is used up.
func TestModels(t *testing.T) {
	for _, name := range []string{"api.anthropic.com.", "api.openai.com."} {
		zone[name] = []string{forgeAddr}
		t.Cleanup(func() { delete(zone, name) })
	}
	b := newBox(t)
	b.Repo("project")
	claudeKey, codexKey := "sk-ant-api03-"+random(), "sk-proj-"+random()
	forge := newForge(t, filepath.Join(b.Home, "forge"), "", "api.anthropic.com", "api.openai.com")
	m := &model{think: make(chan struct{})}
	var asked atomic.Int64
	forge.http.HandleFunc("/v1/", func(w http.ResponseWriter, r *http.Request) {
		if key := r.Header.Get("X-Api-Key"); r.Host == "api.anthropic.com" && key != claudeKey || r.Host == "api.openai.com" && r.Header.Get("Authorization") != "Bearer "+codexKey {
			t.Errorf("%s %s with key %q, authorization %q, want the real key", r.Host, r.URL.Path, key, r.Header.Get("Authorization"))
		}
		asked.Add(1)
		m.ServeHTTP(w, r)
	})
	b.Write("ca.pem", string(forge.ca))
	b.Env = append(b.Env, "SSL_CERT_FILE="+filepath.Join(b.Home, "ca.pem"))
	b.Write(".config/agent-sessionizer/config.yaml", `
secrets:
  ANTHROPIC_API_KEY: "cmd:printf `+claudeKey+`"
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
	b.Asz("budget", name, "--tokens", "none")
	if out := b.MustIn(name, agents["Claude Code"]+" 2>&1"); !strings.Contains(out, "All done.") {
		t.Errorf("Claude Code with a higher budget = %s, want an answer", out)
	}
}
