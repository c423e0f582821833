package gateway

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

// raw connects to a name and sends text. It returns the connection and its reader.
func (w *world) raw(name string, port uint16, said string) (net.Conn, *bufio.Reader) {
	w.t.Helper()
	c := w.dial(name, port)
	if _, err := io.WriteString(c, said); err != nil {
		w.t.Fatal(err)
	}
	return c, bufio.NewReader(c)
}

func response(t *testing.T, r *bufio.Reader) (int, string) {
	t.Helper()
	a, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err != nil {
		t.Fatal(err)
	}
	return a.StatusCode, string(b)
}

func TestHTTPIsPassedOnAsItIs(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	type got struct {
		method, uri, host, body string
		header                  http.Header
	}
	requests := make(chan got, 10)
	w.web("example.org", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		requests <- got{r.Method, r.RequestURI, r.Host, string(b), r.Header}
		rw.Header()["Date"], rw.Header()["Content-Type"] = nil, nil
		rw.WriteHeader(http.StatusTeapot)
		io.WriteString(rw, "short and stout")
	}))
	_, r := w.raw("example.org", 80, "POST /a%2fb//c?x=1;y=%zz HTTP/1.1\r\nHost: EXAMPLE.org:80\r\nContent-Length: 3\r\nX-Thing: 1\r\n"+
		"X-Forwarded-For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\n\r\nabc")
	a, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(a.Body)
	if a.StatusCode != http.StatusTeapot || string(b) != "short and stout" || len(a.Header) != 1 {
		t.Errorf("answer = %d %v %q, want %d, one header, %q", a.StatusCode, a.Header, b, http.StatusTeapot, "short and stout")
	}
	q := <-requests
	if want := (got{method: "POST", uri: "/a%2fb//c?x=1;y=%zz", host: "example.org", body: "abc"}); q.method != want.method || q.uri != want.uri || q.host != want.host || q.body != want.body {
		t.Errorf("request = %+v, want %+v and its header", q, want)
	}
	var names []string
	for name := range q.header {
		names = append(names, name)
	}
	slices.Sort(names)
	if got, want := strings.Join(names, " "), "Content-Length X-Thing"; got != want {
		t.Errorf("names in the request's header = %q, want %q", got, want)
	}
	opened := w.wait("an allowed HTTP connection", func(r Record) bool { return r.Proto == "http" && r.Allowed })
	if opened.Name != "example.org" || opened.Addr.String() != "203.0.113.1" {
		t.Errorf("record = %+v, want Name example.org, Addr 203.0.113.1", opened)
	}
}

func TestHTTPEveryRequestIsChecked(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org", "other.example")})
	var hits atomic.Int64
	w.web("example.org", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		hits.Add(1)
		io.WriteString(rw, "ok "+r.Host)
	}))
	const good = "GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"
	for name, test := range map[string]struct {
		second string
		status int
	}{
		"another Host":            {"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n", 421},
		"another port":            {"GET / HTTP/1.1\r\nHost: example.org:8080\r\n\r\n", 421},
		"an address":              {"GET / HTTP/1.1\r\nHost: 203.0.113.1\r\n\r\n", 421},
		"no Host":                 {"GET / HTTP/1.0\r\n\r\n", 421},
		"absolute form":           {"GET http://other.example/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 421},
		"absolute form of https":  {"GET https://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", 421},
		"CONNECT":                 {"CONNECT example.org:80 HTTP/1.1\r\nHost: example.org:80\r\n\r\n", 405},
		"CONNECT to another":      {"CONNECT other.example:443 HTTP/1.1\r\nHost: example.org\r\n\r\n", 405},
		"HTTP/2 without TLS":      {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505},
		"two Hosts":               {"GET / HTTP/1.1\r\nHost: example.org\r\nHost: other.example\r\n\r\n", 400},
		"user in the Host":        {"GET / HTTP/1.1\r\nHost: example.org@other.example\r\n\r\n", 400},
		"a line in the Host":      {"GET / HTTP/1.1\r\nHost: example.org\r\n Host: other.example\r\n\r\n", 400},
		"a space before a colon":  {"GET / HTTP/1.1\r\nHost : other.example\r\n\r\n", 400},
		"no request":              {"\x16\x03\x01\r\n\r\n", 400},
		"chunked twice":           {"GET / HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 501},
		"two different lengths":   {"POST / HTTP/1.1\r\nHost: example.org\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400},
		"a negative length":       {"POST / HTTP/1.1\r\nHost: example.org\r\nContent-Length: -1\r\n\r\n", 400},
		"a header without an end": {"GET / HTTP/1.1\r\nHost: example.org\r\nX: " + strings.Repeat("x", 200<<10) + "\r\n\r\n", 431},
	} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			before := hits.Load()
			c, r := w.raw("example.org", 80, good)
			if status, body := response(t, r); status != 200 || body != "ok example.org" {
				t.Fatalf("first request = %d %q, want 200 %q", status, body, "ok example.org")
			}
			io.WriteString(c, test.second)
			if status, _ := response(t, r); status != test.status {
				t.Errorf("second request, %.100q: status %d, want %d", test.second, status, test.status)
			}
			if rest, _ := io.ReadAll(r); len(rest) > 0 {
				t.Errorf("after the refusal: read %q, want nothing", rest)
			}
			if n := hits.Load() - before; n != 1 {
				t.Errorf("%d requests reached the server, want 1", n)
			}
		})
	}
	w.waitDenied(`HTTP Host "other.example" differs from the dialled name`)
	w.waitDenied("CONNECT")
	w.waitDenied("HTTP/2")
}

// TestHTTPSmuggling checks that a request hidden in the body of another one, for a
// server that computes the length differently, reaches the server as part of that body.
func TestHTTPSmuggling(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	type got struct{ uri, body string }
	requests := make(chan got, 10)
	w.web("example.org", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		requests <- got{r.RequestURI, string(b)}
	}))
	hidden := "GET /hidden HTTP/1.1\r\nHost: other.example\r\n\r\n"
	chunk := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(hidden), hidden)
	_, r := w.raw("example.org", 80, "POST /te HTTP/1.1\r\nHost: example.org\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"+chunk)
	if status, _ := response(t, r); status != 200 && status != 400 {
		t.Errorf("POST /te = %d, want 200 or 400", status)
	} else if status == 200 {
		if q := <-requests; q.uri != "/te" || q.body != hidden {
			t.Errorf("the server read %+v, want uri /te and body %q", q, hidden)
		}
	}
	_, r = w.raw("example.org", 80, "POST /cl HTTP/1.1\r\nHost: example.org\r\nContent-Length: "+fmt.Sprint(len(hidden))+"\r\nTransfer-Encoding : chunked\r\n\r\n"+hidden)
	if status, _ := response(t, r); status != 400 {
		t.Errorf("POST /cl with a space before the colon = %d, want 400", status)
	}
	for len(requests) > 0 {
		if q := <-requests; q.uri == "/hidden" {
			t.Errorf("the server read %+v as a request, want it as a body", q)
		}
	}
}

func TestHTTPUpgrade(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	w.server("example.org", 80, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		if r.Header.Get("Upgrade") == "" {
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\nfirst", r.Header.Get("Upgrade"))
		io.Copy(c, c)
	})
	c, r := w.raw("example.org", 80, "GET /chat HTTP/1.1\r\nHost: example.org\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	a, err := http.ReadResponse(r, nil)
	if err != nil || a.StatusCode != http.StatusSwitchingProtocols || a.Header.Get("Upgrade") != "websocket" {
		t.Fatalf("Upgrade to websocket = %+v, %v, want status %d", a, err, http.StatusSwitchingProtocols)
	}
	expectRead(t, r, "first")
	for range 3 {
		io.WriteString(c, "\x81\x02hi")
		expectRead(t, r, "\x81\x02hi")
	}
	c.Close()
	end := w.wait("the end of an HTTP connection", func(r Record) bool { return r.End && r.Proto == "http" })
	if end.BytesIn == 0 || end.BytesOut == 0 {
		t.Errorf("end record = %+v, want bytes in both directions", end)
	}
	// Other upgrades would escape the checks, so the request is passed on without them.
	for _, to := range []string{"h2c", "TLS/1.0", "websocket, h2c", "tcp"} {
		_, r := w.raw("example.org", 80, "GET / HTTP/1.1\r\nHost: example.org\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nUpgrade: "+to+"\r\n\r\n")
		if status, body := response(t, r); status != 200 || body != "no" {
			t.Errorf("Upgrade to %q = %d %q, want 200 %q", to, status, body, "no")
		}
	}
}

func TestHTTPStreams(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	more := make(chan struct{})
	w.web("example.org", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		rw.Header().Set("Trailer", "X-Sum")
		rw.Header().Set("Link", "</style.css>")
		rw.WriteHeader(http.StatusEarlyHints)
		for i := range 3 {
			fmt.Fprintf(rw, "data: %d\n\n", i)
			http.NewResponseController(rw).Flush()
			<-more // the client has read it
		}
		rw.Header().Set("X-Sum", "3")
	}))
	hints := 0
	ctx := httptrace.WithClientTrace(w.ctx(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		if code == http.StatusEarlyHints && h.Get("Link") == "</style.css>" {
			hints++
		}
		return nil
	}})
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://example.org/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	a, err := w.client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	for i := range 3 {
		expectRead(t, a.Body, fmt.Sprintf("data: %d\n\n", i))
		more <- struct{}{}
	}
	if b, err := io.ReadAll(a.Body); err != nil || len(b) > 0 || a.Trailer.Get("X-Sum") != "3" {
		t.Errorf("end of the body = %q, %v, trailer %v, want no more bytes, X-Sum 3", b, err, a.Trailer)
	}
	if hints != 1 {
		t.Errorf("%d early hints arrived, want 1", hints)
	}
}

// TestHTTPElsewhere checks that HTTP is recognised by its content on a port that only a
// rule opened.
func TestHTTPElsewhere(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:8080", "line.example:8080")})
	var hits atomic.Int64
	w.web("example.org", 8080, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		hits.Add(1)
		io.WriteString(rw, r.Host)
	}))
	status, body, err := w.get(w.client(), "http://example.org:8080/")
	if err != nil || status != 200 || body != "example.org:8080" {
		t.Fatalf("GET http://example.org:8080/ = %d %q, %v, want 200 %q", status, body, err, "example.org:8080")
	}
	n := hits.Load()
	for _, said := range []string{
		"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n",
		"\r\n\r\nGET / HTTP/1.1\r\nHost: other.example\r\n\r\n",
		"INVENTED / http/1.1\r\nHost: other.example\r\n\r\n",
		"GET\t/\tHTTP/1.1\r\nHost: other.example\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	} {
		c, r := w.raw("example.org", 8080, said[:1])
		for i := 1; i < len(said); i++ { // also byte by byte
			io.WriteString(c, said[i:i+1])
		}
		// Bytes that are sent after the refusal may turn it into a reset.
		if a, err := http.ReadResponse(r, nil); err == nil && a.StatusCode < 400 || err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%q = %+v, %v, want an error status or a reset", said, a, err)
		}
	}
	if got := hits.Load(); got != n {
		t.Errorf("%d requests reached the server, want %d", got, n)
	}
	w.waitDenied(`HTTP Host "other.example" differs from the dialled name`)
	// A line that is not HTTP passes.
	w.server("line.example", 8080, echo)
	_, r := w.raw("line.example", 8080, "EHLO me\r\n")
	expectRead(t, r, "EHLO me\r\n")
	_, r = w.raw("line.example", 8080, "0032git-upload-pack /project.git\x00host=line.example\x00")
	expectRead(t, r, "0032git-upload-pack /project.git\x00host=line.example\x00")
	// A line without an end is held back, but not for ever.
	c, r := w.raw("line.example", 8080, strings.Repeat("x", maxFirstLine))
	defer c.Close()
	if b, err := io.ReadAll(r); err == nil || len(b) > 0 {
		t.Errorf("%d bytes of a line without an end passed, %v, want 0 and an error", len(b), err)
	}
	w.waitDenied("too long")
}

func TestHTTPUpstreamFails(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org", "nowhere.example")})
	w.internet("nowhere.example", 443, "127.0.0.1:1")
	for _, name := range []string{"example.org", "nowhere.example"} {
		status, body, err := w.get(w.client(), "http://"+name+"/")
		if err != nil || status != 502 || !strings.Contains(body, "agent-sessionizer") {
			t.Errorf("GET http://%s/ = %d %q, %v, want 502 with %q", name, status, body, err, "agent-sessionizer")
		}
		r := w.wait("the end of the connection to "+name, func(r Record) bool { return r.Name == name && r.End })
		if !r.Allowed || r.Reason == "" {
			t.Errorf("end record = %+v, want Allowed with a Reason", r)
		}
	}
	// A guest that disconnects while the server is slow does not count as a failure of
	// the server.
	entered := make(chan struct{})
	w.web("slow.example", 80, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(entered)
		<-r.Context().Done()
	}))
	w.g.SetPolicy(allow("slow.example"))
	ctx, cancel := context.WithCancel(w.ctx())
	go func() { <-entered; cancel() }()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://slow.example/", nil)
	if err != nil {
		t.Fatal(err)
	}
	if status, body, err := do(w.client(), r); err == nil {
		t.Errorf("cancelled GET http://slow.example/ = %d %q, want an error", status, body)
	}
	w.wait("the end of the connection to slow.example", func(r Record) bool { return r.Name == "slow.example" && r.End })
}
