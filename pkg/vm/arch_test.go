package vm

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestParseArch(t *testing.T) {
	for name, want := range map[string]string{"x86_64": X8664, "amd64": X8664, "aarch64": AArch64, "arm64": AArch64} {
		if got, err := ParseArch(name); err != nil || got != want {
			t.Errorf("ParseArch(%q) = %q, %v, want %q", name, got, err, want)
		}
	}
	for _, name := range []string{"", "arm", "riscv64", "AMD64"} {
		if got, err := ParseArch(name); fail.CodeOf(err) != fail.Usage {
			t.Errorf("ParseArch(%q) = %q, %v, want code %v", name, got, err, fail.Usage)
		}
	}
}
