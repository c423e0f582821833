package repo

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain lets this test binary act as ssh's ProxyCommand.
func TestMain(m *testing.M) {
	testenv.Main(m, testenv.Commands{DialCommand: func(ctx context.Context, args []string) error {
		d := public
		if os.Getenv("TEST_DIAL_ANYWHERE") != "" {
			d.blocked = func(netip.Addr) string { return "" }
		}
		return d.pipe(ctx, args[0], args[1], os.Stdin, os.Stdout)
	}})
}

// trap is a listener on this host that a client must not reach.
type trap struct {
	addr string
	hits atomic.Int64
}

func newTrap(t *testing.T) *trap {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	tr := &trap{addr: l.Addr().String()}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			tr.hits.Add(1)
			_ = c.Close()
		}
	}()
	return tr
}

func (tr *trap) port() string {
	_, port, _ := net.SplitHostPort(tr.addr)
	return port
}

func parse(t *testing.T, text string) Ref {
	t.Helper()
	ref, err := Parse(text, "/")
	if err != nil {
		t.Fatal(err)
	}
	ref.PublicOnly = true
	return ref
}

// noWait returns mirrors that retry without delay.
func noWait(t *testing.T) *Mirrors {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &Mirrors{Dir: filepath.Join(t.TempDir(), "mirrors"), Self: self, Pauses: noPauses}
}

// A client's repository on this host is refused before any connection. The error is
// the same whether or not something listens there.
func TestPublicOnlyRefusesThisHost(t *testing.T) {
	isolate(t)
	open := newTrap(t)
	closed := newTrap(t)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0") // a free port
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	_, free, _ := net.SplitHostPort(l.Addr().String())
	for _, form := range []string{
		"https://127.0.0.1:%s/o/r", "https://localhost:%s/o/r", "ssh://localhost:%s/o/r", "ssh://git@127.0.0.1:%s/o/r", "git://127.0.0.1:%s/o/r",
	} {
		var said []string
		for _, port := range []string{open.port(), free} {
			ref := parse(t, fmt.Sprintf(form, port))
			if err := CheckPublic(t.Context(), ref); fail.CodeOf(err) != fail.Policy {
				t.Errorf("CheckPublic(%s) = %v, want code %v", ref.URL, err, fail.Policy)
			}
			_, err := noWait(t).Ensure(t.Context(), ref, func(s string) { t.Errorf("Ensure(%s): progress %q, want none", ref.URL, s) })
			if err == nil || fail.CodeOf(err) != fail.Failure {
				t.Fatalf("Ensure(%s) = %v, want code %v", ref.URL, err, fail.Failure)
			}
			said = append(said, err.Error())
		}
		if said[0] != said[1] {
			t.Errorf("%s: errors for an open and a closed port = %q, %q, want the same", form, said[0], said[1])
		}
	}
	if n := open.hits.Load() + closed.hits.Load(); n != 0 {
		t.Errorf("connections to this host = %d, want 0", n)
	}
	for _, address := range []string{"169.254.169.254", "10.0.0.1", "192.168.1.1", "0.0.0.0"} {
		if err := CheckPublic(t.Context(), parse(t, "https://"+address+"/o/r")); fail.CodeOf(err) != fail.Policy {
			t.Errorf("CheckPublic(%s) = %v, want code %v", address, err, fail.Policy)
		}
	}
	if err := anywhere().check(t.Context(), parse(t, "https://git.example/o/r")); err != nil {
		t.Errorf("check of a public address = %v, want nil", err)
	}
	if err := anywhere().check(t.Context(), Ref{Slug: "x", URL: "file:///srv/x.git"}); fail.CodeOf(err) != fail.Policy {
		t.Errorf("check of a file URL = %v, want code %v", err, fail.Policy)
	}
}

// rebinds returns a dialer that treats every address as public on the first check
// and as private afterwards, like a name whose answers change.
func rebinds() *dialer {
	var seen atomic.Int64
	d := public
	d.blocked = func(addr netip.Addr) string {
		if seen.Add(1) == 1 {
			return ""
		}
		return notPublic(addr)
	}
	return &d
}

// An address that was public when the task was submitted is checked again when git
// connects, however the user's environment and configuration route connections.
func TestPublicOnlyChecksAtConnect(t *testing.T) {
	for name, tc := range map[string]struct {
		url    string
		config string
		env    string
	}{
		"https":                          {url: "https://127.0.0.1:%s/o/r"},
		"https, no_proxy":                {url: "https://127.0.0.1:%s/o/r", env: "no_proxy=127.0.0.1"},
		"https, NO_PROXY":                {url: "https://127.0.0.1:%s/o/r", env: "NO_PROXY=*"},
		"https, another proxy":           {url: "https://127.0.0.1:%s/o/r", config: "[http]\n\tproxy =\n"},
		"https, another proxy of a host": {url: "https://127.0.0.1:%s/o/r", config: "[http \"https://127.0.0.1:%s\"]\n\tproxy =\n"},
		"https, another proxy of a path": {url: "https://127.0.0.1:%s/o/r", config: "[http \"https://127.0.0.1:%s/o/r\"]\n\tproxy =\n"},
		"ssh":                            {url: "ssh://git@127.0.0.1:%s/o/r"},
		"ssh, GIT_SSH_COMMAND":           {url: "ssh://git@127.0.0.1:%s/o/r", env: "GIT_SSH_COMMAND=ssh -o ProxyCommand=none"},
		"ssh, core.sshCommand":           {url: "ssh://git@127.0.0.1:%s/o/r", config: "[core]\n\tsshCommand = ssh -o ProxyCommand=none\n"},
		"rewritten to git":               {url: "https://127.0.0.1:%s/o/r", config: "[url \"git://127.0.0.1:%s/\"]\n\tinsteadOf = https://127.0.0.1:%s/\n"},
		"rewritten to http":              {url: "https://127.0.0.1:%s/o/r", config: "[url \"http://127.0.0.1:%s/\"]\n\tinsteadOf = https://127.0.0.1:%s/\n"},
	} {
		t.Run(name, func(t *testing.T) {
			home := isolate(t)
			tr := newTrap(t)
			write(t, filepath.Join(home, ".gitconfig"), strings.ReplaceAll(tc.config, "%s", tr.port()))
			if name, value, ok := strings.Cut(tc.env, "="); ok {
				t.Setenv(name, value)
			}
			m := noWait(t)
			m.public = rebinds()
			if _, err := m.Ensure(t.Context(), parse(t, fmt.Sprintf(tc.url, tr.port())), nil); err == nil || fail.CodeOf(err) != fail.Failure {
				t.Errorf("Ensure = %v, want code %v", err, fail.Failure)
			}
			if n := tr.hits.Load(); n != 0 {
				t.Errorf("connections = %d, want 0", n)
			}
		})
	}
	t.Run("the trap works", func(t *testing.T) {
		isolate(t)
		for _, form := range []string{"https://127.0.0.1:%s/o/r", "ssh://git@127.0.0.1:%s/o/r"} {
			tr := newTrap(t)
			ref := parse(t, fmt.Sprintf(form, tr.port()))
			ref.PublicOnly = false
			if _, err := noWait(t).Ensure(t.Context(), ref, nil); err == nil || tr.hits.Load() == 0 {
				t.Errorf("%s: Ensure with private addresses allowed = %v, %d connections, want an error after a connection", form, err, tr.hits.Load())
			}
		}
	})
}

// anywhere returns a dialer that treats every address as public and resolves every
// name to this host.
func anywhere() *dialer {
	return &dialer{
		resolve: func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
		},
		blocked: func(netip.Addr) string { return "" },
	}
}

func TestPublicOnlyFetches(t *testing.T) {
	isolate(t)
	_, bare := upstream(t)
	server, err := url.Parse(gitServer(t, filepath.Dir(filepath.Dir(bare)), func(http.ResponseWriter, *http.Request) bool { return false }))
	if err != nil {
		t.Fatal(err)
	}
	m := noWait(t)
	m.public = anywhere()
	ref := parse(t, "https://git.example:"+server.Port()+"/owner/project.git")
	for range 2 { // first created, then refreshed
		mirror := ensure(t, m, ref)
		equal(t, "main", host(t, mirror.Dir, "git rev-parse main"), host(t, bare, "git rev-parse main"))
	}
	// The host stops answering: the old mirror is used, without the cause.
	if err := os.Rename(bare, bare+".gone"); err != nil {
		t.Fatal(err)
	}
	mirror, err := m.Ensure(t.Context(), ref, nil)
	if err != nil || !strings.HasSuffix(mirror.Warning, "the repository could not be fetched") {
		t.Errorf("Ensure = %v, warning %q, want nil, a warning without a reason", err, mirror.Warning)
	}
	// The host now resolves to this host: nothing is used.
	m.public = &dialer{resolve: anywhere().resolve, blocked: notPublic}
	if mirror, err := m.Ensure(t.Context(), ref, nil); err == nil {
		t.Errorf("Ensure = %+v, nil, want an error", mirror)
	}
}

// ssh connects through our ProxyCommand and so reaches an allowed host.
func TestPublicOnlyOverSSH(t *testing.T) {
	isolate(t)
	t.Setenv("TEST_DIAL_ANYWHERE", "1")
	tr := newTrap(t)
	m := noWait(t)
	m.public = anywhere()
	if _, err := m.Ensure(t.Context(), parse(t, "ssh://git@127.0.0.1:"+tr.port()+"/o/r"), nil); err == nil || tr.hits.Load() == 0 {
		t.Errorf("Ensure over SSH = %v, %d connections, want an error after a connection", err, tr.hits.Load())
	}
}

func TestPublicOnlyFollowsNoRedirect(t *testing.T) {
	home := isolate(t)
	write(t, filepath.Join(home, ".gitconfig"), "[http]\n\tfollowRedirects = true\n")
	var hits atomic.Int64
	to := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { hits.Add(1); w.WriteHeader(http.StatusNotFound) }))
	t.Cleanup(to.Close)
	from := httptest.NewTLSServer(http.RedirectHandler(to.URL+"/o/r/info/refs?service=git-upload-pack", http.StatusMovedPermanently))
	t.Cleanup(from.Close)
	t.Setenv("GIT_SSL_NO_VERIFY", "1")
	at, err := url.Parse(from.URL)
	if err != nil {
		t.Fatal(err)
	}
	m := noWait(t)
	m.public = anywhere()
	if _, err := m.Ensure(t.Context(), parse(t, "https://git.example:"+at.Port()+"/o/r"), nil); err == nil || hits.Load() != 0 {
		t.Errorf("Ensure at a redirect = %v, %d requests to its target, want an error, 0", err, hits.Load())
	}
}

// All addresses of this host and of its networks count as not public.
func TestNotPublicHasOwnAddresses(t *testing.T) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		prefix := netip.MustParsePrefix(a.String())
		if notPublic(prefix.Addr()) == "" || notPublic(prefix.Masked().Addr()) == "" {
			t.Errorf("notPublic of this host's address %s = \"\", want a reason", a)
		}
	}
	for _, text := range []string{"::1", "fe80::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "fd00:ec2::254", "100.100.100.200"} {
		if notPublic(netip.MustParseAddr(text)) == "" {
			t.Errorf("notPublic(%s) = \"\", want a reason", text)
		}
	}
}

// The proxy for git serves only git.
func TestConnectProxy(t *testing.T) {
	isolate(t)
	tr := newTrap(t)
	r, err := anywhere().route(t.Context(), parse(t, "https://git.example/o/r"), "self")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	at, err := url.Parse(r.proxy)
	if err != nil {
		t.Fatal(err)
	}
	password, _ := at.User.Password()
	for _, arg := range r.args {
		if strings.Contains(arg, password) {
			t.Errorf("argument of git = %q, want no password", arg)
		}
	}
	ask := func(via *url.URL, target string) (int, error) {
		client := &http.Client{Transport: &http.Transport{
			Proxy: http.ProxyURL(via), DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // a test
		}}
		resp, err := client.Get(target) //nolint:noctx // a test
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		return resp.StatusCode, nil
	}
	stranger := *at
	stranger.User = nil
	if _, err := ask(&stranger, "https://"+tr.addr); err == nil || tr.hits.Load() != 0 {
		t.Errorf("CONNECT without a password = %v, %d connections, want an error, 0", err, tr.hits.Load())
	}
	if status, err := ask(at, "http://"+tr.addr); err != nil || status != http.StatusMethodNotAllowed || tr.hits.Load() != 0 {
		t.Errorf("plain HTTP = %d, %v, %d connections, want %d, nil, 0", status, err, tr.hits.Load(), http.StatusMethodNotAllowed)
	}
	if _, err := ask(at, "https://"+tr.addr); err == nil || tr.hits.Load() != 1 {
		t.Errorf("CONNECT = %v, %d connections, want an error, 1", err, tr.hits.Load())
	}
}

// If this host has a proxy of its own, git goes through that one.
func TestConnectProxyOfTheHost(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	asked := make(chan *http.Request, 1)
	go func() {
		_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // a test
			asked <- r
			w.WriteHeader(http.StatusTeapot)
		}))
	}()
	own := func(*url.URL) (*url.URL, error) { return url.Parse("http://me:pw@" + l.Addr().String()) }
	p := connectProxy{dialer: dialer{
		resolve: func(context.Context, string) ([]netip.Addr, error) {
			return nil, errors.New("the proxy resolves names")
		}, blocked: notPublic,
	}, own: own}
	up, answers, err := p.connect(t.Context(), "git.example", "443")
	if err != nil || !answers {
		t.Fatalf("connect = %t, %v, want true, nil", answers, err)
	}
	defer up.Close()
	head := make([]byte, len("HTTP/1.1 418"))
	if _, err := io.ReadFull(up, head); err != nil || string(head) != "HTTP/1.1 418" {
		t.Errorf("answer = %q, %v, want \"HTTP/1.1 418\"", head, err)
	}
	r := <-asked
	if name, password, _ := (&http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}).BasicAuth(); r.Host != "git.example:443" || name != "me" || password != "pw" {
		t.Errorf("request to the host's proxy = %s %s %v, want git.example:443 with me:pw", r.Method, r.Host, r.Header)
	}
	p.resolve = anywhere().resolve
	if _, _, err := p.connect(t.Context(), "git.example", "443"); !errors.Is(err, ErrNotPublic) {
		t.Errorf("connect to a name of this host = %v, want %v", err, ErrNotPublic)
	}
}
