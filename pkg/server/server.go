// Package server implements `serve`: the HTTP API for tasks and sessions, its
// streams, and its metrics.
//
// It owns no work. Like the commands, it writes the desired phases that clients
// request to the store; the work is done by keepers, which are other processes. If
// serve is killed, the tasks continue. The only exceptions are the commands that it
// runs in guests for its clients: they end with it.
//
// It treats clients as hostile. It bounds the size and duration of everything that
// a client sends, and the memory for a client does not grow with unread data. A
// client never learns a secret and never supplies a path on this host.
package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/net/netutil"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Options configures a Server. Only Engine and Log are required.
type Options struct {
	Engine  ops.Engine // the server sets its Execs and Scheduled
	Log     *slog.Logger
	Version string
	Limits  Limits
	Agentic bool // also export the metrics under the names agentic_*

	// Listen is an additional address for clients with tokens. It must be a
	// loopback address of this host. With Expose it may be any other address, which
	// needs a certificate. "" listens on the socket only.
	Listen            string
	Expose            bool
	CertFile, KeyFile string
}

// Limits bounds the resources that clients can use. Zero fields have defaults.
type Limits struct {
	Header    time.Duration // for a request's header to arrive; 10 s
	Body      time.Duration // for its body; 30 s
	Write     time.Duration // for the client to receive the next part of a response; 30 s
	Tunnel    time.Duration // for either end of a tunnel to read what the other sent; 2 min
	Idle      time.Duration // between two requests on a connection; 2 min
	Beat      time.Duration // between two heartbeats on a stream; 15 s
	Shutdown  time.Duration // for running requests and commands to end; 10 s
	Conns     int           // per listener; 1024
	Streams   int           // of all clients; 512
	Each      int           // streams per client; 128
	Execs     int           // commands in guests; 32
	Costly    int           // operations that read much or work in guests, at once; 8
	ExecBytes int64         // kept per output of a command; 64 MiB
	Failures  int           // wrong tokens per minute and address before the answer is 429; 10
}

const (
	maxHeader = 32 << 10
	maxBody   = 1<<20 + 64<<10 // a manifest and its JSON wrapper
	maxSpill  = 256 << 20      // of a too large body, read after the response
	maxURI    = 8 << 10
)

func (l Limits) withDefaults() Limits {
	duration := func(d *time.Duration, is time.Duration) {
		if *d == 0 {
			*d = is
		}
	}
	number := func(n *int, is int) {
		if *n == 0 {
			*n = is
		}
	}
	duration(&l.Header, 10*time.Second)
	duration(&l.Body, 30*time.Second)
	duration(&l.Write, 30*time.Second)
	duration(&l.Tunnel, 2*time.Minute)
	duration(&l.Idle, 2*time.Minute)
	duration(&l.Beat, 15*time.Second)
	duration(&l.Shutdown, 10*time.Second)
	number(&l.Conns, 1024)
	number(&l.Streams, 512)
	number(&l.Each, 128)
	number(&l.Execs, 32)
	number(&l.Costly, 8)
	number(&l.Failures, 10)
	if l.ExecBytes == 0 {
		l.ExecBytes = 64 << 20
	}
	return l
}

// Server serves the API. Its methods may be called concurrently.
type Server struct {
	o       Options
	limits  Limits
	log     *slog.Logger
	engine  ops.Engine
	tasks   *task.Manager
	store   *store.Store
	tokens  *Tokens
	mux     *http.ServeMux
	doc     document
	metrics *metrics
	execs   *execs
	user    string // user of this process, for the audit log
	logins  *logins
	views   *overviews

	wrong   throttle
	streams slots
	kick    chan struct{} // a task was submitted

	ending  sync.Mutex     // held while a stream begins, and while closing is closed
	closing chan struct{}  // closed when serve ends
	open    sync.WaitGroup // streams, whose connections net/http may no longer track
}

// New returns a server that does not listen yet.
func New(o Options) (*Server, error) {
	tasks := o.Engine.Tasks
	paths := tasks.Sessions.Config.Paths
	s := &Server{
		o: o, limits: o.Limits.withDefaults(), log: o.Log, engine: o.Engine, tasks: tasks, store: tasks.Sessions.Store,
		tokens: TokensIn(paths.State), kick: make(chan struct{}, 1), closing: make(chan struct{}),
		logins: newLogins(),
	}
	s.user = fmt.Sprintf("uid:%d", os.Geteuid())
	if u, err := user.Current(); err == nil {
		s.user = "user:" + u.Username
	}
	s.wrong = throttle{most: s.limits.Failures, per: time.Minute}
	s.streams = slots{each: s.limits.Each, all: s.limits.Streams}
	var err error
	if s.metrics, err = newMetrics(s, o.Agentic); err != nil {
		return nil, err
	}
	s.execs = newExecs(s, ids.Hex(8))
	s.engine.Execs, s.engine.Scheduled = s.execs, s.submitted
	s.views = &overviews{server: s}
	s.engine.Disk = &ops.DiskCache{}
	s.engine.DashboardLink = s.createDashboardLink
	s.engine.Costly = make(chan struct{}, s.limits.Costly)
	s.mux, s.doc = s.routes()
	return s, nil
}

// Socket returns the path of the API's socket below the state directory.
func Socket(state string) string { return filepath.Join(state, "serve.sock") }

// TokensIn returns the file of tokens below the state directory.
func TokensIn(state string) *Tokens { return &Tokens{Path: filepath.Join(state, "serve-tokens.json")} }

// endpoint is a listener's endpoint and its means of authentication.
type endpoint struct {
	own  bool // the socket: every client is this user
	peer bool // the cluster: every client is another host
	tls  bool
	port string
	ip   netip.Addr
	cert *x509.Certificate // certificate with further names of this server; nil for none
}

// handler returns the handler for one endpoint.
func (s *Server) handler(d endpoint) http.Handler { return &middleware{server: s, endpoint: d} }

func (s *Server) server(base context.Context, d endpoint) *http.Server {
	return &http.Server{
		BaseContext:       func(net.Listener) context.Context { return base },
		Handler:           s.handler(d),
		ReadHeaderTimeout: s.limits.Header,
		IdleTimeout:       s.limits.Idle,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),      // caused by clients
		TLSNextProto:      map[string]func(*http.Server, *tls.Conn, http.Handler){}, // only HTTP/1.1, which the limits above bound
	}
}

func lockPath(p config.Paths) string { return filepath.Join(p.State, "locks", "serve") }

func errRuns(p config.Paths) error {
	return fail.New(fail.Conflict, "serve is already running on %s", Socket(p.State)).WithHint("curl --unix-socket %s http://localhost/api/health", Socket(p.State))
}

// CheckStopped returns an error if a server of this user runs.
func CheckStopped(p config.Paths) error {
	if lockfile.Held(lockPath(p)) {
		return errRuns(p)
	}
	return nil
}

// Run serves until ctx ends, and then shuts down gracefully. It calls ready with
// the address of the second listener, or "" if there is none.
func (s *Server) Run(ctx context.Context, ready func(addr string)) (err error) {
	paths := s.tasks.Sessions.Config.Paths
	lock, ok, err := lockfile.Try(lockPath(paths))
	if err != nil {
		return fail.New(fail.Host, "%w", err)
	}
	if !ok {
		return errRuns(paths)
	}
	defer func() { err = errors.Join(err, lock.Unlock()) }()

	if err := s.execs.recordLost(ctx); err != nil {
		s.log.Error("failed to record lost commands", "error", err)
	}

	// Open both listeners before serving: an address in use must not cost a client
	// its response.
	var endpoints []endpoint
	var listeners []net.Listener
	closeAll := func() {
		for _, l := range listeners {
			_ = l.Close()
		}
	}
	if s.o.Listen != "" {
		l, d, err := s.listenTCP(ctx)
		if err != nil {
			return err
		}
		listeners, endpoints = append(listeners, l), append(endpoints, d)
		s.logins.base = d.base()
	}
	own, err := listenUnix(ctx, Socket(paths.State), s.log)
	if err != nil {
		closeAll()
		return err
	}
	listeners, endpoints = append(listeners, own), append(endpoints, endpoint{own: true})

	base, abandon := context.WithCancel(context.WithoutCancel(ctx)) // requests may finish, up to the shutdown limit
	defer abandon()
	ended := make(chan error, len(listeners))
	var servers []*http.Server
	for i, l := range listeners {
		srv := s.server(base, endpoints[i])
		servers = append(servers, srv)
		go func() { ended <- srv.Serve(netutil.LimitListener(l, s.limits.Conns)) }()
	}
	work, stop := context.WithCancel(context.WithoutCancel(ctx)) // until after the last response
	var background sync.WaitGroup
	background.Go(func() { s.reconcile(work) })
	background.Go(func() { s.metrics.observe(work) })
	background.Go(func() { s.watchdog(work, Socket(paths.State)) })
	background.Go(func() { s.servePeers(work, base) })
	addr := ""
	if s.o.Listen != "" {
		addr = listeners[0].Addr().String()
	}
	s.log.Info("serving", "socket", Socket(paths.State), "listen", addr)
	ready(addr)
	s.notify("READY=1")

	running := len(servers)
	select {
	case <-ctx.Done():
	case err = <-ended:
		running--
		err = fail.New(fail.Host, "serve: %w", err)
	}
	s.notify("STOPPING=1")
	s.shutdown()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.limits.Shutdown)
	defer cancel()
	for _, srv := range servers {
		if srv.Shutdown(grace) != nil {
			_ = srv.Close() // the remaining clients have used up their time
		}
	}
	for range running {
		if end := <-ended; !errors.Is(end, http.ErrServerClosed) {
			err = errors.Join(err, end)
		}
	}
	s.execs.wait(grace)
	waitFor(grace, &s.open)
	abandon()
	stop()
	background.Wait()
	s.log.Info("server stopped")
	return err
}

// shutdown makes streams and commands end, and prevents new ones.
func (s *Server) shutdown() {
	s.ending.Lock()
	defer s.ending.Unlock()
	select {
	case <-s.closing:
	default:
		close(s.closing)
	}
}

// waitFor waits for the group, or until ctx ends.
func waitFor(ctx context.Context, g *sync.WaitGroup) {
	done := make(chan struct{})
	go func() { g.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

const (
	reconcileEvery = 5 * time.Second
	// A burst of submissions is admitted together: once no more arrive for
	// submitPause, or after submitMost. Otherwise the first tasks would take
	// processor time that accepting the others needs.
	submitPause = 20 * time.Millisecond
	submitMost  = time.Second
)

// reconcile starts missing keepers at intervals, as every command does when it
// starts.
func (s *Server) reconcile(ctx context.Context) {
	tick := time.NewTicker(reconcileEvery)
	defer tick.Stop()
	lastError := ""
	for {
		err := s.tasks.ReconcileAll(ctx)
		for waiting := true; waiting; {
			if ctx.Err() != nil {
				return
			}
			switch {
			case err == nil:
				lastError = ""
			case err.Error() != lastError: // log once, not every time
				s.log.Error("failed to reconcile", "error", err)
				lastError = err.Error()
			}
			select {
			case <-tick.C:
				waiting = false
			case <-s.kick:
				s.waitSubmissions(ctx)
				err = s.tasks.Schedule(ctx)
			case <-ctx.Done():
				return
			}
		}
	}
}

// waitSubmissions waits until no task was submitted for submitPause, or for submitMost.
func (s *Server) waitSubmissions(ctx context.Context) {
	most := time.NewTimer(submitMost)
	defer most.Stop()
	for {
		select {
		case <-s.kick:
		case <-time.After(submitPause):
			return
		case <-most.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// submitted makes reconcile schedule the queue soon.
func (s *Server) submitted() {
	select {
	case s.kick <- struct{}{}:
	default: // already requested
	}
}
