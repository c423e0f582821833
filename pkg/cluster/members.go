package cluster

import (
	"context"
	"errors"
	"fmt"
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
	Seq         uint64    `json:"-"`
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
type Members struct{ members, invitations records }

// OpenMembers opens the list of members, and creates it on that many cores if it does not exist.
func OpenMembers(ctx context.Context, js jetstream.JetStream, host string, replicas int) (*Members, error) {
	m, err := openRecords(ctx, js, host, "member.", jetstream.StreamConfig{Name: "MEMBERS", Replicas: replicas, MaxMsgsPerSubject: 1})
	if err != nil {
		return nil, err
	}
	i, err := openRecords(ctx, js, host, "invitation.", jetstream.StreamConfig{Name: "INVITATIONS", Replicas: replicas, MaxMsgsPerSubject: 1, MaxAge: 2 * maxInvitation})
	return &Members{m, i}, err
}

// maxInvitation is the longest validity of an invitation.
const maxInvitation = 7 * 24 * time.Hour

// Get returns the member with a name, or ErrNone, wrapped.
func (m *Members) Get(ctx context.Context, name string) (Membership, error) {
	return membership(m.members.last(ctx, name))
}

// Add adds a member. It returns ErrConflict, wrapped, if a host has or had that name.
func (m *Members) Add(ctx context.Context, is Membership) error {
	_, err := m.members.append(ctx, is.Name, is, 0)
	return err
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
		if _, err = m.members.append(ctx, name, is, is.Seq); !errors.Is(err, ErrConflict) {
			return err
		}
	}
}

// Invite adds an invitation.
func (m *Members) Invite(ctx context.Context, i Invitation) error {
	_, err := m.invitations.append(ctx, i.Nkey, i, 0)
	return err
}

// use marks an invitation as used by a host, at most once. The same host may use it again, because
// the answer may have been lost.
func (m *Members) use(ctx context.Context, token, nkey string, now time.Time) (Invitation, error) {
	const hint = "on a host of the cluster: agent-sessionizer cluster token"
	for {
		i, err := invitation(m.invitations.last(ctx, token))
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
		if _, err = m.invitations.append(ctx, token, i, i.Seq); !errors.Is(err, ErrConflict) {
			return i, err
		}
	}
}

// All returns all members, also those that were removed.
func (m *Members) All(ctx context.Context) ([]Membership, error) { return m.changed(ctx, 0) }

// changed returns the members that were added or changed after a sequence number.
func (m *Members) changed(ctx context.Context, after uint64) (all []Membership, err error) {
	for r, err := range m.members.each(ctx, after) {
		is, err := membership(r, err)
		if err != nil {
			return nil, err
		}
		all = append(all, is)
	}
	return all, nil
}

// Invitations returns all invitations, also those that were used. It is for cores.
func (m *Members) Invitations(ctx context.Context) (all []Invitation, err error) {
	for r, err := range m.invitations.each(ctx, 0) {
		i, err := invitation(r, err)
		if err != nil {
			return nil, err
		}
		all = append(all, i)
	}
	return all, nil
}

func membership(r record, err error) (Membership, error) {
	is, err := body[Membership](r, err)
	is.Seq = r.Seq
	return is, err
}

func invitation(r record, err error) (Invitation, error) {
	i, err := body[Invitation](r, err)
	i.Seq = r.Seq
	return i, err
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
