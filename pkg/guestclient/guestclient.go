// Package guestclient is the host's side of the guest program: it installs the program in
// a VM over SSH and sends it requests.
//
// Everything that the guest returns is hostile input: it is bounded, decoded strictly,
// and cleaned before a person sees it. The package accesses the guest only over the SSH
// connection that it is given.
package guestclient

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Locations in the guest.
const (
	programPath = "/usr/local/bin/agent-guest"
	seedDir     = "/run/agent-seed"     // the identity that a clone or fork was given
	secretDir   = "/run/agent"          // what SetSecrets delivered
	taskDir     = "/var/lib/agent-task" // what attempts at tasks keep
	User        = "agent"               // the login user
	Home        = "/home/agent"
	ReadyTmux   = "/usr/local/bin/ready-tmux" // makes the tmux session with its windows
)

// maxReply limits the size of one answer of the guest program.
const maxReply = 1 << 20

// The folder is generated (make) and ignored by git except for .gitignore, so that the
// package always compiles.
//
//go:embed all:bin
var programs embed.FS

// Program returns the uncompressed guest program for arch ("x86_64", "aarch64").
func Program(arch string) ([]byte, error) {
	packed, err := packedProgram(arch)
	if err != nil {
		return nil, err
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, fmt.Errorf("unpack the guest agent: %w", err)
	}
	return io.ReadAll(z)
}

// packedProgram returns the guest program compressed with gzip.
func packedProgram(arch string) ([]byte, error) {
	goarch, ok := map[string]string{"x86_64": "amd64", "aarch64": "arm64"}[arch]
	if !ok {
		return nil, fail.New(fail.Host, "no guest agent for architecture %q", arch)
	}
	packed, err := programs.ReadFile("bin/agent-guest-linux-" + goarch + ".gz")
	if err != nil {
		return nil, fail.New(fail.Host, "this binary was built without the guest agent for %s", arch).WithHint("make build")
	}
	return packed, nil
}

// Guest is a VM that can be logged in to.
type Guest struct {
	SSH  *ssh.Client
	Root string // vm.Machine.Root

	Delivered Delivered // by SetSecrets; limits what Secrets reads
}

func (g Guest) program(args ...string) string {
	return ssh.Quote(append([]string{g.Root + programPath}, args...)...)
}

// ProgramKey returns the SHA-256 of the guest program for arch in hexadecimal.
func ProgramKey(arch string) (string, error) {
	key, _ := programKeys.LoadOrStore(arch, sync.OnceValues(func() (string, error) {
		program, err := Program(arch)
		if err != nil {
			return "", err
		}
		sum := sha256.Sum256(program)
		return hex.EncodeToString(sum[:]), nil
	}))
	return key.(func() (string, error))()
}

// programKeys caches the keys by architecture, because unpacking takes a tenth of a
// second.
var programKeys sync.Map

// Install installs the guest program for arch unless this very program is installed,
// starts it with the policy, and returns its first status. From then on the guest's
// network follows the policy.
//
// there is the key of the program that the guest is known to have. If it matches,
// Install skips the check of the installed file, which takes longer than asking the
// program. The returned status is the guest's own claim.
func (g Guest) Install(ctx context.Context, arch, there string, p *policy.Policy) (guestproto.Status, error) {
	key, err := ProgramKey(arch)
	if err != nil {
		return guestproto.Status{}, err
	}
	path := g.Root + programPath
	if there == key {
		st, err := g.send(ctx, p, "install")
		if _, ran := errors.AsType[*ssh.ExitError](err); !ran {
			return st, err
		}
	}
	have, err := g.SSH.Output(ctx, "sha256sum "+ssh.Quote(path)+" 2>/dev/null || true", nil, 4096)
	if err != nil {
		return guestproto.Status{}, fmt.Errorf("find the guest agent: %w", err)
	}
	if !strings.HasPrefix(string(have), key+" ") {
		packed, err := packedProgram(arch)
		if err != nil {
			return guestproto.Status{}, err
		}
		if err := g.upload(ctx, packed, path); err != nil {
			return guestproto.Status{}, fmt.Errorf("install the guest agent: %w", err)
		}
	}
	return g.send(ctx, p, "install")
}

// upload writes a compressed executable, owned by root. A connection that dies half way
// leaves the old file.
func (g Guest) upload(ctx context.Context, packed []byte, path string) error {
	script := `set -e; umask 022; mkdir -p "${1%/*}"; gzip -dc >"$1.new"; chmod 755 "$1.new"; mv -f "$1.new" "$1"`
	_, err := g.SSH.Output(ctx, ssh.Quote("sudo", "sh", "-c", script, "sh", path), bytes.NewReader(packed), maxReply)
	return err
}

// SetPolicy replaces the policy of a running guest immediately, without a restart.
func (g Guest) SetPolicy(ctx context.Context, p *policy.Policy) (guestproto.Status, error) {
	return g.send(ctx, p, "policy")
}

func (g Guest) send(ctx context.Context, p *policy.Policy, verb string) (guestproto.Status, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return guestproto.Status{}, err
	}
	return g.status(ctx, "sudo "+g.program(verb), bytes.NewReader(text))
}

// Status asks for the status of the firewall and the DNS proxy.
func (g Guest) Status(ctx context.Context) (guestproto.Status, error) {
	return g.status(ctx, "sudo "+g.program("status"), nil)
}

func (g Guest) status(ctx context.Context, cmd string, in io.Reader) (guestproto.Status, error) {
	out, err := g.SSH.Output(ctx, cmd, in, maxReply)
	if err != nil {
		return guestproto.Status{}, fmt.Errorf("query the guest agent: %w", err)
	}
	return guestproto.DecodeStatus(bytes.NewReader(out))
}

// SetSecrets writes the values to the guest's memory file system and replaces those
// delivered before. token is the session's, with which the guest can call back to the
// host.
func (g Guest) SetSecrets(ctx context.Context, values map[string]secret.Value, token string) error {
	msg := guestproto.Secrets{Env: map[string]string{}, Token: token}
	for name, v := range values {
		msg.Env[name] = v.Reveal()
	}
	var text bytes.Buffer
	if err := msg.Encode(&text); err != nil {
		return errors.New("encode the secrets") // the error could quote a secret
	}
	if _, err := g.SSH.Output(ctx, g.program("secrets"), &text, maxReply); err != nil {
		return fail.New(fail.Secret, "deliver the secrets: %w", err)
	}
	return nil
}

// Trust makes the guest trust a certificate authority, given as PEM, instead of the one of the
// call before.
func (g Guest) Trust(ctx context.Context, certificate []byte) error {
	if _, err := g.SSH.Output(ctx, "sudo "+g.program("trust"), bytes.NewReader(certificate), maxReply); err != nil {
		return fmt.Errorf("make the guest trust its gateway: %w", err)
	}
	return nil
}

// SetLogin writes the file of a client's login, or removes it if text is nil. A file without the
// mark is that of a login in the guest, and stays.
func (g Guest) SetLogin(ctx context.Context, path, mark string, text []byte) error {
	const script = `f=$1; if [ -s "$f" ] && ! grep -qF -- "$2" "$f"; then exit 0; fi
umask 077; if [ "$3" = 0 ]; then rm -f -- "$f"; else mkdir -p "${f%/*}" && cat >"$f.new" && mv -f -- "$f.new" "$f"; fi`
	if _, err := g.SSH.Output(ctx, ssh.Quote("sh", "-c", script, "sh", g.Root+path, mark, strconv.Itoa(len(text))), bytes.NewReader(text), maxReply); err != nil {
		return fmt.Errorf("deliver a login: %w", err)
	}
	return nil
}

// WipeSecrets removes the secrets from the guest.
func (g Guest) WipeSecrets(ctx context.Context) error {
	_, err := g.SSH.Output(ctx, g.program("secrets", "--wipe"), nil, maxReply)
	return err
}

// Delivered is the amount of data that SetSecrets put into a guest, including the
// token.
type Delivered struct {
	Values int   `json:"values"`
	Bytes  int64 `json:"bytes"`
}

// Measure returns what SetSecrets will deliver.
func Measure(values map[string]secret.Value, token string) Delivered {
	d := Delivered{Values: len(values) + 1, Bytes: int64(len(token))}
	for _, v := range values {
		d.Bytes += int64(v.Len())
	}
	return d
}

// Secrets returns the delivered values that the guest still has, including the token.
// The guest may lie, but it returns no more than was delivered. Use the values only to
// redact them from text about the guest.
func (g Guest) Secrets(ctx context.Context) ([]secret.Value, error) {
	if g.Delivered.Values == 0 {
		return nil, nil
	}
	most := g.Delivered.Bytes + 2*int64(g.Delivered.Values) // each ends with a zero byte, and perhaps a newline
	script := `cd "$1" 2>/dev/null || exit 0; for f in token secrets/*; do [ -f "$f" ] || continue; cat -- "$f"; printf '\0'; done | head -c "$2"`
	out, err := g.SSH.Output(ctx, ssh.Quote("sh", "-c", script, "sh", g.Root+secretDir, strconv.FormatInt(most, 10)), nil, most)
	switch {
	case errors.Is(orUnreachable(err), ssh.ErrUnreachable):
		return nil, fmt.Errorf("read the guest's secrets: %w", ssh.ErrUnreachable)
	case err != nil:
		return nil, errors.New("read the guest's secrets") // the error could quote a secret
	}
	var values []secret.Value
	for value := range strings.SplitSeq(string(out), "\x00") {
		if value = strings.TrimSuffix(value, "\n"); value != "" && len(values) < g.Delivered.Values {
			values = append(values, secret.NewValue(value))
		}
	}
	return values, nil
}

// Queries calls f with the DNS decisions after since, oldest first. With follow, it
// continues until ctx ends or f returns an error. A limit of 0 means everything that
// the guest still has.
func (g Guest) Queries(ctx context.Context, since int64, limit int, follow bool, f func(guestproto.Query) error) error {
	args := []string{"log", "--since", fmt.Sprint(since)}
	if limit > 0 {
		args = append(args, "--limit", fmt.Sprint(limit))
	}
	if follow {
		args = append(args, "--follow")
	}
	ctx, cancel := context.WithCancel(ctx)
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		err := g.SSH.Run(ctx, "sudo "+g.program(args...), ssh.IO{Stdout: w})
		w.CloseWithError(err) // nil reads as the end
		close(done)
	}()
	// The goroutine ends before Queries returns: closing the reader fails its writes,
	// and cancelling ends its command.
	defer func() {
		_ = r.Close() // never fails, according to io.PipeReader
		cancel()
		<-done
	}()
	for q, err := range guestproto.Queries(r) {
		if err == nil {
			q.Name = strings.TrimSuffix(q.Name, ".")
			err = f(q)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Quiesce ends the agent's programs, so that the checkout no longer changes, and returns the names
// of the processes that it ended. Connections of other processes to the guest are cut. It takes up
// to 20 s.
func (g Guest) Quiesce(ctx context.Context) (ended []string, err error) {
	out, err := g.SSH.Output(ctx, "sudo "+g.program("quiesce"), nil, maxReply)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(out)) {
		name, err := strconv.Unquote(strings.TrimSpace(line))
		if err != nil {
			return nil, errors.New("the guest's list of ended processes is invalid")
		}
		ended = append(ended, name)
	}
	return ended, nil
}

// Poweroff shuts the guest down cleanly. This also ends the connection, so an error
// carries no information.
func (g Guest) Poweroff(ctx context.Context) error {
	return g.SSH.Run(ctx, "sudo systemctl poweroff --no-wall --ignore-inhibitors", ssh.IO{})
}

// FinishIdentity waits until a clone or fork has its own seed disk, disk size and
// journal. trouble describes what failed, as the guest reports it. For any other guest it
// returns at once.
func (g Guest) FinishIdentity(ctx context.Context) (trouble string, err error) {
	seed := ssh.Quote(g.Root + seedDir)
	out, err := g.SSH.Output(ctx, "cd "+seed+" 2>/dev/null || exit 0; until [ -e own ]; do sleep 0.05; done; cat own", nil, maxReply)
	if err != nil {
		return "", fmt.Errorf("wait until the guest has its own disks and file-system journal: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// PrepareFork starts what gives a fork of the running guest its own identity.
func (g Guest) PrepareFork(ctx context.Context) error {
	if _, err := g.SSH.Output(ctx, "sudo "+g.program("fork", "prepare"), nil, maxReply); err != nil {
		return fmt.Errorf("prepare the guest for forks: %w", err)
	}
	return nil
}

// SetHostname gives the guest the host name of a VM of that name.
func (g Guest) SetHostname(ctx context.Context, name string) error {
	_, err := g.SSH.Output(ctx, "sudo "+g.program("hostname", "lima-"+name), nil, maxReply)
	if err != nil {
		return fmt.Errorf("set the guest's host name: %w", err)
	}
	return nil
}

// Tmux creates the guest's tmux session with its windows in dir. It may be repeated; it
// never creates windows twice.
func (g Guest) Tmux(ctx context.Context, dir string) error {
	_, err := g.SSH.Output(ctx, ssh.Quote(g.Root+ReadyTmux, "-d", dir), nil, maxReply)
	if err != nil {
		return fmt.Errorf("prepare tmux in the guest: %w", err)
	}
	return nil
}
