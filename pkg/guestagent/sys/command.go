package sys

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

const (
	commandTime = 2 * time.Minute // per command; an emulated guest on a loaded host is slow
	maxEntry    = 64 << 10

	// MaxOutput bounds the output of a command, in bytes.
	MaxOutput = 4 << 20
)

// Run executes a system program with bounded time and output.
func Run(ctx context.Context, stdin, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin", "LC_ALL=C"}
	cmd.Stdin = strings.NewReader(stdin)
	out, errs := pipe.Buffer{Limit: MaxOutput}, pipe.Buffer{Limit: MaxOutput}
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = commandTime // a loaded host is slow to end a process, too
	if err := cmd.Run(); err != nil {
		first, _, _ := strings.Cut(strings.TrimSpace(errs.String()), "\n")
		return "", fmt.Errorf("%s: %w: %s", name, err, guestproto.Clean(first))
	}
	return out.String(), nil
}

// Entries splits its input at zero bytes.
type Entries struct {
	Use  func(string)
	rest []byte
}

func (e *Entries) Write(p []byte) (int, error) {
	e.rest = append(e.rest, p...)
	for {
		entry, rest, ok := bytes.Cut(e.rest, []byte{0})
		if !ok {
			break
		}
		e.Use(string(entry))
		e.rest = rest
	}
	if len(e.rest) > maxEntry {
		return 0, errors.New("an entry is too long")
	}
	return len(p), nil
}

// End passes on what follows the last zero byte.
func (e *Entries) End() {
	if len(e.rest) > 0 {
		e.Use(string(e.rest))
	}
}

// Perform runs a command whose output is not needed. It ignores exec.ErrWaitDelay:
// the command itself has succeeded, and an overloaded machine was merely slow to
// read its output.
func Perform(ctx context.Context, stdin, name string, args ...string) error {
	_, err := Run(ctx, stdin, name, args...)
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil
	}
	return err
}

// Await calls do until it succeeds, and returns its last error otherwise.
func Await(ctx context.Context, most, pause time.Duration, do func() error) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for {
		err := do()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(pause):
		}
	}
}
