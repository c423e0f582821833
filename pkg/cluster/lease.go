package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// These are the times of a host's lease. They count from the moment at which the host sent the
// heartbeat that was acknowledged last, on its own clock, which runs while the host sleeps and which
// cannot be set. A host is revoked after a time that is longer than the lease by much more than
// two clocks can differ in that time.
const (
	HeartbeatEvery = 5 * time.Second
	LeaseFor       = 30 * time.Second // afterwards, the host writes nothing for its tasks, and their guests send nothing; store.StopAfter later, their VMs stop
	RevokeAfter    = 90 * time.Second // without a heartbeat, on the clock of a core; the host's tasks are released
)

// Host is what a host says about itself with each heartbeat.
type Host struct {
	Name        string            `json:"name"`
	Incarnation string            `json:"incarnation"`       // changes when the host was revoked
	Revoked     string            `json:"revoked,omitempty"` // the core that revoked it
	Removed     bool              `json:"removed,omitempty"` // it was revoked because a user removed it: it may still have a lease
	Drained     bool              `json:"drained,omitempty"` // it takes no more tasks
	Version     string            `json:"version"`
	Arch        string            `json:"arch"`  // as GOARCH
	Accel       string            `json:"accel"` // of its VMs: kvm, hvf or tcg
	Slots       int               `json:"slots"`
	FreeSlots   int               `json:"free_slots"`
	FreeMemory  int64             `json:"free_memory"` // bytes
	FreeDisk    int64             `json:"free_disk"`   // bytes
	Images      []string          `json:"images,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`

	At time.Time `json:"-"` // when a core stored it, on that core's clock
}

// Hosts are the heartbeats of all hosts: for each, the latest one.
type Hosts struct{ records records }

// maxHosts limits the heartbeats, in bytes.
const maxHosts = 64 << 20

// OpenHosts opens the heartbeats, and creates their stream on that many cores if it does not exist.
func OpenHosts(ctx context.Context, js jetstream.JetStream, host string, replicas int) (*Hosts, error) {
	r, err := openRecords(ctx, js, host, "host.", jetstream.StreamConfig{Name: "HOSTS", Replicas: replicas, MaxMsgsPerSubject: 1, MaxBytes: maxHosts})
	return &Hosts{r}, err
}

// Get returns the latest heartbeat of a host, and its sequence number.
func (h *Hosts) Get(ctx context.Context, name string) (Host, uint64, error) {
	r, err := h.records.last(ctx, name)
	is, err := body[Host](r, err)
	if errors.Is(err, ErrDamaged) {
		is, err = Host{}, nil
	}
	is.Name, is.At = name, r.At
	return is, r.Seq, err
}

// All returns the latest heartbeats of all hosts, with their sequence numbers. Of one that is damaged,
// only the name is known: it counts as a heartbeat, and its host gets no task.
func (h *Hosts) All(ctx context.Context) (map[string]uint64, []Host, error) {
	seqs := map[string]uint64{}
	var all []Host
	for r, err := range h.records.each(ctx) {
		is, err := body[Host](r, err)
		if errors.Is(err, ErrDamaged) {
			is, err = Host{}, nil
		}
		if err != nil {
			return nil, nil, err
		}
		is.Name, is.At = r.Key, r.At // a host may claim to be another
		seqs[is.Name] = r.Seq
		all = append(all, is)
	}
	return seqs, all, nil
}

// tidy removes what does not belong to a member, if the stream is filling up.
func (h *Hosts) tidy(ctx context.Context, known func(name string) bool) error {
	return h.records.tidy(ctx, func(r record, _ error) bool {
		return CheckName(r.Key) == nil && known(r.Key)
	})
}

// ErrRevoked is returned, wrapped, to a host that was revoked. All its tasks may run elsewhere.
var ErrRevoked = errors.New("this host was revoked")

// Lease is a host's right to run its tasks. Its methods may be called concurrently.
type Lease struct {
	hosts *Hosts
	clock func() time.Duration // since the host booted, including the time that it slept

	mu   sync.Mutex
	seq  uint64        // of the latest heartbeat
	sent time.Duration // when it was sent
	held bool          // a heartbeat was acknowledged
}

// NewLease returns the lease of a host that has sent no heartbeat yet.
func NewLease(h *Hosts, clock func() time.Duration) *Lease { return &Lease{hosts: h, clock: clock} }

// Renew sends a heartbeat and waits for the acknowledgement. It returns the time of the lease's clock
// until which the host may write for its tasks. The error is ErrRevoked, wrapped, if the host was
// revoked in the incarnation that it names.
func (l *Lease) Renew(ctx context.Context, is Host) (until time.Duration, err error) {
	l.mu.Lock()
	seq := l.seq
	l.mu.Unlock()
	for {
		sent := l.clock()
		next, err := l.hosts.records.append(ctx, is.Name, is, seq)
		if err == nil {
			l.mu.Lock()
			l.seq, l.sent, l.held = next, sent, true
			l.mu.Unlock()
			return sent + LeaseFor, nil
		}
		if !errors.Is(err, ErrConflict) {
			return 0, err
		}
		was, at, err := l.hosts.Get(ctx, is.Name)
		switch {
		case err != nil:
			return 0, err
		case was.Incarnation == is.Incarnation && was.Revoked != "":
			return 0, fail.New(fail.Conflict, "host %s was revoked by %s: %w", is.Name, was.Revoked, ErrRevoked)
		case at == seq:
			return 0, fmt.Errorf("send the heartbeat of host %s: %w", is.Name, ErrConflict) // the answer was outdated
		}
		seq = at // of an earlier process of this host
	}
}

// Age returns how long ago the heartbeat was sent that was acknowledged last; false if none was.
func (l *Lease) Age() (time.Duration, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.clock() - l.sent, l.held
}

// Left returns how long the host may still write for its tasks, which is not positive after the end.
func (l *Lease) Left() time.Duration {
	age, held := l.Age()
	if !held {
		return 0
	}
	return LeaseFor - age
}

// Valid reports whether the host may write for its tasks.
func (l *Lease) Valid() bool { return l.Left() > 0 }

// Silence measures how long each host has sent no heartbeat, as seen by one core.
type Silence struct {
	seen map[string]observation
	last time.Duration // of the latest Look
}

type observation struct {
	seq    uint64
	silent time.Duration
}

// Look records the sequence number of each host's latest heartbeat, and returns those hosts that have
// been silent for RevokeAfter. Only time during which this core itself was in touch with the
// cluster counts: the caller calls Look after each acknowledged heartbeat of its own, and each
// call adds at most two heartbeats' time.
func (s *Silence) Look(now time.Duration, hosts map[string]uint64) (silent []string) {
	passed := min(now-s.last, 2*HeartbeatEvery)
	if s.seen == nil {
		s.seen, passed = map[string]observation{}, 0
	}
	s.last = now
	for name, seq := range hosts {
		o := s.seen[name]
		if o.seq != seq {
			o = observation{seq: seq}
		} else {
			o.silent += passed
		}
		s.seen[name] = o
		if o.silent >= RevokeAfter {
			silent = append(silent, name)
		}
	}
	for name := range s.seen {
		if _, ok := hosts[name]; !ok {
			delete(s.seen, name)
		}
	}
	return silent
}

// Remove ends the lease of a host that a user removed. Its claims last until RevokeAfter later.
func (h *Hosts) Remove(ctx context.Context, name, by string) error {
	for {
		is, seq, err := h.Get(ctx, name)
		if errors.Is(err, ErrNone) || err == nil && is.Revoked != "" {
			return nil
		}
		if err != nil {
			return err
		}
		is.Removed = true
		if err := h.Revoke(ctx, is, seq, by); !errors.Is(err, ErrConflict) {
			return err
		}
	}
}

// Revoke ends the lease of a host whose latest heartbeat has that sequence number. It
// returns ErrConflict, wrapped, if the host has sent another one since. After success, the
// host's lease ended at the latest LeaseFor after it had sent that heartbeat.
func (h *Hosts) Revoke(ctx context.Context, is Host, seq uint64, by string) error {
	is.Revoked = by
	_, err := h.records.append(ctx, is.Name, is, seq)
	return err
}
