package server

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// A browser that logged in to the dashboard has a cookie and a key, and every request needs
// both. Other programs on this host can get the cookie, because browsers send cookies to all
// ports of a host; the key is kept where only pages of this address and port can read it. A
// page of another site can have its request carry the cookie, but not the key.
const (
	keyHeader  = "X-Dashboard-Key"
	cookieName = "agent_sessionizer"

	// A browser cannot add headers to a WebSocket, but can offer protocols: this one, which
	// the server selects, and keyProtocol with the key.
	socketProtocol = "agent-sessionizer"
	keyProtocol    = "key."
)

const (
	linkTime     = time.Minute
	loginIdle    = 12 * time.Hour
	maxLinks     = 16  // unused ones; the oldest is dropped
	maxLogins    = 256 // of all users
	maxLoginsOf  = 64  // of one token, or of this user; the one used longest ago is ended
	maxCookies   = 8   // of that name in one request; another program on the host may have set some
	maxLoginBody = 4 << 10
)

// logins are the browsers that logged in to the dashboard, and the links with which others may.
// They are in memory only: after a restart of serve, users log in again.
type logins struct {
	mu    sync.Mutex
	base  string           // URL of the server for browsers; "" if it has no address
	links map[string]link  // by the digest of the code
	all   map[string]login // by the digest of the key
	now   func() time.Time
}

type link struct {
	who     principal
	expires time.Time
}

type login struct {
	who    principal
	cookie string // digest
	used   time.Time
}

func newLogins() *logins {
	return &logins{links: map[string]link{}, all: map[string]login{}, now: time.Now}
}

// scheme returns the start of the server's URLs.
func (d endpoint) scheme() string {
	if d.tls {
		return "https://"
	}
	return "http://"
}

// base returns the URL that a browser on this host opens.
func (d endpoint) base() string {
	name := d.ip.String()
	if d.cert != nil && d.cert.VerifyHostname(name) != nil { // browsers would refuse it
		for _, other := range d.cert.DNSNames {
			if !strings.Contains(other, "*") {
				name = other
				break
			}
		}
	}
	return d.scheme() + net.JoinHostPort(name, d.port)
}

func (d endpoint) cookie() string {
	if d.tls {
		return "__Host-" + cookieName // browsers accept it only over TLS and for the whole host
	}
	return cookieName
}

func newSecret() string {
	b := make([]byte, tokenBytes)
	_, _ = rand.Read(b) // documented never to fail
	return base64.RawURLEncoding.EncodeToString(b)
}

// createLink returns a link that logs a browser in as who, once.
func (l *logins) createLink(who principal) (ops.DashboardLink, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.base == "" {
		return ops.DashboardLink{}, fail.New(fail.Conflict, "serve has no address that a browser can open").WithHint("agent-sessionizer serve --listen 127.0.0.1:8122")
	}
	now := l.now()
	oldest := ""
	for code, other := range l.links {
		if now.After(other.expires) {
			delete(l.links, code)
		} else if oldest == "" || other.expires.Before(l.links[oldest].expires) {
			oldest = code
		}
	}
	if len(l.links) >= maxLinks {
		delete(l.links, oldest)
	}
	code := newSecret()
	made := link{who, now.Add(linkTime)}
	l.links[digest(code)] = made
	return ops.DashboardLink{URL: l.base + dashboardPath + "#code=" + code, ExpiresAt: made.expires.UTC().Truncate(time.Second)}, nil
}

// redeem returns who made the link with that code, and ends the link.
func (l *logins) redeem(code string) (principal, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sum := digest(code)
	found, ok := l.links[sum]
	delete(l.links, sum)
	return found.who, ok && !l.now().After(found.expires)
}

// add logs a browser in, and returns its cookie and key.
func (l *logins) add(who principal) (cookie, key string, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest, n := "", 0
	for sum, other := range l.all {
		switch {
		case l.expired(other):
			delete(l.all, sum)
		case other.who.Name == who.Name && other.who.token == who.token:
			if n++; oldest == "" || other.used.Before(l.all[oldest].used) {
				oldest = sum
			}
		}
	}
	if n >= maxLoginsOf {
		delete(l.all, oldest)
	}
	if len(l.all) >= maxLogins {
		return "", "", false
	}
	cookie, key = newSecret(), newSecret()
	who.login = digest(key)
	l.all[who.login] = login{who: who, cookie: digest(cookie), used: l.now()}
	return cookie, key, true
}

func (l *logins) expired(one login) bool { return l.now().Sub(one.used) >= loginIdle }

// find returns the login with that key and one of the cookies, and records its use.
func (l *logins) find(key string, cookies []*http.Cookie) (principal, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sum := digest(key)
	one, ok := l.all[sum]
	if !ok || l.expired(one) {
		return principal{}, false
	}
	for _, c := range cookies[:min(len(cookies), maxCookies)] {
		if subtle.ConstantTimeCompare([]byte(digest(c.Value)), []byte(one.cookie)) == 1 {
			one.used = l.now()
			l.all[sum] = one
			return one.who, true
		}
	}
	return principal{}, false
}

// active reports whether a login has not ended. It does not count as a use.
func (l *logins) active(sum string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	one, ok := l.all[sum]
	return ok && !l.expired(one)
}

func (l *logins) end(sum string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all, sum)
}

// dashboardLogin authenticates a browser that has logged in to the dashboard.
func (s *Server) dashboardLogin(req *request) *Problem {
	r := req.r
	key, socket := r.Header.Get(keyHeader), strings.EqualFold(r.Header.Get("Upgrade"), "websocket")
	if socket {
		key = offeredKey(r.Header.Get("Sec-Websocket-Protocol"))
	}
	cookies := r.CookiesNamed(req.at.cookie())
	if key != "" && req.at.isAmbiguous(r.Host) {
		return ambiguousHost(req)
	}
	switch {
	case key == "" && r.URL.Path == sessionPath: // a page that asks whether it has to log in
		return unauthorized("this browser is not logged in to the dashboard")
	case key == "" && len(cookies) == 0:
		return s.denied(req, "no token was sent")
	case key == "" || len(key) > maxTokenLen || len(cookies) == 0:
		return s.denied(req, "a request from the dashboard needs its cookie and its key")
	}
	// The check of a request's origin lets a request without one pass.
	if r.Header.Get("Origin") == "" && (socket || r.Method != http.MethodGet && r.Method != http.MethodHead) {
		return problem(http.StatusForbidden, codeForbidden, "call the API with a token", "a change from the dashboard must have its origin")
	}
	who, ok := s.logins.find(key, cookies)
	if !ok {
		return s.denied(req, "the login to the dashboard has ended")
	}
	if who.token != "" {
		t, found, err := s.tokens.withDigest(who.token)
		if err != nil {
			return s.tokensUnreadable(req, err)
		}
		if !found {
			s.logins.end(who.login)
			return s.denied(req, "the token of this login was removed")
		}
		login := who.login
		who = principalOf(t) // its scope now
		who.login = login
	}
	req.who = who
	return nil
}

func ambiguousHost(req *request) *Problem {
	return problem(http.StatusForbidden, codeForbidden, "open "+req.at.base()+dashboardPath, "the dashboard must be opened by its address, not as localhost")
}

// offeredKey returns the key in the protocols that a WebSocket offers.
func offeredKey(protocols string) string {
	for p := range strings.SplitSeq(protocols, ",") {
		if key, ok := strings.CutPrefix(strings.TrimSpace(p), keyProtocol); ok {
			return key
		}
	}
	return ""
}

type loginInput struct {
	Body struct {
		Code  string `json:"code,omitempty" maxLength:"256" doc:"The code of a link."`
		Token string `json:"token,omitempty" maxLength:"256" doc:"A token of the API, instead of a code."`
	}
}

// DashboardLogin describes a browser that logged in to the dashboard.
type DashboardLogin struct {
	Key       string    `json:"key,omitempty" doc:"Only in the answer to a login. Every request must have it as X-Dashboard-Key, besides the cookie."`
	Name      string    `json:"name" doc:"Whose login it is."`
	Scope     ops.Scope `json:"scope" enum:"read,submit,admin"`
	ExpiresAt time.Time `json:"expires_at" doc:"When the login ends unless it is used."`
}

type loginOutput struct {
	SetCookie http.Cookie `header:"Set-Cookie"`
	Body      DashboardLogin
}

type logoutOutput struct {
	SetCookie http.Cookie `header:"Set-Cookie"`
}

func (s *Server) dashboardRoutes(api huma.API, mux *http.ServeMux) {
	serve(s, api, ops.CreateDashboardLink)
	register(s, api, route{Spec: ops.Spec{
		ID: "loginDashboard", Method: http.MethodPost, Path: loginPath, Tag: "dashboard",
		Summary: "Log a browser in to the dashboard",
		About:   "Needs a code or a token in its body. The answer has a cookie and a key; every later request needs both.",
	}}, s.login)
	register(s, api, route{Spec: ops.Spec{
		ID: "logoutDashboard", Method: http.MethodPost, Path: logoutPath, Tag: "dashboard", Need: ops.Read, Status: http.StatusNoContent,
		Summary: "Log this browser out of the dashboard, and end its streams and terminals",
	}}, func(ctx context.Context, _ *struct{}) (*logoutOutput, error) {
		req := requestOf(ctx)
		s.logins.end(req.who.login)
		c := req.at.loginCookie("")
		c.MaxAge = -1
		return &logoutOutput{c}, nil
	})
	register(s, api, route{Spec: ops.Spec{
		ID: "getDashboardLogin", Method: http.MethodGet, Path: sessionPath, Tag: "dashboard", Need: ops.Read,
		Summary: "Get who this browser is logged in as",
	}}, func(ctx context.Context, _ *struct{}) (*output[DashboardLogin], error) {
		return &output[DashboardLogin]{s.describeLogin(requestOf(ctx).who)}, nil
	})
	mux.HandleFunc("GET "+dashboardPath+"{name...}", s.servePage)
	mux.Handle("GET /{$}", http.RedirectHandler(dashboardPath, http.StatusFound))
}

func (s *Server) describeLogin(who principal) DashboardLogin {
	return DashboardLogin{Name: who.Name, Scope: who.Scope, ExpiresAt: s.logins.now().Add(loginIdle).UTC().Truncate(time.Second)}
}

// login logs a browser in, with the code of a link or with a token.
func (s *Server) login(ctx context.Context, in *loginInput) (*loginOutput, error) {
	req := requestOf(ctx)
	if req.at.isAmbiguous(req.r.Host) {
		return nil, ambiguousHost(req)
	}
	var who principal
	switch {
	case in.Body.Code != "" && in.Body.Token == "":
		var ok bool
		if who, ok = s.logins.redeem(in.Body.Code); !ok {
			return nil, s.denied(req, "the link was used before, or is older than a minute").withHint("agent-sessionizer dashboard")
		}
	case in.Body.Token != "" && in.Body.Code == "":
		t, found, err := s.tokens.find(in.Body.Token)
		if err != nil {
			return nil, s.tokensUnreadable(req, err)
		}
		if !found {
			return nil, s.denied(req, "unknown token").withHint("agent-sessionizer serve token add NAME --scope admin")
		}
		who = principalOf(t)
	default:
		return nil, problem(http.StatusBadRequest, codeInvalid, seeDocs, "a login needs a code or a token")
	}
	cookie, key, ok := s.logins.add(who)
	if !ok {
		return nil, problem(http.StatusTooManyRequests, codeTooMany, "log out elsewhere", "too many browsers are logged in").with("Retry-After", "60")
	}
	req.who.Name = who.Name // for the log
	if write := s.tasks.Sessions.Audit; write != nil {
		write(ctx, audit.Record{Type: audit.DashboardOpened, Actor: who.Name, Resource: "dashboard", Outcome: audit.Success})
	}
	out := &loginOutput{req.at.loginCookie(cookie), s.describeLogin(who)}
	out.Body.Key = key
	return out, nil
}

func (d endpoint) loginCookie(value string) http.Cookie {
	return http.Cookie{Name: d.cookie(), Value: value, Path: "/", HttpOnly: true, Secure: d.tls, SameSite: http.SameSiteStrictMode}
}

// createDashboardLink makes a link that logs a browser in as the client of the request.
func (s *Server) createDashboardLink(ctx context.Context, caller ops.Caller) (ops.DashboardLink, error) {
	who := principal{Caller: caller}
	if req, ok := ctx.Value(requestKey{}).(*request); ok {
		who.token = req.who.token
	}
	return s.logins.createLink(who)
}
