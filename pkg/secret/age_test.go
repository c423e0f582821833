package secret

import (
	"bytes"
	"crypto/ed25519"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/age"
	"filippo.io/age/agessh"
	"filippo.io/age/armor"
	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// encrypt returns a file of age with the content.
func encrypt(t *testing.T, content string, armored bool, to ...age.Recipient) string {
	t.Helper()
	var b bytes.Buffer
	out := io.WriteCloser(struct {
		io.Writer
		io.Closer
	}{&b, io.NopCloser(nil)})
	if armored {
		out = armor.NewWriter(&b)
	}
	w, err := age.Encrypt(out, to...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func newIdentity(t *testing.T) *age.X25519Identity {
	t.Helper()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// sshIdentity returns a private key in OpenSSH's format, and its recipient.
func sshIdentity(t *testing.T, passphrase string) (string, age.Recipient) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if passphrase != "" {
		block, err = ssh.MarshalPrivateKeyWithPassphrase(private, "", []byte(passphrase))
	}
	if err != nil {
		t.Fatal(err)
	}
	key, err := ssh.NewPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	to, err := agessh.NewEd25519Recipient(key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(block)), to
}

// useHome sets an empty home directory, without identities.
func useHome(t *testing.T) string {
	t.Helper()
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("XDG_CONFIG_HOME", "")
	for _, name := range ageIdentityVariables {
		t.Setenv(name, "")
	}
	return home
}

func TestAge(t *testing.T) {
	home := useHome(t)
	id, second := newIdentity(t), newIdentity(t)
	hybrid, err := age.GenerateHybridIdentity()
	if err != nil {
		t.Fatal(err)
	}
	key, sshRecipient := sshIdentity(t, "")
	keys := write(t, home, "keys", "# created: today\n"+second.String()+"\n\n"+hybrid.String()+"\n"+id.String()+"\n", 0o600)
	sshKey := write(t, home, "id_ed25519", key, 0o600)
	largest := strings.Repeat("x", MaxBytes)
	for name, c := range map[string]struct{ identity, file, want string }{
		"binary":       {keys, encrypt(t, sentinel+"\n", false, id.Recipient()), sentinel},
		"armored":      {keys, "\n" + encrypt(t, sentinel, true, id.Recipient()), sentinel},
		"a hybrid key": {keys, encrypt(t, sentinel, false, hybrid.Recipient()), sentinel},
		"an SSH key":   {sshKey, encrypt(t, "a\nb\n", true, newIdentity(t).Recipient(), sshRecipient), "a\nb\n"},
		"the largest":  {keys, encrypt(t, largest, true, id.Recipient()), largest},
		"home":         {"~/keys", encrypt(t, sentinel, false, id.Recipient()), sentinel},
	} {
		t.Setenv("AGE_IDENTITY", c.identity)
		refs := []Ref{{"A", "age:" + write(t, home, "secret.age", c.file, 0o644)}}
		if errs := Check(refs); len(errs) > 0 {
			t.Errorf("%s: Check = %v, want none", name, errs)
		}
		if w := Warnings(refs); len(w) > 0 { // the file itself is encrypted
			t.Errorf("%s: Warnings = %q, want none", name, w)
		}
		got, err := Resolve(t.Context(), refs, Options{})
		if err != nil || got["A"].Reveal() != c.want {
			t.Errorf("%s: Resolve = %.80q, %v, want %.80q", name, got["A"].Reveal(), err, c.want)
		}
	}
}

// The first variable that is set names the identity file, and otherwise it is age/keys.txt.
func TestAgeIdentityFile(t *testing.T) {
	home := useHome(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(home, "xdg")
	ref := Ref{"A", "age:" + filepath.Join(home, "secret.age")}
	for _, c := range []struct {
		path     string
		env, val string
	}{
		{filepath.Join(home, ".config/age/keys.txt"), "AGE", ""},
		{filepath.Join(config, "age/keys.txt"), "XDG_CONFIG_HOME", config},
		{filepath.Join(home, "sops"), "SOPS_AGE_KEY_FILE", filepath.Join(home, "sops")},
		{filepath.Join(home, "mine"), "AGE_IDENTITY", filepath.Join(home, "mine")},
	} {
		t.Setenv(c.env, c.val)
		id := newIdentity(t)
		if err := os.MkdirAll(filepath.Dir(c.path), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Dir(c.path), filepath.Base(c.path), id.String(), 0o640)
		write(t, home, "secret.age", encrypt(t, sentinel, false, id.Recipient()), 0o600)
		got, err := ResolveInChild(t.Context(), self, []Ref{ref})
		if err != nil || got["A"].Reveal() != sentinel {
			t.Errorf("with %s: ResolveInChild = %q, %v, want %q", c.env, got["A"].Reveal(), err, sentinel)
		}
		if w := Warnings([]Ref{ref}); len(w) != 1 || !strings.Contains(w[0], "other users can access "+c.path+" (mode 0640)") {
			t.Errorf("with %s: Warnings = %q, want one for %s", c.env, w, c.path)
		}
	}
}

func TestAgeFailures(t *testing.T) {
	home := useHome(t)
	id := newIdentity(t)
	keys := write(t, home, "keys", id.String(), 0o600)
	locked, _ := sshIdentity(t, "SENTINEL-passphrase")
	password, err := age.NewScryptRecipient("SENTINEL-password")
	if err != nil {
		t.Fatal(err)
	}
	password.SetWorkFactor(10)
	good := encrypt(t, sentinel, false, id.Recipient())
	flipped := good[:len(good)-1] + string(good[len(good)-1]^1)
	for name, c := range map[string]struct {
		identity, file, want, hint string
		checked                    bool // Check finds it, too
	}{
		"not for it":            {keys, encrypt(t, sentinel, false, newIdentity(t).Recipient()), "is not encrypted for an identity in " + keys, "age --decrypt --identity " + keys, false},
		"a passphrase":          {keys, encrypt(t, sentinel, false, password), "is encrypted with a passphrase", "", false},
		"plain text":            {keys, sentinel, "is not a file of age, or is damaged", "", false},
		"half an armor":         {keys, encrypt(t, sentinel, true, id.Recipient())[:100], "is not a file of age, or is damaged", "", false},
		"half a file":           {keys, good[:len(good)-5], "is damaged", "", false},
		"a flipped bit":         {keys, flipped, "is damaged", "", false},
		"too large":             {keys, encrypt(t, strings.Repeat(sentinel, MaxBytes/len(sentinel)+1), false, id.Recipient()), "larger than the limit of 256 KiB", "", false},
		"a huge file":           {keys, strings.Repeat("x", maxAgeFile+1), "larger than the limit of 1024 KiB", "", true},
		"no identity":           {home + "/missing", good, "missing does not exist", "export AGE_IDENTITY=", true},
		"the key itself":        {"SENTINEL-AGE-SECRET-KEY-1", good, "AGE_IDENTITY must be the absolute path", "export AGE_IDENTITY=", true},
		"a malformed identity":  {write(t, home, "malformed", id.String()+"\nAGE-SECRET-KEY-1SENTINEL\n", 0o600), good, "is not a file of age-keygen", "use cmd:", false},
		"a plugin's identity":   {write(t, home, "plugin", "AGE-PLUGIN-SENTINEL-1XX\n", 0o600), good, "is not a file of age-keygen", "use cmd:", false},
		"an encrypted identity": {write(t, home, "encrypted", good, 0o600), good, "is not a file of age-keygen", "use cmd:", false},
		"a locked SSH key":      {write(t, home, "locked", locked, 0o600), good, "has a passphrase", "use cmd:", false},
		"another PEM file":      {write(t, home, "pem", "-----BEGIN SENTINEL-----\nAA==\n-----END SENTINEL-----\n", 0o600), good, "is not an SSH key that age can use", "use cmd:", false},
		"an identity directory": {home, good, "is not a regular file", "export AGE_IDENTITY=", true},
	} {
		t.Setenv("AGE_IDENTITY", c.identity)
		refs := []Ref{{"A", "age:" + write(t, home, "secret.age", c.file, 0o600)}}
		_, err := Resolve(t.Context(), refs, Options{})
		if fail.CodeOf(err) != fail.Secret || !strings.Contains(err.Error(), c.want) || !strings.Contains(fail.HintOf(err), c.hint) || !strings.HasPrefix(err.Error(), "secret A (age): ") {
			t.Errorf("%s: Resolve = %v (hint %q), want %q (hint %q)", name, err, fail.HintOf(err), c.want, c.hint)
		}
		if strings.Contains(fmt.Sprint(err, fail.HintOf(err)), "SENTINEL") {
			t.Errorf("%s: Resolve = %v, want no content in the error", name, err)
		}
		if errs := Check(refs); (len(errs) > 0) != c.checked {
			t.Errorf("%s: Check = %v, want an error: %t", name, errs, c.checked)
		}
	}
	refs := []Ref{{"A", "age:" + home + "/no.age"}}
	if errs := Check(refs); len(errs) != 1 || !strings.Contains(errs[0].Error(), "no.age does not exist") {
		t.Errorf("Check of a missing file = %v, want \"does not exist\"", errs)
	}
}
