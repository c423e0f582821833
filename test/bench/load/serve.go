package load

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// pattern is repeated to make up the transfers. Its length has no common divisor with
// any buffer's, so that a lost, doubled or reordered piece is noticed.
var pattern = sync.OnceValue(func() []byte {
	b := make([]byte, 262_139)
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // not a secret
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
})

func send(w io.Writer, size int64) error {
	for size > 0 {
		n, err := w.Write(pattern()[:min(size, int64(len(pattern())))])
		if err != nil {
			return err
		}
		size -= int64(n)
	}
	return nil
}

// check reads exactly size bytes and compares each of them.
func check(r io.Reader, size int64) error {
	want, buffer := pattern(), make([]byte, 256<<10)
	for at := int64(0); at < size; {
		n, err := r.Read(buffer[:min(size-at, int64(len(buffer)))])
		for got := buffer[:n]; len(got) > 0; {
			expected := want[at%int64(len(want)):]
			same := min(len(got), len(expected))
			if !bytes.Equal(got[:same], expected[:same]) {
				return fmt.Errorf("wrong bytes after %d", at)
			}
			got, at = got[same:], at+int64(same)
		}
		if err != nil && at < size {
			return fmt.Errorf("after %d of %d bytes: %w", at, size, err)
		}
	}
	return nil
}

// Serve runs the server until the listener is closed.
func Serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			if err := serve(c); err != nil {
				fmt.Fprintf(c, "%v\n", err) // the client notices, whatever it waits for
			}
		}()
	}
}

func serve(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(2 * patience)); err != nil {
		return err
	}
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		return err
	}
	var size int64
	switch _, err := fmt.Sscanf(line, "up %d", &size); {
	case line == "ping\n":
		_, err := io.WriteString(c, "pong\n")
		return err
	case err == nil:
		if err := check(r, size); err != nil {
			return err
		}
		_, err := io.WriteString(c, "ok\n")
		return err
	}
	if _, err := fmt.Sscanf(line, "down %d", &size); err != nil {
		return err
	}
	return send(c, size)
}
