package fail_test

import (
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestCodeAndHint(t *testing.T) {
	inner := fail.New(fail.Host, "no QEMU: %w", io.EOF).WithHint("apt install %s", "qemu")
	outer := fail.New(fail.Conflict, "start: %w", inner)
	for _, c := range []struct {
		name string
		err  error
		code fail.Code
		hint string
	}{
		{"nil", nil, fail.Failure, ""},
		{"foreign", io.EOF, fail.Failure, ""},
		{"plain", inner, fail.Host, "apt install qemu"},
		{"wrapped", fmt.Errorf("open: %w", inner), fail.Host, "apt install qemu"},
		{"outermost code, innermost hint", outer, fail.Conflict, "apt install qemu"},
		{"outermost hint", fail.New(fail.Usage, "x: %w", inner).WithHint("outer"), fail.Usage, "outer"},
		{"joined", errors.Join(io.EOF, inner), fail.Host, "apt install qemu"},
		{"joined, the first without a hint", errors.Join(fail.New(fail.Secret, "s"), inner), fail.Secret, "apt install qemu"},
		{"two %w", fmt.Errorf("%w and %w", io.EOF, outer), fail.Conflict, "apt install qemu"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := fail.CodeOf(c.err); got != c.code {
				t.Errorf("CodeOf(%v) = %v, want %v", c.err, got, c.code)
			}
			if got := fail.HintOf(c.err); got != c.hint {
				t.Errorf("HintOf(%v) = %q, want %q", c.err, got, c.hint)
			}
		})
	}
	if want := "start: no QEMU: EOF"; !errors.Is(outer, io.EOF) || outer.Error() != want {
		t.Errorf("error %q, wraps io.EOF: %t, want %q, true", outer, errors.Is(outer, io.EOF), want)
	}
}

// TestCodesAreStable pins the names and numbers, which are the product's interface: none
// may change, and no two codes may share one.
func TestCodesAreStable(t *testing.T) {
	for code, name := range map[fail.Code]string{
		1: "FAILURE", 2: "USAGE", 3: "NOT_FOUND", 4: "CONFLICT", 5: "HOST", 6: "SECRET",
		7: "POLICY", 8: "PRESERVED", 124: "TIMEOUT", 130: "INTERRUPTED",
	} {
		if got := code.String(); got != name {
			t.Errorf("Code(%d).String() = %q, want %q", int(code), got, name)
		}
		if got := fail.ParseCode(name); got != code {
			t.Errorf("ParseCode(%q) = %d, want %d", name, int(got), int(code))
		}
	}
	for _, unknown := range []string{"", "host", "HOST ", "NEW_ONE"} {
		if got := fail.ParseCode(unknown); got != fail.Failure {
			t.Errorf("ParseCode(%q) = %v, want %v", unknown, got, fail.Failure)
		}
	}
	if got := fail.Code(77).String(); got != "FAILURE" {
		t.Errorf("Code(77).String() = %q, want %q", got, "FAILURE")
	}
}
