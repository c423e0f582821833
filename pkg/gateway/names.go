package gateway

import (
	"container/list"
	"hash/fnv"
	"net/netip"
	"sync"
	"time"
)

// fakeRange is where names get their addresses: set aside for measurements, on
// no network, and routed by nobody.
var fakeRange = netip.MustParsePrefix("198.18.0.0/15")

const (
	maxNames   = 32 << 10         // a quarter of the range: a free address is near
	nameMemory = 10 * time.Minute // in which an address stands for one name
)

// names gives every name an address of its own. The address is the name, for
// every protocol and without a time limit that a client might not keep.
//
// It is bounded: when it is full, names that nobody asked for or connected to
// within nameMemory make room, the least recently used first. When there are
// none, there is no address.
type names struct {
	now func() time.Time

	mu     sync.Mutex
	byName map[string]*named
	byAddr map[netip.Addr]*named
	recent list.List // of *named, the most recently used in front
}

type named struct {
	name  string
	addr  netip.Addr
	used  time.Time
	users int // live connections
	place *list.Element
}

func newNames(now func() time.Time) *names {
	return &names{now: now, byName: map[string]*named{}, byAddr: map[netip.Addr]*named{}}
}

func (n *names) len() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.byName)
}

// addr returns the address of a name, a new one if need be.
func (n *names) addr(name string) (netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.byName[name]; e != nil {
		n.touch(e)
		return e.addr, true
	}
	if len(n.byName) >= maxNames && !n.reclaim() {
		return netip.Addr{}, false
	}
	// By its hash a name has the same address after a restart, too, unless it
	// collides; a guest that remembers it is none the wiser.
	h := fnv.New32a()
	h.Write([]byte(name)) //nolint:errcheck // never fails
	for i := h.Sum32(); ; i++ {
		a := fakeAddr(i)
		if last := a.As4()[3]; last == 0 || last == 255 || n.byAddr[a] != nil {
			continue // some stacks take .0 and .255 for no host
		}
		e := &named{name: name, addr: a}
		e.place = n.recent.PushFront(e)
		n.byName[name], n.byAddr[a] = e, e
		n.touch(e)
		return a, true
	}
}

func fakeAddr(i uint32) netip.Addr {
	b := fakeRange.Addr().As4()
	b[1] |= byte(i >> 16 & 1)
	b[2], b[3] = byte(i>>8), byte(i)
	return netip.AddrFrom4(b)
}

// reclaim makes room for one name.
func (n *names) reclaim() bool {
	limit := n.now().Add(-nameMemory)
	for place := n.recent.Back(); place != nil; place = place.Prev() {
		e, ok := place.Value.(*named)
		if !ok || e.used.After(limit) {
			return false
		}
		if e.users == 0 {
			n.recent.Remove(place)
			delete(n.byName, e.name)
			delete(n.byAddr, e.addr)
			return true
		}
	}
	return false
}

func (n *names) touch(e *named) {
	e.used = n.now()
	n.recent.MoveToFront(e.place)
}

// name returns what an address stands for, "" when it is no name's.
func (n *names) name(addr netip.Addr) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.byAddr[addr]; e != nil {
		return e.name
	}
	return ""
}

// acquire is name for a connection, which keeps the name until release.
func (n *names) acquire(addr netip.Addr) (name string, release func(), ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.byAddr[addr]
	if e == nil {
		return "", func() {}, false
	}
	e.users++
	n.touch(e)
	return e.name, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		e.users--
		n.touch(e)
	}, true
}

// hosts are the names of the gateway and the guest, which Lima gives.
type hosts struct {
	mu sync.Mutex
	m  map[string]netip.Addr
}

const maxHosts = 256

func (h *hosts) set(name string, addr netip.Addr) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.m == nil {
		h.m = map[string]netip.Addr{}
	}
	if _, known := h.m[name]; !known && len(h.m) >= maxHosts {
		return false
	}
	h.m[name] = addr
	return true
}

func (h *hosts) addr(name string) (netip.Addr, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	a, ok := h.m[name]
	return a, ok
}
