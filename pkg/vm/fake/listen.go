package fake

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"

	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

// listeners implements sshd's listening on UNIX sockets for a client, with StreamLocalBindUnlink. It
// refuses all other requests, among them keep-alives.
func (g *guest) listeners(ctx context.Context, client *xssh.ServerConn, reqs <-chan *xssh.Request) {
	open := map[string]net.Listener{}
	defer func() {
		for _, l := range open {
			_ = l.Close()
		}
	}()
	for r := range reqs {
		var m struct{ Path string }
		ok := xssh.Unmarshal(r.Payload, &m) == nil
		switch {
		case ok && r.Type == "streamlocal-forward@openssh.com":
			l, err := listenUnlinked(ctx, g.path(m.Path))
			if ok = err == nil; ok {
				if earlier := open[m.Path]; earlier != nil {
					_ = earlier.Close()
				}
				open[m.Path] = l
				g.tasks.Go(func() { g.serveListener(client, l, m.Path) })
			}
		case ok && r.Type == "cancel-streamlocal-forward@openssh.com":
			l := open[m.Path]
			if ok = l != nil; ok {
				_ = l.Close()
				delete(open, m.Path)
			}
		default:
			ok = false
		}
		if r.WantReply {
			_ = r.Reply(ok, nil)
		}
	}
}

// listenUnlinked listens on a socket of any length, and replaces an earlier one.
func listenUnlinked(ctx context.Context, path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	name := path
	if runtime.GOOS == "linux" { // the path of a socket is short, and that of a fake guest is not
		name = "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + filepath.Base(path)
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", name)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // as sshd
	return l, os.Chmod(path, 0o600)
}

func (g *guest) serveListener(client *xssh.ServerConn, l net.Listener, path string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		g.tasks.Go(func() {
			defer c.Close()
			if !g.keep(c) {
				return
			}
			defer g.forget(c)
			ch, ok := openForwarded(client, path)
			if !ok {
				return
			}
			defer ch.Close()
			var both sync.WaitGroup
			both.Go(func() {
				_ = pipe.Copy(c, ch)
				_ = c.Close() // the client closes the whole channel
			})
			both.Go(func() { _ = pipe.Copy(ch, c) })
			both.Wait()
		})
	}
}

// openForwarded opens a channel to the client for a connection to the socket. If the client's
// connection ends at the wrong moment, the library sometimes never returns, so nothing waits for
// that goroutine.
func openForwarded(client *xssh.ServerConn, path string) (xssh.Channel, bool) {
	opened, over := make(chan xssh.Channel, 1), make(chan struct{})
	go func() {
		ch, reqs, err := client.OpenChannel("forwarded-streamlocal@openssh.com", xssh.Marshal(struct{ Path, Reserved string }{Path: path}))
		if err != nil {
			opened <- nil
			return
		}
		opened <- ch
		xssh.DiscardRequests(reqs)
	}()
	go func() {
		_ = client.Wait()
		close(over)
	}()
	select {
	case ch := <-opened:
		return ch, ch != nil
	case <-over:
		return nil, false
	}
}
