package secret

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

const (
	commandTimeout = 30 * time.Second // one cmd: source, one call of op, Vault or the keychain
	parallel       = 4                // concurrent commands and requests
)

// Batch resolves op:// references through 1Password's SDK in one call. It returns a
// value or a one-line error for each reference, or one error for all. account is ""
// with a service-account token, otherwise the desktop app's account.
type Batch func(ctx context.Context, token, account string, refs []string) (map[string]string, map[string]error, error)

// Options controls what Resolve may use.
type Options struct {
	OnePassword Batch         // nil: only the op command
	Desktop     bool          // this build can use 1Password's desktop app
	Timeout     time.Duration // of one command or request; 0 means 30 s
}

// Unresolved is the error of the secrets that could not be resolved, by name. Each of its
// errors names the secret, and none contains a value.
type Unresolved map[string]error

func (u Unresolved) Error() string {
	errs := u.Unwrap()
	if len(errs) == 1 {
		return errs[0].Error()
	}
	msgs := make([]string, len(errs))
	for i, err := range errs {
		msgs[i] = err.Error()
	}
	return fmt.Sprintf("%d secrets could not be resolved: %s", len(errs), strings.Join(msgs, "; "))
}

// Unwrap returns the errors in the order of the names. The first has the code and the hint.
func (u Unresolved) Unwrap() []error {
	errs := make([]error, 0, len(u))
	for _, name := range slices.Sorted(maps.Keys(u)) {
		errs = append(errs, u[name])
	}
	return errs
}

// Resolve fetches every secret, op:// references in one batch. It returns the values
// that it could resolve, with an Unresolved if there are others. It removes the newline
// from a single-line value, and keeps a multi-line value, such as a key file, byte for
// byte.
func Resolve(ctx context.Context, refs []Ref, opts Options) (map[string]Value, error) {
	if opts.Timeout == 0 {
		opts.Timeout = commandTimeout
	}
	if len(refs) > MaxSecrets {
		return nil, fail.New(fail.Usage, "%d secrets are more than the limit of %d", len(refs), MaxSecrets)
	}
	values := make([]string, len(refs))
	errs := make([]error, len(refs))
	var op []int
	var g errgroup.Group
	g.SetLimit(parallel)
	for i, r := range refs {
		if _, err := ParseRef(r.Name, r.Source); err != nil {
			errs[i] = err
			continue
		}
		if r.Kind() == OnePassword {
			op = append(op, i)
			continue
		}
		g.Go(func() error {
			values[i], errs[i] = resolveOne(ctx, r, opts.Timeout)
			return nil
		})
	}
	if len(op) > 0 {
		batch := make([]Ref, len(op))
		for n, i := range op {
			batch[n] = refs[i]
		}
		got, failed := resolveOnePassword(ctx, batch, opts)
		for n, i := range op {
			values[i], errs[i] = got[n], failed[n]
		}
	}
	_ = g.Wait() // the goroutines report through errs

	if ctx.Err() != nil {
		return nil, fmt.Errorf("resolve secrets: %w", ctx.Err())
	}
	out := make(map[string]Value, len(refs))
	failed := Unresolved{}
	for i, r := range refs {
		if errs[i] == nil {
			values[i], errs[i] = clean(r, values[i])
		}
		if errs[i] != nil {
			failed[r.Name] = errs[i]
			continue
		}
		out[r.Name] = NewValue(values[i])
	}
	return out, failed.orNil()
}

func (u Unresolved) orNil() error {
	if len(u) == 0 {
		return nil
	}
	return u
}

// clean checks a value and removes the newline of a single line.
func clean(r Ref, s string) (string, error) {
	line := strings.TrimSuffix(strings.TrimSuffix(s, "\n"), "\r")
	if !strings.Contains(line, "\n") {
		s = line
	}
	switch {
	case strings.TrimSpace(s) == "":
		return "", problem(r, "the value is empty")
	case len(s) > MaxBytes:
		return "", tooLarge(r)
	case !utf8.ValidString(s):
		return "", problem(r, "the value is not UTF-8 text").WithHint("encode it, for example as base64, and decode it in the guest")
	case strings.ContainsRune(s, 0):
		return "", problem(r, "the value contains a NUL byte, which an environment variable cannot contain")
	}
	return s, nil
}

func tooLarge(r Ref) error {
	return problem(r, "the value is larger than the limit of %d KiB", MaxBytes>>10)
}

func resolveOne(ctx context.Context, r Ref, timeout time.Duration) (string, error) {
	switch r.Kind() {
	case Env:
		s := os.Getenv(r.rest())
		if s == "" {
			return "", unset(r)
		}
		return s, nil
	case File:
		return readFile(r)
	case Vault:
		return resolveVault(ctx, r, timeout)
	case Keychain:
		return resolveKeychain(ctx, r, timeout)
	case Age:
		return resolveAge(r)
	case Cmd:
		return runCommand(ctx, r, timeout)
	default:
		return "", problem(r, "it is resolved on another host")
	}
}

func readFile(r Ref) (string, error) {
	path, err := filePath(r)
	if err != nil {
		return "", problem(r, "%v", err)
	}
	b, err := readRegular(r, path, MaxBytes)
	return string(b), err
}

// readRegular reads a regular file of at most most bytes, and one byte more of a file that has
// grown since the check.
func readRegular(r Ref, path string, most int64) ([]byte, error) {
	if err := fileProblem(r, path, most); err != nil {
		return nil, err
	}
	// Non-blocking, so that a FIFO created since the check cannot block.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, problem(r, "%v", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, problem(r, "read %s: %v", path, err)
	}
	return b, nil
}

// runCommand runs a cmd: source. It discards the command's stderr, because a
// failing command may print a secret there.
func runCommand(ctx context.Context, r Ref, timeout time.Duration) (string, error) {
	const hint = "run the command of %s in a separate shell to see why"
	out, _, err := capture(ctx, timeout, MaxBytes, nil, "/bin/sh", "-c", r.rest())
	switch exit, ok := errors.AsType[*exec.ExitError](err); {
	case errors.Is(err, errTooMuch):
		return "", tooLarge(r)
	case errors.Is(err, context.DeadlineExceeded):
		return "", problem(r, "the command did not end within %v", timeout).WithHint(hint, r.Name)
	case ok:
		return "", problem(r, "the command failed (%v)", exit.ProcessState).WithHint(hint, r.Name)
	case err != nil:
		return "", problem(r, "the command did not start: %v", err)
	}
	return out, nil
}

var errTooMuch = errors.New("too much output")

// capture runs a command in a new session and returns its stdout, up to limit
// bytes, and the first KiB of its stderr. It kills the whole process group when the
// time or the limit is exceeded, or ctx ends. The command has no terminal, so it
// cannot prompt the user.
func capture(ctx context.Context, timeout time.Duration, limit int, stdin io.Reader, argv ...string) (stdout, stderr string, err error) {
	ctx, stop := context.WithTimeout(ctx, timeout)
	defer stop()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := &pipe.Buffer{Limit: limit, Full: func() { cancel(errTooMuch) }}
	errOut := &pipe.Buffer{Limit: 1 << 10}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, out, errOut
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	if cause := context.Cause(ctx); cause != nil {
		return "", "", cause
	}
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // the command succeeded; a process that it started still holds the pipe
	}
	return out.String(), errOut.String(), err
}
