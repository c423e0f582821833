package cluster_test

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
)

// pair returns the tunnels of two hosts, and the TLS settings of each.
type pair struct {
	one, two       *cluster.Tunnels
	oneTLS, twoTLS *tls.Config
	c              *testcluster.Cluster
}

func tunnels(t *testing.T) pair {
	t.Helper()
	c := testcluster.Alone(t)
	p := pair{c: c}
	for i, name := range []string{"one", "two"} {
		keys, is := testcluster.NewMember(t, c.Authority, name, cluster.Member)
		c.Members = append(c.Members, is)
		if err := c.Cores["a"].Authorize(c.Members, nil); err != nil {
			t.Fatal(err)
		}
		tun, err := cluster.NewTunnels(c.Login(keys), name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tun.Close() })
		settings, err := keys.TLS([]byte(is.Certificate), c.Authority.Certificate(), func(i cluster.Identity) error {
			if i.Name == "removed" {
				return errors.New("host removed was removed")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			p.one, p.oneTLS = tun, settings
		} else {
			p.two, p.twoTLS = tun, settings
		}
	}
	return p
}

// TestTunnelIsAConn runs the standard suite for connections.
func TestTunnelIsAConn(t *testing.T) {
	t.Parallel()
	p := tunnels(t)
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		accepted := make(chan net.Conn, 1)
		go func() {
			if c, err := p.two.Accept(); err == nil {
				accepted <- c
			}
		}()
		if c1, err = p.one.Dial(t.Context(), "two"); err != nil {
			return nil, nil, nil, err
		}
		c2 = <-accepted
		return c1, c2, func() { c1.Close(); c2.Close() }, nil
	})
}

// TestTunnelCarriesHTTP sends much in both directions at once over TLS.
func TestTunnelCarriesHTTP(t *testing.T) {
	t.Parallel()
	p := tunnels(t)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 || r.TLS.PeerCertificates[0].Subject.CommonName != "one" {
			http.Error(w, "who?", http.StatusForbidden)
			return
		}
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			t.Error(err)
		}
		_, _ = io.Copy(w, r.Body)
	})}
	go func() { _ = srv.Serve(tls.NewListener(p.two, p.twoTLS)) }()
	t.Cleanup(func() { srv.Close() })
	client := &http.Client{Transport: &http.Transport{
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := p.one.Dial(ctx, "two")
			if err != nil {
				return nil, err
			}
			return tls.Client(c, p.oneTLS), nil
		},
	}}
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			const size = 5 << 20
			var seed [32]byte
			seed[0] = byte(i)
			sent, got := sha256.New(), sha256.New()
			resp, err := client.Post("https://two/", "", io.TeeReader(io.LimitReader(rand.NewChaCha8(seed), size), sent))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			n, err := io.Copy(got, resp.Body)
			if err != nil || n != size || string(sent.Sum(nil)) != string(got.Sum(nil)) {
				t.Errorf("echo of %d bytes = %d bytes, %v, equal %t; want the same", size, n, err, string(sent.Sum(nil)) == string(got.Sum(nil)))
			}
		})
	}
	all.Wait()
}

// TestTunnelRefuses dials hosts that do not answer, and presents certificates that do not count.
func TestTunnelRefuses(t *testing.T) {
	t.Parallel()
	p := tunnels(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := p.one.Dial(ctx, "absent"); fail.CodeOf(err) != fail.Host || !strings.Contains(err.Error(), "not connected") {
		t.Errorf("Dial of a host that is not connected = %v, want that it is not connected", err)
	}
	if _, err := p.one.Dial(ctx, "tw*"); fail.CodeOf(err) != fail.Usage {
		t.Errorf("Dial of a pattern = %v, want a usage error", err)
	}
	other, err := cluster.NewAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	for name, a := range map[string]*cluster.Authority{"of another cluster": other, "removed": p.c.Authority} {
		name = strings.ReplaceAll(name, " ", "-")
		keys, is := testcluster.NewMember(t, a, name, cluster.CoreOf)
		settings, err := keys.TLS([]byte(is.Certificate), p.c.Authority.Certificate(), func(cluster.Identity) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		refused := make(chan error, 1)
		go func() {
			c, err := p.two.Accept()
			if err == nil {
				defer c.Close()
				err = tls.Server(c, p.twoTLS).HandshakeContext(ctx)
			}
			refused <- err
		}()
		c, err := p.one.Dial(ctx, "two")
		if err != nil {
			t.Fatal(err)
		}
		_ = tls.Client(c, settings).HandshakeContext(ctx)
		if err := <-refused; err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("handshake with a certificate %s = %v, want it refused", name, err)
		}
		c.Close()
	}
}

// TestSlots checks that a host cannot use what other hosts may use.
func TestSlots(t *testing.T) {
	if n := cluster.TakeSlots(4, 2, "a", "a", "a", "a", "b", "c", "d"); n != 4 {
		t.Errorf("slots = %d, want 4: two of one host, and two of others", n)
	}
}
