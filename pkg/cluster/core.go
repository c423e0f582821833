package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// coreTag marks the servers that may hold streams: all but witnesses.
const coreTag = "core"

// maxMemory limits the memory that streams use. All streams are files.
const maxMemory = 64 << 20

// maxConsumers limits the consumers of a stream. Each host has a few; the server's default is 1,000.
const maxConsumers = 50_000

// CoreOptions describes a core. All fields but Peers, Witness and External are required.
type CoreOptions struct {
	Cluster string // name of the cluster
	Name    string // of this server; a name is never used again after the server was removed
	Dir     string // of its streams
	Store   int64  // maximum size of its streams, in bytes
	Listen  string // HOST:PORT for hosts; port 0 chooses one
	Route   string // HOST:PORT for the other cores
	Peers   []string
	Witness bool // takes part in votes about the cluster, and holds no streams

	External *External // holds the streams instead of this server, which then needs no Route, Peers and Store
	Log      *slog.Logger

	Keys        *Keys
	Certificate []byte // PEM, of this host
	Authority   []byte // PEM, of the cluster, without its private key

	Members     []Membership // who may log in; at least this host
	Invitations []Invitation
}

// Core is a NATS server in this process.
type Core struct {
	server   atomic.Pointer[server.Server] // another one after Restart
	log      serverLog
	keys     *Keys
	operator nkeys.KeyPair // of the server's system account, only for this process
	logins   logins
	requests string // precedes the subjects of requests for JetStream, once the server has mapped them

	reload sync.Mutex // held while the server's connections to removed cores end
	opts   *server.Options
	gone   time.Time // until then, there may be such connections

	// mu is never held during a call of the server, which calls checkCore while it holds locks of
	// its own.
	mu    sync.Mutex
	cores map[string]bool // by nkey: the other servers may be theirs
}

// reconnectPause is the time between two tries of this process to connect to its own server.
const reconnectPause = 100 * time.Millisecond

// connectTimeout is how long another server may take to connect: the server ends a connection that is not complete
// after 90 s. Until it is complete, the server does not tell whose it is.
const connectTimeout = 2 * time.Minute

// startTimeout limits how long a server may take to listen. It waits for its disk only.
const startTimeout = time.Minute

// StartCore starts a server. It returns once the server listens, which may be before the cluster
// has a leader.
func StartCore(ctx context.Context, o CoreOptions) (*Core, error) {
	host, port, err := address(o.Listen)
	if err != nil {
		return nil, err
	}
	opts := &server.Options{
		ServerName: o.Name, Host: host, Port: port, NoSigs: true,
		AlwaysEnableNonce: true, // which logins sign
	}
	if o.External != nil {
		remote, err := o.External.remote()
		if err != nil {
			return nil, err
		}
		opts.LeafNode.Remotes = []*server.RemoteLeafOpts{remote}
	} else if err := o.holdStreams(opts); err != nil {
		return nil, err
	}
	c := &Core{log: serverLog{o.Log.With("server", o.Name), new(atomic.Bool)}, keys: o.Keys, opts: opts, cores: cores(o.Members), requests: ownRequests}
	if o.External != nil {
		c.requests = o.External.requests()
	}
	c.logins.set(nkeyUsers(o.Members, o.Invitations, time.Now(), c.requests))
	opts.CustomClientAuthentication = &c.logins
	if c.operator, err = nkeys.CreateUser(); err != nil {
		return nil, err
	}
	if opts.TLSConfig, err = o.Keys.forHosts(o.Certificate, o.Authority); err != nil {
		return nil, err
	}
	if o.External == nil {
		if opts.Cluster.TLSConfig, err = o.Keys.TLS(o.Certificate, o.Authority, c.checkCore); err != nil {
			return nil, err
		}
	}
	if err := c.start(ctx); err != nil {
		return nil, err
	}
	if err := c.Authorize(o.Members, o.Invitations); err != nil { // now that the account of the operator exists
		c.Stop()
		return nil, err
	}
	return c, nil
}

// start starts the server, and waits until it listens.
func (c *Core) start(ctx context.Context) error {
	if err := c.canListen(ctx); err != nil {
		return err
	}
	s, err := server.NewServer(c.opts.Clone())
	if err != nil {
		return fail.New(fail.Host, "start the cluster's server: %w", err)
	}
	s.SetLoggerV2(c.log, false, false, false)
	if c.external() { // requests for JetStream are for theirs
		if err := s.GlobalAccount().AddMapping(ownRequests+">", c.requests+">"); err != nil {
			return fail.New(fail.Usage, "cluster.domain: %w", err)
		}
	}
	go s.Start()
	c.server.Store(s)
	wait := startTimeout
	if end, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(end))
	}
	if !s.ReadyForConnections(wait) {
		c.Stop()
		return fail.New(fail.Host, "start the cluster's server: it does not listen on port %d after %v", c.opts.Port, wait)
	}
	return nil
}

// canListen returns an error if another program listens on a port of the server. The server itself would only
// log that.
func (c *Core) canListen(ctx context.Context) error {
	for _, a := range []struct {
		host string
		port int
	}{{c.opts.Host, c.opts.Port}, {c.opts.Cluster.Host, c.opts.Cluster.Port}} {
		if a.port <= 0 {
			continue
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(a.host, strconv.Itoa(a.port)))
		if err != nil {
			return fail.New(fail.Host, "start the cluster's server: %w", err).WithHint("lsof -i :%d", a.port)
		}
		l.Close()
	}
	return nil
}

// minSpace is how much space the disk must have, in bytes, before a server that could not write to it starts again.
const minSpace = 16 << 20

// Failed reports whether the server could not write to its disk. It does not write then until Restart, also if
// the disk has space again.
func (c *Core) Failed() bool {
	return c.opts.JetStream && (c.log.failed.Load() || !c.server.Load().JetStreamEnabled())
}

// Restart starts the server again if it failed and its disk has space. Connections to it end, and are made again
// by the hosts. The next call of Authorize lets the server remove others.
func (c *Core) Restart(ctx context.Context) error {
	var st unix.Statfs_t
	if err := unix.Statfs(c.opts.StoreDir, &st); err != nil {
		return fmt.Errorf("measure the space for the streams of the cluster: %w", err)
	}
	if free := int64(st.Bavail) * int64(st.Bsize); free < minSpace { //nolint:unconvert // not int64 on darwin
		return fail.New(fail.Host, "the disk of %s is full: the cluster's server cannot write to it", c.opts.StoreDir).WithHint("agent-sessionizer image prune")
	}
	c.Stop()
	c.log.failed.Store(false)
	return c.start(ctx)
}

// InProcessConn implements nats.InProcessConnProvider.
func (c *Core) InProcessConn() (net.Conn, error) { return c.server.Load().InProcessConn() }

// holdStreams makes a server hold streams, together with those of other cores.
func (o CoreOptions) holdStreams(opts *server.Options) error {
	host, port, err := address(o.Route)
	if err != nil {
		return err
	}
	opts.JetStream, opts.StoreDir, opts.JetStreamMaxMemory, opts.JetStreamMaxStore = true, o.Dir, maxMemory, o.Store
	opts.JetStreamLimits = server.JSLimitOpts{DefaultMaxConsumers: maxConsumers}
	opts.SyncAlways = true // otherwise a majority that loses its power loses acknowledged entries
	opts.Cluster = server.ClusterOpts{
		Name: o.Cluster, Host: host, Port: port,
		NoAdvertise: o.Witness, // its address means nothing to other hosts
	}
	if !o.Witness {
		opts.Tags = []string{coreTag}
	}
	for _, p := range o.Peers {
		opts.Routes = append(opts.Routes, &url.URL{Scheme: "nats-route", Host: p})
	}
	return nil
}

// external reports whether others hold the streams.
func (c *Core) external() bool { return len(c.opts.LeafNode.Remotes) > 0 }

// checkCore decides about another server.
func (c *Core) checkCore(i Identity) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !i.Role.Allows(CoreOf) || !c.cores[i.Nkey] {
		return fail.New(fail.Policy, "host %s is not a core of the cluster", i.Name)
	}
	return nil
}

// address splits HOST:PORT for NATS, whose port 0 means the usual one.
func address(text string) (host string, port int, err error) {
	host, name, err := net.SplitHostPort(text)
	if err == nil {
		port, err = strconv.Atoi(name)
	}
	if err != nil {
		return "", 0, fail.New(fail.Usage, "address %q must be HOST:PORT", text)
	}
	if port == 0 {
		port = server.RANDOM_PORT
	}
	return host, port, nil
}

// Connect logs in as this host, without using the network.
func (c *Core) Connect() (*nats.Conn, error) {
	opts, err := login(c.keys.nkey)
	if err != nil {
		return nil, err
	}
	return c.connect(opts...)
}

func (c *Core) connect(opts ...nats.Option) (*nats.Conn, error) {
	return nats.Connect("", append(opts, nats.InProcessServer(c), nats.MaxReconnects(-1), nats.ReconnectWait(reconnectPause))...)
}

// Routes returns the address at which other cores reach the server.
func (c *Core) Routes() string { return c.server.Load().ClusterAddr().String() }

// Current reports whether the server knows all that the cluster has decided: if others hold the streams,
// whether it is connected to them.
func (c *Core) Current() bool {
	if c.external() {
		return c.server.Load().NumLeafNodes() > 0
	}
	return c.server.Load().JetStreamIsCurrent()
}

// Stop ends the server and waits for its end.
func (c *Core) Stop() {
	s := c.server.Load()
	s.Shutdown()
	s.WaitForShutdown()
}

// witnessOf returns the name of a core's witness.
func witnessOf(core string) string { return core + "-witness" }

// StartFirst starts the first core of a cluster, and a witness: a server that is alone among
// its cluster never elects a leader. The witness's directory is below that of the core. Once
// the cluster has three cores, RemoveServer removes it.
func StartFirst(ctx context.Context, o CoreOptions, witnessRoute string) (core, witness *Core, err error) {
	w := o
	w.Name, w.Dir, w.Witness = witnessOf(o.Name), filepath.Join(o.Dir, "witness"), true
	w.Listen, w.Route, w.Peers = "127.0.0.1:0", witnessRoute, []string{o.Route}
	if witness, err = StartCore(ctx, w); err != nil {
		return nil, nil, err
	}
	o.Peers = append([]string{witnessRoute}, o.Peers...)
	if core, err = StartCore(ctx, o); err != nil {
		witness.Stop()
		return nil, nil, err
	}
	return core, witness, nil
}

// serverLog writes the server's messages to the program's log. Most of its notices are about
// its own state, so they have the level debug, like its warnings: they appear at each start of a cluster,
// and about the verification of certificates, of which it does not see that they are verified.
type serverLog struct {
	log    *slog.Logger
	failed *atomic.Bool // it could not write to its disk
}

func (l serverLog) write(level slog.Level, format string, v []any) {
	l.log.Log(context.Background(), level, "NATS server", "message", fmt.Sprintf(format, v...))
}

func (l serverLog) Noticef(format string, v ...any) { l.write(slog.LevelDebug, format, v) }
func (l serverLog) Warnf(format string, v ...any)   { l.write(slog.LevelDebug, format, v) }

// diskFailed matches messages of the server's stores.
var diskFailed = lazyregexp.New(`^(Filestore|RAFT|JetStream) .*[Cc]ritical write error`)

func (l serverLog) Errorf(format string, v ...any) {
	// The server says so in no other way as long as it does not disable all streams. Messages about a client,
	// who chooses some of their text, begin with its address.
	if diskFailed.MatchString(format) {
		l.failed.Store(true)
	}
	l.write(slog.LevelWarn, format, v)
}
func (l serverLog) Fatalf(format string, v ...any) { l.write(slog.LevelError, format, v) }
func (l serverLog) Debugf(format string, v ...any) { l.write(slog.LevelDebug, format, v) }
func (l serverLog) Tracef(format string, v ...any) { l.write(slog.LevelDebug, format, v) }
