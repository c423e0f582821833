// Package tmux owns the local tmux: one session per VM on the user's own server,
// including its keys and its end.
//
// It never touches the user's tmux.conf, global options, root or prefix key tables,
// or a session that it did not create. It does not know what runs in the session, nor
// the tmux inside the guest.
package tmux

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// minMajor and minMinor are the first tmux version with popups, new-session -e and
// run-shell -C.
const minMajor, minMinor = 3, 2

const (
	callTimeout = 10 * time.Second
	maxOutput   = 1 << 20
	maxSlug     = 48

	ownerOption   = "@agent_session" // holds the session's key
	destroyOption = "@agent_destroy" // holds the tmux command of prefix + D
)

// Client talks to one tmux server. The zero Client uses the tmux of PATH and the
// server that tmux itself would choose: the one this process runs in, or the user's
// default.
type Client struct {
	Bin    string // "" means tmux
	Socket string // path of the server's socket, "" means tmux's own choice
}

// Session describes what New creates.
type Session struct {
	Name    string            // from SlugName
	Key     string            // what the session belongs to; stored in a user option of the session
	Command []string          // runs in its only pane; the tmux session ends with it
	Destroy []string          // runs in a popup at prefix + D; nil disables the key
	Dir     string            // working directory of Command, "" means this process's
	Env     map[string]string // for Command; never secrets, because tmux shows them to any client
}

// Info describes one of our sessions.
type Info struct {
	Name     string
	Key      string
	Attached int // number of clients
}

// Check returns what is wrong with the host's tmux, or nil.
func (c Client) Check(ctx context.Context) error {
	out, err := c.output(ctx, nil, "-V")
	if err != nil {
		return err
	}
	return checkVersion(strings.TrimSpace(out))
}

func checkVersion(version string) error {
	if !recent(version) {
		return fail.New(fail.Host, "%s is too old; version %d.%d or later is required", clip(version), minMajor, minMinor).WithHint("%s", installHint)
	}
	return nil
}

const installHint = "install tmux: sudo apt install tmux (Debian, Ubuntu), brew install tmux (macOS)"

var versionRE = lazyregexp.New(`(\d+)\.(\d+)`)

// recent checks the output of tmux -V. Development builds have no number and are
// assumed to be new.
func recent(version string) bool {
	m := versionRE.FindStringSubmatch(version)
	if m == nil || strings.Contains(version, "openbsd") {
		return strings.HasPrefix(version, "tmux ")
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	return major > minMajor || major == minMajor && minor >= minMinor
}

// New creates a detached session. If a session of that name and key exists, New only renews
// its settings. If a session of that name has another key, or none, New does not change it and
// returns a Conflict.
func (c Client) New(ctx context.Context, s Session) (ServerState, error) {
	server, _, err := c.ensure(ctx, s)
	if err != nil {
		return server, err
	}
	return server, c.configure(ctx, s.Name, configuration(s, server.prefixes))
}

func (c Client) configure(ctx context.Context, name string, cmds [][]string) error {
	if _, err := c.run(ctx, nil, cmds...); err != nil {
		return fmt.Errorf("configure tmux session %s: %w", name, err)
	}
	return nil
}

// Enter does what New does, and shows the user the session: a new one after that, and one that exists
// already before its settings are renewed, so that the user does not wait for them.
//
// Inside tmux, Enter switches the client and returns no command line. If client is "", it
// switches the client that this process runs in. Outside tmux, Enter returns the command line
// that should replace this process (syscall.Exec), starting with the program's path. The client
// shows text for some seconds, unless it is "".
func (c Client) Enter(ctx context.Context, client string, s Session, text string) (ServerState, []string, error) {
	var show [][]string
	if text != "" {
		show = append(show, displayCommand(client, text))
	}
	if client == "" && os.Getenv("TMUX") == "" {
		server, _, err := c.ensure(ctx, s)
		if err != nil {
			return server, nil, err
		}
		argv, err := c.attach(ctx, s.Name, configuration(s, server.prefixes), show)
		return server, argv, err
	}
	change := switchTo(client, s.Name)
	server, created, err := c.ensure(ctx, s, change...)
	if err != nil {
		return server, nil, err
	}
	cmds := configuration(s, server.prefixes)
	if created { // shown only now, when it looks as it should
		cmds = append(cmds, change...)
	}
	return server, nil, c.configure(ctx, s.Name, append(cmds, show...))
}

// attach runs the commands cmds, and returns the command line that attaches a client to a session and
// runs the commands show there.
func (c Client) attach(ctx context.Context, name string, cmds, show [][]string) ([]string, error) {
	cmds = append(cmds, []string{
		"if-shell", "-F", "-t", target(name), "#{==:#{session_attached},0}", commandLine(detachOnDestroy(name, "on")),
	})
	if err := c.configure(ctx, name, cmds); err != nil {
		return nil, err
	}
	bin, err := c.path()
	if err != nil {
		return nil, err
	}
	argv := append(append([]string{bin}, c.server()...), "-u", "attach-session", "-t", target(name))
	for _, cmd := range show {
		argv = append(append(argv, ";"), cmd...)
	}
	return argv, nil
}

// switchTo returns the commands that switch a client to a session.
func switchTo(client, name string) [][]string {
	return [][]string{detachOnDestroy(name, "off"), to(client, "switch-client", "-t", target(name))}
}

// detachOnDestroy returns the command that decides what a session's clients do when it ends. A client
// that was switched to it must show another session, and a client that was attached from a shell
// must return to the shell. tmux has only one option for all clients of a session. An attach
// from a shell turns it on only if no other client is attached, so that no switched client is detached.
func detachOnDestroy(name, value string) []string {
	return []string{"set-option", "-t", target(name), "detach-on-destroy", value}
}

// ensure creates the session s unless it exists, and returns the server's state after that. If the
// session existed, and is ours, the call of tmux that reads the state then also runs the commands cmds.
func (c Client) ensure(ctx context.Context, s Session, cmds ...[]string) (server ServerState, created bool, err error) {
	if len(s.Command) == 0 || !wordRE.MatchString(s.Key) || !wordRE.MatchString(s.Name) {
		return ServerState{}, false, fail.New(fail.Usage, "a tmux session must have a name and a key without spaces, and a command")
	}
	if len(cmds) > 0 {
		ours := "#{==:" + s.Key + ",#{S:#{?#{==:#{session_name}," + s.Name + "},#{" + ownerOption + "},}}}"
		cmds = [][]string{{"if-shell", "-F", ours, commandLine(cmds...)}}
	}
	if server, err = c.readState(ctx, cmds...); err != nil {
		return server, false, fmt.Errorf("open tmux session %s: %w", s.Name, err)
	}
	if server.version == "" { // no server runs yet
		err = c.Check(ctx)
	} else {
		err = checkVersion("tmux " + server.version)
	}
	if err == nil && server.owner(s.Name) == "" {
		if err = c.create(ctx, s); err == nil {
			created = true
			server, err = c.ReadState(ctx)
		}
	}
	if err != nil {
		return server, created, err
	}
	if server.owner(s.Name) != s.Key {
		return server, created, fail.New(fail.Conflict, "a tmux session named %s exists and does not belong to this session", s.Name).
			WithHint("tmux rename-session -t '%s' other-name", target(s.Name))
	}
	return server, created, nil
}

// create creates the session s. It does nothing if a session of that name exists.
func (c Client) create(ctx context.Context, s Session) error {
	args := []string{"new-session", "-d", "-s", s.Name}
	if s.Dir != "" {
		args = append(args, "-c", strings.ReplaceAll(s.Dir, "#", "##")) // tmux expands it as a format
	}
	for _, name := range sorted(s.Env) {
		args = append(args, "-e", name+"="+s.Env[name])
	}
	args = append(args, "--")
	if len(s.Command) == 1 { // tmux would pass a single word to a shell
		args = append(args, quote(s.Command[0]))
	} else {
		args = append(args, s.Command...)
	}
	// In the same call, so that no process sees the session without its key.
	_, err := c.run(ctx, nil, args, []string{"set-option", "-t", target(s.Name), ownerOption, s.Key})
	var serverErr *serverError
	if err != nil && (!errors.As(err, &serverErr) || !strings.Contains(serverErr.text, "duplicate session")) {
		return fmt.Errorf("create tmux session %s: %w", s.Name, err)
	}
	return nil
}

// noteTime is how long a client shows a text, unless a key is pressed.
const noteTime = 8 * time.Second

var wordRE = lazyregexp.New(`^[A-Za-z0-9_][A-Za-z0-9_-]*$`)

// displayCommand returns the command that shows a text in a client. It escapes the text,
// because tmux would expand the formats in it, and the format #() runs a command.
func displayCommand(client, text string) []string {
	return append(to(client, "display-message", "-d", strconv.Itoa(int(noteTime.Milliseconds()))), strings.ReplaceAll(text, "#", "##"))
}

// to returns a command with the client that it is for. If client is "", tmux chooses one.
func to(client string, command ...string) []string {
	if client != "" {
		command = append(command, "-c", client)
	}
	return command
}

// Kill ends one of our sessions. If the session does not exist, or is not ours, Kill does
// nothing and succeeds.
func (c Client) Kill(ctx context.Context, name string) error {
	server, err := c.ReadState(ctx)
	if err != nil || server.owner(name) == "" {
		return err
	}
	if _, err := c.run(ctx, nil, []string{"kill-session", "-t", target(name)}); err != nil {
		// The session may have ended in between.
		if again, readErr := c.ReadState(ctx); readErr == nil && again.owner(name) == "" {
			return nil
		}
		return fmt.Errorf("end tmux session %s: %w", name, err)
	}
	return nil
}

// Copy puts data on the clipboard of every terminal that shows the session, and into
// a tmux buffer.
func (c Client) Copy(ctx context.Context, name string, data []byte) error {
	out, err := c.run(ctx, nil, []string{"list-clients", "-t", target(name), "-F", "#{client_name}"})
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	for client := range strings.Lines(out) {
		if err := c.SetClipboard(ctx, strings.TrimSpace(client), data); err != nil {
			return err
		}
	}
	return nil
}

// SlugName returns the tmux name for a session of a repository: readable, without
// characters that are special in tmux, unique for each id, and limited in length.
func SlugName(repo, id string) string {
	slug := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' {
			return r
		}
		return '_'
	}, repo)
	slug = strings.TrimLeft(slug, "-_")
	sum := sha256.Sum256([]byte(repo + "\x00" + id))
	return slug[:min(len(slug), maxSlug)] + "-" + hex.EncodeToString(sum[:3])
}

// target returns what selects the session of exactly that name.
func target(name string) string { return "=" + name + ":" }

// serverError is an error message from tmux.
type serverError struct{ text string }

func (e *serverError) Error() string { return clip(e.text) }

// run passes several commands to tmux in one call. tmux executes them without another
// client's command in between.
func (c Client) run(ctx context.Context, stdin io.Reader, cmds ...[]string) (string, error) {
	args := c.server()
	for i, cmd := range cmds {
		if i > 0 {
			args = append(args, ";")
		}
		for _, a := range cmd {
			args = append(args, argument(a))
		}
	}
	return c.output(ctx, stdin, args...)
}

func (c Client) output(ctx context.Context, stdin io.Reader, args ...string) (string, error) {
	bin, err := c.path()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Stdin = stdin
	cmd.WaitDelay = time.Second
	stdout, stderr := pipe.Buffer{Limit: maxOutput}, pipe.Buffer{Limit: 4096}
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", fmt.Errorf("tmux does not respond: %w", ctx.Err())
		}
		if text := strings.TrimSpace(stderr.String()); text != "" {
			return "", &serverError{text}
		}
		return "", fmt.Errorf("tmux: %w", err)
	}
	return stdout.String(), nil
}

func (c Client) path() (string, error) {
	bin := c.Bin
	if bin == "" {
		bin = "tmux"
	}
	path, err := exec.LookPath(bin)
	if err != nil {
		return "", fail.New(fail.Host, "tmux is not installed: %w", err).WithHint("%s", installHint)
	}
	return path, nil
}

func (c Client) server() []string {
	if c.Socket == "" {
		return nil
	}
	return []string{"-S", c.Socket}
}

// clip returns the first line of what tmux printed.
func clip(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return termtext.Brief(termtext.Line(s), 300)
}

func sorted(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
