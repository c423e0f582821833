package intercept

import (
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// handshake connects a client, which trusts only a and expects to talk to name, to a server
// with the certificate for host.
func handshake(t *testing.T, a *Authority, c *tls.Certificate, name string) error {
	t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(a.PEM()) {
		t.Fatal("PEM is not a certificate")
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*c}, MinVersion: tls.VersionTLS12})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if s, err := l.Accept(); err == nil {
			_, _ = io.Copy(io.Discard, s)
			s.Close()
		}
	}()
	d := tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: name, MinVersion: tls.VersionTLS12}}
	conn, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err == nil {
		conn.Close()
	}
	return err
}

func TestAuthority(t *testing.T) {
	a, err := NewAuthority([]string{"api.example.org", "github.com"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Certificate("github.com")
	if err != nil {
		t.Fatal(err)
	}
	if err := handshake(t, a, c, "github.com"); err != nil {
		t.Errorf("handshake with github.com = %v, want nil", err)
	}
	if err := handshake(t, a, c, "api.example.org"); err == nil {
		t.Error("handshake of github.com as api.example.org succeeded, want an error")
	}
	if again, err := a.Certificate("github.com"); err != nil || again != c {
		t.Errorf("Certificate again = %p, %v, want the same", again, err)
	}
	for _, host := range []string{"example.org", "evil.example", "", "sub.github.com"} {
		if _, err := a.Certificate(host); err == nil {
			t.Errorf("Certificate(%q) = nil error, want one", host)
		}
	}
	// A process that had the key could still make no certificate for another name or an address.
	for _, names := range [][]string{{"evil.example"}, {"127.0.0.1"}} {
		forged := &Authority{hosts: names, cert: a.cert, key: a.key, leaves: map[string]*tls.Certificate{}}
		c, err := forged.Certificate(names[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := handshake(t, a, c, names[0]); err == nil {
			t.Errorf("handshake with a forged certificate for %s succeeded, want an error", names[0])
		}
	}
	wild, err := NewAuthority([]string{"*.example.org"})
	if err != nil {
		t.Fatal(err)
	}
	if c, err := wild.Certificate("a.b.example.org"); err != nil || handshake(t, wild, c, "a.b.example.org") != nil {
		t.Errorf("certificate below *.example.org: %v, want a valid one", err)
	}
	for host, want := range map[string]bool{"a.example.org": true, "*.a.example.org": true, "*.example.org": true, "example.org": false, "aexample.org": false} {
		if wild.Covers(host) != want {
			t.Errorf("Covers(%q) = %t, want %t", host, !want, want)
		}
	}
	if _, err := NewAuthority(nil); err == nil {
		t.Error("NewAuthority(nil) = nil error, want one")
	}
	if other, err := NewAuthority([]string{"github.com"}); err != nil || other.key.Equal(a.key) {
		t.Errorf("key of another authority = the same, %v, want another", err)
	}
}

const (
	token  = "ghp_RealRealRealRealReal0123456789abcdef"
	holder = "ghp_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
)

func githubExchange() *Exchange {
	return NewExchange([]Bound{{Name: "GITHUB_TOKEN", Placeholder: holder, Value: secret.NewValue(token)}})
}

func TestExchangeRequest(t *testing.T) {
	basic := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	for _, c := range []struct{ url, header, want string }{
		{"https://github.com/", "Bearer " + holder, "Bearer " + token},
		{"https://github.com/", "token " + holder + "," + holder, "token " + token + "," + token},
		{"https://github.com/", basic("x:" + holder), basic("x:" + token)},
		{"https://github.com/", strings.ToLower(basic("")[:5]) + " " + basic(holder + ":")[6:], "basic " + basic(token + ":")[6:]},
		{"https://github.com/", "Basic !" + holder, "Basic !" + token},
		{"https://github.com/", "nothing", "nothing"},
		{"https://github.com/" + holder, "", ""},
		{"https://github.com/?t=" + holder, "", ""},
		{"https://github.com/?t=" + strings.ReplaceAll(holder, "_", "%5f"), "", ""},
		{"https://github.com/" + strings.ReplaceAll(holder, "_", "%5F"), "", ""},
		{"https://" + holder + "@github.com/", "", ""},
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		var err error
		if r.URL, err = url.Parse(c.url); err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", c.header)
		err = githubExchange().Request(r)
		if c.want == "" {
			if !errors.Is(err, ErrInURL) {
				t.Errorf("Request for %s = %v, want %v", c.url, err, ErrInURL)
			}
			continue
		}
		if got := r.Header.Get("Authorization"); err != nil || got != c.want {
			t.Errorf("Request with %q = %q, %v, want %q", c.header, got, err, c.want)
		}
	}
	bad := NewExchange([]Bound{{Name: "KEY", Placeholder: holder, Value: secret.NewValue("two\nlines")}})
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	r.Header.Set("X-Key", holder)
	if err := bad.Request(r); err == nil || strings.Contains(err.Error(), "lines") || !strings.Contains(err.Error(), "KEY") {
		t.Errorf("Request with a value of two lines = %v, want an error with the name only", err)
	}
}

// TestExchangeMissing uses the placeholder of a secret that could not be resolved.
func TestExchangeMissing(t *testing.T) {
	e := NewExchange([]Bound{{Name: "KEY", Placeholder: holder, Body: true, Problem: "the file is gone"}})
	for name, r := range map[string]*http.Request{
		"header": httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil),
		"body":   httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader("a "+holder)),
	} {
		if name == "header" {
			r.Header.Set("X-Key", holder)
		}
		err := e.Request(r)
		if missing, ok := errors.AsType[*MissingError](err); !ok || missing.Name != "KEY" || !strings.Contains(err.Error(), "the file is gone") {
			t.Errorf("Request with a missing secret in its %s = %v, want the name and the problem", name, err)
		}
	}
	if err := e.Request(httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)); err != nil {
		t.Errorf("Request without the placeholder = %v, want nil", err)
	}
}

func TestExchangeBody(t *testing.T) {
	short := "-" + holder + "-" + holder
	long := strings.Repeat("x", 17<<10) + holder + strings.Repeat("y", maxBuffered) + holder
	for _, c := range []struct {
		body    string
		length  int64 // as announced; -1 if it is not
		replace bool
	}{
		{short, int64(len(short)), true},
		{short, -1, true},
		{long, int64(len(long)), true},
		{long, -1, true},
		{short, int64(len(short)), false},
		{"", 0, true},
		{holder[:len(holder)-1], -1, true},
	} {
		for _, read := range []func(io.Reader) io.Reader{iotest.OneByteReader, iotest.DataErrReader} {
			if len(c.body) > maxBuffered {
				read = iotest.HalfReader
			}
			e := NewExchange([]Bound{{Name: "KEY", Placeholder: holder, Value: secret.NewValue(token + "longer"), Body: c.replace}})
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", read(strings.NewReader(c.body)))
			r.ContentLength = c.length
			if err := e.Request(r); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r.Body)
			want := c.body
			if c.replace {
				want = strings.ReplaceAll(c.body, holder, token+"longer")
			}
			if err != nil || string(got) != want {
				t.Errorf("body of %d bytes (%d announced) = %d bytes, %v, want %d", len(c.body), c.length, len(got), err, len(want))
			}
			if r.ContentLength >= 0 && r.ContentLength != int64(len(got)) {
				t.Errorf("length of a body of %d bytes = %d", len(got), r.ContentLength)
			}
		}
	}
}

// The host reflects what it received in every way; nothing of that reaches the guest.
func TestExchangeResponse(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := r.Header.Get("Authorization")
		w.Header().Set("Trailer", "X-After")
		w.Header().Set("X-Echo", got)
		w.Header().Set("Location", "https://evil.example/?t="+url.QueryEscape(got))
		var out io.Writer = w
		switch r.Header.Get("X-Mode") {
		case "gzip":
			if r.Header.Get("Accept-Encoding") != "gzip" {
				t.Errorf("Accept-Encoding = %q, want gzip", r.Header.Get("Accept-Encoding"))
			}
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			defer z.Close()
			out = z
		case "br":
			w.Header().Set("Content-Encoding", "br")
		}
		fmt.Fprintf(out, "plain %s, base64 %s, json %q, half ", got, base64.StdEncoding.EncodeToString([]byte(got)), got)
		for _, b := range []byte(got) {
			fmt.Fprintf(out, "%c", b)
			if f, ok := w.(http.Flusher); ok {
				f.Flush()
			}
		}
		w.Header().Set("X-After", got)
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	for _, mode := range []string{"", "gzip", "br"} {
		e := githubExchange()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", holder)
		r.Header.Set("X-Mode", mode)
		if err := e.Request(r); err != nil {
			t.Fatal(err)
		}
		res, err := s.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		err = e.Response(res)
		if (err != nil) != (mode == "br") {
			t.Errorf("Response with the encoding %q = %v", mode, err)
		}
		body, err := io.ReadAll(iotest.OneByteReader(res.Body))
		if err := errors.Join(err, res.Body.Close()); err != nil {
			t.Fatal(err)
		}
		all := fmt.Sprint(res.Header, res.Trailer, string(body))
		if mode == "br" {
			continue
		}
		for what, form := range map[string]string{"plain": token, "base64": base64.StdEncoding.EncodeToString([]byte(token))} {
			if strings.Contains(all, form) {
				t.Errorf("answer with the encoding %q = %s, want it without the secret, %s", mode, all, what)
			}
		}
		if !strings.HasPrefix(string(body), "plain *****") || res.Trailer.Get("X-After") == "" || !strings.HasSuffix(string(body), "***") {
			t.Errorf("body = %s, trailers %v, want the rest of it", body, res.Trailer)
		}
	}
}

func TestExchangeWithoutSecrets(t *testing.T) {
	e := NewExchange(nil)
	r, err := http.NewRequestWithContext(context.WithoutCancel(t.Context()), http.MethodGet, "https://github.com/?q="+holder, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Request(r); err != nil {
		t.Errorf("Request without secrets = %v, want nil", err)
	}
	res := &http.Response{Header: http.Header{}, Body: io.NopCloser(strings.NewReader(token)), Request: r}
	if err := e.Response(res); err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(res.Body); err != nil || string(body) != token {
		t.Errorf("body = %q, %v, want it unchanged", body, err)
	}
}
