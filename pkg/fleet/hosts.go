package fleet

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// HostState is what becomes of a host of the cluster.
type HostState string

// The states of hosts.
const (
	Up      HostState = "up"
	Drained HostState = "drained" // up, and takes no more tasks
	Drains  HostState = "drains"  // it will be drained, and does not know it yet
	Silent  HostState = "silent"  // it sends no heartbeats; it may still run its tasks
	Revoked HostState = "revoked" // it was silent too long, and its tasks were released; it may come back
	Removed HostState = "removed" // for good
	Joined  HostState = "joined"  // and sent no heartbeat yet
)

// HostStates returns all states.
func HostStates() []HostState {
	return []HostState{Up, Drained, Drains, Silent, Revoked, Removed, Joined}
}

// HostView is a host of the cluster as --json and the API show it. Fields are only ever added.
type HostView struct {
	Name       string            `json:"name"`
	State      HostState         `json:"state" enum:"up,drains,drained,silent,revoked,removed,joined"`
	Role       cluster.Role      `json:"role"`
	Version    string            `json:"version,omitempty"`
	Arch       string            `json:"arch,omitempty"`
	Accel      string            `json:"accel,omitempty" doc:"How its VMs run: kvm, hvf, vz or tcg."`
	Slots      int               `json:"slots" doc:"How many tasks it may run at the same time."`
	FreeSlots  int               `json:"free_slots"`
	FreeMemory int64             `json:"free_memory" doc:"Bytes beyond its reserve."`
	FreeDisk   int64             `json:"free_disk" doc:"Bytes beyond its reserve."`
	Images     []string          `json:"images,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Heartbeat  *time.Time        `json:"heartbeat,omitempty" doc:"When its latest heartbeat was stored, on the clock of a core."`
	JoinedAt   time.Time         `json:"joined_at"`
	RemovedAt  *time.Time        `json:"removed_at,omitempty"`
}

// view describes a member by its latest heartbeat; false if it sent none.
func view(m cluster.Membership, h cluster.Host, beat bool) HostView {
	v := HostView{Name: m.Name, Role: m.Role, State: Joined, JoinedAt: m.Joined}
	if beat {
		v.Version, v.Arch, v.Accel, v.Slots, v.FreeSlots = h.Version, h.Arch, h.Accel, h.Slots, h.FreeSlots
		v.FreeMemory, v.FreeDisk, v.Images, v.Labels, v.Heartbeat = h.FreeMemory, h.FreeDisk, h.Images, h.Labels, &h.At
	}
	switch {
	case !m.Removed.IsZero():
		v.State, v.RemovedAt = Removed, &m.Removed
	case !beat:
	case h.Revoked != "":
		v.State = Revoked
	case time.Since(h.At) > cluster.LeaseFor:
		v.State = Silent
	case h.Drained:
		v.State = Drained
	case m.Drained:
		v.State = Drains
	default:
		v.State = Up
	}
	return v
}

// Hosts returns all hosts of the cluster, by name.
func (p *Part) Hosts(ctx context.Context) (all []HostView, err error) {
	n, err := p.Node(ctx)
	if err != nil {
		return nil, err
	}
	members, err := n.Members.All(ctx)
	if err != nil {
		return nil, err
	}
	_, beats, err := n.Hosts.All(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range members {
		i := slices.IndexFunc(beats, func(h cluster.Host) bool { return h.Name == m.Name })
		h := cluster.Host{}
		if i >= 0 {
			h = beats[i]
		}
		all = append(all, view(m, h, i >= 0))
	}
	slices.SortFunc(all, func(a, b HostView) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// get returns one host of the cluster.
func get(ctx context.Context, n *cluster.Node, name string) (HostView, error) {
	m, err := n.Members.Get(ctx, name)
	if err != nil {
		return HostView{}, err
	}
	h, _, err := n.Hosts.Get(ctx, name)
	if errors.Is(err, cluster.ErrNone) {
		return view(m, h, false), nil
	}
	return view(m, h, true), err
}

// core returns this host as a part of its cluster, or an error if it may not change other members.
func (p *Part) core(ctx context.Context) (*cluster.Node, error) {
	if p.State.Role.Allows(cluster.CoreOf) {
		return p.Node(ctx)
	}
	return nil, fail.New(fail.Policy, "only a core can change the members of the cluster, and this host is a %s", p.State.Role).
		WithHint("agent-sessionizer cluster list # then run it on a core")
}

// Invite makes a token with which one host can join.
func (p *Part) Invite(ctx context.Context, role cluster.Role, valid time.Duration) (cluster.Token, error) {
	n, err := p.core(ctx)
	if err != nil {
		return cluster.Token{}, err
	}
	return n.Invite(ctx, role, valid)
}

// Drain makes a host take no more tasks, or take tasks again.
func (p *Part) Drain(ctx context.Context, name string, drained bool) (HostView, error) {
	n, err := p.core(ctx)
	if err != nil {
		return HostView{}, err
	}
	if err := n.Members.Drain(ctx, name, drained); err != nil {
		return HostView{}, err
	}
	return get(ctx, n, name)
}

// Remove ends the membership of a host. Its tasks are released once its lease has certainly ended.
func (p *Part) Remove(ctx context.Context, name string) (HostView, error) {
	n, err := p.core(ctx)
	if err != nil {
		return HostView{}, err
	}
	if name == p.State.Name {
		return HostView{}, fail.New(fail.Usage, "a host cannot remove itself").WithHint("run it on another core")
	}
	if err := n.Members.Remove(ctx, name, time.Now().UTC()); err != nil {
		return HostView{}, err
	}
	if err := n.Hosts.Remove(ctx, name, p.State.Name); err != nil { // its heartbeats must not extend its lease
		return HostView{}, err
	}
	v, err := get(ctx, n, name)
	if err == nil && v.Role.Allows(cluster.CoreOf) {
		err = n.RemoveCore(ctx, name)
	}
	return v, err
}
