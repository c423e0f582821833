package session

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// maxRequestHead limits how much of a client's request is held back while it looks
// like HTTP.
const maxRequestHead = 64 << 10

// browserCheck reads from a client of a published port. It refuses a connection that
// a browser makes on behalf of a page that must not use the port. A browser uses
// separate connections for each host and port, so checking the first request is
// enough. Anything that is not HTTP passes.
type browserCheck struct {
	net.Conn
	guest   io.Closer
	session string
	port    PublishedPort
	head    []byte
	checked bool
	refused error
	decided chan struct{} // closed at the end of the check
}

func (b *browserCheck) Read(p []byte) (int, error) {
	for !b.checked {
		n, err := b.Conn.Read(p)
		b.head = append(b.head, p[:n]...)
		end := requestEnd(b.head)
		reason := ""
		switch {
		case end > maxRequestHead, end == 0 && len(b.head) >= maxRequestHead:
			reason = fmt.Sprintf("request header is longer than %d bytes", maxRequestHead)
		case end == 0 && err == nil:
			continue
		case end > 0:
			reason = b.refuse(b.head[:end])
		}
		if reason != "" { // answer first: the end of the other direction closes the connection
			fmt.Fprintf(b.Conn, "HTTP/1.1 421 Misdirected Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s\n", len(reason)+1, reason)
			b.refused = errors.New(reason)
			b.guest.Close() //nolint:errcheck // the guest no longer takes part
		}
		b.checked = true
		close(b.decided)
	}
	if b.refused != nil {
		return 0, b.refused
	}
	if len(b.head) > 0 {
		n := copy(p, b.head)
		b.head = b.head[n:]
		return n, nil
	}
	return b.Conn.Read(p)
}

// answerCheck reads from the guest. What looks like an HTTP response waits for the
// check of its request, because a browser would also accept a response that arrives
// early.
type answerCheck struct {
	net.Conn
	request *browserCheck
	first   []byte
	passed  bool
}

// maxSlop is how many bytes into a stream a browser looks for an HTTP response.
const maxSlop = 8

func (a *answerCheck) Read(p []byte) (int, error) {
	if !a.passed {
		a.passed = true
		a.first = make([]byte, maxSlop)
		n, err := io.ReadFull(a.Conn, a.first)
		a.first = a.first[:n]
		if err == nil && bytes.Contains(bytes.ToLower(a.first), []byte("http")) {
			<-a.request.decided
			if a.request.refused != nil {
				return 0, a.request.refused
			}
		}
	}
	if len(a.first) > 0 {
		n := copy(p, a.first)
		a.first = a.first[n:]
		return n, nil
	}
	return a.Conn.Read(p)
}

// browserMethods are the methods that a page can use, some of them after a preflight
// request.
var browserMethods = []string{"GET ", "HEAD ", "POST ", "OPTIONS ", "PUT ", "DELETE ", "PATCH "}

// requestEnd returns where the head of an HTTP request ends. It returns 0 while that
// is unknown, and -1 when b does not begin a browser's request.
func requestEnd(b []byte) int {
	if !slices.ContainsFunc(browserMethods, func(m string) bool {
		n := min(len(m), len(b))
		return string(b[:n]) == m[:n]
	}) {
		return -1
	}
	line, _, whole := bytes.Cut(b, []byte("\n"))
	if whole && !bytes.HasSuffix(line, []byte(" HTTP/1.1\r")) {
		return -1
	}
	before, _, ended := bytes.Cut(b, []byte("\r\n\r\n"))
	if !ended {
		return 0
	}
	return len(before) + 4
}

// refuse returns why a request must not reach the guest, or "" when it may.
//
// Cookies do not distinguish ports: at "localhost" or 127.0.0.1 a browser would send
// the guest the cookies of the user's other programs. Only a client that shows no
// sign of a browser may use such a name. Any other name is one that its owner pointed
// at this address, to read the guest's pages as if they were its own (DNS rebinding).
// And a page of one session must not act on the ports of another.
func (b *browserCheck) refuse(head []byte) string {
	r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(head)))
	if err != nil {
		return "request cannot be parsed: " + err.Error()
	}
	if !strings.EqualFold(r.Host, b.port.host(b.session)) && !isPlainClient(r) {
		return fmt.Sprintf("use %s/ in a browser", b.port.URL(b.session))
	}
	if origin := r.Header["Origin"]; len(origin) > 0 {
		u, err := url.Parse(origin[0])
		if len(origin) > 1 || err != nil || u.Host == "" {
			return fmt.Sprintf("a page without an origin may not use a port of session %s", b.session)
		}
		name, ours := "."+strings.ToLower(u.Hostname()), "."+strings.ToLower(b.session)+".localhost"
		if strings.HasSuffix(name, ".localhost") && name != ".localhost" && !strings.HasSuffix(name, ours) {
			return fmt.Sprintf("a page from %s may not use a port of session %s", u.Host, b.session)
		}
	}
	return ""
}

// isPlainClient reports whether a request for the loopback address has none of the
// headers that a browser adds.
func isPlainClient(r *http.Request) bool {
	for name := range r.Header {
		if name == "Cookie" || name == "Origin" || name == "Referer" || strings.HasPrefix(name, "Sec-Fetch-") {
			return false
		}
	}
	u, err := url.Parse("//" + r.Host)
	if err != nil {
		return false
	}
	addr, err := netip.ParseAddr(u.Hostname())
	return u.Hostname() == "localhost" || err == nil && addr.IsLoopback()
}
