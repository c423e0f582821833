package session

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/home"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// homeTimeout bounds each way that the files of a home directory take.
const homeTimeout = 2 * time.Minute

// furnish gives the agent's home directory what is the user's own: the dotfiles,
// and over them what was kept of the repository's last session, in which they may
// have been changed.
func (w *Worker) furnish(ctx context.Context, s Session, g guest.Guest) error {
	if s.Spec.Restricted {
		return nil
	}
	if w.Config.Dotfiles != "" {
		if err := w.bringDotfiles(ctx, s, g); err != nil {
			return err
		}
	}
	keep, err := keepOf(w.Config, s)
	if err != nil || len(keep.Patterns) == 0 || s.Facts.Kept && s.Facts.WasReady {
		return err
	}
	return w.restoreKept(ctx, s, g, keep)
}

// bringDotfiles copies them. What is wrong with them here ends the start, and can
// be mended; what a guest makes of them is its own affair.
func (w *Worker) bringDotfiles(ctx context.Context, s Session, g guest.Guest) error {
	return w.step(ctx, s.ID, "copy dotfiles", func(ctx context.Context, _ vm.Progress) error {
		dir, err := os.OpenRoot(w.Config.Dotfiles)
		if err != nil {
			return fail.New(fail.Usage, "%w", err).WithHint("mkdir %s", ssh.Quote(w.Config.Dotfiles))
		}
		defer dir.Close()
		var archive bytes.Buffer
		left, err := home.Dotfiles(&archive, dir, path.Base(s.Repo))
		if err != nil {
			return fail.New(fail.Usage, "in %s: %w", w.Config.Dotfiles, err).WithHint("ls -la %s", ssh.Quote(w.Config.Dotfiles))
		}
		const what = "dotfiles that are not copied"
		if len(left) > 0 {
			said, hint := make([]string, len(left)), ""
			for i, l := range left {
				if said[i] = l.String(); l.Credential {
					hint = "agent-sessionizer config edit # and give credentials to sessions under secrets:"
				}
			}
			w.note(ctx, s.ID, hint, what, said)
		}
		limited, cancel := limit(ctx)
		defer cancel()
		notes, err := g.BringDotfiles(limited, &archive, !s.Facts.WasReady)
		if guestsFault(ctx, err) {
			notes, err = []string{err.Error()}, nil
		}
		w.note(ctx, s.ID, "", what, notes)
		return err
	})
}

// limit is for what a guest takes its time with.
func limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, homeTimeout, fail.New(fail.Timeout, "it took longer than %v", homeTimeout))
}

// guestsFault reports whether a guest that is there did not do what it was asked.
func guestsFault(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && !errors.Is(err, ssh.ErrUnreachable)
}

// note tells what was left out.
func (w *Worker) note(ctx context.Context, id, hint, what string, notes []string) {
	if len(notes) > 0 {
		w.warn(ctx, id, hint, "%s: %s", what, strings.Join(notes, "; "))
	}
}

// keepOf is what the settings say that is kept of s.
func keepOf(c *config.Config, s Session) (guest.Keep, error) {
	set, err := c.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	return guest.Keep{Patterns: home.Patterns(set.Keep), Not: path.Base(s.Repo), Max: int64(c.Limits.Kept)}, err
}

// keepNow is keepOf by the settings as they are now: they may have changed a
// moment ago. A file with an error changes nothing, here too.
func (w *Worker) keepNow(s Session) (guest.Keep, error) {
	if now, err := w.Config.Reload(); err == nil {
		return keepOf(now, s)
	}
	return keepOf(w.Config, s)
}

// restoreKept brings into a guest what was kept of its repository. What is there
// makes way only where nobody was yet. Until this has been done nothing is kept of
// the session: it would replace what is not in it.
func (w *Worker) restoreKept(ctx context.Context, s Session, g guest.Guest, keep guest.Keep) error {
	without := func(err error) {
		w.warn(ctx, s.ID, "agent-sessionizer kept rm "+s.Called(), "it goes on without what was kept, which stays as it is: %v", err)
	}
	f, archive, err := w.openKept(s.RepoKey)
	if err != nil {
		without(err)
		return nil
	}
	if f != nil {
		defer f.Close()
		if st, err := f.Stat(); err == nil {
			keep.Max = max(keep.Max, st.Size()) // a limit that was lowered is for what comes
		}
		err := w.step(ctx, s.ID, "bring back what was kept", func(ctx context.Context, _ vm.Progress) error {
			limited, cancel := limit(ctx)
			defer cancel()
			notes, err := g.RestoreHome(limited, keep, archive, !s.Facts.WasReady)
			w.note(ctx, s.ID, "", "what was kept, and is not brought back", notes)
			return err
		})
		if guestsFault(ctx, err) {
			without(err)
			return nil
		}
		if err != nil {
			return err
		}
	}
	_, err = w.facts(ctx, s.ID, store.Event{}, func(f *Facts) { f.Kept = true })
	return err
}

// saveHome saves what is kept of s. What goes wrong is a warning: whoever stops a
// session wants it stopped, and what was saved last stays.
func (w *Worker) saveHome(ctx context.Context, s Session, g guest.Guest) {
	if s.Task != "" {
		return // tasks of a repository run beside each other, and beside its session
	}
	keep, err := w.keepNow(s)
	if err == nil && (len(keep.Patterns) == 0 || !s.Facts.WasReady) {
		return
	}
	if err == nil {
		err = w.trySaveHome(ctx, s, g, keep)
	}
	if err != nil {
		w.warn(ctx, s.ID, fail.HintOf(err), "it goes on, and what was kept last stays: %v", err)
	}
}

func (w *Worker) trySaveHome(ctx context.Context, s Session, g guest.Guest, keep guest.Keep) error {
	if !s.Facts.Kept {
		// Asked for since the session started. What an earlier session left must not
		// be lost by it.
		if err := w.restoreKept(ctx, s, g, keep); err != nil {
			return err
		}
		var err error
		if s, err = w.Get(ctx, s.ID); err != nil {
			return err
		}
		if !s.Facts.Kept {
			return nil // and has been told
		}
	}
	return w.step(ctx, s.ID, "save what is kept", func(ctx context.Context, _ vm.Progress) error {
		limited, cancel := limit(ctx)
		defer cancel()
		if err := w.hideSecretsOf(limited, g); err != nil { // they may be in the transcripts
			return err
		}
		var notes []string
		k := Kept{RepoKey: s.RepoKey, Repo: s.Session.Repo, Session: s.Name, SavedAt: time.Now().UTC().Truncate(time.Second)}
		err := w.saveKept(limited, k, keep.Max, w.Redact, func(ctx context.Context, to io.Writer) (err error) {
			notes, err = g.SaveHome(ctx, keep, to)
			return err
		})
		if err == nil {
			w.note(ctx, s.ID, "", "files that are not kept", notes)
		}
		return err
	})
}

// lastWords saves what is kept of a session that is to be destroyed, if its VM runs.
func (w *Worker) lastWords(ctx context.Context, s Session) {
	keep, err := w.keepNow(s)
	if err != nil || len(keep.Patterns) == 0 || !s.Facts.WasReady || s.Facts.Endpoint.Addr == "" {
		return
	}
	if m, err := w.Driver.Inspect(ctx, s.VM()); err != nil || m.State != vm.Running {
		return
	}
	dial, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := w.DialOwn(dial, s)
	if err != nil {
		w.warn(ctx, s.ID, "", "it goes on, and what was kept last stays: %v", err)
		return
	}
	defer conn.Close()
	w.saveHome(ctx, s, s.Guest(conn))
}
