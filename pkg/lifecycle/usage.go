package lifecycle

import (
	"fmt"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Usage is what requests to models used, as --json shows it.
type Usage struct {
	Requests int64   `json:"requests"`
	Tokens   int64   `json:"tokens"` // read and written
	USD      float64 `json:"usd"`    // at the prices of prices.yaml
}

// UsageOf returns a sum as --json shows it, or nil for none.
func UsageOf(sum store.UsageSum) *Usage {
	if sum.Requests == 0 {
		return nil
	}
	return &Usage{sum.Requests, sum.Tokens, float64(sum.Cost) / 1e9}
}

// Money returns the amount as people read it.
func (u *Usage) Money() string {
	if u == nil {
		return ""
	}
	return measure.USD(u.USD * 1e9).String()
}

// String returns money and tokens as people read them.
func (u *Usage) String() string {
	if u == nil {
		return ""
	}
	return fmt.Sprintf("%s, %s tokens", u.Money(), Tokens(u.Tokens))
}

// Tokens formats a number of tokens with three significant digits.
func Tokens(n int64) string {
	switch {
	case n >= 1e6:
		return fmt.Sprintf("%.3gM", float64(n)/1e6)
	case n >= 1e3:
		return fmt.Sprintf("%.3gk", float64(n)/1e3)
	}
	return fmt.Sprint(n)
}
