package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	setupTimeout = time.Hour
	setupOutput  = 4 << 20 // bytes that are kept

	maxSetupFile = 8 << 20 // bytes of a file that decides whether a result still fits
)

// SetupState is the state of a repository's setup in a session.
type SetupState string

// The states of a setup.
const (
	SetupRunning SetupState = "running"
	SetupDone    SetupState = "done"
	SetupFailed  SetupState = "failed"
	SetupKept    SetupState = "kept" // the session started from the result of an earlier one
)

// SetupResult is the result of a repository's setup.
type SetupResult struct {
	State    SetupState `json:"state"`
	ExitCode int        `json:"exit_code,omitempty"`
	Took     int64      `json:"took_ms,omitempty"`
}

// setupPlan is a setup that a new session needs.
type setupPlan struct {
	config.Setup
	key string // changes with everything that the result depends on
}

// planSetup returns the setup of a new session, with no script if it has none. The source has been
// resolved.
func (w *Worker) planSetup(ctx context.Context, s Session, set config.Settings, src repo.Source) (plan setupPlan, err error) {
	plan.Setup = set.Setup
	if plan.Run == "" {
		text, ok, err := src.ReadFile(ctx, config.ProjectFile, 64<<10)
		if err != nil || !ok {
			return plan, err
		}
		project, err := config.ParseProject(s.Repo+":"+config.ProjectFile, text)
		if err != nil {
			return plan, err
		}
		plan.Setup = project.Setup
	}
	if plan.Run == "" {
		return plan, nil
	}
	from, err := w.Golden.Images.Find(s.Spec.Image, Arch())
	if err != nil {
		return plan, err
	}
	image, err := w.Golden.Key(from)
	if err != nil {
		return plan, err
	}
	h := sha256.New()
	r := s.Spec.Resources
	part := func(text string) { fmt.Fprintf(h, "%d:%s\n", len(text), text) }
	for _, text := range []string{"1", s.RepoKey, s.Spec.Profile, image, fmt.Sprint(r.CPUs, int64(r.Memory), int64(r.Disk), s.Spec.Enforced), string(plan.Run)} {
		part(text)
	}
	for _, name := range plan.Files {
		text, ok, err := src.ReadFile(ctx, string(name), maxSetupFile)
		if err != nil {
			return plan, err
		}
		part(string(name))
		part(fmt.Sprint(ok))
		part(string(text))
	}
	plan.key = hex.EncodeToString(h.Sum(nil))
	return plan, nil
}

// SetupLog returns the path of the output of a session's setup.
func (m *Manager) SetupLog(id string) string {
	return filepath.Join(m.Config.Paths.SessionDir(id), "setup.log")
}

// prepareRepository runs the setup of a new session, unless the session started from the kept result
// of the same setup, and keeps the result.
func (gs guestSetup) prepareRepository(ctx context.Context, s *Session, conn *ssh.Client, plan setupPlan) error {
	if s.Status.FromBase != nil {
		var err error
		*s, err = gs.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Setup = &SetupResult{State: SetupKept} })
		return err
	}
	done, err := gs.setUp(ctx, s, conn, plan)
	if err == nil && done {
		gs.saveResult(ctx, *s, plan)
	}
	return err
}

// setUp runs the repository's setup. If it fails, the session can be used nevertheless.
func (gs guestSetup) setUp(ctx context.Context, s *Session, conn *ssh.Client, plan setupPlan) (done bool, err error) {
	record := func(r SetupResult) error {
		var err error
		*s, err = gs.w.Sessions.updateStatus(context.WithoutCancel(ctx), s.ID, store.Event{}, func(f *Status) { f.Setup = &r })
		return err
	}
	if err := record(SetupResult{State: SetupRunning}); err != nil {
		return false, err
	}
	began := time.Now()
	err = gs.w.step(ctx, s.ID, "set up the repository", func(ctx context.Context, p vm.Progress) error {
		log, err := os.OpenFile(gs.w.Sessions.SetupLog(s.ID), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
		if err != nil {
			return fail.New(fail.Host, "open the log of the setup: %w", err)
		}
		defer log.Close()
		first, _, _ := strings.Cut(strings.TrimSpace(string(plan.Run)), "\n")
		p(first)
		ctx, cancel := context.WithTimeoutCause(ctx, setupTimeout, fail.New(fail.Timeout, "the setup did not end within %v", setupTimeout))
		defer cancel()
		out := &pipe.Writer{W: log, Left: setupOutput, Cut: true}
		line := "cd " + ssh.Quote(s.Status.Dir) + " && " + ssh.Quote("bash", "-e", "-c", string(plan.Run))
		return conn.Run(ctx, line, ssh.IO{Stdout: out, Stderr: out})
	})
	result := SetupResult{State: SetupDone, Took: time.Since(began).Milliseconds()}
	exit, failed := errors.AsType[*ssh.ExitError](err)
	switch {
	case err == nil:
	case failed:
		result.State, result.ExitCode = SetupFailed, exit.Code
		gs.w.warn(ctx, s.ID, "agent-sessionizer logs --of setup "+s.Name, "the setup of the repository failed: %v", exit)
	default:
		return false, err
	}
	return result.State == SetupDone, record(result)
}

// saveResult keeps the result of a setup for later sessions of the repository. A failure is only a
// warning.
func (gs guestSetup) saveResult(ctx context.Context, s Session, plan setupPlan) {
	if s.origin() == golden.FromGeneric {
		return // later sessions would have the identity of its VM
	}
	k := gs.w.checkpointer()
	if k.guestHasSecrets(s) {
		gs.w.Log.InfoContext(ctx, "the result of the setup is not kept, because settings put secrets into the guest")
		return
	}
	err := gs.w.step(ctx, s.ID, "keep the result of the setup", func(ctx context.Context, p vm.Progress) error {
		d, err := k.driver()
		if err = errors.Join(err, k.checkSpace(s)); err != nil {
			return err
		}
		b := RepoBase{
			RepoKey: s.RepoKey, Key: plan.key, Profile: s.Spec.Profile, VM: baseVM(plan.key), Checkpoint: plan.key[:12], From: s.origin(),
			Provisioned: s.Status.Provisioned, Program: s.Status.Program, CreatedAt: time.Now().UTC(), UsedAt: time.Now().UTC(), Branch: s.Status.Base.Branch,
		}
		prepared := k.prepare(ctx, s)
		is, err := d.Checkpoint(ctx, s.VM(), b.Checkpoint, p)
		if err == nil {
			b.Memory, b.Size = is.Memory && prepared, is.Size
			err = d.Fork(ctx, s.VM(), b.Checkpoint, vm.Spec{Name: b.VM, User: guestclient.User, Boot: guestclient.BootScript(), ExternalNet: s.Spec.Enforced}, b.Memory)
		}
		bases := RepoBases{gs.w.Sessions.Config.Paths}
		if err == nil {
			err = bases.write(b)
		}
		if kept, lerr := bases.of(s.RepoKey); err == nil && lerr == nil {
			for _, old := range replaced(kept, b) {
				err = errors.Join(err, bases.Remove(ctx, gs.w.Driver, old.VM))
			}
		}
		return errors.Join(err, d.RemoveCheckpoint(ctx, s.VM(), b.Checkpoint))
	})
	if err != nil && ctx.Err() == nil {
		gs.w.warn(ctx, s.ID, fail.HintOf(err), "the result of the setup is not kept for later sessions: %v", err)
	}
}
