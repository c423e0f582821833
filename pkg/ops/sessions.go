package ops

import (
	"cmp"
	"context"
	"encoding/json"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// SessionList lists the existing sessions, oldest first.
type SessionList struct {
	Sessions []session.View `json:"sessions" nullable:"false"`
}

// SessionPath is the part of a path that identifies the session.
type SessionPath struct {
	ID string `path:"id" doc:"Full id of the session." example:"7be1c04d55aa"`
}

// NewSession describes a session to create.
type NewSession struct {
	Repo  string `json:"repo,omitempty" maxLength:"4096" doc:"The repository, as open takes it: owner/repo, owner/repo@branch, a git URL, or an absolute path on the server's host." example:"acme/app"`
	New   bool   `json:"new,omitempty" doc:"Create another session, even if the repository has one."`
	Label string `json:"label,omitempty" maxLength:"100" doc:"Label of a new session, which distinguishes it from others of the repository. It has the form of a branch name. Default: the branch, or a number." example:"fix-login"`
	Like  string `json:"like,omitempty" maxLength:"12" doc:"With new, instead of repo: id of a session. The new one gets its repository, branch and profile."`
	SessionOptions
}

// SessionOptions are what a session is created with. For an existing session only the host's
// services have an effect.
type SessionOptions struct {
	Profile      string           `json:"profile,omitempty" maxLength:"255"`
	Image        string           `json:"image,omitempty" maxLength:"4096" doc:"Guest image. Default: as configured."`
	Arch         string           `json:"arch,omitempty" enum:"x86_64,aarch64" doc:"Architecture of the VM. Default: that of the server's host. QEMU emulates another one, which is much slower."`
	Network      policy.Mode      `json:"network,omitempty" enum:"isolated,allowlist,open" doc:"Default: as configured."`
	Resources    config.Resources `json:"resources,omitzero" doc:"Fields that are left out are as configured."`
	HostServices []netip.AddrPort `json:"host_services,omitempty" maxItems:"64" doc:"Services of the host and its network that this session may reach, as ADDRESS:PORT."`
	WithChanges  bool             `json:"with_changes,omitempty" doc:"Include the uncommitted changes of a repository on the host."`
	Workspace    string           `json:"workspace,omitempty" maxLength:"40" doc:"The workspace that holds the checkout. Default: none."`
	Trust        bool             `json:"trust_workspace,omitempty" doc:"Run the hooks and settings that earlier sessions left in the workspace."`
}

// SessionAnswer is the response to the creation of a session.
type SessionAnswer struct {
	session.View
	Created bool     `json:"created" doc:"False if the session existed already."`
	Notices []string `json:"notices,omitempty" doc:"Where the session differs from the request."`
	Ignored []string `json:"ignored,omitempty" doc:"Options that have no effect, because the session existed already."`
}

// Location returns the path of the session.
func (a SessionAnswer) Location() string { return SessionsPath + "/" + a.ID }

// Requests for operations on sessions.
type (
	CreateRequest struct {
		Once
		Body NewSession
	}
	FindRequest struct {
		Name string `query:"name" required:"true" maxLength:"4096" doc:"A session's name, the start of its id, its repository, or the repository's short name if only one matches." example:"acme/app"`
		Gone bool   `query:"gone" doc:"Match exact names only, and never guess the label. If only a session that is gone had the name, return its id, the name and the state gone."`
	}
	OpenRequest struct {
		SessionPath
		Body SessionOptions
	}
	DestroyRequest struct {
		SessionPath
		Force bool `query:"force" doc:"Destroy it even if work would be lost."`
	}
	StopRequest struct {
		SessionPath
		Suspend bool `query:"suspend" doc:"Save the memory of a running session, so that its programs resume at the next start. Where that fails, the session is stopped."`
	}
	CheckpointRequest struct {
		SessionPath
		Body struct {
			Name string `json:"name,omitempty" maxLength:"40" doc:"Default: the lowest free number." example:"before-refactoring"`
		}
	}
	CheckpointPath struct {
		SessionPath
		Name string `path:"name" maxLength:"40" doc:"A checkpoint's name."`
	}
	ForkRequest struct {
		SessionPath
		Body struct {
			Checkpoint string `json:"checkpoint,omitempty" maxLength:"40" doc:"Default: the current state of the session, which must be running." example:"before-refactoring"`
			Label      string `json:"label,omitempty" maxLength:"100" doc:"Label of the fork; several forks get a number as well. Default: the session's label and a number." example:"fix-login"`
			Count      int    `json:"count,omitempty" minimum:"1" maximum:"16" default:"1" doc:"How many forks to create."`
		}
	}
	PortsRequest struct {
		SessionPath
		Body struct {
			Ports []uint16 `json:"ports" minItems:"1" maxItems:"64" nullable:"false" doc:"Ports of the guest."`
		}
	}
	PortRequest struct {
		SessionPath
		Port uint16 `path:"port" minimum:"1" maximum:"65535" doc:"A published port of the guest."`
	}
	FetchRequest struct {
		SessionPath
	}
	LeaseRequest struct {
		SessionPath
		Body struct {
			For string `json:"for,omitempty" maxLength:"20" doc:"Minimum time that is left of the lease, such as 90m. Default: 4h." example:"4h"`
		}
	}
)

// Operations on sessions.
var (
	ListSessions = Operation[struct{}, SessionList]{Spec{
		ID: "listSessions", Method: http.MethodGet, Path: SessionsPath, Tag: "sessions", Need: Read,
		Summary: "List sessions that are not gone, oldest first",
	}, func(ctx context.Context, e *Engine, _ *struct{}) (SessionList, error) {
		all, err := e.sessions().List(ctx)
		list := SessionList{Sessions: []session.View{}}
		for _, s := range all {
			list.Sessions = append(list.Sessions, s.View())
		}
		return list, err
	}}

	FindSession = Operation[FindRequest, session.View]{Spec{
		ID: "findSession", Method: http.MethodGet, Path: SessionsPath + "/find", Tag: "sessions", Need: Read, Errors: []int{404},
		Summary: "Find the session that a person means",
	}, func(ctx context.Context, e *Engine, r *FindRequest) (session.View, error) {
		if !r.Gone {
			s, err := e.sessions().Find(ctx, r.Name)
			return s.View(), err
		}
		s, err := e.sessions().FindExact(ctx, r.Name)
		if fail.CodeOf(err) == fail.NotFound {
			if id, eerr := e.sessions().LastEnded(ctx, r.Name); eerr != nil || id != "" {
				return session.View{ID: id, Name: r.Name, State: session.Gone}, eerr
			}
		}
		return s.View(), err
	}}

	GetProgress = Operation[SessionPath, Progress]{Spec{
		ID: "getProgress", Method: http.MethodGet, Path: SessionsPath + "/{id}/progress", Tag: "sessions", Need: Read, Errors: []int{404},
		Summary: "Get a session, and where its work in progress began",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (p Progress, err error) {
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return p, err
		}
		p.Session, p.Kept = s.View(), lockfile.Held(e.sessions().Config.Paths.SessionLock(s.ID))
		if p.After, err = e.sessions().LastPhaseSeq(ctx, s.ID); err != nil {
			return p, err
		}
		_, p.Newest, err = e.sessions().Store.EventRange(ctx, s.ID)
		return p, err
	}}

	TendSession = Operation[SessionPath, session.View]{Spec{
		ID: "tendSession", Method: http.MethodPost, Path: SessionsPath + "/{id}/tend", Tag: "sessions", Need: Admin, Errors: []int{404},
		Summary: "Start the session's keeper if it needs one and has none",
		About:   "The server does this every few seconds for all sessions.",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (session.View, error) {
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) { return s, e.sessions().Tend(ctx, s.Session) })
	}}

	GetSession = Operation[SessionPath, session.View]{Spec{
		ID: "getSession", Method: http.MethodGet, Path: SessionsPath + "/{id}", Tag: "sessions", Need: Read, Errors: []int{404},
		Summary: "Get a session, even one that is gone",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (session.View, error) {
		s, err := e.Session(ctx, r.ID)
		return s.View(), err
	}}

	CreateSession = Operation[CreateRequest, SessionAnswer]{Spec{
		ID: "createSession", Method: http.MethodPost, Path: SessionsPath, Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Create a session, or start the one of that name",
		About:   "202 means that the request was accepted. The session's events show the progress; its state is `ready` or `broken` in the end.",
	}, createSession}

	CheckSession = Operation[CreateRequest, SessionAnswer]{Spec{
		ID: "checkSession", Method: http.MethodPost, Path: SessionsPath + "/check", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
		Summary: "Check whether a session could be created, as far as that can be known",
		About:   "Creates nothing: the answer has only notices.",
	}, func(ctx context.Context, e *Engine, r *CreateRequest) (a SessionAnswer, err error) {
		asked, err := e.request(ctx, r.Body)
		if err == nil {
			a.Notices, err = e.sessions().Check(asked)
		}
		return a, err
	}}

	OpenSession = Operation[OpenRequest, SessionAnswer]{Spec{
		ID: "openSession", Method: http.MethodPost, Path: SessionsPath + "/{id}/open", Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Start a session unless it runs, and open services of the host to it",
	}, func(ctx context.Context, e *Engine, r *OpenRequest) (SessionAnswer, error) {
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return SessionAnswer{}, err
		}
		return e.open(ctx, s, r.Body)
	}}

	VisitSession = Operation[SessionPath, session.View]{Spec{
		ID: "visitSession", Method: http.MethodPost, Path: SessionsPath + "/{id}/visit", Tag: "sessions", Need: Admin, Errors: []int{404},
		Summary: "Record that a user attaches now",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (session.View, error) {
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) { return s, e.sessions().MarkVisited(ctx, s) })
	}}

	StartSession = Operation[SessionPath, session.View]{Spec{
		ID: "startSession", Method: http.MethodPost, Path: SessionsPath + "/{id}/start", Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Start a stopped or broken session",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (session.View, error) {
		return e.setPhase(ctx, r.ID, session.Ready)
	}}

	StopSession = Operation[StopRequest, session.View]{Spec{
		ID: "stopSession", Method: http.MethodPost, Path: SessionsPath + "/{id}/stop", Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Shut down a session and keep its disk",
	}, func(ctx context.Context, e *Engine, r *StopRequest) (session.View, error) {
		if r.Suspend {
			return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) { return e.sessions().Suspend(ctx, s) })
		}
		return e.setPhase(ctx, r.ID, session.Stopped)
	}}

	DestroySession = Operation[DestroyRequest, session.View]{Spec{
		ID: "destroySession", Method: http.MethodDelete, Path: SessionsPath + "/{id}", Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Remove a session and everything in it",
		About:   "409 if work would be lost that exists only in the guest, unless `force` is set. Repeating it changes nothing.",
	}, destroySession}

	PublishPorts = Operation[PortsRequest, session.View]{Spec{
		ID: "publishPorts", Method: http.MethodPost, Path: SessionsPath + "/{id}/ports", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
		Summary: "Publish ports of the guest on the host's loopback address",
	}, func(ctx context.Context, e *Engine, r *PortsRequest) (session.View, error) {
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
			return session.Ports{Sessions: e.sessions()}.Publish(ctx, s, r.Body.Ports...)
		})
	}}

	UnpublishPort = Operation[PortRequest, session.View]{Spec{
		ID: "unpublishPort", Method: http.MethodDelete, Path: SessionsPath + "/{id}/ports/{port}", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
		Summary: "Withdraw a published port, and close its connections",
	}, func(ctx context.Context, e *Engine, r *PortRequest) (session.View, error) {
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
			return session.Ports{Sessions: e.sessions()}.Unpublish(ctx, s, r.Port)
		})
	}}

	RenewLease = Operation[LeaseRequest, session.View]{Spec{
		ID: "renewLease", Method: http.MethodPost, Path: SessionsPath + "/{id}/lease", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
		Summary: "Extend the time that a session may run",
		About:   "A lease is never shortened. It also resets the time without use. 409 if the session has no limits, or is not running.",
	}, func(ctx context.Context, e *Engine, r *LeaseRequest) (session.View, error) {
		d := session.DefaultRenewal
		if r.Body.For != "" {
			asked, err := measure.ParseDuration(r.Body.For)
			if d = time.Duration(asked); err != nil || d <= 0 || d > maxRenewal {
				return session.View{}, fail.New(fail.Usage, "DURATION must be from 1s to %v, such as 90m, got %q", measure.Duration(maxRenewal), short(r.Body.For)).WithHint("agent-sessionizer lease renew SESSION 4h")
			}
		}
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) { return e.sessions().Renew(ctx, s, d) })
	}}

	DiffSession = Operation[SessionPath, repo.Changes]{Spec{
		ID: "getDiff", Method: http.MethodGet, Path: SessionsPath + "/{id}/diff", Tag: "sessions", Need: Read, Errors: []int{404, 409},
		Summary: "Get what the agent changed since the clone",
		About:   "Includes uncommitted and untracked files. The patch comes from the guest.",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (c repo.Changes, err error) {
		return c, e.inGuest(ctx, r.ID, func(s session.Session, g repo.Guest) error {
			c, err = repo.Compare(ctx, g, s.Status.Dir, *s.Status.Base, repo.DiffOptions{})
			return err
		})
	}}

	FetchSession = Operation[SessionPath, repo.FetchResult]{Spec{
		ID: "fetchSession", Method: http.MethodPost, Path: SessionsPath + "/{id}/fetch", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
		Summary: "Fetch the agent's commits to the repository's mirror on the host",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (res repo.FetchResult, err error) {
		return res, e.inGuest(ctx, r.ID, func(s session.Session, g repo.Guest) error {
			res, err = session.Work{Sessions: e.sessions()}.Fetch(ctx, s, g, "", repo.FetchOptions{})
			return err
		})
	}}
)

// maxRenewal is the longest time for which a lease can be renewed.
const maxRenewal = 30 * 24 * time.Hour

// Session returns the session with that full id, as Task does for tasks.
func (e *Engine) Session(ctx context.Context, id string) (session.Session, error) {
	if !ids.Valid(id) {
		return session.Session{}, NoSuch("session", id)
	}
	s, err := e.sessions().Get(ctx, id)
	if fail.CodeOf(err) == fail.NotFound {
		err = NoSuch("session", id)
	}
	return s, err
}

// withSession calls f with a session, and returns the session that f returns.
func (e *Engine) withSession(ctx context.Context, id string, f func(session.Session) (session.Session, error)) (session.View, error) {
	s, err := e.Session(ctx, id)
	if err == nil {
		s, err = f(s)
	}
	return s.View(), err
}

func (e *Engine) setPhase(ctx context.Context, id string, desired session.Phase) (session.View, error) {
	return e.withSession(ctx, id, func(s session.Session) (session.Session, error) {
		return e.sessions().SetDesired(ctx, s, desired)
	})
}

// ready returns a session that runs.
func (e *Engine) ready(ctx context.Context, id string) (session.Session, error) {
	s, err := e.Session(ctx, id)
	if err == nil && s.Phase != session.Ready {
		err = fail.New(fail.Conflict, "session %s is %s", s.Name, s.Phase).WithHint("agent-sessionizer start %s", s.Name)
	}
	return s, err
}

// inGuest calls f with the guest of a running session that has its repository.
func (e *Engine) inGuest(ctx context.Context, id string, f func(session.Session, repo.Guest) error) error {
	s, err := e.ready(ctx, id)
	if err != nil {
		return err
	}
	if s.Status.Base == nil {
		return NotCloned(s.View())
	}
	done, err := e.costly()
	if err != nil {
		return err
	}
	defer done()
	conn, err := session.Connections{Paths: e.sessions().Config.Paths}.Dial(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	return f(s, conn)
}

// NotCloned returns the error for a session that does not have its repository yet.
func NotCloned(s session.View) error {
	return fail.New(fail.Conflict, "the repository is not cloned into session %s yet", s.Name).WithHint("agent-sessionizer logs -f %s", s.Name)
}

// Progress is a session and where its work in progress began.
type Progress struct {
	Session session.View `json:"session"`
	After   int64        `json:"after" doc:"Sequence of the event before the work began: the after parameter to see all of it."`
	Newest  int64        `json:"newest" doc:"Sequence of the newest event."`
	Kept    bool         `json:"kept" doc:"A keeper works on the session."`
}

func createSession(ctx context.Context, e *Engine, r *CreateRequest) (a SessionAnswer, err error) {
	n := r.Body
	asked, err := e.request(ctx, n)
	if err != nil {
		return a, err
	}
	once := r.session(n)
	if a, found, err := e.createdBefore(ctx, once); err != nil || found {
		return a, err
	}
	if !asked.New {
		s, err := e.sessions().ByLabel(ctx, asked.Repo.Key, asked.Label)
		if err == nil {
			if a, err = e.open(ctx, s, n.SessionOptions); err != nil {
				return a, err
			}
			_, err = e.reserve(ctx, once, s.ID, false)
			return a, err
		}
		if fail.CodeOf(err) != fail.NotFound {
			return a, err
		}
	}
	if _, err := e.sessions().Check(asked); err != nil {
		return a, err
	}
	if err := e.Preflight(ctx, cmp.Or(asked.Arch, vm.HostArch())); err != nil {
		return a, err
	}
	if asked.ID, err = e.reserve(ctx, once, ids.New(), true); err != nil {
		return a, err
	}
	s, created, notices, err := e.sessions().Open(ctx, asked)
	if err != nil {
		return a, err
	}
	if a = (SessionAnswer{View: s.View(), Created: created, Notices: notices}); !created { // another process has created it in the meantime
		a.Ignored = n.ignored(s)
	}
	return a, nil
}

// createdBefore returns the answer to an earlier, identical request with the same key, without
// its notices.
func (e *Engine) createdBefore(ctx context.Context, once *task.Once) (a SessionAnswer, found bool, err error) {
	if once == nil {
		return a, false, nil
	}
	first, found, err := e.sessions().Store.Request(ctx, e.Caller.Name, once.Key)
	if err != nil || !found {
		return a, false, err
	}
	if err := once.Check(first); err != nil {
		return a, false, err
	}
	s, err := e.sessions().Get(ctx, first.Subject)
	if fail.CodeOf(err) == fail.NotFound { // the request was not accepted
		return a, false, nil
	}
	if err == nil {
		err = json.Unmarshal(first.Notes, &a.Created)
	}
	a.View = s.View()
	return a, err == nil, err
}

// reserve returns the id of the session for a request: id, or that of an earlier request with the
// same key. created says that the request creates the session.
func (e *Engine) reserve(ctx context.Context, once *task.Once, id string, created bool) (string, error) {
	if once == nil {
		return id, nil
	}
	notes, err := json.Marshal(created)
	if err != nil {
		return "", err
	}
	first, err := e.sessions().Store.Reserve(ctx, store.Request{Actor: e.Caller.Name, Key: once.Key, Digest: once.Digest, Subject: id, Notes: notes})
	if err == nil {
		err = once.Check(first)
	}
	return first.Subject, err
}

// request returns n as package session takes it.
func (e *Engine) request(ctx context.Context, n NewSession) (session.Request, error) {
	const hint = "agent-sessionizer open owner/repo --new fix-login"
	asked := session.Request{
		New: n.New, Label: n.Label, Profile: n.Profile, Image: n.Image, Arch: n.Arch, Resources: n.Resources, NetworkMode: n.Network,
		WithChanges: n.WithChanges, HostServices: n.HostServices, Workspace: n.Workspace, TrustWorkspace: n.Trust,
	}
	switch {
	case !n.New && (n.Label != "" || n.Like != ""):
		return asked, fail.New(fail.Usage, "label and like are only for a new session").WithHint(hint)
	case n.Label != "" && !validLabel(n.Label):
		return asked, badLabel(n.Label).WithHint(hint)
	case (n.Like == "") == (n.Repo == ""):
		return asked, fail.New(fail.Usage, "set repo, or like with new, but not both").WithHint("agent-sessionizer open owner/repo")
	case n.Like != "":
		s, err := e.Session(ctx, n.Like)
		asked.Repo, asked.Profile = s.Spec.Repo, cmp.Or(n.Profile, s.Spec.Profile)
		if _, serr := os.Stat(asked.Repo.Path); serr != nil && asked.Repo.URL != "" {
			asked.Repo.Path = "" // the clone is gone, but its remote is known
		}
		if err != nil {
			return asked, err
		}
		return asked, e.Caller.checkSession(asked.Repo.Path, n.SessionOptions)
	case strings.HasPrefix(n.Repo, "."):
		return asked, fail.New(fail.Usage, "repo must be an absolute path or a repository, got %q", short(n.Repo)).WithHint("use owner/repo, a git URL, or a path that starts with /")
	}
	err := e.Caller.checkSession(n.Repo, n.SessionOptions) // before a path is read
	if err != nil {
		return asked, err
	}
	if asked.Repo, err = repo.Parse(n.Repo, "/"); !n.New {
		asked.Label = asked.Repo.Branch
	}
	return asked, err
}

// ignored returns the names of the options that have no effect on an existing session.
func (o SessionOptions) ignored(s session.Session) (names []string) {
	for _, f := range []struct {
		set  bool
		name string
	}{
		{o.Profile != "" && o.Profile != s.Spec.Profile, "profile"},
		{o.Image != "" && o.Image != s.Spec.Image && !strings.HasPrefix(s.Spec.Image, o.Image+"#"), "image"},
		{o.Arch != "" && o.Arch != s.Arch(), "arch"},
		{o.Network != "" && o.Network != s.Spec.NetworkMode, "network"},
		{o.Resources.CPUs != 0 && o.Resources.CPUs != s.Spec.Resources.CPUs, "cpus"},
		{o.Resources.Memory != 0 && o.Resources.Memory != s.Spec.Resources.Memory, "memory"},
		{o.Resources.Disk != 0 && o.Resources.Disk != s.Spec.Resources.Disk, "disk"},
		{o.WithChanges && !s.Spec.WithChanges, "with-changes"},
		{o.Workspace != "" && o.Workspace != s.Status.Workspace, "workspace"},
		{o.Trust && !s.Status.TrustWorkspace, "trust-workspace"},
	} {
		if f.set {
			names = append(names, f.name)
		}
	}
	return names
}

// open requests phase ready for an existing session, whose options no longer change. A lack
// in the settings must not lock the user out of it, so they are not checked.
func (e *Engine) open(ctx context.Context, s session.Session, o SessionOptions) (SessionAnswer, error) {
	if err := e.Caller.checkSession("", o); err != nil {
		return SessionAnswer{}, err
	}
	s, err := session.Net{Sessions: e.sessions()}.OpenHostServices(ctx, s, o.HostServices)
	if err == nil {
		s, err = e.sessions().MarkUsed(ctx, s)
	}
	if err == nil && (s.Phase != session.Ready || s.Desired != session.Ready) {
		s, err = e.sessions().SetDesired(ctx, s, session.Ready)
	}
	return SessionAnswer{View: s.View(), Ignored: o.ignored(s)}, err
}

func validLabel(label string) bool { return repo.ValidBranch(label) && len(label) <= 100 }

func badLabel(label string) *fail.Error {
	return fail.New(fail.Usage, "label must have the form of a branch name, with at most 100 bytes, got %q", short(label))
}
