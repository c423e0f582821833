package meter

import (
	"fmt"
	"math"
	"path"
	"slices"
)

// Price is what the tokens of a model cost, in US dollars per million.
type Price struct {
	Model      string  `yaml:"model" json:"model"` // a pattern with *
	Input      float64 `yaml:"input" json:"input"`
	Output     float64 `yaml:"output" json:"output"`
	CacheRead  float64 `yaml:"cache_read,omitempty" json:"cache_read,omitempty"`   // 0: as Input
	CacheWrite float64 `yaml:"cache_write,omitempty" json:"cache_write,omitempty"` // 0: as Input
	// For an hour; 0: as CacheWrite.
	CacheWrite1h float64 `yaml:"cache_write_1h,omitempty" json:"cache_write_1h,omitempty"`
	Fast         float64 `yaml:"fast,omitempty" json:"fast,omitempty"` // factor for priority or speed; 0: the highest of all
	Long         Long    `yaml:"long,omitempty" json:"long,omitzero"`
}

// Long is the price of long input.
type Long struct {
	Above  int64   `yaml:"above" json:"above"`   // tokens of input, with those of the cache; 0: none
	Input  float64 `yaml:"input" json:"input"`   // factor, also for the cache
	Output float64 `yaml:"output" json:"output"` // factor
}

// Prices are the prices of models.
type Prices struct {
	Date     string  `yaml:"date" json:"date"`                             // when they were looked up
	Models   []Price `yaml:"models" json:"models"`                         // an earlier one takes precedence
	Search   float64 `yaml:"search,omitempty" json:"search,omitempty"`     // US dollars for a search of the web
	Regional float64 `yaml:"regional,omitempty" json:"regional,omitempty"` // factor for a region
}

// Limits of what a request can use if it does not say.
const (
	MaxInput  = 1_000_000 // tokens
	MaxOutput = 128_000   // tokens
)

// Over returns the prices p, completed by others.
func (p Prices) Over(others Prices) Prices {
	p.Models = slices.Concat(p.Models, others.Models)
	if p.Date == "" {
		p.Date = others.Date
	}
	if p.Search == 0 {
		p.Search = others.Search
	}
	if p.Regional == 0 {
		p.Regional = others.Regional
	}
	return p
}

// Validate checks the prices.
func (p Prices) Validate() error {
	for _, m := range p.Models {
		if _, err := path.Match(m.Model, ""); err != nil || m.Model == "" {
			return fmt.Errorf("model %q must be a name or a pattern with *", m.Model)
		}
		for _, n := range []float64{m.Input, m.Output, m.CacheRead, m.CacheWrite, m.CacheWrite1h, m.Fast, m.Long.Input, m.Long.Output} {
			if n < 0 || n > 1e6 || math.IsNaN(n) {
				return fmt.Errorf("model %s: a price must be 0 to 1,000,000 US dollars per million tokens, got %v", m.Model, n)
			}
		}
		if m.Long.Above < 0 || m.Long.Above > 0 && (m.Long.Input < 1 || m.Long.Output < 1) {
			return fmt.Errorf("model %s: long must have the factors input and output of at least 1", m.Model)
		}
	}
	if p.Search < 0 || p.Regional < 0 {
		return fmt.Errorf("search and regional must not be negative")
	}
	return nil
}

// Known reports whether there is a price of a model.
func (p Prices) Known(model string) bool {
	return slices.ContainsFunc(p.Models, func(m Price) bool { return matches(m.Model, model) })
}

func matches(pattern, model string) bool {
	ok, _ := path.Match(pattern, model)
	return ok
}

// of returns the price of a model. Each price of an unknown model is the highest of all.
func (p Prices) of(model string) Price {
	most := Price{Fast: 1}
	for _, m := range p.Models {
		m.CacheRead, m.CacheWrite = orElse(m.CacheRead, m.Input), orElse(m.CacheWrite, m.Input)
		m.CacheWrite1h = orElse(m.CacheWrite1h, m.CacheWrite)
		if matches(m.Model, model) {
			if m.Fast == 0 {
				m.Fast = most.Fast
				for _, other := range p.Models {
					m.Fast = max(m.Fast, other.Fast)
				}
			}
			return m
		}
		most.Input, most.Output = max(most.Input, m.Input), max(most.Output, m.Output)
		most.CacheRead, most.CacheWrite = max(most.CacheRead, m.CacheRead), max(most.CacheWrite, m.CacheWrite)
		most.CacheWrite1h, most.Fast = max(most.CacheWrite1h, m.CacheWrite1h), max(most.Fast, m.Fast)
		if m.Long.Above > 0 && (most.Long.Above == 0 || m.Long.Above < most.Long.Above) {
			most.Long.Above = m.Long.Above
		}
		most.Long.Input, most.Long.Output = max(most.Long.Input, m.Long.Input), max(most.Long.Output, m.Long.Output)
	}
	return most
}

func orElse(n, other float64) float64 {
	if n == 0 {
		return other
	}
	return n
}

// Cost returns what a use costs, in billionths of a US dollar, rounded up.
func (p Prices) Cost(u Usage) int64 {
	price, t := p.of(u.Model), u.Tokens
	input := float64(t.Input)*price.Input + float64(t.CacheRead)*price.CacheRead + float64(t.CacheWrite)*price.CacheWrite + float64(t.CacheWrite1)*price.CacheWrite1h
	output := float64(t.Output) * price.Output
	if price.Long.Above > 0 && t.Total()-t.Output > price.Long.Above {
		input, output = input*price.Long.Input, output*price.Long.Output
	}
	sum := input + output
	if u.Fast {
		sum *= price.Fast
	}
	if u.Regional && p.Regional > 0 {
		sum *= p.Regional
	}
	// Dollars per million tokens are thousands of billionths per token.
	return int64(math.Ceil(min(sum*1e3+float64(u.Searches)*p.Search*1e9, math.MaxInt64/4)))
}

// Bound returns a bound of what a request with a body of some bytes uses; -1 stands for an unknown
// length. A token has at least one byte.
func (p Prices) Bound(r Request, bytes int64) Usage {
	u := Usage{Model: r.Model, Fast: r.Fast, Tokens: Tokens{Input: bytes, Output: r.Output}}
	if r.Elsewhere || bytes < 0 {
		u.Tokens.Input = max(bytes, MaxInput)
	}
	u.Tokens.Input = min(u.Tokens.Input, MaxInput)
	if r.Output == 0 {
		u.Tokens.Output = MaxOutput
	}
	// Input that is written to the cache costs most.
	u.Tokens.CacheWrite1, u.Tokens.Input = u.Tokens.Input, 0
	return u
}
