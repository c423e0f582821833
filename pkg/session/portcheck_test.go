package session

import (
	"io"
	"net"
	"strings"
	"testing"
)

// tcpPair returns both ends of a connection.
func tcpPair(t *testing.T) (*net.TCPConn, *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a.(*net.TCPConn), b.(*net.TCPConn)
}

// Browsers may use a published port only under its own name. Cookies of localhost
// belong to all programs of the user, and a page of one session must not use
// another's ports.
func TestPublishedPortChecksBrowsers(t *testing.T) {
	const name = "agent-Owner-repo-abcdef"
	port := PublishedPort{Guest: 3000, Host: 40123}
	const ours = "Host: 3000.agent-owner-repo-abcdef.localhost:40123\r\n"
	for what, c := range map[string]struct {
		said    string
		refused string // "" when the request passes
	}{
		"a browser":                    {"GET / HTTP/1.1\r\n" + ours + "Cookie: a=b\r\nSec-Fetch-Site: none\r\n\r\n", ""},
		"with a body":                  {"POST /x HTTP/1.1\r\n" + ours + "Content-Length: 4\r\n\r\nbody", ""},
		"a page of the same session":   {"POST / HTTP/1.1\r\n" + ours + "Origin: http://5173.agent-owner-repo-abcdef.localhost:40999\r\n\r\n", ""},
		"a page of the user's":         {"POST / HTTP/1.1\r\n" + ours + "Origin: http://localhost:8080\r\n\r\n", ""},
		"a page of the internet":       {"POST / HTTP/1.1\r\n" + ours + "Origin: https://login.example\r\n\r\n", ""},
		"curl on localhost":            {"GET / HTTP/1.1\r\nHost: localhost:40123\r\nUser-Agent: curl/8\r\n\r\n", ""},
		"curl on 127.0.0.1":            {"DELETE / HTTP/1.1\r\nHost: 127.0.0.1:40123\r\n\r\n", ""},
		"curl on ::1":                  {"GET / HTTP/1.1\r\nHost: [::1]:40123\r\n\r\n", ""},
		"not HTTP":                     {"\x00\x01binary", ""},
		"a line that begins like HTTP": {"GET key\r\n", ""},
		"HTTP of no browser":           {"GET / HTTP/1.1\nHost: x\n\n", ""},
		"HTTP/1.0":                     {"GET / HTTP/1.0\r\n\r\n", ""},
		"another method":               {"PING", ""},
		"half a request":               {"GET / HT", ""},
		"a browser on localhost":       {"GET / HTTP/1.1\r\nHost: localhost:40123\r\nSec-Fetch-Site: none\r\n\r\n", "use http://3000." + name + ".localhost:40123/"},
		"cookies on localhost":         {"GET / HTTP/1.1\r\nHost: localhost:40123\r\ncookie: secret\r\n\r\n", "use http://"},
		"cookies on 127.0.0.1":         {"GET / HTTP/1.1\r\nHost: 127.0.0.1:40123\r\nCookie: secret\r\n\r\n", "use http://"},
		"a form on localhost":          {"POST / HTTP/1.1\r\nHost: localhost:40123\r\nOrigin: http://localhost:40123\r\n\r\n", "use http://"},
		"from a page, on localhost":    {"GET / HTTP/1.1\r\nHost: localhost:40123\r\nReferer: http://x.example/\r\n\r\n", "use http://"},
		"a name that points here":      {"GET / HTTP/1.1\r\nHost: evil.example:40123\r\n\r\n", "use http://"},
		"another port's name":          {"GET / HTTP/1.1\r\nHost: 3001.agent-owner-repo-abcdef.localhost:40123\r\n\r\n", "use http://"},
		"another session's name":       {"GET / HTTP/1.1\r\nHost: 3000.agent-owner-repo-fedcba.localhost:40123\r\n\r\n", "use http://"},
		"no Host":                      {"GET / HTTP/1.1\r\n\r\n", "use http://"},
		"a page of another session":    {"GET /ws HTTP/1.1\r\n" + ours + "Upgrade: websocket\r\nOrigin: http://3000.agent-owner-other-fedcba.localhost:40124\r\n\r\n", "a page from 3000.agent-owner-other-fedcba"},
		"one whose name ends like it":  {"GET / HTTP/1.1\r\n" + ours + "Origin: http://xagent-owner-repo-abcdef.localhost:1\r\n\r\n", "a page from xagent"},
		"a page without an origin":     {"POST / HTTP/1.1\r\n" + ours + "Origin: null\r\n\r\n", "without an origin"},
		"two origins":                  {"POST / HTTP/1.1\r\n" + ours + "Origin: http://localhost\r\nOrigin: http://localhost\r\n\r\n", "without an origin"},
		"a header that is none":        {"GET / HTTP/1.1\r\n" + ours + "broken\r\n\r\n", "cannot be parsed"},
		"a head without an end":        {"GET /" + strings.Repeat("x", maxRequestHead) + " HTTP/1.1\r\nHost: evil.example\r\n\r\n", "longer than"},
	} {
		t.Run(what, func(t *testing.T) {
			browser, local := tcpPair(t)
			remote, guest := tcpPair(t)
			check := &browserCheck{Conn: local, guest: remote, session: name, port: port, decided: make(chan struct{})}
			// What the guest sends before the request waits for the check.
			io.WriteString(guest, "\r\n\r\nHTTP/1.1 200 OK\r\n\r\n")
			heard := make(chan string, 1)
			go func() {
				b, _ := io.ReadAll(&answerCheck{Conn: remote, request: check})
				heard <- string(b)
			}()
			go func() {
				for _, c := range []byte(c.said) {
					browser.Write([]byte{c})
				}
				browser.CloseWrite()
			}()
			passed, err := io.ReadAll(check)
			guest.Close()
			early := <-heard
			if c.refused == "" {
				if err != nil || string(passed) != c.said || !strings.Contains(early, "200 OK") {
					t.Errorf("request = %q, %v, answer %q, want %q, nil, 200 OK", passed, err, early, c.said)
				}
				return
			}
			if err == nil || len(passed) > 0 || early != "" {
				t.Errorf("refused request = %q to the guest, %v, %q to the browser before, want nothing, an error, nothing", passed, err, early)
			}
			local.CloseWrite()
			answer, _ := io.ReadAll(browser)
			if !strings.HasPrefix(string(answer), "HTTP/1.1 421 ") || !strings.Contains(string(answer), c.refused) {
				t.Errorf("answer to the browser = %q, want status 421 with %q", answer, c.refused)
			}
		})
	}
}

// A server that speaks first is heard immediately.
func TestPublishedPortHearsTheServerFirst(t *testing.T) {
	_, local := tcpPair(t)
	remote, guest := tcpPair(t)
	check := &browserCheck{Conn: local, guest: remote, decided: make(chan struct{})}
	io.WriteString(guest, "220 ready\r\n")
	b := make([]byte, len("220 ready\r\n"))
	if _, err := io.ReadFull(&answerCheck{Conn: remote, request: check}, b); err != nil || string(b) != "220 ready\r\n" {
		t.Errorf("first bytes of the server = %q, %v, want \"220 ready\\r\\n\"", b, err)
	}
	guest.Close()
}

// Data in either direction counts as use, and one direction can still be closed alone.
func TestCountingConn(t *testing.T) {
	a, b := tcpPair(t)
	used := 0
	c := countingConn{a, func() { used++ }}
	if _, err := io.WriteString(c, "to"); err != nil || used != 1 {
		t.Errorf("signs of use after a write = %d, %v, want 1", used, err)
	}
	if _, err := io.WriteString(b, "from"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil || used < 2 {
		t.Errorf("signs of use after a read = %d, %v, want 2", used, err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(b); err != nil || string(rest) != "to" {
		t.Errorf("the other end read %q, %v, want \"to\" and the end", rest, err)
	}
}
