package secret

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/zalando/go-keyring"
)

// keychain returns the service and the account of a keychain: source.
func (r Ref) keychain() (service, account string) {
	rest := r.rest()
	if i := strings.LastIndexByte(rest, '/'); i >= 0 {
		return rest[:i], rest[i+1:]
	}
	return rest, ""
}

// resolveKeychain reads an entry of macOS's keychain or of the Secret Service. Both may ask the
// user to unlock it. The request cannot be cancelled, and ends with this process.
func resolveKeychain(ctx context.Context, r Ref, timeout time.Duration) (string, error) {
	if err := findKeychain(); err != nil {
		return "", problem(r, "%v", err)
	}
	type result struct {
		value string
		err   error
	}
	done := make(chan result, 1)
	go func() {
		value, err := keyring.Get(r.keychain())
		done <- result{value, err}
	}()
	late := time.NewTimer(timeout)
	defer late.Stop()
	select {
	case got := <-done:
		if got.err != nil {
			return "", keychainFailure(r, got.err)
		}
		return got.value, nil
	case <-late.C:
		return "", problem(r, "the keychain did not answer within %v; it may wait for you to unlock it", timeout)
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func keychainFailure(r Ref, err error) error {
	service, account := r.keychain()
	if errors.Is(err, keyring.ErrNotFound) {
		return problem(r, "the keychain has no entry of the service %s and the account %s", service, account).WithHint(storeInKeychain, shellWord(service), shellWord(account))
	}
	message, hint := describeKeychain(err)
	return problem(r, "%s", NewRedactor().Line(message, 200)).WithHint("%s", hint)
}
