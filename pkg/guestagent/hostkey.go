package guestagent

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/crypto/ssh"
)

const (
	hostKeyFile = "/etc/ssh/ssh_host_ed25519_key"
	loginKeys   = "/etc/ssh/agent-sessionizer" // one file per user, named in sshd_config
)

// ensureHostKey generates sshd's host key unless one exists, and returns the public
// half in authorized_keys format.
func (g Guest) ensureHostKey() (string, error) {
	if old := g.text(hostKeyFile); old != "" {
		if public, err := publicKey(old); err == nil {
			return public, g.writeHostKey(old, public)
		}
		// A power failure truncated the key, so no client has seen it.
	}
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", err
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		return "", err
	}
	key := string(pem.EncodeToMemory(block))
	public, err := publicKey(key)
	if err != nil {
		return "", err
	}
	return public, g.writeHostKey(key, public)
}

// writeHostKey writes both halves of the host key.
func (g Guest) writeHostKey(private, public string) error {
	return errors.Join(
		g.place(hostKeyFile, private, 0o600),
		g.place(hostKeyFile+".pub", public+"\n", 0o644),
	)
}

// publicKey returns the public half of an ed25519 key in OpenSSH's format. Its
// errors quote nothing of the key.
func publicKey(private string) (string, error) {
	signer, err := ssh.ParsePrivateKey([]byte(private))
	if err != nil || signer.PublicKey().Type() != ssh.KeyAlgoED25519 {
		return "", errors.New("the host key must be an ed25519 key in OpenSSH format")
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(signer.PublicKey()))), nil
}

// allow lets a user log in with one key.
func (g Guest) allow(user, key string) error {
	return errors.Join(
		g.place(loginKeys+"/"+user, key+"\n", 0o644),
		// The boot script of other guests writes the same line.
		g.place("/etc/ssh/sshd_config.d/10-agent-sessionizer.conf", "AuthorizedKeysFile "+loginKeys+"/%u .ssh/authorized_keys\n", 0o644),
	)
}

// loginKey checks an authorized key and returns it without its comment.
func loginKey(text string) (string, error) {
	key, _, options, rest, err := ssh.ParseAuthorizedKey([]byte(text))
	if err != nil || len(options) > 0 || len(rest) > 0 {
		return "", fmt.Errorf("the authorized key must be one public key")
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))), nil
}
