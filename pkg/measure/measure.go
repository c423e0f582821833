// Package measure has sizes and durations as people write them in manifests, settings and
// flags.
package measure

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// Size is a number of bytes, written as 512MiB or 8G: K, M, G and T are powers of 1024,
// with or without i and B.
type Size int64

const (
	gib     Size = 1 << 30
	tib     Size = 1 << 40
	maxSize      = 1024 * tib
)

// SizePattern is the regular expression of what ParseSize reads.
const SizePattern = `^[0-9]{1,16}(\.[0-9]{1,3})?([KMGTkmgt](i?[Bb])?|[Bb])$`

var sizeRE = lazyregexp.New(`^([0-9]{1,16})(?:\.([0-9]{1,3}))?(?:([KMGTkmgt])(?:i?[Bb])?|[Bb])$`)

var sizeUnits = map[string]Size{"": 1, "K": 1 << 10, "M": 1 << 20, "G": gib, "T": tib}

// ParseSize reads a size. A unit is required, because a bare number is more often a
// mistake than a number of bytes.
func ParseSize(s string) (Size, error) {
	part := sizeRE.FindStringSubmatch(s)
	if part == nil {
		return 0, errors.New("must be a size like 512MiB or 8G")
	}
	n, unit := Size(number(part[1])), sizeUnits[strings.ToUpper(part[3])]
	if n > maxSize/unit {
		return 0, errors.New("must be a size of at most 1024T")
	}
	return n*unit + Size(thousandths(part[2]))*unit/1000, nil
}

// number converts digits. Callers never pass so many that they do not fit.
func number(digits string) int64 {
	n, _ := strconv.ParseInt(digits, 10, 64)
	return n
}

// thousandths converts up to three digits after a decimal point.
func thousandths(digits string) int64 { return number((digits + "000")[:3]) }

// String returns the size in the largest exact unit. ParseSize reads the result back as
// the same number.
func (s Size) String() string {
	for _, unit := range []string{"T", "G", "M", "K"} {
		if size := sizeUnits[unit]; s != 0 && s%size == 0 {
			return fmt.Sprintf("%d%siB", s/size, unit)
		}
	}
	return fmt.Sprintf("%dB", int64(s))
}

// Human returns the size with four significant digits.
func (s Size) Human() string {
	n, unit := float64(s), 0
	for n >= 1024 && unit < 4 {
		n, unit = n/1024, unit+1
	}
	return fmt.Sprintf("%.4g%s", n, []string{"B", "KiB", "MiB", "GiB", "TiB"}[unit])
}

// MarshalText implements encoding.TextMarshaler.
func (s Size) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Size) UnmarshalText(text []byte) (err error) {
	*s, err = ParseSize(string(text))
	return err
}

// Duration is a length of time written as 90s, 30m, 24h, 1.5h or 2d12h. It is a whole
// number of milliseconds.
type Duration time.Duration

const (
	maxDuration = 10_000 * 24 * time.Hour

	// DurationPattern is the regular expression of what ParseDuration reads.
	DurationPattern = `^([0-9]{1,9}(\.[0-9]{1,3})?(d|h|ms|m|s)){1,5}$`
)

var (
	durationRE     = lazyregexp.New(DurationPattern)
	durationPartRE = lazyregexp.New(`([0-9]+)(?:\.([0-9]+))?(d|h|ms|m|s)`)
)

var durationUnits = map[string]time.Duration{
	"d": 24 * time.Hour, "h": time.Hour, "m": time.Minute, "s": time.Second, "ms": time.Millisecond,
}

// ParseDuration reads a duration. A unit is required.
func ParseDuration(s string) (Duration, error) {
	if !durationRE.MatchString(s) {
		return 0, errors.New("must be a duration like 90s, 30m, 24h or 2d")
	}
	var sum time.Duration
	for _, part := range durationPartRE.FindAllStringSubmatch(s, -1) {
		n, unit := time.Duration(number(part[1])), durationUnits[part[3]]
		if n > maxDuration/unit {
			sum = maxDuration + 1
			break
		}
		sum += n*unit + time.Duration(thousandths(part[2]))*(unit/1000)
	}
	switch {
	case sum > maxDuration:
		return 0, errors.New("must be a duration of at most 10000d")
	case sum%time.Millisecond != 0:
		return 0, errors.New("must be a whole number of milliseconds")
	}
	return Duration(sum), nil
}

// String returns the duration with all units that are not zero; days only for whole days.
// ParseDuration reads the result back as the same duration.
func (d Duration) String() string {
	rest := time.Duration(d)
	if day := durationUnits["d"]; rest%day == 0 && rest != 0 {
		return fmt.Sprintf("%dd", rest/day)
	}
	if rest == 0 {
		return "0s"
	}
	var b strings.Builder
	for _, name := range []string{"h", "m", "s", "ms"} {
		if n := rest / durationUnits[name]; n != 0 {
			fmt.Fprintf(&b, "%d%s", n, name)
			rest -= n * durationUnits[name]
		}
	}
	return b.String()
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error { return d.Set(string(text)) }

// Set implements pflag.Value.
func (d *Duration) Set(text string) error {
	v, err := ParseDuration(text)
	if err == nil {
		*d = v
	}
	return err
}

// Type implements pflag.Value.
func (*Duration) Type() string { return "time" }
