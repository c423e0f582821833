// Package server is `serve`: the HTTP API over tasks and sessions, its streams,
// and its metrics.
//
// It owns nothing. What it is told it writes to the store as an intent, as the
// commands do; the work is keepers', which are other processes. Kill it, and the
// tasks go on. The one exception are the commands that it runs in guests for its
// clients: these end with it.
//
// A client may be hostile: what it sends is bounded in size and in time, and
// what is kept for it does not grow with what it does not read. It never learns
// a secret, and no path on this host comes from it.
package server

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Options of a Server. Only Tasks and Log must be there.
type Options struct {
	Tasks   *task.Manager
	Log     *slog.Logger
	Version string
	Limits  Limits
	Agentic bool // the metrics also under the names agentic_*

	// Listen is where clients with tokens come, besides the socket: an address of
	// this host's loopback, unless Expose says that it may be any other, which
	// needs a certificate. "" listens on the socket only.
	Listen            string
	Expose            bool
	CertFile, KeyFile string
}

// Limits bound what clients can take of this host. Zero fields have defaults.
type Limits struct {
	Header    time.Duration // for a request's header to come; 10 s
	Body      time.Duration // for its body; 30 s
	Write     time.Duration // for the client to take the next part of an answer; 30 s
	Idle      time.Duration // between two requests on a connection; 2 min
	Beat      time.Duration // between two signs of life on a stream; 15 s
	Shutdown  time.Duration // for what runs to come to its end; 10 s
	Conns     int           // on each listener; 1024
	Streams   int           // of all clients; 512
	Each      int           // streams of one client; 128
	Execs     int           // commands in guests; 32
	ExecBytes int64         // of each of a command's outputs that are kept; 64 MiB
	Failures  int           // wrong tokens per minute and address that are answered as such; 10
}

const (
	maxHeader = 32 << 10
	maxBody   = 1<<20 + 64<<10 // a manifest, and what wraps it
	maxSpill  = 256 << 20      // of a body that is too large, to be read after the answer
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
	duration(&l.Idle, 2*time.Minute)
	duration(&l.Beat, 15*time.Second)
	duration(&l.Shutdown, 10*time.Second)
	number(&l.Conns, 1024)
	number(&l.Streams, 512)
	number(&l.Each, 128)
	number(&l.Execs, 32)
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
	tasks   *task.Manager
	store   *store.Store
	tokens  *Tokens
	mux     *http.ServeMux
	doc     document
	metrics *metrics
	execs   *execs
	user    string // this process's, for the audit log

	wrong   throttle
	streams places
	kick    chan struct{} // somebody submitted

	ending  sync.Mutex     // held while a stream begins, and while closing is closed
	closing chan struct{}  // closed when serve ends
	open    sync.WaitGroup // streams, whose connections net/http may know no more
}

// New makes a server; nothing listens yet.
func New(o Options) (*Server, error) {
	paths := o.Tasks.Sessions.Config.Paths
	s := &Server{
		o: o, limits: o.Limits.withDefaults(), log: o.Log, tasks: o.Tasks, store: o.Tasks.Sessions.Store,
		tokens: TokensIn(paths.State), kick: make(chan struct{}, 1), closing: make(chan struct{}),
	}
	s.user = fmt.Sprintf("uid:%d", os.Geteuid())
	if u, err := user.Current(); err == nil {
		s.user = "user:" + u.Username
	}
	s.wrong = throttle{most: s.limits.Failures, per: time.Minute}
	s.streams = places{each: s.limits.Each, all: s.limits.Streams}
	var err error
	if s.metrics, err = newMetrics(s, o.Agentic); err != nil {
		return nil, err
	}
	s.execs = newExecs(s, randomHex(8))
	if s.mux, s.doc, err = s.routes(); err != nil {
		return nil, err
	}
	return s, nil
}

// Socket is the path of the API's socket below the state directory.
func Socket(state string) string { return filepath.Join(state, "serve.sock") }

// TokensIn is the file of tokens below the state directory.
func TokensIn(state string) *Tokens { return &Tokens{Path: filepath.Join(state, "serve-tokens.json")} }

// door is a way in, and who comes through it.
type door struct {
	own  bool // the socket: whoever is at the other end is this user
	tls  bool
	port string
	ip   netip.Addr
	cert *x509.Certificate // whose names are ours, beside the loopback's; nil for none
}

// Handler answers for one way in.
func (s *Server) handler(d door) http.Handler { return &guard{Server: s, door: d} }

func (s *Server) server(base context.Context, d door) *http.Server {
	return &http.Server{
		BaseContext:       func(net.Listener) context.Context { return base },
		Handler:           s.handler(d),
		ReadHeaderTimeout: s.limits.Header,
		IdleTimeout:       s.limits.Idle,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),      // of clients' doing
		TLSNextProto:      map[string]func(*http.Server, *tls.Conn, http.Handler){}, // HTTP/1.1: its bounds are those above
	}
}

// Run serves until ctx ends, and then brings what runs to its end. ready is told
// where the second listener is, if there is one.
func (s *Server) Run(ctx context.Context, ready func(addr string)) (err error) {
	paths := s.tasks.Sessions.Config.Paths
	lock, ok, err := store.TryLock(filepath.Join(paths.State, "locks", "serve"))
	if err != nil {
		return fail.New(fail.Host, "%w", err)
	}
	if !ok {
		return fail.New(fail.Conflict, "serve runs already, on %s", Socket(paths.State)).WithHint("curl --unix-socket %s http://localhost/api/health", Socket(paths.State))
	}
	defer func() { err = errors.Join(err, lock.Unlock()) }()

	if err := s.execs.recordLost(ctx); err != nil {
		s.log.Error("record commands that were lost", "error", err)
	}

	// Both before anything is served: an address in use must not cost a client its answer.
	var doors []door
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
		listeners, doors = append(listeners, l), append(doors, d)
	}
	own, err := listenUnix(ctx, Socket(paths.State), s.log)
	if err != nil {
		closeAll()
		return err
	}
	listeners, doors = append(listeners, own), append(doors, door{own: true})

	base, abandon := context.WithCancel(context.WithoutCancel(ctx)) // requests end in their own time, unless that is over
	defer abandon()
	ended := make(chan error, len(listeners))
	var servers []*http.Server
	for i, l := range listeners {
		srv := s.server(base, doors[i])
		servers = append(servers, srv)
		go func() { ended <- srv.Serve(netutil.LimitListener(l, s.limits.Conns)) }()
	}
	work, stop := context.WithCancel(context.WithoutCancel(ctx)) // until after the last answer
	var background sync.WaitGroup
	background.Go(func() { s.reconcile(work) })
	background.Go(func() { s.metrics.observe(work) })
	background.Go(func() { s.watchdog(work, Socket(paths.State)) })
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
	s.end()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.limits.Shutdown)
	defer cancel()
	for _, srv := range servers {
		if srv.Shutdown(grace) != nil {
			_ = srv.Close() // the clients that are left had their time
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
	s.log.Info("served")
	return err
}

// end makes streams and commands end, and no more of them begin.
func (s *Server) end() {
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
	// The tasks that are submitted at once are admitted at once, when for submitPause
	// no more came, or after submitMost: what a task starts takes the processors that
	// accepting the others needs.
	submitPause = 20 * time.Millisecond
	submitMost  = time.Second
)

// reconcile sees to keepers, as every command does when it starts.
func (s *Server) reconcile(ctx context.Context) {
	tick := time.NewTicker(reconcileEvery)
	defer tick.Stop()
	told := ""
	for {
		err := errors.Join(s.tasks.Sessions.Reconcile(ctx), s.tasks.Reconcile(ctx))
		for waiting := true; waiting; {
			if ctx.Err() != nil {
				return
			}
			switch {
			case err == nil:
				told = ""
			case err.Error() != told: // once, not for as long as it lasts
				s.log.Error("reconcile", "error", err)
				told = err.Error()
			}
			select {
			case <-tick.C:
				waiting = false
			case <-s.kick:
				s.settle(ctx)
				err = s.tasks.Schedule(ctx)
			case <-ctx.Done():
				return
			}
		}
	}
}

// settle waits until nobody submits for a while, or for long enough.
func (s *Server) settle(ctx context.Context) {
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

// submitted makes the queue be looked at soon.
func (s *Server) submitted() {
	select {
	case s.kick <- struct{}{}:
	default: // it will be anyway
	}
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	_, _ = rand.Read(b) // never fails, says crypto/rand
	return hex.EncodeToString(b)
}
