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
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// homeTimeout limits each transfer of home directory files, in either direction.
const homeTimeout = 2 * time.Minute

// homeFiles brings files to the guest's home directory, and saves those of agents from it.
type homeFiles struct{ w *Worker }

// copyHomeFiles copies the user's files into the agent's home directory: first the
// dotfiles, then the repository's saved home, in which the last session may have
// changed dotfiles.
func (h homeFiles) copyHomeFiles(ctx context.Context, s Session, g guestclient.Guest) error {
	if s.Spec.Restricted {
		return nil
	}
	if h.w.Sessions.Config.Dotfiles != "" {
		if err := h.bringDotfiles(ctx, s, g); err != nil {
			return err
		}
	}
	save, err := savePatterns(h.w.Sessions.Config, s)
	if err != nil || len(save.Patterns) == 0 || s.Status.SavedHome && !s.isUntouched() {
		return err
	}
	return h.restoreSavedHome(ctx, s, g, save)
}

// bringDotfiles copies the dotfiles. Errors in the files on the host fail the start,
// because the user can fix them. Errors in the guest are only reported.
func (h homeFiles) bringDotfiles(ctx context.Context, s Session, g guestclient.Guest) error {
	return h.w.step(ctx, s.ID, "copy dotfiles", func(ctx context.Context, _ vm.Progress) error {
		dir, err := os.OpenRoot(h.w.Sessions.Config.Dotfiles)
		if err != nil {
			return fail.New(fail.Usage, "%w", err).WithHint("mkdir %s", ssh.Quote(h.w.Sessions.Config.Dotfiles))
		}
		defer dir.Close()
		var archive bytes.Buffer
		left, err := homearchive.Dotfiles(&archive, dir, path.Base(s.Repo))
		if err != nil {
			return fail.New(fail.Usage, "read dotfiles in %s: %w", h.w.Sessions.Config.Dotfiles, err).WithHint("ls -la %s", ssh.Quote(h.w.Sessions.Config.Dotfiles))
		}
		const what = "dotfiles not copied"
		if len(left) > 0 {
			texts, hint := make([]string, len(left)), ""
			for i, l := range left {
				if texts[i] = l.String(); l.Credential {
					hint = "agent-sessionizer config edit # configure credentials under secrets:"
				}
			}
			h.warnLeftOut(ctx, s.ID, hint, what, texts)
		}
		limited, cancel := limit(ctx)
		defer cancel()
		notes, err := g.BringDotfiles(limited, &archive, s.isUntouched())
		if isGuestFault(ctx, err) {
			notes, err = []string{err.Error()}, nil
		}
		h.warnLeftOut(ctx, s.ID, "", what, notes)
		return err
	})
}

// limit bounds an operation that depends on the guest's speed.
func limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, homeTimeout, fail.New(fail.Timeout, "timed out after %v", homeTimeout))
}

// isGuestFault reports whether err is the fault of a reachable guest.
func isGuestFault(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == nil && !errors.Is(err, ssh.ErrUnreachable)
}

// warnLeftOut warns about files that were left out.
func (h homeFiles) warnLeftOut(ctx context.Context, id, hint, what string, notes []string) {
	if len(notes) > 0 {
		h.w.warn(ctx, id, hint, "%s: %s", what, strings.Join(notes, "; "))
	}
}

// isUntouched reports whether no user or agent has worked in the guest of s yet.
func (s Session) isUntouched() bool { return !s.Status.WasReady && s.Spec.Fork == nil }

// savePatterns returns what the settings say about saving the home of s.
func savePatterns(c *config.Config, s Session) (guestclient.SavePatterns, error) {
	set, err := c.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	return guestclient.SavePatterns{Patterns: homearchive.Patterns(set.Persist), Not: path.Base(s.Repo), Max: int64(c.Limits.SavedHome)}, err
}

// saveHomeNow calls savePatterns with the settings as they are now: they may have changed a
// moment ago. If the settings file has an error, the earlier settings apply, as
// everywhere.
func (h homeFiles) saveHomeNow(s Session) (guestclient.SavePatterns, error) {
	if now, err := h.w.Sessions.Config.Reload(); err == nil {
		return savePatterns(now, s)
	}
	return savePatterns(h.w.Sessions.Config, s)
}

// restoreSavedHome restores the repository's saved home into a guest. It replaces existing
// files only in a guest that no user has worked in yet. Until it has succeeded,
// nothing of this session is saved: that would replace a saved home whose files this
// session never had.
func (h homeFiles) restoreSavedHome(ctx context.Context, s Session, g guestclient.Guest, save guestclient.SavePatterns) error {
	homes := SavedHomes{Paths: h.w.Sessions.Config.Paths}
	label := homes.fallback(s.RepoKey, s.Label)
	without := func(err error) {
		h.w.warn(ctx, s.ID, "agent-sessionizer home rm "+ssh.Quote(withLabel(s.RepoName(), label)), "continuing without the saved home, which is unchanged: %v", err)
	}
	f, archive, err := homes.open(s.RepoKey, label)
	if err != nil {
		without(err)
		return nil
	}
	if f != nil {
		defer f.Close()
		if st, err := f.Stat(); err == nil {
			save.Max = max(save.Max, st.Size()) // a lowered limit applies only to later saves
		}
		err := h.w.step(ctx, s.ID, "restore the saved home", func(ctx context.Context, _ vm.Progress) error {
			limited, cancel := limit(ctx)
			defer cancel()
			notes, err := g.RestoreHome(limited, save, archive, s.isUntouched())
			h.warnLeftOut(ctx, s.ID, "", "saved files not restored", notes)
			return err
		})
		if isGuestFault(ctx, err) {
			without(err)
			return nil
		}
		if err != nil {
			return err
		}
	}
	_, err = h.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.SavedHome = true })
	return err
}

// saveHome saves the home of s. A failure is only a warning: the user asked to stop
// the session, and the last saved home stays.
func (h homeFiles) saveHome(ctx context.Context, s Session, g guestclient.Guest) {
	if s.Task != "" || s.Spec.Numbered {
		return // a repository's tasks run concurrently with each other and with its session
	}
	save, err := h.saveHomeNow(s)
	if err == nil && (len(save.Patterns) == 0 || !s.Status.WasReady) {
		return
	}
	if err == nil {
		err = h.trySaveHome(ctx, s, g, save)
	}
	if err != nil {
		h.w.warn(ctx, s.ID, fail.HintOf(err), "continuing without saving the home; the last saved home is unchanged: %v", err)
	}
}

func (h homeFiles) trySaveHome(ctx context.Context, s Session, g guestclient.Guest, save guestclient.SavePatterns) error {
	if !s.Status.SavedHome {
		// The setting was turned on after the session started. What an earlier
		// session saved must not be lost.
		if err := h.restoreSavedHome(ctx, s, g, save); err != nil {
			return err
		}
		var err error
		if s, err = h.w.Sessions.Get(ctx, s.ID); err != nil {
			return err
		}
		if !s.Status.SavedHome {
			return nil // restoreSavedHome has already warned
		}
	}
	return h.w.step(ctx, s.ID, "save the home", func(ctx context.Context, _ vm.Progress) error {
		limited, cancel := limit(ctx)
		defer cancel()
		if err := h.w.guestSetup().redactSecretsOf(limited, s, g); err != nil { // the transcripts may contain them
			return err
		}
		var notes []string
		k := SavedHome{RepoKey: s.RepoKey, Label: s.Label, Repo: s.Session.Repo, Session: s.Name, SavedAt: time.Now().UTC().Truncate(time.Second)}
		err := SavedHomes{Paths: h.w.Sessions.Config.Paths}.write(limited, k, save.Max, h.w.Redact, func(ctx context.Context, to io.Writer) (err error) {
			notes, err = g.SaveHome(ctx, save, to)
			return err
		})
		if err == nil {
			h.warnLeftOut(ctx, s.ID, "", "files not saved", notes)
		}
		return err
	})
}

// saveHomeBeforeDestroy saves the home of a session that is about to be destroyed, if its VM
// runs.
func (h homeFiles) saveHomeBeforeDestroy(ctx context.Context, s Session) {
	save, err := h.saveHomeNow(s)
	if err != nil || len(save.Patterns) == 0 || !s.Status.WasReady || s.Status.Endpoint.Addr == "" {
		return
	}
	if m, err := h.w.Driver.Inspect(ctx, s.VM()); err != nil || m.State != vm.Running {
		return
	}
	dial, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := Connections{Paths: h.w.Sessions.Config.Paths}.DialOwn(dial, s)
	if err != nil {
		h.w.warn(ctx, s.ID, "", "continuing without saving the home; the last saved home is unchanged: %v", err)
		return
	}
	defer conn.Close()
	h.saveHome(ctx, s, s.Guest(conn))
}
