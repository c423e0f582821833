package gateway

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

const realToken = "ghp_RealRealRealRealReal0123456789abcdef"

// bind makes the gateway read the requests to example.com, a name for which test servers have
// certificates. It returns a client of the guest that trusts only the gateway's certificate, and
// the placeholder of the secret.
func (w *world) bind(http2 bool) (*http.Client, string) {
	w.t.Helper()
	x, err := w.g.SetSecrets([]Secret{{Name: "TOKEN", Like: "ghp_", Value: secret.NewValue(realToken), Hosts: []string{"example.com"}}})
	if err != nil {
		w.t.Fatal(err)
	}
	return w.trustful(x, http2), x.Placeholders["TOKEN"]
}

func (w *world) ask(c *http.Client, url, authorization string) (int, string, error) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.ctx(), http.MethodPost, url, strings.NewReader("body"))
	if err != nil {
		w.t.Fatal(err)
	}
	r.Header.Set("Authorization", authorization)
	return do(c, r)
}

func TestIntercepted(t *testing.T) {
	for _, http2 := range []bool{false, true} {
		t.Run(map[bool]string{false: "HTTP/1.1", true: "HTTP/2"}[http2], func(t *testing.T) {
			w := newWorld(t, config{policy: allow("example.com", "other.example")})
			s := w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				fmt.Fprintf(rw, "%s %s %s %t %s", r.Proto, r.Host, b, r.Header.Get("Authorization") == "Bearer "+realToken, r.Header.Get("Authorization"))
			}))
			w.secureWeb("other.example", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				io.WriteString(rw, r.Header.Get("Authorization"))
			}))
			c, guestToken := w.bind(http2)
			if status, body, err := w.ask(c, "https://example.com/", "Bearer "+guestToken); err != nil || status != http.StatusBadGateway || !strings.Contains(body, "certificate") {
				t.Errorf("answer of a server that the host does not trust = %d %q, %v, want %d with the reason", status, body, err, http.StatusBadGateway)
			}
			w.g.roots = x509.NewCertPool()
			w.g.roots.AddCert(s.Certificate())
			want := map[bool]string{false: "HTTP/1.1", true: "HTTP/2.0"}[http2] + " example.com body true Bearer " + strings.Repeat("*", len(realToken))
			if status, body, err := w.ask(c, "https://example.com/", "Bearer "+guestToken); err != nil || status != 200 || body != want {
				t.Errorf("answer = %d %q, %v, want 200 %q", status, body, err, want)
			}
			if status, body, err := w.ask(c, "https://example.com/?t="+guestToken, ""); err != nil || status != http.StatusForbidden || !strings.Contains(body, "URL") {
				t.Errorf("answer to a placeholder in the URL = %d %q, %v, want %d", status, body, err, http.StatusForbidden)
			}
			r, err := http.NewRequestWithContext(w.ctx(), http.MethodGet, "https://example.com/", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Host = "other.example"
			if status, body, err := do(c, r); err != nil || status != http.StatusMisdirectedRequest {
				t.Errorf("answer to another Host = %d %q, %v, want %d", status, body, err, http.StatusMisdirectedRequest)
			}
			// Another host sees the placeholder, and its connection is not read.
			if status, body, err := w.ask(w.client(), "https://other.example/", guestToken); err != nil || status != 200 || body != guestToken {
				t.Errorf("answer of another host = %d %q, %v, want the placeholder", status, body, err)
			}
			// Without secrets, the guest gets the server's own certificate.
			if _, err := w.g.SetSecrets(nil); err != nil {
				t.Fatal(err)
			}
			if _, _, err := w.ask(c, "https://example.com/", guestToken); err == nil {
				t.Error("request after the secrets were removed succeeded, want an unknown certificate")
			}
		})
	}
}

// What the settings no longer bind is taken from a running gateway, with the rules for it.
func TestRestrictSecrets(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.com", "two.example.com")})
	got := func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(rw, "%t %t", r.Header.Get("Authorization") == realToken, strings.Contains(string(b), realToken))
	}
	w.trusting(w.secureWeb("example.com", 443, http.HandlerFunc(got)))
	w.trusting(w.secureWeb("two.example.com", 443, http.HandlerFunc(got)))
	full := Secret{Name: "TOKEN", Value: secret.NewValue(realToken), Hosts: []string{"example.com", "two.example.com"}, Body: true}
	x, err := w.g.SetSecrets([]Secret{full})
	if err != nil {
		t.Fatal(err)
	}
	c, holder := w.trustful(x, false), x.Placeholders["TOKEN"]
	for _, step := range []struct {
		name     string
		bound    []Secret
		com, org string
	}{
		{"the same", []Secret{full}, "true true", "true true"},
		{"more", []Secret{{Name: "TOKEN", Hosts: []string{"example.net", "two.example.com", "example.com"}, Body: true}}, "true true", "true true"},
		{"no bodies", []Secret{{Name: "TOKEN", Hosts: full.Hosts}}, "true false", "true false"},
		{"one host", []Secret{{Name: "TOKEN", Hosts: []string{"example.com"}, Body: true}}, "true false", "false false"},
		{"another secret", []Secret{{Name: "OTHER", Hosts: full.Hosts}}, "secrets refresh", "false false"},
		{"as before", []Secret{full}, "secrets refresh", "false false"},
	} {
		again, err := w.g.RestrictSecrets(step.bound)
		if err != nil || !bytes.Equal(again.Certificate, x.Certificate) || again.Placeholders["TOKEN"] != holder {
			t.Errorf("%s: the guest needs %+v, %v, want what it has", step.name, again, err)
		}
		for host, want := range map[string]string{"example.com": step.com, "two.example.com": step.org} {
			r, err := http.NewRequestWithContext(w.ctx(), http.MethodPost, "https://"+host+"/", strings.NewReader(holder))
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Authorization", holder)
			client := c
			if w.g.intercepted.Load().find(host) == nil {
				client = w.client() // which trusts the server itself
			}
			if _, answer, err := do(client, r); err != nil || !strings.Contains(answer, want) {
				t.Errorf("%s: answer of %s = %q, %v, want %q", step.name, host, answer, err, want)
			}
		}
	}
}

// Events arrive while the answer continues.
func TestInterceptedStream(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.com")})
	next := make(chan struct{})
	s := w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		for i := range 3 {
			fmt.Fprintf(rw, "data: %d %s\n\n", i, r.Header.Get("Authorization"))
			if err := http.NewResponseController(rw).Flush(); err != nil {
				t.Error(err)
			}
			<-next
		}
	}))
	w.g.roots = x509.NewCertPool()
	w.g.roots.AddCert(s.Certificate())
	c, guestToken := w.bind(true)
	r, err := http.NewRequestWithContext(w.ctx(), http.MethodGet, "https://example.com/", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", guestToken)
	a, err := c.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	lines := bufio.NewScanner(a.Body)
	for i := range 3 {
		if !lines.Scan() || lines.Text() != fmt.Sprintf("data: %d %s", i, strings.Repeat("*", len(realToken))) {
			t.Fatalf("event %d = %q, %v", i, lines.Text(), lines.Err())
		}
		lines.Scan()
		next <- struct{}{}
	}
}

// The part of an answer that came before the server cut it off arrives, and so does the cut.
func TestInterceptedCut(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.com")})
	w.trusting(w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.WriteHeader(http.StatusRequestEntityTooLarge)
		io.WriteString(rw, "too large")
		http.NewResponseController(rw).Flush()
		panic(http.ErrAbortHandler)
	})))
	for _, http2 := range []bool{false, true} {
		c, guestToken := w.bind(http2)
		if status, answer, err := w.ask(c, "https://example.com/", guestToken); status != http.StatusRequestEntityTooLarge || answer != "too large" || err == nil {
			t.Errorf("HTTP/2 %t: answer that was cut off = %d %q, %v, want %d %q and an error", http2, status, answer, err, http.StatusRequestEntityTooLarge, "too large")
		}
	}
}

// A guest cannot make the gateway hold the bodies of any number of requests.
func TestInterceptedBodiesAreBounded(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.com")})
	var running, most atomic.Int64
	arrived, finish := make(chan struct{}, 1000), make(chan struct{})
	w.trusting(w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if now := running.Add(1); now > most.Load() {
			most.Store(now)
		}
		defer running.Add(-1)
		arrived <- struct{}{}
		<-finish
		_, _ = io.Copy(rw, r.Body)
	})))
	c, guestToken := w.bind(true)
	const limit, requests = maxBodies / maxBody, maxBodies/maxBody + 20
	var all sync.WaitGroup
	for range requests {
		all.Go(func() {
			r, err := http.NewRequestWithContext(w.ctx(), http.MethodPost, "https://example.com/", io.MultiReader(strings.NewReader("a body of "), strings.NewReader("unknown length")))
			if err != nil {
				t.Error(err)
				return
			}
			r.Header.Set("Authorization", guestToken)
			if status, body, err := do(c, r); status != http.StatusOK || body != "a body of unknown length" || err != nil {
				t.Errorf("answer = %d %q, %v, want the body", status, body, err)
			}
		})
	}
	for range limit {
		<-arrived
	}
	select {
	case <-arrived:
	case <-time.After(100 * time.Millisecond):
	}
	close(finish)
	all.Wait()
	if most.Load() != limit {
		t.Errorf("requests at once = %d, want %d", most.Load(), limit)
	}
}

// trusting makes the gateway trust a server.
func (w *world) trusting(s *httptest.Server) {
	w.g.roots = x509.NewCertPool()
	w.g.roots.AddCert(s.Certificate())
}

// A WebSocket is passed on in both directions, without the secret in what the server sends.
func TestInterceptedUpgrade(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.com")})
	w.trusting(w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Sec-Websocket-Extensions") != "" {
			t.Errorf("extensions = %q, want none: compressed text is not masked", r.Header.Get("Sec-Websocket-Extensions"))
		}
		conn, rest, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Echo: %s\r\n\r\n%s!", r.Header.Get("Authorization"), r.Header.Get("Authorization"))
		_, _ = io.Copy(conn, rest)
	})))
	c, guestToken := w.bind(false)
	c.Timeout = 0 // hides the stream; the context has a limit
	r, err := http.NewRequestWithContext(w.ctx(), http.MethodGet, "https://example.com/", nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Authorization": guestToken, "Sec-Websocket-Extensions": "permessage-deflate"} {
		r.Header.Set(name, value)
	}
	a, err := c.Do(r)
	if err != nil || a.StatusCode != http.StatusSwitchingProtocols || strings.Contains(a.Header.Get("X-Echo"), realToken) {
		t.Fatalf("upgrade = %+v, %v, want %d without the secret", a, err, http.StatusSwitchingProtocols)
	}
	defer a.Body.Close()
	stream, ok := a.Body.(io.ReadWriter)
	if !ok {
		t.Fatalf("body after the upgrade is a %T, want one that can be written", a.Body)
	}
	if _, err := io.WriteString(stream, "echo"); err != nil {
		t.Fatal(err)
	}
	want := strings.Repeat("*", len(realToken)) + "!echo"
	got := make([]byte, len(want))
	if _, err := io.ReadFull(stream, got); err != nil || string(got) != want {
		t.Errorf("after the upgrade = %q, %v, want %q", got, err, want)
	}
}

// What the server sends before and after its answer contains no secret either.
func TestInterceptedParts(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.com")})
	w.trusting(w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Link", r.Header.Get("Authorization"))
		rw.WriteHeader(http.StatusEarlyHints)
		rw.Header().Set("Trailer", "X-After")
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		fmt.Fprintf(rw, "%d", len(body))
		if err := http.NewResponseController(rw).Flush(); err != nil { // otherwise it has a length, and no trailer
			t.Error(err)
		}
		rw.Header().Set("X-After", r.Header.Get("Authorization"))
	})))
	for _, http2 := range []bool{false, true} {
		c, guestToken := w.bind(http2)
		hints := 0
		ctx := httptrace.WithClientTrace(w.ctx(), &httptrace.ClientTrace{Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
			if code == http.StatusEarlyHints {
				hints++
			}
			return nil
		}})
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://example.com/", strings.NewReader(strings.Repeat("x", 1<<20)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", guestToken)
		r.Header.Set("Expect", "100-continue")
		a, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(a.Body)
		a.Body.Close()
		if err != nil || string(body) != "1048576" || hints > 0 || strings.Contains(fmt.Sprint(a.Header, a.Trailer), realToken) || !strings.Contains(a.Trailer.Get("X-After"), "redacted") {
			t.Errorf("answer = %q, %v, %d early hints, header %v, trailer %v; want 1048576, no hints, and no secret", body, err, hints, a.Header, a.Trailer)
		}
	}
}

// The secret changes while an answer continues, and then it cannot be resolved.
func TestInterceptedRotation(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.com")})
	arrived, next := make(chan string), make(chan struct{})
	w.trusting(w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		arrived <- r.Header.Get("Authorization")
		<-next
		fmt.Fprint(rw, r.Header.Get("Authorization"))
	})))
	c, guestToken := w.bind(true)
	set := func(value, problem string) {
		t.Helper()
		x, err := w.g.SetSecrets([]Secret{{Name: "TOKEN", Like: "ghp_", Value: secret.NewValue(value), Problem: problem, Hosts: []string{"example.com"}}})
		if err != nil || x.Placeholders["TOKEN"] != guestToken {
			t.Errorf("placeholder of the next value = %q, %v, want %q: the guest has it", x.Placeholders["TOKEN"], err, guestToken)
		}
	}
	answers := make(chan string)
	ask := func() {
		_, body, err := w.ask(c, "https://example.com/", guestToken)
		if err != nil {
			t.Error(err)
		}
		answers <- body
	}
	go ask()
	if got := <-arrived; got != realToken {
		t.Errorf("first value = %q, want %q", got, realToken)
	}
	set("ghp_next", "")
	go ask()
	if got := <-arrived; got != "ghp_next" {
		t.Errorf("next value = %q, want ghp_next", got)
	}
	set("", "the vault is sealed")
	close(next)
	for range 2 {
		if got := <-answers; strings.Contains(got, "ghp_") || !strings.HasPrefix(got, "****") {
			t.Errorf("answer to a request from before the change = %q, want the value masked", got)
		}
	}
	if status, body, err := w.ask(c, "https://example.com/", guestToken); err != nil || status != http.StatusBadGateway || !strings.Contains(body, "the secret TOKEN has no value: the vault is sealed") {
		t.Errorf("answer without a value = %d %q, %v, want %d with the reason", status, body, err, http.StatusBadGateway)
	}
	r, err := http.NewRequestWithContext(w.ctx(), http.MethodTrace, "https://example.com/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if status, _, err := do(c, r); err != nil || status != http.StatusMethodNotAllowed {
		t.Errorf("TRACE = %d, %v, want %d", status, err, http.StatusMethodNotAllowed)
	}
}

// TestInterceptedCrowd sends many requests at once.
func TestInterceptedCrowd(t *testing.T) {
	const requests, atOnce = 10_000, 200
	w := newWorld(t, config{policy: allow("example.com")})
	w.trusting(w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != realToken {
			rw.WriteHeader(http.StatusForbidden)
		}
	})))
	c, guestToken := w.bind(true)
	var g errgroup.Group
	g.SetLimit(atOnce)
	for range requests {
		g.Go(func() error {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://example.com/", nil)
			if err != nil {
				return err
			}
			r.Header.Set("Authorization", guestToken)
			if status, _, err := do(c, r); err != nil || status != http.StatusOK {
				return fmt.Errorf("answer = %d, %w", status, err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// trustful returns a client of the guest that trusts the gateway's certificate.
func (w *world) trustful(x Interception, http2 bool) *http.Client {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(x.Certificate)
	c := w.client()
	tr := w.guest.Transport()
	tr.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	var p http.Protocols
	p.SetHTTP1(!http2)
	p.SetHTTP2(http2)
	tr.Protocols = &p
	w.t.Cleanup(tr.CloseIdleConnections)
	c.Transport = tr
	return c
}

// Requests are decided one by one, with or without a secret for the host.
func TestInterceptedRules(t *testing.T) {
	ruled := func(rules policy.RequestRules) *policy.Policy {
		p := allow("example.com", "other.example")
		p.Requests = [][]policy.RequestRules{{rules}}
		return p
	}
	for _, http2 := range []bool{false, true} {
		w := newWorld(t, config{policy: ruled(policy.RequestRules{Host: "example.com", Allow: []string{"GET /**", "POST /mine/**"}, Source: "config.yaml:7"})})
		w.trusting(w.secureWeb("example.com", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(rw, "%s %s %s", r.Method, r.URL.Path, r.Header.Get("X-HTTP-Method-Override")+r.Header.Get("X_http_method_override"))
		})))
		c := w.trustful(w.g.Interception(), http2)
		send := func(method, url string) (int, string) {
			t.Helper()
			r, err := http.NewRequestWithContext(w.ctx(), method, url, nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("X-HTTP-Method-Override", "DELETE")
			r.Header.Set("X_HTTP_Method_Override", "DELETE")
			status, body, err := do(c, r)
			if err != nil {
				t.Fatal(err)
			}
			return status, body
		}
		if status, body := send("GET", "https://example.com/theirs"); status != 200 || body != "GET /theirs " {
			t.Errorf("GET = %d %q, want 200 without the header that replaces the method", status, body)
		}
		if status, body := send("POST", "https://example.com/mine/x"); status != 200 || body != "POST /mine/x " {
			t.Errorf("POST below /mine = %d %q, want 200", status, body)
		}
		if status, body := send("POST", "https://example.com/theirs/%2a?token=secret"); status != http.StatusForbidden || !strings.Contains(body, "no request rule allows it") {
			t.Errorf("POST below /theirs = %d %q, want %d with the reason", status, body, http.StatusForbidden)
		}
		r := w.wait("a denied request", func(r Record) bool { return r.Request != "" })
		if r.Allowed || r.Request != "POST https://example.com/theirs/%2a" || r.Name != "example.com" || r.Conn != 0 {
			t.Errorf("record of a denied request = %+v, want its method and URL without the query", r)
		}
		if status, body := send("POST", "http://example.com/theirs"); status != http.StatusForbidden || !strings.Contains(body, "no request rule allows it") {
			t.Errorf("POST without TLS = %d %q, want %d with the reason", status, body, http.StatusForbidden)
		}
		// The policy changes while the connection is open.
		w.g.SetPolicy(ruled(policy.RequestRules{Host: "example.com", Deny: []string{"GET /theirs"}}))
		if status, body := send("GET", "https://example.com/theirs"); status != http.StatusForbidden || !strings.Contains(body, "denied by a request rule") {
			t.Errorf("GET with another policy = %d %q, want %d", status, body, http.StatusForbidden)
		}
		// Rules for another host need another certificate.
		before := w.g.Interception()
		w.g.SetPolicy(ruled(policy.RequestRules{Host: "other.example", Deny: []string{"GET /theirs"}}))
		if now := w.g.Interception(); len(now.Certificate) == 0 || string(now.Certificate) == string(before.Certificate) {
			t.Error("certificate for rules of another host = the same, want one for it")
		}
		w.g.SetPolicy(allow("example.com"))
		if now := w.g.Interception(); now.Certificate != nil {
			t.Errorf("interception without rules = %+v, want none", now)
		}
	}
}
