// Package testcluster starts servers of a cluster in the process of a test.
package testcluster

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// Cluster is a cluster whose servers are in this process.
type Cluster struct {
	Authority *cluster.Authority
	Members   []cluster.Membership
	Witness   *cluster.Core
	Cores     map[string]*cluster.Core
	Options   map[string]cluster.CoreOptions

	t   *testing.T
	dir string
}

// Alone starts a cluster of one core, "a", and its witness.
func Alone(t *testing.T) *Cluster {
	t.Helper()
	c := &Cluster{t: t, dir: t.TempDir(), Cores: map[string]*cluster.Core{}, Options: map[string]cluster.CoreOptions{}}
	var err error
	if c.Authority, err = cluster.NewAuthority("test"); err != nil {
		t.Fatal(err)
	}
	first := c.core("a")
	core, witness, err := cluster.StartFirst(t.Context(), first, FreeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	c.Cores["a"], c.Options["a"], c.Witness = core, first, witness
	t.Cleanup(func() {
		witness.Stop()
		for _, core := range c.Cores {
			core.Stop()
		}
	})
	return c
}

// Three starts a cluster of the cores "a", "b" and "c", one after the other. Its witness still runs.
func Three(t *testing.T) *Cluster {
	t.Helper()
	c := Alone(t)
	for _, name := range []string{"b", "c"} {
		o := c.core(name)
		for _, other := range c.Options {
			o.Peers = append(o.Peers, other.Route)
		}
		var err error
		if c.Cores[name], err = cluster.StartCore(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		c.Options[name] = o
		testenv.WaitFor(t, "a current core "+name, c.Cores[name].Current)
	}
	return c
}

// FreeAddr returns an address on loopback that nothing listens on. Its port is below those that the
// system gives to connections, one of which might take it before the caller listens.
func FreeAddr(t *testing.T) string {
	t.Helper()
	return freeAddr(t, 1)
}

// FreeCoreAddr is like FreeAddr for a core, which also uses the next two ports.
func FreeCoreAddr(t *testing.T) string {
	t.Helper()
	return freeAddr(t, 3)
}

func freeAddr(t *testing.T, ports int) string {
	t.Helper()
	for range 100 {
		first, free := 10000+rand.IntN(20000), true
		for port := first; port < first+ports; port++ {
			l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if free = free && err == nil; err == nil {
				_ = l.Close() // nothing was sent
			}
		}
		if free {
			return fmt.Sprintf("127.0.0.1:%d", first)
		}
	}
	t.Fatal("no free port between 10000 and 30000")
	return ""
}

func (c *Cluster) core(name string) cluster.CoreOptions {
	c.t.Helper()
	keys, is := c.Add(name, cluster.CoreOf)
	return cluster.CoreOptions{
		Keys: keys, Certificate: []byte(is.Certificate), Authority: c.Authority.Certificate(), Members: c.Members,
		Cluster: "test", Name: name, Dir: filepath.Join(c.dir, name), Store: 1 << 30,
		Listen: FreeAddr(c.t), Route: FreeAddr(c.t), Log: slog.New(slog.DiscardHandler),
	}
}

// NewMember makes a host with its keys.
func NewMember(t *testing.T, a *cluster.Authority, name string, role cluster.Role) (*cluster.Keys, cluster.Membership) {
	t.Helper()
	keys, err := cluster.NewKeys()
	if err != nil {
		t.Fatal(err)
	}
	i, err := keys.Identity(name, role)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := a.Sign(i)
	if err != nil {
		t.Fatal(err)
	}
	return keys, cluster.Membership{Name: name, Role: role, Nkey: i.Nkey, Certificate: string(certificate)}
}

// Add makes a host that all cores accept.
func (c *Cluster) Add(name string, role cluster.Role) (*cluster.Keys, cluster.Membership) {
	c.t.Helper()
	keys, is := NewMember(c.t, c.Authority, name, role)
	c.Members = append(c.Members, is)
	for _, core := range c.Cores {
		if err := core.Authorize(c.Members, nil); err != nil {
			c.t.Fatal(err)
		}
	}
	return keys, is
}

// Restart ends a core, and starts it again with its files after a pause.
func (c *Cluster) Restart(name string, pause time.Duration) error {
	c.Cores[name].Stop()
	time.Sleep(pause) // the others elect another leader meanwhile, or do not
	o := c.Options[name]
	o.Members, o.Peers = c.Members, nil
	for other, opts := range c.Options {
		if other != name {
			o.Peers = append(o.Peers, opts.Route)
		}
	}
	core, err := cluster.StartCore(c.t.Context(), o)
	if err == nil {
		c.Cores[name] = core
	}
	return err
}

// Login connects to all cores over the network as a host.
func (c *Cluster) Login(keys *cluster.Keys) *nats.Conn {
	c.t.Helper()
	var urls []string
	for _, o := range c.Options {
		urls = append(urls, "tls://"+o.Listen)
	}
	opts, err := keys.Login(c.Authority.Certificate())
	if err != nil {
		c.t.Fatal(err)
	}
	nc, err := nats.Connect(strings.Join(urls, ","), append(opts, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond), nats.Timeout(time.Minute))...)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(nc.Close)
	return nc
}

// JetStream connects to all cores over the network as the first core.
func (c *Cluster) JetStream() jetstream.JetStream {
	c.t.Helper()
	js, err := jetstream.New(c.Login(c.Options["a"].Keys))
	if err != nil {
		c.t.Fatal(err)
	}
	return js
}

// Open calls f until it succeeds, because a cluster that has just started has no leader.
func Open[T any](t *testing.T, f func() (T, error)) (is T) {
	t.Helper()
	testenv.WaitFor(t, "a leader of the cluster", func() bool {
		var err error
		is, err = f()
		return err == nil
	})
	return is
}
