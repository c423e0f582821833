package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/peercred"
)

// maxSocketPath is the limit on macOS; Linux allows four more bytes.
const maxSocketPath = 103

// listenUnix creates the socket and replaces one left by a killed serve. The caller
// holds the lock that only one serve can hold.
func listenUnix(ctx context.Context, path string, log *slog.Logger) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fail.New(fail.Host, "socket path %s is too long: it has %d bytes, the limit is %d", path, len(path), maxSocketPath).
			WithHint("export XDG_STATE_HOME=/a/shorter/directory")
	}
	dir := filepath.Dir(path)
	st, err := os.Stat(dir)
	if err == nil && st.Mode().Perm()&0o077 != 0 {
		err = os.Chmod(dir, 0o700)
	}
	if err != nil {
		return nil, fail.New(fail.Host, "protect socket directory: %w", err).WithHint("ls -ld %s", dir)
	}
	if st, err := os.Lstat(path); err == nil {
		if st.Mode()&fs.ModeSocket == 0 {
			return nil, fail.New(fail.Conflict, "%s exists and is not a socket", path).WithHint("ls -l %s", path)
		}
		if c, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "unix", path); err == nil {
			_ = c.Close()
			return nil, fail.New(fail.Conflict, "another program listens on %s", path).WithHint("ls -l %s", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fail.New(fail.Host, "remove the old socket: %w", err)
		}
	}
	// Until the Chmod below, only the directory's mode keeps others out.
	l, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fail.New(fail.Host, "listen on the socket: %w", err).WithHint("ls -ld %s", dir)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, fail.New(fail.Host, "protect the socket: %w", errors.Join(err, l.Close()))
	}
	return ownOnly{l.(*net.UnixListener), log}, nil
}

// ownOnly accepts connections only from processes of this user.
type ownOnly struct {
	*net.UnixListener
	log *slog.Logger
}

func (l ownOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if err = peercred.Own(c); err == nil {
			return c, nil
		}
		l.log.Warn("connection to the socket refused", "error", err)
		_ = c.Close()
	}
}

// listenTCP listens on the address in Options, if that is safe.
func (s *Server) listenTCP(ctx context.Context) (net.Listener, endpoint, error) {
	addr, err := listenAddr(s.o.Listen, s.o.Expose)
	if err != nil {
		return nil, endpoint{}, err
	}
	var d endpoint
	var conf *tls.Config
	switch {
	case s.o.CertFile != "" && s.o.KeyFile != "":
		cert, err := tls.LoadX509KeyPair(s.o.CertFile, s.o.KeyFile)
		if err != nil {
			return nil, endpoint{}, fail.New(fail.Usage, "read certificate and key: %w", err).WithHint("agent-sessionizer serve --help")
		}
		d.cert, d.tls = cert.Leaf, true
		conf = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}}
	case s.o.CertFile != "" || s.o.KeyFile != "":
		return nil, endpoint{}, fail.New(fail.Usage, "a certificate requires its key, and a key its certificate").WithHint("agent-sessionizer serve --help")
	case !addr.Addr().IsLoopback():
		return nil, endpoint{}, fail.New(fail.Usage, "%s is not a loopback address, so tokens would cross a network unencrypted", s.o.Listen).
			WithHint("agent-sessionizer serve --listen %s --expose-to-network --tls-cert FILE --tls-key FILE", s.o.Listen)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr.String())
	if err != nil {
		return nil, endpoint{}, fail.New(fail.Host, "listen: %w", err).WithHint("ss -ltnp")
	}
	real, err := netip.ParseAddrPort(l.Addr().String())
	if err != nil {
		return nil, endpoint{}, errors.Join(err, l.Close())
	}
	d.ip, d.port = real.Addr().Unmap(), fmt.Sprint(real.Port())
	if conf != nil {
		l = tls.NewListener(l, conf)
	}
	return l, d, nil
}

func listenAddr(text string, expose bool) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(text)
	if err == nil && host == "localhost" {
		text = net.JoinHostPort("127.0.0.1", port)
	}
	addr, err := netip.ParseAddrPort(text)
	if err != nil {
		return netip.AddrPort{}, fail.New(fail.Usage, "--listen must be ADDRESS:PORT, got %q", text).WithHint("agent-sessionizer serve --listen 127.0.0.1:8122")
	}
	if !addr.Addr().IsLoopback() && !expose {
		return netip.AddrPort{}, fail.New(fail.Usage, "%s can be reached from the network, where any client with a token could run agents on this host", text).
			WithHint("agent-sessionizer serve --listen 127.0.0.1:%d", addr.Port())
	}
	return addr, nil
}

// isOwnHost reports whether a Host header names this server. It rejects a page that was
// loaded under another name which now resolves to this host (DNS rebinding).
func (d endpoint) isOwnHost(host string) bool {
	if d.own || d.peer {
		return true // a browser cannot connect there
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = host, "80"
		if d.tls {
			port = "443"
		}
	}
	if port != d.port {
		return false
	}
	if d.ip.IsLoopback() && name == "localhost" {
		return true
	}
	if ip, err := netip.ParseAddr(name); err == nil && ip.Zone() == "" && ip == d.ip {
		return true
	}
	return d.cert != nil && name != "" && d.cert.VerifyHostname(name) == nil
}

// isAmbiguous reports whether a Host header that a browser sent stands for several addresses.
// Another user of this host can listen on one that serve does not use, and would get what a
// page sends there, with its cookie and key. A certificate prevents that.
func (d endpoint) isAmbiguous(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	return !d.own && !d.peer && !d.tls && name == "localhost"
}
