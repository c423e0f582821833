// Package gc removes what no session and no task needs any more: leftovers of those that are
// gone, replaced images, unused mirrors and standby VMs.
//
// Each part removes objects through the package that owns them, under that package's locks,
// and can be repeated after a kill -9. Nothing that is in use is removed.
package gc

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/recording"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Options configures a Collector.
type Options struct {
	Config *config.Config
	DryRun bool          // only report
	Unused time.Duration // without use, after which mirrors are removed

	// Sessions opens the store, and starts missing keepers unless it is a dry run. It is
	// called at most once.
	Sessions func(context.Context) (*session.Manager, error)
	Driver   func() (vm.Driver, error)
	Maker    func() (*golden.Maker, error)

	Actor string // for the audit log
	Audit func(context.Context, audit.Record)
	Say   func(format string, args ...any) // reports why an image stays
}

// Object is something that was removed or kept.
type Object struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
	Path string `json:"path,omitempty"`
	Size int64  `json:"size"` // bytes
	Why  string `json:"why"`  // why it is removed or kept
}

// Report is the result of a Collector.
type Report struct {
	DryRun  bool     `json:"dry_run"`
	Removed []Object `json:"removed"` // in a dry run: would be removed
	Kept    []Object `json:"kept"`    // looks abandoned, but may be in use
	Size    int64    `json:"size"`    // total of Removed in bytes
}

// Part is one part of the work.
type Part func(context.Context, *collector) error

// Orphans returns the parts that remove objects without an owner. They also run without a
// request of the user.
func Orphans() []Part {
	return []Part{expired, sessions, tasks, machines, unfinishedSetups, locks, recordings, clones, files}
}

// collector is one run.
type collector struct {
	Options
	report Report
	opened *session.Manager // nil until manager is called
	lost   bool             // manager has failed and returned its error
}

// Run runs the parts. An error in one part does not prevent the others.
func Run(ctx context.Context, o Options, parts ...Part) (Report, error) {
	c := &collector{Options: o, report: Report{DryRun: o.DryRun, Removed: []Object{}, Kept: []Object{}}}
	var errs []error
	for _, part := range parts {
		if ctx.Err() != nil {
			break
		}
		errs = append(errs, part(ctx, c))
	}
	return c.report, errors.Join(append(errs, ctx.Err())...)
}

const day = 24 * time.Hour

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// recordRemoved records a removed object, and adds it to the audit log as the given resource.
func (c *collector) recordRemoved(ctx context.Context, resource string, o Object) {
	c.report.Removed = append(c.report.Removed, o)
	c.report.Size += o.Size
	c.auditRemoval(ctx, resource, o, nil)
}

// auditRemoval adds the result of a removal to the audit log.
func (c *collector) auditRemoval(ctx context.Context, resource string, o Object, err error) {
	if c.DryRun {
		return
	}
	c.Audit(ctx, audit.Record{
		Type: audit.OrphanRemoved, Actor: c.Actor, Resource: resource, Outcome: audit.OutcomeOf(err),
		Details: map[string]any{"kind": o.Kind, "name": o.Name, "bytes": o.Size, "reason": o.Why},
	})
}

func (c *collector) recordKept(o Object) { c.report.Kept = append(c.report.Kept, o) }

// manager returns nil if there is no store, which a dry run does not create. It also
// returns nil if an earlier call has already returned an error.
func (c *collector) manager(ctx context.Context) (_ *session.Manager, err error) {
	if c.opened != nil || c.lost || c.DryRun && !exists(c.Config.Paths.Store()) {
		return c.opened, nil
	}
	c.opened, err = c.Sessions(ctx)
	c.lost = err != nil
	return c.opened, err
}

// remove calls f to remove a resource, while it holds the lock at path. If another process
// holds the lock, the resource is in use and stays. A dry run only checks the lock.
func (c *collector) remove(ctx context.Context, resource string, o Object, path string, f func() error) error {
	if c.DryRun {
		if !lockfile.Held(path) {
			c.recordRemoved(ctx, resource, o)
		}
		return nil
	}
	lock, free, err := lockfile.Try(path)
	if err != nil || !free {
		return err
	}
	if err := f(); err != nil {
		c.auditRemoval(ctx, resource, o, err)
		return errors.Join(err, lock.Unlock())
	}
	if err := lock.Remove(); err != nil {
		return fail.New(fail.Host, "remove lock file: %w", err)
	}
	c.recordRemoved(ctx, resource, o)
	return nil
}

// expired destroys sessions that were stopped long ago, if nothing would be lost.
func expired(ctx context.Context, c *collector) error {
	m, err := c.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	all, err := m.List(ctx)
	if err != nil {
		return err
	}
	tasks := &task.Manager{Sessions: m}
	var errs []error
	for _, s := range all {
		done, err := m.CleanUp(ctx, s.ID, c.DryRun, func() (string, error) { return tasks.Needing(ctx, s.ID) })
		dir := filepath.Join(c.Config.Paths.LimaHome, s.VM())
		o := Object{Kind: "session", Name: s.Name, Path: dir, Size: image.DiskUsage(dir), Why: "it has been stopped for longer than cleanup_ttl, and has no unsaved work"}
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("clean up session %s: %w", s.Name, err))
		case done.Kept != "":
			o.Why = done.Kept
			c.recordKept(o)
		case done.Due:
			// The keeper removes it, and adds that to the audit log.
			c.report.Removed = append(c.report.Removed, o)
			c.report.Size += o.Size
		}
	}
	return errors.Join(errs...)
}

// sessions removes the directories and events of sessions that are gone.
func sessions(ctx context.Context, c *collector) error {
	m, err := c.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	all := filepath.Dir(c.Config.Paths.SessionDir("x"))
	entries, err := os.ReadDir(all)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fail.New(fail.Host, "list session directories: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(all, e.Name())
		s, err := m.Get(ctx, e.Name())
		o := Object{Kind: "session directory", Name: e.Name(), Path: dir, Size: image.DiskUsage(dir)}
		switch {
		case fail.CodeOf(err) == fail.NotFound:
			o.Why = "no session has this id; it may contain the key of a VM"
			c.recordKept(o)
			continue
		case err != nil:
			return err
		case s.Phase != session.Gone: // gone is final
			continue
		}
		o.Name, o.Why = s.Name, "the session is gone"
		if err := c.remove(ctx, "session:"+s.ID, o, c.Config.Paths.SessionLock(s.ID), func() error {
			return errors.Join(m.Gateway(s).Stop(ctx), os.RemoveAll(dir))
		}); err != nil {
			return err
		}
	}
	rows, err := m.Store.Sessions(ctx, true)
	if err != nil {
		return err
	}
	// After a day, every follower has seen the end of its session.
	before, over := time.Now().Add(-day), map[string]bool{}
	for _, row := range rows {
		over[row.ID] = session.Phase(row.Phase) == session.Gone && row.StateChangedAt.Before(before)
	}
	n, bytes, err := m.Store.PruneEvents(ctx, before, func(id string) bool { return !over[id] }, c.DryRun)
	if n > 0 {
		c.recordRemoved(ctx, "events", Object{Kind: "events", Name: strconv.Itoa(n), Path: c.Config.Paths.Store(), Size: bytes, Why: "their sessions have been gone for a day"})
	}
	return err
}

// tasks removes the directories and events of tasks that ended long ago, and directories
// left by interrupted submissions. Rows stay, so that an id is never used twice.
func tasks(ctx context.Context, c *collector) error {
	m, err := c.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	tm := &task.Manager{Sessions: m}
	ttl := c.Config.Tasks.CleanupTTL
	all := filepath.Dir(c.Config.Paths.TaskDir("x"))
	entries, err := os.ReadDir(all)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fail.New(fail.Host, "list task directories: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(all, e.Name())
		o := Object{Kind: "task", Name: e.Name(), Path: dir}
		t, err := tm.Get(ctx, e.Name())
		switch {
		case fail.CodeOf(err) == fail.NotFound:
			st, err := e.Info()
			if err != nil || time.Since(st.ModTime()) < day {
				continue // its row may not be written yet
			}
			o.Why = "interrupted submission"
		case err != nil:
			return err
		case !task.AtRest(t.Phase) || !t.Phase.Over() || time.Since(t.StateChangedAt) < ttl:
			continue
		default:
			o.Why = "ended " + console.Ago(t.StateChangedAt) + " ago"
		}
		o.Size = image.DiskUsage(dir)
		if err := c.remove(ctx, "task:"+e.Name(), o, tm.LockPath(e.Name()), func() error { return os.RemoveAll(dir) }); err != nil {
			return err
		}
	}
	over := map[string]bool{}
	rows, err := tm.List(ctx, store.TaskFilter{})
	if err != nil {
		return err
	}
	for _, t := range rows {
		over[t.ID] = task.AtRest(t.Phase) && t.Phase.Over() && time.Since(t.StateChangedAt) > ttl
	}
	n, bytes, err := m.Store.PruneEvents(ctx, time.Now().Add(-ttl), func(id string) bool { return !over[id] }, c.DryRun)
	if n > 0 {
		c.recordRemoved(ctx, "events", Object{Kind: "events", Name: strconv.Itoa(n), Path: c.Config.Paths.Store(), Size: bytes, Why: fmt.Sprintf("their tasks ended more than %v ago", ttl)})
	}
	return err
}

// recordings removes recordings of terminals that ended long ago.
func recordings(ctx context.Context, c *collector) error {
	kept := recording.Store{Dir: c.Config.Paths.Recordings()}
	old, err := kept.Expired(time.Now().Add(-time.Duration(c.Config.Recordings.Keep)))
	if err != nil {
		return err
	}
	for _, id := range slices.Sorted(maps.Keys(old)) {
		if !c.DryRun {
			if _, err := kept.Remove(id); err != nil && fail.CodeOf(err) != fail.NotFound {
				return err
			}
		}
		c.recordRemoved(ctx, "recordings:"+id, Object{Kind: "recordings", Name: id, Path: kept.Subject(id), Size: old[id], Why: fmt.Sprintf("nothing was recorded for %v", c.Config.Recordings.Keep)})
	}
	return nil
}

// locks removes lock files that killed keepers left, of sessions that are gone and tasks
// that are at rest.
func locks(ctx context.Context, c *collector) error {
	m, err := c.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	tm := &task.Manager{Sessions: m}
	files, err := filepath.Glob(c.Config.Paths.SessionLock("*"))
	if err != nil {
		return err
	}
	tasks, err := filepath.Glob(tm.LockPath("*"))
	if err != nil {
		return err
	}
	for _, path := range append(files, tasks...) {
		kind, id, _ := strings.Cut(filepath.Base(path), "-")
		var over bool
		if kind == "session" {
			s, err := m.Get(ctx, id)
			over = err == nil && s.Phase == session.Gone
		} else {
			t, err := tm.Get(ctx, id)
			over = err == nil && task.AtRest(t.Phase)
		}
		if !over {
			continue
		}
		o := Object{Kind: "lock file", Name: filepath.Base(path), Path: path, Why: "its " + kind + " has ended"}
		if err := c.remove(ctx, "file:"+path, o, path, func() error { return nil }); err != nil {
			return err
		}
	}
	return nil
}

// listVMs returns the driver and all VMs.
func (c *collector) listVMs(ctx context.Context) (vm.Driver, []vm.Machine, error) {
	driver, err := c.Driver()
	if err != nil {
		return nil, nil, err
	}
	machines, err := driver.List(ctx)
	return driver, machines, err
}

// machines removes the VMs of sessions that are gone. It leaves standby VMs, and VMs in
// which images are built, to the image maker.
func machines(ctx context.Context, c *collector) error {
	if !exists(c.Config.Paths.LimaHome) {
		return nil
	}
	m, err := c.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	driver, machines, err := c.listVMs(ctx)
	if err != nil {
		return err
	}
	owners, err := c.owners(ctx, m)
	if err != nil {
		return err
	}
	for _, machine := range machines {
		s, known := owners[machine.Name]
		o := Object{Kind: "VM", Name: machine.Name, Path: machine.Dir, Size: machine.DiskUsed}
		switch {
		case known && s.Phase != session.Gone || strings.HasPrefix(machine.Name, golden.VMPrefix) || strings.HasPrefix(machine.Name, session.SetupVMPrefix):
			continue
		case !known:
			o.Why = "no known session uses it"
			c.recordKept(o)
			continue
		}
		o.Why = "the session is gone"
		if err := c.remove(ctx, "vm:"+machine.Name, o, c.Config.Paths.SessionLock(s.ID), func() error { return driver.Delete(ctx, machine.Name) }); err != nil {
			return err
		}
	}
	return nil
}

// owners maps the names of VMs to their sessions. A session that is not gone takes
// precedence over a standby VM, which in turn takes precedence over a session that is gone.
// The pool is read before the sessions, in the order in which a VM moves from one to the
// other.
func (c *collector) owners(ctx context.Context, m *session.Manager) (map[string]session.Session, error) {
	waiting, err := golden.PoolVMs(c.Config.Paths.Pool())
	if err != nil {
		return nil, err
	}
	rows, err := m.Store.Sessions(ctx, true)
	if err != nil {
		return nil, err
	}
	owners, living := map[string]session.Session{}, map[string]session.Session{}
	for _, row := range rows {
		s, err := m.Get(ctx, row.ID)
		if err != nil {
			return nil, err
		}
		if s.Phase == session.Gone {
			owners[s.Name], owners[s.VM()] = s, s
			continue
		}
		living[s.Name], living[s.VM()] = s, s
		if taken, err := golden.ReadStandby(filepath.Join(c.Config.Paths.SessionDir(s.ID), "standby")); err == nil {
			living[taken.VM] = s
		}
	}
	for _, name := range waiting {
		owners[name] = session.Session{}
	}
	maps.Copy(owners, living)
	return owners, nil
}

// Images removes replaced images and the leftovers of makers that died. It also removes
// standby VMs that no session will use: clones of replaced images, or all if the pool is
// not in use.
func Images(ctx context.Context, c *collector) error {
	if !exists(c.Config.Paths.Images()) && !exists(c.Config.Paths.Pool()) {
		return nil // do not create the directories just to look
	}
	maker, err := c.Maker()
	if err != nil {
		return err
	}
	known, err := maker.Images.List()
	if err != nil {
		return err
	}
	pools := maker.Pools(ctx, c.Config.Prepare, vm.HostArch())
	standbys, err := maker.Pool.Prune(ctx, c.DryRun, func(s golden.Standby) bool {
		return pools && slices.ContainsFunc(known, func(i image.Info) bool { return i.Ready && i.Path == s.Image })
	})
	var doomed []string
	for _, o := range standbys {
		name := golden.VMOf(o.Path)
		doomed = append(doomed, name)
		c.recordRemoved(ctx, "vm:"+name, Object{Kind: "standby VM", Name: name, Path: o.Path, Size: o.Size, Why: o.Why})
	}
	if err != nil {
		return err
	}
	found, err := maker.PruneImages(ctx, image.PruneOptions{DryRun: c.DryRun, InUse: ImageInUse(c.Config.Paths.LimaHome, c.Say, doomed...)})
	for _, o := range found {
		name, err := filepath.Rel(c.Config.Paths.Images(), o.Path)
		if err != nil {
			return err
		}
		c.recordRemoved(ctx, "image:"+name, Object{Kind: "image", Name: name, Path: o.Path, Size: o.Size, Why: o.Why})
	}
	return err
}

// Mirrors removes mirrors that have no session and were not used for a long time.
func Mirrors(ctx context.Context, c *collector) error {
	m, err := c.manager(ctx)
	if m == nil || err != nil {
		return err // without a store there was no session, and thus no mirror
	}
	found, err := (&repo.Mirrors{Dir: c.Config.Paths.Mirrors()}).Prune(ctx, repo.PruneOptions{
		DryRun: c.DryRun, Before: time.Now().Add(-c.Unused),
		InUse: func(key string) (bool, error) {
			all, err := m.List(ctx)
			return slices.ContainsFunc(all, func(s session.Session) bool { return s.RepoKey == key }), err
		},
	})
	for _, u := range found {
		o := Object{Kind: "mirror", Name: strings.TrimPrefix(u.Repo, "github.com/"), Path: u.Dir, Size: u.Size, Why: u.Stays}
		if u.Stays != "" {
			c.recordKept(o)
			continue
		}
		o.Why = "not used for " + console.Ago(u.Used)
		c.recordRemoved(ctx, "mirror:"+o.Name, o)
	}
	return err
}

// SavedSetups removes saved setups that were not used for a long time.
func SavedSetups(ctx context.Context, c *collector) error {
	return c.savedSetups(ctx, func(b session.SavedSetup) string {
		if time.Since(b.UsedAt) > c.Unused {
			return "not used for " + console.Ago(b.UsedAt)
		}
		return ""
	})
}

// unfinishedSetups removes what a killed keeper left of saved setups.
func unfinishedSetups(ctx context.Context, c *collector) error {
	if err := c.savedSetups(ctx, func(session.SavedSetup) string { return "" }); err != nil {
		return err
	}
	aside, err := filepath.Glob(filepath.Join(c.Config.Paths.LimaHome, "."+session.SetupVMPrefix+"*~*"))
	if err != nil {
		return err
	}
	for _, dir := range aside {
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(dir), "."), "~")
		o := Object{Kind: "setup", Name: name, Path: dir, Size: image.DiskUsage(dir), Why: "interrupted"}
		if err := c.remove(ctx, "vm:"+name, o, session.SavedSetups{Paths: c.Config.Paths}.Lock(name), func() error { return os.RemoveAll(dir) }); err != nil {
			return err
		}
	}
	return nil
}

// savedSetups removes the saved setups for which why returns a reason, and the VMs of incomplete ones.
// A session that makes or uses one holds its lock.
func (c *collector) savedSetups(ctx context.Context, why func(session.SavedSetup) string) error {
	saved := session.SavedSetups{Paths: c.Config.Paths}
	if !exists(c.Config.Paths.LimaHome) {
		return nil
	}
	driver, machines, err := c.listVMs(ctx)
	if err != nil {
		return err
	}
	kept, err := saved.List() // later: a VM gets its record last
	if err != nil {
		return err
	}
	sizes := map[string]vm.Machine{}
	for _, machine := range machines {
		if strings.HasPrefix(machine.Name, session.SetupVMPrefix) {
			sizes[machine.Name] = machine
		}
	}
	remove := func(name, label, reason string) error {
		o := Object{Kind: "setup", Name: label, Path: sizes[name].Dir, Size: sizes[name].DiskUsed, Why: reason}
		return c.remove(ctx, "vm:"+name, o, saved.Lock(name), func() error { return saved.Remove(ctx, driver, name) })
	}
	recorded := map[string]bool{}
	for _, b := range kept {
		recorded[b.VM] = true
		reason := why(b)
		if _, err := driver.Inspect(ctx, b.VM); errors.Is(err, vm.ErrNotFound) {
			reason = "its VM is gone"
		}
		if reason != "" {
			if err := remove(b.VM, b.RepoKey, reason); err != nil {
				return err
			}
		}
	}
	locks, err := filepath.Glob(saved.Lock(session.SetupVMPrefix + "*"))
	if err != nil {
		return err
	}
	names := slices.Collect(maps.Keys(sizes))
	for _, path := range locks {
		names = append(names, filepath.Base(path))
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if recorded[name] {
			continue
		}
		if err := remove(name, name, "interrupted"); err != nil {
			return err
		}
	}
	return nil
}

// clones removes the leftovers of mirrors that were never completed.
func clones(ctx context.Context, c *collector) error {
	found, err := (&repo.Mirrors{Dir: c.Config.Paths.Mirrors()}).Sweep(c.DryRun)
	for _, u := range found {
		name := filepath.Base(u.Dir)
		c.recordRemoved(ctx, "mirror:"+name, Object{Kind: "mirror", Name: name, Path: u.Dir, Size: u.Size, Why: "interrupted clone"})
	}
	return err
}

// files removes temporary files that a killed command left. A file in use is written to, so
// one that has not changed for a day is abandoned.
func files(ctx context.Context, c *collector) error {
	packs, err := filepath.Glob(filepath.Join(c.Config.Paths.Cache, "agent-sessionizer-*.pack"))
	if err != nil {
		return err
	}
	records, err := filepath.Glob(session.SavedSetups{Paths: c.Config.Paths}.Leftovers())
	if err != nil {
		return err
	}
	marks, err := filepath.Glob(filepath.Join(c.Config.Paths.Reviews(), ".*.tmp"))
	if err != nil {
		return err
	}
	homes, err := filepath.Glob(session.SavedHomes{Paths: c.Config.Paths}.Leftovers())
	if err != nil {
		return err
	}
	for _, path := range slices.Concat(packs, records, marks, homes) {
		st, err := os.Lstat(path)
		if err != nil || !st.Mode().IsRegular() || time.Since(st.ModTime()) < day {
			continue
		}
		o := Object{Kind: "file", Name: filepath.Base(path), Path: path, Size: image.DiskUsage(path), Why: "left by a killed command"}
		if !c.DryRun {
			if err := os.Remove(path); err != nil {
				return fail.New(fail.Host, "remove file of a killed command: %w", err)
			}
		}
		c.recordRemoved(ctx, "file:"+path, o)
	}
	return nil
}
