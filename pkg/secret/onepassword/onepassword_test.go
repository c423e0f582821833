package onepassword

import (
	"strings"
	"testing"

	sdk "github.com/1password/onepassword-sdk-go"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

var _ secret.Batch = Resolve

// Our own validation must not accept what the SDK rejects, because a session would
// then fail late. It may be stricter.
func TestOurValidationIsNoLaxer(t *testing.T) {
	for _, ref := range []string{
		"op://vault/item/field", "op://vault/item/section/field", "op://my vault/an item/a field", "op://v.1/i_2/f-3",
		"op://vault/item/one-time password?attribute=otp", "op://vault/item/key?ssh-format=openssh", "op://vault/item", "op://", "op://a/b/c/d/e",
	} {
		_, ours := secret.ParseRef("X", ref)
		theirs := sdk.Secrets.ValidateSecretReference(t.Context(), ref)
		if ours == nil && theirs != nil {
			t.Errorf("our validation of %s = nil, want an error as the SDK's: %v", ref, theirs)
		}
		if theirs == nil && ours != nil {
			t.Errorf("our validation of %s = %v, want nil as the SDK's", ref, ours)
		}
	}
}

func TestBadTokenIsOneLine(t *testing.T) {
	const token = "ops_SENTINELdGhpcyBpcyBub3QgYSB0b2tlbg"
	_, _, err := Resolve(t.Context(), token, "", []string{"op://v/i/f"})
	if err == nil || strings.Contains(err.Error(), "\n") || strings.Contains(err.Error(), token) {
		t.Errorf("Resolve with a bad token = %q, want one line without the token", err)
	}
}
