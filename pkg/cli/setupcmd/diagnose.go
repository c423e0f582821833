package setupcmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/diagnose"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Records of each kind that diagnose includes, the newest ones.
const maxRecords = 1000

type diagnoseOptions struct {
	output string
	dryRun bool
	yes    bool
	json   bool

	again func(without []string, add ...string) string // the user's command with other flags
}

func NewDiagnoseCmd(a *app.App) *cobra.Command {
	var o diagnoseOptions
	cmd := &cobra.Command{
		Use: "diagnose [SESSION | TASK]", Short: "Create a redacted archive for a bug report",
		Long: `Create a redacted archive for a bug report: versions, the results of doctor, the
settings with their origin, logs and audit records of this host. With SESSION it also has
the session's events, the ends of its logs, the decisions of its gateway and the console
of its VM; with TASK also the task's events and the end of its keeper's log. The content
is listed before the archive is written.

To find secrets in these texts, all references in the settings are resolved, as "secrets
check" does. Their values, the tokens of logins, private keys, and whatever looks like a
secret are replaced by [redacted]. Names of repositories, hosts and files stay. Read the
archive before you publish it.`,
		Example: `  agent-sessionizer diagnose
  agent-sessionizer diagnose repo --dry-run
  agent-sessionizer diagnose 4f2a
  agent-sessionizer diagnose repo --output report.tar.gz --yes`,
		Args: app.Usage(cobra.MaximumNArgs(1)), ValidArgsFunction: complete.Args(complete.Sessions(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.again = func(without []string, add ...string) string { return app.Again(cmd, without, add...) }
			return runDiagnose(cmd.Context(), a, o, append(args, "")[0])
		},
	}
	f := cmd.Flags()
	f.StringVarP(&o.output, "output", "o", "", "`FILE` to write, which must not exist (default agent-sessionizer-TIME.tar.gz)")
	f.BoolVarP(&o.dryRun, "dry-run", "n", false, "list the content; write nothing")
	f.BoolVarP(&o.yes, "yes", "y", false, "write the archive without asking")
	f.BoolVar(&o.json, "json", false, "print a JSON object: the file and its content")
	return cmd
}

// archiveView is the JSON output of diagnose.
type archiveView struct {
	File  string          `json:"file,omitempty"`
	Parts []diagnose.Part `json:"parts"`
}

func runDiagnose(ctx context.Context, a *app.App, o diagnoseOptions, name string) error {
	if o.json && !o.yes && !o.dryRun {
		return fail.New(fail.Usage, "--json requires --yes or --dry-run, because it cannot ask").WithHint("%s", o.again(nil, "--dry-run"))
	}
	dir := "agent-sessionizer-" + time.Now().Format("20060102-150405")
	file := o.output
	if file == "" {
		file = dir + ".tar.gz"
	}
	if _, err := os.Lstat(file); err == nil && !o.dryRun {
		return diagnose.Exists(file)
	}
	a.Con.Say("%s", "collecting; resolving secrets so that they can be redacted")
	c, err := collect(ctx, a, name)
	if err != nil {
		return err
	}
	bundle, err := c.Finish()
	if err != nil {
		return err
	}
	if !o.json {
		var rows [][]string
		for _, p := range bundle.Parts {
			rows = append(rows, []string{p.Name, config.Size(p.Bytes).String(), strconv.Itoa(p.Redacted), p.About})
		}
		a.Con.Table([]string{"FILE", "SIZE", "REDACTED", "CONTENT"}, rows)
	}
	view := archiveView{Parts: bundle.Parts}
	if !o.dryRun {
		if ok, err := confirmed(a, o.yes, file); !ok {
			return err
		}
		if err := bundle.WriteNew(file, dir); err != nil {
			return err
		}
		view.File = file
		a.Con.Say("%s", "wrote "+file+"; read it before you publish it")
	}
	if o.json {
		return a.Con.JSON(view)
	}
	return nil
}

func confirmed(a *app.App, yes bool, file string) (bool, error) {
	if yes {
		return true, nil
	}
	ok, err := a.Con.Confirm("Write this to "+file+"?", "--yes")
	if err == nil && !ok {
		err = fail.New(fail.Interrupted, "nothing was written")
	}
	return ok, err
}

// collector collects what diagnose includes.
type collector struct {
	*diagnose.Collection
	app  *app.App
	host ops.Engine // of this host; zero if its sessions cannot be read
	has  bool       // a host

	session *session.Session // that the report is about
	task    *task.View
}

// collect reads everything that diagnose includes. What cannot be read is reported in its place: something
// is wrong with this host.
func collect(ctx context.Context, a *app.App, name string) (*diagnose.Collection, error) {
	paths, err := config.DefaultPaths()
	if err != nil {
		return nil, err
	}
	home := filepath.Dir(paths.LimaHome)
	c := collector{Collection: &diagnose.Collection{Redact: a.Redact, Home: home}, app: a}
	h, err := a.QuietHost(ctx)
	c.host, c.has = h.(ops.Engine)
	if err != nil {
		if name != "" {
			return nil, err
		}
		c.Add("store.txt", "why the sessions cannot be read", nil, err)
	}
	if name != "" {
		if err := c.find(ctx, name); err != nil {
			return nil, err
		}
	}
	a.Redact.Add(environment()...)
	for _, p := range login.Providers() {
		a.Redact.Add(login.At(p, paths.Logins(), home).Secrets()...)
	}
	keys, err := privateKeys(paths)
	if a.Redact.Add(keys...); err != nil {
		a.Con.Warn("%s", "not every private key is known, and so found: "+err.Error())
	}
	c.Add("versions.txt", "versions and this host", versions(ctx), nil)
	c.AddJSON("doctor.json", "results of doctor", examine(ctx, a), nil)
	c.addSettings(ctx)
	c.addHost(ctx, paths)
	if c.session != nil {
		c.addSession(ctx, *c.session)
	}
	if c.task != nil {
		c.addTask(ctx, *c.task)
	}
	return c.Collection, nil
}

// find finds the session or the task of that name, and the other one that belongs to it.
func (c *collector) find(ctx context.Context, name string) error {
	err := c.findSession(ctx, name)
	if err == nil && c.session.Task == "" || err != nil && fail.CodeOf(err) != fail.NotFound {
		return err
	}
	if err == nil {
		name = c.session.Task
	}
	t, taskErr := ops.FindTask.On(ctx, c.host, ops.FindTaskRequest{Name: name})
	switch {
	case err != nil && fail.CodeOf(taskErr) == fail.NotFound:
		return fail.New(fail.NotFound, "no session or task %q", name).WithHint("agent-sessionizer list")
	case taskErr != nil:
		return taskErr
	case t.Host != "":
		return fail.New(fail.Usage, "task %s is on host %s; run the command there", t.ID, t.Host)
	}
	c.task = &t
	if t.Session == "" || c.session != nil {
		return nil
	}
	return c.setSession(ctx, t.Session)
}

// findSession finds the session of that name, which may be gone.
func (c *collector) findSession(ctx context.Context, name string) error {
	v, err := app.FindSession(ctx, c.host, name)
	if fail.CodeOf(err) == fail.NotFound {
		if id, endedErr := c.host.Tasks.Sessions.LastEnded(ctx, name); id != "" || endedErr != nil {
			v.ID, err = id, endedErr
		}
	}
	if err != nil {
		return err
	}
	return c.setSession(ctx, v.ID)
}

func (c *collector) setSession(ctx context.Context, id string) error {
	s, err := c.host.Session(ctx, id)
	if err == nil {
		c.session = &s
	}
	return err
}

// secretName matches names of environment variables that have secrets.
var secretName = lazyregexp.New(`(?i)token|secret|passw|credential|private|api_?key|auth|cookie|webhook|_(key|pass|pat|pwd|dsn)$`)

// environment returns the values of variables that have secrets, by their names, and the passwords in URLs.
func environment() (all []secret.Value) {
	for _, kv := range os.Environ() {
		name, value, _ := strings.Cut(kv, "=")
		if secretName.MatchString(name) {
			all = append(all, secret.NewValue(value))
		}
		if u, err := url.Parse(value); err == nil && u.User != nil {
			password, _ := u.User.Password()
			all = append(all, secret.NewValue(password))
		}
	}
	return all
}

// privateKeys returns the private keys of this host, its cluster and its sessions, and what the gateways
// keep secret. The error is about those that cannot be read.
func privateKeys(p config.Paths) (all []secret.Value, err error) {
	add := func(values []secret.Value, failed error) {
		all = append(all, values...)
		if !errors.Is(failed, fs.ErrNotExist) && !errors.Is(failed, cluster.ErrNone) {
			err = errors.Join(err, failed)
		}
	}
	addFile := func(path string) {
		text, failed := os.ReadFile(path)
		add([]secret.Value{secret.NewValue(string(text))}, failed)
	}
	addFile(filepath.Join(p.LimaHome, "_config", "user"))
	sessions, failed := os.ReadDir(p.Sessions())
	add(nil, failed)
	for _, s := range sessions {
		addFile(filepath.Join(p.SessionDir(s.Name()), "ssh_key"))
		add(gateway.Process{Dir: p.Gateway(s.Name())}.Remembered())
	}
	state, failed := cluster.LoadState(p.Cluster())
	add([]secret.Value{secret.NewValue(state.Nkey), secret.NewValue(state.TLS), secret.NewValue(state.Age), secret.NewValue(state.Signing)}, failed)
	return all, err
}

// versions returns the versions of this program and those that it uses.
func versions(ctx context.Context) []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, "agent-sessionizer %s, %s, %s/%s, %d CPUs\n", app.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, argv := range [][]string{
		{"uname", "-a"}, {"qemu-system-x86_64", "--version"}, {"qemu-system-aarch64", "--version"}, {"qemu-img", "--version"}, {"tmux", "-V"}, {"git", "--version"}, {"ssh", "-V"},
	} {
		text, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
		line, _, _ := strings.Cut(string(text), "\n")
		if err != nil {
			line = strings.TrimSpace(line + " (" + err.Error() + ")")
		}
		fmt.Fprintf(&out, "%s: %s\n", argv[0], line)
	}
	return out.Bytes()
}

// addSettings adds the settings that apply to the session, or to all sessions. It resolves all references to
// secrets, so that their values are found.
func (c collector) addSettings(ctx context.Context) {
	cfg, err := c.app.Settings()
	if err != nil {
		c.Add("settings.json", "why the settings cannot be read", nil, err)
		c.app.Con.Warn("%s", "the settings cannot be read, so the values of secrets in them are not known: those are replaced only where they look like a secret")
		return
	}
	var s session.Session
	if c.session != nil {
		s = *c.session
	}
	values, err := cfg.Values(config.RepoKey(s.RepoKey), s.Spec.Profile)
	c.AddJSON("settings.json", "settings and where each comes from", values, err)
	if !c.has {
		return
	}
	list, err := c.host.CheckAllSecrets(ctx, s.Spec.Secrets)
	c.AddJSON("secrets.json", "references to secrets, and whether they can be resolved", list, nil)
	if err != nil {
		c.Add("secrets.txt", "why some settings have no secrets", nil, err)
	}
	for _, s := range list.Secrets {
		if s.Error != "" {
			c.app.Con.Warn("%s", "the value of "+s.Name+" is not known, so it is replaced only where it looks like a secret: "+s.Error)
		}
	}
}

// addHost adds what concerns no single session.
func (c collector) addHost(ctx context.Context, p config.Paths) {
	c.AddFile("sweep.log", "the last search for orphans", app.SweepLog(p))
	cfg, err := c.app.Settings()
	if err != nil {
		return
	}
	if cfg.Log.File != "" {
		c.AddFile("log.txt", "the end of the log file", string(cfg.Log.File))
	}
	addRecords(c, "audit.jsonl", "the newest audit records", c.app.AuditLog(cfg).Records())
	if !c.has {
		return
	}
	images, err := ops.ListImages.On(ctx, c.host, struct{}{})
	c.AddJSON("images.json", "images", images, err)
	sessions, err := ops.ListSessions.On(ctx, c.host, struct{}{})
	c.AddJSON("sessions.json", "sessions", sessions, err)
}

// addSession adds what concerns one session. The guest has written some of it.
func (c collector) addSession(ctx context.Context, s session.Session) {
	m := c.host.Tasks.Sessions
	c.AddJSON("session/session.json", "the session", s.View(), nil)
	addRecords(c, "session/events.jsonl", "the session's newest events", c.host.Events(ctx, ops.Session(s.ID), store.Oldest, false))
	for _, l := range m.Logs(s) {
		for _, file := range l.Paths {
			c.AddFile("session/"+filepath.Base(file), "the end of the log: "+l.About, file)
		}
	}
	dir := m.Config.Paths.Gateway(s.ID)
	c.AddFile("session/policy.json", "what the gateway allows", filepath.Join(dir, "policy.json"))
	addRecords(c, "session/decisions.jsonl", "the gateway's newest decisions", gateway.Decisions(ctx, dir, false))
	c.AddFile("session/lima.yaml", "the VM, as Lima knows it", filepath.Join(m.Config.Paths.LimaHome, s.VM(), "lima.yaml"))
}

// addTask adds what concerns one task, but not the output of its agent.
func (c collector) addTask(ctx context.Context, t task.View) {
	c.AddJSON("task/task.json", "the task", t, nil)
	addRecords(c, "task/events.jsonl", "the task's newest events", c.host.Events(ctx, ops.Task(t.ID), store.Oldest, false))
	c.AddFile("task/keeper.log", "the end of the log: the task's keeper", c.host.Tasks.Dir(t.ID).KeeperLog())
}

// addRecords adds the newest records, and the error that ended them.
func addRecords[T any](c collector, name, about string, records iter.Seq2[T, error]) {
	var all newest[T]
	var failed error
	for r, err := range records {
		if failed = err; err != nil {
			break
		}
		all.add(r)
	}
	c.Add(name, about, all.lines(), failed)
}

// newest keeps the last maxRecords of the records that are added.
type newest[T any] struct{ all []T }

func (n *newest[T]) add(r T) {
	if len(n.all) >= 2*maxRecords {
		n.all = slices.Clone(n.all[maxRecords:])
	}
	n.all = append(n.all, r)
}

// lines returns the records as JSON, one on each line.
func (n *newest[T]) lines() []byte {
	var out bytes.Buffer
	for _, r := range n.all[max(0, len(n.all)-maxRecords):] {
		text, err := json.Marshal(r)
		if err != nil {
			text = fmt.Appendf(nil, "%q", err.Error())
		}
		out.Write(append(text, '\n'))
	}
	return out.Bytes()
}
