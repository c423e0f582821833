// Package session manages a VM for one repository: what was asked for, the phases it
// goes through, and the work of each phase.
//
// Commands use a Manager to write desired phases and read state. The keeper, one
// detached process per active session, uses a Worker to do the work. The two meet only
// in the store. Package session never imports task.
package session

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Phase is where a session is in its life. Users see it as the session's state.
type Phase string

// The phases. Ready, Stopped and Gone can also be desired phases.
//
//	creating ──────► ready ──► stopping ──► stopped ──► starting ──► ready
//	   │  │            │          │                        │  │
//	   │  └──► broken ◄┴──────────┴────────────────────────┘  │
//	   │         │  ▲ a failed step; creating, starting or stopping again on request
//	   │         ▼                                            │
//	   └───► stopping (stop requested meanwhile) ◄────────────┘
//
//	every phase but gone ──► destroying ──► gone
const (
	Creating   Phase = "creating"   // created for the first time
	Ready      Phase = "ready"      // the VM runs, with repository and tools
	Stopping   Phase = "stopping"   // being shut down
	Stopped    Phase = "stopped"    // the disk is kept, nothing runs
	Starting   Phase = "starting"   // a stopped or broken session is started again
	Broken     Phase = "broken"     // a step failed; the row records which, with a hint
	Destroying Phase = "destroying" // being removed
	Gone       Phase = "gone"       // nothing is left but the row and its events
)

// next is the only table of transitions; Worker and Manager follow it.
var next = lifecycle.Transitions[Phase]{
	Creating:   {Ready, Broken, Stopping, Destroying},
	Ready:      {Stopping, Stopped, Broken, Destroying},
	Stopping:   {Stopped, Broken, Destroying},
	Stopped:    {Starting, Destroying},
	Starting:   {Ready, Broken, Stopping, Destroying},
	Broken:     {Creating, Starting, Stopping, Destroying},
	Destroying: {Gone},
	Gone:       nil,
}

// AtRest reports whether a session in phase p with that desired phase needs no
// keeper: nothing runs and nothing is left to do.
func AtRest(p, desired Phase) bool {
	switch p {
	case Gone:
		return true
	case Broken: // not tried again until a user asks
		return desired != Gone
	case Stopped:
		return desired == Stopped
	}
	return false
}

// Spec is what was asked for when the session was created; it never changes.
type Spec struct {
	Repo        repo.Ref         `json:"repo"`
	Image       string           `json:"image"`
	Arch        string           `json:"arch,omitempty"` // of the VM; "" means the host's
	Profile     string           `json:"profile,omitempty"`
	Resources   config.Resources `json:"resources"`              // as clamped to the host
	NetworkMode policy.Mode      `json:"network_mode,omitempty"` // by flag; "" means as configured
	WithChanges bool             `json:"with_changes,omitempty"` // also copy the local clone's uncommitted changes
	// Services of the host and its network, opened to this session only; `open` may
	// add more later.
	HostServices []netip.AddrPort `json:"host_services,omitempty"`
	Enforced     bool             `json:"enforced"` // the VM's only network is our egress gateway
	// References of secrets in addition to the settings', by variable; these take
	// precedence.
	Secrets map[string]config.Secret `json:"secrets,omitempty"`
	// Request rules in addition to the settings', which they only narrow.
	Requests []policy.RequestRules `json:"requests,omitempty"`
	// Limits in addition to the settings'. The lower ones count.
	Budget config.Budget `json:"budget,omitzero"`
	// A client below admin asked: no dotfiles and no saved home.
	Restricted bool `json:"restricted,omitempty"`
	// The rights of the session that submitted the subtask, which has no more; nil for others.
	Within *Bounds `json:"within,omitempty"`
	// Its label was chosen because no other was requested. It does not save its home.
	Numbered bool `json:"numbered,omitempty"`
	// A new branch for the checkout.
	NewBranch string `json:"new_branch,omitempty"`
	// What the session is a fork of; nil for others.
	Fork *ForkOf `json:"fork,omitempty"`
	// The workspace that has the checkout; "" if it is in the home directory.
	Workspace string `json:"workspace,omitempty"`
}

// Arch returns the architecture of the session's VM.
func (s Session) Arch() string { return cmp.Or(s.Spec.Arch, vm.HostArch()) }

// Bounds are the rights of a session at the time when it submitted a subtask.
type Bounds struct {
	Policy *policy.Policy `json:"policy"` // what it could reach
	Name   string         `json:"name"`   // its commits that were fetched can be checked out
	Tree   string         `json:"tree"`   // the ids of its tree, as in store.Usage
	// The session and those above it, the root first. The subtask shares their budgets.
	Sessions []string `json:"sessions"`
}

// Subject returns the id under which the session's use of models counts: that of its task,
// if it has one, because a task can get another session.
func (s Session) Subject() string { return cmp.Or(s.Task, s.ID) }

// Tree returns the ids of the tasks or sessions above the session, and its own, each followed by a
// slash.
func (s Session) Tree() string {
	if s.Spec.Within != nil {
		return s.Spec.Within.Tree + s.Subject() + "/"
	}
	return s.Subject() + "/"
}

// Bounds returns the rights of the session.
func (net Net) Bounds(ctx context.Context, s Session) (*Bounds, error) {
	p, err := net.Policy(ctx, s)
	if err != nil {
		return nil, err
	}
	if p.HostServices = append([]netip.AddrPort{}, p.HostServices...); p.Mode == policy.Open {
		p.Names = nil // to Tighten, a list would end the mode open
	}
	b := Bounds{Policy: p, Name: s.Name, Tree: s.Tree(), Sessions: []string{s.ID}}
	if above := s.Spec.Within; above != nil {
		b.Sessions = append(slices.Clone(above.Sessions), s.ID)
	}
	return &b, nil
}

// Status is the state of the session that the next keeper has to know.
type Status struct {
	WasReady  bool                  `json:"was_ready,omitempty"` // parts that are missing now existed once
	Net       config.Additions      `json:"net,omitzero"`        // by `net allow`, `net deny` and --host-service
	Budget    config.Budget         `json:"budget,omitzero"`     // by `budget`, instead of the settings' and the spec's
	Project   *config.Project       `json:"project,omitempty"`   // the repository's own file, read at clone
	Dir       string                `json:"dir,omitempty"`       // the checkout in the guest
	Base      *repo.Base            `json:"base,omitempty"`      // what was cloned
	Endpoint  vm.Endpoint           `json:"endpoint,omitzero"`   // of the running VM
	Root      string                `json:"root,omitempty"`      // vm.Machine.Root
	SecretsAt time.Time             `json:"secrets_at,omitzero"` // when that began
	Secrets   guestclient.Delivered `json:"secrets,omitzero"`    // how much was put into the guest's memory, or is about to be
	Accel     string                `json:"accel,omitempty"`
	From      golden.From           `json:"from,omitempty"` // what the VM was made from
	VM        string                `json:"vm,omitempty"`   // the VM's name, unless it is the session's
	Warm      string                `json:"warm,omitempty"` // directory of the snapshot that the VM resumes
	// Provisioned is the key of the provision scripts that have run in the guest or
	// its image. Program is the key of the guest program installed there.
	Provisioned  string             `json:"provisioned,omitempty"`
	Program      string             `json:"program,omitempty"`
	Target       repo.Target        `json:"target,omitzero"`         // where fetched work is kept on this host
	GuestFetched int64              `json:"guest_fetched,omitempty"` // bytes that the guest made the host fetch
	Work         *repo.WorkState    `json:"work,omitempty"`          // what was in the guest at the last clean stop
	Saved        *Saved             `json:"saved,omitempty"`         // the commits that were fetched before that stop
	Tmux         string             `json:"tmux,omitempty"`          // socket of the local tmux server that shows the session
	Ports        []PublishedPort    `json:"ports,omitempty"`         // requested with `ports`
	Attached     time.Time          `json:"attached,omitzero"`       // when a user last attached; later denials are shown at the next attach
	Attention    *Attention         `json:"attention,omitempty"`
	Held         *Attention         `json:"held,omitempty"`       // what the gateway waits for the user to decide
	Logins       []string           `json:"logins,omitempty"`     // of the host that the session uses
	SavedHome    bool               `json:"saved_home,omitempty"` // the repository's saved home was restored, so it may be saved again
	Lifetime     Lifetime           `json:"lifetime,omitzero"`
	Checkpoints  []storedCheckpoint `json:"checkpoints,omitempty"`
	Restore      *restoreRequest    `json:"restore,omitempty"`
	// Why the last restore failed, nil if it did not.
	RestoreError   *lifecycle.ViewError `json:"restore_error,omitempty"`
	Workspace      string               `json:"workspace,omitempty"`       // that the session has
	TrustWorkspace bool                 `json:"trust_workspace,omitempty"` // run what earlier sessions left in it
	Disk           string               `json:"disk,omitempty"`            // the workspace whose disk the VM has
	SetAside       string               `json:"set_aside,omitempty"`       // directory in the workspace that has what an earlier session left to be run
	SetupPlan      *setupPlan           `json:"setup_plan,omitempty"`
	Setup          []SetupOutcome       `json:"setup,omitempty"`
	FromSetup      *ForkOf              `json:"from_setup,omitempty"`    // the saved setup that the VM is a fork of
	Forked         bool                 `json:"forked,omitempty"`        // the fork's VM exists, and no longer needs the checkpoint
	Suspend        string               `json:"suspend,omitempty"`       // id of the checkpoint that the requested stop creates
	Resumes        string               `json:"resumes,omitempty"`       // id of the checkpoint whose memory the VM resumes when it starts
	Resumed        bool                 `json:"resumed,omitempty"`       // the last start resumed memory
	ClockStopped   bool                 `json:"clock_stopped,omitempty"` // the VM has resumed, and its clock is not set yet
	Results        []lifecycle.Result   `json:"results,omitempty"`       // how commands ended that a user recorded
	Used           time.Time            `json:"used,omitzero"`           // when a user last asked for it without attaching
	RequestedBy    RequestedBy          `json:"requested_by,omitzero"`   // who asked for the desired phase
	Events         store.Budget         `json:"events,omitzero"`         // the events that the guest caused
}

// RequestedBy records who asked for something, for readers of the logs.
type RequestedBy struct {
	Actor string `json:"actor,omitempty"`
	Trace string `json:"trace_id,omitempty"`
}

// Attention is the state of a session's most urgent agent. The texts come from the
// guest: they are safe to print, but must not be trusted.
type Attention struct {
	State guestproto.AgentState `json:"state"`
	Agent string                `json:"agent,omitempty"`
	On    string                `json:"on,omitempty"` // what it waits for, or the error
	Since time.Time             `json:"since"`        // by the host's clock
}

// Session is a store row with its JSON decoded.
type Session struct {
	store.Session
	Phase   Phase
	Desired Phase
	Spec    Spec
	Status  Status
}

// Guest returns the guest of s, reached over conn.
func (s Session) Guest(conn *ssh.Client) guestclient.Guest {
	return guestclient.Guest{SSH: conn, Root: s.Status.Root, Delivered: s.Status.Secrets}
}

// read decodes a row, unless the store returned an error instead.
func read(row store.Session, err error) (Session, error) {
	if err != nil {
		return Session{}, err
	}
	s := Session{Session: row, Phase: Phase(row.Phase), Desired: Phase(row.Desired)}
	if err := json.Unmarshal(row.Spec, &s.Spec); err != nil {
		return s, fmt.Errorf("read spec of session %s: %w", row.Name, err)
	}
	if err := json.Unmarshal(row.Status, &s.Status); err != nil {
		return s, fmt.Errorf("read status of session %s: %w", row.Name, err)
	}
	return s, nil
}

// VM returns the name of the session's VM. A VM from the warm pool keeps its own
// name.
func (s Session) VM() string { return cmp.Or(s.Status.VM, s.Name) }

// DisplayName returns RepoName, and the label after an "@".
func (s Session) DisplayName() string { return withLabel(s.RepoName(), s.Label) }

// DisplayName returns RepoName, and the label after an "@".
func (v View) DisplayName() string { return withLabel(v.RepoName(), v.Label) }

// ShortName returns the repository without its host, and the label after an "@".
func (v View) ShortName() string { return withLabel(v.Repo, v.Label) }

// RepoName returns the repository as a user names it: a directory's name, owner/repo,
// or HOST/owner/repo where the host is not github.com.
func (s Session) RepoName() string { return View{Repo: s.Session.Repo, RepoKey: s.RepoKey}.RepoName() }

// RepoName returns the repository as a user names it, as for a Session.
func (v View) RepoName() string {
	host, _, _ := strings.Cut(v.RepoKey, "/")
	if host == "github.com" || strings.HasPrefix(v.RepoKey, "local:") {
		return v.Repo
	}
	return host + "/" + v.Repo
}

// Message returns the last failure, or "".
func (v View) Message() string {
	if v.Error == nil {
		return ""
	}
	return v.Error.Message
}

// View is a session as --json shows it. Fields are only ever added.
type View struct {
	ID              string               `json:"id"`
	Name            string               `json:"name"`
	Repo            string               `json:"repo"`
	RepoKey         string               `json:"repo_key"`        // with the host: "github.com/owner/repo", "local:/path"
	Label           string               `json:"label,omitempty"` // distinguishes the sessions of a repository: owner/repo@LABEL
	State           Phase                `json:"state"`
	Desired         Phase                `json:"desired"`
	CreatedAt       time.Time            `json:"created_at"`
	StateChangedAt  time.Time            `json:"state_changed_at"`
	Error           *lifecycle.ViewError `json:"error,omitempty"`
	Task            string               `json:"task,omitempty"` // the task that owns the session
	Image           string               `json:"image"`
	Arch            string               `json:"arch"` // of its VM
	Profile         string               `json:"profile,omitempty"`
	Resources       config.Resources     `json:"resources"`
	Branch          string               `json:"branch,omitempty"`
	Dir             string               `json:"dir,omitempty"`
	Root            string               `json:"root,omitempty"`         // prefix of every path in the guest, "" for a VM
	Base            *repo.Base           `json:"base,omitempty"`         // what was cloned
	LocalClone      string               `json:"local_clone,omitempty"`  // the directory that the session was created from
	NetworkMode     policy.Mode          `json:"network_mode,omitempty"` // by flag
	RequestedBranch string               `json:"requested_branch,omitempty"`
	WithChanges     bool                 `json:"with_changes,omitempty"`
	WasReady        bool                 `json:"was_ready,omitempty"`
	Tmux            string               `json:"tmux,omitempty"`      // socket of the tmux server on its host that shows the session
	VisitedAt       time.Time            `json:"visited_at,omitzero"` // when a user last attached
	Results         []lifecycle.Result   `json:"results,omitempty"`   // how commands ended that a user recorded, such as tests
	Reachable       bool                 `json:"reachable,omitempty"` // its VM has an address
	SSH             string               `json:"ssh,omitempty"`       // address while the VM runs
	Accel           string               `json:"accel,omitempty"`
	From            golden.From          `json:"from,omitempty"` // what the VM was made from: generic, golden, warm, pool, fork
	Enforced        bool                 `json:"enforced"`
	Ports           []PublishedPort      `json:"ports,omitempty"`
	Attention       *Attention           `json:"attention,omitempty"`     // while the VM runs
	Logins          []string             `json:"logins,omitempty"`        // subscription logins of the host that the session uses
	Usage           *lifecycle.Usage     `json:"usage,omitempty"`         // of models
	LeaseLeft       int64                `json:"lease_left_s,omitempty"`  // seconds, to within a minute; only while it runs
	Ending          []Limit              `json:"ending,omitempty"`        // limits of its lifetime that are almost reached
	Ended           Limit                `json:"ended,omitempty"`         // the limit that stopped it
	Kept            string               `json:"kept,omitempty"`          // why it was not destroyed although its time is over
	Suspended       bool                 `json:"suspended,omitempty"`     // its programs continue when it starts
	Restoring       string               `json:"restoring,omitempty"`     // the checkpoint that is being restored
	RestoreError    *lifecycle.ViewError `json:"restore_error,omitempty"` // why the last restore failed
	Resumed         bool                 `json:"resumed,omitempty"`       // it last started by resuming memory
	Setup           []SetupOutcome       `json:"setup,omitempty"`         // of the steps of the repository's setup
	ForkOf          string               `json:"fork_of,omitempty"`       // id of the session that it was forked from
	Workspace       string               `json:"workspace,omitempty"`     // that it has
}

// Notes returns what distinguishes the session from others, in a few words each.
func (v View) Notes() []string {
	notes := v.failedSetupSteps()
	if v.Restoring != "" {
		notes = append(notes, "restoring "+v.Restoring)
	}
	if v.Suspended {
		notes = append(notes, "suspended")
	}
	if v.Workspace != "" {
		notes = append(notes, "workspace "+v.Workspace)
	}
	if note := v.lifetimeNote(); note != "" {
		notes = append(notes, note)
	}
	return notes
}

// View returns s as --json shows it.
func (s Session) View() View {
	v := View{
		Error: lifecycle.LastError(s.ErrorCode, s.ErrorMessage, s.ErrorHint),
		ID:    s.ID, Name: s.Name, Repo: s.Session.Repo, RepoKey: s.RepoKey, Label: s.Label, Task: s.Task, State: s.Phase, Desired: s.Desired,
		CreatedAt: s.CreatedAt, StateChangedAt: s.StateChangedAt,
		Image: s.Spec.Image, Arch: s.Arch(), Profile: s.Spec.Profile, Resources: s.Spec.Resources,
		Dir: s.Status.Dir, Root: s.Status.Root, Base: s.Status.Base, LocalClone: s.Spec.Repo.Path,
		NetworkMode: s.Spec.NetworkMode, RequestedBranch: s.Spec.Repo.Branch, WithChanges: s.Spec.WithChanges, WasReady: s.Status.WasReady, Reachable: s.Status.Endpoint.Addr != "", VisitedAt: s.Status.Attached, Tmux: s.Status.Tmux, Results: s.Status.Results,
		Accel: s.Status.Accel, From: s.Status.From, Enforced: s.Spec.Enforced, Ports: s.Status.Ports,
	}
	v.Logins, v.RestoreError, v.Resumed, v.Setup, v.Workspace = s.Status.Logins, s.Status.RestoreError, s.Status.Resumed, s.Status.Setup, s.Status.Workspace
	if s.Status.Restore != nil {
		v.Restoring = s.Status.Restore.Name
	}
	if s.Spec.Fork != nil {
		v.ForkOf = s.Spec.Fork.Session
	}
	v.Usage = lifecycle.UsageOf(s.Session.Used)
	switch life := s.Status.Lifetime; s.Phase {
	case Ready:
		v.LeaseLeft, v.Ending = max(int64(life.Lease/time.Second), 0), life.Warned
	case Stopping, Stopped:
		v.Ended, v.Kept, v.Suspended = life.Ended, life.Kept, s.Phase == Stopped && s.Status.Resumes != ""
	}
	if s.Status.Base != nil {
		v.Branch = s.Status.Base.Branch
	}
	if s.Phase == Ready || s.Phase == Starting || s.Phase == Creating {
		v.SSH = s.Status.Endpoint.Addr
	}
	if s.Phase == Ready {
		v.Attention = s.Status.Attention
		if held := s.Status.Held; held != nil && (v.Attention == nil || v.Attention.State != guestproto.AgentBlocked) {
			v.Attention = held
		}
	}
	return v
}
