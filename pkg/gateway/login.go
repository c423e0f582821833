package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway/intercept"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/meter"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

const (
	loginTime  = time.Minute      // to get a token, with the wait for other processes
	loginPause = 30 * time.Second // after a failure
	// A guest can make a provider refuse its requests, and so cause that the token is refreshed.
	renewPause = 5 * time.Minute
	loginEarly = 5 * time.Minute // before the end of a token at which another is read
	// How long the client in the guest believes that its placeholder lasts.
	placeholderLife = 365 * 24 * time.Hour
	maxRefresh      = 64 << 10 // bytes of the client's request
)

// loginToken is the state of a login's access token.
type loginToken struct {
	expires time.Time // zero if unknown
	tried   time.Time // when it was last read
	renewed time.Time // when that was because the provider had refused it
	refused bool      // by the provider
}

// due reports whether the token must be read again.
func (s Secret) due(at time.Time) bool {
	t := s.token
	switch {
	case s.Login == nil:
		return false
	case t.tried.IsZero():
		return true
	case t.refused:
		return at.Sub(t.renewed) >= renewPause
	case at.Sub(t.tried) < loginPause:
		return false
	}
	return s.Problem != "" || !t.expires.IsZero() && t.expires.Sub(at) < loginEarly
}

// RefreshName returns the name of the placeholder for a login's refresh token.
func RefreshName(name string) string { return name + " refresh token" }

// RefreshMark is part of the placeholders of refresh tokens, by which the guest recognizes them.
const RefreshMark = "agent-sessionizer-"

// addRefresh adds a placeholder for the login's refresh token, which nothing replaces.
func (x *interception) addRefresh(was *interception, s Secret) {
	name := RefreshName(s.Name)
	text := ""
	if was != nil {
		text = was.placeholders[name]
	}
	if text == "" {
		text = placeholder(RefreshMark)
	}
	x.placeholders[name] = text
	if host, _ := tokenEndpoint(s); host != "" {
		x.bound[host] = append(x.bound[host], intercept.Bound{Name: name, Placeholder: text, Problem: "it stays on the host"})
	}
}

// tokenEndpoint returns where the client of a login refreshes its tokens.
func tokenEndpoint(s Secret) (host, path string) {
	if s.Login == nil {
		return "", ""
	}
	p, err := login.Find(s.Login.Provider)
	if err != nil {
		return "", ""
	}
	u, err := url.Parse(p.TokenURL)
	if err != nil {
		return "", ""
	}
	return u.Hostname(), u.Path
}

// freshen reads the tokens of the logins that requests to a host need, if that is due.
func (g *Gateway) freshen(ctx context.Context, host string) {
	needed := func(s Secret) bool {
		return s.due(time.Now()) && slices.ContainsFunc(s.Hosts, func(p string) bool { return intercept.Matches(p, host) })
	}
	if x := g.intercepted.Load(); x == nil || !slices.ContainsFunc(x.secrets, needed) {
		return
	}
	g.loginMu.Lock()
	defer g.loginMu.Unlock()
	x := g.intercepted.Load()
	if x == nil {
		return
	}
	for _, s := range x.secrets {
		if needed(s) {
			g.readLogin(ctx, s)
		}
	}
}

// readLogin reads a login's token, and replaces that of the secret.
func (g *Gateway) readLogin(ctx context.Context, s Secret) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loginTime) // others need it too
	defer cancel()
	var refused secret.Value
	if s.token.refused {
		refused = s.Value
	}
	grant, err := s.Login.Grant(ctx, refused)
	g.interceptMu.Lock()
	defer g.interceptMu.Unlock()
	was := g.intercepted.Load()
	if was == nil {
		return
	}
	now := slices.Clone(was.secrets)
	i := slices.IndexFunc(now, func(o Secret) bool { return o.Name == s.Name && o.Login != nil })
	if i < 0 {
		return
	}
	now[i].token = loginToken{expires: grant.Expires, tried: time.Now(), renewed: s.token.renewed}
	if s.token.refused {
		now[i].token.renewed = time.Now()
	}
	if now[i].Value, now[i].Problem = grant.Access, ""; err != nil {
		now[i].Problem = loginProblem(err, s.Login.Provider)
	}
	_, _ = g.intercept(now, was.ruled) // the hosts are the same, so no authority is made
}

// loginProblem returns why a login has no token, for the user of the guest.
func loginProblem(err error, name string) string {
	text := err.Error()
	if _, revoked := errors.AsType[*login.RevokedError](err); revoked || errors.Is(err, login.ErrNone) {
		text += "; on the host: agent-sessionizer login " + name
	}
	return text
}

// loginRefused records that the provider has refused the token of a login.
func (g *Gateway) loginRefused(host string) {
	g.interceptMu.Lock()
	defer g.interceptMu.Unlock()
	was := g.intercepted.Load()
	if was == nil {
		return
	}
	now, changed := slices.Clone(was.secrets), false
	for i, s := range now {
		if s.Login != nil && s.Problem == "" && !s.token.refused && slices.ContainsFunc(s.Hosts, func(p string) bool { return intercept.Matches(p, host) }) {
			now[i].token.refused, changed = true, true
		}
	}
	if changed {
		_, _ = g.intercept(now, was.ruled) // the hosts are the same, so no authority is made
	}
}

// answerRefresh answers requests to the host where the client of a login refreshes its tokens: the
// gateway does that on the host, and the client keeps its placeholders.
func (g *Gateway) answerRefresh(rw http.ResponseWriter, r *http.Request, host string) (answered bool) {
	x := g.intercepted.Load()
	if x == nil {
		return false
	}
	i := slices.IndexFunc(x.secrets, func(s Secret) bool { h, _ := tokenEndpoint(s); return h == host })
	if i < 0 {
		return false
	}
	s := x.secrets[i]
	answer := func(status int, v map[string]any) {
		rw.Header().Set("Content-Type", "application/json")
		rw.Header().Set("Cache-Control", "no-store")
		rw.WriteHeader(status)
		_ = json.NewEncoder(rw).Encode(v) // the client may be gone
	}
	_, path := tokenEndpoint(s)
	text, err := io.ReadAll(io.LimitReader(r.Body, maxRefresh))
	if err != nil {
		return true
	}
	if r.Method != http.MethodPost || r.URL.Path != path || refreshToken(text) != x.placeholders[RefreshName(s.Name)] {
		answer(http.StatusForbidden, map[string]any{"error": "access_denied", "error_description": "agent-sessionizer: this session uses the login of its host"})
		return true
	}
	g.loginRefused(s.Hosts[0])
	g.freshen(r.Context(), s.Hosts[0])
	x = g.intercepted.Load()
	if i = slices.IndexFunc(x.secrets, func(o Secret) bool { return o.Name == s.Name }); i < 0 || x.secrets[i].Problem != "" {
		problem := "it is gone"
		if i >= 0 {
			problem = x.secrets[i].Problem
		}
		answer(http.StatusBadRequest, map[string]any{"error": "invalid_grant", "error_description": "agent-sessionizer: " + clean(problem)})
		return true
	}
	answer(http.StatusOK, map[string]any{
		"token_type": "Bearer", "access_token": x.placeholders[s.Name], "refresh_token": x.placeholders[RefreshName(s.Name)],
		"expires_in": int64(placeholderLife.Seconds()),
	})
	return true
}

// refreshToken returns the refresh token in a request, as JSON or as a form (RFC 6749, 6).
func refreshToken(body []byte) string {
	var ask struct {
		Token string `json:"refresh_token"`
	}
	if json.Unmarshal(body, &ask) == nil {
		return ask.Token
	}
	form, err := url.ParseQuery(string(body))
	if err != nil {
		return ""
	}
	return form.Get("refresh_token")
}

// loginRefusal returns the error of a request whose login has no token, in the form of the
// provider: the client then asks to log in again.
func (g *Gateway) loginRefusal(host string, missing *intercept.MissingError) *refusal {
	x := g.intercepted.Load()
	if x == nil || !slices.ContainsFunc(x.secrets, func(s Secret) bool { return s.Login != nil && s.Name == missing.Name }) {
		return nil
	}
	provider := meter.OpenAI
	if host == "api.anthropic.com" {
		provider = meter.Anthropic
	}
	return &refusal{provider, http.StatusUnauthorized, "authentication_error", missing.Problem}
}
