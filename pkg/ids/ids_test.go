package ids

import "testing"

func TestIDs(t *testing.T) {
	if a, b := New(), New(); !Valid(a) || !Valid(b) || a == b {
		t.Errorf("New() twice = %q, %q, want 12 digits each, different", a, b)
	}
	if got := Hex(32); len(got) != 64 || !IsHex(got) {
		t.Errorf("Hex(32) = %q, want 64 hex digits", got)
	}
	for _, text := range []string{"", "0123456789a", "0123456789abc", "0123456789aB", "0123456789/b", "0123456789a\n"} {
		if Valid(text) {
			t.Errorf("Valid(%q), want invalid", text)
		}
	}
}
