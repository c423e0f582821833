package secret

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	vault "github.com/hashicorp/vault/api"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

const standInToken = "hvs.SENTINELtoken"

// standInVault has the part of Vault's HTTP API that the tests use, with the answers that
// version 1.21 gives: one KV version 2 engine at secret/, one at team/kv/.
type standInVault struct {
	mu       sync.Mutex
	sealed   bool
	versions map[string][]map[string]any // nil: deleted
	requests []*http.Request
}

func (s *standInVault) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r)
	answer := func(code int, body any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(body)
	}
	refuse := func(code int, errors ...string) {
		answer(code, map[string]any{"errors": append([]string{}, errors...)})
	}
	path := strings.TrimPrefix(r.URL.Path, "/v1/")
	at, isData := "", false
	for _, mount := range []string{"secret", "team/kv"} {
		if rest, ok := strings.CutPrefix(path, mount+"/data/"); ok {
			at, isData = mount+"/"+rest, true
		}
	}
	metadata := map[string]any{"created_time": "2026-01-02T03:04:05.678901234Z", "custom_metadata": nil, "deletion_time": "", "destroyed": false, "version": len(s.versions[at])}
	found := func(code int, data any) {
		answer(code, map[string]any{
			"request_id": "5b0d9a1c-0000-0000-0000-000000000000", "lease_id": "", "renewable": false, "lease_duration": 0,
			"data": data, "wrap_info": nil, "warnings": nil, "auth": nil, "mount_type": "kv",
		})
	}
	switch {
	case s.sealed:
		refuse(503, "Vault is sealed")
	case r.Header.Get("X-Vault-Token") == "":
		refuse(403, "permission denied")
	case r.Header.Get("X-Vault-Token") != standInToken:
		refuse(403, "2 errors occurred:\n\t* permission denied\n\t* invalid token\n\n")
	case r.Header.Get("X-Vault-Wrap-Ttl") != "":
		answer(200, map[string]any{"data": nil, "wrap_info": map[string]any{"token": "hvs.SENTINELwrapped", "ttl": 60}})
	case path == "sys/seal":
		s.sealed = true
		w.WriteHeader(http.StatusNoContent)
	case !isData:
		refuse(404, fmt.Sprintf("no handler for route %q. route entry not found.", path))
	case r.Method == http.MethodPut || r.Method == http.MethodPost:
		var body struct {
			Data map[string]any `json:"data"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			refuse(400, "failed to parse JSON input: "+err.Error())
			return
		}
		s.versions[at] = append(s.versions[at], body.Data)
		metadata["version"] = len(s.versions[at])
		found(200, metadata)
	case r.Method == http.MethodDelete:
		all := s.versions[at]
		all[len(all)-1] = nil
		w.WriteHeader(http.StatusNoContent)
	case len(s.versions[at]) == 0:
		refuse(404)
	default:
		all := s.versions[at]
		data := all[len(all)-1]
		code := 200
		if data == nil {
			metadata["deletion_time"] = "2026-01-02T03:04:06.678901234Z"
			code = 404
		}
		found(code, map[string]any{"data": data, "metadata": metadata})
	}
}

// useVault sets the environment for a server.
func useVault(t *testing.T, addr, token string) {
	t.Helper()
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "VAULT_") {
			t.Setenv(name, "")
		}
	}
	t.Setenv("HOME", t.TempDir())
	t.Setenv("VAULT_ADDR", addr)
	t.Setenv("VAULT_TOKEN", token)
	t.Setenv("VAULT_MOUNT", "")
}

func startVault(t *testing.T) (*standInVault, string) {
	t.Helper()
	v := &standInVault{versions: map[string][]map[string]any{}}
	server := httptest.NewServer(v)
	t.Cleanup(server.Close)
	return v, server.URL
}

// TestVault runs with the stand-in, and with a real server if TEST_VAULT_ADDR and
// TEST_VAULT_TOKEN name one, which it seals. It must have KV version 2 at secret/ and team/kv/.
func TestVault(t *testing.T) {
	t.Run("stand-in", func(t *testing.T) {
		_, addr := startVault(t)
		testVault(t, addr, standInToken)
	})
	if addr := os.Getenv("TEST_VAULT_ADDR"); addr != "" {
		t.Run("real", func(t *testing.T) { testVault(t, addr, os.Getenv("TEST_VAULT_TOKEN")) })
	}
}

func testVault(t *testing.T, addr, token string) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	useVault(t, addr, token)
	client, err := vault.NewClient(nil)
	if err != nil {
		t.Fatal(err)
	}
	put := func(mount, path string, data map[string]any) {
		t.Helper()
		if _, err := client.KVv2(mount).Put(t.Context(), path, data); err != nil {
			t.Fatal(err)
		}
	}
	largest := strings.Repeat("\x01", MaxBytes) // six bytes each in JSON
	put("secret", "work/github", map[string]any{"token": "old"})
	put("secret", "work/github", map[string]any{"token": sentinel + "\n", "lines": "a\nb\n", "number": 7, "object": map[string]any{"x": sentinel}, "empty": "", "null": nil})
	put("secret", "a b/c:d%2e?e#f", map[string]any{"k": sentinel})
	put("secret", "large", map[string]any{"fits": largest[:MaxBytes/8], "over": strings.Repeat("x", MaxBytes+1)})
	put("team/kv", "work", map[string]any{"token": "of the team"})
	put("secret", "gone", map[string]any{"token": sentinel})
	if err := client.KVv2("secret").Delete(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}

	got, err := ResolveInChild(t.Context(), self, []Ref{
		{"A", "vault:work/github:token"},
		{"B", "vault:work/github:lines"},
		{"C", "vault:a b/c:d%2e?e#f:k"},
		{"D", "vault:large:fits"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"A": sentinel, "B": "a\nb\n", "C": sentinel, "D": largest[:MaxBytes/8]} {
		if got[name].Reveal() != want {
			t.Errorf("%s = %.80q, want %.80q", name, got[name].Reveal(), want)
		}
	}

	t.Run("settings", func(t *testing.T) {
		t.Setenv("VAULT_MOUNT", "/team/kv/")
		t.Setenv("VAULT_WRAP_TTL", "60s")
		t.Setenv("VAULT_TOKEN", "")
		home := t.TempDir()
		t.Setenv("HOME", home)
		write(t, home, ".vault-token", token+"\n", 0o644)
		refs := []Ref{{"A", "vault:work:token"}}
		got, err := ResolveInChild(t.Context(), self, refs)
		if err != nil || got["A"].Reveal() != "of the team" {
			t.Errorf("Resolve = %q, %v, want %q", got["A"].Reveal(), err, "of the team")
		}
		if w := Warnings(refs); len(w) != 1 || !strings.Contains(w[0], ".vault-token (mode 0644)") {
			t.Errorf("Warnings = %q, want one for the token's file", w)
		}
		t.Setenv("VAULT_TOKEN", token)
		if w := Warnings(refs); len(w) != 0 {
			t.Errorf("Warnings with VAULT_TOKEN = %q, want none", w)
		}
	})

	for _, c := range []struct{ source, env, want, hint string }{
		{"vault:work/none:token", "", "the secret secret/work/none does not exist", "vault kv get -mount=secret work/none"},
		{"vault:work it/none:token", "", "does not exist", "vault kv get -mount=secret 'work it/none'"},
		{"vault:work/github:token", "VAULT_MOUNT=none", "the secret none/work/github does not exist", "vault kv get -mount=none work/github"},
		{"vault:gone:token", "", "the current version of secret/gone is deleted", "vault kv metadata get -mount=secret gone"},
		{"vault:work/github:none", "", "secret/work/github has no key none", "vault kv get -mount=secret work/github"},
		{"vault:work/github:number", "", "number in secret/work/github is not a string", "vault kv patch -mount=secret work/github number=…"},
		{"vault:work/github:object", "", "is not a string", "vault kv patch"},
		{"vault:work/github:null", "", "is not a string", "vault kv patch"},
		{"vault:work/github:empty", "", "the value is empty", ""},
		{"vault:large:over", "", "the value is larger than the limit of 256 KiB", ""},
		{"vault:work/github:token", "VAULT_TOKEN=hvs.SENTINELwrong", "Vault refuses the token for secret/work/github: 2 errors occurred: * permission denied * invalid token", "vault token lookup"},
		{"vault:work/github:token", "VAULT_TOKEN=a\x01b", "non-printable characters", "vault status"},
	} {
		t.Run(c.source, func(t *testing.T) {
			if name, value, ok := strings.Cut(c.env, "="); ok {
				t.Setenv(name, value)
			}
			vaultRefuses(t, Ref{"TOKEN", c.source}, Options{Timeout: patient}, c.want, c.hint)
		})
	}
	if err := client.Sys().Seal(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("VAULT_MAX_RETRIES", "0")
	vaultRefuses(t, Ref{"TOKEN", "vault:work/github:token"}, Options{Timeout: patient}, "Vault answered with 503: Vault is sealed", "vault status")
}

func vaultRefuses(t *testing.T, ref Ref, opts Options, want, hint string) {
	t.Helper()
	_, err := Resolve(t.Context(), []Ref{ref}, opts)
	if fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), "secret TOKEN (vault): ") || !strings.Contains(err.Error(), want) || !strings.HasPrefix(fail.HintOf(err), hint) {
		t.Errorf("Resolve(%s) = %v (hint %q), want %q (hint %q)", ref.Source, err, fail.HintOf(err), want, hint)
	}
	if s := fmt.Sprint(err, fail.HintOf(err)); strings.Contains(s, "SENTINEL") || strings.ContainsFunc(s, isControl) {
		t.Errorf("Resolve(%s) = %q, want neither content nor control characters", ref.Source, s)
	}
}

// Settings that are missing are found before a session is created.
func TestVaultSettings(t *testing.T) {
	for _, c := range []struct{ addr, token, agent, want, hint string }{
		{"", "x", "", "VAULT_ADDR is not set", "export VAULT_ADDR="},
		{"http://127.0.0.1:1", "", "", "VAULT_TOKEN is not set, and there is no readable ~/.vault-token", "vault login"},
		{"http://127.0.0.1:1", "x", "", "", ""},
		{"", "", "http://127.0.0.1:1", "", ""}, // an agent has a token of its own
	} {
		useVault(t, c.addr, c.token)
		t.Setenv("VAULT_AGENT_ADDR", c.agent)
		ref := Ref{"TOKEN", "vault:a:b"}
		errs := Check([]Ref{ref})
		if c.want == "" {
			if len(errs) > 0 {
				t.Errorf("Check with address %q, agent %q = %v, want none", c.addr, c.agent, errs)
			}
			continue
		}
		if len(errs) != 1 || !strings.Contains(errs[0].Error(), c.want) {
			t.Errorf("Check with address %q = %v, want %q", c.addr, errs, c.want)
		}
		vaultRefuses(t, ref, Options{}, c.want, c.hint)
	}
	useVault(t, "https://127.0.0.1:1", "x")
	t.Setenv("VAULT_CACERT", "/nonexistent/ca.pem")
	vaultRefuses(t, Ref{"TOKEN", "vault:a:b"}, Options{}, "the settings of Vault are invalid: ", "env | grep VAULT_")
}

// The client has the settings of the vault command, the namespace among them.
func TestVaultTLSAndNamespace(t *testing.T) {
	v := &standInVault{versions: map[string][]map[string]any{"secret/work": {{"token": "one"}}}}
	server := httptest.NewTLSServer(v)
	defer server.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	useVault(t, server.URL, standInToken)
	vaultRefuses(t, Ref{"TOKEN", "vault:work:token"}, Options{Timeout: patient}, "certificate signed by unknown authority", "export VAULT_CACERT=")
	if len(v.requests) > 0 {
		t.Errorf("requests without VAULT_CACERT = %d, want none", len(v.requests))
	}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	t.Setenv("VAULT_CACERT", write(t, t.TempDir(), "ca.pem", string(ca), 0o600))
	t.Setenv("VAULT_NAMESPACE", "team-a")
	got, err := ResolveInChild(t.Context(), self, []Ref{{"A", "vault:work:token"}})
	if err != nil || got["A"].Reveal() != "one" {
		t.Fatalf("Resolve = %q, %v, want %q", got["A"].Reveal(), err, "one")
	}
	if ns := v.requests[0].Header.Get("X-Vault-Namespace"); len(v.requests) != 1 || ns != "team-a" {
		t.Errorf("requests = %d, namespace %q, want 1, team-a", len(v.requests), ns)
	}
}

// A server that fails, hangs or lies costs a bounded time and memory, and what it writes is
// shown without the token.
func TestVaultServerMisbehaves(t *testing.T) {
	const tooLong = "did not answer in time"
	stop := make(chan struct{})
	for name, c := range map[string]struct {
		answer   func(w http.ResponseWriter, r *http.Request)
		want     string
		requests int
	}{
		"fails": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = io.WriteString(w, `{"errors":["internal \u001b[31merror"]}`)
		}, "Vault answered with 500: internal", 3},
		"echoes the token": {func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"errors":["bad token `+r.Header.Get("X-Vault-Token")+`"]}`)
		}, "Vault answered with 400: bad token [redacted]", 1},
		"is a web page": {func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") }, "Vault: ", 1},
		"is no page":    {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }, "does not exist", 1},
		"has version 1": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"data":{"token":"SENTINEL"}}`)
		}, "missing expected 'data' element", 1},
		"has other data": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"data":{"data":"SENTINEL","metadata":{}}}`)
		}, "unexpected type for 'data' element", 1},
		"never ends": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"data":{"data":{"token":"`)
			for err := error(nil); err == nil; {
				_, err = io.WriteString(w, strings.Repeat("x", 1<<16))
			}
		}, "Vault's answer is larger than the limit of 4 MiB", 1},
		"fails at length": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusBadRequest)
			for err := error(nil); err == nil; {
				_, err = io.WriteString(w, strings.Repeat("x", 1<<16))
			}
		}, "Vault's answer is larger than the limit of 4 MiB", 1},
		"hangs": {func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-r.Context().Done():
			case <-stop:
			}
		}, tooLong, 1},
		"says later": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(http.StatusTooManyRequests)
		}, tooLong, 1},
	} {
		t.Run(name, func(t *testing.T) {
			requests := make(chan struct{}, 100)
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				requests <- struct{}{}
				c.answer(w, r)
			}))
			defer server.Close()
			useVault(t, server.URL, standInToken)
			opts := Options{Timeout: patient}
			if c.want == tooLong {
				opts.Timeout = time.Second
			}
			vaultRefuses(t, Ref{"TOKEN", "vault:work:token"}, opts, c.want, "")
			if len(requests) != c.requests {
				t.Errorf("requests = %d, want %d", len(requests), c.requests)
			}
		})
	}
	close(stop)
	useVault(t, "http://user:SENTINEL@127.0.0.1:1", standInToken)
	t.Setenv("VAULT_MAX_RETRIES", "0")
	vaultRefuses(t, Ref{"TOKEN", "vault:work:token"}, Options{Timeout: patient}, "connection refused", "vault status")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Resolve(ctx, []Ref{{"A", "vault:work:token"}}, Options{}); err == nil {
		t.Error("cancelled Resolve = nil, want an error")
	}
}

func TestBadVault(t *testing.T) {
	for source, bad := range map[string]bool{
		"vault:a:b": false, "vault:a/b/c:d": false, "vault:a:b:c": false, "vault:a b:c d": false,
		"vault:": true, "vault:a": true, "vault::b": true, "vault:a:": true, "vault:/a:b": true, "vault:a/:b": true,
		"vault:a//b:c": true, "vault:../sys/seal:c": true, "vault:a/./b:c": true, "vault://a:b": true,
	} {
		if _, err := ParseRef("X", source); (err != nil) != bad {
			t.Errorf("ParseRef(%s) = %v, want an error: %t", source, err, bad)
		}
	}
	if path, key := (Ref{"X", "vault:a:b:c"}).vault(); !slices.Equal([]string{path, key}, []string{"a:b", "c"}) {
		t.Errorf("parts of vault:a:b:c = %q, %q, want a:b, c", path, key)
	}
}
