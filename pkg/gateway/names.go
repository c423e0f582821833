package gateway

import (
	"container/list"
	"hash/fnv"
	"net/netip"
	"sync"
	"time"
)

// fakeRange is the range of the names' addresses. It is reserved for benchmarks, is on
// no network, and is never routed.
var fakeRange = netip.MustParsePrefix("198.18.0.0/15")

const (
	maxNames   = 32 << 10         // a quarter of the range, so that a free address is near
	nameMemory = 10 * time.Minute // how long an address keeps its name after the last use
)

// nameTable gives every name its own address. The address identifies the name for every
// protocol, without a time limit that a client might ignore.
//
// The number of names is bounded. When it is reached, names that were neither looked up
// nor connected to within nameMemory are evicted, the least recently used first. If
// there are none, a new name gets no address.
type nameTable struct {
	now func() time.Time

	mu     sync.Mutex
	byName map[string]*nameEntry
	byAddr map[netip.Addr]*nameEntry
	recent list.List // of *nameEntry, most recently used first
}

type nameEntry struct {
	name  string
	addr  netip.Addr
	used  time.Time
	users int // live connections
	place *list.Element
}

func newNameTable(now func() time.Time) *nameTable {
	return &nameTable{now: now, byName: map[string]*nameEntry{}, byAddr: map[netip.Addr]*nameEntry{}}
}

func (n *nameTable) len() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.byName)
}

// addr returns the address of a name, and assigns one if the name has none. It reports
// false if no address is available.
func (n *nameTable) addr(name string) (netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.byName[name]; e != nil {
		n.touch(e)
		return e.addr, true
	}
	if len(n.byName) >= maxNames && !n.reclaim() {
		return netip.Addr{}, false
	}
	// The address derives from the name's hash, so unless it collides it is the same
	// after a restart. A guest that cached it notices nothing.
	h := fnv.New32a()
	h.Write([]byte(name)) //nolint:errcheck // never fails
	for i := h.Sum32(); ; i++ {
		a := fakeAddr(i)
		if last := a.As4()[3]; last == 0 || last == 255 || n.byAddr[a] != nil {
			continue // some stacks do not accept .0 and .255 as host addresses
		}
		e := &nameEntry{name: name, addr: a}
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

// reclaim evicts one name. It reports false if no name may be evicted.
func (n *nameTable) reclaim() bool {
	limit := n.now().Add(-nameMemory)
	for place := n.recent.Back(); place != nil; place = place.Prev() {
		e, ok := place.Value.(*nameEntry)
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

func (n *nameTable) touch(e *nameEntry) {
	e.used = n.now()
	n.recent.MoveToFront(e.place)
}

// recentNames returns the names that were used within nameMemory, the least recently used first.
func (n *nameTable) recentNames() (names []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	limit := n.now().Add(-nameMemory)
	for place := n.recent.Back(); place != nil; place = place.Prev() {
		if e, ok := place.Value.(*nameEntry); ok && (e.users > 0 || e.used.After(limit)) {
			names = append(names, e.name)
		}
	}
	return names
}

// name returns the name that an address stands for, or "".
func (n *nameTable) name(addr netip.Addr) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.byAddr[addr]; e != nil {
		return e.name
	}
	return ""
}

// acquire is like name, but pins the name for a connection until release is called.
func (n *nameTable) acquire(addr netip.Addr) (name string, release func(), ok bool) {
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

// hostTable holds the names of the gateway and the guest, which Lima adds.
type hostTable struct {
	mu sync.Mutex
	m  map[string]netip.Addr
}

const maxHosts = 256

func (h *hostTable) set(name string, addr netip.Addr) bool {
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

func (h *hostTable) addr(name string) (netip.Addr, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	a, ok := h.m[name]
	return a, ok
}
