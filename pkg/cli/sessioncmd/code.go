package sessioncmd

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/sshconfig"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// sshFile returns the user's configuration of OpenSSH.
func sshFile(p config.Paths) (sshconfig.File, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return sshconfig.File{}, fail.New(fail.Host, "find home directory: %w", err)
	}
	return sshconfig.File{Path: filepath.Join(home, ".ssh", "config"), Lock: filepath.Join(p.State, "locks", "ssh-config")}, nil
}

// includeView is the JSON output of ssh-config --install and --uninstall.
type includeView struct {
	File    string `json:"file"`
	Changed bool   `json:"changed"`
}

// includeSSHConfig adds the sessions of this host to the user's configuration of OpenSSH, or removes them.
func includeSSHConfig(ctx context.Context, a *app.App, o sshConfigOptions) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	e, ok := h.(ops.Engine)
	if !ok {
		return fail.New(fail.Usage, "ssh-config --install supports only sessions of this host").WithHint("agent-sessionizer --host local ssh-config --install")
	}
	file, changed, err := setSSHConfig(ctx, e.Tasks.Sessions, o.install)
	if err != nil {
		return err
	}
	switch {
	case o.json:
		return a.Con.JSON(includeView{file.Path, changed})
	case !changed:
		a.Con.Say("%s", file.Path+" needs no change")
	case o.install:
		a.Con.Say("%s", file.Path+" now includes the sessions of this host")
	default:
		a.Con.Say("%s", file.Path+" no longer includes sessions")
	}
	return nil
}

func setSSHConfig(ctx context.Context, m *session.Manager, install bool) (f sshconfig.File, changed bool, err error) {
	if f, err = sshFile(m.Config.Paths); err != nil {
		return f, false, err
	}
	if !install {
		changed, err = f.Exclude(ctx)
		return f, changed, err
	}
	if err := m.WriteSSHConfigs(ctx); err != nil {
		return f, false, err
	}
	changed, err = f.Include(ctx, session.Connections{Paths: m.Config.Paths}.SSHConfigFiles())
	return f, changed, err
}

// RunSSHProxy connects OpenSSH to the SSH server of a running session.
func RunSSHProxy(ctx context.Context, a *app.App, what string) error {
	h, s, err := app.Running(ctx, a, what)
	if err != nil {
		return err
	}
	_, row, err := a.Local(ctx, h, s)
	if err != nil {
		return err
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", row.Status.Endpoint.Addr)
	if err != nil {
		return fail.New(fail.Host, "connect to session %s: %w", s.Name, err).WithHint("agent-sessionizer logs %s", s.Name)
	}
	defer conn.Close()
	go func() { _ = pipe.Copy(conn, os.Stdin) }() // its end shows at the other direction
	return pipe.Copy(a.Con.Out, conn)
}

// terminalEditor means $VISUAL or $EDITOR.
const terminalEditor = "terminal"

// editor is a program that opens files on other hosts over OpenSSH.
type editor struct {
	name string
	// argv returns the command that opens a file or directory.
	argv func(name, host, path string, dir bool) []string
}

// editors are the known editors. Without a choice, the first that is a program in PATH is used; jetbrains
// is none.
var editors = []editor{{"code", vscode}, {"cursor", vscode}, {"codium", vscode}, {"windsurf", vscode}, {"zed", zed}, {"jetbrains", jetbrains}}

// vscode returns what https://code.visualstudio.com/docs/remote/troubleshooting (Connecting from the
// terminal) describes.
func vscode(name, host, path string, dir bool) []string {
	kind := "--file-uri"
	if dir {
		kind = "--folder-uri"
	}
	u := url.URL{Scheme: "vscode-remote", Host: "ssh-remote+" + host, Path: path}
	return []string{name, kind, u.String()}
}

// zed returns what https://zed.dev/docs/remote-development describes.
func zed(name, host, path string, _ bool) []string {
	u := url.URL{Scheme: "ssh", Host: host, Path: path}
	return []string{name, u.String()}
}

// jetbrains makes a link that opens JetBrains Gateway, as described at https://www.jetbrains.com/help/idea/remote-development-a.html.
func jetbrains(_, host, path string, _ bool) []string {
	open := "xdg-open"
	if runtime.GOOS == "darwin" {
		open = "open"
	}
	about := url.Values{"type": {"ssh"}, "host": {host}, "port": {"22"}, "projectPath": {path}}
	return []string{open, "jetbrains-gateway://connect#" + about.Encode()}
}

type codeOptions struct {
	editor string
	print  bool
}

func NewCodeCmd(a *app.App) *cobra.Command {
	var o codeOptions
	cmd := &cobra.Command{
		Use:   "code SESSION [PATH]",
		Short: "Open a session's files in an editor on this host",
		Long: `Open a session's files in an editor on this host. PATH is relative to the repository's
directory, which is the default, or ~/PATH in the agent's home.

VS Code, Cursor, VSCodium, Windsurf, Zed and JetBrains Gateway connect by SSH. They need
"ssh-config --install", for which this command asks. Such an editor trusts the guest more
than a terminal does; docs/editors.md explains what to avoid.

With --editor terminal, $VISUAL or $EDITOR edits a copy of the file PATH, which is copied
back if the file in the session has not changed meanwhile. This works for all hosts.`,
		Example: `  agent-sessionizer code repo
  agent-sessionizer code repo cmd/main.go --editor zed
  agent-sessionizer code repo '~/.zshrc' --editor terminal`,
		Args:              app.Usage(cobra.RangeArgs(1, 2)),
		ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runCode(cmd.Context(), a, o, args[0], append(args[1:], "")[0])
		},
	}
	cmd.Flags().StringVar(&o.editor, "editor", "", "`EDITOR`: code, cursor, codium, windsurf, zed, jetbrains or terminal (default: the setting editor)")
	cmd.Flags().BoolVar(&o.print, "print", false, "print the editor's command line; do not run it")
	return cmd
}

func runCode(ctx context.Context, a *app.App, o codeOptions, what, file string) error {
	cfg, err := a.Settings()
	if err != nil {
		return err
	}
	name, err := editorName(cmp.Or(o.editor, cfg.Editor), file, exec.LookPath)
	if err != nil {
		return err
	}
	h, s, err := app.Running(ctx, a, what)
	if err != nil {
		return err
	}
	if _, here := h.(ops.Engine); !here && name != terminalEditor {
		return fail.New(fail.Usage, "code works only on the host of session %s, unless the editor is terminal", s.Name).
			WithHint("agent-sessionizer code --editor terminal %s", ssh.Quote(what, cmp.Or(file, "FILE")))
	}
	conn, err := h.Dial(ctx, s.ID, true)
	if err != nil {
		return err
	}
	defer conn.Close()
	where, isDir, err := resolve(ctx, conn, inGuest(s, file))
	if err != nil {
		return err
	}
	if name == terminalEditor {
		if isDir {
			return fail.New(fail.Usage, "the terminal editor needs a file, and %s is a directory", where).WithHint("agent-sessionizer code --editor terminal %s FILE", ssh.Quote(what))
		}
		err := editCopy(ctx, a, conn, s.Name, where)
		if errors.Is(err, errTooLarge) {
			return fail.New(fail.Usage, "%w", err).WithHint("agent-sessionizer cp %s .", ssh.Quote(s.Name+":"+where))
		}
		return err
	}
	m, _, err := a.Local(ctx, h, s)
	if err != nil {
		return err
	}
	if err := knownToSSH(ctx, a, m, s.Name+session.SSHForEditors); err != nil {
		return err
	}
	e := editors[slices.IndexFunc(editors, func(e editor) bool { return e.name == name })]
	argv := e.argv(e.name, s.Name+session.SSHForEditors, where, isDir)
	if o.print {
		a.Printf("%s\n", ssh.Quote(argv...))
		return nil
	}
	run := exec.CommandContext(ctx, argv[0], argv[1:]...)
	run.Stdin, run.Stdout, run.Stderr = os.Stdin, a.Con.Err, a.Con.Err
	if err := run.Run(); err != nil {
		return fail.New(fail.Failure, "run %s: %w", argv[0], err).WithHint("agent-sessionizer code --editor terminal %s FILE", ssh.Quote(what))
	}
	return nil
}

// editorName returns the name of the editor to use. chosen is the user's choice, "" for none.
func editorName(chosen, file string, look func(string) (string, error)) (string, error) {
	var names []string
	for _, e := range editors {
		names = append(names, e.name)
	}
	names = append(names, terminalEditor)
	if chosen != "" {
		if !slices.Contains(names, chosen) {
			return "", fail.New(fail.Usage, "editor must be one of %s, got %q", strings.Join(names, ", "), chosen).WithHint("agent-sessionizer code --help")
		}
		return chosen, nil
	}
	for _, e := range editors {
		if _, err := look(e.name); err == nil {
			return e.name, nil
		}
	}
	if file == "" {
		return "", fail.New(fail.Host, "no remote-capable editor found in PATH (code, cursor, codium, windsurf, zed)").
			WithHint("agent-sessionizer code --editor terminal SESSION FILE")
	}
	return terminalEditor, nil
}

// maxPath limits the path that a guest returns.
const maxPath = 4 << 10

// resolve returns the absolute path of a file in the guest, and whether it is a directory. A file that does
// not exist is one to create.
func resolve(ctx context.Context, conn *ssh.Client, file string) (where string, isDir bool, err error) {
	const script = `p=$1
case $p in "~") p=$HOME ;; "~/"*) p=$HOME/${p#"~/"} ;; esac
[ -d "$p" ] && printf d || printf f
printf %s "$p"`
	out, err := conn.Output(ctx, ssh.Quote("sh", "-c", script, "sh", file), nil, maxPath)
	if err != nil {
		return "", false, err
	}
	kind, where := string(out[:min(1, len(out))]), path.Clean(string(out[min(1, len(out)):]))
	if !path.IsAbs(where) || termtext.Line(where) != where {
		return "", false, fail.New(fail.Usage, "invalid path %q", termtext.Line(where))
	}
	return where, kind == "d", nil
}

// knownToSSH ensures that OpenSSH knows a host, and that it opens no port of this host to it.
func knownToSSH(ctx context.Context, a *app.App, m *session.Manager, host string) error {
	file, err := sshFile(m.Config.Paths)
	if err != nil {
		return err
	}
	if !file.Includes(session.Connections{Paths: m.Config.Paths}.SSHConfigFiles()) {
		hint := "agent-sessionizer ssh-config --install"
		if !app.Interactive() {
			return fail.New(fail.Usage, "the editor finds sessions in %s, which does not include them", file.Path).WithHint("%s", hint)
		}
		ok, err := a.Con.Confirm("The editor finds sessions in "+file.Path+". Include them there?", "--editor terminal")
		if err != nil {
			return err
		}
		if !ok {
			return fail.New(fail.Interrupted, "%s is unchanged", file.Path).WithHint("%s", hint)
		}
	}
	if _, _, err := setSSHConfig(ctx, m, true); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "ssh", "-G", "-F", file.Path, host).CombinedOutput()
	if err != nil {
		return fail.New(fail.Host, "OpenSSH cannot read %s: %s", file.Path, termtext.Line(termtext.Head(string(out), 500)))
	}
	for line := range strings.Lines(string(out)) {
		if forward, ok := strings.CutPrefix(strings.TrimSpace(line), "remoteforward "); ok {
			return fail.New(fail.Policy, "%s forwards a port of every host you log in to back to this host (RemoteForward %s), which would open it to the guest", file.Path, forward).
				WithHint("restrict RemoteForward in %s to the hosts that need it", file.Path)
		}
	}
	return nil
}

// editCopy edits a copy of a file in the guest, and copies it back. If that fails, the user's edits stay.
func editCopy(ctx context.Context, a *app.App, conn *ssh.Client, session, file string) error {
	dir, err := os.MkdirTemp("", "agent-sessionizer-")
	if err != nil {
		return fail.New(fail.Host, "create a directory for the copy: %w", err)
	}
	here := filepath.Join(dir, path.Base(file))
	was, exists, err := fetchFile(ctx, conn, file, here)
	if err == nil && !exists {
		err = os.WriteFile(here, nil, 0o600)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	err = app.Edit(ctx, here)
	now, readErr := os.ReadFile(here)
	if readErr != nil {
		return fail.New(fail.Host, "read the copy: %w", errors.Join(err, readErr))
	}
	if bytes.Equal(now, was) {
		if err == nil {
			a.Con.Say("%s", "no changes")
		}
		return errors.Join(err, os.RemoveAll(dir))
	}
	if err == nil {
		err = putBack(app.AfterEdit(ctx), conn, file, here, was, exists)
	}
	if err != nil {
		return fail.New(fail.CodeOf(err), "%w; your edits are in %s", err, here).
			WithHint("%s", cmp.Or(fail.HintOf(err), "agent-sessionizer cp "+ssh.Quote(here, session+":"+file)))
	}
	a.Con.Say("%s", "changed "+file)
	return os.RemoveAll(dir)
}

// putBack replaces a file in the guest, unless it is not what it was.
func putBack(ctx context.Context, conn *ssh.Client, file, here string, was []byte, existed bool) error {
	present, exists, err := fetchFile(ctx, conn, file, here+".in-the-session")
	if err != nil {
		return err
	}
	if exists != existed || !bytes.Equal(present, was) {
		return fail.New(fail.Conflict, "%s has changed in the session", file).WithHint("diff %s %s", ssh.Quote(here), ssh.Quote(here+".in-the-session"))
	}
	return conn.CopyTo(ctx, here, file, nil)
}

// fetchFile copies a file from the guest, and returns its content. A file that does not exist is empty.
func fetchFile(ctx context.Context, conn *ssh.Client, from, to string) (content []byte, exists bool, err error) {
	err = conn.CopyFrom(ctx, from, to, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	f, err := os.Open(to)
	if err != nil {
		return nil, false, fmt.Errorf("read the copy: %w", err)
	}
	defer f.Close()
	content, err = io.ReadAll(io.LimitReader(f, maxEdited+1))
	if err == nil && len(content) > maxEdited {
		err = fmt.Errorf("%s %w", from, errTooLarge)
	}
	return content, err == nil, err
}

// maxEdited is the size of the largest file that a terminal editor gets.
const maxEdited = 64 << 20

var errTooLarge = errors.New("has more than 64 MiB")
