package session

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
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
)

// settingsNames are files and directories that programs of developers read without being asked.
var settingsNames = []string{
	".envrc", ".mcp.json", ".claude", ".codex", ".gemini", ".cursor", ".opencode", ".vscode", ".lazygit.yml",
	"CLAUDE.md", "CLAUDE.local.md", "AGENTS.md", "AGENTS.override.md", "GEMINI.md",
}

// plugWorkspace gives the session's VM, which is not running, the disk of the session's workspace.
func (b booter) plugWorkspace(ctx context.Context, s *Session) error {
	name := s.Status.Workspace
	if name == "" && s.Status.Disk == "" {
		return nil
	}
	m, err := b.w.Driver.Inspect(ctx, s.VM())
	if err != nil || m.State == vm.Running {
		return err
	}
	disks, err := dataDisks(b.w.Driver)
	if err != nil {
		return err
	}
	if name != "" {
		if err := b.prepareWorkspace(ctx, s, disks, m.Root == ""); err != nil {
			return fmt.Errorf("prepare workspace %s: %w", name, err)
		}
	}
	// Before the VM has the disk, so that it is taken away later.
	if *s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Disk = cmp.Or(name, f.Disk) }); err != nil {
		return err
	}
	if err := disks.SetDataDisk(ctx, s.VM(), name); err != nil {
		return fmt.Errorf("attach workspace %s: %w", name, err)
	}
	*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Disk = name })
	return err
}

// prepareWorkspace makes the disk of the session's workspace, or makes it larger, and records that the
// session can write to it from now on. machine is false for a VM that is a
// directory of this host.
func (b booter) prepareWorkspace(ctx context.Context, s *Session, disks vm.DataDisks, machine bool) error {
	all := Workspaces{b.w.Sessions}
	lock, err := all.lock(ctx, s.Status.Workspace)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	ws, err := all.Get(s.Status.Workspace)
	if err != nil {
		return err
	}
	_, err = disks.InspectDataDisk(ctx, ws.Name)
	switch {
	case errors.Is(err, vm.ErrNotFound) && ws.Formatted:
		return fail.New(fail.NotFound, "its disk is missing: %w", err)
	case errors.Is(err, vm.ErrNotFound):
		err = disks.CreateDataDisk(ctx, ws.Name, ws.Size)
	case err == nil:
		err = disks.GrowDataDisk(ctx, ws.Name, ws.Size)
	}
	if err != nil {
		return err
	}
	ws.Hostile = ws.Hostile || ws.Writer != "" && ws.Writer != s.ID
	ws.Writer = s.ID
	if ws.Hostile && machine && s.origin() == golden.FromGeneric { // its boot looks for settings on all disks
		return fail.New(fail.Conflict, "an earlier session used it, so it needs a VM made from a golden image").
			WithHint("agent-sessionizer image build --from %s", ssh.Quote(s.Spec.Image))
	}
	if err := all.write(ws); err != nil || !ws.Hostile || s.Status.TrustWorkspace || s.Status.SetAside != "" {
		return err
	}
	*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.SetAside = ".set-aside-" + ids.New() })
	return err
}

// mountWorkspace mounts the session's workspace. Unless the user trusts the workspace, it sets aside what
// an earlier session left there to be run.
func (b booter) mountWorkspace(ctx context.Context, s *Session, conn *ssh.Client) error {
	name := s.Status.Workspace
	if name == "" {
		return nil
	}
	return b.w.step(ctx, s.ID, "mount the workspace", func(ctx context.Context, p vm.Progress) error {
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
		checkedOut := ""
		if s.Spec.Workspace != "" {
			checkedOut = path.Base(s.Repo)
			if err := ws.checkCheckout(s.Spec.Repo); err != nil {
				return err
			}
			if ws.Checkouts == nil {
				ws.Checkouts = map[string]string{}
			}
			ws.Checkouts[checkedOut] = s.RepoKey
		}
		limited, cancel := context.WithTimeoutCause(ctx, mountTimeout, fail.New(fail.Timeout, "the guest did not mount workspace %s within %v", name, mountTimeout))
		defer cancel()
		if ownTools(s) {
			disks, err := dataDisks(b.w.Driver)
			if err != nil {
				return err
			}
			disk, err := disks.InspectDataDisk(ctx, name)
			if err != nil {
				return err
			}
			if _, err := inGuest(limited, conn, "sudo", "sh", "-c", mountScript, "sh", ws.FileSystem, fmt.Sprint(disk.Size), fmt.Sprint(ws.Formatted), guestclient.User); err != nil {
				return fmt.Errorf("mount workspace %s: %w", name, err)
			}
		}
		ws.Formatted = true
		done := checkedOut != "" && s.Status.Base != nil // the checkout has been replaced, too
		if ws.Hostile && !s.Status.TrustWorkspace && !done {
			p("setting aside hooks and settings of an earlier session")
			if err := b.setAside(limited, *s, conn, checkedOut); err != nil {
				return fmt.Errorf("set aside hooks and settings in workspace %s: %w", name, err)
			}
			done = checkedOut == ""
		}
		ws.Hostile = ws.Hostile && !done && !s.Status.TrustWorkspace
		return all.write(ws)
	})
}

func (b booter) setAside(ctx context.Context, s Session, conn *ssh.Client, checkedOut string) error {
	if s.Status.SetAside == "" {
		return errors.New("no directory for it was chosen before the VM had the disk")
	}
	argv := append([]string{"sudo", "bash", "-c", setAsideScript, "bash", s.Status.Root + WorkDir, s.Status.SetAside, checkedOut}, settingsNames...)
	list, err := inGuest(ctx, conn, argv...)
	if err == nil && ownTools(&s) {
		// Without this, a directory that looks like a bare repository is one.
		_, err = inGuest(ctx, conn, "sudo", "git", "config", "--system", "safe.bareRepository", "explicit")
	}
	if err != nil {
		return err
	}
	var paths []string
	for line := range strings.Lines(list) {
		paths = append(paths, strings.TrimPrefix(guestproto.Clean(strings.TrimSpace(line)), "./"))
	}
	if len(paths) == 0 {
		return nil
	}
	more := ""
	if n := len(paths) - shownSetAside; n > 0 {
		paths, more = paths[:shownSetAside], fmt.Sprintf(" and %d more", n)
	}
	b.w.warn(ctx, s.ID, "", "moved to %s/%s, because an earlier session could have changed them: %s%s", WorkDir, s.Status.SetAside, strings.Join(paths, ", "), more)
	return nil
}

// endSetAside records that nothing of an earlier session is left that could be run.
func (b booter) endSetAside(ctx context.Context, s Session) error {
	if !s.adoptsCheckout() {
		return nil
	}
	_, err := Workspaces{b.w.Sessions}.update(ctx, s.Status.Workspace, func(ws *Workspace) error {
		ws.Hostile = false
		return nil
	})
	return err
}

// adoptsCheckout reports whether the checkout of s consists of files that an earlier session left.
func (s Session) adoptsCheckout() bool { return s.Spec.Workspace != "" && s.Status.SetAside != "" }

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
