package cli

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

type startOptions struct{ json bool }

func newStartCmd(a *app) *cobra.Command {
	var o startOptions
	cmd := &cobra.Command{
		Use: "start SESSION", Short: "Start a stopped or broken session without attaching",
		Example: `  agent-sessionizer start repo`,
		Args:    usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeArgs(a.sessions(session.Stopped, session.Stopping, session.Broken)),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			m, err := a.manager(ctx)
			if err != nil {
				return err
			}
			s, err := findSession(ctx, m, args[0])
			if err != nil {
				return err
			}
			if s, err = m.SetDesired(ctx, s, session.Ready); err != nil {
				return err
			}
			if s, err = a.follow(ctx, m, s, session.Ready); err != nil {
				return err
			}
			if o.json {
				return a.con.JSON(s.View())
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&o.json, "json", false, "print the session as JSON")
	return cmd
}

type stopOptions struct{}

func newStopCmd(a *app) *cobra.Command {
	var o stopOptions
	return &cobra.Command{
		Use: "stop SESSION…", Short: "Shut down sessions and keep their disks",
		Long: `Shut down sessions and keep their disks. This frees their memory. "start" or "open"
continues with what is on the disk.`,
		Example: `  agent-sessionizer stop repo
  agent-sessionizer stop owner/repo owner/other`,
		Args:              usage(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeMany(a.sessions(session.Ready, session.Creating, session.Starting, session.Broken)),
		RunE:              func(cmd *cobra.Command, args []string) error { return runStop(cmd.Context(), a, o, args) },
	}
}

func runStop(ctx context.Context, a *app, _ stopOptions, names []string) error {
	m, err := a.manager(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		s, err := findSession(ctx, m, name)
		if err != nil {
			return err
		}
		if s, err = m.SetDesired(ctx, s, session.Stopped); err != nil {
			return err
		}
		if _, err = a.follow(ctx, m, s, session.Stopped); err != nil {
			return err
		}
		a.con.Say("%s", s.Name+" is stopped")
	}
	return nil
}

type destroyOptions struct {
	force   bool
	confirm bool
}

func newDestroyCmd(a *app) *cobra.Command {
	var o destroyOptions
	cmd := &cobra.Command{
		Use: "destroy SESSION…", Aliases: []string{"rm"}, Short: "Remove sessions and everything in them",
		Long: `Remove sessions: VM, disks, keys, locks and the local tmux session.

A session is not removed while it has uncommitted files, or commits that are neither
pushed nor fetched. The same applies while its unsaved work cannot be determined, and
while a task in it has not ended. The error names the command that saves the work.`,
		Example: `  agent-sessionizer destroy repo
  agent-sessionizer destroy --confirm repo    list the work that would be lost, and ask
  agent-sessionizer destroy --force repo`,
		Args: usage(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeMany(a.sessions()),
		RunE: func(cmd *cobra.Command, args []string) error { return runDestroy(cmd.Context(), a, o, args) },
	}
	cmd.Flags().BoolVarP(&o.force, "force", "f", false, "destroy even if work would be lost")
	cmd.Flags().BoolVar(&o.confirm, "confirm", false, "list the work that would be lost, and ask for confirmation")
	return cmd
}

func runDestroy(ctx context.Context, a *app, o destroyOptions, names []string) error {
	m, err := a.manager(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		s, err := findSession(ctx, m, name)
		if fail.CodeOf(err) == fail.NotFound {
			if ended, eerr := m.Ended(ctx, name); eerr != nil || ended {
				if eerr == nil {
					a.con.Say("%s", name+" is gone already")
				}
				err = eerr
				if err == nil {
					continue
				}
			}
		}
		if err != nil {
			return err
		}
		if !o.force && s.Phase != session.Destroying {
			if err := a.confirmLosingWork(ctx, m, s, o.confirm); err != nil {
				return err
			}
		}
		if s, err = m.SetDesired(ctx, s, session.Gone); err != nil {
			return err
		}
		if _, err = a.follow(ctx, m, s, session.Gone); err != nil {
			return err
		}
		a.con.Say("%s", s.Name+" is gone")
	}
	return nil
}

// confirmLosingWork refuses to destroy s, or asks first, if that would lose work.
func (a *app) confirmLosingWork(ctx context.Context, m *session.Manager, s session.Session, confirm bool) error {
	lost := a.unsavedWork(ctx, m, s)
	if lost.what == "" && !confirm {
		return nil
	}
	if !confirm {
		return fail.New(fail.Conflict, "destroying %s would lose work: %s", s.Name, lost.what).
			WithHint("%s, or: agent-sessionizer destroy --force %s", lost.hint, s.Name)
	}
	ok, err := a.con.Confirm(destroyQuestion(s, lost), "--force")
	if err != nil {
		return err
	}
	if !ok {
		return fail.New(fail.Interrupted, "%s was not destroyed", s.Name)
	}
	return nil
}

// destroyQuestion returns the question whether to destroy s, with what that would lose.
func destroyQuestion(s session.Session, lost unsavedWork) string {
	what := cmp.Or(lost.what, "nothing; everything is pushed or fetched")
	return fmt.Sprintf("Destroy %s (%s)? It would lose: %s.", s.Name, s.DisplayName(), what)
}

// unsavedWork describes what destroying a session would lose or end.
type unsavedWork struct {
	what string // "" if nothing is lost
	hint string // the command that saves it, or that finds out more
}

func (a *app) unsavedWork(ctx context.Context, m *session.Manager, s session.Session) unsavedWork {
	tasks, err := (&task.Manager{Sessions: m}).In(ctx, s.ID)
	if err != nil {
		return unsavedWork{fmt.Sprintf("its tasks cannot be determined (%v)", err), "agent-sessionizer task list"}
	}
	work := a.describeUnsaved(ctx, m, s)
	if len(tasks) == 0 {
		return work
	}
	var ids []string
	for _, t := range tasks {
		ids = append(ids, t.ID)
	}
	what := "the work of a task that has not ended, " + ids[0]
	if len(ids) > 1 {
		what = "the work of tasks that have not ended, " + strings.Join(ids, ", ")
	}
	if work.what != "" {
		what += "; and " + work.what
	}
	return unsavedWork{what, "agent-sessionizer task cancel --wait " + strings.Join(ids, " ")}
}

// describeUnsaved returns the work that exists only in a guest.
func (a *app) describeUnsaved(ctx context.Context, m *session.Manager, s session.Session) unsavedWork {
	if s.Status.Base == nil {
		return unsavedWork{} // no repository was ever cloned into it
	}
	start := "agent-sessionizer start " + s.Name
	work := s.Status.Work
	switch s.Phase {
	case session.Ready, session.Broken, session.Starting, session.Creating:
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		w, err := a.work(ctx, m, s)
		if err != nil {
			hint := "once it answers: agent-sessionizer destroy " + s.Name
			if s.Phase == session.Broken {
				hint = start
			}
			return unsavedWork{fmt.Sprintf("its unsaved work cannot be determined (%v)", err), hint}
		}
		work = &w
	}
	switch {
	case work == nil && s.Phase == session.Stopping:
		return unsavedWork{"its unsaved work cannot be determined while it is stopping", "agent-sessionizer stop " + s.Name}
	case work == nil:
		return unsavedWork{"its unsaved work cannot be determined: it did not stop cleanly", start}
	case work.Clean():
		return unsavedWork{}
	}
	hint := saving(s.Name, *work)
	if s.Phase == session.Stopped {
		hint = start + " && " + hint
	}
	return unsavedWork{work.Summary(), hint}
}

// saving returns the command that brings a guest's work to this host.
func saving(name string, w repo.WorkState) string {
	fetch := "agent-sessionizer fetch " + name
	switch {
	case len(w.InProgress) > 0 || w.Submodules > 0: // only the user can finish and push this
		return "agent-sessionizer ssh " + name
	case w.Dirty > 0 || w.Untracked > 0: // fetch takes stashes, but not files
		return "agent-sessionizer exec " + name + " -- git stash -u && " + fetch
	}
	return fetch
}

func (a *app) work(ctx context.Context, m *session.Manager, s session.Session) (repo.WorkState, error) {
	conn, err := m.Dial(ctx, s)
	if err != nil {
		return repo.WorkState{}, err
	}
	defer conn.Close()
	return m.Work(ctx, s, conn)
}
