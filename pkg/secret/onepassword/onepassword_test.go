package onepassword

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"strings"
	"testing"

	sdk "github.com/1password/onepassword-sdk-go"
	"github.com/klauspost/compress/zstd"

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

// The SDK in third_party embeds its core compressed. It must be the published one.
func TestCoreIsUnchanged(t *testing.T) {
	compressed, err := os.Open("../../../third_party/onepassword-sdk-go/internal/wasm/core.wasm.zst")
	if err != nil {
		t.Fatal(err)
	}
	defer compressed.Close()
	d, err := zstd.NewReader(compressed)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	h := sha256.New()
	if _, err := io.Copy(h, d); err != nil {
		t.Fatal(err)
	}
	const want = "23d115f4ac7519b48172df3e8615945572dbda7033d51b44c9490fd533ae0f23" // of version 0.4.1
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		t.Errorf("digest of the core = %s, want %s", got, want)
	}
}
