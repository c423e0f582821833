package cluster

import (
	"context"
	"crypto/tls"
	"net"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// maxPeerConns is how many connections one host may have open to this one.
const maxPeerConns = 64

// peer is a connection through a tunnel to or from another host, below TLS.
type peer struct {
	net.Conn
	node *Node

	// Under node.mu, and empty until the other host has proved who it is.
	identity Identity
	dialed   bool
}

// Close implements net.Conn.
func (p *peer) Close() error {
	p.node.mu.Lock()
	delete(p.node.peers, p)
	p.node.mu.Unlock()
	return p.Conn.Close()
}

// secure returns the settings for TLS on the connection. The other host must have the role need at
// least, and the name, unless that is "".
func (n *Node) secure(p *peer, need Role, name string) (*tls.Config, error) {
	settings, err := n.keys.TLS([]byte(n.State.Certificate), []byte(n.State.Authority), func(i Identity) error { return n.admitPeer(p, i, need, name) })
	if err != nil {
		return nil, err
	}
	settings.SessionTicketsDisabled = true // each connection shows its certificate
	settings.NextProtos = []string{"http/1.1"}
	return settings, nil
}

// admitPeer decides about the host at the other end of a connection, and records it as open.
func (n *Node) admitPeer(p *peer, i Identity, need Role, name string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.allow(i); err != nil {
		return err
	}
	switch {
	case !i.Role.Allows(need):
		return fail.New(fail.Policy, "host %s is a %s, which may not use other hosts", i.Name, i.Role)
	case name != "" && i.Name != name:
		return fail.New(fail.Policy, "host %s answered instead of %s", i.Name, name)
	}
	open := 0
	for other := range n.peers {
		if other.identity.Nkey == i.Nkey && other.dialed == p.dialed {
			open++
		}
	}
	if open >= maxPeerConns {
		return fail.New(fail.Conflict, "host %s has %d connections open", i.Name, open)
	}
	p.identity = i
	n.peers[p] = true
	return nil
}

// closeRemoved closes the connections to and from hosts that are no longer members.
func (n *Node) closeRemoved() {
	n.mu.Lock()
	var removed []*peer
	for p := range n.peers {
		if n.allow(p.identity) != nil {
			removed = append(removed, p)
		}
	}
	n.mu.Unlock()
	for _, p := range removed {
		_ = p.Conn.Close() // what uses it notices, and closes p
	}
}

// Listen accepts connections from the hosts of the cluster that may use others: no workers. Each is
// a *tls.Conn, whose handshake takes place when it is first used. PeerOf then returns who it is.
func (n *Node) Listen() net.Listener { return peerListener{n.Tunnels, n} }

type peerListener struct {
	*Tunnels
	node *Node
}

// Accept implements net.Listener.
func (l peerListener) Accept() (net.Conn, error) {
	c, err := l.Tunnels.Accept()
	if err != nil {
		return nil, err
	}
	p := &peer{Conn: c, node: l.node}
	settings, err := l.node.secure(p, Member, "")
	if err != nil {
		_ = p.Close()
		return nil, err
	}
	time.AfterFunc(openTimeout, func() {
		p.node.mu.Lock()
		unknown := p.identity.Name == ""
		p.node.mu.Unlock()
		if unknown {
			_ = p.Close() // it has not proved who it is
		}
	})
	return tls.Server(p, settings), nil
}

// PeerOf returns the host at the other end of a connection that Listen accepted; false before it has
// proved who it is.
func PeerOf(c net.Conn) (Identity, bool) {
	t, ok := c.(*tls.Conn)
	if !ok {
		return Identity{}, false
	}
	p, ok := t.NetConn().(*peer)
	if !ok {
		return Identity{}, false
	}
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	return p.identity, p.identity.Name != ""
}

// Dial connects to another host of the cluster, which has proved its name when Dial returns. What
// is between the two sees only ciphertext.
func (n *Node) Dial(ctx context.Context, host string) (net.Conn, error) {
	c, err := n.Tunnels.Dial(ctx, host)
	if err != nil {
		return nil, err
	}
	p := &peer{Conn: c, node: n, dialed: true}
	settings, err := n.secure(p, Worker, host)
	if err != nil {
		_ = p.Close()
		return nil, err
	}
	secured := tls.Client(p, settings)
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = p.Close()
		return nil, fail.New(fail.Host, "connect to host %s: %w", host, err).WithHint("agent-sessionizer cluster show %s", host)
	}
	return secured, nil
}
