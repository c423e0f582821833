package login

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// issuer is a scripted provider. Each refresh token works once.
type issuer struct {
	provider *Provider
	status   atomic.Int64 // of the next answers, unless it is 0
	issued   atomic.Int64

	mu    sync.Mutex
	valid string // the refresh token
}

func newIssuer(t *testing.T, p *Provider) *issuer {
	i := &issuer{provider: p, valid: "refresh-0"}
	s := httptest.NewServer(i)
	before := p.TokenURL
	p.TokenURL = s.URL + "/token"
	t.Cleanup(func() { s.Close(); p.TokenURL = before })
	return i
}

func (i *issuer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var ask map[string]string
	if err := json.NewDecoder(r.Body).Decode(&ask); err != nil || ask["client_id"] != i.provider.clientID || ask["grant_type"] != "refresh_token" {
		http.Error(w, "{}", http.StatusTeapot)
		return
	}
	if status := i.status.Load(); status != 0 {
		w.WriteHeader(int(status))
		fmt.Fprint(w, `{"error":"server_error"}`)
		return
	}
	if ask["refresh_token"] != i.valid {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, `{"error":"invalid_grant","error_description":"`+ask["refresh_token"]+`"}`)
		return
	}
	n := i.issued.Add(1)
	i.valid = fmt.Sprintf("refresh-%d", n)
	access := fmt.Sprintf("access-%d", n)
	if i.provider.Name == "codex" {
		access = token(map[string]any{"exp": time.Now().Add(time.Hour).Unix(), "n": n})
	}
	json.NewEncoder(w).Encode(map[string]any{"access_token": access, "refresh_token": i.valid, "expires_in": 3600})
}

// token returns a JSON Web Token with claims.
func token(claims map[string]any) string {
	text, _ := json.Marshal(claims)
	return "e30." + base64.RawURLEncoding.EncodeToString(text) + ".c2ln"
}

// logged writes the client's file of a login that ends then.
func logged(t *testing.T, p Provider, end time.Time) Login {
	t.Helper()
	home := t.TempDir()
	t.Setenv(p.dirEnv, "")
	l := At(p, filepath.Join(home, "logins"), home)
	text := fmt.Sprintf(`{"mcpOAuth":{"x":[1,2]},"claudeAiOauth":{"accessToken":"access-0","refreshToken":"refresh-0","expiresAt":%d,"scopes":["user:inference"],"subscriptionType":"max","rateLimitTier":"big","unknown":{"a":1}}}`, end.UnixMilli())
	if p.Name == "codex" {
		id := token(map[string]any{"https://api.openai.com/auth": map[string]any{"chatgpt_plan_type": "pro"}})
		text = fmt.Sprintf(`{"OPENAI_API_KEY":null,"auth_mode":"chatgpt","tokens":{"id_token":%q,"access_token":%q,"refresh_token":"refresh-0","account_id":"acc"},"last_refresh":"2026-01-02T03:04:05Z"}`,
			id, token(map[string]any{"exp": end.Unix()}))
	}
	write(t, l.Client, text)
	return l
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func content(t *testing.T, path string) (whole map[string]any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &whole)
	}
	if err != nil {
		t.Fatal(err)
	}
	return whole
}

func TestGrant(t *testing.T) {
	for _, p := range []*Provider{&Claude, &Codex} {
		t.Run(p.Name, func(t *testing.T) {
			i := newIssuer(t, p)
			l := logged(t, *p, time.Now().Add(time.Hour))
			if is, own := l.Exists(); !is || own {
				t.Errorf("Exists = %t, own %t, want the client's login", is, own)
			}
			want := map[string]Account{
				"claude": {Plan: "max", Tier: "big", Scopes: []string{"user:inference"}},
				"codex":  {ID: "acc", Plan: "pro"},
			}[p.Name]
			fresh, err := l.Grant(t.Context(), secret.Value{})
			if err != nil || fresh.Access.Reveal() == "" || i.issued.Load() != 0 {
				t.Fatalf("Grant of a login that lasts = %v, %d refreshed, want none", err, i.issued.Load())
			}
			if diff := cmp.Diff(want, fresh.Account); diff != "" {
				t.Errorf("account mismatch (-want +got):\n%s", diff)
			}
			// One that the provider refused is refreshed, once.
			before := content(t, l.Client)
			for range 2 {
				again, err := l.Grant(t.Context(), fresh.Access)
				if err != nil || again.Access.Reveal() == fresh.Access.Reveal() || i.issued.Load() != 1 || time.Until(again.Expires) < 50*time.Minute {
					t.Fatalf("Grant after a refusal = %v, %d refreshed, until %v, want one for an hour", err, i.issued.Load(), again.Expires)
				}
			}
			// The client's other fields stay.
			after := content(t, l.Client)
			k := keys[p.Name]
			changed := []string{k.access, k.refresh, "expiresAt"}
			for _, c := range []map[string]any{before, after} {
				part, _ := c[k.part].(map[string]any)
				for _, key := range changed {
					delete(part, key)
				}
				delete(c, "last_refresh")
			}
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("other fields mismatch (-before +after):\n%s", diff)
			}
			if st, err := os.Stat(l.Client); err != nil || st.Mode().Perm() != 0o600 {
				t.Errorf("mode = %v, %v, want 0600", st.Mode(), err)
			}
		})
	}
}

// However many sessions need a new token at once, it is refreshed once.
func TestRefreshRace(t *testing.T) {
	i := newIssuer(t, &Claude)
	l := logged(t, Claude, time.Now().Add(time.Minute))
	var wait sync.WaitGroup
	for range 5 {
		wait.Go(func() {
			g, err := l.Grant(t.Context(), secret.Value{})
			if err != nil || g.Access.Reveal() != "access-1" {
				t.Errorf("Grant = %q, %v, want access-1", g.Access.Reveal(), err)
			}
		})
	}
	wait.Wait()
	if n := i.issued.Load(); n != 1 {
		t.Errorf("refreshed %d times, want once", n)
	}
}

// The client refreshes under its own lock; what it wrote is used.
func TestClientsLock(t *testing.T) {
	i := newIssuer(t, &Claude)
	l := logged(t, Claude, time.Now())
	lock := filepath.Join(filepath.Dir(l.Client), ".oauth_refresh.lock")
	if err := os.Mkdir(lock, 0o700); err != nil {
		t.Fatal(err)
	}
	done := make(chan string, 1)
	go func() {
		g, err := l.Grant(t.Context(), secret.Value{})
		done <- fmt.Sprint(g.Access.Reveal(), err)
	}()
	select {
	case got := <-done:
		t.Fatalf("Grant under the client's lock = %s, want it to wait", got)
	case <-time.After(300 * time.Millisecond):
	}
	write(t, l.Client, fmt.Sprintf(`{"claudeAiOauth":{"accessToken":"client","refreshToken":"r","expiresAt":%d}}`, time.Now().Add(time.Hour).UnixMilli()))
	if err := os.Remove(lock); err != nil {
		t.Fatal(err)
	}
	if got := <-done; got != "client<nil>" || i.issued.Load() != 0 {
		t.Errorf("Grant after the client refreshed = %s, %d refreshed, want the client's token", got, i.issued.Load())
	}
	// The lock of a client that has died is taken over.
	write(t, l.Client, `{"claudeAiOauth":{"accessToken":"old","refreshToken":"refresh-0","expiresAt":1}}`)
	if err := os.Mkdir(lock, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(lock, time.Time{}, time.Now().Add(-2*lockStale)); err != nil {
		t.Fatal(err)
	}
	if g, err := l.Grant(t.Context(), secret.Value{}); err != nil || g.Access.Reveal() != "access-1" {
		t.Errorf("Grant with an old lock = %q, %v, want access-1", g.Access.Reveal(), err)
	}
	if _, err := os.Stat(lock); err == nil {
		t.Error("the lock is still there")
	}
}

// This program's own login counts first, and leaves the client's alone.
func TestOwnLogin(t *testing.T) {
	newIssuer(t, &Claude)
	l := logged(t, Claude, time.Now())
	before := content(t, l.Client)
	write(t, l.Own, `{"claudeAiOauth":{"accessToken":"own","refreshToken":"refresh-0","expiresAt":1}}`)
	if g, err := l.Grant(t.Context(), secret.Value{}); err != nil || g.Access.Reveal() != "access-1" {
		t.Errorf("Grant = %q, %v, want access-1", g.Access.Reveal(), err)
	}
	if diff := cmp.Diff(before, content(t, l.Client)); diff != "" {
		t.Errorf("the client's file changed (-before +after):\n%s", diff)
	}
}

func TestLinkedFile(t *testing.T) {
	newIssuer(t, &Claude)
	l := logged(t, Claude, time.Now())
	target := filepath.Join(t.TempDir(), "credentials")
	if err := errors.Join(os.Rename(l.Client, target), os.Symlink(target, l.Client)); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Grant(t.Context(), secret.Value{}); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Lstat(l.Client); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the client's file is %v, %v, want still a link", st, err)
	}
	if text, err := os.ReadFile(target); err != nil || !strings.Contains(string(text), "access-1") {
		t.Errorf("the target of the link has %q, %v, want the new token", text, err)
	}
}

// The provider accepts a refresh token once, so no refresh begins whose result cannot be kept.
func TestTokensThatCannotBeKept(t *testing.T) {
	i := newIssuer(t, &Claude)
	l := logged(t, Claude, time.Now())
	was := l.Client
	l.Client = filepath.Join(filepath.Dir(was), strings.Repeat("n", 250)) // a temporary name is longer than names can be
	if err := os.Rename(was, l.Client); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Grant(t.Context(), secret.Value{}); fail.CodeOf(err) != fail.Host || i.issued.Load() != 0 {
		t.Errorf("Grant = %v after %d refreshes, want an error of the host before any", err, i.issued.Load())
	}
}

func TestTrouble(t *testing.T) {
	i := newIssuer(t, &Claude)
	l := logged(t, Claude, time.Now())
	before := content(t, l.Client)
	for status, want := range map[int64]fail.Code{500: fail.Failure, 429: fail.Failure, 302: fail.Failure} {
		i.status.Store(status)
		if _, err := l.Grant(t.Context(), secret.Value{}); fail.CodeOf(err) != want || errors.As(err, new(*RevokedError)) {
			t.Errorf("Grant with status %d = %v, want code %s", status, err, want)
		}
	}
	i.status.Store(0)
	i.valid = "another"
	_, err := l.Grant(t.Context(), secret.Value{})
	if revoked, ok := errors.AsType[*RevokedError](err); !ok || revoked.Why != "invalid_grant" || strings.Contains(err.Error(), "refresh-0") {
		t.Errorf("Grant of a revoked login = %v, want a RevokedError without a token", err)
	}
	if diff := cmp.Diff(before, content(t, l.Client)); diff != "" {
		t.Errorf("the file changed (-before +after):\n%s", diff)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := l.Grant(ctx, secret.Value{}); err == nil {
		t.Error("Grant of an ended context = nil, want an error")
	}
	for _, text := range []string{"", "{", `[]`, `{"claudeAiOauth":7}`, `{"claudeAiOauth":{"accessToken":""}}`, strings.Repeat(" ", maxFile+1)} {
		write(t, l.Client, text)
		if _, err := l.Grant(t.Context(), secret.Value{}); fail.CodeOf(err) != fail.Secret || fail.HintOf(err) == "" {
			t.Errorf("Grant of %.30q = %v, want an error with a hint", text, err)
		}
		if is, _ := l.Exists(); is {
			t.Errorf("Exists of %.30q = true", text)
		}
	}
	for _, text := range []string{`{}`, `{"claudeAiOauth":null}`} {
		write(t, l.Client, text)
		if _, err := l.Grant(t.Context(), secret.Value{}); !errors.Is(err, ErrNone) {
			t.Errorf("Grant of %s = %v, want no login", text, err)
		}
	}
	if err := os.Remove(l.Client); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Grant(t.Context(), secret.Value{}); !errors.Is(err, ErrNone) {
		t.Errorf("Grant without a file = %v, want no login", err)
	}
}
