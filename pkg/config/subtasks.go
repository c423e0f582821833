package config

import (
	"cmp"
	"fmt"
	"strconv"
)

// Subtasks limits the tasks that a session or a task may submit from its guest. Zero fields are
// inherited.
type Subtasks struct {
	Count   Quota `yaml:"count,omitempty" json:"count,omitempty"`     // all subtasks of one tree that are ever submitted
	Depth   Quota `yaml:"depth,omitempty" json:"depth,omitempty"`     // levels of subtasks
	Running Quota `yaml:"running,omitempty" json:"running,omitempty"` // subtasks of one parent that run at the same time
}

func (s Subtasks) over(base Subtasks) Subtasks {
	return Subtasks{cmp.Or(s.Count, base.Count), cmp.Or(s.Depth, base.Depth), cmp.Or(s.Running, base.Running)}
}

// Allowed reports whether there can be any subtask.
func (s Subtasks) Allowed() bool { return s.Count > 0 && s.Depth > 0 && s.Running > 0 }

// MaxQuota is the highest Quota.
const MaxQuota = 1000

// Quota is a number that may be 0. The zero value is inherited, so 0 is stored as -1.
type Quota int

// Set parses a number.
func (q *Quota) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > MaxQuota {
		return fmt.Errorf("must be a number from 0 to %d, got %q", MaxQuota, text)
	}
	if *q = Quota(n); n == 0 {
		*q = -1
	}
	return nil
}

// Number returns the number.
func (q Quota) Number() int { return max(int(q), 0) }

// String formats the number as Set reads it.
func (q Quota) String() string { return strconv.Itoa(q.Number()) }

// MarshalText implements encoding.TextMarshaler.
func (q Quota) MarshalText() ([]byte, error) { return []byte(q.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (q *Quota) UnmarshalText(text []byte) error { return q.Set(string(text)) }
