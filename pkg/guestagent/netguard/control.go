package netguard

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const (
	controlTime  = 10 * time.Minute // per request; a reload runs about a dozen commands
	controlConns = 16
)

// controlReply is the daemon's answer to a request. A connection to its socket
// sends one word, and receives a status or an error. The socket may be open to
// every user: "reload" reads a file that only root can write.
type controlReply struct {
	Error  string          `json:"error,omitempty"`
	Status json.RawMessage `json:"status,omitempty"`
}

// listenControl serves the socket until the returned function is called.
func (d *daemon) listenControl(stop func()) (end func() error, err error) {
	dir, err := os.Open(d.guest.Path(stateDir))
	if err != nil {
		return nil, err
	}
	path := viaDir(dir, socketIn)
	// The daemon lock guarantees that no other daemon runs, so an existing socket
	// is a leftover.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, errors.Join(err, dir.Close())
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(err, l.Close(), dir.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	slots := make(chan struct{}, controlConns)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				d.control(ctx, c, stop)
			})
		}
	})
	return func() error {
		cancel()
		err := errors.Join(l.Close(), dir.Close())
		wg.Wait()
		return err
	}, nil
}

func (d *daemon) control(ctx context.Context, c net.Conn, stop func()) {
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return
	}
	word, err := bufio.NewReader(io.LimitReader(c, 64)).ReadString('\n')
	if err != nil {
		return
	}
	switch word {
	case "status\n":
	case "reload\n":
		err = d.reload(ctx)
	case "stop\n":
		if !d.guest.Fake {
			err = errors.New("stop works in fake guests only; in a real guest the daemon would restart")
			break
		}
		defer stop()
	default:
		err = errors.New("unknown request")
	}
	var reply controlReply
	if err != nil {
		reply.Error = sys.OneLine(err)
	} else if reply.Status, err = json.Marshal(d.status(ctx)); err != nil {
		reply.Error = err.Error()
	}
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return
	}
	// A client that has disconnected does not need the answer.
	_ = json.NewEncoder(c).Encode(reply)
}

// dialControl connects to the daemon.
func dialControl(ctx context.Context, g sys.Guest) (*net.UnixConn, error) {
	dir, err := os.Open(g.Path(stateDir))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", viaDir(dir, socketIn))
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// daemonPID returns the process that listens on the daemon's socket.
func daemonPID(ctx context.Context, g sys.Guest) (int, error) {
	c, err := dialControl(ctx, g)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	return peerPID(c)
}

// Ask sends one word to the daemon and returns its answer.
func Ask(ctx context.Context, g sys.Guest, word string) (guestproto.Status, error) {
	down := func(err error) error {
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
			return fail.New(fail.NotFound, "the guest agent's daemon is not running: %w", err).WithHint("sudo systemctl restart agent-guest")
		}
		return fmt.Errorf("query the daemon: %w", err)
	}
	c, err := dialControl(ctx, g)
	if err != nil {
		return guestproto.Status{}, down(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(controlTime)); err != nil {
		return guestproto.Status{}, down(err)
	}
	stopWatch := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stopWatch()
	if _, err := io.WriteString(c, word+"\n"); err != nil {
		return guestproto.Status{}, down(err)
	}
	var reply controlReply
	if err := json.NewDecoder(io.LimitReader(c, 2*guestproto.MaxStatus)).Decode(&reply); err != nil {
		return guestproto.Status{}, down(err)
	}
	if reply.Error != "" {
		return guestproto.Status{}, errors.New(guestproto.Clean(reply.Error))
	}
	return guestproto.DecodeStatus(bytes.NewReader(reply.Status))
}
