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

// A host could reflect a secret in parts, which the answers' masks do not recognize.
func TestExchangeRange(t *testing.T) {
	for value, want := range map[string]string{holder: "", "nothing": "bytes=0-9"} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.Header.Set("Authorization", value)
		r.Header.Set("Range", "bytes=0-9")
		if err := githubExchange().Request(r); err != nil || r.Header.Get("Range") != want {
			t.Errorf("Range of a request with %s = %q, %v, want %q", value, r.Header.Get("Range"), err, want)
		}
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
		w.Header().Set("Trailer", "X-After, X-After-"+got)
		w.Header().Set("X-Echo", got)
		w.Header().Set("X-Echo-"+got, "1")
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
		w.Header().Set("X-After-"+got, "1")
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
			if strings.Contains(strings.ToLower(all), strings.ToLower(form)) {
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

// FuzzExchange checks that a request that may be sent has the secret nowhere but in the values of
// its headers, and that no answer with it gets through.
func FuzzExchange(f *testing.F) {
	f.Add("/"+holder, "Bearer "+holder, "k="+holder, uint8(3))
	f.Add("/?a=%67hp_"+holder[4:], "Basic eDpnaHBfYWFh", holder[:20], uint8(1))
	f.Add("/a?b#c", "Basic "+base64.StdEncoding.EncodeToString([]byte("x:"+holder)), "", uint8(0))
	f.Fuzz(func(t *testing.T, target, header, text string, split uint8) {
		u, err := url.ParseRequestURI(target)
		if err != nil || len(target)+len(header)+len(text) > 1<<14 || strings.Contains(target+header+text, token) {
			return
		}
		e := githubExchange()
		r := &http.Request{Method: http.MethodPost, URL: u, Header: http.Header{"X-A": {header}, "Range": {"bytes=1-"}}, Body: io.NopCloser(strings.NewReader(text)), ContentLength: int64(len(text))}
		if err := e.Request(r); err != nil {
			if !errors.Is(err, ErrInURL) {
				t.Fatalf("Request = %v", err)
			}
			return
		}
		for _, form := range []func(string) (string, error){url.PathUnescape, url.QueryUnescape, func(s string) (string, error) { return s, nil }} {
			if plain, err := form(r.URL.String()); err == nil && (strings.Contains(plain, token) || strings.Contains(plain, holder)) {
				t.Fatalf("URL = %s, want no secret and no placeholder", r.URL)
			}
		}
		if body, err := io.ReadAll(r.Body); err != nil || string(body) != text {
			t.Fatalf("body = %q, %v, want it unchanged", body, err)
		}
		sent := r.Header.Get("X-A")
		if used := sent != header; used == (r.Header.Get("Range") != "") {
			t.Fatalf("Range of a request with a secret (%v) = %q", used, r.Header.Get("Range"))
		}
		at := min(int(split), len(sent))
		a := &http.Response{
			Request: r, StatusCode: http.StatusOK, Header: http.Header{"X-B": {sent, text + token + text}, "X-" + token: {"1"}},
			Body: io.NopCloser(io.MultiReader(strings.NewReader(text+sent[:at]), iotest.OneByteReader(strings.NewReader(sent[at:]+token)))),
		}
		if err := e.Response(a); err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(a.Body)
		if err != nil || len(body) != len(text+sent+token) {
			t.Fatalf("masked body = %d bytes, %v, want %d", len(body), err, len(text+sent+token))
		}
		if all := fmt.Sprint(a.Header) + string(body); strings.Contains(all, token) {
			t.Fatalf("answer = %q, want no secret", all)
		}
	})
}
