package session

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

const (
	certificateLife = 24 * time.Hour
	connectBound    = 10 * time.Second
)

// GuestLogin is what the owner of a key needs to log in to a session's guest.
type GuestLogin struct {
	User        string    `json:"user" doc:"The guest's user."`
	HostKey     string    `json:"host_key" doc:"The guest's host key, in authorized_keys format. The client must accept no other."`
	Certificate string    `json:"certificate" doc:"An SSH user certificate for the public key, in authorized_keys format."`
	Expires     time.Time `json:"expires" doc:"When the certificate expires."`
}

// Certify lets the owner of a public key log in to a session's running VM. The session's own key
// stays on this host.
func (c Connections) Certify(s Session, public string) (l GuestLogin, err error) {
	t, err := c.target(s, "")
	if err != nil {
		return l, err
	}
	l = GuestLogin{User: t.User, HostKey: t.HostKey, Expires: time.Now().Add(certificateLife).UTC().Truncate(time.Second)}
	l.Certificate, err = ssh.Certify(t.Key, public, t.User, l.Expires)
	return l, err
}

// Connect connects to the SSH port of a session's running VM, without a login.
func (Connections) Connect(ctx context.Context, s Session) (net.Conn, error) {
	if err := s.hasVM(); err != nil {
		return nil, err
	}
	conn, err := (&net.Dialer{Timeout: connectBound}).DialContext(ctx, "tcp", s.Status.Endpoint.Addr)
	if err != nil {
		return nil, fmt.Errorf("connect to session %s: %w: %w", s.Name, ssh.ErrUnreachable, err)
	}
	return conn, nil
}
