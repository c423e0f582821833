package config

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/meter"
)

// Budget limits what sessions use of models. Zero fields are inherited.
type Budget struct {
	Session Amount `yaml:"session,omitempty" json:"session,omitempty"` // of each session
	Day     Amount `yaml:"day,omitempty" json:"day,omitempty"`         // of all sessions, since midnight
	Tokens  Tokens `yaml:"tokens,omitempty" json:"tokens,omitempty"`   // of each session
}

// Unlimited is a limit that does not restrict, instead of an inherited one.
const Unlimited = -1

// Limited reports whether there is any limit.
func (b Budget) Limited() bool { return b.Session > 0 || b.Day > 0 || b.Tokens > 0 }

// Over returns b with its zero fields taken from base.
func (b Budget) Over(base Budget) Budget {
	return Budget{cmp.Or(b.Session, base.Session), cmp.Or(b.Day, base.Day), cmp.Or(b.Tokens, base.Tokens)}
}

// Within returns b, with the lower limit of both where other has one.
func (b Budget) Within(other Budget) Budget {
	return Budget{lower(b.Session, other.Session), lower(b.Day, other.Day), lower(b.Tokens, other.Tokens)}
}

func lower[N Amount | Tokens](a, b N) N {
	if a <= 0 || b > 0 && b < a {
		return max(b, 0)
	}
	return a
}

// Amount is an amount of money in billionths of a US dollar, or Unlimited.
type Amount int64

const noLimit = "none"

// Set parses an amount such as 5 USD, or none.
func (a *Amount) Set(text string) error {
	if text == noLimit {
		*a = Unlimited
		return nil
	}
	n, err := measure.ParseUSD(text)
	if err == nil && n == 0 {
		err = errors.New("must be more than 0 USD; none means no limit")
	}
	if err != nil {
		return fmt.Errorf("%w, got %q", err, text)
	}
	*a = Amount(n)
	return nil
}

// String formats the amount as Set reads it.
func (a Amount) String() string {
	if a < 0 {
		return noLimit
	}
	return measure.USD(a).String()
}

// MarshalText implements encoding.TextMarshaler.
func (a Amount) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (a *Amount) UnmarshalText(text []byte) error { return a.Set(string(text)) }

// Tokens is a number of tokens, or Unlimited.
type Tokens int64

var tokensRE = lazyregexp.New(`^([0-9]{1,9})([kM]?)$`)

// Set parses a number such as 200000, 200k or 2M, or none.
func (t *Tokens) Set(text string) error {
	if text == noLimit {
		*t = Unlimited
		return nil
	}
	part := tokensRE.FindStringSubmatch(text)
	if part == nil {
		return fmt.Errorf("must be a number like 200k or 2M, got %q", text)
	}
	n, err := strconv.ParseInt(part[1], 10, 64)
	if err != nil || n == 0 {
		return fmt.Errorf("must be more than 0; none means no limit, got %q", text)
	}
	*t = Tokens(n * map[string]int64{"": 1, "k": 1e3, "M": 1e6}[part[2]])
	return nil
}

// String formats the number as Set reads it.
func (t Tokens) String() string {
	switch {
	case t < 0:
		return noLimit
	case t > 0 && t%1e6 == 0:
		return fmt.Sprintf("%dM", t/1e6)
	case t > 0 && t%1e3 == 0:
		return fmt.Sprintf("%dk", t/1e3)
	}
	return strconv.FormatInt(int64(t), 10)
}

// MarshalText implements encoding.TextMarshaler.
func (t Tokens) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (t *Tokens) UnmarshalText(text []byte) error { return t.Set(string(text)) }

// loadPrices reads the prices of models. The entries of a later file take precedence.
func (c *Config) loadPrices(file string, text []byte) error {
	var p meter.Prices
	if err := c.decode(file, text, &p); err != nil {
		return err
	}
	if err := p.Validate(); err != nil {
		return fail.New(fail.Usage, "%s: %w", file, err)
	}
	c.Prices = p.Over(c.Prices)
	c.listed[filepath.Base(file)] = Origin{Layer: c.layerOf(file), File: file}
	return nil
}
