// Package guestproto defines the messages between the host and the guest program: one
// JSON value, or one per line, over the standard streams of an SSH command.
//
// It decodes them strictly and within limits. It never transports anything. Input
// from a guest is hostile: text is cut to a limit and stripped of control characters
// before it is shown.
package guestproto

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"time"
)

// Version is the version of the messages; a side that reads another version refuses
// it.
const Version = 1

// HostSocket is where the guest's sshd listens for the host, which answers there.
const HostSocket = "/run/agent/host.sock"

// Status is what the guest program knows about itself.
type Status struct {
	Version  int       `json:"version"`
	Program  string    `json:"program"` // version of the guest program
	Started  time.Time `json:"started"`
	Policy   Policy    `json:"policy"`
	Firewall Firewall  `json:"firewall"`
	DNS      DNS       `json:"dns"`
	Counters Counters  `json:"counters"`
}

// Policy says which policy is in force.
type Policy struct {
	Mode   string `json:"mode"` // "" until one was installed: nothing is allowed
	Names  int    `json:"names"`
	Digest string `json:"digest"` // SHA-256 of the compiled form, hexadecimal
}

// Firewall says whether the packet filter is in the intended state.
type Firewall struct {
	Loaded     bool   `json:"loaded"`
	IPv6       bool   `json:"ipv6"`       // the guest has a global IPv6 address, so IPv6 is not closed
	Reasserted int64  `json:"reasserted"` // how often another program's changes were undone
	Error      string `json:"error,omitempty"`
}

// DNS says whether names resolve.
type DNS struct {
	Listen   string   `json:"listen"`   // ADDRESS:PORT that serves the guest's programs, "" when none
	Upstream []string `json:"upstream"` // resolvers of the guest's network
	Error    string   `json:"error,omitempty"`
}

// Counters count since the guest program started.
type Counters struct {
	Allowed int64            `json:"allowed"`
	Denied  int64            `json:"denied"`
	Errors  int64            `json:"errors"`
	Dropped map[string]int64 `json:"dropped"` // packets by chain, since the rules were loaded
	LastSeq int64            `json:"last_seq"`
}

// Ready reports whether the guest firewall is active: rules loaded, names answered.
func (s Status) Ready() bool {
	return s.Firewall.Loaded && s.Firewall.Error == "" && s.DNS.Listen != "" && s.Policy.Mode != ""
}

// Query is one line of the query log: a name that was queried, and the result.
type Query struct {
	Seq     int64     `json:"seq"` // grows by one, also across restarts of the guest program
	Time    time.Time `json:"time"`
	Name    string    `json:"name"`
	Type    string    `json:"type"`
	Allowed bool      `json:"allowed"`
	Rule    string    `json:"rule,omitempty"`
	Source  string    `json:"source,omitempty"` // where the rule is written
	Reason  string    `json:"reason,omitempty"`
	Answer  []string  `json:"answer,omitempty"` // addresses, or the response code of a failure

	// Process is the name of the first program in the guest that queried a denied
	// name, if it was found. It is not trustworthy: a program chooses its own name,
	// and root in the guest can write anything to this log.
	Process string `json:"process,omitempty"`
}

// Secrets is the complete set of a session's secrets. It replaces the previous one.
// It prints and marshals as [redacted]; only Encode writes its content.
type Secrets struct {
	Env   map[string]string // by environment variable
	Token string            // the session's own token, "" for none
}

const redacted = "[redacted]"

// String hides the secrets.
func (Secrets) String() string { return redacted }

// GoString hides the secrets.
func (Secrets) GoString() string { return redacted }

// LogValue hides the secrets.
func (Secrets) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalJSON hides the secrets.
func (Secrets) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }

// secretsMessage is the transmitted form.
type secretsMessage struct {
	Version int               `json:"version"`
	Env     map[string]string `json:"env"`
	Token   string            `json:"token,omitempty"`
}

// Encode writes the set to the guest program's standard input.
func (s Secrets) Encode(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false) // a value may be full of characters that escaping turns into six bytes
	if err := e.Encode(secretsMessage{Version: Version, Env: s.Env, Token: s.Token}); err != nil {
		return fmt.Errorf("send secrets: %w", err)
	}
	return nil
}
