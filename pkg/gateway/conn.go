package gateway

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"runtime/metrics"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// conn is one TCP connection of the guest, from its SYN to its end.
type conn struct {
	g       *Gateway
	id      uint64
	started time.Time
	to      netip.AddrPort // the address that the guest dialled
	name    string         // the name behind that address, "" if it has none
	request *tcp.ForwarderRequest
	crowded bool // one of many connections, so it gets small buffers

	ctx    context.Context // ends when the connection is cut
	cancel context.CancelCauseFunc
	out    atomic.Int64 // bytes from the guest
	in     atomic.Int64

	mu        sync.Mutex
	asked     question // what the policy allowed; a new policy is asked the same
	unchecked bool     // the guest's traffic was not inspected
	holding   bool     // it waits until a person decides; hold asks a new policy itself
	record    Record   // of the opening
	opened    bool
	over      bool // the connection's end was already reported
	closers   map[int]func()
	closer    int // the last key of closers
}

// conns holds the guest's connections.
type conns struct {
	mu   sync.Mutex
	last uint64
	m    map[*conn]struct{}
}

func (s *conns) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.m)
}

// add assigns c a number and registers it. It reports false when there are already
// maxConnections.
func (s *conns) add(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	c.id = s.last
	if len(s.m) >= maxConnections {
		return false
	}
	if s.m == nil {
		s.m = map[*conn]struct{}{}
	}
	c.crowded = len(s.m) >= largeConnections
	s.m[c] = struct{}{}
	return true
}

func (s *conns) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.m, c)
}

func (s *conns) each(visit func(*conn)) {
	s.mu.Lock()
	all := make([]*conn, 0, len(s.m))
	for c := range s.m {
		all = append(all, c)
	}
	s.mu.Unlock()
	for _, c := range all {
		visit(c)
	}
}

// connection handles a SYN of the guest. It runs in its own goroutine.
func (g *Gateway) connection(r *tcp.ForwarderRequest) {
	g.mu.Lock()
	closed := g.closed
	if !closed {
		g.tasks.Add(1)
	}
	g.mu.Unlock()
	if closed {
		r.Complete(true)
		return
	}
	defer g.tasks.Done()
	defer g.recoverPanic()
	id := r.ID()
	c := &conn{
		g: g, request: r, started: time.Now(),
		to: netip.AddrPortFrom(netip.AddrFrom4(id.LocalAddress.As4()), id.LocalPort),
	}
	c.ctx, c.cancel = context.WithCancelCause(g.ctx)
	defer c.end()
	switch {
	case !g.conns.add(c):
		c.deny("", decision{Reason: "too many connections"})
	case g.heap() > maxHeap:
		c.deny("", decision{Reason: "the gateway's memory is full"})
	default:
		c.serve()
	}
}

// heapLive returns the live heap size that the last garbage collection measured.
func heapLive() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return sample[0].Value.Uint64()
}

// ask stores a question and puts it to the policy. It stores the question first: if the
// policy changes in between, either review asks the new policy, or the decision here
// already does.
func (c *conn) ask(q question) decision {
	c.mu.Lock()
	c.asked = q
	c.mu.Unlock()
	return c.g.policy.decide(q)
}

// review asks a new policy about the connection that the old policy allowed.
func (c *conn) review() {
	c.mu.Lock()
	asked, lax, holding := c.asked, c.unchecked, c.holding
	c.mu.Unlock()
	if asked == (question{}) || holding {
		return // serve will ask the new policy
	}
	if d := c.g.policy.decide(asked); !d.Allowed {
		c.abort("the policy changed: " + d.Reason)
	} else if lax && !c.g.policy.allowsUnchecked() {
		c.abort("the policy changed: requests to a name are now inspected")
	}
}

// abort ends the connection immediately; both sides see a reset.
func (c *conn) abort(reason string) {
	c.cancel(errors.New(reason))
	c.close()
}

// onClose registers f to run when the connection is cut and when it ends. f may be called
// both times, unless forget was called before.
func (c *conn) onClose(f func()) (forget func()) {
	c.mu.Lock()
	c.closer++
	id := c.closer
	if c.closers == nil {
		c.closers = map[int]func(){}
	}
	c.closers[id] = f
	c.mu.Unlock()
	if c.ctx.Err() != nil {
		f()
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.closers, id)
	}
}

func (c *conn) close() {
	c.mu.Lock()
	closers := slices.Collect(maps.Values(c.closers))
	c.mu.Unlock()
	for _, f := range closers {
		f()
	}
}

// accept completes the guest's handshake.
func (c *conn) accept() (*guestEnd, error) {
	r := c.request
	c.request = nil
	var queue waiter.Queue
	endpoint, terr := r.CreateEndpoint(&queue)
	r.Complete(terr != nil)
	if terr != nil {
		return nil, tcpipError(terr)
	}
	o := endpoint.SocketOptions()
	o.SetKeepAlive(true)
	o.SetDelayOption(false)
	if c.crowded {
		o.SetReceiveBufferSize(smallBuffer, true)
		o.SetSendBufferSize(smallBuffer, true)
	}
	e := &guestEnd{TCPConn: gonet.NewTCPConn(&queue, endpoint), endpoint: endpoint, c: c}
	c.onClose(e.abort)
	return e, nil
}

// guestEnd is the guest's side of a connection.
type guestEnd struct {
	*gonet.TCPConn
	endpoint tcpip.Endpoint
	c        *conn
	finished atomic.Bool // closed normally; a reset would lose the last bytes
}

func (e *guestEnd) Read(b []byte) (int, error) {
	n, err := e.TCPConn.Read(b)
	e.c.out.Add(int64(n))
	return n, err
}

func (e *guestEnd) Write(b []byte) (int, error) {
	n, err := e.TCPConn.Write(b)
	e.c.in.Add(int64(n))
	return n, err
}

// Close closes the connection normally.
func (e *guestEnd) Close() error {
	e.finished.Store(true)
	return e.TCPConn.Close()
}

// abort resets the connection, unless Close was called before and the connection was not
// cut.
func (e *guestEnd) abort() {
	if !e.finished.Load() || e.c.ctx.Err() != nil {
		e.endpoint.Abort()
	}
	e.TCPConn.Close() //nolint:errcheck // the endpoint is gone
}

// open reports that the connection has been established.
func (c *conn) open(proto string, d decision, addr netip.Addr) {
	c.mu.Lock()
	if c.opened {
		c.mu.Unlock()
		return
	}
	c.opened = true
	c.record = Record{
		Kind: KindTCP, Proto: proto, Name: c.name, Addr: addr, Port: c.to.Port(),
		Allowed: true, Rule: d.Rule, Source: d.Source, Reason: d.Reason, Conn: c.id,
	}
	r := c.record
	c.mu.Unlock()
	c.g.report(r)
}

// deny reports that the policy does not allow the connection or what the guest sent on it.
func (c *conn) deny(proto string, d decision) { c.denyAddr(proto, d, c.to.Addr()) }

func (c *conn) denyAddr(proto string, d decision, addr netip.Addr) {
	c.mu.Lock()
	c.over = true
	c.mu.Unlock()
	c.g.report(c.denial(proto, d, addr))
}

func (c *conn) denial(proto string, d decision, addr netip.Addr) Record {
	return Record{
		Kind: KindTCP, Proto: proto, Name: c.name, Addr: addr, Port: c.to.Port(),
		Rule: d.Rule, Source: d.Source, Reason: clean(d.Reason), Conn: c.id,
	}
}

// denyRequest reports that the policy does not allow a request. The connection goes on.
func (c *conn) denyRequest(r *http.Request, d decision) {
	record := c.denial(protoHTTP, d, c.to.Addr())
	record.Request = clean(policy.Request{Host: c.name, Method: r.Method, Path: r.URL.EscapedPath()}.String())
	record.Conn = 0 // so that equal requests on several connections are counted together
	c.g.report(record)
}

// fail reports that an allowed connection could not be established.
func (c *conn) fail(proto string, err error) {
	var no *deniedError
	if errors.As(err, &no) {
		c.denyAddr(proto, no.decision, no.addr)
		return
	}
	c.mu.Lock()
	over := c.over || c.opened
	c.over = true
	c.mu.Unlock()
	if over {
		return
	}
	if cause := context.Cause(c.ctx); cause != nil {
		err = cause
	}
	c.g.report(Record{
		Kind: KindTCP, Proto: proto, Name: c.name, Addr: c.to.Addr(), Port: c.to.Port(), Allowed: true,
		Reason: clean(err.Error()), Conn: c.id, End: true, Elapsed: time.Since(c.started),
	})
}

// end closes everything that is open. If the connection was opened, end reports that it is
// over.
func (c *conn) end() {
	if c.request != nil {
		c.request.Complete(true)
	}
	cause := context.Cause(c.ctx)
	c.mu.Lock()
	opened, r := c.opened, c.record
	c.mu.Unlock()
	c.close()
	c.cancel(nil)
	c.g.conns.remove(c)
	if !opened {
		return
	}
	r.End, r.BytesOut, r.BytesIn, r.Elapsed = true, c.out.Load(), c.in.Load(), time.Since(c.started)
	r.Reason = ""
	if cause != nil && c.g.ctx.Err() == nil {
		r.Reason = clean(cause.Error())
	}
	c.g.report(r)
}

// upstream is the gateway's side of a connection to the outside.
type upstream struct {
	net.Conn
	forget   func() // forgets to abort it when the guest's connection ends
	finished atomic.Bool
}

// CloseWrite tells the server that the guest has finished sending.
func (u *upstream) CloseWrite() error { return pipe.CloseWrite(u.Conn) }

// Close closes the connection normally.
func (u *upstream) Close() error {
	u.finished.Store(true)
	u.forget()
	return u.Conn.Close()
}

// abort resets the connection, unless Close was called.
func (u *upstream) abort() {
	if t, ok := u.Conn.(*net.TCPConn); ok && !u.finished.Load() {
		_ = t.SetLinger(0) // if this fails, the connection ends normally instead
	}
	u.Conn.Close()
}
