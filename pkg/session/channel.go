package session

import (
	"context"
	"net"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// channelPoll is how often a keeper looks whether the settings allow subtasks.
const channelPoll = 2 * time.Second

// serveGuest serves the requests of the guest about subtasks, while the settings allow these. The
// guest's sshd listens on a socket in the guest, and passes the connections on over the
// keeper's own connection.
func (w *Worker) serveGuest(ctx context.Context, s Session, settings func() *config.Config, conn func(context.Context) (*ssh.Client, error)) {
	if w.Channel == nil {
		return
	}
	serve := w.Channel(s, conn)
	allowed := func() bool {
		set, err := settings().For(config.RepoKey(s.RepoKey), s.Spec.Profile)
		return err == nil && set.Subtasks.Allowed()
	}
	again(ctx, w.Log, "channel for subtasks failed", redialMin, redialMax, func(ctx context.Context) error {
		if !waitUntil(ctx, allowed) {
			return context.Cause(ctx)
		}
		client, err := conn(ctx)
		if err != nil {
			return err
		}
		l, err := client.Listen(s.Status.Root + guestproto.HostSocket)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() {
			defer cancel()
			select {
			case <-client.Done():
			case <-ctx.Done():
			case <-denied(ctx, allowed):
			}
		}()
		return serve(ctx, l)
	})
}

// waitUntil polls a condition, and reports whether it became true before ctx ended.
func waitUntil(ctx context.Context, met func() bool) bool {
	tick := time.NewTicker(channelPoll)
	defer tick.Stop()
	for !met() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// denied returns a channel that is closed when the settings no longer allow subtasks.
func denied(ctx context.Context, allowed func() bool) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		waitUntil(ctx, func() bool { return !allowed() })
	}()
	return done
}

// Channel serves the connections that arrive from a session's guest. It closes the listener.
type Channel func(ctx context.Context, l net.Listener) error
