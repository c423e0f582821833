package repo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

// hostGit runs the host's git in one directory.
type hostGit struct {
	dir      string
	user     bool     // honour the user's and the system's configuration
	network  bool     // may contact remotes; implies the user's configuration
	settings []string // more options before the subcommand
	env      []string // additional environment
	stdin    io.Reader
	stdout   io.Writer       // nil: output returns it, bounded
	progress Progress        // receives git's own progress lines from stderr
	limits   *resourceLimits // nil: no resource limits
}

// resourceLimits limits the resources of a git that reads data from a guest or a remote. A
// plain shell can set every limit, so that no helper program is needed.
type resourceLimits struct {
	fileBytes int64         // largest file it may write
	cpu       time.Duration // processor time
	memory    int64         // bytes of address space; not enforced by macOS
	data      int64         // bytes of memory, for use with the user's programs that take much address space; not enforced by macOS either
}

// gitError is the error of a git that ran and failed.
type gitError struct {
	what   string
	code   int
	stderr string
}

func (e *gitError) Error() string {
	if text := clip(e.stderr); text != "" {
		return fmt.Sprintf("git %s: %s", e.what, text)
	}
	return fmt.Sprintf("git %s: exit status %d", e.what, e.code)
}

const (
	maxOutput = 64 << 20        // bytes of output from the host's git
	stopGrace = 5 * time.Second // for a cancelled git to clean up
)

// fixed returns the options that disable everything a repository's configuration
// could make git run. They also disable the housekeeping that would continue after
// git has returned.
func (g hostGit) fixed() []string {
	return []string{
		"-c", "core.hooksPath=/dev/null",
		"-c", "core.fsmonitor=false",
		"-c", "core.untrackedCache=false",
		"-c", "core.splitIndex=false",
		"-c", "core.askPass=",
		"-c", "gc.auto=0",
		"-c", "maintenance.auto=false",
		"-c", "submodule.recurse=false",
		"-c", "fetch.recurseSubmodules=false",
		"-c", "fetch.writeCommitGraph=false",
		"-c", "protocol.ext.allow=never",
	}
}

// command prepares a git process. The returned tail receives the end of its stderr.
func (g hostGit) command(ctx context.Context, args []string) (*exec.Cmd, *tailBuffer, error) {
	argv := append([]string{"git"}, g.fixed()...)
	if !g.user && !g.network && !owned(g.dir) {
		for _, d := range safeDirectories(ctx) {
			argv = append(argv, "-c", "safe.directory="+d)
		}
	}
	argv = append(append(argv, g.settings...), args...)
	if g.limits != nil {
		argv = g.limits.around(argv)
	}
	name, err := exec.LookPath(argv[0])
	if err != nil {
		return nil, nil, fail.New(fail.Host, "git is not installed: %w", err).WithHint("sudo apt-get install git")
	}
	cmd := exec.CommandContext(ctx, name, argv[1:]...)
	cmd.Dir, cmd.Stdin, cmd.Stdout = g.dir, g.stdin, g.stdout
	cmd.Env = g.environ()
	stderr := &tailBuffer{keep: maxText}
	cmd.Stderr = &progressWriter{tail: stderr, say: g.progress}
	// A new session has no terminal on which ssh could ask for a passphrase, and
	// gives the processes one group to kill together.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = stopGrace
	return cmd, stderr, nil
}

// around wraps argv in a shell that sets the resource limits. The limits are our
// own numbers, so they need no quoting.
func (c *resourceLimits) around(argv []string) []string {
	// With signal 25, SIGXFSZ, ignored, git reports that the file is too large.
	script := fmt.Sprintf("trap '' 25; ulimit -f %d || exit 125; ", c.fileBytes/512+1)
	if c.cpu > 0 {
		script += fmt.Sprintf("ulimit -t %d || exit 125; ", int(c.cpu.Seconds()))
	}
	for option, bytes := range map[string]int64{"-v": c.memory, "-d": c.data} {
		if bytes > 0 {
			script += fmt.Sprintf("ulimit %s %d 2>/dev/null || :; ", option, bytes/1024)
		}
	}
	return append([]string{"sh", "-c", script + `exec "$@"`, "sh"}, argv...)
}

func (g hostGit) run(ctx context.Context, args ...string) error {
	cmd, stderr, err := g.command(ctx, args)
	if err != nil {
		return err
	}
	return finished(ctx, cmd.Run(), subcommand(args), stderr)
}

// subcommand returns git's subcommand: the first word that is not a setting.
func subcommand(args []string) string {
	for len(args) > 2 && args[0] == "-c" {
		args = args[2:]
	}
	return args[0]
}

// output runs git and returns its output. Too much output is an error.
func (g hostGit) output(ctx context.Context, args ...string) (string, error) {
	var buf bytes.Buffer
	g.stdout = &pipe.Writer{W: &buf, Left: maxOutput}
	err := g.run(ctx, args...)
	return buf.String(), err
}

// query returns the output of a command that exits with 1 when it finds nothing; it
// returns "" then. Every other failure is an error, because it does not mean that
// nothing was found.
func (g hostGit) query(ctx context.Context, args ...string) (string, error) {
	out, err := g.output(ctx, args...)
	if ge, ok := errors.AsType[*gitError](err); ok && ge.code == 1 {
		return "", nil
	}
	return out, err
}

// finished converts the end of a git process into an error.
func finished(ctx context.Context, err error, what string, stderr *tailBuffer) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("git %s: %w", what, context.Cause(ctx))
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return &gitError{what: what, code: exit.ExitCode(), stderr: redactURLs(stderr.String())}
	}
	return fmt.Errorf("git %s: %w", what, err)
}

var urlCredentials = lazyregexp.New(`://[^/\s'"]*@`)

// redactURLs hides credentials in git's messages about a remote. The user's
// url.*.insteadOf may have put them into the URL.
func redactURLs(s string) string { return urlCredentials.ReplaceAllString(s, "://…@") }

// kept matches the caller's GIT_* variables that configure how to reach a remote.
// All others could point git at another repository, index, or program.
var kept = lazyregexp.New(`^GIT_(SSH|SSH_COMMAND|SSH_VARIANT|SSL_[A-Z_]+|HTTP_[A-Z_]+|PROXY_[A-Z_]+|EXEC_PATH|` +
	`CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|COUNT|KEY_[0-9]+|VALUE_[0-9]+))$`)

func (g hostGit) environ() []string {
	var env []string
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(name, "GIT_") && (!kept.MatchString(name) || !g.user && !g.network) {
			continue
		}
		if name == "SSH_ASKPASS" || strings.HasPrefix(name, "LC_") || name == "LANGUAGE" || name == "LANG" {
			continue
		}
		env = append(env, kv)
	}
	protocols := "none"
	if g.network {
		protocols = "https:ssh:git:file"
	}
	env = append(env,
		"LC_ALL=C", "GIT_TERMINAL_PROMPT=0", "GIT_ASKPASS=", "SSH_ASKPASS_REQUIRE=never", "GCM_INTERACTIVE=never",
		"GIT_ALLOW_PROTOCOL="+protocols, "GIT_OPTIONAL_LOCKS=0", "GIT_NO_REPLACE_OBJECTS=1", "GIT_NO_LAZY_FETCH=1",
	)
	if !g.user && !g.network {
		env = append(env, "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null")
	}
	return append(env, g.env...)
}

// owned reports whether git will accept that dir belongs to this user.
func owned(dir string) bool {
	for _, p := range []string{dir, filepath.Join(dir, ".git")} {
		info, err := os.Lstat(p)
		if err != nil {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() {
			return false
		}
	}
	return true
}

// safeDirectories returns the directories of other users that this user has configured
// git to trust. A git that ignores the user's configuration must still know them.
func safeDirectories(ctx context.Context) []string {
	var dirs []string
	for _, scope := range []string{"--system", "--global"} {
		g := hostGit{user: true, dir: "/"}
		cmd, _, err := g.command(ctx, []string{"config", scope, "-z", "--get-all", "safe.directory"})
		if err != nil {
			return nil
		}
		out, err := cmd.Output()
		if err != nil {
			continue // none are set
		}
		for d := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
			dirs = append(dirs, d)
		}
	}
	return dirs
}

// progressWriter keeps the end of git's stderr and reports its progress lines, one for every
// 10 %.
type progressWriter struct {
	tail *tailBuffer
	say  Progress
	line []byte
	last string
}

var percent = lazyregexp.New(`^(?:remote: )?([A-Z][a-z]+(?: [a-z]+)*): +([0-9]{1,3})% `)

func (m *progressWriter) Write(p []byte) (int, error) {
	if m.say == nil {
		return m.tail.Write(p)
	}
	for _, c := range p {
		if c != '\r' && c != '\n' {
			if len(m.line) < 400 {
				m.line = append(m.line, c)
			}
			continue
		}
		if found := percent.FindSubmatch(m.line); found != nil {
			n, _ := strconv.Atoi(string(found[2]))
			if at := fmt.Sprintf("%s: %d %%", bytes.ToLower(found[1]), n/10*10); at != m.last {
				m.last = at
				m.say(at)
			}
		} else {
			_, _ = m.tail.Write(append(m.line, '\n')) // a tail never fails
		}
		m.line = m.line[:0]
	}
	return len(p), nil
}
