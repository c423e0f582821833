package fake

import (
	"context"
	"net"
	"strconv"
	"sync"

	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

// forward implements sshd's TCP forwarding. Here the guest's loopback is the host's.
func (g *guest) forward(ctx context.Context, n xssh.NewChannel) {
	var to struct { // RFC 4254, 7.2
		Host       string
		Port       uint32
		Originator string
		From       uint32
	}
	if err := xssh.Unmarshal(n.ExtraData(), &to); err != nil {
		_ = n.Reject(xssh.ConnectionFailed, "not understood")
		return
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(to.Host, strconv.Itoa(int(to.Port))))
	if err != nil {
		_ = n.Reject(xssh.ConnectionFailed, "Connection refused")
		return
	}
	defer c.Close()
	if !g.keep(c) {
		_ = n.Reject(xssh.ConnectionFailed, "powered off")
		return
	}
	defer g.forget(c)
	ch, reqs, err := n.Accept()
	if err != nil {
		return
	}
	defer ch.Close()
	g.tasks.Go(func() { xssh.DiscardRequests(reqs) })
	var both sync.WaitGroup
	both.Go(func() {
		_ = pipe.Copy(c, ch)
	})
	both.Go(func() {
		_ = pipe.Copy(ch, c)
	})
	both.Wait()
}
