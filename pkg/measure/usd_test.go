package measure_test

import (
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
)

func TestUSD(t *testing.T) {
	for n, want := range map[measure.USD]string{0: "0.00 USD", 1: "0.0001 USD", 5_000_000: "0.0050 USD", 99_999_999: "0.1000 USD", 100_000_000: "0.10 USD", 1_001_000_000: "1.01 USD", 5_000_000_000: "5.00 USD"} {
		if got := n.String(); got != want {
			t.Errorf("String of %d = %q, want %q", int64(n), got, want)
		}
	}
	for text, want := range map[string]measure.USD{"5 USD": 5e9, "5USD": 5e9, "0.5 USD": 5e8, "0.125 USD": 125e6, "9999999.999 USD": 9999999_999_000_000, "0 USD": 0} {
		if got, err := measure.ParseUSD(text); err != nil || got != want {
			t.Errorf("ParseUSD(%q) = %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "5", "$5", "5 EUR", "-5 USD", "5.0001 USD", "12345678 USD", "5  USD", "5 USD\n"} {
		if got, err := measure.ParseUSD(text); err == nil {
			t.Errorf("ParseUSD(%q) = %d, want an error", text, got)
		}
	}
}
