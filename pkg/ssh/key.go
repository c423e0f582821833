package ssh

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"strings"

	"golang.org/x/crypto/ssh"
)

// NewKey generates an ed25519 key pair: the private half as OpenSSH PEM, the public
// half as one authorized_keys line without comment or newline.
func NewKey() (private []byte, authorized string, err error) {
	public, secret, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, "", fmt.Errorf("create an SSH key: %w", err)
	}
	block, err := ssh.MarshalPrivateKey(secret, "")
	if err != nil {
		return nil, "", fmt.Errorf("create an SSH key: %w", err)
	}
	key, err := ssh.NewPublicKey(public)
	if err != nil {
		return nil, "", fmt.Errorf("create an SSH key: %w", err)
	}
	return pem.EncodeToMemory(block), strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))), nil
}
