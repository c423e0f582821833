package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

type openOptions struct {
	profile     string
	image       string
	network     string
	resources   config.Resources
	withChanges bool
	services    []string
	detach      bool   // wait until the session is ready, and do not attach
	noWait      bool   // create the session and its local tmux session, and do not attach
	client      string // the tmux client to switch; "" means the one that this process runs in
	json        bool
	given       []string // the flags given, for hints that repeat them
}

func (o *openOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.profile, "profile", "", "profile `NAME` of the session (default as configured)")
	f.StringVar(&o.image, "image", "", "guest `IMAGE`: ubuntu, debian, PATH or URL#sha256:HEX of a cloud image (default as configured)")
	f.StringVar(&o.network, "network", "", "network `MODE`: isolated, allowlist or open (default as configured)")
	f.Var((*cpus)(&o.resources.CPUs), "cpus", "number `N` of CPUs (default as configured)")
	f.Var(&o.resources.Memory, "memory", "memory of the VM, such as 8GiB (default as configured)")
	f.Var(&o.resources.Disk, "disk", "disk of the VM, such as 50GiB (default as configured)")
	f.BoolVar(&o.withChanges, "with-changes", false, "include the local clone's uncommitted changes")
	f.StringArrayVar(&o.services, "host-service", nil, "`ADDRESS:PORT` that the guest may reach: localhost:5432 (this host; host.lima.internal in the guest) or an address of the LAN; repeatable")
	f.BoolVarP(&o.detach, "detach", "d", false, "do not attach when the session is ready")
}

// isLocalImage makes a relative image path from the command line absolute. "" stays "".
func isLocalImage(text string) (string, error) {
	if text == "" {
		return "", nil
	}
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find working directory: %w", err)
	}
	ref, err := config.ParseImageRef(text, dir)
	return ref.String(), err
}

// cpus is a flag value: a number of CPUs. 0 means that the flag was not set.
type cpus int

func (c *cpus) String() string { return strconv.Itoa(int(*c)) }
func (*cpus) Type() string     { return "int" }

func (c *cpus) Set(text string) error {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return errors.New("must be a number of CPUs, at least 1")
	}
	*c = cpus(n)
	return nil
}

func newOpenCmd(a *app) *cobra.Command {
	var o openOptions
	cmd := &cobra.Command{
		Use:     "open REPO",
		Aliases: []string{"new", "attach"},
		Short:   "Open or create the session of a repository, and attach",
		Long: `Open the session of a repository, and attach to it. If there is no session, create one: a
VM with a clone of the repository.

You attach immediately and watch the setup, then use the guest's tmux. To detach, press
your tmux prefix, then d. With -d, the command waits until the session is ready, and does
not attach.

Most flags take effect only when the session is created. --host-service also applies to
an existing session.`,
		Example: `  agent-sessionizer open owner/repo@branch
  agent-sessionizer open . --with-changes --cpus 8 --memory 16GiB
  agent-sessionizer open https://git.example.org/team/project.git -d`,
		Args:              usage(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeRepos,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.given = changedFlags(cmd)
			return runOpen(cmd.Context(), a, o, args[0])
		},
	}
	o.flags(cmd.Flags())
	cmd.Flags().BoolVar(&o.json, "json", false, "print the session as JSON when it is ready (implies -d)")
	return cmd
}

func runOpen(ctx context.Context, a *app, o openOptions, what string) error {
	m, err := a.manager(ctx)
	if err != nil {
		return err
	}
	if o.network != "" {
		switch policy.Mode(o.network) {
		case policy.Isolated, policy.Allowlist, policy.Open:
		default:
			return fail.New(fail.Usage, "network mode must be isolated, allowlist or open, got %q", o.network)
		}
	}
	s, r, err := a.resolve(ctx, m, o, what)
	if err != nil {
		return err
	}
	if !o.detach && !o.json {
		if err := (tmux.Client{}).Check(ctx); err != nil {
			return err
		}
		if o.client == "" && !interactive() {
			return fail.New(fail.Usage, "attach to session: no terminal").
				WithHint("agent-sessionizer open %s", ssh.Quote(append(o.given, "-d", what)...))
		}
	}
	if s, err = a.openSession(ctx, m, o, s, r); err != nil {
		return err
	}
	if o.noWait {
		if err := a.show(ctx, m, s); err != nil {
			return err
		}
		a.pushStatus(ctx, m)
		return nil
	}
	if !o.detach && !o.json {
		return a.attach(ctx, m, s, o.client) // the local tmux session shows the progress
	}
	s, err = a.follow(ctx, m, s, session.Ready)
	if err != nil {
		return err
	}
	if o.json {
		return a.con.JSON(s.View())
	}
	a.printf("%s\n", s.Name)
	return nil
}

// resolve finds the session that what identifies, and builds the request. If there is no
// session, it also checks that a new one may be requested. It does not check this for an
// existing session, so that a lack in the settings never locks the user out of one.
func (a *app) resolve(ctx context.Context, m *session.Manager, o openOptions, what string) (s session.Session, r session.Request, err error) {
	r = session.Request{
		Profile: o.profile, Resources: o.resources,
		NetworkMode: policy.Mode(o.network), WithChanges: o.withChanges,
	}
	if r.HostServices, err = o.hostServices(); err != nil {
		return s, r, err
	}
	if r.Image, err = isLocalImage(o.image); err != nil {
		return s, r, err
	}
	s, r.Repo, err = resolveRepo(ctx, m, what)
	if fail.CodeOf(err) == fail.NotFound && r.Repo.Key != "" {
		if err = a.confirmClone(m, o, r.Repo); err == nil {
			_, err = m.Check(r)
		}
	}
	return s, r, err
}

// openSession requests phase ready for session s. If s is empty, it creates the session
// that r requests.
func (a *app) openSession(ctx context.Context, m *session.Manager, o openOptions, s session.Session, r session.Request) (session.Session, error) {
	if s.ID != "" {
		a.unused(s, o, r)
		s, err := m.OpenHostServices(ctx, s, r.HostServices)
		if err != nil || s.Phase == session.Ready && s.Desired == session.Ready {
			return s, err
		}
		return m.SetDesired(ctx, s, session.Ready)
	}
	if err := a.preflight(ctx); err != nil {
		return s, err
	}
	s, created, notices, err := m.Open(ctx, r)
	if err != nil {
		return s, err
	}
	for _, n := range notices {
		a.con.Say("%s", n)
	}
	if !created { // another process has created it in the meantime
		a.unused(s, o, r)
	}
	return s, nil
}

func (o openOptions) hostServices() ([]netip.AddrPort, error) {
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

// notRepoError is the error for a word that is neither a session nor a repository.
type notRepoError struct{ error }

func (e notRepoError) Unwrap() error { return e.error }

// resolveRepo finds a session by name, id or repository. If what is a repository without a
// session, resolveRepo returns the repository in ref, with a fail.NotFound error.
func resolveRepo(ctx context.Context, m *session.Manager, what string) (s session.Session, ref repo.Ref, err error) {
	s, findErr := m.Find(ctx, what)
	if fail.CodeOf(findErr) != fail.NotFound {
		ref.Branch = branchOf(what)
		return s, ref, findErr
	}
	cwd, err := os.Getwd()
	if err != nil {
		return s, ref, fail.New(fail.Host, "find working directory: %w", err)
	}
	if ref, err = repo.Parse(what, cwd); err != nil {
		return s, repo.Ref{}, notRepoError{err}
	}
	s, err = m.ByRepo(ctx, ref.Key)
	return s, ref, err
}

// findSession finds a session by name, id, repository or the path of a local clone.
func findSession(ctx context.Context, m *session.Manager, what string) (session.Session, error) {
	s, err := m.Find(ctx, what)
	if fail.CodeOf(err) == fail.NotFound && (strings.HasPrefix(what, ".") || filepath.IsAbs(what)) {
		if at, _, aerr := resolveRepo(ctx, m, what); aerr == nil {
			return at, nil
		}
	}
	return s, err
}

// branchOf returns the branch of owner/repo@branch.
func branchOf(what string) string {
	if repo.KeyOf(what) == "" || strings.Contains(what, ":") {
		return ""
	}
	_, branch, _ := strings.Cut(what, "@")
	return branch
}

// unused names the given options that have no effect on an existing session.
func (a *app) unused(s session.Session, o openOptions, r session.Request) {
	var names []string
	for _, f := range []struct {
		set  bool
		name string
	}{
		{r.Repo.Branch != "" && r.Repo.Branch != s.Spec.Repo.Branch, "@" + r.Repo.Branch},
		{o.profile != "" && o.profile != s.Spec.Profile, "--profile"},
		{r.Image != "" && r.Image != s.Spec.Image && !strings.HasPrefix(s.Spec.Image, r.Image+"#"), "--image"},
		{o.network != "" && policy.Mode(o.network) != s.Spec.NetworkMode, "--network"},
		{o.resources.CPUs != 0 && o.resources.CPUs != s.Spec.Resources.CPUs, "--cpus"},
		{o.resources.Memory != 0 && o.resources.Memory != s.Spec.Resources.Memory, "--memory"},
		{o.resources.Disk != 0 && o.resources.Disk != s.Spec.Resources.Disk, "--disk"},
		{o.withChanges && !s.Spec.WithChanges, "--with-changes"},
	} {
		if f.set {
			names = append(names, f.name)
		}
	}
	if len(names) > 0 {
		a.con.Say("session %s already exists; these options have no effect: %s", s.Name, strings.Join(names, ", "))
	}
}

// preflight reports immediately what would otherwise fail a minute later.
func (a *app) preflight(ctx context.Context) error {
	driver, err := a.driver(quietLog())
	if err != nil {
		return err
	}
	if errs := driver.Check(ctx); len(errs) > 0 {
		if len(errs) == 1 {
			return errs[0]
		}
		return fail.New(fail.Host, "%w", errors.Join(errs...)).WithHint("agent-sessionizer doctor")
	}
	return nil
}

// show creates or updates the session's local tmux session, and records its tmux socket.
func (a *app) show(ctx context.Context, m *session.Manager, s session.Session) error {
	t := tmux.Client{}
	err := t.New(ctx, tmux.Session{
		Name: tmux.SlugName(s.Repo, s.ID), Key: s.ID,
		Command: []string{m.Self, "attach-session", s.ID},
		Destroy: []string{m.Self, "destroy", "--confirm", s.ID},
	})
	if err != nil {
		return err
	}
	socket, err := t.SocketPath(ctx)
	if err != nil {
		return err
	}
	return m.SetTmuxSocket(ctx, s, socket)
}

// attach switches to the session's local tmux session. Inside tmux, it switches the client.
// Outside, this process becomes tmux, unless the session is not ready yet. In that case
// tmux runs as a child, so that a user who leaves can be informed that the work continues.
func (a *app) attach(ctx context.Context, m *session.Manager, s session.Session, client string) error {
	if err := a.show(ctx, m, s); err != nil {
		return err
	}
	t := tmux.Client{}
	// A user who leaves a session has seen everything in it up to now.
	if from, err := t.Current(ctx, client); err == nil && from != "" && from != s.ID {
		if left, err := m.Get(ctx, from); err == nil {
			a.markVisited(ctx, m, left)
		}
	}
	note := a.deniedNote(ctx, m, s)
	a.markVisited(ctx, m, s)
	a.pushStatus(ctx, m)
	argv, err := t.SwitchOrAttach(ctx, client, tmux.SlugName(s.Repo, s.ID), note)
	if err != nil || argv == nil {
		return err
	}
	if s.Phase == session.Ready {
		return syscall.Exec(argv[0], argv, os.Environ())
	}
	if err := runJob(ctx, argv); err != nil {
		return err
	}
	s, err = m.Get(context.WithoutCancel(ctx), s.ID) // even if ctx was canceled
	if err != nil {
		return err
	}
	switch s.Phase {
	case session.Creating, session.Starting, session.Stopping:
		if s.Desired == session.Ready {
			return detachedError(s)
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
			return remoteExit(status.ExitStatus()) // the command has reported the reason
		default:
			return nil
		}
	}
}

// markVisited records that the user has visited the session. A failure to record it must not
// prevent attaching.
func (a *app) markVisited(ctx context.Context, m *session.Manager, s session.Session) {
	if err := m.MarkVisited(ctx, s); err != nil {
		slog.WarnContext(ctx, "failed to record visit", "session", s.Name, "error", err)
	}
}

// deniedNote reports how many names were denied since the user's last visit. It does not
// show the names, because the guest chooses them. An error must not prevent attaching.
func (a *app) deniedNote(ctx context.Context, m *session.Manager, s session.Session) string {
	denials, err := m.DeniedSince(ctx, s, s.Status.Attached)
	if err != nil {
		slog.WarnContext(ctx, "failed to read denied names", "error", err)
	}
	if len(denials) == 0 {
		return ""
	}
	note := "1 name was denied"
	if n := len(denials); n > 1 {
		note = fmt.Sprintf("%d names were denied", n)
	}
	note += "; to see and allow them: agent-sessionizer net denied " + s.Name
	a.con.Say("%s", note) // tmux covers the screen now, and restores it later
	return note
}
