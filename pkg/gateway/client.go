package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Command is the hidden command that runs Main on a directory.
const Command = "gateway"

// ErrNotRunning is returned, wrapped, when no gateway runs in the directory.
var ErrNotRunning = errors.New("the session's gateway does not run")

const (
	startTimeout = 20 * time.Second // until a new process answers
	askTimeout   = 2 * time.Second  // for an answer of a process that runs
	quitTimeout  = 5 * time.Second  // until it is killed
	clientPoll   = 20 * time.Millisecond
)

// Process is the gateway of one session, as other processes see it. Its
// methods may be called at once from several processes.
type Process struct {
	Dir  string // its files
	Self string // our own binary
}

// Running reports whether the gateway's process lives; it may be frozen.
func (p Process) Running() bool {
	f, err := os.OpenFile(filepath.Join(p.Dir, lockFile), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// Start makes a gateway serve the wire under the policy. One that runs already
// is left alone but for the policy.
func (p Process) Start(ctx context.Context, w vm.Wire, pol *policy.Policy) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return fail.New(fail.Host, "make the gateway's directory: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	// One that another process has just started may not listen yet.
	for p.Running() {
		err := p.SetPolicy(ctx, pol)
		if !errors.Is(err, ErrNotRunning) && !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(clientPoll):
		}
	}
	b, err := json.Marshal(w)
	if err != nil {
		return err
	}
	if err := p.write(wireFile, b); err != nil {
		return err
	}
	if err := p.writePolicy(pol); err != nil {
		return err
	}
	pid, exited, err := p.spawn(ctx)
	if err != nil {
		return fail.New(fail.Host, "start the gateway: %w", err)
	}
	for {
		st, err := p.Status(ctx)
		if err == nil && st.PolicyError != "" {
			return fail.New(fail.Failure, "the gateway refuses the policy: %s", st.PolicyError)
		}
		if err == nil && (st.PID == pid || exited == nil) {
			return nil
		}
		// Where another process was faster, ours is not left behind: it could come so
		// late that the other one has ended, and would stand there for nobody.
		select {
		case <-ctx.Done():
			if err == nil {
				return nil
			}
			return fail.New(fail.Failure, "the gateway did not come up: %w%s", err, p.lastWords())
		case <-exited:
			if !p.Running() { // else another process was faster
				return fail.New(fail.Failure, "the gateway ended at once%s", p.lastWords())
			}
			exited = nil
		case <-time.After(clientPoll):
		}
	}
}

// spawn executes ourselves as the gateway, in a session of its own: it must outlive
// us. Of the environment it gets what says how to reach the internet. The channel is
// closed when it has ended.
func (p Process) spawn(ctx context.Context) (pid int, _ <-chan struct{}, _ error) {
	log, err := os.OpenFile(filepath.Join(p.Dir, logFile), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return 0, nil, err
	}
	defer log.Close()
	cmd := exec.CommandContext(context.WithoutCancel(ctx), p.Self, Command, p.Dir)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = []string{}
	for _, name := range []string{"HOME", "PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR"} {
		if v, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	if err := cmd.Start(); err != nil {
		return 0, nil, err
	}
	exited := make(chan struct{})
	go func() { // lives as long as the gateway or we do; it only reaps
		defer close(exited)
		_ = cmd.Wait()
	}()
	return cmd.Process.Pid, exited, nil
}

// SetPolicy puts a policy in force at once. It is written first, so that a
// gateway that is started next has it too.
func (p Process) SetPolicy(ctx context.Context, pol *policy.Policy) error {
	if err := p.writePolicy(pol); err != nil {
		return err
	}
	var st Status
	if err := p.ask(ctx, http.MethodPost, "reload", &st); err != nil {
		return err
	}
	if st.PolicyError != "" {
		return fail.New(fail.Failure, "the gateway refuses the policy: %s", st.PolicyError)
	}
	return nil
}

// Status asks the gateway; a frozen one does not answer within two seconds.
func (p Process) Status(ctx context.Context) (Status, error) {
	var st Status
	err := p.ask(ctx, http.MethodGet, "status", &st)
	return st, err
}

// Stop ends the gateway, if need be the hard way, and waits for its end.
func (p Process) Stop(ctx context.Context) error {
	if !p.Running() {
		return nil
	}
	// A frozen one does not hear this; the wait below finds out.
	_ = p.ask(ctx, http.MethodPost, "quit", nil)
	if p.gone(ctx, quitTimeout) {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(p.Dir, lockFile))
	if err != nil {
		return fmt.Errorf("stop the gateway: %w", err)
	}
	// The pid in the file is that of the lock's holder, so it is no other's.
	if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && pid > 1 && p.Running() {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill the gateway: %w", err)
		}
	}
	if !p.gone(ctx, quitTimeout) {
		return fail.New(fail.Failure, "the gateway in %s cannot be ended", p.Dir)
	}
	return nil
}

func (p Process) gone(ctx context.Context, within time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for p.Running() {
		select {
		case <-ctx.Done():
			return !p.Running()
		case <-time.After(clientPoll):
		}
	}
	return true
}

// ask calls the gateway over its socket.
func (p Process) ask(ctx context.Context, method, what string, into any) error {
	if !p.Running() {
		return ErrNotRunning
	}
	var w vm.Wire
	b, err := os.ReadFile(filepath.Join(p.Dir, wireFile))
	if err == nil {
		err = json.Unmarshal(b, &w)
	}
	if err != nil {
		return fmt.Errorf("ask the gateway: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, askTimeout, fmt.Errorf("no answer within %v", askTimeout))
	defer cancel()
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", w.API)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://gateway"+control+what, nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("ask the gateway: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("ask the gateway: %s", resp.Status)
	}
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(into); err != nil {
		return fmt.Errorf("ask the gateway: %w", err)
	}
	return nil
}

func (p Process) writePolicy(pol *policy.Policy) error {
	b, err := policy.Marshal(pol)
	if err != nil {
		return err
	}
	return p.write(policyFile, b)
}

// write replaces a file such that a reader sees the old one or the new one.
func (p Process) write(name string, b []byte) error {
	if err := atomicfile.Write(filepath.Join(p.Dir, name), b, 0o600); err != nil {
		return fail.New(fail.Host, "write the gateway's %s: %w", name, err)
	}
	return nil
}

// lastWords is the end of the gateway's log, for an error.
func (p Process) lastWords() string {
	b, err := readFile(filepath.Join(p.Dir, logFile), 1<<20)
	if err != nil || len(b) == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return ": " + lines[len(lines)-1]
}

// LogFile is where the gateway in dir writes what it has to say of itself.
func LogFile(dir string) string { return filepath.Join(dir, logFile) }
