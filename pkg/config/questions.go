package config

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
)

// Questions are the rules by which an agent's requests for permission are answered without a
// person. Zero fields are inherited.
type Questions struct {
	Allow     AllowRule `yaml:"allow,omitempty" json:"allow,omitempty"`           // what is allowed without asking
	DenyAfter Patience  `yaml:"deny_after,omitempty" json:"deny_after,omitempty"` // how long a permission or a plan waits
}

func (q Questions) over(base Questions) Questions {
	return Questions{cmp.Or(q.Allow, base.Allow), cmp.Or(q.DenyAfter, base.DenyAfter)}
}

// AllowRule names the tools that are allowed without asking.
type AllowRule string

// The rules.
const (
	AllowNone     AllowRule = noLimit
	AllowReadOnly AllowRule = "read-only" // tools that change nothing
)

// readOnlyTools lists the tools of Claude Code that change nothing and run no program.
var readOnlyTools = []string{"Glob", "Grep", "LS", "NotebookRead", "Read"}

// Set parses a rule.
func (r *AllowRule) Set(text string) error {
	*r = AllowRule(text)
	if *r != AllowNone && *r != AllowReadOnly {
		return fmt.Errorf("must be none or read-only, got %q", text)
	}
	return nil
}

// Allows reports whether a tool is allowed without asking.
func (r AllowRule) Allows(tool string) bool {
	return r == AllowReadOnly && slices.Contains(readOnlyTools, tool)
}

// Patience is how long a question waits, or Unlimited.
type Patience time.Duration

// Set parses a duration such as 10m, or none.
func (p *Patience) Set(text string) error {
	if text == noLimit {
		*p = Unlimited
		return nil
	}
	d, err := measure.ParseDuration(text)
	if err == nil && d <= 0 {
		err = errors.New("must be more than 0; none means no limit")
	}
	if err != nil {
		return fmt.Errorf("%w, got %q", err, text)
	}
	*p = Patience(d)
	return nil
}

// String formats the duration as Set reads it.
func (p Patience) String() string {
	if p < 0 {
		return noLimit
	}
	return measure.Duration(p).String()
}

// MarshalText implements encoding.TextMarshaler.
func (p Patience) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Patience) UnmarshalText(text []byte) error { return p.Set(string(text)) }
