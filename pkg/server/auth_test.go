package server

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

func TestTokens(t *testing.T) {
	file := &Tokens{Path: filepath.Join(t.TempDir(), "tokens.json")}
	token, err := file.Add("ci", ops.Submit, task.Permission{Repositories: []string{"github.com/acme/*"}, Profiles: []string{"small"}})
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(file.Path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("mode of the token file = %v, %v, want 0600", st.Mode(), err)
	}
	if text, err := os.ReadFile(file.Path); err != nil || bytes.Contains(text, []byte(token)) || bytes.Contains(text, []byte(strings.TrimPrefix(token, tokenPrefix))) {
		t.Fatalf("token file = %q, %v, want no token", text, err)
	}
	for _, c := range []struct {
		name  string
		scope ops.Scope
		code  fail.Code
	}{
		{"ci", ops.Read, fail.Conflict},
		{"", ops.Read, fail.Usage},
		{"../x", ops.Read, fail.Usage},
		{"CI", ops.Read, fail.Usage},
		{strings.Repeat("a", 65), ops.Read, fail.Usage},
		{"x", "root", fail.Usage},
		{"x", "", fail.Usage},
	} {
		if _, err := file.Add(c.name, c.scope, task.Permission{}); fail.CodeOf(err) != c.code || fail.HintOf(err) == "" {
			t.Errorf("Add(%q, %q) = %v, want code %v with a hint", c.name, c.scope, err, c.code)
		}
	}
	// Changes by another process apply here too.
	other := &Tokens{Path: file.Path}
	if got, ok, err := other.find(token); !ok || err != nil || got.Scope != ops.Submit || !slices.Equal(got.Repositories, []string{"github.com/acme/*"}) || !slices.Equal(got.Profiles, []string{"small"}) {
		t.Fatalf("find of the token = %+v, %t, %v, want scope %s for github.com/acme/* and profile small", got, ok, err, ops.Submit)
	}
	for _, wrong := range []string{"", "x", token + "x", token[:len(token)-1], strings.ToUpper(token), digest(token), strings.Repeat("a", 1<<16)} {
		if _, ok, err := other.find(wrong); ok || err != nil {
			t.Errorf("find(%.20q) = %t, %v, want false, nil", wrong, ok, err)
		}
	}
	if err := other.Remove("ci"); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := file.find(token); ok || err != nil {
		t.Errorf("find of a removed token = %t, %v, want false, nil", ok, err)
	}
	if err := file.Remove("ci"); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("second Remove(ci) = %v, want %v", err, fail.NotFound)
	}

	// A file that others may have read or written is not trusted.
	token, err = file.Add("two", ops.Admin, task.Permission{})
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []fs.FileMode{0o644, 0o660, 0o602} {
		again := &Tokens{Path: file.Path}
		if err := os.Chmod(file.Path, mode); err != nil {
			t.Fatal(err)
		}
		if _, ok, err := again.find(token); ok || fail.CodeOf(err) != fail.Host {
			t.Errorf("find with file mode %v = %t, %v, want false, code %v", mode, ok, err, fail.Host)
		}
	}
	if err := errors.Join(os.Chmod(file.Path, 0o600), os.WriteFile(file.Path, []byte("[{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := (&Tokens{Path: file.Path}).find(token); ok || err == nil {
		t.Errorf("find in a damaged file = %t, %v, want false, an error", ok, err)
	}
}

// Concurrent additions lose no token.
func TestTokensAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens.json")
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			file := &Tokens{Path: path} // like another process
			for {
				_, err := file.Add(fmt.Sprintf("t%d", i), ops.Read, task.Permission{})
				if err == nil {
					return
				}
				if fail.CodeOf(err) != fail.Conflict || fail.HintOf(err) != "try again" {
					t.Errorf("Add at the same time = %v (hint %q), want code %v, hint \"try again\"", err, fail.HintOf(err), fail.Conflict)
					return
				}
			}
		})
	}
	all.Wait()
	if list, err := (&Tokens{Path: path}).List(); err != nil || len(list) != 8 {
		t.Errorf("List = %+v, %v, want 8 tokens", list, err)
	}
}

// Repeated wrong tokens are soon answered with 429, but a valid one never is.
func TestWrongTokensAreLimited(t *testing.T) {
	r := newRig(t, Limits{Failures: 3})
	for i := range 6 {
		resp, _ := r.do(call{path: ops.TasksPath, as: "-", header: []string{"Authorization", "Bearer guess"}})
		want := http.StatusUnauthorized
		if i >= 3 {
			want = http.StatusTooManyRequests
		}
		if resp.StatusCode != want || resp.Header.Get("Retry-After") == "" && i >= 3 {
			t.Errorf("guess %d = %s, Retry-After %q, want %d", i, resp.Status, resp.Header.Get("Retry-After"), want)
		}
		if resp, _ := r.do(call{path: ops.TasksPath, as: ops.Read}); resp.StatusCode != http.StatusOK {
			t.Errorf("request with a valid token after guesses = %s, want %d", resp.Status, http.StatusOK)
		}
	}
	if strings.Contains(r.log.String(), "guess") || strings.Contains(r.log.String(), r.token[ops.Read]) {
		t.Errorf("log = %s, want no token", r.log.String())
	}
	now := time.Now()
	th := throttle{most: 1, per: time.Minute}
	for i := range 3 * maxAddresses {
		th.allow(fmt.Sprint(i), now)
	}
	if len(th.who) > maxAddresses {
		t.Errorf("addresses remembered = %d, want at most %d", len(th.who), maxAddresses)
	}
	if ok, _ := th.allow("again", now); !ok {
		t.Error("first allow = false, want true")
	}
	if ok, wait := th.allow("again", now.Add(time.Second)); ok || wait != 59*time.Second {
		t.Errorf("allow a second later = %t, wait %v, want false, 59s", ok, wait)
	}
	if ok, _ := th.allow("again", now.Add(time.Minute)); !ok {
		t.Error("allow a minute later = false, want true")
	}
}

func TestListenAddr(t *testing.T) {
	for text, ok := range map[string]bool{
		"127.0.0.1:0": true, "127.0.0.2:80": true, "[::1]:8122": true, "localhost:8122": true,
		"0.0.0.0:8122": false, ":8122": false, "[::]:8122": false, "192.168.1.4:80": false, "example.com:80": false, "127.0.0.1": false, "": false, "[::ffff:10.0.0.1]:1": false,
	} {
		_, err := listenAddr(text, false)
		if (err == nil) != ok {
			t.Errorf("listenAddr(%q) = %v, want it accepted: %t", text, err, ok)
		}
		if err != nil && (fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "") {
			t.Errorf("listenAddr(%q) = %v (hint %q), want code %v with a hint", text, err, fail.HintOf(err), fail.Usage)
		}
	}
	// A network address requires a certificate in every configuration.
	m := newManager(t)
	for _, o := range []Options{{Listen: "0.0.0.0:0", Expose: true}, {Listen: "127.0.0.1:0", CertFile: "x"}, {Listen: "127.0.0.1:0", CertFile: "x", KeyFile: "y"}} {
		o.Engine.Tasks, o.Log = m, slog.New(slog.DiscardHandler)
		s, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		if l, _, err := s.listenTCP(t.Context()); fail.CodeOf(err) != fail.Usage {
			t.Errorf("listenTCP = %v, %v, want code %v", l, err, fail.Usage)
		}
	}
}

func TestListenUnix(t *testing.T) {
	dir := testenv.ShortDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "serve.sock")
	log := slog.New(slog.DiscardHandler)
	l, err := listenUnix(t.Context(), path, log)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{path: 0o600, dir: 0o700} {
		if st, err := os.Stat(name); err != nil || st.Mode().Perm() != want {
			t.Errorf("mode of %s = %v, %v, want %v", name, st.Mode(), err, want)
		}
	}
	// A socket in use stays.
	if _, err := listenUnix(t.Context(), path, log); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("listenUnix on a used socket = %v, want code %v", err, fail.Conflict)
	}
	// A dead one, as kill -9 leaves it, is replaced.
	l.(ownOnly).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if l, err = listenUnix(t.Context(), path, log); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	// A file that is not a socket was not created by serve, so it stays.
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenUnix(t.Context(), path, log); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("listenUnix on another file = %v, want code %v", err, fail.Conflict)
	}
	if _, err := listenUnix(t.Context(), filepath.Join(dir, strings.Repeat("x", 100)), log); fail.CodeOf(err) != fail.Host || fail.HintOf(err) == "" {
		t.Errorf("listenUnix on a too long path = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.Host)
	}
}

// A process of another user is refused at the socket, even if the file's mode would
// admit it.
func TestAnotherUserAtTheSocket(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatalf("%v; install it: apt-get install curl", err)
	}
	r := newRig(t, Limits{})
	if err := errors.Join(os.Chmod(r.socket, 0o666), os.Chmod(filepath.Dir(r.socket), 0o755), os.Chmod(filepath.Dir(filepath.Dir(r.socket)), 0o755)); err != nil {
		t.Fatal(err)
	}
	ask := func(uid uint32) ([]byte, error) {
		cmd := exec.CommandContext(t.Context(), curl, "-s", "--max-time", "60", "--unix-socket", r.socket, "http://localhost"+ops.TasksPath)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		return cmd.Output()
	}
	if out, err := ask(65534); err == nil || len(out) > 0 {
		t.Errorf("request of user 65534 = %q, %v, want nothing, an error", out, err)
	}
	if out, err := ask(0); err != nil || !bytes.Contains(out, []byte(`"tasks"`)) {
		t.Errorf("request of user 0 = %q, %v, want the tasks", out, err)
	}
	if !strings.Contains(r.log.String(), "belongs to user 65534") {
		t.Errorf("log = %s, want \"belongs to user 65534\"", r.log.String())
	}
}

// The certificate's names are accepted as Host, others are not.
func TestTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		DNSNames: []string{"agents.example"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	pk8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert"), filepath.Join(dir, "key")
	if err := errors.Join(
		os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600),
		os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pk8}), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	run := start(t, Options{Listen: "127.0.0.1:0", CertFile: certFile, KeyFile: keyFile})
	token, err := TokensIn(run.state).Add("a", ops.Read, task.Permission{})
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(must(t, der))
	_, port, err := net.SplitHostPort(run.addr)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}}
	for host, want := range map[string]int{run.addr: 200, "agents.example:" + port: 200, "localhost:" + port: 200, "evil.example:" + port: 403, "agents.example": 403} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+run.addr+ops.TasksPath, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("request with Host %s = %s, want %d", host, resp.Status, want)
		}
	}
	resp, err := http.Get("http://" + run.addr + ops.TasksPath) //nolint:noctx // a test
	if err == nil {
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("request without TLS = %s, want %d", resp.Status, http.StatusBadRequest)
		}
	}
}

func must(t *testing.T, der []byte) *x509.Certificate {
	t.Helper()
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// running is a server started with Run.
type running struct {
	addr, state string
	m           *task.Manager
	log         *safeBuffer
	stop        func() error // and wait for its end
}

func start(t *testing.T, o Options) running {
	t.Helper()
	if o.Engine.Tasks == nil {
		o.Engine.Tasks = newManager(t)
	}
	r := running{state: o.Engine.Tasks.Sessions.Config.Paths.State, m: o.Engine.Tasks, log: &safeBuffer{}}
	o.Log = slog.New(slog.NewJSONHandler(r.log, nil))
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan string, 1), make(chan error, 1)
	go func() { ended <- s.Run(ctx, func(addr string) { ready <- addr }) }()
	r.stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(deadline):
			return errors.New("it does not end")
		}
	})
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	select {
	case r.addr = <-ready:
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(deadline):
		t.Fatalf("Run is not ready after %v, want it ready", deadline)
	}
	return r
}

func (r running) client() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", Socket(r.state))
	}}}
}

// systemd plays systemd's role: it listens on a socket to which the service sends
// its states.
func systemd(t *testing.T) (said func() []string) {
	t.Helper()
	dir := testenv.ShortDir(t)
	path := filepath.Join(dir, "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "3000000")
	t.Setenv("WATCHDOG_PID", fmt.Sprint(os.Getpid()))
	var mu sync.Mutex
	var all []string
	go func() {
		b := make([]byte, 100)
		for {
			n, err := l.Read(b)
			if err != nil {
				return
			}
			mu.Lock()
			all = append(all, string(b[:n]))
			mu.Unlock()
		}
	}()
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string{}, all...)
	}
}

func TestRun(t *testing.T) {
	said := systemd(t)
	run := start(t, Options{Listen: "127.0.0.1:0", Limits: Limits{Shutdown: 30 * time.Second}})
	if !strings.HasPrefix(run.addr, "127.0.0.1:") {
		t.Errorf("address = %s, want one on 127.0.0.1", run.addr)
	}
	// Only one server runs at a time.
	s, err := New(Options{Engine: ops.Engine{Tasks: run.m}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context(), func(string) { t.Error("second Run is ready, want it refused") }); fail.CodeOf(err) != fail.Conflict || fail.HintOf(err) == "" {
		t.Errorf("second Run = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.Conflict)
	}
	heard := func(what string) func() bool {
		return func() bool { return strings.Contains(strings.Join(said(), " "), what) }
	}
	testenv.WaitFor(t, "READY", heard("READY=1"))
	testenv.WaitFor(t, "a ping of the watchdog", heard("WATCHDOG=1"))

	// A submitted task makes progress: the server schedules it.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost"+ops.TasksPath, strings.NewReader(manifestYAML))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/yaml")
	resp, err := run.client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	var made ops.TaskAnswer
	err = json.NewDecoder(resp.Body).Decode(&made)
	_ = resp.Body.Close()
	if err != nil || resp.StatusCode != http.StatusAccepted {
		t.Fatalf("submit = %s, %v, want %d, nil", resp.Status, err, http.StatusAccepted)
	}
	testenv.WaitFor(t, "the task is admitted", func() bool {
		got, err := run.m.Get(t.Context(), made.ID)
		return err == nil && got.Phase == task.Staging
	})

	// An open stream is notified when the server ends.
	stream, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost"+ops.TasksPath+"/"+made.ID+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	stream.Header.Set("Accept", "text/event-stream")
	resp, err = run.client().Do(stream)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := run.stop(); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	if err != nil || !bytes.Contains(text, []byte("event: problem")) || !bytes.Contains(text, []byte(codeShutdown)) {
		t.Errorf("stream at the end = %q, %v, want a problem with code %s", text, err, codeShutdown)
	}
	testenv.WaitFor(t, "STOPPING", heard("STOPPING=1"))
	if _, err := os.Stat(Socket(run.state)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("socket after the end: %v, want it removed", err)
	}
	// The server can be started again.
	again := start(t, Options{Engine: ops.Engine{Tasks: run.m}})
	if err := probe(t.Context(), again.client()); err != nil {
		t.Error(err)
	}
}

// A server that does not answer requests sends nothing to the watchdog.
func TestWatchdogNeedsAnAnswer(t *testing.T) {
	said := systemd(t)
	m := newManager(t)
	s, err := New(Options{Engine: ops.Engine{Tasks: m}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", Socket(m.Sessions.Config.Paths.State)) //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	asked := make(chan struct{})
	go func() { // accepts connections, and answers none
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			if n == 1 {
				close(asked)
			}
		}
	}()
	done := make(chan struct{})
	go func() { s.watchdog(ctx, Socket(m.Sessions.Config.Paths.State)); close(done) }()
	select {
	case <-asked: // the second time, after the first probe failed
	case <-time.After(deadline):
		t.Fatalf("watchdog sent no second probe within %v, want one", deadline)
	}
	cancel()
	<-done
	if all := said(); len(all) > 0 {
		t.Errorf("notifications without an answer = %q, want none", all)
	}
}
