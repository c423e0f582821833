// Package boot gives a clone of a golden image, or a fork of a warm state, an identity of its
// own: from the seed disk at each boot, or from the host after a snapshot. It opens no network
// before the lockdown is in force.
package boot

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"golang.org/x/crypto/ssh"
)

const (
	hostKeyFile = "/etc/ssh/ssh_host_ed25519_key"
	loginKeys   = "/etc/ssh/agent-sessionizer" // one file per user, named in sshd_config
)

// ensureHostKey generates sshd's host key unless one exists, and returns the public
// half in authorized_keys format.
func ensureHostKey(g sys.Guest) (string, error) {
	if old := g.Text(hostKeyFile); old != "" {
		if public, err := publicKey(old); err == nil {
			return public, writeHostKey(g, old, public)
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
	return public, writeHostKey(g, key, public)
}

// writeHostKey writes both halves of the host key.
func writeHostKey(g sys.Guest, private, public string) error {
	return errors.Join(
		place(g, hostKeyFile, private, 0o600),
		place(g, hostKeyFile+".pub", public+"\n", 0o644),
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
func allow(g sys.Guest, user, key string) error {
	return errors.Join(
		place(g, loginKeys+"/"+user, key+"\n", 0o644),
		// The boot script of other guests writes the same line.
		place(g, "/etc/ssh/sshd_config.d/10-agent-sessionizer.conf", "AuthorizedKeysFile "+loginKeys+"/%u .ssh/authorized_keys\n", 0o644),
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
