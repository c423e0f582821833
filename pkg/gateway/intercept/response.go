package intercept

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// Response removes the secrets from r, in case that the host reflects them: in headers and
// trailers "[redacted]", and in the body "*" for each byte, so that its length stays. r must be
// decoded, as by an http.Transport that requests compression automatically.
func (e *Exchange) Response(r *http.Response) error {
	if coding := r.Header.Get("Content-Encoding"); coding != "" && coding != "identity" {
		return fmt.Errorf("%s sent the encoding %.40q, which was not requested", r.Request.URL.Host, coding)
	}
	e.clean(r.Header)
	e.clean(r.Trailer) // so far, their names
	if stream, ok := r.Body.(io.ReadWriteCloser); ok && r.StatusCode == http.StatusSwitchingProtocols {
		r.Body = maskedStream{e.masked(r), stream}
	} else if r.Body != nil && r.Body != http.NoBody {
		r.Body = e.masked(r)
	}
	return nil
}

// maskedStream is what a server sends after a change of protocol, without secrets, and what the
// client sends, unchanged.
type maskedStream struct {
	io.ReadCloser
	to io.Writer
}

func (m maskedStream) Write(p []byte) (int, error) { return m.to.Write(p) }

// CloseWrite ends what the client sends.
func (m maskedStream) CloseWrite() error { return pipe.CloseWrite(m.to) }

func (e *Exchange) clean(h http.Header) {
	for name, values := range h {
		if e.inName(name) {
			delete(h, name)
			continue
		}
		for i, v := range values {
			h[name][i] = e.redact.Redact(v)
		}
	}
}

// inName reports whether the name of a header contains a secret. Protocols change the case of names.
func (e *Exchange) inName(name string) bool {
	name = strings.ToLower(name)
	return e.redact.Redact(name) != name || slices.ContainsFunc(e.bound, func(b Bound) bool {
		value := strings.ToLower(b.Value.Reveal())
		return value != "" && strings.Contains(name, value)
	})
}

func (e *Exchange) masked(r *http.Response) io.ReadCloser {
	m := &maskedBody{from: r.Body, atEnd: func() { e.clean(r.Trailer) }}
	m.mask = e.redact.Mask(&m.ready)
	return m
}

// maskedBody is a body without secrets.
type maskedBody struct {
	from  io.ReadCloser
	atEnd func() // the trailers have arrived
	mask  *secret.Writer
	ready bytes.Buffer
	buf   [32 << 10]byte
	err   error
}

func (m *maskedBody) Read(p []byte) (int, error) {
	for m.ready.Len() == 0 && m.err == nil {
		var n int
		n, m.err = m.from.Read(m.buf[:])
		if _, err := m.mask.Write(m.buf[:n]); err != nil {
			return 0, err
		}
		if m.err != nil {
			if err := m.mask.Close(); err != nil {
				return 0, err
			}
			if errors.Is(m.err, io.EOF) {
				m.atEnd()
			}
		}
	}
	if m.ready.Len() == 0 {
		return 0, m.err
	}
	return m.ready.Read(p)
}

func (m *maskedBody) Close() error { return m.from.Close() }
