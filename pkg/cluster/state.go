package cluster

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"filippo.io/age"
	"github.com/nats-io/nkeys"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// State is what a host keeps of its cluster, in one file that only its user can read.
type State struct {
	Cluster     string   `json:"cluster"`
	Name        string   `json:"name"` // of this host
	Role        Role     `json:"role"`
	Certificate string   `json:"certificate"`       // PEM
	Authority   string   `json:"authority"`         // PEM
	Signing     string   `json:"signing,omitempty"` // PEM, of a core: the authority with its private key
	Addrs       []string `json:"addrs"`             // of the cores
	Listen      string   `json:"listen,omitempty"`  // of a core, for hosts
	Route       string   `json:"route,omitempty"`   // of a core, for other cores
	Witness     string   `json:"witness,omitempty"` // of a core with a witness: its route
	Retired     bool     `json:"retired,omitempty"` // the witness has ended, and may still have a vote

	External *External `json:"external,omitempty"` // of a core: the NATS cluster that holds the streams, if not the cores

	Nkey string `json:"nkey"` // private keys
	TLS  string `json:"tls"`
	Age  string `json:"age"`
}

const stateFile = "host.json"

// LoadState reads the state in a directory. The error is ErrNone, wrapped, if the host belongs to no
// cluster.
func LoadState(dir string) (s State, err error) {
	text, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, fmt.Errorf("the cluster of this host: %w", ErrNone)
	}
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return s, fail.New(fail.Host, "read the cluster of this host: %w", err)
	}
	return s, nil
}

// Save writes the state into a directory.
func (s State) Save(dir string) error {
	text, err := json.Marshal(s)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		err = atomicfile.Write(filepath.Join(dir, stateFile), text, 0o600)
	}
	if err != nil {
		return fail.New(fail.Host, "write the cluster of this host: %w", err)
	}
	return nil
}

// SetExternal makes a core use changed settings of the NATS cluster that holds the streams; without any, it
// uses those that it has.
func (s *State) SetExternal(dir string, x *External) error {
	if !s.Role.Allows(CoreOf) || x == nil {
		return nil
	}
	if s.External == nil {
		return fail.New(fail.Conflict, "the cores of this cluster hold its streams, but cluster.url is set").WithHint("agent-sessionizer config edit config.yaml")
	}
	if *s.External == *x {
		return nil
	}
	if err := x.Check(); err != nil {
		return err
	}
	s.External = x
	return s.Save(dir)
}

// setKeys puts private keys into the state.
func (s *State) setKeys(k *Keys) error {
	seed, err := k.nkey.Seed()
	if err != nil {
		return err
	}
	key, err := x509.MarshalECPrivateKey(k.tls)
	if err != nil {
		return err
	}
	s.Nkey, s.Age = string(seed), k.age.String()
	s.TLS = string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: key}))
	return nil
}

// Keys returns the private keys in the state.
func (s State) Keys() (*Keys, error) {
	k := &Keys{}
	var err error
	if k.nkey, err = nkeys.FromSeed([]byte(s.Nkey)); err != nil {
		return nil, fail.New(fail.Host, "read the keys of this host: its nkey is damaged")
	}
	block, _ := pem.Decode([]byte(s.TLS))
	if block == nil {
		return nil, fail.New(fail.Host, "read the keys of this host: its key for TLS is damaged")
	}
	if k.tls, err = x509.ParseECPrivateKey(block.Bytes); err != nil {
		return nil, fail.New(fail.Host, "read the keys of this host: its key for TLS is damaged")
	}
	if k.age, err = age.ParseX25519Identity(s.Age); err != nil {
		return nil, fail.New(fail.Host, "read the keys of this host: its age identity is damaged")
	}
	return k, nil
}

// authority returns the cluster's authority, with its private key on a core.
func (s State) authority() (*Authority, error) {
	if s.Signing != "" {
		return DecodeAuthority([]byte(s.Signing))
	}
	return ReadAuthority([]byte(s.Authority))
}

const membersFile = "members.json"

// loadMembers reads the members that this core knew last.
func loadMembers(dir string) (all []Membership, err error) {
	text, err := os.ReadFile(filepath.Join(dir, membersFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		return nil, fail.New(fail.Host, "read the members of the cluster: %w", err)
	}
	return all, nil
}

func saveMembers(dir string, all []Membership) error {
	text, err := json.Marshal(all)
	if err == nil {
		err = atomicfile.Write(filepath.Join(dir, membersFile), text, 0o600)
	}
	if err != nil {
		return fail.New(fail.Host, "write the members of the cluster: %w", err)
	}
	return nil
}
