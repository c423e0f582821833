package measure

import (
	"errors"
	"fmt"
	"math"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// USD is an amount of US dollars, in billionths.
type USD int64

// USDPattern is the regular expression of what ParseUSD reads.
const USDPattern = `^[0-9]{1,7}(\.[0-9]{1,3})? ?USD$`

var usdRE = lazyregexp.New(`^([0-9]{1,7})(?:\.([0-9]{1,3}))? ?USD$`)

// ParseUSD reads an amount such as 5 USD or 0.5USD.
func ParseUSD(s string) (USD, error) {
	part := usdRE.FindStringSubmatch(s)
	if part == nil {
		return 0, errors.New("must be an amount like 5 USD or 0.50 USD, below 10 million")
	}
	return USD(number(part[1])*1e9 + thousandths(part[2])*1e6), nil
}

// String returns the amount, rounded up. Small amounts have four decimal places.
func (n USD) String() string {
	digits := 2
	if n > 0 && n < 100_000_000 {
		digits = 4
	}
	unit := USD(math.Pow10(9 - digits))
	return fmt.Sprintf("%.*f USD", digits, float64((n+unit-1)/unit)/math.Pow10(digits))
}
