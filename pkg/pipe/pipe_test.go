package pipe

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
)

func TestWriter(t *testing.T) {
	var out bytes.Buffer
	full := 0
	w := &Writer{W: &out, Left: 5, Full: func() { full++ }}
	for _, c := range []struct {
		text string
		n    int
		err  error
	}{{"123", 3, nil}, {"456", 0, ErrFull}, {"45", 2, nil}, {"", 0, nil}, {"6", 0, ErrFull}} {
		if n, err := w.Write([]byte(c.text)); n != c.n || !errors.Is(err, c.err) {
			t.Errorf("Writer.Write(%q) = %d, %v, want %d, %v", c.text, n, err, c.n, c.err)
		}
	}
	if out.String() != "12345" || full != 2 || w.Passed != 5 || !w.Over {
		t.Errorf("output = %q, full %d times, passed %d, over %t, want 12345, 2, 5, true", out.String(), full, w.Passed, w.Over)
	}

	out.Reset()
	full = 0
	c := &Writer{W: &out, Left: 5, Cut: true, Full: func() { full++ }}
	for _, text := range []string{"123", "456", "", "7"} {
		if n, err := c.Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("Write(%q) with Cut = %d, %v, want %d, nil", text, n, err, len(text))
		}
	}
	if out.String() != "12345" || full != 2 || c.Passed != 5 || !c.Over {
		t.Errorf("output = %q, cut %d times, passed %d, over %t, want 12345, 2, 5, true", out.String(), full, c.Passed, c.Over)
	}

	r, broken := io.Pipe()
	_ = r.Close()
	for _, w := range []io.Writer{&Writer{W: broken, Left: 5}, &Writer{W: broken, Left: 5, Cut: true}} {
		if _, err := w.Write([]byte("a")); !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("%T.Write to a broken writer = %v, want %v", w, err, io.ErrClosedPipe)
		}
	}
}

func TestBuffer(t *testing.T) {
	full := 0
	b := &Buffer{Limit: 5, Full: func() { full++ }}
	for _, text := range []string{"123", "456", "7"} {
		if n, err := b.Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("Write(%q) = %d, %v, want %d, nil", text, n, err, len(text))
		}
	}
	if b.String() != "12345" || full != 2 {
		t.Errorf("buffer = %q, full %d times, want 12345, 2", b, full)
	}
}

// TestCopy checks that the end of a stream reaches the other end of a connection, whose
// other direction stays open.
func TestCopy(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	answer := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			answer <- err
			return
		}
		defer conn.Close()
		got, err := io.ReadAll(conn)
		_, werr := conn.Write(bytes.ToUpper(got))
		answer <- errors.Join(err, werr)
	}()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := Copy(conn, strings.NewReader("hello")); err != nil {
		t.Errorf("Copy = %v, want success", err)
	}
	got, err := io.ReadAll(conn)
	if err != nil || string(got) != "HELLO" {
		t.Errorf("answer = %q, %v, want HELLO", got, err)
	}
	if err := <-answer; err != nil {
		t.Error(err)
	}
	var out bytes.Buffer
	if err := Copy(&out, strings.NewReader("x")); err != nil || out.String() != "x" {
		t.Errorf("Copy to a buffer = %q, %v, want x", out.String(), err)
	}
}
