package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Command is the hidden command that runs Main for a directory.
const Command = "gateway"

// ErrNotRunning is returned, wrapped, when no gateway runs in the directory.
var ErrNotRunning = errors.New("the session's gateway is not running")

const (
	startTimeout = 20 * time.Second // for a new process to answer
	askTimeout   = 2 * time.Second  // for a running process to answer
	quitTimeout  = 5 * time.Second  // before the process is killed
	clientPoll   = 20 * time.Millisecond
)

// Process is another process's handle on the gateway of one session. Several processes may
// call its methods at the same time.
type Process struct {
	Dir  string // holds the gateway's files
	Self string // path of this program's binary
}

// Running reports whether the gateway's process exists. The process may be frozen.
func (p Process) Running() bool {
	return lockfile.Held(filepath.Join(p.Dir, lockFile))
}

// Start starts a gateway that serves the sockets in w under the policy. If a gateway
// already runs, Start only changes its policy.
func (p Process) Start(ctx context.Context, w vm.NetSockets, pol *policy.Policy) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return fail.New(fail.Host, "create the gateway's directory: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	// A gateway that another process has just started may not listen yet.
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
	if err := p.write(netConfigFile, b); err != nil {
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
			return fail.New(fail.Failure, "the gateway rejected the policy: %s", st.PolicyError)
		}
		if err == nil && (st.PID == pid || exited == nil) {
			return nil
		}
		// If another process started its gateway first, keep waiting until ours has exited.
		// Otherwise ours could start so late that the other one has ended, and would then
		// run with no process to stop it.
		select {
		case <-ctx.Done():
			if err == nil {
				return nil
			}
			return fail.New(fail.Failure, "the gateway did not start: %w%s", err, p.logTail())
		case <-exited:
			if !p.Running() { // otherwise another process was faster
				return fail.New(fail.Failure, "the gateway exited immediately%s", p.logTail())
			}
			exited = nil
		case <-time.After(clientPoll):
		}
	}
}

// spawn executes this program as the gateway, in its own process session because it must
// outlive the caller. It passes on only the environment variables that say how to reach the
// internet. The returned channel is closed when the process has exited.
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
	go func() { // only reaps; runs until the gateway or this process exits
		defer close(exited)
		_ = cmd.Wait()
	}()
	return cmd.Process.Pid, exited, nil
}

// SetPolicy applies a policy immediately. It writes the policy file first, so that a
// gateway started later uses the same policy.
func (p Process) SetPolicy(ctx context.Context, pol *policy.Policy) error {
	if err := p.writePolicy(pol); err != nil {
		return err
	}
	var st Status
	if err := p.ask(ctx, http.MethodPost, "reload", &st); err != nil {
		return err
	}
	if st.PolicyError != "" {
		return fail.New(fail.Failure, "the gateway rejected the policy: %s", st.PolicyError)
	}
	return nil
}

// WriteMetering says how the gateway counts the use of models, from the next Start or SetPolicy on.
func (p Process) WriteMetering(m Metering) error {
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return fail.New(fail.Host, "create the gateway's directory: %w", err)
	}
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return p.write(meteringFile, b)
}

// Inherit gives a gateway that has not started what a copy of another gateway's guest may know of
// that gateway: the certificate authority, the placeholders and the addresses of names.
func (p Process) Inherit(ctx context.Context, from Process) error {
	names := []string{}
	if err := from.ask(ctx, http.MethodGet, "names", &names); err != nil {
		names = readNames(filepath.Join(from.Dir, namesFile))
	}
	if err := os.MkdirAll(p.Dir, 0o700); err != nil {
		return fail.New(fail.Host, "create the gateway's directory: %w", err)
	}
	b, err := os.ReadFile(filepath.Join(from.Dir, rememberFile))
	if err == nil {
		err = atomicfile.Write(filepath.Join(p.Dir, rememberFile), b, 0o600)
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err = errors.Join(err, writeNames(filepath.Join(p.Dir, namesFile), names)); err != nil {
		return fail.New(fail.Host, "copy what the gateway remembers: %w", err)
	}
	return nil
}

// Remembered returns the key of the gateway's certificate authority and the placeholders, so that they can
// be found in other texts.
func (p Process) Remembered() (all []secret.Value, err error) {
	var r struct {
		Authority struct {
			Key string `json:"key"`
		} `json:"authority"`
		Placeholders map[string]string `json:"placeholders"`
	}
	text, err := os.ReadFile(filepath.Join(p.Dir, rememberFile))
	if err != nil {
		return nil, err
	}
	if json.Unmarshal(text, &r) != nil { // its error may quote a value
		return nil, fmt.Errorf("read %s: invalid JSON", filepath.Join(p.Dir, rememberFile))
	}
	for _, value := range r.Placeholders {
		all = append(all, secret.NewValue(value))
	}
	return append(all, secret.NewValue(r.Authority.Key)), nil
}

// SetSecrets replaces the secrets that the gateway puts in the place of their placeholders. They
// are in its memory only, and lost when it ends.
func (p Process) SetSecrets(ctx context.Context, secrets []Secret) (Interception, error) {
	return p.sendSecrets(ctx, "secrets", secrets)
}

// RestrictSecrets takes from the gateway what the settings no longer bind. Values do not matter.
func (p Process) RestrictSecrets(ctx context.Context, bound []Secret) error {
	_, err := p.sendSecrets(ctx, "secrets/restrict", bound)
	return err
}

func (p Process) sendSecrets(ctx context.Context, path string, secrets []Secret) (Interception, error) {
	in := secretsRequest{Secrets: []secretRequest{}}
	for _, s := range secrets {
		in.Secrets = append(in.Secrets, secretRequest{s.Name, s.Like, s.Value.Reveal(), s.Hosts, s.Body, s.Problem, s.Login})
	}
	body, err := json.Marshal(in)
	if err != nil {
		return Interception{}, errors.New("encode the secrets") // the error could quote one
	}
	var x Interception
	err = p.send(ctx, http.MethodPost, path, bytes.NewReader(body), &x)
	return x, err
}

// Interception asks the gateway what the guest needs at present.
func (p Process) Interception(ctx context.Context) (Interception, error) {
	var x Interception
	err := p.ask(ctx, http.MethodGet, "interception", &x)
	return x, err
}

// Status asks the gateway for its status. A frozen gateway does not answer within two
// seconds.
func (p Process) Status(ctx context.Context) (Status, error) {
	var st Status
	err := p.ask(ctx, http.MethodGet, "status", &st)
	return st, err
}

// Stop ends the gateway, killing it if necessary, and waits until it has exited.
func (p Process) Stop(ctx context.Context) error {
	if !p.Running() {
		return nil
	}
	// A frozen gateway does not receive this; the wait below detects that.
	_ = p.ask(ctx, http.MethodPost, "quit", nil)
	if p.waitGone(ctx, quitTimeout) {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(p.Dir, lockFile))
	if err != nil {
		return fmt.Errorf("stop the gateway: %w", err)
	}
	// The file holds the pid of the process that holds the lock, so the pid cannot belong
	// to another process.
	if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && pid > 1 && p.Running() {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill the gateway: %w", err)
		}
	}
	if !p.waitGone(ctx, quitTimeout) {
		return fail.New(fail.Failure, "the gateway in %s could not be stopped", p.Dir)
	}
	return nil
}

func (p Process) waitGone(ctx context.Context, within time.Duration) bool {
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
	return p.send(ctx, method, what, nil, into)
}

// send calls the gateway with a body.
func (p Process) send(ctx context.Context, method, what string, body io.Reader, into any) error {
	if !p.Running() {
		return ErrNotRunning
	}
	var w vm.NetSockets
	b, err := os.ReadFile(filepath.Join(p.Dir, netConfigFile))
	if err == nil {
		err = json.Unmarshal(b, &w)
	}
	if err != nil {
		return fmt.Errorf("query the gateway: %w", err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, askTimeout, fmt.Errorf("no answer within %v", askTimeout))
	defer cancel()
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", w.API)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://gateway"+control+what, body)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("query the gateway: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("query the gateway: %s", resp.Status)
	}
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(into); err != nil {
		return fmt.Errorf("query the gateway: %w", err)
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

// write replaces a file atomically: a reader sees either the old content or the new.
func (p Process) write(name string, b []byte) error {
	if err := atomicfile.Write(filepath.Join(p.Dir, name), b, 0o600); err != nil {
		return fail.New(fail.Host, "write the gateway's %s: %w", name, err)
	}
	return nil
}

// logTail returns the last line of the gateway's log, for use in an error.
func (p Process) logTail() string {
	b, err := readFile(filepath.Join(p.Dir, logFile), 1<<20)
	if err != nil || len(b) == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return ": " + lines[len(lines)-1]
}

// LogFile returns the path of the log that the gateway in dir writes.
func LogFile(dir string) string { return filepath.Join(dir, logFile) }
