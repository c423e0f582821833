//go:build browser

package browser

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const (
	cookieName = "agent_sessionizer"
	keyHeader  = "X-Dashboard-Key"
)

// site is a web server of an attacker on another port of this host.
type site struct {
	*httptest.Server
	port string

	mu     sync.Mutex
	stolen map[string]string // the dashboard's cookie, by the name that the browser used
	plants []string          // cookies that the page /plant sets
}

// newSite starts the site. Below /copy/ it has the dashboard without the headers that protect it.
func newSite(t *testing.T, dashboard *url.URL) *site {
	s := &site{stolen: map[string]string{}}
	copied := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(dashboard)
			r.Out.URL.Path = strings.TrimPrefix(r.In.URL.Path, "/copy")
			r.Out.Header = http.Header{}
		},
		ModifyResponse: func(r *http.Response) error {
			for _, name := range []string{"Content-Security-Policy", "X-Frame-Options", "Cross-Origin-Opener-Policy", "Cross-Origin-Resource-Policy"} {
				r.Header.Del(name)
			}
			return nil
		},
	}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, _, _ := net.SplitHostPort(r.Host)
		s.mu.Lock()
		defer s.mu.Unlock()
		if c, err := r.Cookie(cookieName); err == nil {
			s.stolen[name] = c.Value
		}
		switch {
		case strings.HasPrefix(r.URL.Path, "/copy/"):
			copied.ServeHTTP(w, r)
			return
		case r.URL.Path == "/denied":
			w.Header().Set("X-Frame-Options", "DENY")
		case r.URL.Path == "/plant":
			for _, c := range s.plants {
				w.Header().Add("Set-Cookie", c)
			}
		}
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, "<!doctype html><title>site</title><h1>A page of another origin</h1>")
	}))
	t.Cleanup(s.Close)
	s.port = s.URL[strings.LastIndex(s.URL, ":")+1:]
	return s
}

// at returns the address of a page of the site under a name.
func (s *site) at(name, path string) string { return "http://" + net.JoinHostPort(name, s.port) + path }

// plant makes the browser accept cookies from the site, which is on another port of the dashboard's address.
func (s *site) plant(p *driver.Page, cookies ...string) {
	s.mu.Lock()
	s.plants = cookies
	s.mu.Unlock()
	p.Load(s.at("127.0.0.1", "/plant"))
}

// requests is a script that sends all requests that a page can send to the dashboard. Its value
// has what the page could read.
const requests = `(async (target, id, key, code) => {
	const read = {};
	const attempt = async (name, f) => { try { const r = await f(); read[name] = r.type + " " + await r.text(); } catch (e) { read[name] = e.name; } };
	const stop = target + "/api/v1/sessions/" + id + "/stop";
	const login = target + "/dashboard/login";
	const of = { credentials: "include" };
	await attempt("read", () => fetch(target + "/api/v1/overview", of));
	await attempt("read without CORS", () => fetch(target + "/api/v1/overview", { ...of, mode: "no-cors" }));
	await attempt("read with the key", () => fetch(target + "/api/v1/overview", { ...of, headers: { "X-Dashboard-Key": key } }));
	await attempt("change", () => fetch(stop, { ...of, method: "POST", body: "{}" }));
	await attempt("change without CORS", () => fetch(stop, { ...of, method: "POST", mode: "no-cors", body: "{}" }));
	await attempt("change with the key", () => fetch(stop, { ...of, method: "POST", headers: { "X-Dashboard-Key": key } }));
	await attempt("change as JSON", () => fetch(stop, { ...of, method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" }));
	await attempt("destroy", () => fetch(target + "/api/v1/sessions/" + id, { ...of, method: "DELETE" }));
	await attempt("log in", () => fetch(login, { ...of, method: "POST", mode: "no-cors", body: JSON.stringify({ code }) }));
	await attempt("log out", () => fetch(target + "/dashboard/logout", { ...of, method: "POST", mode: "no-cors" }));
	navigator.sendBeacon(stop, "{}");
	const element = (tag, attributes, path) => new Promise((done) => {
		const e = Object.assign(document.createElement(tag), attributes);
		e.onload = () => { read[tag] = "loaded"; done(); };
		e.onerror = () => { read[tag] = "error"; done(); };
		document.body.append(e);
	});
	await element("img", { src: target + "/api/v1/overview?img" });
	await element("script", { src: target + "/api/v1/overview?script" });
	await element("link", { rel: "stylesheet", href: target + "/dashboard/style.css" });
	for (const [enctype, name, value] of [["text/plain", '{"x":"', '"}'], ["application/x-www-form-urlencoded", "x", "y"], ["multipart/form-data", "x", "y"]]) {
		const frame = Object.assign(document.createElement("iframe"), { name: "result" });
		document.body.append(frame);
		const form = Object.assign(document.createElement("form"), { method: "POST", action: stop, enctype, target: "result" });
		form.append(Object.assign(document.createElement("input"), { name, value }));
		document.body.append(form);
		const sent = new Promise((done) => { frame.onload = done; });
		form.submit();
		await sent;
		frame.remove();
	}
	return read;
})(%q, %q, %q, %q)`

// socket is a script that opens a WebSocket to a terminal, and reports how it ends.
const socket = `((address, key) => new Promise((done) => {
	const ws = new WebSocket(address, ["agent-sessionizer", "key." + key]);
	ws.onopen = () => { ws.close(); done("open"); };
	ws.onerror = () => done("refused");
}))(%q, %q)`

// TestOtherOrigins attacks a user who is logged in, from pages of another port, of localhost and
// of another name that leads to this host: each can send requests, and none has an effect.
func TestOtherOrigins(t *testing.T) {
	h := newHost(t)
	g := h.open("repo")
	g.tmux("first")
	h.serve()
	target, err := url.Parse(strings.TrimSuffix(strings.SplitAfter(h.link(), "/dashboard/")[0], "/dashboard/"))
	if err != nil {
		t.Fatal(err)
	}
	s := newSite(t, target)
	rebinding, rebound := newRebinding(t, target)
	b := driver.Start(t, "MAP evil.test 127.0.0.1", "MAP rebinding.test "+rebinding)
	victim := b.Open(t)
	victim.LogIn(h.link())
	victim.Sees("repo")
	var key, user string
	victim.Eval(`JSON.parse(localStorage.getItem("agent-sessionizer")).key`, &key)
	const whoami = `fetch("/dashboard/session", {headers: {"X-Dashboard-Key": JSON.parse(localStorage.getItem("agent-sessionizer"))?.key}}).then((r) => r.json()).then((l) => l.name ?? l.code)`
	victim.Eval(whoami, &user)
	terminal := "ws://" + target.Host + "/ws/sessions/" + g.id + "/terminal?cols=80&rows=24"
	var end string
	if victim.Eval(fmt.Sprintf(socket, terminal, key), &end); end != "open" {
		t.Errorf("WebSocket of the dashboard = %s, want it open, or the attempts of others show nothing", end)
	}

	for _, name := range []string{"127.0.0.1", "localhost", "evil.test"} {
		t.Run(name, func(t *testing.T) {
			p := b.Open(t)
			p.Load(s.at(name, "/"))

			// CSRF. The attacker even knows the key.
			var read map[string]string
			p.Eval(fmt.Sprintf(requests, target.String(), g.id, key, strings.SplitAfter(h.link(), "code=")[1]), &read)
			for what, text := range read {
				if text != "TypeError" && text != "error" {
					t.Errorf("%s: the page got %q, want an error", what, text)
				}
			}
			var sent []driver.Exchange
			testenv.WaitFor(t, "the answers", func() bool {
				sent = p.Exchanges(target.String())
				return !slices.ContainsFunc(sent, func(x driver.Exchange) bool { return x.Status == 0 && !x.Failed })
			})
			// The browser does not send what a preflight did not allow.
			sent = slices.DeleteFunc(sent, func(x driver.Exchange) bool { return x.Status == 0 })
			withCookie := 0
			for _, x := range sent {
				if x.Status != http.StatusForbidden {
					t.Errorf("%s %s = %d, want 403", x.Method, x.URL, x.Status)
				}
				if slices.Contains(x.Cookies, cookieName) {
					withCookie++
				}
			}
			// Only another port of the same address is the same site, to which the browser sends the cookie.
			if len(sent) < 12 || (withCookie > 0) != (name == "127.0.0.1") {
				t.Errorf("%d requests, %d of them with the cookie, want 12 or more; with the cookie from 127.0.0.1 only:\n%+v", len(sent), withCookie, sent)
			}

			// A WebSocket to the terminal.
			if p.Eval(fmt.Sprintf(socket, terminal, key), &end); end != "refused" {
				t.Errorf("WebSocket = %s, want it refused", end)
			}

			// Clickjacking: the frame looks like one whose content the browser refused. The copy
			// without headers shows that frames work here.
			p.Size(500, 300)
			framed := func(tag, at string) string {
				p.Load(s.at(name, "/"))
				p.Eval(fmt.Sprintf(`new Promise((done) => {
					const e = document.createElement(%[1]q);
					e[%[1]q === "object" ? "data" : "src"] = %[2]q;
					e.onload = e.onerror = done;
					document.body.replaceChildren(e);
					setTimeout(done, 500); // a browser need not report what it did not load
				}).then(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true)))))`, tag, at), nil)
				return string(p.Picture())
			}
			settled := func(tag, at string) (picture string) {
				testenv.WaitFor(t, "the same picture twice", func() bool {
					before := picture
					picture = framed(tag, at)
					return picture == before
				})
				return picture
			}
			tags := []string{"iframe"}
			if name == "127.0.0.1" { // the same site, for which a browser does the most
				tags = []string{"iframe", "object", "embed"}
			}
			for _, tag := range tags {
				refused := settled(tag, s.at("127.0.0.1", "/denied"))
				testenv.WaitFor(t, "a frame with the copy", func() bool { return settled(tag, s.at("127.0.0.1", "/copy/dashboard/")) != refused })
				if settled(tag, target.String()+"/dashboard/") != refused {
					t.Errorf("%s shows the dashboard, want what it shows of a refused page", tag)
				}
			}
			p.Load(s.at(name, "/"))

			// A window that the page opens is cut off from it.
			p.Eval(fmt.Sprintf(`window.opened = window.open(%q); true`, target.String()+"/dashboard/"), nil)
			p.Until("a window without its opener", "window.opened?.closed")

			// What the page can read of the login.
			var seen string
			if p.Eval(`document.cookie + Object.keys(localStorage)`, &seen); seen != "" {
				t.Errorf("cookies and storage of the page = %q, want none", seen)
			}
		})
	}
	if list := h.must("list", "--json"); !strings.Contains(list, `"state": "ready"`) || !strings.Contains(list, `"desired": "ready"`) {
		t.Errorf("sessions = %s, want the session ready, as before the attacks", list)
	}
	var now string
	if victim.Eval(whoami, &now); now != user {
		t.Errorf("the user = %q, want %q, as before the attacks", now, user)
	}

	// A server on another port gets the cookie, which is worth nothing without the key.
	s.mu.Lock()
	stolen := s.stolen["127.0.0.1"]
	if stolen == "" || len(s.stolen) != 1 {
		t.Errorf("stolen cookies = %v, want the one for 127.0.0.1, or the theft shows nothing", s.stolen)
	}
	s.mu.Unlock()
	if got := whoIs(t, target, stolen, ""); got != "UNAUTHORIZED" {
		t.Errorf("a program with the stolen cookie = %q, want it refused", got)
	}

	// It can plant the cookie of its own login, before or over the user's.
	token := strings.TrimSpace(h.must("serve", "token", "add", "mallory", "--scope", "read"))
	planted, hers := logInAs(t, target, token)
	attacker := b.Open(t)
	s.plant(attacker, cookieName+"="+planted+"; Path=/dashboard", cookieName+"="+planted+"; Path=/api")
	if victim.Eval(whoami, &now); now != user {
		t.Errorf("the user beside a planted cookie = %q, want %q", now, user)
	}
	victim.Load(target.String() + "/dashboard/")
	victim.Sees("repo")
	s.plant(attacker, cookieName+"="+planted+"; Path=/")
	victim.Load(target.String() + "/dashboard/")
	victim.Sees("Or use an API token")
	if text := victim.Text(); strings.Contains(text, "mallory") || strings.Contains(text, "repo\n") {
		t.Errorf("page with a planted cookie = %s, want only a login", text)
	}
	if got := whoIs(t, target, planted, key); got != "UNAUTHORIZED" {
		t.Errorf("the planted cookie with the user's key = %q, want it refused", got)
	}
	victim.LogIn(h.link())
	if victim.Eval(whoami, &now); now != user {
		t.Errorf("the user after another login = %q, want %q", now, user)
	}
	if got := whoIs(t, target, planted, hers); got != "token:mallory" {
		t.Errorf("the planted cookie with the attacker's key = %q, want her own login as before", got)
	}

	// DNS rebinding: a page of another name, which leads to the dashboard once the page is loaded.
	p := b.Open(t)
	own := "http://" + net.JoinHostPort("rebinding.test", target.Port())
	p.Load(own + "/")
	p.Sees("A page before the rebinding")
	rebound.Store(true)
	victim.Eval(`JSON.parse(localStorage.getItem("agent-sessionizer")).key`, &key)
	var answers []string
	p.Eval(fmt.Sprintf(`(async (key, code) => {
		const all = [];
		for (const [path, o] of [["/dashboard/"], ["/dashboard/app.js"], ["/api/health"], ["/openapi.json"], ["/dashboard/session"], ["/api/v1/overview", { headers: { "X-Dashboard-Key": key } }],
			["/api/v1/overview", { headers: { Authorization: "Bearer x" } }], ["/dashboard/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ code }) }]]) {
			const r = await fetch(path, o);
			const p = await r.json().catch(() => ({}));
			all.push(path + " " + r.status + " " + p.detail);
		}
		return all;
	})(%q, %q)`, key, strings.SplitAfter(h.link(), "code=")[1]), &answers)
	for _, answer := range answers {
		if !strings.HasSuffix(answer, " 403 the Host header does not name this server") {
			t.Errorf("after the rebinding: %s, want 403", answer)
		}
	}
	if p.Eval(fmt.Sprintf(socket, strings.Replace(terminal, "127.0.0.1", "rebinding.test", 1), key), &end); len(answers) != 8 || end != "refused" {
		t.Errorf("after the rebinding: %d answers, WebSocket = %s, want 8, and the WebSocket refused", len(answers), end)
	}
	victim.CheckHarmless()
}

// newRebinding starts a server with a page of an attacker, which connects the browser to the
// dashboard once rebound is set. The browser sees the same as when a name changes its address.
func newRebinding(t *testing.T, dashboard *url.URL) (addr string, rebound *atomic.Bool) {
	t.Helper()
	rebound = new(atomic.Bool)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serve := func(c net.Conn) {
		defer c.Close()
		r := bufio.NewReader(c)
		if _, err := r.Peek(1); err == nil && !rebound.Load() {
			const page = "<!doctype html><title>site</title><h1>A page before the rebinding</h1>"
			if _, err := http.ReadRequest(r); err == nil {
				_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(page), page)
			}
			return
		}
		d, err := net.Dial("tcp", dashboard.Host)
		if err != nil {
			return
		}
		defer d.Close()
		go func() { _, _ = io.Copy(d, r) }()
		_, _ = io.Copy(c, d)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { serve(c) })
		}
	})
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String(), rebound
}

// logInAs logs a program in with a token, and returns its cookie and key.
func logInAs(t *testing.T, dashboard *url.URL, token string) (cookie, key string) {
	t.Helper()
	resp, err := http.Post(dashboard.String()+"/dashboard/login", "application/json", strings.NewReader(`{"token":"`+token+`"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var l struct{ Key string }
	if err := json.NewDecoder(resp.Body).Decode(&l); err != nil || len(resp.Cookies()) != 1 || l.Key == "" {
		t.Fatalf("login with a token = %s, %v, want a cookie and a key", resp.Status, err)
	}
	return resp.Cookies()[0].Value, l.Key
}

// whoIs returns the name of the login to which a cookie and a key belong, or the code of the problem.
func whoIs(t *testing.T, dashboard *url.URL, cookie, key string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, dashboard.String()+"/dashboard/session", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.AddCookie(&http.Cookie{Name: cookieName, Value: cookie})
	if key != "" {
		r.Header.Set(keyHeader, key)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var l struct{ Name, Code string }
	if err := json.NewDecoder(resp.Body).Decode(&l); err != nil {
		t.Fatal(err)
	}
	return l.Name + l.Code
}
