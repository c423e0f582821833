package lima

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/lima-vm/lima/pkg/store/filenames"
)

// monitor is a connection to QEMU's machine protocol:
// https://www.qemu.org/docs/master/interop/qmp-spec.html. QEMU serves one at a time.
type monitor struct {
	conn net.Conn
	in   *json.Decoder
	out  *json.Encoder
	stop func() bool
}

// dialMonitor connects to the QEMU of the VM in dir, once it listens. The connection
// ends with ctx.
func dialMonitor(ctx context.Context, dir string) (*monitor, error) {
	for {
		c, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, filenames.QMPSock))
		if err == nil {
			m := &monitor{conn: c, in: json.NewDecoder(c), out: json.NewEncoder(c)}
			m.stop = context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Now()) }) // interrupts pending reads and writes
			var greeting struct{ QMP json.RawMessage }
			if err := m.in.Decode(&greeting); err != nil {
				return nil, errors.Join(fmt.Errorf("QEMU's monitor: %w", err), m.Close())
			}
			if _, err := m.do("qmp_capabilities", nil); err != nil {
				return nil, errors.Join(err, m.Close())
			}
			return m, nil
		}
		if waitErr := sleep(ctx, qmpPoll); waitErr != nil {
			return nil, fmt.Errorf("QEMU's monitor: %w", err)
		}
	}
}

// Close closes the connection. It may be called twice.
func (m *monitor) Close() error {
	m.stop()
	return m.conn.Close()
}

// do runs one command and returns its result.
func (m *monitor) do(command string, args map[string]any) (json.RawMessage, error) {
	request := map[string]any{"execute": command}
	if args != nil {
		request["arguments"] = args
	}
	if err := m.out.Encode(request); err != nil {
		return nil, fmt.Errorf("QEMU's monitor: %s: %w", command, err)
	}
	for {
		var reply struct {
			Return json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := m.in.Decode(&reply); err != nil {
			return nil, fmt.Errorf("QEMU's monitor: %s: %w", command, err)
		}
		switch {
		case reply.Error != nil:
			return nil, fmt.Errorf("QEMU's monitor: %s: %s", command, clean(reply.Error.Desc))
		case reply.Return != nil: // otherwise an event
			return reply.Return, nil
		}
	}
}

// ask runs one command and decodes its result.
func (m *monitor) ask(command string, into any) error {
	raw, err := m.do(command, nil)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("QEMU's monitor: %s: %w", command, err)
	}
	return nil
}

// until repeats a query until done returns true for its result.
func until[T any](ctx context.Context, m *monitor, query string, done func(T) (bool, error)) error {
	for {
		var v T
		if err := m.ask(query, &v); err != nil {
			return err
		}
		if ok, err := done(v); ok || err != nil {
			return err
		}
		if err := sleep(ctx, qmpPoll); err != nil {
			return err
		}
	}
}
