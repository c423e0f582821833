package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Files in a gateway's directory, besides the decision log.
const (
	netConfigFile = "netsockets.json" // holds vm.NetSockets
	policyFile    = "policy.json"     // the compiled policy
	meteringFile  = "metering.json"   // holds Metering
	rememberFile  = "remember.json"   // Options.Remember
	namesFile     = "names.json"      // Options.Names, written at the end
	lockFile      = "lock"            // held while the gateway runs; contains its pid
	logFile       = "gateway.log"
)

const (
	// attachTimeout is how long a gateway waits for its VM. It is long because an image
	// may have to be downloaded first. It matters only if no process is left to stop
	// the gateway.
	attachTimeout = time.Hour

	// memoryLimit is a soft limit for the Go heap. Beyond it the garbage collector
	// works harder. Gateway stops accepting connections at maxHeap.
	memoryLimit = 64 << 20

	maxMetering = 1 << 20 // bytes of its file
	maxRecent   = 1000    // names in namesFile

	control = "/agent-sessionizer/" // path of our own part of the socket that serves Lima's API
)

// Status is the state that a gateway reports.
type Status struct {
	PID         int         `json:"pid"`
	Started     time.Time   `json:"started"`
	Mode        policy.Mode `json:"mode"` // of the policy in force; "" without a policy, when nothing gets out
	Names       int         `json:"names"`
	PolicyError string      `json:"policy_error,omitempty"` // why there is no policy
	LogErr      string      `json:"log_error,omitempty"`    // the gateway decides even if it cannot log
	UsageErr    string      `json:"usage_error,omitempty"`  // why the use of models is not counted
	Detached    bool        `json:"detached"`               // the VM's network has ended for good
	Stats       Stats       `json:"stats"`
	Budget      *BudgetNote `json:"budget,omitempty"`    // the last one
	Exhausted   *BudgetNote `json:"exhausted,omitempty"` // the limit of the session for which a request was refused last
	Held        []Held      `json:"held,omitempty"`      // targets that connections of the guest wait for, the oldest first
}

// server runs a gateway as its own process.
type server struct {
	dir       string
	log       *slog.Logger
	gateway   *Gateway
	decisions *decisionLog
	started   time.Time
	quit      chan struct{}
	once      sync.Once

	mu        sync.Mutex
	policy    *policy.Policy
	policyErr error
}

// Main runs the gateway in dir until its VM disconnects or it receives a request to quit.
// Without a valid policy it runs and lets nothing out.
func Main(ctx context.Context, dir string, log *slog.Logger) error {
	debug.SetMemoryLimit(memoryLimit)
	debug.SetGCPercent(50)
	unix.Umask(0o077)
	lock, ok, err := lockfile.Try(filepath.Join(dir, lockFile))
	if err == nil && !ok {
		err = fail.New(fail.Conflict, "the gateway in %s is already running", dir)
	}
	if err != nil {
		return err
	}
	defer lock.Unlock()
	if err := lock.Mark(); err != nil {
		return err
	}
	var sockets vm.NetSockets
	b, err := os.ReadFile(filepath.Join(dir, netConfigFile))
	if err == nil {
		err = json.Unmarshal(b, &sockets)
	}
	if err != nil {
		return fail.New(fail.Failure, "read the VM's network sockets: %w", err)
	}
	s := &server{dir: dir, log: log, started: time.Now(), quit: make(chan struct{})}
	if s.decisions, err = openDecisionLog(dir); err != nil {
		return fail.New(fail.Host, "open the decision log: %w", err)
	}
	s.gateway, err = New(Options{
		Subnet: sockets.Subnet, MAC: sockets.MAC, MTU: sockets.MTU, Log: s.decisions.add,
		Remember: filepath.Join(dir, rememberFile), Names: readNames(filepath.Join(dir, namesFile)),
	})
	if err != nil {
		return errors.Join(fmt.Errorf("create the gateway: %w", err), s.decisions.close())
	}
	s.reload()
	leasing, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	following.Go(func() { s.followLease(leasing) })
	err = s.serve(ctx, sockets)
	cancel()
	following.Wait()
	return errors.Join(err, writeNames(filepath.Join(dir, namesFile), s.gateway.names.recentNames()), s.gateway.Close(), s.decisions.close())
}

// readNames returns the names that an earlier gateway wrote, none if it wrote none.
func readNames(path string) (names []string) {
	b, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(b, &names) != nil {
		return nil
	}
	return names[max(0, len(names)-maxRecent):]
}

func writeNames(path string, names []string) error {
	b, err := json.Marshal(names[max(0, len(names)-maxRecent):])
	if err != nil {
		return err
	}
	return atomicfile.Write(path, b, 0o600)
}

// serve opens the sockets, the API's last. A client that reaches the API therefore
// finds the other sockets, too.
func (s *server) serve(ctx context.Context, w vm.NetSockets) error {
	var listeners []*net.UnixListener
	defer func() {
		for _, l := range listeners {
			_ = l.Close() // a second time for those that were served; unlinks the socket
		}
	}()
	for _, path := range []string{w.Stream, w.Datagram, w.API} {
		l, err := listenUnix(path)
		if err != nil {
			return fail.New(fail.Host, "open the gateway's socket: %w", err)
		}
		listeners = append(listeners, l)
	}
	mux := http.NewServeMux()
	mux.Handle("/", s.gateway.API())
	mux.HandleFunc("GET "+control+"status", s.serveStatus)
	mux.HandleFunc("POST "+control+"reload", func(w http.ResponseWriter, r *http.Request) {
		s.reload()
		s.serveStatus(w, r)
	})
	mux.HandleFunc("POST "+control+"secrets", func(w http.ResponseWriter, r *http.Request) { s.secrets(w, r, s.gateway.SetSecrets) })
	mux.HandleFunc("POST "+control+"secrets/restrict", func(w http.ResponseWriter, r *http.Request) { s.secrets(w, r, s.gateway.RestrictSecrets) })
	mux.HandleFunc("GET "+control+"interception", func(w http.ResponseWriter, _ *http.Request) { s.answer(w, s.gateway.Interception()) })
	mux.HandleFunc("GET "+control+"names", func(w http.ResponseWriter, _ *http.Request) { s.answer(w, s.gateway.names.recentNames()) })
	mux.HandleFunc("POST "+control+"quit", func(http.ResponseWriter, *http.Request) { s.quitOnce() })
	api := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelWarn)}

	ended := make(chan error, len(listeners))
	go func() { ended <- s.gateway.ServeStream(listeners[0]) }()
	go func() { ended <- s.gateway.ServeDatagram(listeners[1]) }()
	go func() { ended <- api.Serve(listeners[2]) }()
	s.log.Info("gateway running")

	giveUp := time.AfterFunc(attachTimeout, func() {
		if s.gateway.Stats().FramesIn == 0 {
			s.log.Warn("no VM connected")
			s.quitOnce()
		}
	})
	defer giveUp.Stop()
	var err error
	running := len(listeners)
	select {
	case <-ctx.Done():
	case <-s.quit:
	case <-s.gateway.Detached():
		s.log.Info("VM disconnected")
	case err = <-ended:
		running--
		err = fmt.Errorf("serve: %w", err)
	}
	for _, l := range listeners {
		_ = l.Close()
	}
	err = errors.Join(err, api.Close())
	for range running {
		if e := <-ended; !errors.Is(e, net.ErrClosed) && !errors.Is(e, http.ErrServerClosed) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// listenUnix replaces the socket of an earlier gateway. That gateway is dead, because
// this process holds its lock.
func listenUnix(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
}

func (s *server) quitOnce() { s.once.Do(func() { close(s.quit) }) }

// reload applies the policy and the metering in the files. If the file is missing or damaged, no policy
// is in force: its writer will write it again, and until then nothing gets out that the
// policy may have forbidden.
func (s *server) reload() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readLease()
	b, err := readFile(filepath.Join(s.dir, policyFile), policy.MaxBytes)
	if err == nil {
		s.policy, err = policy.Unmarshal(b)
	}
	s.policyErr = err
	if s.policyErr == nil {
		s.policyErr = s.reloadMetering()
	}
	if s.policyErr != nil {
		s.policy = nil
		s.log.Error("no policy, all traffic denied", "error", s.policyErr)
	}
	s.gateway.SetPolicy(s.policy)
}

// reloadMetering applies the file, which exists for the gateways of sessions.
func (s *server) reloadMetering() error {
	b, err := readFile(filepath.Join(s.dir, meteringFile), maxMetering)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var m Metering
	if err == nil {
		err = json.Unmarshal(b, &m)
	}
	if err == nil {
		err = s.gateway.SetMetering(m)
	}
	return err
}

func (s *server) serveStatus(w http.ResponseWriter, _ *http.Request) {
	st := Status{PID: os.Getpid(), Started: s.started, Stats: s.gateway.Stats(), Budget: s.gateway.lastNote(), Exhausted: s.gateway.exhausted(), Held: s.gateway.held.list()}
	s.mu.Lock()
	if s.policy != nil {
		st.Mode, st.Names = s.policy.Mode, len(s.policy.Names)
	}
	if s.policyErr != nil {
		st.PolicyError = s.policyErr.Error()
	}
	s.mu.Unlock()
	if err := s.decisions.err(); err != nil {
		st.LogErr = err.Error()
	}
	if err := s.gateway.usageError(); err != nil {
		st.UsageErr = err.Error()
	}
	select {
	case <-s.gateway.Detached():
		st.Detached = true
	default:
	}
	s.answer(w, st)
}

// secrets changes the secrets, and answers with what the guest needs for them.
func (s *server) secrets(w http.ResponseWriter, r *http.Request, change func([]Secret) (Interception, error)) {
	var in secretsRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxSecretsBody)).Decode(&in); err != nil {
		http.Error(w, "the secrets cannot be read", http.StatusBadRequest) // without the decoder's error, which could quote one
		return
	}
	x, err := change(in.secrets())
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	s.answer(w, x)
}

func (s *server) answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		s.log.Warn("answering a request failed", "error", err)
	}
}

// readFile reads a file of at most limit bytes.
func readFile(path string, limit int64) ([]byte, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if st.Size() > limit {
		return nil, fmt.Errorf("%s: over %d bytes", path, limit)
	}
	return os.ReadFile(path)
}
