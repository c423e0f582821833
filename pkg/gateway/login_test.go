package gateway

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
)

// TestLogin sends requests with the placeholder of a login's access token. The provider is
// scripted, for the host's refreshing too.
func TestLogin(t *testing.T) {
	var valid, refreshed atomic.Int64
	var revoked atomic.Bool
	p := newProvider(t, "api.anthropic.com", Budget{}, func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != fmt.Sprintf("Bearer real-access-token-%d", valid.Load()) {
			rw.WriteHeader(http.StatusUnauthorized)
			return
		}
		io.WriteString(rw, "welcome "+r.Header.Get("Authorization"))
	})
	before := login.Client.Transport
	t.Cleanup(func() { login.Client.Transport = before })
	login.Client.Transport = roundTrip(func(r *http.Request) (*http.Response, error) {
		var ask map[string]string
		if err := json.NewDecoder(r.Body).Decode(&ask); err != nil || !strings.HasPrefix(ask["refresh_token"], "real-refresh-token") {
			t.Errorf("the host refreshes with %v, %v", ask, err)
		}
		status, text := 200, fmt.Sprintf(`{"access_token":"real-access-token-%d","refresh_token":"real-refresh-token-x","expires_in":3600}`, valid.Load())
		if revoked.Load() {
			status, text = 400, `{"error":"invalid_grant"}`
		}
		refreshed.Add(1)
		return &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(text)), Request: r}, nil
	})
	l := &login.Login{Provider: "claude", Own: filepath.Join(t.TempDir(), "claude.json")}
	write := func(end time.Time) {
		t.Helper()
		text := fmt.Sprintf(`{"claudeAiOauth":{"accessToken":"real-access-token-0","refreshToken":"real-refresh-token-0","expiresAt":%d}}`, end.UnixMilli())
		if err := os.WriteFile(l.Own, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(time.Now().Add(time.Hour))
	bound := []Secret{{Name: "login claude", Like: "sk-ant-oat01-", Hosts: []string{"api.anthropic.com"}, Login: l}}
	x, err := p.g.SetSecrets(bound)
	if err != nil {
		t.Fatal(err)
	}
	access, refresh := x.Placeholders["login claude"], x.Placeholders[RefreshName("login claude")]
	if !strings.HasPrefix(access, "sk-ant-oat01-") || !strings.HasPrefix(refresh, RefreshMark) {
		t.Fatalf("placeholders = %q, %q", access, refresh)
	}
	p.g.policy.Store(allow("api.anthropic.com", "platform.claude.com"))
	p.Client = p.trustful(x, true)
	ask := func() (int, string) {
		t.Helper()
		r, err := http.NewRequestWithContext(p.ctx(), http.MethodGet, "https://api.anthropic.com/api/oauth/profile", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+access)
		status, text, err := do(p.Client, r)
		if err != nil {
			t.Fatal(err)
		}
		return status, text
	}
	want := "welcome Bearer " + strings.Repeat("*", len("real-access-token-0"))
	if status, text := ask(); status != 200 || text != want || refreshed.Load() != 0 {
		t.Errorf("answer = %d %q, %d refreshed, want %q and none", status, text, refreshed.Load(), want)
	}
	// The client in the guest refreshes: it gets its placeholders, and the host's token is used.
	renew := func(path, token string) (int, map[string]any) {
		t.Helper()
		body := fmt.Sprintf(`{"grant_type":"refresh_token","refresh_token":%q}`, token)
		r, err := http.NewRequestWithContext(p.ctx(), http.MethodPost, "https://platform.claude.com"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		status, text, err := do(p.Client, r)
		if err != nil {
			t.Fatal(err)
		}
		var got map[string]any
		if err := json.Unmarshal([]byte(text), &got); err != nil || strings.Contains(text, "real-") {
			t.Errorf("answer to the refresh = %q, %v", text, err)
		}
		return status, got
	}
	valid.Store(1)
	if status, _ := ask(); status != http.StatusUnauthorized {
		t.Errorf("answer to a token that is not valid any more = %d, want %d", status, http.StatusUnauthorized)
	}
	if status, got := renew("/v1/oauth/token", refresh); status != 200 || got["access_token"] != access || got["refresh_token"] != refresh || refreshed.Load() != 1 {
		t.Errorf("answer to the refresh = %d %v, %d refreshed, want the placeholders, and one", status, got, refreshed.Load())
	}
	if status, text := ask(); status != 200 || text != want {
		t.Errorf("answer after the refresh = %d %q, want %q", status, text, want)
	}
	// A guest cannot cause refreshes all the time, and gets nothing else from that host.
	if status, _ := renew("/v1/oauth/token", refresh); status != 200 || refreshed.Load() != 1 {
		t.Errorf("answer to a second refresh = %d, %d refreshed, want no other", status, refreshed.Load())
	}
	for path, token := range map[string]string{"/v1/oauth/token": access, "/v1/oauth/code": refresh, "/v1/oauth/token/": ""} {
		if status, got := renew(path, token); status != http.StatusForbidden || got["access_token"] != nil {
			t.Errorf("answer to %s with %q = %d %v, want %d", path, token, status, got, http.StatusForbidden)
		}
	}
	// A login that is revoked, or gone.
	revoked.Store(true)
	write(time.Now())
	if x, err = p.g.SetSecrets(bound); err != nil || x.Placeholders["login claude"] != access || x.Placeholders[RefreshName("login claude")] != refresh {
		t.Fatalf("placeholders after the secrets were set again = %v, %v, want the same", x.Placeholders, err)
	}
	for _, why := range []string{"invalid_grant", "no login"} {
		if status, text := ask(); status != http.StatusUnauthorized || !strings.Contains(text, "authentication_error") || !strings.Contains(text, why) || !strings.Contains(text, "agent-sessionizer login claude") {
			t.Errorf("answer without a login = %d %q, want %d with %q", status, text, http.StatusUnauthorized, why)
		}
		if status, got := renew("/v1/oauth/token", refresh); status != http.StatusBadRequest || got["error"] != "invalid_grant" {
			t.Errorf("answer to a refresh without a login = %d %v, want invalid_grant", status, got)
		}
		if err := os.Remove(l.Own); err == nil {
			if _, err = p.g.SetSecrets(bound); err != nil {
				t.Fatal(err)
			}
		}
	}
}
