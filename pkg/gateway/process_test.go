package gateway_test

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/gatewaytest"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain runs a gateway when this test binary is started as one.
func TestMain(m *testing.M) {
	testenv.Main(m, testenv.Commands{gateway.Command: func(ctx context.Context, args []string) error {
		return gateway.Main(ctx, args[0], slog.New(slog.NewTextHandler(os.Stderr, nil)))
	}})
}

// rig is a gateway's directory together with the sockets of its VM.
type rig struct {
	*testing.T
	gateway.Process
	sockets vm.NetSockets
}

func newRig(t *testing.T) rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "g") // short, for the sockets
	if err != nil {
		t.Fatal(err)
	}
	r := rig{T: t, Process: gateway.Process{Dir: filepath.Join(dir, "gateway"), Self: os.Args[0]}, sockets: vm.NetSockets{
		Subnet: netip.MustParsePrefix("192.168.5.0/24"), MAC: "52:55:55:00:00:01", MTU: 1500,
		Stream: filepath.Join(dir, "s", "qemu"), Datagram: filepath.Join(dir, "s", "fd"), API: filepath.Join(dir, "s", "ep"),
	}}
	t.Cleanup(func() {
		if err := r.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("Stop: %v", err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return r
}

func allowing(names ...string) *policy.Policy {
	p := policy.Default()
	for _, n := range names {
		p.Names = append(p.Names, policy.Rule{Pattern: n, Source: "test"})
	}
	return p
}

func (r rig) start(p *policy.Policy) {
	r.Helper()
	if err := r.Start(r.Context(), r.sockets, p); err != nil {
		r.Fatal(err)
	}
}

// guest connects a VM.
func (r rig) guest() *gatewaytest.Guest {
	r.Helper()
	c, err := net.Dial("unix", r.sockets.Stream)
	if err != nil {
		r.Fatal(err)
	}
	mac, err := net.ParseMAC(r.sockets.MAC)
	if err != nil {
		r.Fatal(err)
	}
	g, err := gatewaytest.New(c, true, gatewaytest.Options{
		Addr: netip.MustParseAddr("192.168.5.15"), Gateway: netip.MustParseAddr("192.168.5.2"), Bits: r.sockets.Subnet.Bits(), MAC: mac, MTU: r.sockets.MTU,
	})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(g.Close)
	return g
}

func (r rig) resolves(g *gatewaytest.Guest, name string) bool {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), time.Minute)
	defer cancel()
	_, err := g.Lookup(ctx, name)
	if ctx.Err() != nil {
		r.Fatalf("Lookup(%q): no answer from the gateway: %v", name, err)
	}
	return err == nil
}

// expectResolves looks up each name and reports one that resolves but must not, or the
// reverse.
func (r rig) expectResolves(g *gatewaytest.Guest, when string, names map[string]bool) {
	r.Helper()
	for name, want := range names {
		if got := r.resolves(g, name); got != want {
			r.Errorf("%s: %s resolves: %t, want %t", when, name, got, want)
		}
	}
}

func (r rig) pid() int {
	r.Helper()
	b, err := os.ReadFile(filepath.Join(r.Dir, "lock"))
	if err != nil {
		r.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		r.Fatal(err)
	}
	return pid
}

func (r rig) ends() {
	r.Helper()
	for end := time.Now().Add(time.Minute); r.Running(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			r.Fatal("the gateway is running after a minute, want that it ends")
		}
	}
}

// TestSlowStart starts several gateways at once and checks that the slow ones do not
// stay behind.
func TestSlowStart(t *testing.T) {
	r := newRig(t)
	slow := filepath.Join(filepath.Dir(r.Dir), "slow")
	script := fmt.Sprintf("#!/bin/sh\nmkdir %s.first 2>/dev/null || sleep 2\nexec %s \"$@\"\n", slow, r.Self)
	if err := os.WriteFile(slow, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	r.Self = slow
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			if err := r.Start(t.Context(), r.sockets, allowing("a.example.org")); err != nil {
				t.Errorf("Start beside others: %v", err)
			}
		})
	}
	all.Wait()
	r.guest().Close()
	r.ends()
	time.Sleep(3 * time.Second) // for gateways that stayed behind
	if r.Running() {
		t.Error("a gateway without a VM is running, want none")
	}
}

// TestStartWhileAnotherComesUp checks that Start waits for a gateway of another process
// that already holds the lock but does not listen yet.
func TestStartWhileAnotherComesUp(t *testing.T) {
	r := newRig(t)
	if err := os.MkdirAll(filepath.Dir(r.sockets.API), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(r.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(r.sockets)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.Dir, "netsockets.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Create(filepath.Join(r.Dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	started := make(chan error, 1)
	go func() { started <- r.Start(t.Context(), r.sockets, allowing("a.example.org")) }()
	// Start writes the policy each time before it asks: after the second time it has
	// asked and got no answer.
	for first, asked := os.FileInfo(nil), false; !asked; {
		select {
		case err := <-started:
			t.Fatalf("Start returned %v before the gateway listens, want that it waits", err)
		case <-time.After(time.Millisecond):
		}
		if f, err := os.Stat(filepath.Join(r.Dir, "policy.json")); err == nil {
			asked = first != nil && !os.SameFile(first, f)
			first = cmp.Or(first, f)
		}
	}
	l, err := net.Listen("unix", r.sockets.API)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) })}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	if err := <-started; err != nil {
		t.Errorf("Start of a gateway that comes up: %v", err)
	}
	if err := lock.Close(); err != nil { // so that the rig finds nothing to stop
		t.Fatal(err)
	}
}

func TestProcessLife(t *testing.T) {
	r := newRig(t)
	if _, err := r.Status(t.Context()); !errors.Is(err, gateway.ErrNotRunning) {
		t.Errorf("Status before Start: error %v, want %v", err, gateway.ErrNotRunning)
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Errorf("Stop before Start: error %v, want nil", err)
	}
	var all sync.WaitGroup
	for range 4 { // several concurrent calls start one gateway
		all.Go(func() {
			if err := r.Start(t.Context(), r.sockets, allowing("a.example.org")); err != nil {
				t.Errorf("Start beside others: %v", err)
			}
		})
	}
	all.Wait()
	pid := r.pid()
	r.start(allowing("b.example.org"))
	if got := r.pid(); got != pid {
		t.Errorf("process id after a second Start = %d, want %d", got, pid)
	}
	g := r.guest()
	r.expectResolves(g, "after Start of a running gateway", map[string]bool{"a.example.org": false, "b.example.org": true})
	if err := r.SetPolicy(t.Context(), allowing("a.example.org")); err != nil {
		t.Fatal(err)
	}
	r.expectResolves(g, "after SetPolicy", map[string]bool{"a.example.org": true, "b.example.org": false})
	if st, err := r.Status(t.Context()); err != nil || st.PID != pid || st.Mode != policy.Allowlist || st.Names != 1 || st.Detached || st.Stats.FramesIn == 0 {
		t.Errorf("Status = %+v, %v, want PID %d, Mode %s, Names 1, attached, some FramesIn", st, err, pid, policy.Allowlist)
	}

	// The VM disconnects and its gateway ends; the next run has a new gateway.
	g.Close()
	r.ends()
	r.start(allowing("a.example.org"))
	r.expectResolves(r.guest(), "in the second run", map[string]bool{"a.example.org": true})
	for range 2 {
		if err := r.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.SetPolicy(t.Context(), allowing()); !errors.Is(err, gateway.ErrNotRunning) {
		t.Errorf("SetPolicy after Stop: error %v, want %v", err, gateway.ErrNotRunning)
	}
}

// TestFailClosed checks that nothing gets out that the gateway has not allowed,
// whatever happens to it.
func TestFailClosed(t *testing.T) {
	r := newRig(t)
	r.start(allowing("a.example.org"))
	g := r.guest()
	path := filepath.Join(r.Dir, "policy.json")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	reload := func() gateway.Status {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "curl", "-sS", "-m", "60", "-X", "POST", "--unix-socket", r.sockets.API, "http://gateway/agent-sessionizer/reload").Output()
		var st gateway.Status
		if err == nil {
			err = json.Unmarshal(out, &st)
		}
		if err != nil {
			t.Fatalf("POST reload = %q: %v", out, err)
		}
		return st
	}
	for what, content := range map[string][]byte{
		"missing": nil, "empty": {}, "half written": whole[:len(whole)/2], "garbage": []byte("\x00\xff"),
		"of another version":    []byte(strings.Replace(string(whole), `"version":2`, `"version":1`, 1)),
		"with an unknown field": []byte(strings.Replace(string(whole), `{`, `{"open":true,`, 1)),
	} {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		if content != nil {
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if st := reload(); st.PolicyError == "" || st.Mode != "" {
			t.Errorf("Status with a policy that is %s = %+v, want a PolicyError, no Mode", what, st)
		}
		r.expectResolves(g, "with a policy that is "+what, map[string]bool{"a.example.org": false})
		if err := r.SetPolicy(t.Context(), allowing("a.example.org")); err != nil {
			t.Fatal(err)
		}
		r.expectResolves(g, "with a whole policy after one that is "+what, map[string]bool{"a.example.org": true})
	}

	t.Run("frozen", func(t *testing.T) {
		if err := syscall.Kill(r.pid(), syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		// Its threads stop one by one, so it may still answer the first request.
		_, err := r.Status(t.Context())
		for end := time.Now().Add(time.Minute); err == nil && time.Now().Before(end); {
			_, err = r.Status(t.Context())
		}
		if err == nil || errors.Is(err, gateway.ErrNotRunning) {
			t.Errorf("Status of a frozen gateway: error %v, want one other than %v", err, gateway.ErrNotRunning)
		}
		if !r.Running() {
			t.Error("Running() of a frozen gateway = false, want true")
		}
		if err := r.Stop(t.Context()); err != nil || r.Running() {
			t.Fatalf("Stop of a frozen gateway: error %v, Running() %t, want nil, false", err, r.Running())
		}
	})
	t.Run("killed", func(t *testing.T) {
		r.start(allowing("a.example.org"))
		if err := syscall.Kill(r.pid(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		r.ends()
		if _, err := net.Dial("unix", r.sockets.Stream); err == nil {
			t.Error("Dial of a killed gateway's socket succeeded, want an error")
		}
		r.start(allowing("a.example.org"))
		r.expectResolves(r.guest(), "after a kill", map[string]bool{"a.example.org": true})
	})
}

// TestOutOfDescriptors checks that without file descriptors the gateway makes no
// connection, in particular none that is not allowed. When it has descriptors again, it
// works as before.
func TestOutOfDescriptors(t *testing.T) {
	r := newRig(t)
	self := filepath.Join(filepath.Dir(r.Dir), "self")
	if err := os.WriteFile(self, []byte("#!/bin/sh\nulimit -n 32\nexec '"+os.Args[0]+"' \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	r.Self = self
	r.start(allowing("a.example.org"))
	g := r.guest()
	if !r.resolves(g, "a.example.org") {
		t.Fatalf("Lookup(%q) failed, want an address", "a.example.org")
	}
	// Each connection to the API takes a descriptor and keeps it.
	var held []net.Conn
	for range 64 {
		c, err := net.Dial("unix", r.sockets.API)
		if err != nil {
			break
		}
		held = append(held, c)
	}
	if _, err := r.Status(t.Context()); err == nil {
		t.Errorf("Status with %d connections to the API succeeded, want an error: the limit was not reached", len(held))
	}
	// Neither needs a descriptor.
	r.expectResolves(g, "without descriptors", map[string]bool{"evil.example.net": false, "a.example.org": true})
	for _, c := range held {
		_ = c.Close()
	}
	var err error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, err = r.Status(t.Context()); err == nil {
			break
		}
	}
	if err != nil {
		t.Errorf("Status after the connections were closed: %v", err)
	}
}

func TestBadStarts(t *testing.T) {
	r := newRig(t)
	nowhere := r.sockets
	nowhere.API = filepath.Join(filepath.Dir(r.sockets.API), strings.Repeat("x", 200))
	// Under -cover the last line of the log, which the error quotes, comes from the
	// test binary itself.
	err := r.Start(t.Context(), nowhere, allowing())
	said, logErr := os.ReadFile(filepath.Join(r.Dir, "gateway.log"))
	if err == nil || logErr != nil || !strings.Contains(err.Error()+string(said), "socket") {
		t.Errorf("Start with a socket path that is too long: error %v, log %q, %v, want %q in one of them", err, said, logErr, "socket")
	}
	if err := r.Start(t.Context(), r.sockets, &policy.Policy{}); err == nil {
		t.Error("Start with an empty policy succeeded, want an error")
	}
	broken := r.Process
	broken.Self = "/nonexistent"
	if err := broken.Start(t.Context(), r.sockets, allowing()); fail.CodeOf(err) != fail.Host {
		t.Errorf("Start of a missing program: error %v with code %v, want code %v", err, fail.CodeOf(err), fail.Host)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	broken.Self = "sleep"
	if err := broken.Start(ctx, r.sockets, allowing()); err == nil {
		t.Error("a cancelled Start succeeded, want an error")
	}
}

func entries(t *testing.T, dir string) []gateway.Entry {
	t.Helper()
	var all []gateway.Entry
	for e, err := range gateway.Decisions(t.Context(), dir, false) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

// TestDecisionLogIsBounded checks that a guest that asks without end neither fills the disk
// nor makes the decision log useless.
func TestDecisionLogIsBounded(t *testing.T) {
	r := newRig(t)
	r.start(allowing("a.example.org"))
	g := r.guest()
	const same, distinct = 500, 3000
	for range same {
		r.resolves(g, "evil.example.net")
	}
	for i := range distinct {
		r.resolves(g, fmt.Sprintf("n%d.evil.example.net", i))
	}
	if err := r.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	all := entries(t, r.Dir)
	var lines, asked, evil int64
	for i, e := range all {
		if i > 0 && e.Seq != all[i-1].Seq+1 {
			t.Fatalf("entry %d follows entry %d, want %d", e.Seq, all[i-1].Seq, all[i-1].Seq+1)
		}
		lines++
		if !e.Allowed && e.Kind != gateway.KindLink {
			asked += e.Times()
		}
		if e.Name == "evil.example.net" {
			evil += e.Times()
		}
	}
	// The records that exceeded the limit may include a dropped frame.
	if asked < same+distinct || asked > same+distinct+10 || evil != same {
		t.Errorf("%d denials in %d lines, %d of one name, want %d to %d denials, %d of one name", asked, lines, evil, same+distinct, same+distinct+10, same)
	}
	denials, err := gateway.Denials(t.Context(), r.Dir, time.Time{})
	if err != nil || len(denials) == 0 || denials[0].Target() != "evil.example.net" || denials[0].Count != same {
		t.Errorf("Denials = %+v, %v, want evil.example.net first, with Count %d", denials[:min(len(denials), 1)], err, same)
	}
	if later, err := gateway.Denials(t.Context(), r.Dir, time.Now()); err != nil || len(later) > 0 {
		t.Errorf("Denials since now = %+v, %v, want none", later, err)
	}
}

func TestDecisionLogContinues(t *testing.T) {
	r := newRig(t)
	run := func(name string) {
		r.start(allowing("a.example.org"))
		r.resolves(r.guest(), name)
		if err := r.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	run("one.example.net")
	path := filepath.Join(r.Dir, "decisions.jsonl")
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.WriteString(f, "{\"seq\":99,\"na\n"+strings.Repeat("x", 100_000)+"\n")
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	followed := make(chan string, 100)
	go func() {
		for e, err := range gateway.Decisions(ctx, r.Dir, true) {
			if err != nil {
				followed <- err.Error()
				return
			}
			if e.Kind == gateway.KindDNS {
				followed <- e.Name
			}
		}
	}()
	run("two.example.net")
	// The writer begins a new file; a reader that follows misses nothing.
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	run("three.example.net")
	for _, want := range []string{"one.example.net", "two.example.net", "three.example.net"} {
		select {
		case got := <-followed:
			if got != want {
				t.Fatalf("followed decision about %q, want %q", got, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("no decision about %q within a minute", want)
		}
	}
	var last int64
	for _, e := range entries(t, r.Dir) {
		if e.Seq <= last {
			t.Errorf("entry %d follows entry %d, want a larger number", e.Seq, last)
		}
		last = e.Seq
	}
}

// TestDecisionsWithoutALog checks that the gateway still decides when the disk is
// full, and reports that it cannot log its decisions.
func TestDecisionsWithoutALog(t *testing.T) {
	r := newRig(t)
	if err := os.MkdirAll(r.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/full", filepath.Join(r.Dir, "decisions.jsonl")); err != nil {
		t.Fatal(err)
	}
	r.start(allowing("a.example.org"))
	g := r.guest()
	r.expectResolves(g, "without a decision log", map[string]bool{"evil.example.net": false, "a.example.org": true})
	st, err := r.Status(t.Context())
	for end := time.Now().Add(time.Minute); err == nil && st.LogErr == "" && time.Now().Before(end); {
		st, err = r.Status(t.Context())
	}
	if err != nil || !strings.Contains(st.LogErr, "no space") {
		t.Errorf("Status = %+v, %v, want a LogErr with %q", st, err, "no space")
	}
}

// TestFilesAreTheUsers checks that only the user can access the gateway's files,
// whatever the umask was.
func TestFilesAreTheUsers(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	r := newRig(t)
	r.start(allowing("a.example.org"))
	files, err := filepath.Glob(filepath.Join(r.Dir, "*"))
	if err != nil || len(files) < 4 {
		t.Fatalf("Glob(%s) = %q, %v, want at least 4 files", r.Dir, files, err)
	}
	for _, path := range append(files, r.sockets.Stream, r.sockets.Datagram, r.sockets.API) {
		st, err := os.Stat(path)
		if err != nil {
			t.Error(err)
		} else if st.Mode().Perm()&0o077 != 0 {
			t.Errorf("mode of %s = %v, want no access for others", path, st.Mode())
		}
	}
}

// The secrets are in the gateway's memory only.
func TestSecrets(t *testing.T) {
	const token = "ghp_RealRealRealRealReal0123456789abcdef"
	r := newRig(t)
	r.start(allowing("github.com"))
	bound := gateway.Secret{Name: "TOKEN", Like: "ghp_", Value: secret.NewValue(token), Hosts: []string{"api.github.com", "github.com"}}
	set := func(secrets ...gateway.Secret) gateway.Interception {
		t.Helper()
		x, err := r.SetSecrets(t.Context(), secrets)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	first := set(bound)
	block, _ := pem.Decode(first.Certificate)
	if block == nil {
		t.Fatalf("certificate = %q, want one", first.Certificate)
	}
	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !certificate.IsCA || !slices.Equal(certificate.PermittedDNSDomains, bound.Hosts) {
		t.Errorf("certificate for %q, %v, want an authority for %q", certificate.PermittedDNSDomains, err, bound.Hosts)
	}
	if p := first.Placeholders["TOKEN"]; len(p) != len(token) || !strings.HasPrefix(p, "ghp_") {
		t.Errorf("placeholder = %q, want a text like %q", p, token)
	}
	bound.Hosts, bound.Value = bound.Hosts[1:], secret.NewValue("ghp_another")
	if again := set(bound); !reflect.DeepEqual(again, first) {
		t.Errorf("another value for fewer hosts = %+v, want what the guest has: %+v", again, first)
	}
	bound.Hosts = []string{"gitlab.com"}
	if other := set(bound); string(other.Certificate) == string(first.Certificate) || other.Placeholders["TOKEN"] != first.Placeholders["TOKEN"] {
		t.Errorf("another host changes the placeholder or not the certificate")
	}
	bound.Like = "glpat-"
	if other := set(bound); !strings.HasPrefix(other.Placeholders["TOKEN"], "glpat-") {
		t.Errorf("placeholder like glpat- = %q", other.Placeholders["TOKEN"])
	}
	if none := set(); none.Certificate != nil || len(none.Placeholders) > 0 {
		t.Errorf("without secrets = %+v, want nothing", none)
	}
	err = filepath.WalkDir(r.Dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if text, err := os.ReadFile(path); err != nil || strings.Contains(string(text), token) {
			t.Errorf("%s contains the secret, %v", path, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
