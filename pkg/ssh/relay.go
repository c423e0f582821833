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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/peercred"
)

// A relay lets other processes of this user run commands over an existing
// connection. They speak SSH to it over a UNIX socket, and each of their channels
// becomes one of the connection's. The kernel identifies the clients. The keys and
// ciphers between them and the relay protect nothing, so they are the cheapest
// ones.

const (
	// Our sshd_config allows 64 sessions per connection. A client that finds no
	// free slot dials the guest itself.
	relayClients  = 15
	relayChannels = 4 // per client

	relayOpen  = 10 * time.Second // for the guest to open a channel; a login would take longer
	relayHello = 5 * time.Second  // for a relay to respond; after that the client dials the guest
	relayGreet = 10 * time.Second // for a client to complete the handshake
	relayDrain = 5 * time.Second  // for the guest to read what a departed client had sent

	requestBound = 4 << 10 // of a guest's message about the end of a command

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

// ListenRelay creates a relay's socket and replaces one left by a dead process. The
// caller ensures that no live process listens there, and that only its user can
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

// dialRelay connects to a guest through a relay. It returns once the guest has
// opened a session. A relay that is full or has lost its connection therefore
// causes an error here, while the caller can still dial the guest.
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

// relay is the server side.
type relay struct {
	guest  *Client
	config *ssh.ServerConfig
	spares spares
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
	r := &relay{guest: c, config: &ssh.ServerConfig{Config: relayConfig(), NoClientAuth: true}, spares: spares{guest: c}}
	r.config.AddHostKey(key)
	return r, nil
}

// Relay serves the connection to this user's other processes on l until ctx is
// done, the connection is lost, or l fails. It then closes the connection and l,
// and returns once everything that used them has ended. Other users of the
// connection must not need it longer.
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

// Relayed returns how many channels of other processes Relay has opened, and how many of them
// are open now.
func (c *Client) Relayed() (opened int64, open int) {
	return c.relayed.Load(), int(c.relaying.Load())
}

// serve handles one client. It returns, and frees the client's slot, when the guest
// has closed all of the client's channels too.
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
	tasks.Go(func() { ssh.DiscardRequests(reqs) }) // the client's keep-alives are for the relay; the guest gets the relay's own
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

// half is one side of a relayed channel.
type half struct {
	ssh.Channel
	reqs <-chan *ssh.Request
}

// channel opens the requested channel in the guest, or uses the spare, and relays it.
func (r *relay) channel(n ssh.NewChannel) {
	var guest, spare *half
	if n.ChannelType() == "session" {
		spare = r.spares.take()
	}
	if spare == nil {
		guest = r.guest.openChannel(n.ChannelType(), n.ExtraData(), func(reason ssh.RejectionReason, text string) { _ = n.Reject(reason, text) })
		if guest == nil {
			return
		}
	}
	ch, reqs, err := n.Accept()
	if err != nil { // the client has disconnected
		if spare != nil {
			r.spares.keep(spare)
		} else {
			guest.abandon()
		}
		return
	}
	client, input := half{ch, reqs}, io.Reader(ch)
	if spare != nil {
		if guest, input = r.useSpare(&client, spare); guest == nil {
			_ = ch.Close()
			ssh.DiscardRequests(reqs)
			return
		}
	}
	r.guest.relayed.Add(1)
	r.guest.relaying.Add(1)
	defer r.guest.relaying.Add(-1)
	if ran := carry(client, input, *guest); ran || guest == spare {
		r.spares.start()
	}
}

// useSpare has the spare run the client's command. It returns the spare and what it has to read.
// If the spare cannot run what the client requests, it returns another channel of the guest, or nil
// if there is none.
func (r *relay) useSpare(client, spare *half) (guest *half, input io.Reader) {
	first, ok := <-client.reqs
	if ok {
		if line := spareInput(first); line != "" {
			if first.WantReply {
				_ = first.Reply(true, nil)
			}
			return spare, io.MultiReader(strings.NewReader(line), client)
		}
	}
	r.spares.keep(spare)
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
	go func(rest <-chan *ssh.Request) { // ends with the client's channel, because carry reads all of it
		defer close(all)
		all <- first
		for req := range rest {
			all <- req
		}
	}(client.reqs)
	client.reqs = all
	return guest, client
}

// openChannel opens a channel in the guest. It returns nil after it has called refuse if the guest
// refuses the channel, or does not answer within relayOpen. After such a timeout it still waits for
// the late answer, and closes that channel. If the connection ends first, it returns nil without
// calling refuse.
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

// carry passes all data between the two ends of a channel until both are closed. The guest gets
// input. It reports whether the client ran a command.
func carry(client half, input io.Reader, guest half) (ran bool) {
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
	// A command may end before the reply to its start was sent.
	var answering sync.Mutex
	tasks.Go(func() { ran = requests(client, guest, sent, &answering) })
	outcome(client, guest, reported, &answering)
	tasks.Wait()
	return ran
}

// requests passes on the client's requests in order, and closes the guest's end
// once the client has closed its own. It never waits for the guest while it reads
// from the client, because it must notice when the client leaves. It reports whether the client
// requested a command.
func requests(client, guest half, sent <-chan struct{}, answering *sync.Mutex) (ran bool) {
	queue, passed := make(chan *ssh.Request, 64), make(chan struct{})
	go func() {
		defer close(passed)
		for req := range queue {
			answering.Lock() // SendRequest returns once the channel closes, so the lock is not held long after that
			ok, err := guest.SendRequest(req.Type, req.WantReply, req.Payload)
			if req.WantReply {
				_ = req.Reply(ok && err == nil, nil)
			}
			answering.Unlock()
		}
	}()
	for req := range client.reqs {
		if !slices.Contains(relayedRequests, req.Type) {
			_ = req.Reply(false, nil)
			continue
		}
		ran = ran || req.Type == "exec"
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
			_ = guest.Close() // ends both, once the guest closes too
			<-passed
			return ran
		}
	}
	_ = guest.Close()
	return ran
}

// outcome reads the guest's requests until the guest closes the channel. Then it
// sends the client the exit status, after all output. It never waits for the client
// while it reads from the guest, because the library would stop reading the
// connection for all clients.
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
