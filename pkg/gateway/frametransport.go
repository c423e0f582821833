package gateway

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	maxPending  = 8 << 20 // bytes queued for the guest's side to read
	keepPending = 1 << 20 // largest buffer that is kept for reuse
)

var errFull = errors.New("the guest reads too slowly")

// frameTransport carries frames between the stack and the VM's process. Frames are
// length-prefixed on a stream (QEMU), or one per datagram (vz).
//
// send never blocks. A paused VM must not hold up the stack, whose reader also sends, nor a
// change of policy. Frames that the socket does not accept are queued up to maxPending
// bytes; frames beyond that are dropped, as on any network.
type frameTransport struct {
	conn   net.Conn
	raw    syscall.RawConn
	stream bool

	mu      sync.Mutex
	pending []byte // length-prefixed frames
	spare   []byte // the writer's previous buffer, for reuse
	writing bool   // the writer owns the socket
	wake    chan struct{}
	done    chan struct{}
	once    sync.Once
}

func newFrameTransport(conn net.Conn, stream bool) *frameTransport {
	c := &frameTransport{conn: conn, stream: stream, wake: make(chan struct{}, 1), done: make(chan struct{})}
	if s, ok := conn.(syscall.Conn); ok {
		c.raw, _ = s.SyscallConn() //nolint:errcheck // without it, write does all the work
	}
	return c
}

func (c *frameTransport) Close() error {
	c.once.Do(func() { close(c.done) })
	return c.conn.Close()
}

// send queues or writes length-prefixed frames. The caller may reuse the slice afterwards.
func (c *frameTransport) send(frames []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.writing && c.raw != nil {
		rest, err := c.writeNow(frames)
		if err != nil {
			c.Close() //nolint:errcheck // the write's error says more
			return err
		}
		if frames = rest; len(frames) == 0 {
			return nil
		}
	} else if len(c.pending)+len(frames) > maxPending {
		return errFull
	}
	c.pending = append(c.pending, frames...)
	c.writing = true
	select {
	case c.wake <- struct{}{}:
	default:
	}
	return nil
}

// writeNow writes as much as the socket accepts without blocking and returns the rest. On a
// stream, the rest may begin in the middle of a frame.
func (c *frameTransport) writeNow(frames []byte) (rest []byte, err error) {
	failed := c.raw.Write(func(fd uintptr) bool {
		for len(frames) > 0 {
			chunk, skip := frames, 0
			if !c.stream {
				chunk, skip = firstFrame(frames)
			}
			var n int
			n, err = syscall.Write(int(fd), chunk)
			switch {
			case err == nil && c.stream:
				frames = frames[n:]
			case err == nil:
				frames = frames[skip:]
			case errors.Is(err, syscall.EINTR):
			case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOBUFS):
				err = nil
				return true
			default:
				return true
			}
		}
		return true
	})
	return frames, errors.Join(failed, err)
}

// firstFrame returns the first of several length-prefixed frames, and its length including
// the prefix.
func firstFrame(frames []byte) (frame []byte, length int) {
	length = 4 + int(binary.BigEndian.Uint32(frames))
	return frames[4:length], length
}

// write sends the frames that send could not write immediately, until c is closed.
func (c *frameTransport) write() {
	for {
		select {
		case <-c.done:
			return
		case <-c.wake:
		}
		for {
			c.mu.Lock()
			batch := c.pending
			if len(batch) == 0 {
				c.writing = false
				c.mu.Unlock()
				break
			}
			c.pending, c.spare = c.spare[:0], nil
			c.mu.Unlock()
			if err := c.writeAll(batch); err != nil {
				c.Close() //nolint:errcheck // the reader reports the end
				return
			}
			if cap(batch) > keepPending {
				batch = nil
			}
			c.mu.Lock()
			c.spare = batch[:0]
			c.mu.Unlock()
		}
	}
}

func (c *frameTransport) writeAll(frames []byte) error {
	if c.stream {
		_, err := c.conn.Write(frames)
		return err
	}
	for len(frames) > 0 {
		frame, length := firstFrame(frames)
		_, err := c.conn.Write(frame)
		switch {
		case errors.Is(err, syscall.ENOBUFS): // macOS returns this when the receiver's buffer is full
			select {
			case <-c.done:
				return net.ErrClosed
			case <-time.After(200 * time.Microsecond):
			}
			continue
		case err != nil:
			return err
		}
		frames = frames[length:]
	}
	return nil
}

// read passes every frame to input until the connection ends, and returns the error that
// ended it.
func (c *frameTransport) read(input func([]byte)) error {
	frame := make([]byte, maxFrame+1)
	if !c.stream {
		for {
			n, err := c.conn.Read(frame)
			if err != nil {
				return err
			}
			input(frame[:n])
		}
	}
	r := bufio.NewReaderSize(c.conn, 256<<10)
	for {
		var prefix [4]byte
		if _, err := io.ReadFull(r, prefix[:]); err != nil {
			return err
		}
		n := binary.BigEndian.Uint32(prefix[:])
		if n > maxSkipped {
			return fmt.Errorf("a frame has %d bytes", n)
		}
		kept := min(int(n), len(frame))
		if _, err := io.ReadFull(r, frame[:kept]); err != nil {
			return err
		}
		if rest := int(n) - kept; rest > 0 {
			if _, err := r.Discard(rest); err != nil {
				return err
			}
		}
		// A truncated frame still exceeds the maximum length, so the filter drops it.
		input(frame[:kept])
	}
}
