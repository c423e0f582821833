package cli

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

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

type pruneOptions struct {
	dryRun bool
	json   bool
	unused ageFlag
}

func (o *pruneOptions) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&o.dryRun, "dry-run", "n", false, "list what would be removed; change nothing")
	cmd.Flags().BoolVar(&o.json, "json", false, "print a JSON object: removed and kept, with sizes and reasons")
}

func newPruneCmd(a *app) *cobra.Command {
	o := pruneOptions{unused: 90 * day}
	cmd := &cobra.Command{
		Use: "prune", Short: "Remove unused images, VMs and mirrors",
		Long: `Remove what is no longer used, and list it with the reason:

  - images and saved VMs that newer ones replaced, unused standby VMs and leftovers of
    interrupted builds ("image prune" removes only these);
  - leftovers of sessions that are gone: VMs, directories, logs;
  - logs, artifacts and events of tasks that ended long ago (tasks.cleanup_ttl);
  - mirrors of repositories that have no session and were not used for 90 days;
  - files left by commands that were killed.

Leftovers are also removed automatically: at most once an hour, a command looks for them
in the background. Nothing that belongs to an existing session or is in use is removed.
Things that look abandoned but may still be needed are kept and listed: mirrors with
agents' commits that no branch has, and VMs and directories of unknown sessions.`,
		Example: `  agent-sessionizer prune --dry-run
  agent-sessionizer prune --unused-for 30d
  agent-sessionizer prune --dry-run --json | jq .size`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runPrune(cmd.Context(), a, o, append(orphans, (*pruning).images, (*pruning).mirrors)...)
		},
	}
	o.flags(cmd)
	cmd.Flags().Var(&o.unused, "unused-for", "`TIME` without use after which mirrors are removed, such as 30d or 12h")
	return cmd
}

// orphan is an object that prune has found.
type orphan struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
	Path string `json:"path,omitempty"`
	Size int64  `json:"size"` // bytes
	Why  string `json:"why"`  // why it is removed or kept
}

// pruneView is the output of prune.
type pruneView struct {
	DryRun  bool     `json:"dry_run"`
	Removed []orphan `json:"removed"` // in a dry run: would be removed
	Kept    []orphan `json:"kept"`    // looks abandoned, but may be in use
	Size    int64    `json:"size"`    // total of Removed in bytes
}

// pruning is one run of prune. Each part removes objects through the package that owns
// them, under that package's locks. Every part can be repeated after a kill -9.
type pruning struct {
	app  *app
	by   string // the actor for the audit log
	o    pruneOptions
	cfg  *config.Config
	all  *session.Manager // nil until manager is called
	lost bool             // manager has failed and returned its error
	view pruneView
}

// part is one part of prune.
type part = func(*pruning, context.Context) error

// orphans are the parts that remove objects without an owner. They also run without a
// request of the user.
var orphans = []part{(*pruning).sessions, (*pruning).tasks, (*pruning).machines, (*pruning).locks, (*pruning).clones, (*pruning).files}

func runPrune(ctx context.Context, a *app, o pruneOptions, parts ...part) error {
	p, err := a.prune(ctx, actor(), o, parts)
	if p == nil {
		return err
	}
	return errors.Join(p.print(), err)
}

// prune runs the parts. It returns nil if it could not start.
func (a *app) prune(ctx context.Context, by string, o pruneOptions, parts []part) (*pruning, error) {
	cfg, err := a.settings()
	if err != nil {
		return nil, err
	}
	p := &pruning{app: a, by: by, o: o, cfg: cfg, view: pruneView{DryRun: o.dryRun, Removed: []orphan{}, Kept: []orphan{}}}
	var errs []error
	for _, f := range parts {
		if ctx.Err() != nil {
			break
		}
		errs = append(errs, f(p, ctx)) // an error in one part does not prevent the others
	}
	return p, errors.Join(append(errs, ctx.Err())...)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// recordRemoved records a removed object, and adds it to the audit log as the given resource.
func (p *pruning) recordRemoved(ctx context.Context, resource string, l orphan) {
	p.view.Removed = append(p.view.Removed, l)
	p.view.Size += l.Size
	p.auditRemoval(ctx, resource, l, nil)
}

// auditRemoval adds the result of a removal to the audit log.
func (p *pruning) auditRemoval(ctx context.Context, resource string, l orphan, err error) {
	if p.o.dryRun {
		return
	}
	p.app.auditTo(p.cfg)(ctx, audit.Record{
		Type: audit.OrphanRemoved, Actor: p.by, Resource: resource, Outcome: audit.OutcomeOf(err),
		Details: map[string]any{"kind": l.Kind, "name": l.Name, "bytes": l.Size, "reason": l.Why},
	})
}

func (p *pruning) recordKept(l orphan) { p.view.Kept = append(p.view.Kept, l) }

func (p *pruning) print() error {
	if p.o.json {
		return p.app.con.JSON(p.view)
	}
	for _, l := range p.view.Kept {
		p.app.con.Say("kept: %s %s (%v): %s", l.Kind, l.Name, config.Size(l.Size), l.Why)
	}
	if len(p.view.Removed) > 0 {
		header, rows := []string{"WHAT", "NAME", "SIZE", "WHY"}, [][]string{}
		for _, l := range p.view.Removed {
			rows = append(rows, []string{l.Kind, l.Name, config.Size(l.Size).String(), l.Why})
		}
		p.app.con.Table(header, rows)
	}
	word := "freed"
	if p.o.dryRun {
		word = "would be freed"
	}
	p.app.printf("%v %s\n", config.Size(p.view.Size), word)
	return nil
}

// manager returns nil if there is no store, which a dry run does not create. It also
// returns nil if an earlier call has already returned an error.
func (p *pruning) manager(ctx context.Context) (_ *session.Manager, err error) {
	if p.all != nil || p.lost || p.o.dryRun && !exists(p.cfg.Paths.Store()) {
		return p.all, nil
	}
	if p.o.dryRun {
		p.all, err = p.app.plainManager(ctx) // starts no keepers
	} else {
		p.all, err = p.app.reconciled(ctx)
	}
	p.lost = err != nil
	return p.all, err
}

// remove calls f to remove a resource, while it holds the lock at path. If another process
// holds the lock, the resource is in use and stays. A dry run only checks the lock.
func (p *pruning) remove(ctx context.Context, resource string, l orphan, path string, f func() error) error {
	if p.o.dryRun {
		if !store.Held(path) {
			p.recordRemoved(ctx, resource, l)
		}
		return nil
	}
	lock, free, err := store.TryLock(path)
	if err != nil || !free {
		return err
	}
	if err := f(); err != nil {
		p.auditRemoval(ctx, resource, l, err)
		return errors.Join(err, lock.Unlock())
	}
	if err := lock.Remove(); err != nil {
		return fail.New(fail.Host, "remove lock file: %w", err)
	}
	p.recordRemoved(ctx, resource, l)
	return nil
}

// sessions removes the directories and events of sessions that are gone.
func (p *pruning) sessions(ctx context.Context) error {
	m, err := p.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	all := filepath.Dir(p.cfg.Paths.SessionDir("x"))
	entries, err := os.ReadDir(all)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fail.New(fail.Host, "list session directories: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(all, e.Name())
		s, err := m.Get(ctx, e.Name())
		l := orphan{Kind: "session directory", Name: e.Name(), Path: dir, Size: image.DiskUsage(dir)}
		switch {
		case fail.CodeOf(err) == fail.NotFound:
			l.Why = "no session has this id; it may contain the key of a VM"
			p.recordKept(l)
			continue
		case err != nil:
			return err
		case s.Phase != session.Gone: // gone is final
			continue
		}
		l.Name, l.Why = s.Name, "the session is gone"
		if err := p.remove(ctx, "session:"+s.ID, l, p.cfg.Paths.SessionLock(s.ID), func() error {
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
	before, over := time.Now().Add(-time.Duration(day)), map[string]bool{}
	for _, row := range rows {
		over[row.ID] = session.Phase(row.Phase) == session.Gone && row.StateChangedAt.Before(before)
	}
	n, bytes, err := m.Store.PruneEvents(ctx, before, func(id string) bool { return !over[id] }, p.o.dryRun)
	if n > 0 {
		p.recordRemoved(ctx, "events", orphan{Kind: "events", Name: strconv.Itoa(n), Path: p.cfg.Paths.Store(), Size: bytes, Why: "their sessions have been gone for a day"})
	}
	return err
}

// tasks removes the directories and events of tasks that ended long ago, and directories
// left by interrupted submissions. Rows stay, so that an id is never used twice.
func (p *pruning) tasks(ctx context.Context) error {
	m, err := p.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	tm := &task.Manager{Sessions: m}
	ttl := p.cfg.Tasks.CleanupTTL
	all := filepath.Dir(p.cfg.Paths.TaskDir("x"))
	entries, err := os.ReadDir(all)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fail.New(fail.Host, "list task directories: %w", err)
	}
	for _, e := range entries {
		dir := filepath.Join(all, e.Name())
		l := orphan{Kind: "task", Name: e.Name(), Path: dir}
		t, err := tm.Get(ctx, e.Name())
		switch {
		case fail.CodeOf(err) == fail.NotFound:
			st, err := e.Info()
			if err != nil || time.Since(st.ModTime()) < time.Duration(day) {
				continue // its row may not be written yet
			}
			l.Why = "interrupted submission"
		case err != nil:
			return err
		case !task.AtRest(t.Phase) || !t.Phase.Over() || time.Since(t.StateChangedAt) < ttl:
			continue
		default:
			l.Why = "ended " + ago(t.StateChangedAt) + " ago"
		}
		l.Size = image.DiskUsage(dir)
		if err := p.remove(ctx, "task:"+e.Name(), l, tm.LockPath(e.Name()), func() error { return os.RemoveAll(dir) }); err != nil {
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
	n, bytes, err := m.Store.PruneEvents(ctx, time.Now().Add(-ttl), func(id string) bool { return !over[id] }, p.o.dryRun)
	if n > 0 {
		p.recordRemoved(ctx, "events", orphan{Kind: "events", Name: strconv.Itoa(n), Path: p.cfg.Paths.Store(), Size: bytes, Why: fmt.Sprintf("their tasks ended more than %v ago", ttl)})
	}
	return err
}

// locks removes lock files that killed keepers left, of sessions that are gone and tasks
// that are at rest.
func (p *pruning) locks(ctx context.Context) error {
	m, err := p.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	tm := &task.Manager{Sessions: m}
	files, err := filepath.Glob(p.cfg.Paths.SessionLock("*"))
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
		l := orphan{Kind: "lock file", Name: filepath.Base(path), Path: path, Why: "its " + kind + " has ended"}
		if err := p.remove(ctx, "file:"+path, l, path, func() error { return nil }); err != nil {
			return err
		}
	}
	return nil
}

// machines removes the VMs of sessions that are gone. It leaves standby VMs, and VMs in
// which images are built, to the image maker.
func (p *pruning) machines(ctx context.Context) error {
	if !exists(p.cfg.Paths.LimaHome) {
		return nil
	}
	m, err := p.manager(ctx)
	if m == nil || err != nil {
		return err
	}
	driver, err := p.app.driver(quietLog())
	if err != nil {
		return err
	}
	machines, err := driver.List(ctx)
	if err != nil {
		return err
	}
	owners, err := p.owners(ctx, m)
	if err != nil {
		return err
	}
	for _, machine := range machines {
		s, known := owners[machine.Name]
		l := orphan{Kind: "VM", Name: machine.Name, Path: machine.Dir, Size: machine.DiskUsed}
		switch {
		case known && s.Phase != session.Gone || strings.HasPrefix(machine.Name, golden.VMPrefix):
			continue
		case !known:
			l.Why = "no known session uses it"
			p.recordKept(l)
			continue
		}
		l.Why = "the session is gone"
		if err := p.remove(ctx, "vm:"+machine.Name, l, p.cfg.Paths.SessionLock(s.ID), func() error { return driver.Delete(ctx, machine.Name) }); err != nil {
			return err
		}
	}
	return nil
}

// owners maps the names of VMs to their sessions. A session that is not gone takes
// precedence over a standby VM, which in turn takes precedence over a session that is gone.
// The pool is read before the sessions, in the order in which a VM moves from one to the
// other.
func (p *pruning) owners(ctx context.Context, m *session.Manager) (map[string]session.Session, error) {
	waiting, err := golden.PoolVMs(p.cfg.Paths.Pool())
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
		if taken, err := golden.ReadStandby(filepath.Join(p.cfg.Paths.SessionDir(s.ID), "standby")); err == nil {
			living[taken.VM] = s
		}
	}
	for _, name := range waiting {
		owners[name] = session.Session{}
	}
	maps.Copy(owners, living)
	return owners, nil
}

// images removes replaced images and the leftovers of makers that died. It also removes
// standby VMs that no session will use: clones of replaced images, or all if the pool is
// not in use.
func (p *pruning) images(ctx context.Context) error {
	if !exists(p.cfg.Paths.Images()) && !exists(p.cfg.Paths.Pool()) {
		return nil // do not create the directories just to look
	}
	images, err := p.app.images()
	if err != nil {
		return err
	}
	maker, err := p.app.maker()
	if err != nil {
		return err
	}
	known, err := images.List()
	if err != nil {
		return err
	}
	pools := maker.Pools(ctx, p.cfg.Prepare, session.Arch())
	standbys, err := maker.PruneStandbys(ctx, p.o.dryRun, func(s golden.Standby) bool {
		return pools && slices.ContainsFunc(known, func(i image.Info) bool { return i.Ready && i.Path == s.Image })
	})
	var doomed []string
	for _, l := range standbys {
		name := golden.VMOf(l.Path)
		doomed = append(doomed, name)
		p.recordRemoved(ctx, "vm:"+name, orphan{Kind: "standby VM", Name: name, Path: l.Path, Size: l.Size, Why: l.Why})
	}
	if err != nil {
		return err
	}
	inUse, err := p.app.imageInUse(doomed...)
	if err != nil {
		return err
	}
	found, err := maker.PruneImages(ctx, image.PruneOptions{DryRun: p.o.dryRun, InUse: inUse})
	for _, l := range found {
		name, err := filepath.Rel(p.cfg.Paths.Images(), l.Path)
		if err != nil {
			return err
		}
		p.recordRemoved(ctx, "image:"+name, orphan{Kind: "image", Name: name, Path: l.Path, Size: l.Size, Why: l.Why})
	}
	return err
}

// mirrors removes mirrors that have no session and were not used for a long time.
func (p *pruning) mirrors(ctx context.Context) error {
	m, err := p.manager(ctx)
	if m == nil || err != nil {
		return err // without a store there was no session, and thus no mirror
	}
	found, err := (&repo.Mirrors{Dir: p.cfg.Paths.Mirrors()}).Prune(ctx, repo.PruneOptions{
		DryRun: p.o.dryRun, Before: time.Now().Add(-time.Duration(p.o.unused)),
		InUse: func(key string) (bool, error) {
			all, err := m.List(ctx)
			return slices.ContainsFunc(all, func(s session.Session) bool { return s.RepoKey == key }), err
		},
	})
	for _, u := range found {
		l := orphan{Kind: "mirror", Name: shortKey(u.Repo), Path: u.Dir, Size: u.Size, Why: u.Stays}
		if u.Stays != "" {
			p.recordKept(l)
			continue
		}
		l.Why = "not used for " + ago(u.Used)
		p.recordRemoved(ctx, "mirror:"+l.Name, l)
	}
	return err
}

// clones removes the leftovers of mirrors that were never completed.
func (p *pruning) clones(ctx context.Context) error {
	found, err := (&repo.Mirrors{Dir: p.cfg.Paths.Mirrors()}).Sweep(p.o.dryRun)
	for _, u := range found {
		name := filepath.Base(u.Dir)
		p.recordRemoved(ctx, "mirror:"+name, orphan{Kind: "mirror", Name: name, Path: u.Dir, Size: u.Size, Why: "interrupted clone"})
	}
	return err
}

// files removes temporary files that a killed command left. A file in use is written to, so
// one that has not changed for a day is abandoned.
func (p *pruning) files(ctx context.Context) error {
	left, err := filepath.Glob(filepath.Join(p.cfg.Paths.Cache, "agent-sessionizer-*.pack"))
	if err != nil {
		return err
	}
	for _, path := range left {
		st, err := os.Lstat(path)
		if err != nil || !st.Mode().IsRegular() || time.Since(st.ModTime()) < time.Duration(day) {
			continue
		}
		l := orphan{Kind: "file", Name: filepath.Base(path), Path: path, Size: image.DiskUsage(path), Why: "left by a killed fetch"}
		if !p.o.dryRun {
			if err := os.Remove(path); err != nil {
				return fail.New(fail.Host, "remove file of a killed fetch: %w", err)
			}
		}
		p.recordRemoved(ctx, "file:"+path, l)
	}
	return nil
}
