// Package subtask asks the host for subtasks: tasks that run in VMs of their own with at most
// the rights of this one. The host answers on a socket, and decides everything.
package subtask

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const (
	patience   = time.Minute      // for a host that does not answer
	absence    = 15 * time.Second // for a socket that does not exist
	retryEvery = 500 * time.Millisecond
	maxAnswer  = 4 << 20 // bytes of a JSON answer
	maxHeaders = 64 << 10
)

// request is a request to the host. It is repeated when the connection breaks, so it must have
// the same effect once or twice.
type request struct {
	method, path string
	header       map[string]string
	body         []byte
}

// errBroken means that the connection ended before the answer. It is returned wrapped.
var errBroken = errors.New("the host does not answer")

// call sends a request, and copies the answer to out. It sends it again for a while if the host
// cannot be reached.
func call(ctx context.Context, g sys.Guest, r request, out io.Writer) error {
	began := time.Now()
	for {
		err := try(ctx, g, r, out)
		limit := patience
		if errors.Is(err, fs.ErrNotExist) {
			limit = absence
		}
		if err == nil || !errors.Is(err, errBroken) {
			return err
		}
		if time.Since(began) > limit {
			return fail.New(fail.Host, "%w", err).WithHint("on the host, allow subtasks: agent-sessionizer config edit config.yaml # subtasks: {count: 10}")
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// dial connects to the host.
func dial(ctx context.Context, g sys.Guest) (net.Conn, error) {
	path := g.Path(guestproto.HostSocket)
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errBroken, err)
	}
	defer dir.Close()
	c, err := new(net.Dialer).DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(dir.Fd()))+"/"+filepath.Base(path)) // of any length
	if errors.Is(err, syscall.EACCES) {
		return nil, fail.New(fail.Policy, "%s is for another user", guestproto.HostSocket).WithHint("run it as the agent's user")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errBroken, err)
	}
	return c, nil
}

// send writes the head of a request, and its body.
func (r request) send(w io.Writer, g sys.Guest, protocol string) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s %s\r\nHost: host\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n", r.method, r.path, protocol, strings.TrimSpace(g.Text(sys.SecretDir+"/token")), len(r.body))
	for name, value := range r.header {
		fmt.Fprintf(&b, "%s: %s\r\n", name, value)
	}
	b.WriteString("\r\n")
	b.Write(r.body)
	_, err := w.Write(b.Bytes())
	return err
}

func try(ctx context.Context, g sys.Guest, r request, out io.Writer) error {
	c, err := dial(ctx, g)
	if err != nil {
		return err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if err := r.send(c, g, "HTTP/1.0"); err != nil {
		return fmt.Errorf("%w: %w", errBroken, err)
	}
	in := bufio.NewReader(c)
	status, length, err := readHead(in)
	if err != nil {
		return fmt.Errorf("%w: %w", errBroken, err)
	}
	if status >= 300 {
		return problem(status, io.LimitReader(in, min(length, maxAnswer)))
	}
	if n, err := io.CopyN(out, in, length); err != nil {
		if n == 0 {
			return fmt.Errorf("%w: %w", errBroken, err)
		}
		return fail.New(fail.Failure, "the host's answer broke off after %d bytes", n).WithHint("try again")
	}
	return nil
}

// readHead reads the status and the length of an answer.
func readHead(in *bufio.Reader) (status int, length int64, err error) {
	length = -1
	for left := maxHeaders; ; {
		line, err := in.ReadString('\n')
		if err != nil {
			return 0, 0, err
		}
		if left -= len(line); left < 0 {
			return 0, 0, errors.New("its headers are too long")
		}
		line = strings.TrimRight(line, "\r\n")
		name, value, _ := strings.Cut(line, ":")
		switch {
		case line == "" && (length < 0 || status == 0) && status != 101:
			return 0, 0, errors.New("its answer has no length")
		case line == "":
			return status, length, nil
		case status == 0:
			if f := strings.Fields(line); len(f) > 1 {
				status, _ = strconv.Atoi(f[1])
			}
			if status == 0 {
				return 0, 0, errors.New("its answer is not HTTP")
			}
		case strings.EqualFold(name, "Content-Length"):
			if length, err = strconv.ParseInt(strings.TrimSpace(value), 10, 64); err != nil || length < 0 {
				return 0, 0, errors.New("its answer has an invalid length")
			}
		}
	}
}

func problem(status int, body io.Reader) error {
	var p struct{ Code, Error, Hint string }
	if err := json.NewDecoder(body).Decode(&p); err != nil {
		return fail.New(fail.Failure, "the host answered with status %d", status)
	}
	err := fail.New(fail.ParseCode(p.Code), "%s", p.Error)
	if p.Hint == "" {
		return err
	}
	return err.WithHint("%s", p.Hint)
}

// ask sends a request and decodes its answer.
func ask(ctx context.Context, g sys.Guest, r request, into any) error {
	var b bytes.Buffer
	if err := call(ctx, g, r, &b); err != nil {
		return err
	}
	return json.Unmarshal(b.Bytes(), into)
}
