package secret

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"os/exec"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// resolveOnePassword resolves op:// references in one batch and returns a value or
// an error for each. It uses the SDK if there is a service-account token, or a
// desktop app that this build can use; otherwise it uses the op command.
func resolveOnePassword(ctx context.Context, refs []Ref, opts Options) ([]string, []error) {
	token, account := os.Getenv("OP_SERVICE_ACCOUNT_TOKEN"), os.Getenv("OP_ACCOUNT")
	sdk := opts.OnePassword != nil && token != ""
	desktop := opts.OnePassword != nil && opts.Desktop && token == "" && account != ""
	_, noCLI := exec.LookPath("op")
	switch {
	case sdk:
		return resolveSDK(ctx, refs, opts, token, "")
	case desktop:
		values, errs := resolveSDK(ctx, refs, opts, "", account)
		if noCLI != nil || errors.Join(errs...) == nil {
			return values, errs
		}
		// The op command knows accounts by more names than the SDK does.
	case noCLI != nil:
		return nothing(refs, func(r Ref) error {
			return problem(r, "1Password's op command is not installed, and OP_SERVICE_ACCOUNT_TOKEN is not set").
				WithHint("install the 1Password CLI: https://developer.1password.com/docs/cli/get-started")
		})
	}
	return resolveCLI(ctx, refs, opts)
}

// nothing returns the result of a batch in which every reference failed.
func nothing(refs []Ref, why func(Ref) error) ([]string, []error) {
	errs := make([]error, len(refs))
	for i, r := range refs {
		errs[i] = why(r)
	}
	return make([]string, len(refs)), errs
}

func resolveSDK(ctx context.Context, refs []Ref, opts Options, token, account string) ([]string, []error) {
	ctx, cancel := context.WithTimeout(ctx, opts.Timeout)
	defer cancel()
	sources := make([]string, len(refs))
	for i, r := range refs {
		sources[i] = r.Source
	}
	got, failed, err := opts.OnePassword(ctx, token, account, sources)
	if err != nil {
		return nothing(refs, func(r Ref) error { return opFailure(r, err.Error()) })
	}
	values, errs := make([]string, len(refs)), make([]error, len(refs))
	for i, r := range refs {
		v, ok := got[r.Source]
		switch {
		case failed[r.Source] != nil:
			errs[i] = opFailure(r, failed[r.Source].Error())
		case !ok:
			errs[i] = problem(r, "1Password returned no answer")
		default:
			values[i] = v
		}
	}
	return values, errs
}

// resolveCLI resolves a batch with one `op inject`, so that the user unlocks
// 1Password only once. References go in on stdin and values come out on stdout. If
// the batch fails for a reason other than the login, it resolves each reference
// alone. The error then names the right one, and a typo does not waste the wait for
// the whole batch.
func resolveCLI(ctx context.Context, refs []Ref, opts Options) ([]string, []error) {
	values, err := inject(ctx, refs, opts)
	if err == nil {
		return values, make([]error, len(refs))
	}
	if len(refs) == 1 || !errors.Is(err, errItem) {
		return nothing(refs, func(r Ref) error { return cliFailure(r, err, opts) })
	}
	errs := make([]error, len(refs))
	values = make([]string, len(refs))
	for i, r := range refs {
		one, err := inject(ctx, refs[i:i+1], opts)
		if err != nil {
			errs[i] = cliFailure(r, err, opts)
			continue
		}
		values[i] = one[0]
	}
	return values, errs
}

// errItem marks an error of op about one reference, not about the login.
var errItem = errors.New("op refused a reference")

// cliError is the first line of op's error message.
type cliError struct{ line string }

func (e *cliError) Error() string { return e.line }

func (e *cliError) Is(target error) bool { return target == errItem && classify(e.line).item }

func cliFailure(r Ref, err error, opts Options) error {
	var refused *cliError
	switch {
	case errors.As(err, &refused):
		return opFailure(r, refused.line)
	case errors.Is(err, errTooMuch):
		return tooLarge(r)
	case errors.Is(err, context.DeadlineExceeded):
		return problem(r, "op did not answer within %v; it may wait for you to unlock 1Password", opts.Timeout).
			WithHint("unlock 1Password, or run: op signin")
	}
	return problem(r, "%v", err)
}

// inject runs `op inject` on a template of the references, with a separator that no
// value can contain.
func inject(ctx context.Context, refs []Ref, opts Options) ([]string, error) {
	sep := "\n--" + rand.Text() + "--\n"
	var in strings.Builder
	for _, r := range refs {
		in.WriteString("{{ " + r.Source + " }}" + sep)
	}
	out, stderr, err := capture(ctx, opts.Timeout, len(refs)*(MaxBytes+len(sep))+64, strings.NewReader(in.String()), "op", "inject")
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil, &cliError{firstLine(stderr, out)}
	}
	if err != nil {
		return nil, err
	}
	parts := strings.Split(out, sep)
	// op may or may not end its output with a newline.
	if len(parts) != len(refs)+1 {
		return nil, errors.New("the output of op inject has an unexpected format; is it version 2?")
	}
	return parts[:len(refs)], nil
}

// firstLine returns op's message: the first line of stderr that op marks as an error.
// It omits other lines, because they may contain a value, and redacts credentials and
// parts of stdout. The message may be long: opFailure shortens it.
func firstLine(stderr, stdout string) string {
	for line := range strings.Lines(stderr) {
		_, msg, ok := strings.Cut(line, "[ERROR]")
		if !ok {
			continue
		}
		msg = strings.TrimSpace(msg)
		if date, rest, ok := strings.Cut(msg, " "); ok && len(date) == len("2006/01/02") && strings.Count(date, "/") == 2 {
			_, msg, _ = strings.Cut(rest, " ") // the time
		}
		red := NewRedactor(NewValue(stdout))
		for _, kv := range os.Environ() {
			if name, v, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "OP_S") || name == "OP_CONNECT_TOKEN" {
				red.Add(NewValue(v))
			}
		}
		return red.Redact(msg)
	}
	return "op failed without an error message"
}

// verdict is the meaning of an error message from 1Password.
type verdict struct {
	says string // a part of the message, in lower case
	item bool   // about one reference
	code fail.Code
	hint string
}

func classify(message string) verdict {
	message = strings.ToLower(message)
	for _, v := range []verdict{
		{"not currently signed in", false, fail.Secret, `eval "$(op signin)"`},
		{"not signed in", false, fail.Secret, `eval "$(op signin)"`},
		{"session expired", false, fail.Secret, `eval "$(op signin)"`},
		{"no accounts configured", false, fail.Secret, "op account add"},
		{"connecting to desktop app", false, fail.Secret, "start and unlock 1Password, and turn on Settings > Developer > Integrate with 1Password CLI"},
		{"desktop", false, fail.Secret, "start and unlock 1Password"},
		{"authorization prompt dismissed", false, fail.Secret, "unlock 1Password and try again"},
		{"service account token", false, fail.Secret, "set OP_SERVICE_ACCOUNT_TOKEN to a valid token, or unset it to use the op command"},
		{"service account", false, fail.Secret, "check OP_SERVICE_ACCOUNT_TOKEN"},
		{"unauthorized", false, fail.Secret, "check OP_SERVICE_ACCOUNT_TOKEN, or run: op signin"},
		{"rate limit", false, fail.Secret, "wait; op service-account ratelimit shows how long"},
		{"unknown command", false, fail.Host, "install version 2 of the 1Password CLI"},
		{"no such host", false, fail.Secret, "check the network"},
		{"dial tcp", false, fail.Secret, "check the network"},
		{"isn't an item", true, fail.Secret, "op item list"},
		{"vaultnotfound", true, fail.Secret, "op vault list"},
		{"isn't a vault", true, fail.Secret, "op vault list"},
		{"could not find vault", true, fail.Secret, "op vault list"},
		{"item", true, fail.Secret, "op item list --vault VAULT"},
		{"vault", true, fail.Secret, "op vault list"},
		{"field", true, fail.Secret, "op item get ITEM --vault VAULT"},
		{"section", true, fail.Secret, "op item get ITEM --vault VAULT"},
		{"reference", true, fail.Secret, "op read REFERENCE"},
	} {
		if strings.Contains(message, v.says) {
			return v
		}
	}
	return verdict{item: true, code: fail.Secret, hint: "op whoami"}
}

// opFailure returns the error for one reference from one line of 1Password's
// message.
func opFailure(r Ref, message string) error {
	line, _, _ := strings.Cut(strings.TrimSpace(message), "\n")
	v := classify(line)
	red := NewRedactor(NewValue(os.Getenv("OP_SERVICE_ACCOUNT_TOKEN")))
	return fail.New(v.code, "secret %s (%s): %s", r.Name, r.Kind(), red.Line(line, 200)).WithHint("%s", v.hint)
}
