package gateway

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
)

// datagramPair returns the two ends of a datagram socket pair, as vz and the gateway have them.
func datagramPair(t *testing.T) (vz, gateway net.Conn) {
	t.Helper()
	ends, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns []net.Conn
	for _, fd := range ends {
		f := os.NewFile(uintptr(fd), "end")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		conns = append(conns, c)
	}
	return conns[0], conns[1]
}

// startDatagrams starts a transport on a datagram socket.
func startDatagrams(t *testing.T, conn net.Conn) *frameTransport {
	t.Helper()
	c := newFrameTransport(conn, false)
	var writing sync.WaitGroup
	writing.Go(c.write)
	t.Cleanup(func() { c.Close(); writing.Wait() })
	return c
}

// numbered returns a frame with its length, as send expects it. Frames of different numbers have
// different lengths.
func numbered(n int) []byte {
	f := make([]byte, 4+1000+n%500)
	binary.BigEndian.PutUint32(f, uint32(len(f)-4))
	binary.BigEndian.PutUint32(f[4:], uint32(n))
	return f
}

// receiveNumbered checks that the next datagrams are the frames from first to last, each whole.
func receiveNumbered(t *testing.T, conn net.Conn, first, last int) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, maxFrame)
	for n := first; n <= last; n++ {
		got, err := conn.Read(buf)
		if want := numbered(n)[4:]; err != nil || !bytes.Equal(buf[:got], want) {
			t.Fatalf("datagram %d = %d bytes, %v, want the %d bytes of frame %d", n, got, err, len(want), n)
		}
	}
}

// TestDatagramsOfAPausedVM checks that a VM that does not read blocks nothing: frames are queued, then
// dropped. All that were accepted arrive in order once the VM reads.
func TestDatagramsOfAPausedVM(t *testing.T) {
	vz, gateway := datagramPair(t)
	c := startDatagrams(t, gateway)
	// The writer may have taken a full queue already.
	const most = 2*maxPending + 1<<20
	last, size := 0, 0
	for {
		frame := numbered(last + 1)
		err := c.send(frame)
		if errors.Is(err, errFull) {
			break
		}
		if err != nil {
			t.Fatalf("send of frame %d: %v", last+1, err)
		}
		last++
		if size += len(frame); size > most {
			t.Fatalf("%d bytes were accepted, want at most %d", size, most)
		}
	}
	if size < maxPending-len(numbered(499)) {
		t.Errorf("%d bytes were accepted, want %d", size, maxPending)
	}
	receiveNumbered(t, vz, 1, last)
	if err := c.send(append(numbered(last+1), numbered(last+2)...)); err != nil {
		t.Errorf("send after the VM read everything: %v", err)
	}
	receiveNumbered(t, vz, last+1, last+2)
}

// scarceConn is a datagram socket whose first writes fail as on macOS when the buffer of the receiver
// is full. It has no descriptor, so that all writes use this method.
type scarceConn struct {
	net.Conn
	mu      sync.Mutex
	refused int // writes so far
	most    int // writes to refuse; negative means all
	tried   chan struct{}
}

func (c *scarceConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.most < 0 || c.refused < c.most {
		if c.refused++; c.refused == 3 {
			close(c.tried)
		}
		return 0, &net.OpError{Op: "write", Net: "unixgram", Err: os.NewSyscallError("write", syscall.ENOBUFS)}
	}
	c.refused = 0
	return c.Conn.Write(b)
}

func TestDatagramsWithoutBuffers(t *testing.T) {
	vz, gateway := datagramPair(t)
	scarce := &scarceConn{Conn: gateway, most: 5, tried: make(chan struct{})}
	c := startDatagrams(t, scarce)
	for n := 1; n <= 3; n++ {
		if err := c.send(numbered(n)); err != nil {
			t.Fatal(err)
		}
		if n == 1 {
			receiveNumbered(t, vz, 1, 1)
			scarce.mu.Lock()
			scarce.most = 2
			scarce.mu.Unlock()
		}
	}
	receiveNumbered(t, vz, 2, 3)

	// A transport ends while the buffers stay full.
	_, gateway = datagramPair(t)
	scarce = &scarceConn{Conn: gateway, most: -1, tried: make(chan struct{})}
	c = newFrameTransport(scarce, false)
	ended := make(chan struct{})
	go func() { defer close(ended); c.write() }()
	if err := c.send(numbered(1)); err != nil {
		t.Fatal(err)
	}
	<-scarce.tried
	c.Close()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatalf("write did not end within %v after Close", patience)
	}
}

// TestDatagramsToAGoneVM checks that the transport ends, also for its reader, at the first frame for
// a VM that has ended.
func TestDatagramsToAGoneVM(t *testing.T) {
	for name, queued := range map[string]bool{"an idle link": false, "a link with queued frames": true} {
		t.Run(name, func(t *testing.T) {
			vz, gateway := datagramPair(t)
			c := startDatagrams(t, gateway)
			result := make(chan error, 1)
			go func() { result <- c.read(func([]byte) {}) }()
			for n := 1; queued; n++ {
				if err := c.send(numbered(n)); err != nil {
					t.Fatal(err)
				}
				c.mu.Lock()
				queued = !c.writing
				c.mu.Unlock()
			}
			vz.Close()
			if err := c.send(numbered(1)); name == "an idle link" && err == nil {
				t.Error("send to a VM that has ended = nil, want an error")
			}
			select {
			case err := <-result:
				if err == nil {
					t.Error("read = nil, want the error that ended the connection")
				}
			case <-time.After(patience):
				t.Fatalf("read did not end within %v", patience)
			}
		})
	}
}

// TestDatagramSizes sends datagrams that are not frames: empty ones, and longer ones than fit. Each
// counts as dropped, and the link goes on.
func TestDatagramSizes(t *testing.T) {
	for name, c := range map[string]struct {
		size int
		why  drop
	}{
		"empty":             {0, dropMalformed},
		"short":             {13, dropMalformed},
		"longer than a MTU": {1515, dropTooLong},
		"largest":           {maxFrame, dropTooLong},
		"cut":               {maxFrame + 50_000, dropTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, config{datagram: true})
			if err := w.guest.Send(make([]byte, c.size)); err != nil {
				t.Fatal(err)
			}
			if _, err := w.guest.Lookup(w.ctx(), "host.lima.internal"); err != nil {
				t.Fatalf("Lookup after a datagram of %d bytes: %v", c.size, err)
			}
			if got := w.g.Stats().Dropped[c.why.String()]; got != 1 {
				t.Errorf("dropped frames %q = %d, want 1: %v", c.why, got, w.g.Stats().Dropped)
			}
		})
	}
}
