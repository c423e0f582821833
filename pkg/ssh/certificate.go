package ssh

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

const (
	maxPublicKey   = 1 << 10 // in authorized_keys format, with its comment
	maxCertificate = 4 << 10
)

// Certify signs a certificate for a public key: with it, the owner of that key can log in to a
// guest as user, as the owner of authority can, until expires. authority is a private key, PEM;
// public is an ed25519 key in authorized_keys format, and so is the certificate.
func Certify(authority []byte, public, user string, expires time.Time) (certificate string, err error) {
	if len(public) > maxPublicKey {
		return "", fail.New(fail.Usage, "the public key must have at most %d bytes, got %d", maxPublicKey, len(public)).WithHint("ssh-keygen -t ed25519 -f KEY")
	}
	key, _, options, rest, err := ssh.ParseAuthorizedKey([]byte(public))
	if err != nil || len(options) > 0 || len(rest) > 0 || key.Type() != ssh.KeyAlgoED25519 {
		return "", fail.New(fail.Usage, "the public key must be one ed25519 key in authorized_keys format").WithHint("ssh-keygen -t ed25519 -f KEY")
	}
	signer, err := ssh.ParsePrivateKey(authority)
	if err != nil {
		return "", errInvalidKey
	}
	cert := &ssh.Certificate{
		Key: key, CertType: ssh.UserCert, KeyId: "agent-sessionizer", ValidPrincipals: []string{user},
		// It has no beginning: the clock of a guest may be behind, for example after its host slept.
		ValidBefore: uint64(expires.Unix()),
		Permissions: ssh.Permissions{Extensions: map[string]string{"permit-pty": "", "permit-port-forwarding": ""}},
	}
	if err := cert.SignCert(rand.Reader, signer); err != nil {
		return "", fmt.Errorf("sign a certificate: %w", err)
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(cert))), nil
}

var errInvalidKey = errors.New("read the login key: must be an unencrypted private key in PEM format")

// signer returns what proves the identity of the client.
func (t Target) signer() (ssh.Signer, error) {
	signer, err := ssh.ParsePrivateKey(t.Key)
	if err != nil {
		return nil, errInvalidKey
	}
	if t.Certificate == "" {
		return signer, nil
	}
	invalid := errors.New("read the login certificate: must be a certificate for the login key in authorized_keys format")
	if len(t.Certificate) > maxCertificate {
		return nil, invalid
	}
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(t.Certificate))
	if err != nil {
		return nil, invalid
	}
	cert, ok := key.(*ssh.Certificate)
	if !ok {
		return nil, invalid
	}
	if signer, err = ssh.NewCertSigner(cert, signer); err != nil {
		return nil, invalid
	}
	return signer, nil
}
