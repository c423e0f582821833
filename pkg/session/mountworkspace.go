package session

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	mountTimeout  = 30 * time.Minute // an emulated guest may have to check a large file system
	maxSetAside   = 16 << 10         // bytes of the list that is shown
	shownSetAside = 5
)

var (
	//go:embed guest/mountworkspace.sh
	mountScript string
	//go:embed guest/setaside.sh
	setAsideScript string
	//go:embed guest/restoresettings.sh
	restoreSettingsScript string
)

// plugWorkspace gives the session's VM, which is not running, the disk of the session's workspace.
func (b booter) plugWorkspace(ctx context.Context, s *Session) error {
	name := s.Status.Workspace
	if name == "" && s.Status.Disk == "" {
		return nil
	}
	if m, err := b.w.Driver.Inspect(ctx, s.VM()); err != nil || m.State == vm.Running {
		return err
	}
	disks, err := dataDisks(b.w.Driver)
	if err != nil {
		return err
	}
	if name != "" {
		ws, err := Workspaces{b.w.Sessions}.Get(name)
		if err != nil {
			return err
		}
		_, err = disks.InspectDataDisk(ctx, name)
		switch {
		case errors.Is(err, vm.ErrNotFound) && ws.Formatted:
			return fail.New(fail.NotFound, "the disk of workspace %s is missing: %w", name, err)
		case errors.Is(err, vm.ErrNotFound):
			err = disks.CreateDataDisk(ctx, name, ws.Size)
		case err == nil:
			err = disks.GrowDataDisk(ctx, name, ws.Size)
		}
		if err != nil {
			return fmt.Errorf("prepare workspace %s: %w", name, err)
		}
	}
	if err := disks.SetDataDisk(ctx, s.VM(), name); err != nil {
		return fmt.Errorf("attach workspace %s: %w", name, err)
	}
	*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Disk = name })
	return err
}

// mountWorkspace mounts the session's workspace. Unless the user trusts the workspace, it sets aside what
// an earlier session left there to be run, and returns whether it did.
func (b booter) mountWorkspace(ctx context.Context, s *Session, conn *ssh.Client) (setAside bool, err error) {
	name := s.Status.Workspace
	if name == "" {
		return false, nil
	}
	err = b.w.step(ctx, s.ID, "mount the workspace", func(ctx context.Context, p vm.Progress) error {
		all := Workspaces{b.w.Sessions}
		lock, err := all.lock(ctx, name)
		if err != nil {
			return err
		}
		defer lock.Unlock()
		ws, err := all.Get(name)
		if err != nil {
			return err
		}
		if s.Spec.Workspace != "" {
			if err := ws.checkCheckout(s.Spec.Repo); err != nil {
				return err
			}
			if ws.Checkouts == nil {
				ws.Checkouts = map[string]string{}
			}
			ws.Checkouts[path.Base(s.Repo)] = s.RepoKey
		}
		limited, cancel := context.WithTimeoutCause(ctx, mountTimeout, fail.New(fail.Timeout, "the guest did not mount workspace %s within %v", name, mountTimeout))
		defer cancel()
		if ownTools(s) {
			if _, err := inGuest(limited, conn, "sudo", "sh", "-c", mountScript, "sh", ws.FileSystem, fmt.Sprint(ws.Size), fmt.Sprint(ws.Formatted), guestclient.User); err != nil {
				return fmt.Errorf("mount workspace %s: %w", name, err)
			}
		}
		if ws.Writer != "" && ws.Writer != s.ID && !s.Status.TrustWorkspace {
			p("setting aside hooks and settings of an earlier session")
			setAside = true
			list, err := inGuest(limited, conn, "sudo", "bash", "-c", setAsideScript, "bash", s.Status.Root+WorkDir, time.Now().UTC().Format("20060102T150405Z"))
			if err != nil {
				return fmt.Errorf("set aside hooks and settings in workspace %s: %w", name, err)
			}
			b.warnSetAside(ctx, *s, list)
		}
		ws.Formatted, ws.Writer = true, s.ID
		return all.write(ws)
	})
	return setAside, err
}

func (b booter) warnSetAside(ctx context.Context, s Session, list string) {
	var paths []string
	for line := range strings.Lines(list) {
		paths = append(paths, guestproto.Clean(strings.TrimSpace(line)))
	}
	if len(paths) == 0 {
		return
	}
	more := ""
	if n := len(paths) - shownSetAside; n > 0 {
		paths, more = paths[:shownSetAside], fmt.Sprintf(" and %d more", n)
	}
	b.w.warn(ctx, s.ID, "", "moved to %s/.set-aside, because an earlier session could have changed them: %s%s", WorkDir, strings.Join(paths, ", "), more)
}

// restoreSettings writes the settings of agents in the checkout as they are in the commit that the host
// knows.
func (b booter) restoreSettings(ctx context.Context, s Session, conn *ssh.Client, commit string) error {
	if s.Spec.Workspace == "" || commit == "" {
		return nil // the checkout is not in the workspace, or was not made now
	}
	_, err := inGuest(ctx, conn, "bash", "-c", restoreSettingsScript, "bash", s.Status.Dir, commit)
	return err
}

// inGuest runs a command in the guest and returns the beginning of its output. The error has the
// beginning of its error output.
func inGuest(ctx context.Context, conn *ssh.Client, argv ...string) (string, error) {
	var out, errs bytes.Buffer
	err := conn.Run(ctx, ssh.Quote(argv...), ssh.IO{
		Stdout: &pipe.Writer{W: &out, Left: maxSetAside, Cut: true}, Stderr: &pipe.Writer{W: &errs, Left: 1 << 10, Cut: true},
	})
	if err != nil && errs.Len() > 0 {
		err = fmt.Errorf("%w: %s", err, guestproto.Clean(strings.TrimSpace(errs.String())))
	}
	return out.String(), err
}
