package session

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	// DefaultWorkspace is the size of a workspace, in bytes.
	DefaultWorkspace = 80 << 30

	rebindTimeout = 10 * time.Minute

	minWorkspace = 64 << 20
	maxWorkspace = 16 << 40
)

// WorkDir is where a session has its workspace in the guest.
const WorkDir = "/work"

var workspaceName = lazyregexp.New(`^[a-z0-9]+([._-][a-z0-9]+)*$`)

// Workspace is a disk that outlives sessions. At most one session has it.
type Workspace struct {
	Name      string    `json:"name"`
	Size      int64     `json:"size"` // bytes; the disk gets it at the next start
	CreatedAt time.Time `json:"created_at"`

	// FileSystem is the UUID of the disk's file system. Formatted is whether the disk has it, and
	// must never be formatted again.
	FileSystem string `json:"file_system"`
	Formatted  bool   `json:"formatted,omitempty"`

	// Writer is the id of the session whose VM last had the disk. Hostile is whether an earlier one had
	// it, and what that one left to be run has not been set aside.
	Writer  string `json:"writer,omitempty"`
	Hostile bool   `json:"hostile,omitempty"`

	// Checkouts are the repositories that have a checkout in it, by the directory.
	Checkouts map[string]string `json:"checkouts,omitempty"`
}

// checkCheckout returns an error if another repository has the directory that the checkout of ref gets.
func (ws Workspace) checkCheckout(ref repo.Ref) error {
	dir := path.Base(ref.Slug)
	if key := ws.Checkouts[dir]; key != "" && key != ref.Key {
		return fail.New(fail.Usage, "%s/%s of workspace %s is a checkout of %s", WorkDir, dir, ws.Name, key).WithHint("agent-sessionizer workspace create NAME")
	}
	return nil
}

// Workspaces are the workspaces of this host, one file each. Which session has one is in the session's
// row.
type Workspaces struct{ Sessions *Manager }

func (w Workspaces) file(name string) string {
	return filepath.Join(w.Sessions.Config.Paths.State, "workspaces", name+".json")
}

// lock serialises the changes of a workspace.
func (w Workspaces) lock(ctx context.Context, name string) (*lockfile.Lock, error) {
	return lockfile.Wait(ctx, filepath.Join(w.Sessions.Config.Paths.State, "locks", "workspace-"+name), nil)
}

func (w Workspaces) write(ws Workspace) error {
	text, err := json.Marshal(ws)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(w.file(ws.Name)), 0o700); err != nil {
		return err
	}
	return atomicfile.Write(w.file(ws.Name), text, 0o600)
}

// Get returns a workspace.
func (w Workspaces) Get(name string) (ws Workspace, err error) {
	if err := checkWorkspaceName(name); err != nil {
		return ws, err
	}
	text, err := os.ReadFile(w.file(name))
	if errors.Is(err, fs.ErrNotExist) {
		return ws, fail.New(fail.NotFound, "no workspace is named %s", name).WithHint("agent-sessionizer workspace create %s", name)
	}
	if err == nil {
		err = json.Unmarshal(text, &ws)
	}
	if err != nil {
		return ws, fmt.Errorf("read workspace %s: %w", name, err)
	}
	return ws, nil
}

func checkWorkspaceName(name string) error {
	if len(name) > 40 || !workspaceName.MatchString(name) {
		return fail.New(fail.Usage, "the name of a workspace must be at most 40 lower-case letters and digits, with single . _ - between them, got %q", name)
	}
	return nil
}

// List returns all workspaces by name.
func (w Workspaces) List() (all []Workspace, err error) {
	entries, err := os.ReadDir(filepath.Dir(w.file("")))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var errs []error
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || strings.HasPrefix(name, ".") {
			continue
		}
		ws, err := w.Get(name)
		if err == nil {
			all = append(all, ws)
		}
		errs = append(errs, err)
	}
	return all, errors.Join(append(errs, err)...)
}

// Create creates a workspace. Its disk is made when a session first starts with it.
func (w Workspaces) Create(ctx context.Context, name string, size int64) (ws Workspace, err error) {
	if err := errors.Join(checkWorkspaceName(name), checkWorkspaceSize(size)); err != nil {
		return ws, err
	}
	lock, err := w.lock(ctx, name)
	if err != nil {
		return ws, err
	}
	defer lock.Unlock()
	if _, err := os.Stat(w.file(name)); err == nil {
		return ws, fail.New(fail.Conflict, "workspace %s exists already", name).WithHint("agent-sessionizer workspace show %s", name)
	}
	ws = Workspace{Name: name, Size: size, CreatedAt: time.Now().UTC(), FileSystem: uuid.NewString()}
	err = w.write(ws)
	w.Sessions.auditWorkspace(ctx, audit.WorkspaceCreated, name, Session{}, err)
	return ws, err
}

func checkWorkspaceSize(size int64) error {
	if size < minWorkspace || size > maxWorkspace {
		return fail.New(fail.Usage, "the size of a workspace must be from %v to %v, got %v", config.Size(minWorkspace), config.Size(maxWorkspace), config.Size(size))
	}
	return nil
}

// isFree returns an error if one of the sessions has a workspace.
func isFree(name string, sessions []store.Session) error {
	if name == "" {
		return nil
	}
	for _, row := range sessions {
		s, err := read(row, nil)
		if err != nil {
			return err
		}
		if s.Status.Workspace == name && s.Phase != Gone {
			return inUse(name, s)
		}
	}
	return nil
}

// Holder returns the session that has a workspace; ok is false if none has it.
func (w Workspaces) Holder(ctx context.Context, name string) (s Session, ok bool, err error) {
	all, err := w.Sessions.List(ctx)
	i := slices.IndexFunc(all, func(s Session) bool { return s.Status.Workspace == name && s.Phase != Gone })
	if err != nil || i < 0 {
		return Session{}, false, err
	}
	return all[i], true, nil
}

func inUse(name string, by Session) error {
	hint := "agent-sessionizer workspace detach " + name
	if by.Spec.Workspace == name {
		hint = "agent-sessionizer open " + by.Name
	}
	return fail.New(fail.Conflict, "session %s has workspace %s", by.Name, name).WithHint("%s", hint)
}

// Attach gives a stopped session a workspace that no session has. If trust is set, the session runs
// what earlier sessions left in it.
func (w Workspaces) Attach(ctx context.Context, name string, s Session, trust bool) (Session, error) {
	lock, err := w.lock(ctx, name)
	if err != nil {
		return s, err
	}
	defer lock.Unlock()
	if _, err := w.Get(name); err != nil {
		return s, err
	}
	by, held, err := w.Holder(ctx, name)
	if err != nil || held && by.ID == s.ID {
		return s, err
	}
	if held {
		return s, inUse(name, by)
	}
	s, err = w.change(ctx, s, name, func(f *Status) error {
		if f.Workspace != "" {
			return fail.New(fail.Conflict, "session %s has workspace %s", s.Name, f.Workspace).WithHint("agent-sessionizer workspace detach %s", f.Workspace)
		}
		if f.hasSavedState() || s.Spec.Fork != nil && !f.WasReady {
			return fail.New(fail.Conflict, "session %s has checkpoints or is suspended, and a workspace would not match that state", s.Name).WithHint("agent-sessionizer checkpoints %s", s.Name)
		}
		f.Workspace, f.TrustWorkspace = name, trust
		f.SetAside = "" // sessions that had it since know that name
		return nil
	})
	w.Sessions.auditWorkspace(ctx, audit.WorkspaceAttached, name, s, err)
	return s, err
}

// Detach takes a workspace away from the session that has it, which must be stopped.
func (w Workspaces) Detach(ctx context.Context, name string) error {
	lock, err := w.lock(ctx, name)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	if _, err := w.Get(name); err != nil {
		return err
	}
	s, held, err := w.Holder(ctx, name)
	if err != nil || !held {
		return err
	}
	_, err = w.change(ctx, s, name, func(f *Status) error {
		if s.Spec.Workspace == name {
			return fail.New(fail.Conflict, "the checkout of session %s is in workspace %s", s.Name, name).WithHint("agent-sessionizer workspace rebind %s", name)
		}
		f.Workspace, f.TrustWorkspace = "", false
		return nil
	})
	w.Sessions.auditWorkspace(ctx, audit.WorkspaceDetached, name, s, err)
	return err
}

// WorkspaceChange is the event of a workspace that a session got or lost.
type WorkspaceChange struct {
	Name     string `json:"name"`
	Attached bool   `json:"attached"`
	By       string `json:"by,omitempty"`
}

// change changes the status of a stopped session that gets or loses the workspace name.
func (w Workspaces) change(ctx context.Context, s Session, name string, f func(*Status) error) (Session, error) {
	return read(w.Sessions.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
		if Phase(row.Phase) != Stopped || Phase(row.Desired) != Stopped {
			return store.Event{}, fail.New(fail.Conflict, "session %s is %s, not stopped", row.Name, row.Phase).WithHint("agent-sessionizer stop %s", row.Name)
		}
		var refused error
		now := ""
		err := change(row, func(status *Status) {
			refused = f(status)
			now = status.Workspace
		})
		return store.NewEvent(EventWorkspace, WorkspaceChange{Name: name, Attached: now == name, By: w.Sessions.Actor}), errors.Join(err, refused)
	}))
}

// Resize makes a workspace larger. Its disk and file system grow when a session next starts with it.
func (w Workspaces) Resize(ctx context.Context, name string, size int64) (Workspace, error) {
	ws, err := w.update(ctx, name, func(ws *Workspace) error {
		if size < ws.Size {
			return fail.New(fail.Usage, "workspace %s has %v and cannot shrink", name, config.Size(ws.Size))
		}
		ws.Size = size
		return checkWorkspaceSize(size)
	})
	w.Sessions.auditWorkspace(ctx, audit.WorkspaceResized, name, Session{}, err)
	return ws, err
}

// update changes a workspace, unless f returns an error.
func (w Workspaces) update(ctx context.Context, name string, f func(*Workspace) error) (Workspace, error) {
	lock, err := w.lock(ctx, name)
	if err != nil {
		return Workspace{}, err
	}
	defer lock.Unlock()
	ws, err := w.Get(name)
	if err == nil {
		err = f(&ws)
	}
	if err != nil {
		return Workspace{}, err
	}
	return ws, w.write(ws)
}

// Delete deletes a workspace that no session has, and its disk.
func (w Workspaces) Delete(ctx context.Context, driver vm.Driver, name string) error {
	lock, err := w.lock(ctx, name)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	if _, err := w.Get(name); err != nil {
		return err
	}
	by, held, err := w.Holder(ctx, name)
	if err != nil {
		return err
	}
	if held {
		return inUse(name, by)
	}
	disks, err := dataDisks(driver)
	if err != nil {
		return err
	}
	if err = disks.DeleteDataDisk(ctx, name); err == nil {
		err = os.Remove(w.file(name))
	}
	w.Sessions.auditWorkspace(ctx, audit.WorkspaceDeleted, name, Session{}, err)
	if err != nil {
		return fmt.Errorf("delete workspace %s: %w", name, err)
	}
	return lock.Remove()
}

// Rebind destroys the session whose checkout is in a workspace, with everything outside the workspace,
// and creates another one like it that has the workspace.
func (w Workspaces) Rebind(ctx context.Context, name, profile string, trust bool) (s Session, notices []string, err error) {
	if _, err := w.Get(name); err != nil {
		return s, nil, err
	}
	old, held, err := w.Holder(ctx, name)
	if err != nil {
		return s, nil, err
	}
	if !held {
		return s, nil, fail.New(fail.Conflict, "no session has workspace %s", name).WithHint("agent-sessionizer open owner/repo --workspace %s", name)
	}
	if old.Task != "" {
		return s, nil, fail.New(fail.Conflict, "session %s belongs to task %s", old.Name, old.Task)
	}
	if old.Spec.Workspace != name {
		return s, nil, fail.New(fail.Conflict, "the checkout of session %s is not in workspace %s", old.Name, name).WithHint("agent-sessionizer workspace detach %s", name)
	}
	r := Request{
		Repo: old.Spec.Repo, Profile: cmp.Or(profile, old.Spec.Profile), Image: old.Spec.Image, Arch: old.Spec.Arch, NetworkMode: old.Spec.NetworkMode,
		HostServices: old.Spec.HostServices, Secrets: old.Spec.Secrets, Requests: old.Spec.Requests, Budget: old.Spec.Budget,
		Branch: old.Spec.NewBranch, Label: old.Label, Numbered: old.Spec.Numbered, Workspace: name, TrustWorkspace: trust,
	}
	if profile == "" {
		r.Resources = old.Spec.Resources
	}
	if _, err = w.Sessions.Check(r); err != nil {
		return s, nil, err
	}
	if old, err = w.Sessions.SetDesired(ctx, old, Gone); err != nil {
		return s, nil, err
	}
	limited, cancel := context.WithTimeoutCause(ctx, rebindTimeout, fail.New(fail.Timeout, "session %s was not destroyed within %v", old.Name, rebindTimeout).WithHint("agent-sessionizer logs %s", old.Name))
	defer cancel()
	for old.Phase != Gone {
		select {
		case <-limited.Done():
			return s, nil, context.Cause(limited)
		case <-time.After(200 * time.Millisecond):
		}
		if old, err = w.Sessions.Get(limited, old.ID); err != nil {
			return s, nil, errors.Join(err, context.Cause(limited))
		}
		if err := w.Sessions.Tend(limited, old.Session); err != nil {
			return s, nil, err
		}
	}
	if s, _, notices, err = w.Sessions.Open(ctx, r); err == nil && s.Status.Workspace != name {
		err = fail.New(fail.Conflict, "session %s was created meanwhile, without workspace %s", s.Name, name)
	}
	if err != nil && fail.HintOf(err) == "" {
		err = fail.New(fail.CodeOf(err), "session %s is gone, and the new one was not created: %w", old.Name, err).WithHint("agent-sessionizer open %s --workspace %s", old.Repo, name)
	}
	return s, notices, err
}

func dataDisks(driver vm.Driver) (vm.DataDisks, error) {
	disks, ok := driver.(vm.DataDisks)
	if !ok {
		return nil, fail.New(fail.Host, "the VM manager has no workspaces")
	}
	return disks, nil
}
