package session

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"iter"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Manager writes desired phases and reads state; it does none of the work itself.
type Manager struct {
	Store  *store.Store
	Config *config.Config
	Self   string // our own executable, started as the keeper

	// Actor is the user or client who asks. Audit receives a record of every action.
	// Both are optional.
	Actor string
	Audit func(context.Context, audit.Record)
}

// Request describes the session that is asked for.
type Request struct {
	ID           string // of the new session; "" to choose one
	Repo         repo.Ref
	Profile      string
	Image        string           // "" means as configured
	Arch         string           // of the VM, as vm.ParseArch takes it; "" means the host's
	Resources    config.Resources // zero fields are as configured
	NetworkMode  policy.Mode      // "" means as configured
	WithChanges  bool
	HostServices []netip.AddrPort         // opened to this session only
	Secrets      map[string]config.Secret // additional secrets, by variable
	Requests     []policy.RequestRules    // additional request rules, which only narrow
	Budget       config.Budget            // additional limits; the lower ones count
	Task         string                   // the task that will own the session; "" for a person's session
	Within       *Bounds                  // the rights of the session that submitted the task
	Branch       string                   // a new branch for the checkout, at the commit that Repo selects
	Label        string                   // distinguishes the sessions of a repository
	Numbered     bool                     // the program chose Label, for another session
	New          bool                     // create a session, even if the repository has one; without a label, choose one
	Restricted   bool                     // a client below admin asked: nothing from the user's home directory is copied
	Workspace    string                   // holds the checkout, from an earlier session or a new one; "" for none

	// TrustWorkspace makes the session run what earlier sessions left in the workspace.
	TrustWorkspace bool
}

// Open returns the session of the repository with the label, or of the task if r names one, and
// creates it if none exists. It sets the desired phase of an existing one to Ready,
// whatever it was before. The notices list what was not done as requested.
//
// If r.New is set, Open never returns an existing session: with a label that is in use, it
// returns fail.Conflict.
func (m *Manager) Open(ctx context.Context, r Request) (s Session, created bool, notices []string, err error) {
	spec, notices, err := m.spec(r)
	if err != nil {
		return Session{}, false, nil, err
	}
	id := cmp.Or(r.ID, ids.New())
	asked := store.Session{ID: id, RepoKey: r.Repo.Key, Repo: r.Repo.Slug, Task: r.Task}
	status := Status{RequestedBy: m.requestedBy(ctx), Workspace: r.Workspace, TrustWorkspace: r.TrustWorkspace}
	if r.Workspace != "" {
		lock, err := Workspaces{m}.lock(ctx, r.Workspace)
		if err != nil {
			return Session{}, false, nil, err
		}
		defer lock.Unlock()
		if _, err := (Workspaces{m}).Get(r.Workspace); err != nil { // it may have been deleted since
			return Session{}, false, nil, err
		}
	}
	row, created, err := m.insert(ctx, asked, spec, status, r.labels(), cmp.Or(r.Label, r.Repo.Branch))
	if err != nil {
		return Session{}, false, nil, err
	}
	if s, err = read(row, nil); err != nil {
		return s, false, nil, err
	}
	if r.New && !created && s.ID != id {
		return s, false, nil, fail.New(fail.Conflict, "%s exists already: session %s", s.DisplayName(), s.Name).WithHint("agent-sessionizer open %s", s.Name)
	}
	if created {
		m.auditWorkspace(ctx, audit.WorkspaceAttached, r.Workspace, s, nil)
		return s, true, notices, m.wake(ctx, s.ID)
	}
	s, err = m.SetDesired(ctx, s, Ready)
	return s, false, nil, err
}

// insert creates a session with the first of the labels that is free. Otherwise it returns the
// session that has the last one, or has the id. asked is the label that the user asked for.
func (m *Manager) insert(ctx context.Context, n store.Session, spec Spec, status Status, labels iter.Seq[string], asked string) (row store.Session, created bool, err error) {
	host, err := measureCapacity(m.Config)
	if err != nil {
		return row, false, err
	}
	budget, err := nameBudget(m.Config.Paths.LimaHome)
	if err != nil {
		return row, false, err
	}
	n.Phase, n.Desired = string(Creating), string(Ready)
	if n.Status, err = json.Marshal(status); err != nil {
		return row, false, err
	}
	numbered := spec.Numbered
	for label := range labels {
		spec.Numbered = numbered || label != asked
		n.Label, n.Name = label, Name(n.Repo, label, n.ID[:6], budget)
		if n.Spec, err = json.Marshal(spec); err != nil {
			return row, false, err
		}
		row, created, err = m.Store.Create(ctx, n, phaseEvent("", Creating, Ready), func(others []store.Session) error {
			return errors.Join(isFree(status.Workspace, others), admit(others, spec.Resources, m.Config.Limits, host))
		})
		if err != nil || created || row.ID == n.ID {
			break
		}
	}
	return row, created, err
}

// Check reports whether a session could be created from the request, as far as that
// can be known without creating one. The notices list what would not be as requested.
func (m *Manager) Check(r Request) (notices []string, err error) {
	_, notices, err = m.spec(r)
	return notices, err
}

func (m *Manager) spec(r Request) (Spec, []string, error) {
	if err := (Clones{Paths: m.Config.Paths}).Check(r.Repo); err != nil {
		return Spec{}, nil, err
	}
	settings, err := m.Config.For(config.RepoKey(r.Repo.Key), r.Profile)
	if err != nil {
		return Spec{}, nil, err
	}
	secrets, err := boundSecrets(m.Config, withSecrets(settings.Secrets, r.Secrets), settings.Network.Enforced())
	if err != nil {
		return Spec{}, nil, err
	}
	warnings, err := secrets.check()
	if err != nil {
		return Spec{}, nil, err
	}
	if _, err := m.Config.Policy(settings, config.Additions{HostServices: r.HostServices}, nil); err != nil {
		return Spec{}, nil, err
	}
	res, notices, err := clamp(r.Resources.Over(settings.Resources))
	if err != nil {
		return Spec{}, nil, err
	}
	settings.Secrets = withSecrets(settings.Secrets, r.Secrets) // which may bring request rules
	settings.Budget = settings.Budget.Within(r.Budget)
	if _, err := m.Config.Policy(settings, config.Additions{Layer: r.Requests}, nil); err != nil {
		return Spec{}, nil, err
	}
	from, err := image.Resolve(cmp.Or(r.Image, m.Config.Image))
	if err != nil {
		return Spec{}, nil, err
	}
	arch, err := vm.ParseArch(cmp.Or(r.Arch, vm.HostArch()))
	if err != nil {
		return Spec{}, nil, err
	}
	if from.Name != image.Ubuntu { // the VM template names the Ubuntu image itself
		if _, err := (&image.Store{Dir: m.Config.Paths.Images()}).Find(from.String(), arch); err != nil {
			return Spec{}, nil, err
		}
	}
	if r.TrustWorkspace && r.Workspace == "" {
		return Spec{}, nil, fail.New(fail.Usage, "trust_workspace needs a workspace").WithHint("agent-sessionizer open REPO --workspace NAME --trust-workspace")
	}
	if r.Workspace != "" {
		ws, err := Workspaces{m}.Get(r.Workspace)
		if err == nil {
			err = ws.checkCheckout(r.Repo)
		}
		if err != nil {
			return Spec{}, nil, err
		}
		if r.WithChanges {
			return Spec{}, nil, fail.New(fail.Usage, "uncommitted changes cannot be copied into a workspace")
		}
	}
	return Spec{
		Workspace: r.Workspace,
		Repo:      r.Repo, Image: from.String(), Arch: arch, Profile: r.Profile, Resources: res,
		NetworkMode: r.NetworkMode, WithChanges: r.WithChanges,
		HostServices: r.HostServices, Enforced: settings.Network.Enforced(), Secrets: r.Secrets, Requests: r.Requests, Budget: r.Budget,
		Restricted: r.Restricted, Within: r.Within, NewBranch: r.Branch, Numbered: r.Numbered,
	}, append(notices, warnings...), nil
}

// Size returns the size of a session that no settings file mentions, with the nonzero
// fields of asked.
func (m *Manager) Size(asked config.Resources) (config.Resources, error) {
	settings, err := m.Config.For("", "")
	if err != nil {
		return config.Resources{}, err
	}
	size, _, err := clamp(asked.Over(settings.Resources))
	return size, err
}

// SetDesired records the session's desired phase and starts a keeper for it.
func (m *Manager) SetDesired(ctx context.Context, s Session, desired Phase) (Session, error) {
	return m.setDesired(ctx, s, desired, nil)
}

// Suspend stops a running session and keeps its memory where that is possible: its programs
// continue when it starts again.
func (m *Manager) Suspend(ctx context.Context, s Session) (Session, error) {
	if s.Phase != Ready {
		return s, fail.New(fail.Conflict, "session %s is %s, not ready", s.Name, s.Phase).WithHint("agent-sessionizer list")
	}
	return m.setDesired(ctx, s, Stopped, func(phase Phase, f *Status) error {
		if phase == Ready { // otherwise the session is being stopped already
			f.Suspend = ids.Hex(6)
		}
		return nil
	})
}

// setDesired does the work of SetDesired. Unless it is nil, also changes the status in the same
// transaction, or refuses that.
func (m *Manager) setDesired(ctx context.Context, s Session, desired Phase, also func(Phase, *Status) error) (Session, error) {
	if desired == Ready && (s.Phase == Stopped || s.Phase == Broken) {
		if err := m.hasRoom(ctx, s.Spec.Resources, s.ID); err != nil {
			return s, err
		}
	}
	row, err := m.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
		from := Phase(row.Phase)
		if from == Gone && desired == Gone { // its keeper was faster
			return store.Event{}, nil
		}
		if from == Gone || (from == Destroying && desired != Gone) {
			return store.Event{}, fail.New(fail.Conflict, "session %s is %s", row.Name, row.Phase).WithHint("agent-sessionizer list")
		}
		// Retrying what failed is a transition; every other transition is the
		// keeper's.
		to := from
		switch {
		case from == Broken && desired == Ready:
			to = Creating
			if cur, err := read(*row, nil); err == nil && cur.Status.WasReady {
				to = Starting
			}
			row.SetError("", "", "")
		case from == Broken && desired == Stopped:
			to = Stopping
			row.SetError("", "", "")
		}
		if row.Desired == string(desired) && to == from && also == nil {
			return store.Event{}, nil
		}
		row.Phase, row.Desired = string(to), string(desired)
		var refused error
		err := change(row, func(f *Status) {
			f.RequestedBy = m.requestedBy(ctx)
			if from == Ready {
				f.Suspend = ""
			}
			if also != nil {
				refused = also(from, f)
			}
			if desired == Ready && f.Lifetime.Ended != "" {
				f.Lifetime = Lifetime{} // the stop has not begun yet
			}
		})
		return phaseEvent(from, to, desired), errors.Join(err, refused)
	})
	if err != nil {
		return s, err
	}
	if s, err = read(row, nil); err != nil || s.Phase == Gone {
		return s, err
	}
	return s, m.wake(ctx, s.ID)
}

// hasRoom returns an error if the host has no room for another session of that size. The session
// with the id does not count.
func (m *Manager) hasRoom(ctx context.Context, size config.Resources, id string) error {
	host, err := measureCapacity(m.Config)
	if err != nil {
		return err
	}
	others, err := m.Store.Sessions(ctx, false)
	if err != nil {
		return err
	}
	others = slices.DeleteFunc(others, func(o store.Session) bool { return o.ID == id })
	return admit(others, size, m.Config.Limits, host)
}

// wake starts a keeper for the session. If another keeper is alive, the new one waits
// until the desired phase is reached, and takes over if the other dies first.
func (m *Manager) wake(ctx context.Context, id string) error {
	for again := false; ; again = true {
		if err := os.MkdirAll(m.Config.Paths.SessionDir(id), 0o700); err != nil {
			return fail.New(fail.Host, "create session directory: %w", err)
		}
		err := lifecycle.Wake(ctx, m.Self, m.Config.Paths.KeeperLog(id), "keeper", id)
		if again || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		// A keeper that destroys the session has just removed the directory.
	}
}

// Reconcile starts a keeper for every session that needs one and has none: after a
// crash, a reboot or a kill -9. Every command calls it.
func (m *Manager) Reconcile(ctx context.Context) error {
	rows, err := m.Store.Sessions(ctx, false)
	if err != nil {
		return err
	}
	var errs []error
	for _, row := range rows {
		errs = append(errs, m.Tend(ctx, row))
	}
	return errors.Join(errs...)
}

// Tend starts a keeper for one session, as Reconcile does for all.
func (m *Manager) Tend(ctx context.Context, row store.Session) error {
	if AtRest(Phase(row.Phase), Phase(row.Desired)) {
		return nil
	}
	return lifecycle.Tend(m.Config.Paths.SessionLock(row.ID), func(died bool, err error) error {
		if err = errors.Join(err, m.wake(ctx, row.ID)); died { // otherwise the keeper is about to take the lock, or gave up
			m.audit(ctx, audit.SessionReconciled, m.Actor, "session:"+row.ID, err, map[string]any{
				"name": row.Name, "state": row.Phase, "desired": row.Desired, "reason": "its keeper died",
			})
		}
		return err
	})
}

// List returns the sessions that are not gone, oldest first.
func (m *Manager) List(ctx context.Context) ([]Session, error) {
	rows, err := m.Store.Sessions(ctx, false)
	if err != nil {
		return nil, err
	}
	return lifecycle.ReadAll(rows, read)
}

// Get reads one session by id, whatever its phase.
func (m *Manager) Get(ctx context.Context, id string) (Session, error) {
	return read(m.Store.Session(ctx, id))
}

var notInName = lazyregexp.New(`[^a-z0-9]+`)

// Name returns agent-OWNER-REPO-LABEL-xxxxxx, shortened to at most budget bytes. A label gets at
// most half of what suffix leaves.
func Name(slug, label, suffix string, budget int) string {
	left := max(budget-len("agent--")-len(suffix), 1)
	if label = nameWord(label, left/2-1); label != "" {
		label, left = "-"+label, left-len("-"+label)
	}
	return "agent-" + cmp.Or(nameWord(slug, left), nameWord("repo", left)) + label + "-" + suffix
}

// nameWord returns text as a part of a session's name, at most that many bytes long.
func nameWord(text string, most int) string {
	text = strings.Trim(notInName.ReplaceAllString(strings.ToLower(text), "-"), "-")
	return strings.TrimRight(text[:max(min(len(text), most), 0)], "-")
}

// nameBudget returns how long a VM's name may be. Two limits apply. A UNIX socket's
// path has at most 104 bytes on macOS, including the NUL, and Lima's longest is
// HOME/NAME/ssh.sock. followed by 16 digits. A hostname has at most 63, and Lima
// prepends "lima-".
func nameBudget(limaHome string) (int, error) {
	const longestSocket = len("//ssh.sock.1234567890123456\x00")
	budget := min(104-longestSocket-len(limaHome), 63-len("lima-"))
	if least := len("agent-reponame-012345"); budget < least {
		return 0, fail.New(fail.Host, "lima_home %s is %d bytes too long: paths of sockets below it would exceed 104 bytes", limaHome, least-budget).
			WithHint("export AGENT_SESSIONIZER_LIMA_HOME=/a/shorter/directory")
	}
	return budget, nil
}

func phaseEvent(from, to, desired Phase) store.Event {
	return store.NewEvent("phase", PhaseChange{From: from, To: to, Desired: desired})
}

// LastPhaseSeq returns the sequence number before the last change of the desired
// phase. A viewer that starts there sees all of the work in progress.
func (m *Manager) LastPhaseSeq(ctx context.Context, id string) (int64, error) {
	before, after := store.Oldest, store.Oldest
	for {
		evs, err := m.Store.Events(ctx, id, after, 1000)
		if err != nil || len(evs) == 0 {
			return before, err
		}
		for _, ev := range evs {
			after = ev.Seq
			var p PhaseChange
			if ev.Kind == EventPhase && json.Unmarshal(ev.Data, &p) == nil && (p.To == Creating || p.To == Starting || p.From == p.To || p.From == Broken) {
				before = ev.Seq - 1
			}
		}
	}
}
