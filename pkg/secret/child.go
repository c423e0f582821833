package secret

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

// ChildCommand is the hidden command that runs Main.
const ChildCommand = "resolve-secrets"

const (
	childTimeout = 5 * time.Minute
	maxRequest   = MaxSecrets * (maxSource + 512)
	maxReply     = MaxSecrets*(MaxBytes*4/3+512) + 4096
)

// Main implements the hidden command: it reads references as JSON from in, and
// writes values or an error as JSON to out. The error that it returns is only about
// in and out.
//
// It runs in a separate process because 1Password's SDK may crash, and because it
// allocates 150 MB that it never releases.
func Main(ctx context.Context, in io.Reader, out io.Writer, opts Options) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer stop()
	var refs []Ref
	if err := json.NewDecoder(io.LimitReader(in, maxRequest)).Decode(&refs); err != nil {
		return fmt.Errorf("read references: %w", err)
	}
	text, err := Encode(Resolve(ctx, refs, opts))
	if err == nil {
		_, err = out.Write(append(text, '\n'))
	}
	if err != nil {
		return fmt.Errorf("write values: %w", err)
	}
	return nil
}

// ResolveInChild runs Resolve in a short-lived child process. self is the path of
// this program, which must have ChildCommand. References go to the child's stdin
// and values return through a pipe. The child's arguments contain nothing, and its
// stderr is discarded.
func ResolveInChild(ctx context.Context, self string, refs []Ref) (map[string]Value, error) {
	if len(refs) == 0 {
		return map[string]Value{}, nil
	}
	if len(refs) > MaxSecrets {
		return nil, fail.New(fail.Usage, "%d secrets are more than the limit of %d", len(refs), MaxSecrets)
	}
	request, err := json.Marshal(refs)
	if err != nil {
		return nil, fmt.Errorf("resolve secrets: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, childTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, ChildCommand)
	cmd.Env = childEnv(os.Environ(), refs)
	cmd.Stdin = bytes.NewReader(request)
	out := &pipe.Buffer{Limit: maxReply}
	cmd.Stdout = out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // lets it end its own children
	cmd.WaitDelay = 3 * time.Second
	err = cmd.Run()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("resolve secrets: %w", ctx.Err())
	}
	if err == nil {
		var values map[string]Value
		values, err = Decode([]byte(out.String()), refs)
		if !errors.Is(err, errInvalid) {
			return values, err
		}
	}
	// Do not quote the child's output: it may be part of an answer.
	var exit *exec.ExitError
	if !errors.As(err, &exit) && cmd.ProcessState != nil {
		err = errors.New("its output is invalid")
	}
	return nil, fail.New(fail.Secret, "resolve secrets: the resolver process failed: %v", err).
		WithHint("agent-sessionizer secrets check")
}

// childEnv returns the child's environment: search paths and locations, settings
// for 1Password, those of the other sources that are used, and the variables that are
// secrets themselves. With a cmd: source, which is the user's own command, it returns the
// user's whole environment.
func childEnv(environ []string, refs []Ref) []string {
	wanted := []string{
		"PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "TZ", "DISPLAY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS",
		"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
	}
	prefixes := []string{"OP_", "XDG_", "LC_"}
	for _, r := range refs {
		switch r.Kind() {
		case Cmd:
			return append(slices.Clone(environ), "GOTRACEBACK=none")
		case Env:
			wanted = append(wanted, r.rest())
		case Vault:
			prefixes = append(prefixes, "VAULT_")
		case Age:
			wanted = append(wanted, ageIdentityVariables...)
		}
	}
	var env []string
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if slices.Contains(wanted, name) || slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
			env = append(env, kv)
		}
	}
	return append(env, "GOTRACEBACK=none") // a crash must not print secrets
}
