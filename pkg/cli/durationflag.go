package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

const day = ageFlag(24 * time.Hour)

// ageFlag is a flag value: a duration that can be given in days.
type ageFlag time.Duration

func (d *ageFlag) Set(text string) error {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		*d = ageFlag(n) * day
		if err == nil {
			return nil
		}
	}
	n, err := time.ParseDuration(text)
	if err != nil || n < 0 {
		return fmt.Errorf("must be a duration such as 30d or 12h, got %q", text)
	}
	*d = ageFlag(n)
	return nil
}

func (d *ageFlag) String() string {
	if *d%day == 0 {
		return fmt.Sprintf("%dd", *d/day)
	}
	return time.Duration(*d).String()
}

func (*ageFlag) Type() string { return "time" }
