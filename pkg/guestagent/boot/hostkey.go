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
	"io/fs"
	"os"
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

// allow lets a user log in with one key, and with the certificates that its owner signs.
func allow(g sys.Guest, user, key string) error {
	return errors.Join(
		place(g, loginKeys+"/"+user, withAuthority(key), 0o644),
		// The boot script of other guests writes the same line.
		place(g, "/etc/ssh/sshd_config.d/10-agent-sessionizer.conf", "AuthorizedKeysFile "+loginKeys+"/%u .ssh/authorized_keys\n", 0o644),
	)
}

// withAuthority returns the lines that allow one key and its certificates. The boot script of
// other guests writes the same lines.
func withAuthority(key string) string { return key + "\ncert-authority " + key + "\n" }

// AllowCertificates lets users log in with certificates of their keys, where an earlier version
// of the boot script or of this program allowed only the keys. The next boot may undo that.
func AllowCertificates(g sys.Guest) error {
	files, err := os.ReadDir(g.Path(loginKeys))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, f := range files {
		name := loginKeys + "/" + f.Name()
		key, err := loginKey(g.Text(name))
		if err != nil { // it has more than the key
			continue
		}
		if err := place(g, name, withAuthority(key), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// loginKey checks an authorized key and returns it without its comment.
func loginKey(text string) (string, error) {
	key, _, options, rest, err := ssh.ParseAuthorizedKey([]byte(text))
	if err != nil || len(options) > 0 || len(rest) > 0 {
		return "", fmt.Errorf("the authorized key must be one public key")
	}
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))), nil
}
