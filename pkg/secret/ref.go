package secret

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	vault "github.com/hashicorp/vault/api"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Bounds of accepted input.
const (
	MaxSecrets = guestproto.MaxSecrets     // per session
	MaxBytes   = guestproto.MaxSecretBytes // per value
	maxSource  = 4096                      // length of a reference
)

// Kind is the type of a secret's source: the word before the colon.
type Kind string

// Kinds of sources.
const (
	OnePassword Kind = "op"
	Env         Kind = "env"
	File        Kind = "file"
	Cmd         Kind = "cmd"
	Vault       Kind = "vault"
	Keychain    Kind = "keychain"
	Age         Kind = "age"

	// Submitter is a task of a cluster. The host resolves its secrets on which it was submitted, and
	// package session gets them from there. Users do not write such references.
	Submitter Kind = "submitter"
)

// OfSubmitter reports whether only the host has a source of that kind on which a task is submitted.
// Sources of other kinds are the same on all hosts of a cluster, or each host has its own.
func (k Kind) OfSubmitter() bool { return slices.Contains([]Kind{Env, File, Cmd, Keychain, Age}, k) }

// Ref names a secret and its source; it contains no secret itself.
type Ref struct {
	Name   string `json:"name"`   // the environment variable in the guest
	Source string `json:"source"` // one of sourceHint
}

// Kind returns the source's kind, or "" if the Ref did not come from ParseRef.
func (r Ref) Kind() Kind {
	if strings.HasPrefix(r.Source, "op://") {
		return OnePassword
	}
	word, _, _ := strings.Cut(r.Source, ":")
	switch k := Kind(word); k {
	case Env, File, Cmd, Vault, Keychain, Age, Submitter:
		return k
	}
	return ""
}

// rest returns the source without its kind.
func (r Ref) rest() string {
	_, rest, _ := strings.Cut(r.Source, ":")
	return rest
}

// SubmitterOf returns the source of the secrets that the host resolves on which a task was submitted.
func SubmitterOf(task string) string { return string(Submitter) + ":" + task }

// Task returns the id of the task in a source of the kind Submitter.
func (r Ref) Task() string { return r.rest() }

var (
	nameRE   = lazyregexp.New(`^[A-Z_][A-Z0-9_]*$`)
	envRE    = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_]*$`)
	opPartRE = lazyregexp.New(`^[A-Za-z0-9_.-](?:[A-Za-z0-9 _.-]*[A-Za-z0-9_.-])?$`)
	opAttrRE = lazyregexp.New(`^(?:attribute|attr)=[a-z-]+$|^ssh-format=[a-z0-9-]+$`)
)

// reservedNames lists variables that would break or take over the guest's shells
// instead of passing a credential.
var reservedNames = []string{
	"BASH_ENV", "DISPLAY", "ENV", "HOME", "IFS", "LOGNAME", "PATH", "PROMPT_COMMAND", "PS4",
	"PWD", "SHELL", "SHELLOPTS", "TERM", "TMUX", "USER", "ZDOTDIR",
}

// ParseRef validates a name and a source completely, without resolving anything.
// Its errors never quote the source: a user may paste a secret where its reference
// belongs, and the secret must not reach a log.
func ParseRef(name, source string) (Ref, error) {
	if len(name) > 128 || !nameRE.MatchString(name) {
		return Ref{}, fail.New(fail.Usage, "secret %q: the name must be an environment variable: at most 128 capital letters, digits and _", termtext.Brief(termtext.Line(name), 40)).
			WithHint("use a name such as GITHUB_TOKEN")
	}
	if slices.Contains(reservedNames, name) || strings.HasPrefix(name, "LD_") || strings.HasPrefix(name, "DYLD_") {
		return Ref{}, fail.New(fail.Usage, "secret %s: the name is reserved for the guest's own environment", name)
	}
	bad := func(hint, format string, args ...any) (Ref, error) {
		return Ref{}, fail.New(fail.Usage, "secret %s: %s", name, fmt.Sprintf(format, args...)).WithHint("%s", hint)
	}
	if len(source) > maxSource || !utf8.ValidString(source) || strings.ContainsFunc(source, isControl) {
		return bad(sourceHint, "the source is longer than %d bytes or contains control characters", maxSource)
	}
	r := Ref{Name: name, Source: source}
	switch r.Kind() {
	case OnePassword:
		if why := badOnePassword(source); why != "" {
			return bad("op://vault/item/field; copy it with \"Copy Secret Reference\" in 1Password, or use the ids of vault and item", "%s", why)
		}
	case Env:
		if !envRE.MatchString(r.rest()) {
			return bad("env:NAME", "env: must be followed by the name of an environment variable")
		}
	case File, Age:
		path, err := filePath(r)
		if err != nil {
			return bad(fmt.Sprintf("%[1]s:~/path or %[1]s:/path", r.Kind()), "%v", err)
		}
		r.Source = string(r.Kind()) + ":" + path
	case Cmd:
		if strings.TrimSpace(r.rest()) == "" {
			return bad("cmd:gh auth token", "cmd: must be followed by a shell command")
		}
	case Vault:
		if why := badVault(r); why != "" {
			return bad("vault:path:key", "%s", why)
		}
	case Keychain:
		if service, account := r.keychain(); service == "" || account == "" {
			return bad("keychain:service/account", "keychain: must be followed by a service, a slash and an account")
		}
	case Submitter:
		if !ids.Valid(r.rest()) {
			return bad(sourceHint, "submitter: must be followed by the id of a task")
		}
	default:
		return bad(sourceHint, "the source must start with op://, env:, file:, cmd:, vault:, keychain: or age:")
	}
	return r, nil
}

const sourceHint = "op://vault/item/field, env:NAME, file:/path, cmd:command, vault:path:key, keychain:service/account or age:/path"

// badOnePassword returns what is wrong with an op:// reference, or "". It exists
// because 1Password's own validation costs 150 MB and more than a second.
func badOnePassword(source string) string {
	path, query, hasQuery := strings.Cut(strings.TrimPrefix(source, "op://"), "?")
	if hasQuery && !opAttrRE.MatchString(query) {
		return "? in an op:// reference must be followed by attribute=… or ssh-format=…"
	}
	parts := strings.Split(path, "/")
	if len(parts) < 3 || len(parts) > 4 {
		return "an op:// reference must have a vault, an item, optionally a section, and a field"
	}
	for i, p := range parts {
		if !opPartRE.MatchString(p) {
			return fmt.Sprintf("part %d of the op:// reference is empty or contains characters other than letters, digits, space and _.-", i+1)
		}
	}
	return ""
}

// filePath returns the absolute path of a file: or age: source.
func filePath(r Ref) (string, error) {
	path, err := expandHome(r.rest())
	if err != nil {
		return "", err
	}
	if !filepath.IsAbs(path) {
		return "", fmt.Errorf("%s: must be followed by an absolute path, or by one that starts with ~/", r.Kind())
	}
	return filepath.Clean(path), nil
}

// expandHome replaces a ~ at the start of a path.
func expandHome(path string) (string, error) {
	if rest, ok := strings.CutPrefix(path, "~"); ok && (rest == "" || rest[0] == '/') {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", errors.New("expand ~: HOME is not set")
		}
		path = home + rest
	}
	return path, nil
}

// Check validates a whole set cheaply, when a session is accepted. It checks syntax,
// duplicates and number, and whether what a source needs exists: variables, files and
// settings. It runs nothing and reads no content.
func Check(refs []Ref) []error {
	var errs []error
	if len(refs) > MaxSecrets {
		errs = append(errs, fail.New(fail.Usage, "%d secrets are more than the limit of %d", len(refs), MaxSecrets))
		refs = refs[:MaxSecrets]
	}
	seen := map[string]bool{}
	for _, r := range refs {
		if _, err := ParseRef(r.Name, r.Source); err != nil {
			errs = append(errs, err)
			continue
		}
		if seen[r.Name] {
			errs = append(errs, fail.New(fail.Usage, "secret %s is defined twice", r.Name))
		}
		seen[r.Name] = true
		if err := present(r); err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

func present(r Ref) error {
	switch r.Kind() {
	case Env:
		if os.Getenv(r.rest()) == "" {
			return unset(r)
		}
	case File:
		path, err := filePath(r)
		if err != nil {
			return problem(r, "%v", err)
		}
		return fileProblem(r, path, MaxBytes)
	case Vault:
		_, _, err := vaultSettings(r)
		return err
	case Age:
		return checkAge(r)
	}
	return nil
}

func fileProblem(r Ref, path string, most int64) error {
	fi, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return problem(r, "%s does not exist", path)
	case err != nil:
		return problem(r, "%v", err)
	case !fi.Mode().IsRegular():
		return problem(r, "%s is not a regular file", path)
	case fi.Size() == 0:
		return problem(r, "%s is empty", path)
	case fi.Size() > most:
		return problem(r, "%s is larger than the limit of %d KiB", path, most>>10)
	}
	return nil
}

// Warnings returns warnings about references that work but are risky: files that
// other users of this machine can read or change.
func Warnings(refs []Ref) []string {
	var out []string
	for _, r := range refs {
		path := exposed(r)
		if path == "" {
			continue
		}
		if fi, err := os.Stat(path); err == nil && fi.Mode().Perm()&0o077 != 0 {
			out = append(out, fmt.Sprintf("secret %s: other users can access %s (mode %04o); chmod 600 it", r.Name, path, fi.Mode().Perm()))
		}
	}
	return out
}

// exposed returns the file that only the user must be able to access, or "".
func exposed(r Ref) string {
	var path string
	var err error
	switch r.Kind() {
	case File:
		path, err = filePath(r)
	case Age: // the file itself is encrypted
		path, err = ageIdentityFile()
	case Vault:
		if os.Getenv(vault.EnvVaultToken) != "" {
			return ""
		}
		path, err = expandHome(vaultTokenFile)
	}
	if err != nil {
		return ""
	}
	return path
}

// problem returns an error about one secret; it names the secret and its kind.
func problem(r Ref, format string, args ...any) *fail.Error {
	return fail.New(fail.Secret, "secret %s (%s): %s", r.Name, r.Kind(), fmt.Sprintf(format, args...))
}

func unset(r Ref) error {
	return problem(r, "the environment variable %s is not set or is empty", r.rest()).WithHint("export %s=…", r.rest())
}

func isControl(c rune) bool { return c < 0x20 || c == 0x7f || (c >= 0x80 && c < 0xa0) }

var plainWordRE = lazyregexp.New(`^[A-Za-z0-9_./@:+-]+$`)

// shellWord returns s as one word of a shell command in a hint.
func shellWord(s string) string {
	if plainWordRE.MatchString(s) {
		return s
	}
	return "'" + singleQuoted(s) + "'"
}
