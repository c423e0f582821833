package config

import (
	"cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Lifetime limits how long a session runs, and how long it stays after it was stopped. Zero
// fields are inherited.
type Lifetime struct {
	Lease      TTL        `yaml:"lease,omitempty" json:"lease,omitempty"`             // running time after which it is stopped, unless it is renewed
	IdleTTL    TTL        `yaml:"idle_ttl,omitempty" json:"idle_ttl,omitempty"`       // running time without use after which it is stopped
	Idle       IdleAction `yaml:"idle,omitempty" json:"idle,omitempty"`               // what happens when idle_ttl is reached
	CleanupTTL TTL        `yaml:"cleanup_ttl,omitempty" json:"cleanup_ttl,omitempty"` // time after a stop after which it is destroyed if nothing would be lost
}

func (l Lifetime) over(base Lifetime) Lifetime {
	return Lifetime{cmp.Or(l.Lease, base.Lease), cmp.Or(l.IdleTTL, base.IdleTTL), cmp.Or(l.Idle, base.Idle), cmp.Or(l.CleanupTTL, base.CleanupTTL)}
}

// IdleAction is what happens to a session that is not used.
type IdleAction string

// The values of IdleAction.
const (
	IdleStop    IdleAction = "stop"
	IdleSuspend IdleAction = "suspend" // to the disk, with its memory
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (a *IdleAction) UnmarshalText(text []byte) error {
	switch *a = IdleAction(text); *a {
	case IdleStop, IdleSuspend:
		return nil
	}
	return fail.New(fail.Usage, "must be %s or %s, got %q", IdleStop, IdleSuspend, text)
}

// TTL is a duration, or Unlimited.
type TTL Patience

// Set parses a duration such as 3h; none and 0 mean no limit.
func (t *TTL) Set(text string) error {
	if text == "0" {
		text = noLimit
	}
	return (*Patience)(t).Set(text)
}

// String formats the duration as Set reads it.
func (t TTL) String() string {
	if t == 0 {
		return noLimit
	}
	return Patience(t).String()
}

// MarshalText implements encoding.TextMarshaler.
func (t TTL) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (t *TTL) UnmarshalText(text []byte) error { return t.Set(string(text)) }
