package secret_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// BenchmarkMask measures random bytes, and text that looks like secrets in hexadecimal.
func BenchmarkMask(b *testing.B) {
	random := make([]byte, 32<<10)
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // not a secret
	for i := range random {
		random[i] = byte(r.Uint32())
	}
	for name, text := range map[string][]byte{"random": random, "hex": bytes.Repeat([]byte("0123456789abcdef"), 2<<10)} {
		b.Run(name, func(b *testing.B) {
			r := secret.NewRedactor()
			r.Add(secret.NewValue("the-value-of-the-secret-0123456789"))
			w := r.Mask(io.Discard)
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				if _, err := w.Write(text); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
