package cluster

import (
	"context"
	"errors"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Found makes a new cluster, with this host as its first core. Listen and route are the addresses
// at which other hosts and other cores reach it. External, if any, holds the streams; route and witness are not used then.
func Found(dir, cluster, name, listen, route, witness string, external *External) (State, error) {
	if s, err := LoadState(dir); !errors.Is(err, ErrNone) && (err != nil || s.Certificate != "") { // not one whose token was not accepted
		return State{}, errors.Join(err, fail.New(fail.Conflict, "this host belongs to a cluster already").WithHint("agent-sessionizer cluster show"))
	}
	if err := CheckName(name); err != nil {
		return State{}, err
	}
	if external != nil {
		if err := external.Check(); err != nil {
			return State{}, err
		}
		route, witness = "", ""
	}
	a, err := NewAuthority(cluster)
	if err != nil {
		return State{}, err
	}
	keys, err := NewKeys()
	if err != nil {
		return State{}, err
	}
	i, err := keys.Identity(name, CoreOf)
	if err != nil {
		return State{}, err
	}
	certificate, err := a.Sign(i)
	if err != nil {
		return State{}, err
	}
	signing, err := a.Encode()
	if err != nil {
		return State{}, err
	}
	s := State{
		Cluster: cluster, Name: name, Role: CoreOf, Certificate: string(certificate), Authority: string(a.Certificate()),
		Signing: string(signing), Addrs: []string{listen}, Listen: listen, Route: route, Witness: witness, External: external,
	}
	if err := s.setKeys(keys); err != nil {
		return s, err
	}
	return s, s.Save(dir)
}

// membership returns this host's own.
func (s State) membership(k *Keys) (Membership, error) {
	i, err := k.Identity(s.Name, s.Role)
	return Membership{
		Name: s.Name, Role: s.Role, Nkey: i.Nkey, Certificate: s.Certificate, Addr: s.Listen, Route: s.Route, Joined: time.Now().UTC(),
	}, err
}

// Invite makes a token with which one host can join.
func (n *Node) Invite(ctx context.Context, role Role, valid time.Duration) (Token, error) {
	addrs, err := n.coreAddrs(ctx)
	if err != nil {
		return Token{}, err
	}
	t, i, err := NewToken(addrs, []byte(n.State.Authority), role, valid)
	if err != nil {
		return t, err
	}
	return t, n.Members.Invite(ctx, i)
}

// Join makes this host a member of the cluster of a token. It may be repeated after an interruption. A core
// needs external if others hold the cluster's streams.
func Join(ctx context.Context, dir string, t Token, is Applicant, external *External) (State, error) {
	if err := is.check(t.Role); err != nil { // before anything is written
		return State{}, err
	}
	s, err := LoadState(dir)
	switch {
	case err == nil && s.Certificate != "":
		return s, fail.New(fail.Conflict, "this host belongs to a cluster already").WithHint("agent-sessionizer cluster show")
	case err != nil && !errors.Is(err, ErrNone):
		return s, err
	case errors.Is(err, ErrNone):
		keys, err := NewKeys()
		if err != nil {
			return s, err
		}
		s = State{Name: is.Name}
		if err := s.setKeys(keys); err != nil {
			return s, err
		}
		if err := s.Save(dir); err != nil { // before the token is used: an answer that is lost is repeated for the same keys
			return s, err
		}
	}
	keys, err := s.Keys()
	if err != nil {
		return s, err
	}
	a, err := keys.Join(ctx, t, is)
	if err != nil {
		return s, err
	}
	switch {
	case !a.Role.Allows(CoreOf):
	case !a.External && external != nil:
		return s, fail.New(fail.Conflict, "the cores of this cluster hold its streams, but cluster.url is set").WithHint("agent-sessionizer config edit config.yaml # then repeat the command")
	case a.External && external == nil:
		return s, fail.New(fail.Conflict, "another NATS cluster holds the streams of this cluster, and cluster.url is not set").WithHint("agent-sessionizer config edit config.yaml # then repeat the command")
	case a.External:
		if err := external.Check(); err != nil {
			return s, err
		}
		s.External = external
	}
	s.Name, s.Cluster, s.Role, s.Certificate, s.Authority, s.Addrs = is.Name, a.Cluster, a.Role, a.Certificate, a.Authority, a.Addrs
	if a.Role.Allows(CoreOf) {
		signing, err := keys.decrypt(a.Signing)
		if err != nil {
			return s, err
		}
		s.Signing, s.Listen, s.Route = string(signing), is.Addr, is.Route
		if err := saveMembers(dir, a.Members); err != nil { // its server must let them in before it can read the list
			return s, err
		}
	}
	return s, s.Save(dir)
}
