package ssh

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sync/singleflight"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/peercred"
)

// A relay lets other processes of this user run commands over an existing
// connection to a guest. These clients speak SSH to the relay over a UNIX socket.
// For each channel that a client opens, the relay uses a channel of the connection.
// The kernel identifies the clients, so the keys and ciphers between them and the
// relay protect nothing. The relay uses the cheapest ones.

const (
	// Our sshd_config allows 64 sessions per connection. If all slots are taken, a
	// client logs in to the guest itself.
	relayClients  = 15
	relayChannels = 4 // per client

	relayOpen  = 10 * time.Second // limit for the guest to open a channel
	relayHello = 5 * time.Second  // limit for a relay to respond; after that the client logs in itself
	relayGreet = 10 * time.Second // limit for a client to complete the handshake
	relayDrain = 5 * time.Second  // limit for the guest to read what a client sent before it left

	requestBound = 4 << 10 // bytes of a guest's message that a command has ended

	// socketBound is the longest path of a UNIX socket that every system accepts:
	// macOS has 104 bytes including the NUL.
	socketBound = 103
)

// Types of channels and requests that a relay passes on. It refuses everything
// else, in both directions.
var (
	relayedChannels = []string{"session", "direct-tcpip", "direct-streamlocal@openssh.com"}
	relayedRequests = []string{"env", "pty-req", "window-change", "exec", "shell", "subsystem", "signal"}
	relayedOutcomes = []string{"exit-status", "exit-signal"}
)

// ListenRelay creates a relay's socket. It replaces a socket that a dead process left.
// The caller ensures that no other process listens there, and that only its user can
// access the directory.
func ListenRelay(path string) (*net.UnixListener, error) {
	if len(path) > socketBound {
		return nil, fmt.Errorf("listen on %s: a socket path must be at most %d bytes", path, socketBound)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the old socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// dialRelay connects to a guest through a relay, and waits until the guest has opened
// a session. So it returns an error if the relay is full or has lost its connection,
// and the caller can log in to the guest instead.
func dialRelay(ctx context.Context, t Target) (*Client, error) {
	ctx, cancel := context.WithTimeout(ctx, relayHello+relayOpen)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", t.Relay)
	if err != nil {
		return nil, fmt.Errorf("connect to the relay: %w", err)
	}
	if err := peercred.Own(conn.(*net.UnixConn)); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	// A stopped relay process accepts connections but never responds.
	_ = conn.SetDeadline(time.Now().Add(relayHello))
	c, chans, reqs, err := ssh.NewClientConn(conn, t.Relay, &ssh.ClientConfig{
		Config:            relayConfig(),
		HostKeyCallback:   ssh.InsecureIgnoreHostKey(), // peercred.Own identifies the relay
		HostKeyAlgorithms: []string{ssh.KeyAlgoED25519},
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect to the relay: %w: %s", ErrUnreachable, brief(err.Error())), conn.Close())
	}
	_ = conn.SetDeadline(time.Time{})
	cl := newClient(t, conn, c, chans, reqs)
	session, err := cl.session() // bounded by the connection, which ctx closes
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect through the relay: %w: %s", ErrUnreachable, brief(err.Error())), cl.Close())
	}
	cl.opened = session
	return cl, nil
}

func relayConfig() ssh.Config {
	return ssh.Config{
		KeyExchanges: []string{ssh.KeyExchangeCurve25519},
		Ciphers:      []string{ssh.CipherAES128GCM},
	}
}

// relay is the server that the clients connect to.
type relay struct {
	guest  *Client
	config *ssh.ServerConfig
	shells standbyShells
	alive  singleflight.Group // the keep-alive that was sent last
}

func newRelay(c *Client) (*relay, error) {
	_, secret, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create the relay's key: %w", err)
	}
	key, err := ssh.NewSignerFromKey(secret)
	if err != nil {
		return nil, fmt.Errorf("create the relay's key: %w", err)
	}
	r := &relay{guest: c, config: &ssh.ServerConfig{Config: relayConfig(), NoClientAuth: true}, shells: standbyShells{guest: c}}
	r.config.AddHostKey(key)
	return r, nil
}

// Relay lets this user's other processes use the connection, through the socket l. It
// ends when ctx is done, the connection is lost, or l fails. It then closes the
// connection and l, also for other users of the connection, and returns when all
// clients have been served.
func (c *Client) Relay(ctx context.Context, l *net.UnixListener) error {
	defer l.Close()
	r, err := newRelay(c)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var clients sync.WaitGroup
	defer func() {
		cancel()
		_ = c.Close() // wakes goroutines that wait for the guest
		clients.Wait()
	}()
	clients.Go(func() {
		select {
		case <-c.done:
		case <-ctx.Done():
		}
		_ = l.Close()
	})
	slots := make(chan struct{}, relayClients)
	for {
		conn, err := l.AcceptUnix()
		select {
		case <-c.done:
			err = fmt.Errorf("%w: the connection was lost", ErrUnreachable)
		case <-ctx.Done():
			err = context.Cause(ctx)
		default:
		}
		if err != nil {
			if conn != nil {
				_ = conn.Close()
			}
			return err
		}
		if peercred.Own(conn) != nil {
			_ = conn.Close()
			continue
		}
		select {
		case slots <- struct{}{}:
		default:
			_ = conn.Close()
			continue
		}
		clients.Go(func() {
			defer func() { <-slots }()
			r.serve(ctx, conn)
		})
	}
}

// Relayed returns how many commands and forwarded connections of other processes Relay has carried,
// and how many it carries now. Terminals do not count, because they show only by their input that they
// are used.
func (c *Client) Relayed() (opened int64, open int) {
	return c.relayed.Load(), int(c.relaying.Load())
}

// serve handles one client. It returns when the client has left and the guest has
// closed all channels of the client. Until then, the client's slot is taken.
func (r *relay) serve(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	_ = conn.SetDeadline(time.Now().Add(relayGreet))
	_, chans, reqs, err := ssh.NewServerConn(conn, r.config)
	if err != nil {
		return
	}
	_ = conn.SetDeadline(time.Time{})
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { r.keepAlives(reqs) })
	slots := make(chan struct{}, relayChannels)
	for n := range chans {
		if !slices.Contains(relayedChannels, n.ChannelType()) {
			_ = n.Reject(ssh.UnknownChannelType, "not relayed")
			continue
		}
		select {
		case slots <- struct{}{}:
		default:
			_ = n.Reject(ssh.ResourceShortage, "too many channels")
			continue
		}
		tasks.Go(func() {
			defer func() { <-slots }()
			r.channel(n)
		})
	}
}

// keepAlives passes a client's keep-alives on to the guest, so that a client notices as early as one with
// a connection of its own that the guest does not answer. It refuses all other requests.
func (r *relay) keepAlives(reqs <-chan *ssh.Request) {
	for req := range reqs {
		if req.Type == keepAlive {
			_, _, _ = r.alive.Do("", func() (any, error) { // one answer is for all clients that wait
				_, _, err := r.guest.ssh.SendRequest(keepAlive, true, nil) // returns at the latest when the connection ends
				return nil, err
			})
		}
		if req.WantReply {
			_ = req.Reply(false, nil)
		}
	}
}

// half is one end of a relayed channel: the client's or the guest's.
type half struct {
	ssh.Channel
	reqs <-chan *ssh.Request
}

// channel relays a channel that a client requests. For a session it uses the standby shell, if one
// exists. Otherwise it opens a channel in the guest.
func (r *relay) channel(n ssh.NewChannel) {
	var guest, standby *half
	if n.ChannelType() == "session" {
		standby = r.shells.take()
	}
	if standby == nil {
		guest = r.guest.openChannel(n.ChannelType(), n.ExtraData(), func(reason ssh.RejectionReason, text string) { _ = n.Reject(reason, text) })
		if guest == nil {
			return
		}
	}
	ch, reqs, err := n.Accept()
	if err != nil { // the client has disconnected
		if standby != nil {
			r.shells.putBack(standby)
		} else {
			guest.abandon()
		}
		return
	}
	client, input := half{ch, reqs}, io.Reader(ch)
	if standby != nil {
		if guest, input = r.useStandby(&client, standby); guest == nil {
			_ = ch.Close()
			ssh.DiscardRequests(reqs)
			return
		}
	}
	u := &use{of: r.guest}
	defer u.end()
	if n.ChannelType() != "session" || guest == standby {
		u.begin()
	}
	if ran := carry(client, input, *guest, u); ran || guest == standby {
		r.shells.start()
	}
}

// use counts a channel for Relayed, from the moment that it is more than a terminal.
type use struct {
	of    *Client
	began bool
}

func (u *use) begin() {
	if !u.began {
		u.began = true
		u.of.relayed.Add(1)
		u.of.relaying.Add(1)
	}
}

func (u *use) end() {
	if u.began {
		u.of.relaying.Add(-1)
	}
}

// useStandby prepares a standby shell to run the client's command. It returns the shell, and the
// input that runs the command.
//
// If the standby shell cannot run what the client requests, useStandby puts it back. It then opens
// another channel in the guest and returns that with the client's own input. It returns nil if the
// guest refuses, or if the client has requested nothing.
func (r *relay) useStandby(client, standby *half) (guest *half, input io.Reader) {
	first, ok := <-client.reqs
	if ok {
		if line := standbyInput(first); line != "" {
			if first.WantReply {
				_ = first.Reply(true, nil)
			}
			return standby, io.MultiReader(strings.NewReader(line), client)
		}
	}
	r.shells.putBack(standby)
	if !ok {
		return nil, nil
	}
	guest = r.guest.openChannel("session", nil, func(ssh.RejectionReason, string) {
		if first.WantReply {
			_ = first.Reply(false, nil)
		}
	})
	if guest == nil {
		return nil, nil
	}
	all := make(chan *ssh.Request)
	go func(rest <-chan *ssh.Request) { // ends when the client's channel does, because carry reads all requests
		defer close(all)
		all <- first
		for req := range rest {
			all <- req
		}
	}(client.reqs)
	client.reqs = all
	return guest, client
}

// openChannel opens a channel in the guest. If the guest refuses, or does not answer within
// relayOpen, it calls refuse and returns nil. Before it returns after such a timeout, it waits for
// the late answer, and closes the channel that the guest may have opened. If the connection ends
// first, it returns nil without calling refuse.
func (c *Client) openChannel(channelType string, data []byte, refuse func(reason ssh.RejectionReason, text string)) *half {
	type result struct {
		half
		err error
	}
	opened := make(chan result, 1)
	go func() { // not awaited, as in Client.session
		ch, reqs, err := c.ssh.OpenChannel(channelType, data)
		opened <- result{half{ch, reqs}, err}
	}()
	timer := time.NewTimer(relayOpen)
	defer timer.Stop()
	var guest result
	select {
	case guest = <-opened:
	case <-c.done:
		return nil
	case <-timer.C:
		refuse(ssh.ConnectionFailed, "the VM does not answer")
		select {
		case guest = <-opened:
			if guest.err == nil {
				guest.abandon()
			}
		case <-c.done:
		}
		return nil
	}
	if guest.err != nil {
		reason, text := ssh.ConnectionFailed, guest.err.Error()
		if e, ok := errors.AsType[*ssh.OpenChannelError](guest.err); ok {
			reason, text = e.Reason, e.Message
		}
		refuse(reason, brief(text))
		return nil
	}
	return &guest.half
}

// abandon closes a channel and waits until the guest has closed it too.
func (h half) abandon() {
	_ = h.Close()
	ssh.DiscardRequests(h.reqs)
}

// carry passes all data between the two ends of a channel until both are closed. The guest reads
// input, which ends with what the client sends. carry reports whether the client ran a command.
func carry(client half, input io.Reader, guest half, u *use) (ran bool) {
	var tasks sync.WaitGroup
	sent, reported := make(chan struct{}), make(chan struct{})
	tasks.Go(func() {
		defer close(sent)
		_, _ = io.Copy(guest, input) // either side may close at any time
		_ = guest.CloseWrite()
	})
	tasks.Go(func() {
		defer close(reported)
		var streams sync.WaitGroup
		streams.Go(func() { _, _ = io.Copy(client, guest) })
		streams.Go(func() { _, _ = io.Copy(client.Stderr(), guest.Stderr()) })
		streams.Wait()
		_ = client.CloseWrite()
	})
	// A command may end before the client has the reply to its request. The lock delays the exit
	// status until then.
	var answering sync.Mutex
	tasks.Go(func() { ran = requests(client, guest, sent, &answering, u) })
	outcome(client, guest, reported, &answering)
	tasks.Wait()
	return ran
}

// requests passes the client's requests on to the guest, in order. When the client has closed its
// end, requests closes the guest's. It does not wait for the guest while it reads from the client,
// because it must notice when the client leaves. A command without a terminal is a use. It reports whether
// the client requested a command.
func requests(client, guest half, sent <-chan struct{}, answering *sync.Mutex, u *use) (ran bool) {
	queue, passed := make(chan *ssh.Request, 64), make(chan struct{})
	go func() {
		defer close(passed)
		for req := range queue {
			answering.Lock() // not for longer than the channel is open: then SendRequest returns
			ok, err := guest.SendRequest(req.Type, req.WantReply, req.Payload)
			if req.WantReply {
				_ = req.Reply(ok && err == nil, nil)
			}
			answering.Unlock()
		}
	}()
	terminal := false
	for req := range client.reqs {
		if !slices.Contains(relayedRequests, req.Type) {
			_ = req.Reply(false, nil)
			continue
		}
		switch req.Type {
		case "pty-req":
			terminal = true
		case "exec", "shell", "subsystem":
			ran = ran || req.Type == "exec"
			if !terminal {
				u.begin()
			}
		}
		select {
		case queue <- req:
		default: // the guest does not answer, and the client keeps sending
			_ = client.Close()
		}
	}
	close(queue)
	// Pass on what the client sent before it left, but only for a limited time.
	timer := time.NewTimer(relayDrain)
	defer timer.Stop()
	for _, done := range []<-chan struct{}{passed, sent} {
		select {
		case <-done:
		case <-timer.C:
			_ = guest.Close() // ends both goroutines, when the guest closes too
			<-passed
			return ran
		}
	}
	_ = guest.Close()
	return ran
}

// outcome reads the guest's requests until the guest closes the channel. When the
// client has all output, outcome sends it the exit status. It does not wait for the
// client while it reads from the guest: the SSH library would stop reading from the
// connection, and all clients would wait.
func outcome(client, guest half, reported <-chan struct{}, answering *sync.Mutex) {
	var last []*ssh.Request
	for req := range guest.reqs {
		if slices.Contains(relayedOutcomes, req.Type) && len(req.Payload) <= requestBound && len(last) < len(relayedOutcomes) {
			last = append(last, req)
		}
		if req.WantReply {
			_ = req.Reply(false, nil)
		}
	}
	<-reported
	answering.Lock()
	defer answering.Unlock()
	for _, req := range last {
		_, _ = client.SendRequest(req.Type, false, req.Payload)
	}
	_ = client.Close()
}
