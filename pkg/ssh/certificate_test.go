package ssh_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// newKey returns a key pair.
func newKey(t *testing.T) (private []byte, public string) {
	t.Helper()
	private, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return private, public
}

// TestCertificate logs in with certificates at a server that knows only the key which signs them.
func TestCertificate(t *testing.T) {
	s := serve(t, func(c channel) { c.exit(0) }, nil)
	private, public := newKey(t)
	foreign, otherPublic := newKey(t)
	soon := time.Now().Add(time.Hour)
	for name, c := range map[string]struct {
		authority []byte
		public    string
		user      string
		expires   time.Time
		want      string // part of the error
	}{
		"valid":                {s.target.Key, public, "agent", soon, ""},
		"expired":              {s.target.Key, public, "agent", time.Now().Add(-time.Second), ssh.ErrRejected.Error()},
		"of another user":      {s.target.Key, public, "root", soon, ssh.ErrRejected.Error()},
		"of another authority": {foreign, public, "agent", soon, ssh.ErrRejected.Error()},
		"signed by itself":     {private, public, "agent", soon, ssh.ErrRejected.Error()},
		"of another key":       {s.target.Key, otherPublic, "agent", soon, "a certificate for the login key"},
	} {
		t.Run(name, func(t *testing.T) {
			target := s.target
			var err error
			target.Key = private
			if target.Certificate, err = ssh.Certify(c.authority, c.public, c.user, c.expires); err != nil {
				t.Fatal(err)
			}
			conn, err := ssh.Dial(t.Context(), target)
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) || errors.Is(err, ssh.ErrUnreachable) {
					t.Fatalf("Dial = %v, want an error with %q", err, c.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := conn.Run(t.Context(), "true", ssh.IO{}); err != nil {
				t.Errorf("Run = %v, want success", err)
			}
		})
	}
	target := s.target
	target.Key = private
	if _, err := ssh.Dial(t.Context(), target); !errors.Is(err, ssh.ErrRejected) {
		t.Errorf("Dial without the certificate = %v, want %v", err, ssh.ErrRejected)
	}
	for _, bad := range []string{"x", public, strings.Repeat("a", 1<<20)} {
		target.Certificate = bad
		if _, err := ssh.Dial(t.Context(), target); err == nil || !strings.Contains(err.Error(), "read the login certificate") {
			t.Errorf("Dial with the certificate %.20q = %v, want an error about it", bad, err)
		}
	}
}

// A certificate permits what a terminal and forwarded ports need, and nothing else.
func TestCertificateContent(t *testing.T) {
	authority, authorized := newKey(t)
	_, public := newKey(t)
	expires := time.Now().Add(time.Hour)
	text, err := ssh.Certify(authority, public+" comment", "agent", expires)
	if err != nil {
		t.Fatal(err)
	}
	key, comment, _, _, err := xssh.ParseAuthorizedKey([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	cert, ok := key.(*xssh.Certificate)
	if !ok || comment != "" {
		t.Fatalf("Certify = %s, want a certificate without a comment", text)
	}
	if got := strings.TrimSpace(string(xssh.MarshalAuthorizedKey(cert.SignatureKey))); got != authorized {
		t.Errorf("signed by %s, want %s", got, authorized)
	}
	if got := strings.TrimSpace(string(xssh.MarshalAuthorizedKey(cert.Key))); got != public {
		t.Errorf("key = %s, want %s", got, public)
	}
	if cert.CertType != xssh.UserCert || !slices.Equal(cert.ValidPrincipals, []string{"agent"}) || cert.ValidBefore != uint64(expires.Unix()) {
		t.Errorf("type %d, principals %q, valid before %d, want %d, agent, %d", cert.CertType, cert.ValidPrincipals, cert.ValidBefore, xssh.UserCert, expires.Unix())
	}
	_, pty := cert.Extensions["permit-pty"]
	_, forwards := cert.Extensions["permit-port-forwarding"]
	if !pty || !forwards || len(cert.Extensions) != 2 || len(cert.CriticalOptions) != 0 {
		t.Errorf("extensions = %v, options = %v, want permit-pty and permit-port-forwarding", cert.Extensions, cert.CriticalOptions)
	}
}

func TestCertifyRefusesKeys(t *testing.T) {
	authority, public := newKey(t)
	other, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	otherKey, err := xssh.NewPublicKey(&other.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := ssh.Certify(authority, public, "agent", time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]string{
		"nothing":       "",
		"text":          "not a key",
		"RSA":           string(xssh.MarshalAuthorizedKey(otherKey)),
		"a certificate": certificate,
		"an option":     `command="sh" ` + public,
		"two keys":      public + "\n" + public,
		"a long key":    public + " " + strings.Repeat("x", 1<<10),
	} {
		if text, err := ssh.Certify(authority, bad, "agent", time.Now().Add(time.Hour)); fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "" {
			t.Errorf("Certify with %s = %q, %v, want a usage error with a hint", name, text, err)
		}
	}
	if _, err := ssh.Certify([]byte("sentinel"), public, "agent", time.Now()); err == nil || strings.Contains(err.Error(), "sentinel") {
		t.Errorf("Certify with a broken authority = %v, want an error that does not quote it", err)
	}
}

// TestDialOverAConnection logs in over a connection that the caller opens, and checks the host key
// on it as on any other.
func TestDialOverAConnection(t *testing.T) {
	s := serve(t, func(c channel) { c.exit(0) }, nil)
	_, otherPublic := newKey(t)
	dialled := 0
	target := s.target
	target.Addr = "elsewhere"
	target.Connect = func(ctx context.Context) (net.Conn, error) {
		dialled++
		return (&net.Dialer{}).DialContext(ctx, "tcp", s.target.Addr)
	}
	c, err := ssh.Dial(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Run(t.Context(), "true", ssh.IO{}); err != nil || dialled != 1 {
		t.Errorf("Run = %v over %d connections, want success over one", err, dialled)
	}
	mistaken := target
	mistaken.HostKey = otherPublic
	if _, err := ssh.Dial(t.Context(), mistaken); !errors.Is(err, ssh.ErrHostKey) {
		t.Errorf("Dial with another host key pinned = %v, want %v", err, ssh.ErrHostKey)
	}
	failure := errors.New("no tunnel")
	target.Connect = func(context.Context) (net.Conn, error) { return nil, failure }
	if _, err := ssh.Dial(t.Context(), target); err != failure { //nolint:errorlint // it must be returned as it is
		t.Errorf("Dial = %v, want %v", err, failure)
	}
}
