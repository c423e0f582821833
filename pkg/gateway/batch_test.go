package gateway

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// countedConn records the lengths of writes.
type countedConn struct {
	net.Conn
	writes []int
}

func (c *countedConn) Write(p []byte) (int, error) {
	c.writes = append(c.writes, len(p))
	return c.Conn.Write(p)
}

// batched returns a connection in batches, what it writes to, and the reader's end.
func batched() (*batchConn, *countedConn, net.Conn) {
	near, far := net.Pipe()
	counted := &countedConn{Conn: near}
	b := newBatchConn(counted)
	go b.pass()
	return b, counted, far
}

// Writes are passed on together while the reader is slow. They wait when the batch is full.
func TestBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, counted, far := batched()
		const length = maxBatch/4 + 1
		var want []byte
		for i := range 6 {
			want = append(want, bytes.Repeat([]byte{byte('a' + i)}, length)...)
		}
		wrote := 0
		go func() {
			for text := range slices.Chunk(want, length) {
				if n, err := b.Write(text); n != length || err != nil {
					t.Errorf("write %d = %d, %v, want %d", wrote, n, err, length)
				}
				wrote++
				time.Sleep(time.Millisecond) // the first is being passed on
			}
			if err := b.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		}()
		time.Sleep(time.Second)
		synctest.Wait()
		if wrote != 4 {
			t.Errorf("%d writes succeeded before anything was read, want 4: one in progress, and a full batch", wrote)
		}
		got, err := io.ReadAll(far)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes arrived, %v, want %d, the same", len(got), err, len(want))
		}
		if !slices.Equal(counted.writes[:2], []int{length, maxBatch}) {
			t.Errorf("lengths passed on = %v, want the first write, then a full batch", counted.writes)
		}
	})
}

// The rest arrives after the deadlines with which crypto/tls ends a connection, also if the reader
// pauses for longer.
func TestBatchDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _, far := batched()
		for _, text := range []string{"first", "last"} {
			if _, err := b.Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		for _, deadline := range []time.Duration{5 * time.Second, 0} {
			if err := b.SetWriteDeadline(time.Now().Add(deadline)); err != nil {
				t.Fatal(err)
			}
		}
		if n, err := b.Write([]byte("more")); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("write after the deadline = %d, %v, want 0, %v", n, err, os.ErrDeadlineExceeded)
		}
		go b.Close()
		time.Sleep(time.Hour)
		if got, err := io.ReadAll(far); err != nil || string(got) != "firstlast" {
			t.Errorf("what arrived = %q, %v, want firstlast", got, err)
		}
	})
}

// Writes fail when the connection ends or is closed. Close waits for a reader, until the connection ends.
func TestBatchEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(b *batchConn, far net.Conn)
		want error
	}{
		{"reader gone", func(_ *batchConn, far net.Conn) { far.Close() }, io.ErrClosedPipe},
		{"closed", func(b *batchConn, _ net.Conn) { go b.Close() }, net.ErrClosed},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, _, far := batched()
				result := make(chan error)
				go func() {
					_, err := b.Write(make([]byte, 3*maxBatch))
					result <- err
				}()
				synctest.Wait()
				c.end(b, far)
				if err := <-result; !errors.Is(err, c.want) {
					t.Errorf("write = %v, want %v", err, c.want)
				}
				far.Close()
				b.Close()
			})
		})
	}
}
