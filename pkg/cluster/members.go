package cluster

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Membership is a host that belongs, or belonged, to the cluster. A name is never used again.
type Membership struct {
	Name        string    `json:"name"`
	Role        Role      `json:"role"`
	Nkey        string    `json:"nkey"`            // public
	Certificate string    `json:"certificate"`     // PEM
	Addr        string    `json:"addr,omitempty"`  // of a core, for hosts
	Route       string    `json:"route,omitempty"` // of a core, for other cores
	Joined      time.Time `json:"joined"`
	Removed     time.Time `json:"removed,omitzero"`
	Drained     bool      `json:"drained,omitempty"` // it takes no more tasks
	Version     uint64    `json:"version"`           // grows with each change
	Seq         uint64    `json:"-"`
}

// vouched is a membership or an invitation with the signature of the cluster's authority. NATS lets each host
// choose where answers to it go, so every host can put messages into every stream; only a core can sign.
type vouched struct {
	Text      []byte `json:"text"`
	Signature []byte `json:"signature"` // ECDSA in ASN.1, of the SHA-256 of a domain and Text
}

// The domains keep signatures apart from others by the same key.
const (
	memberDomain     = "agent-sessionizer member\x00"
	invitationDomain = "agent-sessionizer invitation\x00"
)

// vouch signs a membership or an invitation.
func (a *Authority) vouch(domain string, is any) (v vouched, err error) {
	if a.key == nil {
		return v, fail.New(fail.Policy, "only a core can change the members of the cluster").WithHint("agent-sessionizer cluster list # then run it on a core")
	}
	if v.Text, err = json.Marshal(is); err != nil {
		return v, err
	}
	sum := sha256.Sum256([]byte(domain + string(v.Text)))
	v.Signature, err = ecdsa.SignASN1(rand.Reader, a.key, sum[:])
	return v, err
}

// read decodes what the authority signed. If it did not, the error is ErrDamaged, wrapped.
func (a *Authority) read(domain string, v vouched, is any) error {
	key, ok := a.cert.PublicKey.(*ecdsa.PublicKey)
	sum := sha256.Sum256([]byte(domain + string(v.Text)))
	if !ok || !ecdsa.VerifyASN1(key, sum[:], v.Signature) {
		return fmt.Errorf("the cluster's authority did not sign it: %w", ErrDamaged)
	}
	if err := json.Unmarshal(v.Text, is); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// Invitation is a token that admits one host.
type Invitation struct {
	Nkey    string    `json:"nkey"` // public half of the token
	Role    Role      `json:"role"`
	Expires time.Time `json:"expires"`        // on the clock of the core that admits
	Used    string    `json:"used,omitempty"` // nkey of the host that used it
	Seq     uint64    `json:"-"`
}

// Members are the hosts of a cluster and its open invitations. Its methods may be called
// concurrently.
type Members struct {
	members, invitations records
	authority            *Authority
}

// Limits of the list of members with all changes, and of the invitations, in bytes.
const (
	maxMembers     = 64 << 20
	maxInvitations = 16 << 20
)

// OpenMembers opens the list of members, and creates it on that many cores if it does not exist. All
// changes of it are kept, because a message that no core wrote must not replace the latest one. Without
// its private key, the authority allows only reading.
func OpenMembers(ctx context.Context, js jetstream.JetStream, host string, replicas int, a *Authority) (*Members, error) {
	m, err := openRecords(ctx, js, host, "member.", jetstream.StreamConfig{Name: "MEMBERS", Replicas: replicas, MaxBytes: maxMembers, DenyPurge: true})
	if err != nil {
		return nil, err
	}
	i, err := openRecords(ctx, js, host, "invitation.", jetstream.StreamConfig{Name: "INVITATIONS", Replicas: replicas, MaxMsgsPerSubject: 1, MaxAge: 2 * maxInvitation, MaxBytes: maxInvitations})
	return &Members{m, i, a}, err
}

// maxInvitation is the longest validity of an invitation.
const maxInvitation = 7 * 24 * time.Hour

// Get returns the member with a name, or ErrNone, wrapped. Its Seq is that of the latest record of the
// name, also if no core wrote it.
func (m *Members) Get(ctx context.Context, name string) (is Membership, err error) {
	found := false
	for last := uint64(0); ; {
		r, err := m.members.from(ctx, name, last+1)
		if errors.Is(err, ErrNone) {
			is.Seq = last
			if !found {
				return is, err
			}
			return is, nil
		}
		now, err := m.read(r, err)
		if err != nil && !errors.Is(err, ErrDamaged) {
			return is, err
		}
		if err == nil && (!found || now.Version > is.Version) {
			is, found = now, true
		}
		last = r.Seq
	}
}

// Add adds a member. It returns ErrConflict, wrapped, if a host has or had that name.
func (m *Members) Add(ctx context.Context, is Membership) error {
	for {
		was, err := m.Get(ctx, is.Name)
		if err == nil {
			return fmt.Errorf("add host %s to the cluster: %w", is.Name, ErrConflict)
		}
		if !errors.Is(err, ErrNone) {
			return err
		}
		if err := m.write(ctx, is, was.Seq); !errors.Is(err, ErrConflict) {
			return err
		}
	}
}

// write writes a member after the record with a sequence number.
func (m *Members) write(ctx context.Context, is Membership, after uint64) error {
	is.Version++
	v, err := m.authority.vouch(memberDomain, is)
	if err == nil {
		_, err = m.members.append(ctx, is.Name, v, after)
	}
	return err
}

// read reads a member. The error is ErrDamaged, wrapped, if no core wrote it.
func (m *Members) read(r record, err error) (is Membership, _ error) {
	v, err := body[vouched](r, err)
	if err == nil {
		err = m.authority.read(memberDomain, v, &is)
	}
	if err == nil && is.Name != r.Key {
		err = fmt.Errorf("the membership of host %q is that of %q: %w", r.Key, is.Name, ErrDamaged)
	}
	is.Seq = r.Seq
	return is, err
}

// invitation reads an invitation, like read.
func (m *Members) invitation(r record, err error) (i Invitation, _ error) {
	v, err := body[vouched](r, err)
	if err == nil {
		err = m.authority.read(invitationDomain, v, &i)
	}
	if err == nil && i.Nkey != r.Key {
		err = fmt.Errorf("the invitation of %q is that of %q: %w", r.Key, i.Nkey, ErrDamaged)
	}
	i.Seq = r.Seq
	return i, err
}

// Remove ends the membership of a host. From then on, no core accepts its key.
func (m *Members) Remove(ctx context.Context, name string, at time.Time) error {
	return m.change(ctx, name, func(is *Membership) bool {
		if !is.Removed.IsZero() {
			return false
		}
		is.Removed = at
		return true
	})
}

// Drain makes a host take no more tasks, or take tasks again.
func (m *Members) Drain(ctx context.Context, name string, drained bool) error {
	return m.change(ctx, name, func(is *Membership) bool {
		if is.Drained == drained {
			return false
		}
		is.Drained = drained
		return true
	})
}

// change changes a member. f returns false if there is nothing to change, and may be called again.
func (m *Members) change(ctx context.Context, name string, f func(*Membership) bool) error {
	for {
		is, err := m.Get(ctx, name)
		if errors.Is(err, ErrNone) {
			return fail.New(fail.NotFound, "no host %q in the cluster", name).WithHint("agent-sessionizer cluster list")
		}
		if err != nil || !f(&is) {
			return err
		}
		if err = m.write(ctx, is, is.Seq); !errors.Is(err, ErrConflict) {
			return err
		}
	}
}

// Invite adds an invitation.
func (m *Members) Invite(ctx context.Context, i Invitation) error { return m.invite(ctx, i, 0) }

// invite writes an invitation after the record with a sequence number.
func (m *Members) invite(ctx context.Context, i Invitation, after uint64) error {
	v, err := m.authority.vouch(invitationDomain, i)
	if err == nil {
		_, err = m.invitations.append(ctx, i.Nkey, v, after)
	}
	return err
}

// use marks an invitation as used by a host, at most once. The same host may use it again, because
// the answer may have been lost.
func (m *Members) use(ctx context.Context, token, nkey string, now time.Time) (Invitation, error) {
	const hint = "on a host of the cluster: agent-sessionizer cluster token"
	for {
		i, err := m.invitation(m.invitations.last(ctx, token))
		switch {
		case errors.Is(err, ErrNone):
			return i, fail.New(fail.Policy, "the token is unknown").WithHint(hint)
		case err != nil:
			return i, err
		case i.Used == nkey:
			return i, nil
		case i.Used != "":
			return i, fail.New(fail.Policy, "the token was used before").WithHint(hint)
		case now.After(i.Expires):
			return i, fail.New(fail.Policy, "the token expired at %s", i.Expires.Format(time.RFC3339)).WithHint(hint)
		}
		i.Used = nkey
		if err = m.invite(ctx, i, i.Seq); !errors.Is(err, ErrConflict) {
			return i, err
		}
	}
}

// All returns all members, also those that were removed.
func (m *Members) All(ctx context.Context) (all []Membership, err error) {
	by := map[string]Membership{}
	if err := m.changed(ctx, 0, by); err != nil {
		return nil, err
	}
	return slices.SortedFunc(maps.Values(by), func(a, b Membership) int { return cmp.Compare(a.Seq, b.Seq) }), nil
}

// changed updates the members by what was added or changed after a sequence number. Their keys are nkeys.
func (m *Members) changed(ctx context.Context, after uint64, by map[string]Membership) error {
	for r, err := range m.members.all(ctx, after) {
		is, err := m.read(r, err)
		if errors.Is(err, ErrDamaged) {
			continue
		}
		if err != nil {
			return err
		}
		if was, known := by[is.Nkey]; !known || is.Version >= was.Version {
			by[is.Nkey] = is
		}
	}
	return nil
}

// Invitations returns all invitations, also those that were used. It is for cores.
func (m *Members) Invitations(ctx context.Context) (all []Invitation, err error) {
	for r, err := range m.invitations.each(ctx) {
		i, err := m.invitation(r, err)
		if errors.Is(err, ErrDamaged) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, i)
	}
	return all, nil
}

// tidy removes what no core wrote, if a stream is filling up.
func (m *Members) tidy(ctx context.Context) error {
	return errors.Join(
		m.members.tidy(ctx, func(r record, err error) bool { _, err = m.read(r, err); return err == nil }),
		m.invitations.tidy(ctx, func(r record, err error) bool { _, err = m.invitation(r, err); return err == nil }),
	)
}

// watch returns a channel that receives a value after each change, until ctx ends; try limits the
// start. Only cores see changes of invitations.
func (m *Members) watch(ctx, try context.Context, core bool) (<-chan struct{}, error) {
	changed := make(chan struct{}, 1)
	streams := []records{m.members}
	if core {
		streams = append(streams, m.invitations)
	}
	for _, r := range streams {
		c, err := r.stream.OrderedConsumer(try, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverNewPolicy, HeadersOnly: true})
		if err != nil {
			return nil, fmt.Errorf("follow the members of the cluster: %w", err)
		}
		consuming, err := c.Consume(func(jetstream.Msg) {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
		if err != nil {
			return nil, fmt.Errorf("follow the members of the cluster: %w", err)
		}
		context.AfterFunc(ctx, consuming.Stop)
	}
	return changed, nil
}
