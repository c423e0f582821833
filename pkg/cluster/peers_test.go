package cluster_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// nodes starts the core "one" and the members of those names.
func nodes(t *testing.T, names ...string) map[string]*cluster.Node {
	t.Helper()
	return nodesIn(t, t.TempDir(), names...)
}

// nodesIn does what nodes does. Each host has a directory below dir.
func nodesIn(t *testing.T, dir string, names ...string) map[string]*cluster.Node {
	t.Helper()
	if _, err := cluster.Found(filepath.Join(dir, "one"), "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	one, _ := serve(t, filepath.Join(dir, "one"))
	all := map[string]*cluster.Node{"one": one}
	for _, name := range names {
		token, err := one.Invite(t.Context(), cluster.Member, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		testenv.WaitFor(t, "the admission of "+name, func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := cluster.Join(ctx, filepath.Join(dir, name), token, cluster.Applicant{Name: name}, nil)
			return err == nil
		})
		all[name], _ = serve(t, filepath.Join(dir, name))
	}
	for _, n := range all {
		testenv.WaitFor(t, "that every host knows all", func() bool {
			for name := range all {
				if _, ok := n.Member(name); !ok {
					return false
				}
			}
			return true
		})
	}
	return all
}

// TestHostCannotAnswerForAnother lets a core, which may read every message, answer in the place of
// another host.
func TestHostCannotAnswerForAnother(t *testing.T) {
	t.Parallel()
	all := nodes(t, "two")
	s := all["one"].State
	keys, err := s.Keys()
	if err != nil {
		t.Fatal(err)
	}
	opts, err := keys.Login([]byte(s.Authority))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := nats.Connect("tls://"+s.Listen, append(opts, nats.Timeout(time.Minute))...)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	false3, err := cluster.NewTunnels(nc, "three")
	if err != nil {
		t.Fatal(err)
	}
	defer false3.Close()
	settings, err := keys.TLS([]byte(s.Certificate), []byte(s.Authority), func(cluster.Identity) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := false3.Accept()
			if err != nil {
				return
			}
			_ = tls.Server(c, settings).HandshakeContext(t.Context()) // the other end refuses it
		}
	}()
	var dialed error
	testenv.WaitFor(t, "an answer", func() bool { // the server hears of the subscription a moment later
		c, err := all["two"].Dial(t.Context(), "three")
		if err == nil {
			c.Close()
		}
		dialed = err
		return err == nil || !strings.Contains(err.Error(), "not connected")
	})
	if fail.CodeOf(dialed) != fail.Host || !strings.Contains(dialed.Error(), "host one answered instead of three") {
		t.Errorf("Dial of a host whose name another one claims = %v, want it refused", dialed)
	}
}

// TestPeerConnsAreLimited opens more connections than one host may have.
func TestPeerConnsAreLimited(t *testing.T) {
	t.Parallel()
	all := nodes(t, "two")
	l := all["one"].Listen()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { // an echo, which begins with the name of the other host
				defer c.Close()
				if c.(*tls.Conn).HandshakeContext(t.Context()) != nil {
					return
				}
				i, ok := cluster.PeerOf(c)
				if !ok || i.Name != "two" || i.Role != cluster.Member {
					t.Errorf("PeerOf = %+v, %t, want the member two", i, ok)
				}
				_, _ = io.WriteString(c, i.Name+"\n")
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	open := func() (net.Conn, error) {
		c, err := all["two"].Dial(t.Context(), "one")
		if err != nil {
			return nil, err
		}
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		line, err := bufio.NewReader(c).ReadString('\n')
		if err == nil && line != "two\n" {
			t.Errorf("greeting = %q, want two", line)
		}
		return c, err
	}
	var conns []net.Conn
	for {
		c, err := open()
		if err != nil {
			break
		}
		conns = append(conns, c)
		if len(conns) > 100 {
			break
		}
	}
	if len(conns) != 64 {
		t.Errorf("connections of one host = %d, want 64", len(conns))
	}
	conns[0].Close()
	testenv.WaitFor(t, "room for another connection", func() bool {
		c, err := open()
		if err != nil {
			return false
		}
		c.Close()
		return true
	})
	for _, c := range conns[1:] {
		c.Close()
	}
}
