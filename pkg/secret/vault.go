package secret

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	vault "github.com/hashicorp/vault/api"
)

const (
	vaultTokenFile = "~/.vault-token" // where the vault command keeps its token
	maxVaultToken  = 64 << 10
	maxVaultAnswer = 4 << 20 // Vault's own limit for an entry is 1 MiB
)

// vault returns the path below the mount and the key of a vault: source.
func (r Ref) vault() (path, key string) {
	rest := r.rest()
	if i := strings.LastIndexByte(rest, ':'); i >= 0 {
		return rest[:i], rest[i+1:]
	}
	return rest, ""
}

// badVault returns what is wrong with a vault: source, or "".
func badVault(r Ref) string {
	path, key := r.vault()
	switch segments := strings.Split(path, "/"); {
	case path == "" || key == "":
		return "vault: must be followed by the path of a secret, a colon and a key of it"
	case slices.ContainsFunc(segments, func(s string) bool { return s == "" || s == "." || s == ".." }):
		return "the path of a vault: source must not begin or end with a slash, or have empty parts, . or .."
	}
	return ""
}

// vaultMount returns the mount of the KV engine.
func vaultMount() string {
	if mount := strings.Trim(os.Getenv("VAULT_MOUNT"), "/"); mount != "" {
		return mount
	}
	return "secret"
}

// vaultSettings checks the address, and returns the token or else the file that has it. A proxy
// at VAULT_AGENT_ADDR may have a token of its own, so that neither is needed.
func vaultSettings(r Ref) (token, file string, err error) {
	proxy := os.Getenv(vault.EnvVaultAgentAddr) != ""
	if os.Getenv(vault.EnvVaultAddress) == "" && !proxy {
		return "", "", problem(r, "VAULT_ADDR is not set").WithHint("export VAULT_ADDR=https://…")
	}
	if token = os.Getenv(vault.EnvVaultToken); token != "" {
		return token, "", nil
	}
	file, err = expandHome(vaultTokenFile)
	if err == nil {
		_, err = os.Stat(file)
	}
	if err != nil && !proxy {
		return "", "", problem(r, "VAULT_TOKEN is not set, and there is no readable %s", vaultTokenFile).WithHint("vault login")
	}
	if err != nil {
		return "", "", nil //nolint:nilerr // the proxy has the token
	}
	return "", file, nil
}

// resolveVault reads one key of a secret in a KV version 2 engine.
func resolveVault(ctx context.Context, r Ref, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	client, err := newVaultClient(r)
	if err != nil {
		return "", err
	}
	path, key := r.vault()
	mount := vaultMount()
	got, err := client.KVv2(mount).Get(ctx, path)
	if err != nil {
		return "", vaultFailure(r, err, NewRedactor(NewValue(client.Token())))
	}
	switch value, ok := got.Data[key]; {
	case got.Data == nil:
		return "", problem(r, "the current version of %s/%s is deleted", mount, path).WithHint("vault kv metadata get -mount=%s %s", shellWord(mount), shellWord(path))
	case !ok:
		return "", problem(r, "%s/%s has no key %s", mount, path, key).WithHint("vault kv get -mount=%s %s", shellWord(mount), shellWord(path))
	default:
		s, ok := value.(string)
		if !ok {
			return "", problem(r, "%s in %s/%s is not a string", key, mount, path).WithHint("vault kv patch -mount=%s %s %s=…", shellWord(mount), shellWord(path), shellWord(key))
		}
		return s, nil
	}
}

// newVaultClient returns a client with the settings that the vault command has from its
// environment, except those that change what an answer is.
func newVaultClient(r Ref) (*vault.Client, error) {
	token, file, err := vaultSettings(r)
	if err != nil {
		return nil, err
	}
	if file != "" {
		b, err := readRegular(r, file, maxVaultToken)
		if err != nil {
			return nil, err
		}
		token = string(b)
	}
	config := vault.DefaultConfig()
	if config.Error != nil {
		return nil, problem(r, "the settings of Vault are invalid: %v", config.Error).WithHint("env | grep VAULT_")
	}
	client, err := vault.NewClient(config)
	if err != nil {
		return nil, problem(r, "the settings of Vault are invalid: %v", err).WithHint("env | grep VAULT_")
	}
	config.HttpClient.Transport = boundedAnswers{config.HttpClient.Transport}
	client.SetToken(strings.TrimSpace(token))
	client.SetWrappingLookupFunc(func(string, string) string { return "" }) // VAULT_WRAP_TTL
	return client, nil
}

// vaultFailure returns the error for one reference from that of Vault's client.
func vaultFailure(r Ref, err error, red *Redactor) error {
	path, _ := r.vault()
	mount := vaultMount()
	var refused *vault.ResponseError
	var failed *url.Error
	switch {
	case errors.Is(err, vault.ErrSecretNotFound):
		return problem(r, "the secret %s/%s does not exist", mount, path).
			WithHint("vault kv get -mount=%s %s # VAULT_MOUNT sets the mount; the path has no data/", shellWord(mount), shellWord(path))
	case errors.Is(err, context.DeadlineExceeded):
		return problem(r, "Vault did not answer in time").WithHint("vault status")
	case errors.Is(err, errTooMuch):
		return problem(r, "Vault's answer is larger than the limit of %d MiB", maxVaultAnswer>>20)
	case errors.As(err, &refused) && refused.StatusCode == http.StatusForbidden:
		return problem(r, "Vault refuses the token for %s/%s: %s", mount, path, red.Line(strings.Join(refused.Errors, "; "), 200)).WithHint("vault token lookup")
	case errors.As(err, &refused):
		return problem(r, "Vault answered with %d: %s", refused.StatusCode, red.Line(strings.Join(refused.Errors, "; "), 200)).WithHint("vault status")
	case errors.As(err, &failed): // without the URL, which may contain a password
		err = failed.Err
	}
	hint := "vault status"
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		hint = "export VAULT_CACERT=/… # the certificate of the authority"
	}
	return problem(r, "%s", red.Line(fmt.Sprint("Vault: ", err), 200)).WithHint("%s", hint)
}

// boundedAnswers limits the size of answers, which Vault's client reads into memory.
type boundedAnswers struct{ http.RoundTripper }

func (b boundedAnswers) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(req)
	if err == nil {
		resp.Body = &boundedBody{resp.Body, maxVaultAnswer}
	}
	return resp, err
}

type boundedBody struct {
	io.ReadCloser
	left int
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, errTooMuch
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
