package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

const day = age(24 * time.Hour)

// age is a flag value: a duration that can be given in days.
type age time.Duration

func (d *age) Set(text string) error {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		*d = age(n) * day
		if err == nil {
			return nil
		}
	}
	n, err := time.ParseDuration(text)
	if err != nil || n < 0 {
		return fmt.Errorf("must be a duration such as 30d or 12h, got %q", text)
	}
	*d = age(n)
	return nil
}

func (d *age) String() string {
	if *d%day == 0 {
		return fmt.Sprintf("%dd", *d/day)
	}
	return time.Duration(*d).String()
}

func (*age) Type() string { return "time" }
