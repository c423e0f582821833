package secret

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"

	"filippo.io/age"
	"filippo.io/age/agessh"
	"filippo.io/age/armor"
	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

const (
	maxAgeFile     = 1 << 20 // a value of MaxBytes, armored, with many recipients
	maxAgeIdentity = 64 << 10
)

// ageIdentityVariables may have the path of an identity file.
var ageIdentityVariables = []string{"AGE_IDENTITY", "SOPS_AGE_KEY_FILE"}

// ageIdentityFile returns the path of the identity file.
func ageIdentityFile() (string, error) {
	for _, name := range ageIdentityVariables {
		if path := os.Getenv(name); path != "" {
			path, err := expandHome(path)
			if err == nil && !filepath.IsAbs(path) { // do not quote it: it may be the key
				err = errors.New(name + " must be the absolute path of an identity file")
			}
			return path, err
		}
	}
	if dir := os.Getenv("XDG_CONFIG_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "age", "keys.txt"), nil
	}
	return expandHome("~/.config/age/keys.txt")
}

// checkAge checks that the encrypted file and the identity file exist.
func checkAge(r Ref) error {
	path, err := filePath(r)
	if err != nil {
		return problem(r, "%v", err)
	}
	if err := fileProblem(r, path, maxAgeFile); err != nil {
		return err
	}
	_, err = findAgeIdentity(r)
	return err
}

func findAgeIdentity(r Ref) (string, error) {
	path, err := ageIdentityFile()
	if err != nil {
		err = problem(r, "%v", err)
	} else {
		err = fileProblem(r, path, maxAgeIdentity)
	}
	if err != nil {
		return "", fail.New(fail.Secret, "%w", err).WithHint("export AGE_IDENTITY=/… # a file of age-keygen, or an SSH private key")
	}
	return path, nil
}

// resolveAge decrypts a file with the identities of the identity file.
func resolveAge(r Ref) (string, error) {
	path, err := filePath(r)
	if err != nil {
		return "", problem(r, "%v", err)
	}
	b, err := readRegular(r, path, maxAgeFile)
	if err != nil {
		return "", err
	}
	identityFile, err := findAgeIdentity(r)
	if err != nil {
		return "", err
	}
	identities, err := ageIdentities(r, identityFile)
	if err != nil {
		return "", err
	}
	var in io.Reader = bytes.NewReader(b)
	if bytes.HasPrefix(bytes.TrimSpace(b), []byte(armor.Header)) {
		in = armor.NewReader(bufio.NewReader(in))
	}
	plain, err := age.Decrypt(in, identities...)
	var noMatch *age.NoIdentityMatchError
	switch {
	case errors.As(err, &noMatch) && slices.Contains(noMatch.StanzaTypes, "scrypt"):
		return "", problem(r, "%s is encrypted with a passphrase, not for an identity", path)
	case errors.As(err, &noMatch):
		return "", problem(r, "%s is not encrypted for an identity in %s", path, identityFile).WithHint("age --decrypt --identity %s %s", shellWord(identityFile), shellWord(path))
	case err != nil:
		return "", problem(r, "%s is not a file of age, or is damaged", path)
	}
	value, err := io.ReadAll(io.LimitReader(plain, MaxBytes+1))
	if err != nil {
		return "", problem(r, "%s is damaged", path)
	}
	return string(value), nil
}

// ageIdentities reads an identity file, which is a list of age's secret keys or an SSH private
// key. Its errors do not quote the libraries' errors, which may be about parts of a key.
func ageIdentities(r Ref, path string) ([]age.Identity, error) {
	b, err := readRegular(r, path, maxAgeIdentity)
	if err != nil {
		return nil, err
	}
	const hint = "use cmd: with age --decrypt for keys that need a passphrase or a plugin"
	if bytes.HasPrefix(bytes.TrimSpace(b), []byte("-----BEGIN")) {
		one, err := agessh.ParseIdentity(b)
		var locked *ssh.PassphraseMissingError
		switch {
		case errors.As(err, &locked):
			return nil, problem(r, "the identity %s has a passphrase", path).WithHint(hint)
		case err != nil:
			return nil, problem(r, "the identity %s is not an SSH key that age can use", path).WithHint(hint)
		}
		return []age.Identity{one}, nil
	}
	all, err := age.ParseIdentities(bytes.NewReader(b))
	if err != nil {
		return nil, problem(r, "the identity %s is not a file of age-keygen, or has a line that is not a secret key", path).WithHint(hint)
	}
	return all, nil
}
