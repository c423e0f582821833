// Package onepassword resolves op:// references through 1Password's SDK. No other
// package imports the SDK. Its WebAssembly core takes more than a second and 150 MB
// at its first call, and never releases the memory. It is therefore meant for the
// short-lived resolver process; importing it costs next to nothing.
//
// It validates nothing and stores nothing; its errors are one line.
package onepassword

import (
	"context"
	"errors"
	"fmt"
	"strings"

	sdk "github.com/1password/onepassword-sdk-go"
)

// Resolve implements secret.Batch. It makes one ResolveAll call with a
// service-account token, or with the desktop app's account if token is "".
func Resolve(ctx context.Context, token, account string, refs []string) (map[string]string, map[string]error, error) {
	auth := sdk.WithServiceAccountToken(token)
	if token == "" {
		auth = sdk.WithDesktopAppIntegration(account)
	}
	client, err := sdk.NewClient(ctx, auth, sdk.WithIntegrationInfo("agent-sessionizer", "v1"))
	if err != nil {
		return nil, nil, oneLine(err)
	}
	res, err := client.Secrets().ResolveAll(ctx, refs)
	if err != nil {
		return nil, nil, oneLine(err)
	}
	values, failed := map[string]string{}, map[string]error{}
	for _, ref := range refs {
		r, ok := res.IndividualResponses[ref]
		switch {
		case !ok:
			failed[ref] = errors.New("1Password returned no answer")
		case r.Error != nil:
			failed[ref] = describe(r.Error.Type)
		case r.Content == nil:
			failed[ref] = errors.New("1Password returned an empty answer")
		default:
			values[ref] = r.Content.Secret
		}
	}
	return values, failed, nil
}

// describe converts the SDK's error names into messages.
func describe(t sdk.ResolveReferenceErrorTypes) error {
	switch t {
	case sdk.ResolveReferenceErrorTypeVariantVaultNotFound:
		return errors.New("the vault was not found, or the account may not read it")
	case sdk.ResolveReferenceErrorTypeVariantItemNotFound:
		return errors.New("the item was not found in the vault")
	case sdk.ResolveReferenceErrorTypeVariantFieldNotFound:
		return errors.New("the item has no such field")
	case sdk.ResolveReferenceErrorTypeVariantNoMatchingSections:
		return errors.New("the item has no such section")
	case sdk.ResolveReferenceErrorTypeVariantTooManyVaults,
		sdk.ResolveReferenceErrorTypeVariantTooManyItems,
		sdk.ResolveReferenceErrorTypeVariantTooManyMatchingFields:
		return errors.New("the reference matches more than one vault, item or field; use ids instead of names")
	}
	return fmt.Errorf("the reference is refused (%s)", t)
}

// oneLine returns the first line of an error of the SDK; the rest is a trace of its
// core.
func oneLine(err error) error {
	line, _, _ := strings.Cut(strings.TrimSpace(err.Error()), "\n")
	return errors.New(line)
}
