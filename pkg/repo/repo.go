// Package repo carries a repository's history to a guest and the agent's work back.
// It contains references to repositories, the host's mirror cache, the push into a
// guest, and the fetch, diff and summary of the agent's work.
//
// It runs the host's git, and git in the guest through a Guest. On the host it
// never runs a hook or a program that a guest chose. It never writes to a local
// clone outside refs/agents/SESSION/ and the objects these need, except that Trees
// also points branches to what the user lands. It bounds, checks
// and escapes all data from a guest before it uses them.
package repo

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Guest is the part of an SSH connection that this package needs. cmd is a command
// line for the guest's login shell.
type Guest interface {
	// Run runs cmd until it ends or ctx does.
	Run(ctx context.Context, cmd string, st ssh.IO) error
	// Output runs cmd and returns its output, at most limit bytes.
	Output(ctx context.Context, cmd string, stdin io.Reader, limit int64) ([]byte, error)
}

var _ Guest = (*ssh.Client)(nil)

// Progress receives messages about a long operation, one short line at a time. It
// may be nil and may be called from another goroutine.
type Progress func(msg string)

func (p Progress) report(format string, args ...any) {
	if p != nil {
		p(fmt.Sprintf(format, args...))
	}
}

// Base is the commit and branch that a guest's checkout started from.
type Base struct {
	Commit   string   `json:"commit,omitempty"` // "" for a repository without commits
	Branch   string   `json:"branch,omitempty"` // "" for a detached HEAD
	Warnings []string `json:"warnings,omitempty"`
}

// Scripts that run in the guest. The Go code that starts a script parses its
// output.
var (
	//go:embed guest/lib.sh
	libScript string
	//go:embed guest/probe.sh
	probeScript string
	//go:embed guest/receive.sh
	receiveScript string
	//go:embed guest/update.sh
	updateScript string
	//go:embed guest/checkout.sh
	checkoutScript string
	//go:embed guest/dirty.sh
	dirtyScript string
	//go:embed guest/reclone.sh
	recloneScript string
	//go:embed guest/finish.sh
	finishScript string
	//go:embed guest/extras.sh
	extrasScript string
	//go:embed guest/work.sh
	workScript string
	//go:embed guest/offer.sh
	offerScript string
	//go:embed guest/pack.sh
	packScript string
	//go:embed guest/diff.sh
	diffScript string
)

// command returns the command line that runs script in the guest with args as its
// positional parameters. It starts with "env", because the login shell may be any.
func command(script string, args ...string) string {
	argv := []string{
		"env", "-u", "GIT_DIR", "-u", "GIT_WORK_TREE", "-u", "GIT_INDEX_FILE",
		"LC_ALL=C", "GIT_TERMINAL_PROMPT=0", "GIT_ASKPASS=", "GIT_OPTIONAL_LOCKS=0", "GIT_PAGER=cat",
		"bash", "--posix", "-c", libScript + script, "agent-sessionizer",
	}
	return ssh.Quote(append(argv, args...)...)
}

// Limits on data from a guest.
const (
	maxReply = 8 << 20 // bytes of a script's output
	maxText  = 8 << 10 // bytes of its stderr that reach an error
)

// clip shortens and escapes a guest's text for one line of an error.
func clip(s string) string { return termtext.Brief(termtext.Line(s), 600) }

// tailBuffer keeps the end of its input, because git prints the cause of an error last.
type tailBuffer struct {
	buf  []byte
	keep int
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.buf = append(t.buf, p...)
	if n := len(t.buf) - t.keep; n > 0 {
		t.buf = append(t.buf[:0], t.buf[n:]...)
	}
	return len(p), nil
}

func (t *tailBuffer) String() string { return string(t.buf) }

// objectID matches the name of an object in a SHA-1 or SHA-256 repository.
var objectID = lazyregexp.New(`^(?:[0-9a-f]{40}|[0-9a-f]{64})$`)

var sessionName = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$`)

// checkDir rejects a guest directory that is not an absolute path, because a script
// could mistake it for an option or resolve it relative to an unknown directory.
func checkDir(dir string) error {
	if !strings.HasPrefix(dir, "/") || strings.ContainsAny(dir, "\n\x00") || strings.Trim(dir, "/") == "" {
		return fail.New(fail.Usage, "guest directory must be an absolute path, got %q", dir)
	}
	return nil
}
