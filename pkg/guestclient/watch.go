package guestclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

const (
	// observationPace is the minimum time between two observations. The guest program sends
	// fewer. A guest that sends more has to wait.
	observationPace = 100 * time.Millisecond

	// observationSilence is how long the stream may be silent before it counts as dead. The
	// guest program sends at least one line per minute.
	observationSilence = 3 * time.Minute
)

// Reasons why a stream ended. A working guest causes neither.
var (
	errSilent = errors.New("the guest stopped reporting")
	errEnded  = errors.New("the guest's reports ended")
)

// Watch calls f with an observation of what a person would see in the guest, at once and
// after each change. It ends when ctx ends, f returns an error, or the guest stops
// sending. Watch returns the reason and never nil. dir is the checkout whose changes
// since the commit base are counted; "" for none. The observations are the guest's claims:
// they are within bounds, but may be false. The answers to questions in the guest are sent to
// it; nil for none.
func (g Guest) Watch(ctx context.Context, dir, base string, answers <-chan guestproto.Answer, f func(guestproto.Observation) error) error {
	args := []string{"watch"}
	if dir != "" {
		args = append(args, "--dir", dir, "--base", base)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	r, w := io.Pipe()
	stdin, hold := io.Pipe() // when it ends, the guest's side ends, too
	done, sent := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(sent)
		for {
			select {
			case a := <-answers:
				if a.Encode(hold) != nil {
					return // Watch ends
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	go func() {
		err := g.SSH.Run(ctx, g.program(args...), ssh.IO{Stdin: stdin, Stdout: w})
		w.CloseWithError(err) // nil reads as the end
		close(done)
	}()
	// The goroutines end before Watch returns: closing the pipes fails their writes, and
	// cancelling ends the command.
	defer func() {
		_ = errors.Join(r.Close(), hold.Close(), stdin.Close()) // never fail, according to io
		cancel(nil)
		<-done
		<-sent
	}()
	return readObservations(r, cancel, f)
}

// readObservations calls f with each observation, no faster than observationPace. It cancels the source of
// r if that falls silent.
func readObservations(r io.Reader, cancel context.CancelCauseFunc, f func(guestproto.Observation) error) error {
	silence := time.AfterFunc(observationSilence, func() { cancel(errSilent) })
	defer silence.Stop()
	pace := time.NewTicker(observationPace)
	defer pace.Stop()
	for seen, err := range guestproto.ReadObservations(r) {
		if err != nil {
			return fmt.Errorf("watch the guest: %w", err)
		}
		silence.Stop() // f's own time does not count
		if err := f(seen); err != nil {
			return err
		}
		<-pace.C
		silence.Reset(observationSilence)
	}
	return errEnded
}
