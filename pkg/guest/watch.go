package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

const (
	// glancePace is how fast glances are taken. The guest program sends fewer; a
	// guest that sends more waits for us, and not we for it.
	glancePace = 100 * time.Millisecond

	// glanceSilence is when the stream counts as dead. The guest program sends a
	// line a minute at least.
	glanceSilence = 3 * time.Minute
)

// Why there is no more to see; neither comes from a guest that works.
var (
	errSilent = errors.New("the guest shows nothing any more")
	errEnded  = errors.New("the guest stopped to show anything")
)

// Watch calls f with what a person would see in the guest, at once and each time
// that it changes, until ctx ends, f returns an error, or the guest has no more
// to show; it says which of them, and never returns nil. dir is the checkout
// whose changes since base, a commit, are counted; "" for none. What it brings
// are the guest's words: within bounds, and perhaps all lies.
func (g Guest) Watch(ctx context.Context, dir, base string, f func(wire.Glance) error) error {
	args := []string{"watch"}
	if dir != "" {
		args = append(args, "--dir", dir, "--base", base)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	r, w := io.Pipe()
	stdin, hold := io.Pipe() // at its end the guest's side ends, too
	done := make(chan struct{})
	go func() {
		err := g.SSH.Run(ctx, g.program(args...), ssh.IO{Stdin: stdin, Stdout: w})
		w.CloseWithError(err) // nil reads as the end
		close(done)
	}()
	// The goroutine is over when Watch returns: closing the reader fails its
	// writes, cancelling ends its command.
	defer func() {
		_ = errors.Join(r.Close(), hold.Close()) // never fail, says io
		cancel(nil)
		<-done
	}()
	return glances(r, cancel, f)
}

// glances calls f with each, no faster than glancePace, and cancels what feeds r
// when it falls silent.
func glances(r io.Reader, cancel context.CancelCauseFunc, f func(wire.Glance) error) error {
	silence := time.AfterFunc(glanceSilence, func() { cancel(errSilent) })
	defer silence.Stop()
	pace := time.NewTicker(glancePace)
	defer pace.Stop()
	for seen, err := range wire.Glances(r) {
		if err != nil {
			return fmt.Errorf("watch the guest: %w", err)
		}
		silence.Stop() // what takes long now is f
		if err := f(seen); err != nil {
			return err
		}
		<-pace.C
		silence.Reset(glanceSilence)
	}
	return errEnded
}
