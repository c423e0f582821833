package cluster

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
)

// A tunnel is a stream of bytes between two hosts, as messages of NATS that no stream keeps. Both
// ends speak TLS in it, so that the servers in between see only ciphertext.
//
// The host that opens it sends an opening to tunnel.HOST.open.FROM, and the other one answers. The servers
// let a host use only its own name as FROM. Each then
// receives at tunnel.HOST.c.ID. A message begins with a kind and a number of 8 bytes, big-endian:
//
//	d OFFSET DATA  bytes of the stream from OFFSET on
//	a OFFSET       the receiver has read up to OFFSET
//	c OFFSET       the stream ends at OFFSET
//	k 0            nothing; the other end lives
//
// A gap in the offsets ends the tunnel: NATS delivers each message at most once.
const (
	frameData  = 'd'
	frameAck   = 'a'
	frameClose = 'c'
	frameAlive = 'k'

	frameHeader = 9
	maxFrame    = 32 << 10  // of data, in bytes
	window      = 256 << 10 // of data that the receiver has not read
	aliveEvery  = 10 * time.Second
	aliveFor    = 35 * time.Second // without any message, the other end is lost
	maxTunnels  = 512              // that other hosts opened
	maxOpened   = 72               // of these, by the same host; more than maxPeerConns
	openTimeout = 15 * time.Second
)

// opening asks for a tunnel.
type opening struct {
	ID   string `json:"id"`
	From string `json:"from"`
}

// Tunnels open and accept tunnels of one host.
type Tunnels struct {
	nc   *nats.Conn
	host string

	accepted chan *tunnel
	done     chan struct{}
	once     sync.Once
	sub      *nats.Subscription
	open     slots // of tunnels that other hosts opened
}

// slots limits what other hosts use at the same time: all of them together, and each of them.
type slots struct {
	all, each int

	mu   sync.Mutex
	used int
	by   map[string]int
}

// take reports whether a host may use another slot, until free.
func (s *slots) take(host string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used >= s.all || s.by[host] >= s.each {
		return false
	}
	if s.by == nil {
		s.by = map[string]int{}
	}
	s.used++
	s.by[host]++
	return true
}

func (s *slots) free(host string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used--
	if s.by[host]--; s.by[host] == 0 {
		delete(s.by, host)
	}
}

// lastToken returns the last part of a subject: the host that sent a message.
func lastToken(subject string) string { return subject[strings.LastIndexByte(subject, '.')+1:] }

// NewTunnels accepts tunnels from other hosts. Accept must be called, as for any net.Listener.
func NewTunnels(nc *nats.Conn, host string) (*Tunnels, error) {
	t := &Tunnels{nc: nc, host: host, accepted: make(chan *tunnel), done: make(chan struct{}), open: slots{all: maxTunnels, each: maxOpened}}
	var err error
	if t.sub, err = nc.Subscribe("tunnel."+host+".open.*", t.answer); err != nil {
		return nil, fmt.Errorf("accept tunnels: %w", err)
	}
	if err := nc.FlushTimeout(openTimeout); err != nil { // from now on, no opening is lost
		return nil, errors.Join(fmt.Errorf("accept tunnels: %w", err), t.sub.Unsubscribe())
	}
	return t, nil
}

// answer accepts a tunnel.
func (t *Tunnels) answer(m *nats.Msg) {
	var o opening
	if json.Unmarshal(m.Data, &o) != nil || !ids.Valid(o.ID) || CheckName(o.From) != nil || o.From != lastToken(m.Subject) {
		_ = answerInbox(m, []byte("the opening is invalid"))
		return
	}
	if !t.open.take(o.From) {
		_ = answerInbox(m, []byte("too many tunnels are open"))
		return
	}
	c, err := t.start(o.ID, o.From)
	if err != nil {
		t.open.free(o.From)
		_ = answerInbox(m, []byte("the tunnel cannot be opened"))
		return
	}
	go func() { <-c.done; t.open.free(o.From) }()
	if answerInbox(m, nil) != nil {
		c.Close()
		return
	}
	go func() { // the callback of the subscription must not wait
		select {
		case t.accepted <- c:
		case <-t.done:
			c.Close()
		case <-c.done:
		}
	}()
}

// Accept implements net.Listener.
func (t *Tunnels) Accept() (net.Conn, error) {
	select {
	case c := <-t.accepted:
		return c, nil
	case <-t.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. Tunnels that were accepted stay open.
func (t *Tunnels) Close() error {
	t.once.Do(func() { close(t.done) })
	return t.sub.Unsubscribe()
}

// Addr implements net.Listener.
func (t *Tunnels) Addr() net.Addr { return tunnelAddr(t.host) }

// Dial opens a tunnel to another host.
func (t *Tunnels) Dial(ctx context.Context, host string) (net.Conn, error) {
	if err := CheckName(host); err != nil {
		return nil, err
	}
	o := opening{ID: ids.New(), From: t.host}
	c, err := t.start(o.ID, host)
	if err != nil {
		return nil, fmt.Errorf("open a tunnel to host %s: %w", host, err)
	}
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	m, err := t.nc.RequestWithContext(ctx, "tunnel."+host+".open."+t.host, text)
	if err == nil && len(m.Data) > 0 {
		err = errors.New(string(m.Data))
	}
	if err != nil {
		c.Close()
		if errors.Is(err, nats.ErrNoResponders) {
			err = errors.New("it is not connected to the cluster")
		}
		return nil, fail.New(fail.Host, "open a tunnel to host %s: %w", host, err).WithHint("agent-sessionizer cluster show %s", host)
	}
	return c, nil
}

// start makes one end of a tunnel.
func (t *Tunnels) start(id, peer string) (*tunnel, error) {
	c := &tunnel{nc: t.nc, to: "tunnel." + peer + ".c." + id, local: tunnelAddr(t.host), remote: tunnelAddr(peer), done: make(chan struct{}), heard: time.Now()}
	c.changed.L = &c.mu
	var err error
	if c.sub, err = t.nc.Subscribe("tunnel."+t.host+".c."+id, c.receive); err != nil {
		return nil, err
	}
	go c.watch()
	return c, nil
}

type tunnelAddr string

func (a tunnelAddr) Network() string { return "cluster" }
func (a tunnelAddr) String() string  { return string(a) }

// tunnel is one end. It implements net.Conn.
type tunnel struct {
	nc            *nats.Conn
	sub           *nats.Subscription
	to            string // the subject of the other end
	local, remote tunnelAddr
	done          chan struct{} // closed when the end is closed

	mu       sync.Mutex
	changed  sync.Cond
	received []byte // not read yet
	read     uint64 // bytes that were read
	acked    uint64 // of these, those that the other end knows of
	sent     uint64 // bytes
	taken    uint64 // of these, those that the other end has read
	heard    time.Time
	ended    error // no more data will come: io.EOF or why
	closed   bool

	readLimit, writeLimit limit
}

// limit is a deadline.
type limit struct {
	timer *time.Timer
	over  bool
}

// receive handles a message of the other end. It never waits.
func (c *tunnel) receive(m *nats.Msg) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.heard = time.Now()
	if len(m.Data) < frameHeader {
		return
	}
	offset, data := binary.BigEndian.Uint64(m.Data[1:]), m.Data[frameHeader:]
	at := c.read + uint64(len(c.received))
	switch m.Data[0] {
	case frameData:
		switch {
		case offset != at:
			c.end(errors.New("a message of the tunnel was lost"))
		case len(c.received)+len(data) > window:
			c.end(errors.New("the other end sent too much"))
		case c.ended == nil && !c.closed:
			c.received = append(c.received, data...)
		}
	case frameAck:
		if offset > c.taken && offset <= c.sent {
			c.taken = offset
		}
	case frameClose:
		if offset == at {
			c.end(io.EOF)
		} else {
			c.end(errors.New("the end of the tunnel was lost"))
		}
	}
	c.changed.Broadcast()
}

// end records that no more data will come. The caller holds mu.
func (c *tunnel) end(why error) {
	if c.ended == nil {
		c.ended = why
	}
	c.changed.Broadcast()
}

// watch tells the other end that this one lives, and ends the tunnel if the other one does not.
func (c *tunnel) watch() {
	tick := time.NewTicker(aliveEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-c.done:
			return
		}
		c.mu.Lock()
		if time.Since(c.heard) > aliveFor {
			c.end(errors.New("the other host does not answer"))
		}
		c.mu.Unlock()
		_ = c.send(frameAlive, 0, nil) // the other end notices
	}
}

func (c *tunnel) send(kind byte, offset uint64, data []byte) error {
	m := make([]byte, frameHeader, frameHeader+len(data))
	m[0] = kind
	binary.BigEndian.PutUint64(m[1:], offset)
	return c.nc.Publish(c.to, append(m, data...))
}

// Read implements net.Conn.
func (c *tunnel) Read(p []byte) (int, error) {
	c.mu.Lock()
	for {
		var err error
		switch {
		case c.closed:
			err = net.ErrClosed
		case c.readLimit.over:
			err = os.ErrDeadlineExceeded
		case len(c.received) == 0:
			err = c.ended
		}
		if err != nil || len(p) == 0 {
			c.mu.Unlock()
			return 0, err
		}
		if len(c.received) > 0 {
			break
		}
		c.changed.Wait()
	}
	n := copy(p, c.received)
	c.received = c.received[n:]
	c.read += uint64(n)
	ack := c.read-c.acked >= window/4
	if ack {
		c.acked = c.read
	}
	read := c.read
	c.mu.Unlock()
	if ack {
		return n, c.send(frameAck, read, nil)
	}
	return n, nil
}

// Write implements net.Conn.
func (c *tunnel) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		c.mu.Lock()
		for c.sent-c.taken >= window && !c.closed && c.lost() == nil && !c.writeLimit.over {
			c.changed.Wait()
		}
		switch {
		case c.closed:
			err = net.ErrClosed
		case c.lost() != nil:
			err = c.lost()
		case c.writeLimit.over:
			err = os.ErrDeadlineExceeded
		}
		if err != nil {
			c.mu.Unlock()
			return n, err
		}
		size := min(len(p), maxFrame, int(window-(c.sent-c.taken)))
		offset := c.sent
		c.sent += uint64(size)
		// Under the lock: messages must have the order of their offsets.
		err = c.send(frameData, offset, p[:size])
		c.mu.Unlock()
		if err != nil {
			return n, err
		}
		n, p = n+size, p[size:]
	}
	return n, nil
}

// lost returns why nothing can be written any more. The end of what the other end sends does not
// matter. The caller holds mu.
func (c *tunnel) lost() error {
	if c.ended == nil || errors.Is(c.ended, io.EOF) {
		return nil
	}
	return c.ended
}

// Close implements net.Conn.
func (c *tunnel) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	sent := c.sent
	c.changed.Broadcast()
	c.mu.Unlock()
	close(c.done)
	return errors.Join(c.send(frameClose, sent, nil), c.sub.Unsubscribe())
}

// LocalAddr implements net.Conn.
func (c *tunnel) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements net.Conn. It is what the other end claims to be: its certificate
// counts.
func (c *tunnel) RemoteAddr() net.Addr { return c.remote }

// SetDeadline implements net.Conn.
func (c *tunnel) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *tunnel) SetReadDeadline(t time.Time) error { return c.setLimit(&c.readLimit, t) }

// SetWriteDeadline implements net.Conn.
func (c *tunnel) SetWriteDeadline(t time.Time) error { return c.setLimit(&c.writeLimit, t) }

func (c *tunnel) setLimit(l *limit, t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.timer != nil {
		l.timer.Stop()
	}
	l.timer, l.over = nil, false
	defer c.changed.Broadcast()
	switch {
	case t.IsZero():
		return nil
	case time.Until(t) <= 0:
		l.over = true
		return nil
	}
	var timer *time.Timer
	timer = time.AfterFunc(time.Until(t), func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if l.timer == timer {
			l.over = true
			c.changed.Broadcast()
		}
	})
	l.timer = timer
	return nil
}
