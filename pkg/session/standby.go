package session

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// standbyDir returns the directory that a standby VM is moved to when a session takes
// it (golden.Pool.Take). While it exists, adoptStandby has not moved all of its
// content yet.
func (m *Manager) standbyDir(id string) string {
	return filepath.Join(m.Config.Paths.SessionDir(id), "standby")
}

// SizeOf returns the size of a VM with the given resources.
func SizeOf(r config.Resources) golden.Size {
	return golden.Size{CPUs: r.CPUs, Memory: int64(r.Memory), Disk: int64(r.Disk)}
}

// adoptStandby turns a standby VM into the session's own VM. It may be repeated.
func (w *Worker) adoptStandby(ctx context.Context, s *Session, standby golden.Standby) error {
	provisioned, err1 := guestclient.ScriptsKey(w.Golden.Scripts)
	program, err2 := guestclient.ProgramKey(Arch())
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	for _, part := range []struct{ from, to string }{
		{golden.GatewayFolder, w.gatewayDir(s.ID)},
		{golden.KeyFile, w.keyFile(s.ID)},
		{golden.KeyFile + ".pub", w.keyFile(s.ID) + ".pub"}, // last: its presence means that the private key is complete
	} {
		from := filepath.Join(standby.Dir, part.from)
		if _, err := os.Lstat(from); errors.Is(err, fs.ErrNotExist) {
			continue // moved by an earlier attempt
		}
		// The target may exist from an earlier VM of the session.
		if err := errors.Join(os.RemoveAll(part.to), os.Rename(from, part.to)); err != nil {
			return err
		}
	}
	now, err := w.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		f.From, f.VM, f.Warm, f.Provisioned, f.Program = golden.FromPool, standby.VM, "", provisioned, program
	})
	if err != nil {
		return err
	}
	*s = now
	return os.RemoveAll(standby.Dir)
}

// releaseStandby removes a standby VM that was taken and never became the session's.
func (w *Worker) releaseStandby(ctx context.Context, id string) error {
	standby, err := golden.ReadStandby(w.standbyDir(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return w.Golden.Pool.Discard(ctx, standby)
}

// freeStandbyMemory removes the standby VMs when a session of another size needs their memory.
func (w *Worker) freeStandbyMemory(ctx context.Context, memory config.Size) error {
	host, err := measureHost(w.Config.Paths.State)
	if err != nil || host.FreeMemory == 0 || host.FreeMemory >= memory/2+w.Config.Limits.MemoryReserve {
		return err
	}
	return w.Golden.Pool.Drain(ctx, false, nil)
}
