// Package login keeps the subscription logins of agents on the host: Claude Code's with a Claude
// account, and Codex's with a ChatGPT account. It reads the access token that requests need, and
// refreshes it, once for all sessions.
//
// A login is in the file of the client itself, or, after `agent-sessionizer login`, in a file of
// this program that has the same form. Refreshing replaces the refresh token, so both are changed
// under a lock: that of this program's processes and, for its own file, the client's.
//
// Sources: the clients as published on npm, @anthropic-ai/claude-code 2.1 and @openai/codex 0.169;
// RFC 6749 (OAuth 2.0), 6; RFC 7519 (JSON Web Token).
package login

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// Provider is who issues a login.
type Provider struct {
	Name     string // of the login: claude or codex
	Title    string
	Hosts    []string // that the access token is for
	TokenURL string   // where tokens are refreshed
	clientID string

	authorizeURL string
	redirect     string // where the browser is sent with the code
	scope        string
	authorize    map[string]string // further parameters

	dir    string // of the client, below the home directory
	dirEnv string // the variable with another directory
	file   string // in it
	locks  func(dir string) []string
}

// Claude is the login of Claude Code with a Claude account.
var Claude = Provider{
	Name: "claude", Title: "Claude", Hosts: []string{"api.anthropic.com"},
	TokenURL: "https://platform.claude.com/v1/oauth/token", clientID: "9d1c250a-e61b-44d9-88ed-5944d1962f5e",
	authorizeURL: "https://claude.com/cai/oauth/authorize", redirect: "https://platform.claude.com/oauth/code/callback",
	scope: "user:profile user:inference", authorize: map[string]string{"code": "true"},
	dir: ".claude", dirEnv: "CLAUDE_CONFIG_DIR", file: ".credentials.json",
	locks: func(dir string) []string {
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			return []string{filepath.Join(dir, ".oauth_refresh.lock"), real + ".lock"}
		}
		return nil
	},
}

// Codex is the login of Codex with a ChatGPT account.
var Codex = Provider{
	Name: "codex", Title: "ChatGPT", Hosts: []string{"chatgpt.com"},
	TokenURL: "https://auth.openai.com/oauth/token", clientID: "app_EMoamEEZ73f0CkXaXp7hrann",
	authorizeURL: "https://auth.openai.com/oauth/authorize", redirect: "http://localhost:1455/auth/callback",
	scope: "openid profile email offline_access", authorize: map[string]string{"id_token_add_organizations": "true", "codex_cli_simplified_flow": "true"},
	dir: ".codex", dirEnv: "CODEX_HOME", file: "auth.json",
}

// Providers returns all providers.
func Providers() []Provider { return []Provider{Claude, Codex} }

// Find returns the provider of a login.
func Find(name string) (Provider, error) {
	for _, p := range Providers() {
		if p.Name == name {
			return p, nil
		}
	}
	return Provider{}, fail.New(fail.Usage, "login %q is unknown; use claude or codex", name)
}

const (
	early       = 5 * time.Minute // before the end of a token at which it is refreshed, as the clients do
	maxFile     = 1 << 20         // bytes
	maxAnswer   = 1 << 20         // bytes
	refreshTime = 30 * time.Second
	lockStale   = time.Minute // age at which the clients, too, take over a lock
	lockPoll    = 100 * time.Millisecond
)

// Login is where a login is on this host.
type Login struct {
	Provider string `json:"provider"` // name
	Own      string `json:"own"`      // path of this program's file
	Client   string `json:"client"`   // path of the client's file; "" for none
}

// At returns the login of a provider. dir is this program's directory of logins.
func At(p Provider, dir, home string) Login {
	client := cmp.Or(os.Getenv(p.dirEnv), filepath.Join(home, p.dir))
	return Login{p.Name, filepath.Join(dir, p.Name+".json"), filepath.Join(client, p.file)}
}

// Grant is a login's tokens.
type Grant struct {
	Access  secret.Value
	Expires time.Time // zero if unknown
	// What the client must know about the account, and is not secret.
	Account Account
}

// Account describes the account of a login, as far as its client needs that.
type Account struct {
	ID     string   `json:"id,omitempty"`
	Plan   string   `json:"plan,omitempty"`
	Tier   string   `json:"tier,omitempty"`
	Scopes []string `json:"scopes,omitempty"`
}

// ErrNone is returned when there is no login.
var ErrNone = errors.New("no login")

// RevokedError is returned for a login that the provider does not accept any more.
type RevokedError struct{ Title, Why string }

func (e *RevokedError) Error() string {
	return fmt.Sprintf("%s does not accept the login any more: %s", e.Title, e.Why)
}

// path returns the file that counts.
func (l Login) path() (path string, own bool) {
	if st, err := os.Stat(l.Own); err == nil && st.Mode().IsRegular() {
		return l.Own, true
	}
	return l.Client, false
}

// Path returns the file of the login.
func (l Login) Path() string {
	path, _ := l.path()
	return path
}

// Exists reports whether there is a login, and whether it is this program's.
func (l Login) Exists() (is, own bool) {
	path, own := l.path()
	f, err := l.read(path)
	return err == nil && f.access() != "", own
}

// Account returns what the client must know about the account.
func (l Login) Account() Account {
	path, _ := l.path()
	f, err := l.read(path)
	if err != nil {
		return Account{}
	}
	return f.grant().Account
}

// Grant returns the present tokens. It refreshes them if they end soon, or if the provider has
// refused the access token that the caller has.
func (l Login) Grant(ctx context.Context, refused secret.Value) (Grant, error) {
	p, err := Find(l.Provider)
	if err != nil {
		return Grant{}, err
	}
	path, _ := l.path()
	f, err := l.read(path)
	if err == nil && !f.stale(refused) {
		return f.grant(), nil // without the lock: the file is replaced as a whole
	}
	lock, err := lockfile.Wait(ctx, l.Own+".lock", nil)
	if err != nil {
		return Grant{}, fmt.Errorf("refresh the login of %s: %w", p.Title, err)
	}
	defer lock.Unlock()
	path, own := l.path()
	if !own {
		unlock, err := lockClient(ctx, p, filepath.Dir(path))
		if err != nil {
			return Grant{}, err
		}
		defer unlock()
	}
	if f, err = l.read(path); err != nil {
		return Grant{}, err
	}
	if !f.stale(refused) { // another process was faster
		return f.grant(), nil
	}
	if err := f.write(path); err != nil { // better now than with the only copy of new tokens
		return Grant{}, err
	}
	if err := f.refresh(ctx, p); err != nil {
		return Grant{}, err
	}
	if err := f.write(path); err != nil {
		return Grant{}, err
	}
	return f.grant(), nil
}

// lockClient takes the locks of the client: directories, as those of npm's proper-lockfile.
func lockClient(ctx context.Context, p Provider, dir string) (unlock func(), err error) {
	var held []string
	unlock = func() {
		for _, path := range slices.Backward(held) {
			_ = os.Remove(path) // a lock that is gone was taken over
		}
	}
	if p.locks == nil {
		return unlock, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*lockStale)
	defer cancel()
	for _, path := range p.locks(dir) {
		for {
			err := os.Mkdir(path, 0o700)
			if err == nil {
				held = append(held, path)
				break
			}
			if !errors.Is(err, fs.ErrExist) {
				unlock()
				return nil, fail.New(fail.Host, "lock the login of %s: %w", p.Title, err)
			}
			if st, err := os.Stat(path); err == nil && time.Since(st.ModTime()) > lockStale {
				_ = os.Remove(path) // its holder has died; the next try reports an error
				continue
			}
			select {
			case <-ctx.Done():
				unlock()
				return nil, fail.New(fail.Timeout, "the login of %s is locked by another program: %s", p.Title, path)
			case <-time.After(lockPoll):
			}
		}
	}
	return unlock, nil
}

// file is the content of a login's file. Fields that this program does not know stay.
type file struct {
	provider string
	whole    map[string]json.RawMessage
	tokens   map[string]json.RawMessage // the part of it with the tokens
}

// keys are the names of the fields.
var keys = map[string]struct{ part, access, refresh, id string }{
	"claude": {"claudeAiOauth", "accessToken", "refreshToken", ""},
	"codex":  {"tokens", "access_token", "refresh_token", "id_token"},
}

func (l Login) read(path string) (f file, err error) {
	if path == "" {
		return f, ErrNone
	}
	r, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return f, ErrNone
	}
	if err != nil {
		return f, fail.New(fail.Host, "read the login: %w", err)
	}
	defer r.Close()
	text, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return f, fail.New(fail.Host, "read the login: %w", err)
	}
	f = file{provider: l.Provider, whole: map[string]json.RawMessage{}}
	if len(text) > maxFile || json.Unmarshal(text, &f.whole) != nil {
		return f, fail.New(fail.Secret, "the login in %s cannot be read", path).WithHint("agent-sessionizer login %s", l.Provider)
	}
	part := f.whole[keys[l.Provider].part]
	if len(part) == 0 || string(part) == "null" {
		return f, ErrNone
	}
	if json.Unmarshal(part, &f.tokens) != nil || f.access() == "" {
		return f, fail.New(fail.Secret, "the login in %s cannot be read", path).WithHint("agent-sessionizer login %s", l.Provider)
	}
	return f, nil
}

func (f file) text(key string) string {
	var s string
	_ = json.Unmarshal(f.tokens[key], &s) // otherwise there is none
	return s
}

func (f file) access() string { return f.text(keys[f.provider].access) }

func (f file) expires() time.Time {
	if f.provider == "claude" {
		var ms int64
		if json.Unmarshal(f.tokens["expiresAt"], &ms) == nil && ms > 0 {
			return time.UnixMilli(ms)
		}
		return time.Time{}
	}
	var claims struct {
		Expires int64 `json:"exp"`
	}
	if parseClaims(f.access(), &claims) == nil && claims.Expires > 0 {
		return time.Unix(claims.Expires, 0)
	}
	return time.Time{}
}

// parseClaims reads the payload of a JSON Web Token, without checking its signature.
func parseClaims(token string, into any) error {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return errors.New("not a JSON Web Token")
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// stale reports whether the access token must be refreshed.
func (f file) stale(refused secret.Value) bool {
	if refused.Reveal() != "" && refused.Reveal() == f.access() {
		return true
	}
	end := f.expires()
	return !end.IsZero() && time.Until(end) < early
}

func (f file) grant() Grant {
	g := Grant{Access: secret.NewValue(f.access()), Expires: f.expires()}
	if f.provider == "claude" {
		g.Account.Plan, g.Account.Tier = f.text("subscriptionType"), f.text("rateLimitTier")
		_ = json.Unmarshal(f.tokens["scopes"], &g.Account.Scopes) // otherwise there are none
		return g
	}
	var claims struct {
		Auth struct {
			Account string `json:"chatgpt_account_id"`
			Plan    string `json:"chatgpt_plan_type"`
		} `json:"https://api.openai.com/auth"`
	}
	_ = parseClaims(f.text("id_token"), &claims) // otherwise the file may have it
	g.Account.ID, g.Account.Plan = cmp.Or(f.text("account_id"), claims.Auth.Account), claims.Auth.Plan
	return g
}

// refresh replaces the tokens by new ones.
func (f file) refresh(ctx context.Context, p Provider) error {
	k := keys[p.Name]
	ask := map[string]string{"grant_type": "refresh_token", "refresh_token": f.text(k.refresh), "client_id": cmp.Or(f.text("clientId"), p.clientID)}
	if ask["refresh_token"] == "" {
		return &RevokedError{p.Title, "it has no refresh token"}
	}
	if scopes := f.grant().Account.Scopes; len(scopes) > 0 {
		ask["scope"] = strings.Join(scopes, " ")
	}
	answer, err := post(ctx, p, ask)
	if err != nil {
		return err
	}
	f.set(p, answer)
	return nil
}

// write replaces the file at path, or the one to which it links.
func (f file) write(path string) error {
	part, err := json.Marshal(f.tokens)
	f.whole[keys[f.provider].part] = part
	text, jerr := json.MarshalIndent(f.whole, "", "  ")
	if errors.Join(err, jerr) != nil {
		return errors.New("encode the login") // the error could quote a token
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fail.New(fail.Host, "keep the login: %w", err)
	}
	if err := atomicfile.Write(path, text, 0o600); err != nil {
		return fail.New(fail.Host, "keep the login: %w", err)
	}
	return nil
}

// answer is the answer of a token endpoint (RFC 6749, 5.1).
type answer struct {
	Access  string `json:"access_token"`
	Refresh string `json:"refresh_token"`
	ID      string `json:"id_token"`
	Expires int64  `json:"expires_in"` // seconds
	Scope   string `json:"scope"`
}

func (f file) set(p Provider, a answer) {
	k := keys[p.Name]
	put := func(key string, v any) { f.tokens[key], _ = json.Marshal(v) } // texts and numbers can be encoded, as times below
	put(k.access, a.Access)
	if a.Refresh != "" {
		put(k.refresh, a.Refresh)
	}
	if a.ID != "" && k.id != "" {
		put(k.id, a.ID)
	}
	if p.Name == "claude" {
		put("expiresAt", time.Now().Add(time.Duration(a.Expires)*time.Second).UnixMilli())
	} else {
		f.whole["last_refresh"], _ = json.Marshal(time.Now().UTC())
	}
}

// Client sends requests to the providers. It follows no redirect, which could lead the refresh
// token elsewhere. Only tests change it.
var Client = &http.Client{Timeout: refreshTime, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

// post sends a request to the token endpoint. Errors have no part of the answer but its error code.
func post(ctx context.Context, p Provider, ask map[string]string) (a answer, err error) {
	body, err := json.Marshal(ask)
	if err != nil {
		return a, errors.New("encode the request") // the error could quote a token
	}
	kind := "application/json"
	if p.Name == Codex.Name && ask["grant_type"] == "authorization_code" { // the only one that must be a form
		form := url.Values{}
		for name, value := range ask {
			form.Set(name, value)
		}
		body, kind = []byte(form.Encode()), "application/x-www-form-urlencoded"
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, p.TokenURL, bytes.NewReader(body))
	if err != nil {
		return a, err
	}
	r.Header.Set("Content-Type", kind)
	got, err := Client.Do(r)
	if err != nil {
		return a, fail.New(fail.Host, "log in to %s: %w", p.Title, err)
	}
	defer got.Body.Close()
	text, err := io.ReadAll(io.LimitReader(got.Body, maxAnswer))
	if err != nil {
		return a, fail.New(fail.Host, "log in to %s: %w", p.Title, err)
	}
	switch got.StatusCode {
	case http.StatusOK:
		if json.Unmarshal(text, &a) != nil || a.Access == "" {
			return a, fail.New(fail.Failure, "log in to %s: the answer has no token", p.Title)
		}
		return a, nil
	case http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden:
		return a, &RevokedError{p.Title, errorCode(text, got.Status)}
	}
	return a, fail.New(fail.Failure, "log in to %s: %s", p.Title, got.Status)
}

// errorCode returns the code of an error (RFC 6749, 5.2), or what OpenAI sends instead.
func errorCode(text []byte, status string) string {
	var plain struct {
		Error string `json:"error"`
	}
	var nested struct {
		Error struct {
			Code string `json:"code"`
		} `json:"error"`
	}
	_, _ = json.Unmarshal(text, &plain), json.Unmarshal(text, &nested) // otherwise the status says what there is
	code := cmp.Or(plain.Error, nested.Error.Code)
	if code == "" || len(code) > 64 || strings.ContainsFunc(code, func(c rune) bool { return c != '_' && (c < 'a' || c > 'z') }) {
		return status
	}
	return code
}

// Secrets returns the tokens in the files of the login, so that they can be found in other texts.
func (l Login) Secrets() (all []secret.Value) {
	for _, path := range []string{l.Own, l.Client} {
		f, err := l.read(path)
		if err != nil {
			continue
		}
		names := keys[l.Provider]
		for _, key := range []string{names.access, names.refresh, names.id} {
			if token := f.text(key); token != "" {
				all = append(all, secret.NewValue(token))
			}
		}
	}
	return all
}
