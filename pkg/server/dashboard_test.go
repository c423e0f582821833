package server

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/coder/websocket"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// browser is a browser that logged in to the dashboard.
type browser struct {
	*rig
	cookie string // NAME=VALUE
	key    string
}

// link returns the code of a new link, made by this user.
func (r *rig) link() string {
	r.t.Helper()
	var l ops.DashboardLink
	r.get(call{method: http.MethodPost, path: ops.CreateDashboardLink.Path, socket: true}, &l)
	_, code, ok := strings.Cut(l.URL, "/dashboard/#code=")
	if !ok {
		r.t.Fatalf("link = %s, want a code", l.URL)
	}
	return code
}

func loginCall(body string) call {
	return call{method: http.MethodPost, path: loginPath, body: body, header: []string{"Content-Type", "application/json"}, as: "-"}
}

// logInWith logs a browser in with a code or a token.
func (r *rig) logInWith(body string) *browser {
	r.t.Helper()
	var l DashboardLogin
	resp := r.get(loginCall(body), &l)
	cookie, rest, _ := strings.Cut(resp.Header.Get("Set-Cookie"), ";")
	if rest != " Path=/; HttpOnly; SameSite=Strict" || !strings.HasPrefix(cookie, cookieName+"=") || len(l.Key) < 40 || l.ExpiresAt.Sub(r.logins.now()) > loginIdle {
		r.t.Fatalf("login = %+v with the cookie %q, want a key and a strict cookie for the whole host", l, resp.Header.Get("Set-Cookie"))
	}
	return &browser{r, cookie, l.Key}
}

func (r *rig) logIn() *browser {
	r.t.Helper()
	return r.logInWith(`{"code":"` + r.link() + `"}`)
}

// as adds what the browser sends with a request of its page.
func (b *browser) as(c call) call {
	c.as = "-"
	c.header = append(slices.Clone(c.header), "Cookie", b.cookie, keyHeader, b.key, "Sec-Fetch-Site", "same-origin")
	if c.method != "" && c.method != http.MethodGet {
		c.header = append(c.header, "Origin", "http://"+b.addr)
	}
	return c
}

func (b *browser) do(c call) (*http.Response, []byte) {
	b.t.Helper()
	return b.rig.do(b.as(c))
}

// status returns the status of a request of the browser's page.
func (b *browser) status(c call) int {
	b.t.Helper()
	resp, _ := b.do(c)
	return resp.StatusCode
}

var whoami = call{path: sessionPath}

// A browser logs in with a link or a token, and may then do what their owner may.
func TestDashboardLogin(t *testing.T) {
	r := newRig(t, Limits{})
	var records []audit.Record
	r.tasks.Sessions.Audit = func(_ context.Context, rec audit.Record) { records = append(records, rec) }
	mine, reader := r.logIn(), r.logInWith(`{"token":"`+r.token[ops.Read]+`"}`)
	if len(records) != 2 || records[0].Type != audit.DashboardOpened || records[0].Actor != r.user || records[1].Actor != "token:read" {
		t.Errorf("audit records = %+v, want one for each login", records)
	}
	const id = "eeee11112222"
	r.session(id)
	for _, c := range []struct {
		call
		mine, reader int
	}{
		{whoami, 200, 200},
		{call{path: ops.SessionsPath}, 200, 200},
		{call{path: ops.GetOverview.Path}, 200, 200},
		{call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/stop"}, 202, 403},
		{call{method: http.MethodPost, path: ops.CreateDashboardLink.Path}, 200, 403},
		{call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/exec", body: `{"argv":["id"]}`, header: []string{"Content-Type", "application/json"}}, 202, 403},
		{call{method: http.MethodPost, path: ops.QuestionsPath + "/0123456789ab/respond", body: `{"answer":"allow"}`, header: []string{"Content-Type", "application/json"}}, 404, 403},
		{call{path: "/ws/sessions/" + id + "/terminal"}, 409, 403},
		{call{path: "/ws/sessions/" + id + "/ssh"}, 409, 403},
		{call{method: http.MethodPost, path: ops.TasksPath, body: manifestYAML, header: []string{"Content-Type", "application/yaml"}}, 202, 403},
		{call{path: "/api/v1/secrets"}, 200, 403},
	} {
		if got := mine.status(c.call); got != c.mine {
			t.Errorf("%s %s of this user = %d, want %d", c.method, c.path, got, c.mine)
		}
		if got := reader.status(c.call); got != c.reader {
			t.Errorf("%s %s of a reader = %d, want %d", c.method, c.path, got, c.reader)
		}
	}
	var l DashboardLogin
	_, body := mine.do(whoami)
	if err := json.Unmarshal(body, &l); err != nil || l.Name != r.user || l.Scope != ops.Admin || l.Key != "" {
		t.Errorf("login = %s, %v, want this user's with the scope admin, and no key", body, err)
	}

	// A link of a token's owner is worth no more than the token.
	resp, body := r.do(call{method: http.MethodPost, path: ops.CreateDashboardLink.Path})
	_, code, _ := strings.Cut(string(body), "#code=")
	theirs := r.logInWith(`{"code":"` + code[:43] + `"}`)
	if resp.StatusCode != http.StatusOK || theirs.status(whoami) != 200 {
		t.Fatalf("link of a token = %s: %s, want a login", resp.Status, body)
	}
	byTheirs := theirs.rig.logInWith(func() string {
		_, body := theirs.do(call{method: http.MethodPost, path: ops.CreateDashboardLink.Path})
		_, code, _ := strings.Cut(string(body), "#code=")
		return `{"code":"` + code[:43] + `"}`
	}())
	for _, name := range []string{"admin", "read"} {
		if err := r.tokens.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	for name, b := range map[string]*browser{"a token": reader, "a link of a token": theirs, "a link of a login of a token": byTheirs} {
		if got := b.status(whoami); got != http.StatusUnauthorized {
			t.Errorf("login by %s that was removed = %d, want 401", name, got)
		}
	}
	// A token of the same name is another token.
	if _, err := r.tokens.Add("admin", ops.Admin, task.Permission{}); err != nil {
		t.Fatal(err)
	}
	if got := theirs.status(whoami); got != http.StatusUnauthorized {
		t.Errorf("login by a token that was replaced = %d, want 401", got)
	}

	if got := mine.status(call{method: http.MethodPost, path: logoutPath}); got != http.StatusNoContent {
		t.Errorf("logout = %d, want 204", got)
	}
	if got := mine.status(whoami); got != http.StatusUnauthorized {
		t.Errorf("login after the logout = %d, want 401", got)
	}
}

// Each attack lacks one thing that the page has, and is refused because of it.
func TestDashboardAttacks(t *testing.T) {
	r := newRig(t, Limits{Failures: 1000})
	b, other := r.logIn(), r.logIn()
	const id = "eeee22223333"
	r.session(id)
	own, localhost := "http://"+r.addr, "localhost"+r.addr[strings.LastIndex(r.addr, ":"):]
	get, post := call{path: ops.SessionsPath}, call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/stop"}
	for _, c := range []struct {
		name string
		call
		header []string
		want   int
	}{
		{"the page reads", get, []string{"Cookie", b.cookie, keyHeader, b.key}, 200},
		{"the page changes", post, []string{"Cookie", b.cookie, keyHeader, b.key, "Origin", own, "Sec-Fetch-Site", "same-origin"}, 202},
		{"the page, beside cookies of others", get, []string{"Cookie", cookieName + "=x; a=b; " + b.cookie, keyHeader, b.key}, 200},

		{"CSRF from another site", post, []string{"Cookie", b.cookie, "Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site"}, 403},
		{"CSRF that knows the key", post, []string{"Cookie", b.cookie, keyHeader, b.key, "Origin", "https://evil.example"}, 403},
		{"CSRF from an opaque origin", post, []string{"Cookie", b.cookie, keyHeader, b.key, "Origin", "null"}, 403},
		{"CSRF from another port", post, []string{"Cookie", b.cookie, keyHeader, b.key, "Origin", "http://127.0.0.1:9", "Sec-Fetch-Site", "same-site"}, 403},
		{"CSRF by an old browser without an origin", post, []string{"Cookie", b.cookie, keyHeader, b.key}, 403},
		{"CSRF by a form, which cannot send the key", post, []string{"Cookie", b.cookie, "Origin", own}, 401},
		{"reading from another site", get, []string{"Cookie", b.cookie, keyHeader, b.key, "Sec-Fetch-Site", "cross-site"}, 403},
		{"reading from another port", get, []string{"Cookie", b.cookie, keyHeader, b.key, "Sec-Fetch-Site", "same-site"}, 403},
		{"the cookie alone, stolen by another port", get, []string{"Cookie", b.cookie}, 401},
		{"the cookie as a key", get, []string{"Cookie", b.cookie, keyHeader, strings.TrimPrefix(b.cookie, cookieName+"=")}, 401},
		{"the key alone", get, []string{keyHeader, b.key}, 401},
		{"the key as a cookie", get, []string{"Cookie", cookieName + "=" + b.key, keyHeader, b.key}, 401},
		{"the key of another login", get, []string{"Cookie", b.cookie, keyHeader, other.key}, 401},
		{"a wrong key", get, []string{"Cookie", b.cookie, keyHeader, b.key + "x"}, 401},
		{"a long key", get, []string{"Cookie", b.cookie, keyHeader, strings.Repeat("a", 10_000)}, 401},
		{"the digest of the key", get, []string{"Cookie", b.cookie, keyHeader, digest(b.key)}, 401},
		{"a key in the query", call{path: ops.SessionsPath + "?key=" + b.key}, []string{"Cookie", b.cookie}, 401},
		{"the key as a token", get, []string{"Authorization", "Bearer " + b.key, "Cookie", b.cookie}, 401},
		{"a WebSocket's key on another request", get, []string{"Cookie", b.cookie, "Sec-WebSocket-Protocol", socketProtocol + ", " + keyProtocol + b.key}, 401},
		{"two keys", get, []string{"Cookie", b.cookie, keyHeader, b.key, keyHeader, other.key}, 400},
		{"two headers of cookies", get, []string{"Cookie", b.cookie, "Cookie", other.cookie, keyHeader, b.key}, 400},
		{"the cookie behind many of others", get, []string{"Cookie", strings.Repeat(cookieName+"=x; ", maxCookies) + b.cookie, keyHeader, b.key}, 401},
		{"DNS rebinding", get, []string{"Cookie", b.cookie, keyHeader, b.key, "Host", "evil.example"}, 403},
		{"DNS rebinding with the port", get, []string{"Cookie", b.cookie, keyHeader, b.key, "Host", "evil.example:" + r.addr[strings.LastIndex(r.addr, ":")+1:]}, 403},
		{"DNS rebinding of the pages", call{path: dashboardPath}, []string{"Host", "evil.example"}, 403},
		// Another user may listen on the other addresses of that name.
		{"a login as localhost", call{method: http.MethodPost, path: loginPath, body: `{"code":"x"}`}, []string{"Content-Type", "application/json", "Host", localhost, "Origin", "http://" + localhost}, 403},
		{"the page as localhost", get, []string{"Cookie", b.cookie, keyHeader, b.key, "Host", localhost}, 403},
		{"a token as localhost", get, []string{"Authorization", "Bearer " + r.token[ops.Read], "Host", localhost}, 200},
		{"a login by another site", call{method: http.MethodPost, path: loginPath, body: `{"code":"x"}`}, []string{"Content-Type", "application/json", "Origin", "https://evil.example"}, 403},
		{"a login by a form", call{method: http.MethodPost, path: loginPath, body: `{"code":"x"}`}, []string{"Content-Type", "text/plain"}, 415},
		{"a long login", call{method: http.MethodPost, path: loginPath, body: `{"code":"` + strings.Repeat("x", maxLoginBody) + `"}`}, []string{"Content-Type", "application/json"}, 413},
		{"an empty login", call{method: http.MethodPost, path: loginPath, body: `{}`}, []string{"Content-Type", "application/json"}, 400},
		{"a login with both", call{method: http.MethodPost, path: loginPath, body: `{"code":"x","token":"y"}`}, []string{"Content-Type", "application/json"}, 400},
		{"a login as a script", call{path: loginPath}, nil, 404},
	} {
		c.call.header, c.call.as = c.header, "-"
		resp, body := r.do(c.call)
		if resp.StatusCode != c.want {
			t.Errorf("%s = %s: %s, want %d", c.name, resp.Status, body, c.want)
		}
		if resp.StatusCode >= 400 && (resp.Header.Get("Content-Type") != problemType || len(resp.Header.Values("Access-Control-Allow-Origin")) > 0) {
			t.Errorf("%s has the headers %v, want a problem, and nothing for other sites", c.name, resp.Header)
		}
		for _, secret := range []string{b.key, other.key, strings.TrimPrefix(b.cookie, cookieName+"=")} {
			if bytes.Contains(body, []byte(secret)) {
				t.Errorf("%s = %s, want it without the key and the cookie", c.name, body)
			}
		}
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	page, err := http.NewRequestWithContext(t.Context(), http.MethodGet, own+dashboardPath, nil)
	if err != nil {
		t.Fatal(err)
	}
	page.Host = localhost
	if resp, err := client.Do(page); err != nil || resp.Body.Close() != nil || resp.Header.Get("Location") != own+dashboardPath {
		t.Errorf("the pages as localhost = %v, %v, want a redirect to %s", resp, err, own+dashboardPath)
	}
	// No page may read anything of ours, whatever it asks before.
	resp, _ := r.do(call{method: http.MethodOptions, path: ops.SessionsPath, as: "-", header: []string{"Origin", "http://127.0.0.1:9", "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", keyHeader}})
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("preflight = %s, want 403", resp.Status)
	}
	for _, secret := range []string{b.key, strings.TrimPrefix(b.cookie, cookieName+"="), other.key} {
		if strings.Contains(r.log.String(), secret) {
			t.Error("the log has a key or a cookie, want neither")
		}
	}
}

// A WebSocket has no headers of its own: the key is one of its protocols, and the browser says
// which page opened it.
func TestDashboardWebSocket(t *testing.T) {
	r := newRig(t, Limits{Failures: 1000})
	b := r.logIn()
	id := r.submit().ID
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	own := "http://" + r.addr
	for _, c := range []struct {
		name      string
		header    http.Header
		protocols []string
		want      int
	}{
		{"the page", http.Header{"Origin": {own}, "Cookie": {b.cookie}}, []string{socketProtocol, keyProtocol + b.key}, 101},
		{"another site", http.Header{"Origin": {"https://evil.example"}, "Cookie": {b.cookie}}, []string{socketProtocol, keyProtocol + b.key}, 403},
		{"another port", http.Header{"Origin": {"http://127.0.0.1:9"}, "Cookie": {b.cookie}}, []string{socketProtocol, keyProtocol + b.key}, 403},
		{"no origin", http.Header{"Cookie": {b.cookie}}, []string{socketProtocol, keyProtocol + b.key}, 403},
		{"no key", http.Header{"Origin": {own}, "Cookie": {b.cookie}}, []string{socketProtocol}, 401},
		{"a wrong key", http.Header{"Origin": {own}, "Cookie": {b.cookie}}, []string{socketProtocol, keyProtocol + b.key[1:]}, 401},
		{"no cookie", http.Header{"Origin": {own}}, []string{socketProtocol, keyProtocol + b.key}, 401},
	} {
		conn, resp, err := websocket.Dial(ctx, "ws://"+r.addr+"/ws/tasks/"+id+"/stream", &websocket.DialOptions{HTTPHeader: c.header, Subprotocols: c.protocols})
		if resp == nil || resp.StatusCode != c.want {
			t.Errorf("WebSocket of %s = %+v, %v, want %d", c.name, resp, err, c.want)
		}
		if err == nil {
			if got := conn.Subprotocol(); got != socketProtocol {
				t.Errorf("protocol = %q, want %s", got, socketProtocol)
			}
			_ = conn.CloseNow()
		}
	}
}

// A link works once, for a minute, and so many can exist.
func TestDashboardLinks(t *testing.T) {
	r := newRig(t, Limits{Failures: 3})
	now := time.Now()
	r.logins.now = func() time.Time { return now }
	try := func(code string) int {
		t.Helper()
		resp, body := r.do(loginCall(`{"code":"` + code + `"}`))
		if bytes.Contains(body, []byte(code)) {
			t.Errorf("answer = %s, want it without the code", body)
		}
		return resp.StatusCode
	}
	once := r.link()
	if first, second := try(once), try(once); first != 200 || second != 401 {
		t.Errorf("uses of a link = %d and %d, want 200 and 401", first, second)
	}
	late := r.link()
	now = now.Add(linkTime + time.Second)
	if got := try(late); got != 401 {
		t.Errorf("link after %v = %d, want 401", linkTime, got)
	}
	var codes []string
	for range maxLinks + 1 {
		codes = append(codes, r.link())
		now = now.Add(time.Millisecond)
	}
	if len(r.logins.links) != maxLinks {
		t.Errorf("links = %d, want %d", len(r.logins.links), maxLinks)
	}
	if first, last := try(codes[0]), try(codes[maxLinks]); first != 401 || last != 200 {
		t.Errorf("oldest and newest of too many links = %d and %d, want 401 and 200", first, last)
	}
	// Three were wrong. More are answered with 429, but a link still works.
	resp, _ := r.do(loginCall(`{"token":"asz_wrong"}`))
	if got := try(codes[1]); resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" || got != 200 {
		t.Errorf("wrong token after wrong links, and a link = %s and %d, want 429 and 200", resp.Status, got)
	}
	if got := try("wrong"); got != 429 {
		t.Errorf("wrong code after wrong links = %d, want 429", got)
	}
	// A page that only asks whether it must log in is not counted.
	for range 5 {
		if resp, _ := r.do(call{path: sessionPath, as: "-"}); resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("question for the login = %s, want 401", resp.Status)
		}
	}
	if log := r.log.String(); strings.Contains(log, once) || strings.Contains(log, codes[1]) {
		t.Error("the log has a code, want none")
	}
	r.logins.base = ""
	if resp, body := r.do(call{method: http.MethodPost, path: ops.CreateDashboardLink.Path, socket: true}); resp.StatusCode != http.StatusConflict || !bytes.Contains(body, []byte("--listen")) {
		t.Errorf("link of a server without an address = %s: %s, want 409 with a hint", resp.Status, body)
	}
}

// Logins end when they are not used, and so many can exist.
func TestDashboardLoginsEnd(t *testing.T) {
	r := newRig(t, Limits{Failures: 1000})
	now := time.Now()
	r.logins.now = func() time.Time { return now }
	b := r.logIn()
	for range 3 { // used in time
		now = now.Add(loginIdle - time.Second)
		if got := b.status(whoami); got != 200 {
			t.Fatalf("login in use = %d, want 200", got)
		}
	}
	who := principal{login: digest(b.key)}
	who.Scope = ops.Admin
	now = now.Add(loginIdle)
	if got := b.status(whoami); got != 401 || r.stillAllowed(who, ops.Read) {
		t.Errorf("login after %v without use = %d, still allowed %t, want 401 and false", loginIdle, got, r.stillAllowed(who, ops.Read))
	}
	first, reader := r.logIn(), r.logInWith(`{"token":"`+r.token[ops.Read]+`"}`)
	second := r.logIn()
	now = now.Add(time.Second)
	if got := first.status(whoami); got != 200 {
		t.Fatalf("login = %d, want 200", got)
	}
	for range maxLoginsOf - 1 {
		r.logIn()
	}
	if got, used, others := second.status(whoami), first.status(whoami), reader.status(whoami); got != 401 || used != 200 || others != 200 || len(r.logins.all) != maxLoginsOf+1 {
		t.Errorf("logins unused longest, in use, and of another user = %d, %d and %d of %d, want 401, 200 and 200 of %d", got, used, others, len(r.logins.all), maxLoginsOf+1)
	}
	for i := len(r.logins.all); i < maxLogins; i++ {
		if _, _, ok := r.logins.add(principal{token: string(rune(i))}); !ok {
			t.Fatalf("login %d was refused, want %d", i, maxLogins)
		}
	}
	if resp, _ := r.do(loginCall(`{"token":"` + r.token[ops.Submit] + `"}`)); resp.StatusCode != http.StatusTooManyRequests {
		t.Errorf("login after %d = %s, want 429", maxLogins, resp.Status)
	}
}

// With TLS, only this host can set the cookie, and the link names the host as its certificate
// does.
func TestDashboardOverTLS(t *testing.T) {
	d := endpoint{tls: true, ip: netip.MustParseAddr("127.0.0.1"), port: "8122"}
	if c := d.loginCookie("x"); c.String() != "__Host-"+cookieName+"=x; Path=/; HttpOnly; Secure; SameSite=Strict" {
		t.Errorf("cookie = %s, want one with __Host- and Secure", c.String())
	}
	if d.base() != "https://127.0.0.1:8122" {
		t.Errorf("URL = %s, want https://127.0.0.1:8122", d.base())
	}
}

// The pages need no login, open from anywhere, and let no other site show or change them.
func TestDashboardPages(t *testing.T) {
	r := newRig(t, Limits{})
	raw := func(c call) (*http.Response, string) {
		t.Helper()
		c.as = "-"
		resp, err := r.client(c).Do(r.request(t.Context(), c))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp, string(body)
	}
	opened := []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}
	resp, body := raw(call{path: dashboardPath, header: opened})
	if resp.StatusCode != http.StatusOK || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html") || !strings.Contains(body, "<!doctype html>") {
		t.Errorf("page = %s: %.100s, want HTML", resp.Status, body)
	}
	csp := resp.Header.Get("Content-Security-Policy")
	for _, rule := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "connect-src 'self'", "require-trusted-types-for 'script'"} {
		if !slices.Contains(strings.Split(csp, "; "), rule) {
			t.Errorf("policy of the page = %s, want %s", csp, rule)
		}
	}
	if strings.Contains(csp, "unsafe") || strings.Contains(csp, "*") {
		t.Errorf("policy of the page = %s, want nothing unsafe", csp)
	}
	for header, want := range map[string]string{
		"X-Frame-Options": "DENY", "Cross-Origin-Opener-Policy": "same-origin", "X-Content-Type-Options": "nosniff",
		"Referrer-Policy": "no-referrer", "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-cache",
	} {
		if got := resp.Header.Get(header); got != want {
			t.Errorf("%s of the page = %q, want %q", header, got, want)
		}
	}
	if again, body := raw(call{path: dashboardPath, header: []string{"If-None-Match", resp.Header.Get("ETag")}}); again.StatusCode != http.StatusNotModified || body != "" {
		t.Errorf("page again = %s, want 304", again.Status)
	}
	if resp, _ := raw(call{path: "/", header: opened}); resp.StatusCode != http.StatusFound || resp.Header.Get("Location") != dashboardPath {
		t.Errorf("/ = %s to %s, want 302 to %s", resp.Status, resp.Header.Get("Location"), dashboardPath)
	}
	for _, c := range []call{
		{path: dashboardPath, header: []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"}},
		{path: dashboardPath, header: []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "no-cors", "Sec-Fetch-Dest", "script"}},
		{path: dashboardPath, header: []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "object"}},
		{path: ops.SessionsPath, header: opened},
		{path: sessionPath, header: opened},
		{method: http.MethodPost, path: logoutPath, header: opened},
		{method: http.MethodPost, path: loginPath, header: opened},
	} {
		if resp, _ := raw(c); resp.StatusCode != http.StatusForbidden {
			t.Errorf("%s %s with %v = %s, want 403", c.method, c.path, c.header, resp.Status)
		}
	}
	for path, want := range map[string]int{
		dashboardPath + "none.js": 404, dashboardPath + ".gitignore": 404, dashboardPath + "../api": 404, dashboardPath + "a/": 404,
		dashboardPath + "%2e%2e/%2e%2e/etc/passwd": 404, "/dashboard": 307, dashboardPath + "/": 404,
	} {
		if resp, body := raw(call{path: path}); resp.StatusCode != want {
			t.Errorf("%s = %s: %s, want %d", path, resp.Status, body, want)
		}
	}
	if resp, _ := raw(call{method: http.MethodPost, path: dashboardPath}); resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("POST to the page = %s, want 401", resp.Status)
	}
}

func TestReadPages(t *testing.T) {
	script := strings.Repeat("let x = 1;\n", 1000)
	all, err := readPages(fstest.MapFS{"index.html": {Data: []byte("<p>")}, "a/app.js": {Data: []byte(script)}, ".gitignore": {Data: []byte("*")}, "font.woff2": {Data: []byte{0, 1, 2}}})
	if err != nil || len(all) != 3 {
		t.Fatalf("pages = %v, %v, want three", all, err)
	}
	js := all["a/app.js"]
	z, err := gzip.NewReader(bytes.NewReader(js.packed))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil || string(text) != script || string(js.plain) != script || !strings.HasPrefix(js.kind, "text/javascript") || all["index.html"].packed != nil {
		t.Errorf("script = %q (%v) as %s, want it compressed, and the short page not", text, err, js.kind)
	}
	for header, want := range map[string]bool{"gzip": true, "br, gzip;q=0.5": true, "GZIP": true, "": false, "br": false, "gzip;q=0": false, "gzip; q=0": false, "xgzip": false} {
		if acceptsGzip(header) != want {
			t.Errorf("acceptsGzip(%q) = %t, want %t", header, !want, want)
		}
	}
}
