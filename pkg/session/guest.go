package session

import (
	"context"
	"errors"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Mirrors returns the host's copies of remote repositories, within the settings'
// limits.
func (m *Manager) Mirrors() *repo.Mirrors {
	l := m.Config.Limits
	return &repo.Mirrors{Dir: m.Config.Paths.Mirrors(), Self: m.Self, Bounds: repo.Bounds{Bytes: int64(l.MirrorSize), Refs: l.MirrorRefs, Time: l.MirrorTime}}
}

// These limit the bytes that a guest makes the host fetch, at one time and in total.
const (
	guestFetch   = 1 << 30
	guestFetches = 4 << 30
)

// Work is the agents' work in sessions.
type Work struct {
	Sessions *Manager
	ByGuest  bool // a guest asked for it, as often as it likes
}

// Unsaved asks the guest what work would be lost if the session were destroyed.
func (w Work) Unsaved(ctx context.Context, s Session, g repo.Guest) (repo.WorkState, error) {
	known, err := repo.Known(ctx, s.Name, s.Status.Target)
	if err != nil {
		return repo.WorkState{}, err
	}
	return repo.Work(ctx, g, s.Status.Dir, *s.Status.Base, known...)
}

// Fetch copies the agent's commits to the repository's mirror on this host. It also
// copies them to the local clone this time, unless clone is "".
func (w Work) Fetch(ctx context.Context, s Session, g repo.Guest, clone string, o repo.FetchOptions) (repo.FetchResult, error) {
	into, keep := s.Status.Target.With(clone)
	o.TempDir = w.Sessions.Config.Paths.Cache // what a killed process leaves there is removed by prune
	if w.ByGuest {
		o.MaxBytes = min(guestFetch, guestFetches-s.Status.GuestFetched)
		if o.MaxBytes <= 0 {
			return repo.FetchResult{}, fail.New(fail.Conflict, "the commits that were fetched for subtasks have %d MiB, which is the limit", s.Status.GuestFetched>>20).
				WithHint("leave repository.commit out")
		}
	}
	res, err := repo.Fetch(ctx, g, s.Status.Dir, s.Name, into, *s.Status.Base, o)
	if err != nil {
		if w.ByGuest && res.Bytes > 0 {
			_, cerr := w.Sessions.updateStatus(context.WithoutCancel(ctx), s.ID, store.Event{}, func(f *Status) { f.GuestFetched += res.Bytes })
			err = errors.Join(err, cerr)
		}
		return res, err
	}
	record := w.Sessions.updateStatus
	if w.ByGuest {
		record = w.Sessions.appendFromGuest
	}
	_, err = record(ctx, s.ID, store.NewEvent(EventFetch, FetchDone{Refs: len(res.Refs), Commits: res.Commits}), func(f *Status) {
		f.Target = keep
		if w.ByGuest {
			f.GuestFetched += res.Bytes
		}
	})
	return res, err
}

// SetTmuxSocket records which local tmux server shows the session; destroy needs to know.
func (m *Manager) SetTmuxSocket(ctx context.Context, s Session, socket string) error {
	if s.Status.Tmux == socket {
		return nil
	}
	_, err := m.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Tmux = socket })
	return err
}

// MarkVisited records that a user attaches now.
func (m *Manager) MarkVisited(ctx context.Context, s Session) error {
	_, err := m.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Attached = time.Now() })
	return err
}
