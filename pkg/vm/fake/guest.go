package fake

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	xssh "golang.org/x/crypto/ssh"

	"github.com/gofrs/flock"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// lockPatience allows for a killed process that has not yet released the lock.
const lockPatience = time.Second

// guest is a running VM as seen from inside its process.
type guest struct {
	machine
	spec   vm.Spec
	faults faults

	tasks sync.WaitGroup
	mu    sync.Mutex
	conns map[net.Conn]struct{}
	off   bool
}

// Main implements the hidden command fake-vm: it is the VM's process. Its arguments
// are the VM's directory and the faults file; it returns when powered off.
func Main(ctx context.Context, args []string) error {
	if len(args) != 2 {
		return errors.New("usage: fake-vm DIR FAULTS")
	}
	g := &guest{
		machine: machine{name: filepath.Base(args[0]), dir: args[0]},
		faults:  faults{path: args[1]}, conns: map[net.Conn]struct{}{},
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	cuts, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(cuts, syscall.SIGUSR1)
	go func() {
		defer close(done)
		for range cuts {
			g.breakConnections()
		}
	}()
	defer func() {
		signal.Stop(cuts)
		close(cuts)
		<-done
	}()
	return g.run(ctx)
}

func (g *guest) run(ctx context.Context) (err error) {
	lock, err := g.lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Close()
	if g.spec, err = readSpec(g.machine); err != nil {
		return err
	}
	if err := atomicfile.Write(g.file("pid"), []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600); err != nil {
		return fmt.Errorf("write pid: %w", err)
	}
	defer func() { err = errors.Join(err, os.Remove(g.file("pid"))) }()
	disconnect, err := g.connectCard(ctx)
	if err != nil {
		return err
	}
	defer disconnect()
	cfg, hostKey, err := g.sshd()
	if err != nil {
		return err
	}
	trouble, _, err := g.faults.at("ready", g.name)
	switch {
	case err != nil:
		return err
	case trouble.Panic:
		return errors.New("Kernel panic - not syncing: requested by the faults file")
	case trouble.Never:
		<-ctx.Done()
		return nil
	}
	if err := trouble.happen(ctx); err != nil {
		return err
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	ready, err := json.Marshal(listening{
		Endpoint: vm.Endpoint{Addr: ln.Addr().String(), User: g.spec.User, HostKey: hostKey}, PID: os.Getpid(),
	})
	if err != nil {
		return errors.Join(err, ln.Close())
	}
	fmt.Println(vm.ReadyMarker, hostKey)
	if err := atomicfile.Write(g.file("endpoint.json"), ready, 0o600); err != nil {
		return errors.Join(fmt.Errorf("write endpoint: %w", err), ln.Close())
	}
	g.serve(ctx, ln, cfg)
	return nil
}

// lock takes the lock that is held while the VM runs, so that the VM runs only once.
func (g *guest) lock(ctx context.Context) (*flock.Flock, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lockPatience, fmt.Errorf("%s is already running", g.name))
	defer cancel()
	l := flock.New(g.file("lock"))
	if ok, err := l.TryLockContext(ctx, pollEvery); !ok {
		return nil, fmt.Errorf("lock: %w", cmp.Or(context.Cause(ctx), err))
	}
	return l, nil
}

// sshd returns the server's configuration and its public key.
func (g *guest) sshd() (*xssh.ServerConfig, string, error) {
	b, err := os.ReadFile(g.file("host_key"))
	if err != nil {
		return nil, "", fmt.Errorf("read host key: %w", err)
	}
	host, err := xssh.ParsePrivateKey(b)
	if err != nil {
		return nil, "", fmt.Errorf("read host key: %w", err)
	}
	allowed, _, _, _, err := xssh.ParseAuthorizedKey([]byte(g.spec.AuthorizedKey))
	if err != nil {
		return nil, "", fmt.Errorf("read authorized key: %w", err)
	}
	isAllowed := func(key xssh.PublicKey) bool { return bytes.Equal(key.Marshal(), allowed.Marshal()) }
	logins := &xssh.CertChecker{IsUserAuthority: isAllowed, UserKeyFallback: func(_ xssh.ConnMetadata, key xssh.PublicKey) (*xssh.Permissions, error) {
		if !isAllowed(key) {
			return nil, errors.New("not authorized")
		}
		return nil, nil
	}}
	cfg := &xssh.ServerConfig{PublicKeyCallback: func(c xssh.ConnMetadata, key xssh.PublicKey) (*xssh.Permissions, error) {
		if c.User() != g.spec.User {
			return nil, errors.New("not authorized")
		}
		return logins.Authenticate(c, key)
	}}
	cfg.AddHostKey(host)
	return cfg, strings.TrimSpace(string(xssh.MarshalAuthorizedKey(host.PublicKey()))), nil
}

// serve accepts connections until the VM is powered off, and then ends everything
// that runs in the VM.
func (g *guest) serve(ctx context.Context, ln net.Listener, cfg *xssh.ServerConfig) {
	stop := context.AfterFunc(ctx, func() {
		_ = ln.Close()
		g.mu.Lock()
		g.off = true
		g.mu.Unlock()
		g.breakConnections()
		reap(g.root())
	})
	defer stop()
	for {
		conn, err := ln.Accept()
		if err != nil {
			break
		}
		g.tasks.Go(func() { g.connection(ctx, conn, cfg) })
	}
	reap(g.root())
	g.tasks.Wait()
	reap(g.root())
}

// breakConnections breaks all connections.
func (g *guest) breakConnections() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for c := range g.conns {
		_ = c.Close()
	}
}

// keep records a connection so that a power-off ends it.
func (g *guest) keep(c net.Conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.off {
		return false
	}
	g.conns[c] = struct{}{}
	return true
}

func (g *guest) forget(c net.Conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.conns, c)
}

func (g *guest) connection(ctx context.Context, conn net.Conn, cfg *xssh.ServerConfig) {
	defer conn.Close()
	if !g.keep(conn) {
		return
	}
	defer g.forget(conn)
	trouble, _, err := g.faults.at("connect", g.name)
	if err != nil || trouble.happen(ctx) != nil {
		return
	}
	sc, chans, reqs, err := xssh.NewServerConn(conn, cfg)
	if err != nil {
		return
	}
	g.tasks.Go(func() { g.listeners(ctx, sc, reqs) })
	for n := range chans {
		switch n.ChannelType() {
		case "session":
			ch, reqs, err := n.Accept()
			if err != nil {
				return
			}
			s := &session{guest: g, ctx: ctx, conn: conn, ch: ch}
			g.tasks.Go(func() { s.serve(reqs) })
		case "direct-tcpip":
			g.tasks.Go(func() { g.forward(ctx, n) })
		default:
			_ = n.Reject(xssh.UnknownChannelType, "no such channel")
		}
	}
}

// path returns where the guest's path p is on the host: below the root, unless the
// caller has already prefixed it.
func (g *guest) path(p string) string {
	if p == g.root() || strings.HasPrefix(p, g.root()+"/") {
		return p
	}
	return filepath.Join(g.root(), filepath.Clean("/"+p))
}
