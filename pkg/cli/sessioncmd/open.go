// Package sessioncmd has the commands for sessions and the work in them, and the picker.
package sessioncmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// OpenOptions are the flags of open.
type OpenOptions struct {
	profile     string
	image       string
	arch        string // of the VM; "" means the host's
	network     string
	resources   config.Resources
	withChanges bool
	services    []string
	New         bool   // create another session
	label       string // of the new session; "" to choose one
	workspace   string
	on          string // host of the cluster for it; "" for this one
	trust       bool   // run what earlier sessions left in the workspace
	detach      bool   // wait until the session is ready, and do not attach
	noWait      bool   // create the session and its local tmux session, and do not attach
	Client      string // the tmux client to switch; "" means the one that this process runs in
	JSON        bool
	Given       []string // the flags given, for hints that repeat them
}

// Flags defines the flags.
func (o *OpenOptions) Flags(f *pflag.FlagSet) {
	f.StringVar(&o.profile, "profile", "", "profile `NAME` of the session (default as configured)")
	f.StringVar(&o.image, "image", "", "guest `IMAGE`: ubuntu, debian, PATH or URL#sha256:HEX of a cloud image (default as configured)")
	f.StringVar(&o.arch, "arch", "", "`ARCH` of the VM: x86_64 or aarch64; another than this host's is emulated (default this host's)")
	f.StringVar(&o.network, "network", "", "network `MODE`: isolated, allowlist or open (default as configured)")
	f.Var((*cpus)(&o.resources.CPUs), "cpus", "number `N` of CPUs (default as configured)")
	f.Var(&o.resources.Memory, "memory", "memory of the VM, such as 8GiB (default as configured)")
	f.Var(&o.resources.Disk, "disk", "disk of the VM, such as 50GiB (default as configured)")
	f.BoolVar(&o.withChanges, "with-changes", false, "include the local clone's uncommitted changes")
	f.StringArrayVar(&o.services, "host-service", nil, "`ADDRESS:PORT` that the guest may reach: localhost:5432 (this host; host.lima.internal in the guest) or an address of the LAN; repeatable")
	f.StringVar(&o.workspace, "workspace", "", "`NAME` of the workspace that holds the checkout, at /work")
	f.StringVar(&o.on, "on", "", "`HOST` of the cluster that gets a new session, or any for one with room")
	f.BoolVar(&o.trust, "trust-workspace", false, trustUsage)
	f.BoolVarP(&o.detach, "detach", "d", false, "do not attach when the session is ready")
}

// cpus is a flag value: a number of CPUs. 0 means that the flag was not set.
type cpus int

func (c *cpus) String() string { return strconv.Itoa(int(*c)) }

func (*cpus) Type() string { return "int" }

func (c *cpus) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return errors.New("must be a number of CPUs, at least 1")
	}
	*c = cpus(n)
	return nil
}

func NewOpenCmd(a *app.App) *cobra.Command {
	var o OpenOptions
	cmd := &cobra.Command{
		Use:     "open REPO [LABEL]",
		Aliases: []string{"attach"},
		Short:   "Open or create a session of a repository, and attach",
		Long: `Open a session of a repository, and attach to it. If there is no session, create one: a VM
with a clone of the repository.

A repository can have several sessions. The part after @ is the label of a session. If no
session has it, it is a branch: open creates a session with that label from it. --new
always creates another session. Without a LABEL it gets the first free name: owner/repo,
owner/repo@2, owner/repo@3, …; from a branch: @BRANCH, @BRANCH-2, …

You attach immediately and watch the setup, then use the guest's tmux. To detach, press
your tmux prefix, then d. With -d, the command waits until the session is ready, and does
not attach.

Most flags take effect only when the session is created. --host-service also applies to
an existing session.`,
		Example: `  agent-sessionizer open owner/repo
  agent-sessionizer open owner/repo@branch
  agent-sessionizer open owner/repo --new fix-login
  agent-sessionizer open . --with-changes --cpus 8 --memory 16GiB
  agent-sessionizer open https://git.example.org/team/project.git -d`,
		Args:              app.Usage(cobra.RangeArgs(1, 2)),
		ValidArgsFunction: complete.Repos(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Given = app.ChangedFlags(cmd)
			if len(args) == 2 {
				if o.label = args[1]; o.New && o.label == "" {
					return fail.New(fail.Usage, "the label must not be empty").WithHint("agent-sessionizer open --new %s fix-login", ssh.Quote(args[0]))
				}
				if !o.New {
					return fail.New(fail.Usage, "a label is only for a new session, got %q", o.label).WithHint("agent-sessionizer open --new %s fix-login", ssh.Quote(args[0]))
				}
			}
			return RunOpen(cmd.Context(), a, o, args[0])
		},
	}
	o.Flags(cmd.Flags())
	cmd.Flags().BoolVar(&o.New, "new", false, "create another session; the argument after REPO is its label")
	cmd.Flags().BoolVar(&o.JSON, "json", false, "print the session as JSON when it is ready (implies -d)")
	return cmd
}

// RunOpen opens the session that what names, or creates one for the repository.
func RunOpen(ctx context.Context, a *app.App, o OpenOptions, what string) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	options, err := o.session()
	if err != nil {
		return err
	}
	h, what, err = o.host(ctx, a, h, what)
	if err != nil {
		return err
	}
	s, ref, err := o.resolve(ctx, h, what)
	if code := fail.CodeOf(err); ref.Key == "" && (code == fail.NotFound || code == fail.Usage) && !o.New && o.on == "" { // a name, and not of a repository
		on, there, ferr := a.Find(ctx, h, what, false)
		if ferr == nil {
			h, s, err = on, there, nil
		}
	}
	if _, here := h.(ops.Engine); !here && ref.Path != "" {
		return fail.New(fail.Usage, "%s is a directory of this host; a session on another host is of a repository that it can fetch", ref.Path).WithHint("agent-sessionizer open owner/repo")
	}
	create := ops.CreateRequest{Body: ops.NewSession{Repo: cmp.Or(ref.Path, what), New: o.New, Label: o.label, SessionOptions: options}}
	if o.New && s.ID != "" {
		create.Body.Repo, create.Body.Like, s = "", s.ID, session.View{}
	}
	if fail.CodeOf(err) == fail.NotFound && ref.Key != "" {
		if err = confirmClone(ctx, a, h, o, ref); err == nil {
			_, err = ops.CheckSession.On(ctx, h, create)
		}
	}
	if err != nil {
		return err
	}
	if !o.detach && !o.JSON {
		if s.ID == "" { // otherwise tmux is checked when it shows the session
			if err := (tmux.Client{}).Check(ctx); err != nil {
				return err
			}
		}
		if o.Client == "" && !app.Interactive() {
			return fail.New(fail.Usage, "attach to session: no terminal").
				WithHint("agent-sessionizer open %s", ssh.Quote(append(append(o.Given, "-d", what), o.labels()...)...))
		}
	}
	if s, err = openSession(ctx, a, h, create, s); err != nil {
		return err
	}
	if o.noWait {
		if err := show(ctx, a, h, s); err != nil {
			return err
		}
		PushStatus(ctx, h)
		return nil
	}
	if !o.detach && !o.JSON {
		return attachLocal(ctx, a, h, s, o.Client) // the local tmux session shows the progress
	}
	s, err = app.Follow(ctx, a, h, s, session.Ready)
	if err != nil {
		return err
	}
	if o.JSON {
		return a.Con.JSON(s)
	}
	a.Printf("%s\n", s.Name)
	return nil
}

// host returns the host that the session is on, or shall be, and its name or repository.
func (o OpenOptions) host(ctx context.Context, a *app.App, h ops.Host, what string) (ops.Host, string, error) {
	if o.on == "" {
		return a.OnHost(ctx, h, what)
	}
	cfg, err := a.Settings()
	if err != nil {
		return nil, "", err
	}
	h, err = a.ChooseHost(ctx, h, o.on, cmp.Or(o.image, cfg.Image))
	return h, what, err
}

// resolve finds a session as app.ResolveRepo does. For --new it finds the session by its exact
// name: the new one is like it.
func (o OpenOptions) resolve(ctx context.Context, h ops.Host, what string) (s session.View, ref repo.Ref, err error) {
	if !o.New {
		return app.ResolveRepo(ctx, h, what)
	}
	s, err = app.FindExact(ctx, h, what)
	code := fail.CodeOf(err)
	if err == nil && s.State != session.Gone || err != nil && code != fail.NotFound && code != fail.Usage {
		return s, ref, err
	}
	ref, perr := app.ParseRepo(what)
	switch {
	case perr == nil:
		err = fail.New(fail.NotFound, "no session %q", what)
	case code != fail.Usage: // several match
		err = perr
	}
	return session.View{}, ref, err
}

// session returns the options of the session.
func (o OpenOptions) session() (options ops.SessionOptions, err error) {
	options = ops.SessionOptions{Profile: o.profile, Resources: o.resources, Network: policy.Mode(o.network), WithChanges: o.withChanges, Workspace: o.workspace, Trust: o.trust}
	switch options.Network {
	case "", policy.Isolated, policy.Allowlist, policy.Open:
	default:
		return options, fail.New(fail.Usage, "network mode must be isolated, allowlist or open, got %q", o.network)
	}
	if o.arch != "" {
		if options.Arch, err = vm.ParseArch(o.arch); err != nil {
			return options, fmt.Errorf("--arch: %w", err)
		}
	}
	if options.HostServices, err = o.hostServices(); err != nil {
		return options, err
	}
	options.Image, err = app.AbsoluteImage(o.image)
	return options, err
}

// openSession opens session s, or the one that create asks for if s is empty.
func openSession(ctx context.Context, a *app.App, h ops.Host, create ops.CreateRequest, s session.View) (session.View, error) {
	var opened ops.SessionAnswer
	var err error
	if s.ID != "" {
		opened, err = ops.OpenSession.On(ctx, h, ops.OpenRequest{SessionPath: ops.SessionPath{ID: s.ID}, Body: create.Body.SessionOptions})
	} else {
		opened, err = ops.CreateSession.On(ctx, h, create)
	}
	for _, n := range opened.Notices {
		a.Con.Say("%s", n)
	}
	for i, name := range opened.Ignored {
		opened.Ignored[i] = "--" + name
	}
	if len(opened.Ignored) > 0 {
		a.Con.Say("session %s already exists; these options have no effect: %s", opened.Name, strings.Join(opened.Ignored, ", "))
	}
	return opened.View, err
}

// labels returns the label as a list of arguments.
func (o OpenOptions) labels() []string {
	if o.label == "" {
		return nil
	}
	return []string{o.label}
}

func (o OpenOptions) hostServices() ([]netip.AddrPort, error) {
	var services []netip.AddrPort
	for _, text := range o.services {
		service, err := config.ParseHostService(text)
		if err != nil {
			return nil, fail.New(fail.Usage, "--host-service: %w", err)
		}
		services = append(services, service)
	}
	return services, nil
}

// show creates or updates the session's local tmux session.
func show(ctx context.Context, a *app.App, h ops.Host, s session.View) error {
	local, err := localSession(a, h, s)
	if err != nil {
		return err
	}
	server, err := tmux.Client{}.New(ctx, local)
	if err != nil {
		return err
	}
	return shownIn(ctx, a, h, s, server)
}

// localSession describes the session's local tmux session.
func localSession(a *app.App, h ops.Host, s session.View) (tmux.Session, error) {
	self, err := app.Self()
	if err != nil {
		return tmux.Session{}, err
	}
	contexts, err := app.Contexts()
	if err != nil {
		return tmux.Session{}, err
	}
	host := app.HostOf(a, h, contexts) // the current context may change while the session is shown
	return tmux.Session{
		Name: tmux.SlugName(s.ShortName(), s.ID), Key: s.ID,
		Command: []string{self, "--host", host, "attach-session", s.ID},
		Destroy: []string{self, "--host", host, "destroy", "--confirm", s.ID},
	}, nil
}

// shownIn records the tmux server that shows the session. Only a host's own keepers push its status.
func shownIn(ctx context.Context, a *app.App, h ops.Host, s session.View, server tmux.ServerState) error {
	if _, here := h.(ops.Engine); !here {
		return nil
	}
	m, v, err := a.Local(ctx, h, s)
	if err != nil {
		return err
	}
	return m.SetTmuxSocket(ctx, v, server.Socket)
}

// attachLocal switches to the session's local tmux session. Inside tmux, it switches the client.
// Outside, this process becomes tmux, unless the session is not ready yet. In that case
// tmux runs as a child, so that a user who leaves can be informed that the work continues.
func attachLocal(ctx context.Context, a *app.App, h ops.Host, s session.View, client string) error {
	local, err := localSession(a, h, s)
	if err != nil {
		return err
	}
	server, argv, err := tmux.Client{}.Enter(ctx, client, local, deniedNote(ctx, a, h, s))
	if err != nil {
		return err
	}
	// The client has switched; the user does not wait for the rest.
	if err := shownIn(ctx, a, h, s, server); err != nil {
		return err
	}
	// A user who leaves a session has seen everything in it up to now.
	if from := server.Current(client); from != "" && from != s.ID {
		if left, err := ops.GetSession.On(ctx, h, ops.SessionPath{ID: from}); err == nil {
			markVisited(ctx, h, left)
		}
	}
	markVisited(ctx, h, s)
	PushStatus(ctx, h)
	if argv == nil {
		return nil
	}
	if s.State == session.Ready {
		return syscall.Exec(argv[0], argv, os.Environ())
	}
	if err := runJob(ctx, argv); err != nil {
		return err
	}
	s, err = ops.GetSession.On(context.WithoutCancel(ctx), h, ops.SessionPath{ID: s.ID}) // even if ctx was canceled
	if err != nil {
		return err
	}
	switch s.State {
	case session.Creating, session.Starting, session.Stopping:
		if s.Desired == session.Ready {
			return app.DetachedError(s)
		}
	}
	return nil
}

// runJob runs a command that owns the terminal. If the command stops itself, as tmux does
// for its suspend key, this process must stop, too. The shell knows only this process, and
// resumes both.
func runJob(ctx context.Context, argv []string) error {
	p, err := os.StartProcess(argv[0], argv, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		return fail.New(fail.Host, "start %s: %w", argv[0], err)
	}
	defer func() { _ = p.Release() }()
	defer context.AfterFunc(ctx, func() { _ = p.Signal(syscall.SIGTERM) })()
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(p.Pid, &status, syscall.WUNTRACED, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return fail.New(fail.Host, "wait for %s: %w", argv[0], err)
		case status.Stopped():
			if err := syscall.Kill(os.Getpid(), syscall.SIGSTOP); err != nil {
				return fail.New(fail.Host, "suspend with %s: %w", argv[0], err)
			}
		case status.Exited() && status.ExitStatus() != 0:
			return app.RemoteExit(status.ExitStatus()) // the command has reported the reason
		default:
			return nil
		}
	}
}

// markVisited records that the user has visited the session. A failure to record it must not
// prevent attaching.
func markVisited(ctx context.Context, h ops.Host, s session.View) {
	if _, err := ops.VisitSession.On(ctx, h, ops.SessionPath{ID: s.ID}); err != nil {
		slog.WarnContext(ctx, "failed to record visit", "session", s.Name, "error", err)
	}
}

// deniedNote reports how many names were denied since the user's last visit. It does not
// show the names, because the guest chooses them. An error must not prevent attaching.
func deniedNote(ctx context.Context, a *app.App, h ops.Host, s session.View) string {
	found, err := ops.ListDenials.On(ctx, h, ops.DenialQuery{SessionPath: ops.SessionPath{ID: s.ID}, Since: s.VisitedAt})
	if err != nil {
		slog.WarnContext(ctx, "failed to read denied names", "error", err)
	}
	n := len(found.Denials)
	if n == 0 {
		return ""
	}
	note := "1 name was denied"
	if n > 1 {
		note = fmt.Sprintf("%d names were denied", n)
	}
	note += "; to see and allow them: agent-sessionizer net denied " + s.Name
	a.Con.Say("%s", note) // tmux covers the screen now, and restores it later
	return note
}
