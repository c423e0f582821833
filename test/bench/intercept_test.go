//go:build bench

package bench

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway/intercept"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/bench/load"
	"github.com/agent-sessionizer/agent-sessionizer/test/gatewaytest"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// The contenders: a gateway that passes TLS connections on as they are, and one that reads their
// requests and puts a secret into each.
const (
	spliced     = "spliced"
	intercepted = "intercepted"
)

const (
	requests = 2000     // for the latencies, one after the other
	bodySize = 64 << 20 // bytes of a transfer
	bodies   = 4        // transfers of which the fastest counts

	rowAddedMemory = "memory at the peak, MB"
)

// httpsHost is the server's name.
var httpsHost = "web." + strings.TrimSuffix(load.Zone, ".")

// TestIntercept measures requests through a gateway that reads them and through one that does not,
// with a user-space guest in this process.
func TestIntercept(t *testing.T) {
	authority := serveHTTPS(t)
	t.Setenv("SSL_CERT_FILE", filepath.Join(t.TempDir(), "roots.pem"))
	if err := os.WriteFile(os.Getenv("SSL_CERT_FILE"), authority, 0o600); err != nil {
		t.Fatal(err)
	}
	contenders := []string{spliced, intercepted}
	var rows []row
	of := func(key, name, unit, hope string, goal aim, than string) {
		rows = append(rows, row{name: name, unit: unit, hope: hope, whole: unit == "MB/s", comparisons: []comparison{{key: "intercept_" + key, mine: intercepted, other: than, aim: goal}}})
	}
	for _, version := range []string{"HTTP/1.1", "HTTP/2"} {
		key := map[string]string{"HTTP/1.1": "h1_", "HTTP/2": "h2_"}[version]
		of(key+"p50", version+": request p50, ms", "ms", "", aim{}, spliced)
		of(key+"p95", version+": request p95, ms", "ms", "", aim{}, spliced)
		of(key+"added", version+": added at p50, ms", "ms", "≤ 1", aim{absolute, 1}, "")
		of(key+"download", version+": download, MB/s", "MB/s", "≥ 0.6 spliced", aim{atLeast, .6}, spliced)
		of(key+"upload", version+": upload, MB/s", "MB/s", "≥ 0.6 spliced", aim{atLeast, .6}, spliced)
	}
	of("memory", rowAddedMemory, "MB", "", aim{}, spliced)
	of("memory_added", "added memory, MB", "MB", "≤ 10", aim{absolute, 10}, "")
	table := results.table(table{title: titleIntercept, columns: contenders, rows: rows})
	for range runs() {
		turn := map[string]sample{}
		for _, contender := range contenders {
			t.Run(contender, func(t *testing.T) { turn[contender] = requestsThrough(t, contender, authority) })
		}
		if turn[spliced] == nil || turn[intercepted] == nil {
			t.Fatal("a turn failed")
		}
		for _, version := range []string{"HTTP/1.1", "HTTP/2"} {
			p50 := version + ": request p50, ms"
			turn[intercepted][version+": added at p50, ms"] = max(0, turn[intercepted][p50]-turn[spliced][p50])
		}
		turn[intercepted]["added memory, MB"] = max(0, turn[intercepted][rowAddedMemory]-turn[spliced][rowAddedMemory])
		for _, contender := range contenders {
			table.add(contender, turn[contender])
		}
	}
	table.done(t, runs(), contenders...)
}

// serveHTTPS starts the server, and returns the certificate of its authority.
func serveHTTPS(t *testing.T) []byte {
	t.Helper()
	authority, err := intercept.NewAuthority([]string{httpsHost})
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := authority.Certificate(httpsHost)
	if err != nil {
		t.Fatal(err)
	}
	body := make([]byte, 1<<20)
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // not a secret
	for i := range body {
		body[i] = byte(random.Uint32())
	}
	s := &http.Server{
		ErrorLog:          log.New(io.Discard, "", 0),
		ReadHeaderTimeout: patience,
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{*certificate}, MinVersion: tls.VersionTLS12},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			n, err := io.Copy(io.Discard, r.Body)
			if err != nil {
				return
			}
			if r.URL.Path != "/big" {
				fmt.Fprintf(w, "%d %t", n, r.Header.Get("Authorization") == "Bearer "+value)
				return
			}
			for range bodySize / len(body) {
				if _, err := w.Write(body); err != nil {
					return
				}
			}
		}),
	}
	var l net.Listener
	if err := world.Do(func() error {
		l, err = net.Listen("tcp", net.JoinHostPort(serverAddr, "443"))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	go s.ServeTLS(l, "", "") //nolint:errcheck // until it is closed
	return authority.PEM()
}

// value is the value of the secret.
const value = "the-value-of-the-secret-0123456789"

// requestsThrough measures one gateway.
func requestsThrough(t *testing.T, contender string, authority []byte) sample {
	t.Helper()
	dir, err := os.MkdirTemp("", "b") // short, because of the sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	w := vm.NetSockets{
		Subnet: netip.MustParsePrefix("192.168.5.0/24"), MAC: "52:55:55:00:00:01", MTU: 65520,
		Stream: filepath.Join(dir, "s", "qemu"), Datagram: filepath.Join(dir, "s", "fd"), API: filepath.Join(dir, "s", "ep"),
	}
	p := gateway.Process{Dir: filepath.Join(dir, "gateway"), Self: realvm.Binary()}
	t.Cleanup(func() {
		if err := p.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	pol := policy.Default()
	pol.Names = append(pol.Names, policy.Rule{Pattern: httpsHost, Source: "bench"})
	if err := p.Start(t.Context(), w, pol); err != nil {
		t.Fatal(err)
	}
	roots, token := x509.NewCertPool(), value
	if contender == intercepted {
		x, err := p.SetSecrets(t.Context(), []gateway.Secret{{Name: "TOKEN", Value: secret.NewValue(value), Hosts: []string{httpsHost}}})
		if err != nil {
			t.Fatal(err)
		}
		authority, token = x.Certificate, x.Placeholders["TOKEN"]
	}
	roots.AppendCertsFromPEM(authority)
	st, err := p.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cable, err := net.Dial("unix", w.Stream)
	if err != nil {
		t.Fatal(err)
	}
	mac, err := net.ParseMAC(w.MAC)
	if err != nil {
		t.Fatal(err)
	}
	guest, err := gatewaytest.New(cable, true, gatewaytest.Options{
		Addr: netip.MustParseAddr("192.168.5.15"), Gateway: resolver(w).Addr(), Bits: w.Subnet.Bits(), MAC: mac, MTU: w.MTU,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(guest.Close)
	_, stop := watch(t, st.PID)
	all := sample{}
	for _, version := range []string{"HTTP/1.1", "HTTP/2"} {
		c := client{t: t, token: token, transport: guest.Transport()}
		c.transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
		c.transport.Protocols = new(http.Protocols)
		c.transport.Protocols.SetHTTP1(version == "HTTP/1.1")
		c.transport.Protocols.SetHTTP2(version == "HTTP/2")
		c.measure(version, all)
		c.transport.CloseIdleConnections()
	}
	all[rowAddedMemory] = stop().anon
	t.Logf("%-12s %v", contender, all)
	return all
}

// client sends requests from the guest.
type client struct {
	t         *testing.T
	token     string
	transport *http.Transport
}

func (c client) measure(version string, into sample) {
	c.t.Helper()
	took := make([]time.Duration, requests)
	for i := range took {
		began := time.Now()
		c.ask("/", 0)
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	into[version+": request p50, ms"], into[version+": request p95, ms"] = ms(took[requests/2]), ms(took[requests*95/100])
	fastest := func(path string, up int64) float64 {
		best := time.Hour
		for range bodies {
			began := time.Now()
			c.ask(path, up)
			best = min(best, time.Since(began))
		}
		return bodySize / best.Seconds() / 1e6
	}
	into[version+": download, MB/s"], into[version+": upload, MB/s"] = fastest("/big", 0), fastest("/", bodySize)
}

// ask sends one request with a body of some bytes, and checks what arrived.
func (c client) ask(path string, up int64) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+httpsHost+path, io.LimitReader(zeros{}, up))
	if err != nil {
		c.t.Fatal(err)
	}
	if r.ContentLength = up; up == 0 {
		r.Body = http.NoBody
	}
	r.Header.Set("Authorization", "Bearer "+c.token)
	a, err := (&http.Client{Transport: c.transport}).Do(r)
	if err != nil {
		c.t.Fatal(err)
	}
	defer a.Body.Close()
	if path == "/big" {
		if n, err := io.Copy(io.Discard, a.Body); err != nil || n != bodySize {
			c.t.Fatalf("body = %d bytes, %v, want %d", n, err, bodySize)
		}
		return
	}
	if text, err := io.ReadAll(a.Body); err != nil || string(text) != strconv.FormatInt(up, 10)+" true" {
		c.t.Fatalf("answer = %q, %v, want %d bytes with the secret", text, err, up)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
