package guestproto

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// A guest prints these at the start of a line on a console that only it can write to.
const (
	// ReadyMarker says that sshd accepts logins. A space and sshd's public key in
	// authorized_keys form follow.
	ReadyMarker = "agent-sessionizer-ready"

	// AsleepMarker comes from a guest that is to be saved as a snapshot and forked.
	// It says that the guest has paused before it gets an identity of its own, and
	// waits for an Identity on its virtio console.
	AsleepMarker = "agent-sessionizer-asleep"
)

// MaxIdentity limits the length of an Identity's line, in bytes.
const MaxIdentity = 16 << 10

// Identity turns a guest that was forked from a snapshot into a machine of its own.
// It is sent as one line of JSON on the guest's virtio console, and nowhere else. It
// is never written to a disk of the host, because the host key is the private one. It
// prints as [redacted].
type Identity struct {
	Version       int       `json:"version"`
	Hostname      string    `json:"hostname"`
	MachineID     string    `json:"machine_id"`     // 32 hexadecimal digits, machine-id(5)
	BootID        string    `json:"boot_id"`        // a random UUID
	User          string    `json:"user"`           // the user who may log in
	AuthorizedKey string    `json:"authorized_key"` // the only key that may log in, also by certificates that it signs; authorized_keys form
	HostKey       string    `json:"host_key"`       // sshd's, ed25519, OpenSSH's private key format
	MAC           string    `json:"mac"`            // of the only network card
	Time          time.Time `json:"time"`           // when the line was sent
	Seed          []byte    `json:"seed"`           // randomness from the host, at least 32 bytes
}

// String hides the host key.
func (Identity) String() string { return redacted }

// GoString hides the host key.
func (Identity) GoString() string { return redacted }

// LogValue hides the host key.
func (Identity) LogValue() slog.Value { return slog.StringValue(redacted) }

// plainIdentity is an Identity that encoding/json may write.
type plainIdentity Identity

// MarshalJSON hides the host key; only Encode writes it.
func (Identity) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }

// Encode writes the line.
func (i Identity) Encode(w io.Writer) error {
	i.Version = Version
	if err := json.NewEncoder(w).Encode(plainIdentity(i)); err != nil {
		return fmt.Errorf("send the identity: %w", err)
	}
	return nil
}

// DecodeIdentity reads one line. Its errors quote nothing of it.
func DecodeIdentity(r io.Reader) (Identity, error) {
	i, err := decode[plainIdentity](r, MaxIdentity)
	switch {
	case err != nil:
		return Identity{}, fmt.Errorf("identity: must be a message of this version within the size limit")
	case i.Version != Version:
		return Identity{}, fmt.Errorf("identity: version must be %d, got %d", Version, i.Version)
	}
	if err := Identity(i).check(); err != nil {
		return Identity{}, fmt.Errorf("identity: %w", err)
	}
	return Identity(i), nil
}

var (
	hostLabel = lazyregexp.New(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$`)
	hex32     = lazyregexp.New(`^[0-9a-f]{32}$`)
	uuid      = lazyregexp.New(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	userName  = lazyregexp.New(`^[a-z_][a-z0-9_-]{0,31}$`)
)

// check verifies the form of every part. Its errors name only the part.
func (i Identity) check() error {
	mac, errMAC := net.ParseMAC(i.MAC)
	zero := strings.Repeat("0", 32)
	for part, ok := range map[string]bool{
		"hostname":       hostLabel.MatchString(i.Hostname),
		"machine_id":     hex32.MatchString(i.MachineID) && i.MachineID != zero,
		"boot_id":        uuid.MatchString(i.BootID) && strings.ReplaceAll(i.BootID, "-", "") != zero,
		"user":           userName.MatchString(i.User) && i.User != "root",
		"authorized_key": i.AuthorizedKey != "" && !strings.ContainsAny(strings.TrimSuffix(i.AuthorizedKey, "\n"), "\r\n\x00"),
		"host_key":       strings.HasPrefix(i.HostKey, "-----BEGIN OPENSSH PRIVATE KEY-----\n"),
		// An address of a single card; a multicast address belongs to no card.
		"mac":  errMAC == nil && len(mac) == 6 && mac[0]&1 == 0,
		"time": i.Time.Year() >= 2020 && i.Time.Year() < 2200,
		"seed": len(i.Seed) >= 32,
	} {
		if !ok {
			return fmt.Errorf("%s is missing or invalid", part)
		}
	}
	return nil
}
