package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	setupTimeout = time.Hour
	setupOutput  = 4 << 20 // bytes that are kept
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
	var files []string
	for _, name := range plan.Files {
		files = append(files, string(name))
	}
	entries, err := src.Entries(ctx, files...)
	if err != nil {
		return plan, err
	}
	h := sha256.New()
	r := s.Spec.Resources
	// The branch, because the setup runs code of the branch. A local clone, because its branches are
	// the user's own.
	for _, text := range []string{
		"1", s.RepoKey, set.Profile, string(set.Network.Mode), image, fmt.Sprint(r.CPUs, int64(r.Memory), int64(r.Disk), s.Spec.Enforced),
		src.Branch, fmt.Sprint(src.Local), string(plan.Run), entries,
	} {
		fmt.Fprintf(h, "%d:%s\n", len(text), text)
	}
	plan.key = hex.EncodeToString(h.Sum(nil))
	return plan, nil
}

// mayUseBase reports whether s may start from the kept result of a setup.
func (s Session) mayUseBase() bool { return !s.Spec.WithChanges && s.Spec.Fork == nil }

// mayKeep reports whether the result of the setup of s may be kept for later sessions. It may not if
// the setup ran code that is not a branch's, or an agent asked for it.
func (s Session) mayKeep() bool {
	return s.mayUseBase() && s.Task == "" && s.Spec.Within == nil && !s.Spec.Restricted && s.Spec.Repo.Commit == "" && s.origin() != golden.FromGeneric
}

// SetupLog returns the path of the output of a session's setup.
func (m *Manager) SetupLog(id string) string {
	return filepath.Join(m.Config.Paths.SessionDir(id), "setup.log")
}

// prepareRepository runs the setup of a new session, unless the session started from the kept result
// of the same setup, and keeps the result.
func (gs guestSetup) prepareRepository(ctx context.Context, s *Session, conn *ssh.Client, plan setupPlan, src repo.Source) error {
	if s.Status.FromBase != nil {
		var err error
		*s, err = gs.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Setup = &SetupResult{State: SetupKept} })
		return err
	}
	done, err := gs.setUp(ctx, s, conn, plan)
	if err == nil && done {
		gs.saveResult(ctx, *s, plan, src)
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
	again := s.Status.Setup != nil // a keeper that died has started it
	if err := record(SetupResult{State: SetupRunning}); err != nil {
		return false, err
	}
	began := time.Now()
	err = gs.w.step(ctx, s.ID, "set up the repository", func(ctx context.Context, p vm.Progress) error {
		first, _, _ := strings.Cut(strings.TrimSpace(string(plan.Run)), "\n")
		p(first)
		limited, cancel := context.WithTimeoutCause(ctx, setupTimeout, fail.New(fail.Timeout, "the setup did not end within %v", setupTimeout))
		defer cancel()
		err := conn.Run(limited, ssh.Quote("bash", "-c", setupRunner, "agent-sessionizer", s.Status.Dir, string(plan.Run)), ssh.IO{})
		return errors.Join(err, gs.fetchSetupLog(ctx, *s, conn))
	})
	result := SetupResult{State: SetupDone, Took: time.Since(began).Milliseconds()}
	if err != nil {
		if ctx.Err() != nil {
			return false, err
		}
		result.State = SetupFailed
		if exit, ok := errors.AsType[*ssh.ExitError](err); ok {
			result.ExitCode, err = exit.Code, exit
		}
		gs.w.warn(ctx, s.ID, "agent-sessionizer logs --of setup "+s.Name, "the setup of the repository failed: %v", err)
	}
	return result.State == SetupDone && !again, record(result)
}

// setupRunner runs a script in a directory, in a process group of its own, after it has ended one
// that a keeper that died has started. Output goes to a file: a program that goes on in the background
// must not hold the connection. Usage: DIR SCRIPT
const setupRunner = `set -eu
cd -- "$1"
state=$HOME/.cache/agent-sessionizer
mkdir -p -- "$state"
if [ -s "$state/setup.group" ]; then
	kill -KILL -- "-$(cat "$state/setup.group")" 2>/dev/null || :
fi
code=0
setsid --wait bash -c 'echo $$ >"$1/setup.group"; exec bash -e -c "$2"' bash "$state" "$2" >"$state/setup.log" 2>&1 </dev/null || code=$?
rm -f -- "$state/setup.group"
exit "$code"`

// fetchSetupLog copies the output of the setup to the host, without the secrets of the session.
func (gs guestSetup) fetchSetupLog(ctx context.Context, s Session, conn *ssh.Client) error {
	log, err := os.OpenFile(gs.w.Sessions.SetupLog(s.ID), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fail.New(fail.Host, "open the log of the setup: %w", err)
	}
	defer log.Close()
	var to io.Writer = log
	if gs.w.Redact != nil {
		redacted := gs.w.Redact.Writer(log)
		defer redacted.Close()
		to = redacted
	}
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out := &pipe.Writer{W: to, Left: setupOutput, Cut: true}
	return conn.Run(limited, fmt.Sprintf("tail -c %d ~/.cache/agent-sessionizer/setup.log", setupOutput), ssh.IO{Stdout: out})
}

// saveResult keeps the result of a setup for later sessions of the repository. A failure is only a
// warning.
func (gs guestSetup) saveResult(ctx context.Context, s Session, plan setupPlan, src repo.Source) {
	k := gs.w.checkpointer()
	if ok, err := src.Renewable(ctx); !s.mayKeep() || !ok || err != nil || k.guestHasSecrets(s) {
		gs.w.Log.InfoContext(ctx, "the result of the setup is not kept for later sessions")
		return
	}
	bases := RepoBases{gs.w.Sessions.Config.Paths}
	b := RepoBase{
		RepoKey: s.RepoKey, Key: plan.key, Profile: s.Spec.Profile, VM: baseVM(plan.key), Checkpoint: plan.key[:checkpointDigits], From: s.origin(),
		Provisioned: s.Status.Provisioned, Program: s.Status.Program, CreatedAt: time.Now().UTC(), UsedAt: time.Now().UTC(), Branch: src.Branch,
	}
	err := gs.w.step(ctx, s.ID, "keep the result of the setup", func(ctx context.Context, p vm.Progress) error {
		d, err := k.driver()
		if err = errors.Join(err, k.checkSpace(s)); err != nil {
			return err
		}
		lock, free, err := lockfile.Try(bases.Lock(b.VM))
		if err != nil || !free { // another session keeps the same
			return err
		}
		defer lock.Unlock()
		// An existing VM may be one that a keeper that died has left.
		if err := bases.Remove(ctx, gs.w.Driver, b.VM); err != nil {
			return err
		}
		// The keeper removes the checkpoint once the session is ready, also if this one dies.
		if _, err := gs.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.removeUnlisted(b.Checkpoint) }); err != nil {
			return err
		}
		prepared := k.prepare(ctx, s)
		is, err := d.Checkpoint(ctx, s.VM(), b.Checkpoint, p)
		if err != nil {
			return err
		}
		b.Memory, b.Size = is.Memory && prepared, is.Size
		err = d.Fork(ctx, s.VM(), b.Checkpoint, vm.Spec{Name: b.VM, User: guestclient.User, Boot: guestclient.BootScript(), ExternalNet: s.Spec.Enforced}, b.Memory)
		if err == nil {
			err = bases.write(b)
		}
		if err != nil {
			return errors.Join(err, bases.Remove(context.WithoutCancel(ctx), gs.w.Driver, b.VM))
		}
		return bases.removeReplaced(ctx, gs.w.Driver, b)
	})
	if err != nil && ctx.Err() == nil {
		gs.w.warn(ctx, s.ID, fail.HintOf(err), "the result of the setup is not kept for later sessions: %v", err)
	}
}
