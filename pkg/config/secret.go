package config

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// Limits of one secret.
const (
	maxHosts = 64
	maxLike  = 64
)

// Secret is a reference to a secret, and where its value may go.
type Secret struct {
	From    string `yaml:"from" json:"from"` // a reference, never a value
	Binding `yaml:",inline"`
}

// Set reads the short form, which is the reference alone.
func (s *Secret) Set(text string) error {
	s.From = text
	return nil
}

// String returns the secret as a file has it.
func (s Secret) String() string {
	if len(s.To) == 0 && !s.Guest {
		return s.From
	}
	text, _ := json.Marshal(s) // has no value that cannot be encoded
	return string(text)
}

// UnmarshalJSON reads both forms.
func (s *Secret) UnmarshalJSON(text []byte) error {
	if err := json.Unmarshal(text, &s.From); err == nil {
		return nil
	}
	type long Secret
	return json.Unmarshal(text, (*long)(s))
}

// Binding says where the value of a secret may go. Without Guest the guest has a placeholder
// instead, and the gateway puts the value into requests to the hosts of To.
type Binding struct {
	To    []Host `yaml:"to,omitempty" json:"to,omitempty"`
	Body  bool   `yaml:"body,omitempty" json:"body,omitempty"`   // also in the bodies of requests
	Guest bool   `yaml:"guest,omitempty" json:"guest,omitempty"` // the value is in the guest
	Like  string `yaml:"like,omitempty" json:"like,omitempty"`   // what placeholders begin with, for clients that check it
	// Names of sets of request rules, which limit what the secret can be used for.
	Rules []string `yaml:"rules,omitempty" json:"rules,omitempty"`
}

// String returns the binding for people.
func (b Binding) String() string {
	if b.Guest {
		return "in the guest"
	}
	hosts := make([]string, len(b.To))
	for i, h := range b.To {
		hosts[i] = string(h)
	}
	text := "to " + strings.Join(hosts, ", ")
	if b.Body {
		text += ", also in bodies"
	}
	if len(b.Rules) > 0 {
		text += ", with the rules " + strings.Join(b.Rules, ", ")
	}
	return text
}

// Bound returns s with its own binding or, if it has none, with the one that is configured for
// its name.
func (c *Config) Bound(name string, s Secret) (Secret, error) {
	own := len(s.To) > 0 || s.Guest
	if b, ok := c.bindings[name]; ok && !own {
		s.Binding = b
	} else if s.Like == "" {
		s.Like = b.Like
	}
	switch {
	case len(s.To) > 0 && s.Guest:
		return s, fail.New(fail.Usage, "secret %s has both to and guest: its value is either in the guest or only sent to hosts", name)
	case len(s.To) == 0 && !s.Guest:
		return s, fail.New(fail.Usage, "secret %s does not say where its value may go; write %s: {from: %s, to: [HOST]}, or to put it into the guest %s: {from: %s, guest: true}",
			name, name, kindOf(s.From), name, kindOf(s.From)).WithHint("agent-sessionizer config edit config.yaml")
	case s.Body && s.Guest:
		return s, fail.New(fail.Usage, "secret %s has both body and guest: only a value that is sent to hosts is put into bodies", name)
	case len(s.To) > maxHosts:
		return s, fail.New(fail.Usage, "secret %s may be sent to %d hosts, the limit is %d", name, len(s.To), maxHosts)
	case len(s.Like) > maxLike || strings.ContainsFunc(s.Like, func(r rune) bool { return r <= ' ' || r > '~' }):
		return s, fail.New(fail.Usage, "secret %s: like must have at most %d printable ASCII characters without spaces", name, maxLike)
	}
	s.To = slices.Clone(s.To)
	for i := range s.To { // what did not come from a file is not checked yet
		if err := s.To[i].Set(string(s.To[i])); err != nil {
			return s, fail.New(fail.Usage, "secret %s: to: %w", name, err)
		}
	}
	return s, nil
}

// kindOf returns a reference without what follows its kind: a value that was pasted in the
// place of a reference must not get into an error.
func kindOf(reference string) string {
	kind, _, ok := strings.Cut(reference, ":")
	if !ok || !slices.Contains([]string{"op", "env", "file", "cmd"}, kind) {
		return "REFERENCE"
	}
	return kind + ":…"
}

// Host is a name that a secret may be sent to, or *.ZONE for every name below a zone.
type Host string

// Set parses a name.
func (h *Host) Set(text string) error {
	name, err := policy.ParsePattern(text)
	if err != nil {
		return fmt.Errorf("must be the name of a host, like api.example.org or *.example.org, got %q", text)
	}
	*h = Host(name)
	return nil
}
