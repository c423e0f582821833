package gateway

import (
	"net"
	"os"
	"sync"
	"time"
)

const maxBatch = 128 << 10 // bytes

// batchConn collects what is written while an earlier write is in progress, and then writes it in
// one piece. A TLS connection writes each record separately, and without batches the guest would
// get a packet for each.
//
// It buffers at most 2 * maxBatch bytes. An error of the connection is returned by a later write.
type batchConn struct {
	net.Conn
	done chan struct{} // closed at the end of pass

	mu      sync.Mutex
	changed sync.Cond
	pending []byte // from batches, nil if empty
	err     error  // of all further writes
}

// batches is the pool of batchConn's buffers. A connection without pending bytes has none.
var batches = copyBuffers{size: maxBatch}

// newBatchConn returns a connection that passes writes on to c while pass runs.
func newBatchConn(c net.Conn) *batchConn {
	b := &batchConn{Conn: c, done: make(chan struct{})}
	b.changed.L = &b.mu
	return b
}

func (b *batchConn) Write(p []byte) (n int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for n < len(p) {
		for b.err == nil && len(b.pending) == maxBatch {
			b.changed.Wait()
		}
		if b.err != nil {
			return n, b.err
		}
		if b.pending == nil {
			b.pending = batches.Get()[:0]
		}
		k := min(len(p)-n, maxBatch-len(b.pending))
		b.pending = append(b.pending, p[n:n+k]...)
		n += k
		b.changed.Broadcast()
	}
	return n, nil
}

// pass writes batches until the connection fails, or until stop was called and nothing is left.
func (b *batchConn) pass() {
	defer close(b.done)
	defer b.fail(net.ErrClosed) // also after a panic
	for batch := b.take(); batch != nil; batch = b.take() {
		_, err := b.Conn.Write(batch)
		batches.Put(batch[:maxBatch])
		if err != nil {
			b.fail(err)
			return
		}
	}
}

// take waits for the next batch. It returns nil if there will be none.
func (b *batchConn) take() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.pending == nil && b.err == nil {
		b.changed.Wait()
	}
	batch := b.pending
	b.pending = nil
	b.changed.Broadcast()
	return batch
}

// fail makes further writes fail.
func (b *batchConn) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err == nil {
		b.err = err
	}
	b.changed.Broadcast()
}

// SetWriteDeadline makes further writes fail if t has passed. What was written before is still passed
// on: crypto/tls sets a deadline for its last record, which would also be one for all data before it.
func (b *batchConn) SetWriteDeadline(t time.Time) error {
	if !t.IsZero() && time.Until(t) <= 0 {
		b.fail(os.ErrDeadlineExceeded)
	}
	return nil
}

// stop makes further writes fail, and waits until the guest has taken the rest or the connection fails.
// A guest may take as long as it likes: the program that reads may be paused.
func (b *batchConn) stop() {
	b.fail(net.ErrClosed)
	<-b.done
}

// Close does what stop does, and closes the connection.
func (b *batchConn) Close() error {
	b.stop()
	return b.Conn.Close()
}
