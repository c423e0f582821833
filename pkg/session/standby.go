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

// SizeOf returns the size of a VM with the given resources.
func SizeOf(r config.Resources) golden.Size {
	return golden.Size{CPUs: r.CPUs, Memory: int64(r.Memory), Disk: int64(r.Disk)}
}

// standbys turns standby VMs into sessions' own, and prepares the next ones.
type standbys struct{ w *Worker }

// adoptStandby turns a standby VM into the session's own VM. It may be repeated.
func (p standbys) adoptStandby(ctx context.Context, s *Session, standby golden.Standby) error {
	provisioned, err1 := guestclient.ScriptsKey(p.w.Golden.Scripts)
	program, err2 := guestclient.ProgramKey(s.Arch())
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	for _, part := range []struct{ from, to string }{
		{golden.GatewayFolder, p.w.Sessions.Config.Paths.Gateway(s.ID)},
		{golden.KeyFile, Connections{Paths: p.w.Sessions.Config.Paths}.keyFile(s.ID)},
		{golden.KeyFile + ".pub", Connections{Paths: p.w.Sessions.Config.Paths}.keyFile(s.ID) + ".pub"}, // last: its presence means that the private key is complete
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
	now, err := p.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		f.From, f.VM, f.Warm, f.Provisioned, f.Program = golden.FromPool, standby.VM, "", provisioned, program
	})
	if err != nil {
		return err
	}
	*s = now
	return os.RemoveAll(standby.Dir)
}

// releaseStandby removes a standby VM that was taken and never became the session's.
func (p standbys) releaseStandby(ctx context.Context, id string) error {
	standby, err := golden.ReadStandby(p.w.Sessions.Config.Paths.Standby(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return p.w.Golden.Pool.Discard(ctx, standby)
}

// freeStandbyMemory removes the standby VMs when a session of another size needs their memory.
func (p standbys) freeStandbyMemory(ctx context.Context, memory config.Size) error {
	host, err := MeasureHost(p.w.Sessions.Config.Paths.State)
	if err != nil || host.FreeMemory == 0 || host.FreeMemory >= memory/2+p.w.Sessions.Config.Limits.MemoryReserve {
		return err
	}
	return p.w.Golden.Pool.Drain(ctx, false, nil)
}
