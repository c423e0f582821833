package session

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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

// SetupState is the state of a step of a repository's setup in a session.
type SetupState string

// The states of a step.
const (
	SetupRunning SetupState = "running"
	SetupDone    SetupState = "done"
	SetupFailed  SetupState = "failed"
	SetupKept    SetupState = "kept" // the session started from the result of an earlier one
)

// The steps of a setup, in their order. Each has a log of its own.
const (
	SetupScript       = "setup"
	SetupDevcontainer = "devcontainer"
	SetupServices     = "services"
)

// SetupResult is the last result of a step of a repository's setup.
type SetupResult struct {
	Step     string     `json:"step"`
	State    SetupState `json:"state"`
	ExitCode int        `json:"exit_code,omitempty"`
	Took     int64      `json:"took_ms,omitempty"`
}

// setupPlan is the setup of a session.
type setupPlan struct {
	Steps     []setupStep `json:"steps,omitempty"`
	Key       string      `json:"key,omitempty"` // changes with everything that the result depends on
	Branch    string      `json:"branch,omitempty"`
	Renewable bool        `json:"renewable,omitempty"` // whether the result can serve later sessions
}

// setupStep is a script.
type setupStep struct {
	Name   string `json:"name"`
	Script string `json:"script"`
	Starts bool   `json:"starts,omitempty"` // it starts programs, and is repeated whenever the VM boots
}

//go:embed guest/services.sh
var servicesScript string

func setupSteps(of config.Setup) (steps []setupStep) {
	if of.Run != "" {
		steps = append(steps, setupStep{Name: SetupScript, Script: string(of.Run)})
	}
	if of.Devcontainer {
		steps = append(steps, setupStep{Name: SetupDevcontainer, Script: "devcontainer up --workspace-folder .", Starts: true})
	}
	if of.Services != "" {
		steps = append(steps, setupStep{Name: SetupServices, Script: "file=" + ssh.Quote(string(of.Services)) + "\n" + servicesScript, Starts: true})
	}
	return steps
}

// FailedSetup says which steps of the setup failed.
func (v View) FailedSetup() (failed []string) {
	for _, r := range v.Setup {
		if r.State == SetupFailed {
			failed = append(failed, r.Step+" failed")
		}
	}
	return failed
}

// planSetup returns the setup of a new session. The source has been resolved.
func (w *Worker) planSetup(ctx context.Context, s Session, set config.Settings, src repo.Source) (setupPlan, error) {
	setup := set.Setup
	if setup.IsZero() {
		text, ok, err := src.ReadFile(ctx, config.ProjectFile, 64<<10)
		if err != nil || !ok {
			return setupPlan{}, err
		}
		project, err := config.ParseProject(s.Repo+":"+config.ProjectFile, text)
		if err != nil {
			return setupPlan{}, err
		}
		setup = project.Setup
	}
	if setup.IsZero() {
		return setupPlan{}, nil
	}
	steps := setupSteps(setup)
	scripts, err := json.Marshal(steps)
	if err != nil {
		return setupPlan{}, err
	}
	from, err := w.Golden.Images.Find(s.Spec.Image, Arch())
	if err != nil {
		return setupPlan{}, err
	}
	image, err := w.Golden.Key(from)
	if err != nil {
		return setupPlan{}, err
	}
	var files []string
	for _, name := range setup.Files {
		files = append(files, string(name))
	}
	entries, err := src.Entries(ctx, files...)
	if err != nil {
		return setupPlan{}, err
	}
	h := sha256.New()
	r := s.Spec.Resources
	// The branch, because the setup runs code of the branch. A local clone, because its branches are
	// the user's own.
	for _, text := range []string{
		"1", s.RepoKey, set.Profile, string(set.Network.Mode), image, fmt.Sprint(r.CPUs, int64(r.Memory), int64(r.Disk), s.Spec.Enforced),
		src.Branch, fmt.Sprint(src.Local), string(scripts), entries,
	} {
		fmt.Fprintf(h, "%d:%s\n", len(text), text)
	}
	plan := setupPlan{Steps: steps, Key: hex.EncodeToString(h.Sum(nil)), Branch: src.Branch}
	plan.Renewable, err = src.Renewable(ctx)
	return plan, err
}

// mayUseBase reports whether s may start from the kept result of a setup.
func (s Session) mayUseBase() bool { return !s.Spec.WithChanges && s.Spec.Fork == nil }

// mayKeep reports whether the result of the setup of s may be kept for later sessions. It may not if
// the setup ran code that is not a branch's, or an agent asked for it.
func (s Session) mayKeep() bool {
	return s.mayUseBase() && s.Task == "" && s.Spec.Within == nil && !s.Spec.Restricted && s.Spec.Repo.Commit == "" && s.origin() != golden.FromGeneric
}

// SetupLog returns the path of the output of a step of a session's setup.
func (m *Manager) SetupLog(id, step string) string {
	return filepath.Join(m.Config.Paths.SessionDir(id), step+".log")
}

// prepareRepository runs the setup of a new session, and keeps its result unless that was kept before
// or the script failed. In a session that is not new it runs what must run at each boot. If a step fails, the session can be
// used nevertheless.
func (gs guestSetup) prepareRepository(ctx context.Context, s *Session, conn *ssh.Client, plan setupPlan) error {
	isNew, kept := s.isNew(), s.Status.FromBase != nil
	keep, worked := isNew && !kept, false
	for _, step := range plan.Steps {
		result := resultOf(s.Status.Setup, step.Name)
		switch {
		case !isNew && !step.Starts:
			continue
		case isNew && kept && !step.Starts:
			if err := gs.record(ctx, s, SetupResult{Step: step.Name, State: SetupKept}); err != nil {
				return err
			}
			continue
		case isNew && result.State != "" && result.State != SetupRunning: // an earlier keeper has done it
			keep = false
			continue
		}
		done, err := gs.setUp(ctx, s, conn, step)
		if err != nil {
			return err
		}
		keep = keep && (done || step.Starts) && result.State == ""
		worked = worked || done
	}
	if keep && worked {
		gs.saveResult(ctx, *s, plan)
	}
	return nil
}

// setUp runs a step of a repository's setup. Meanwhile the user is asked what the gateway wants to
// know.
func (gs guestSetup) setUp(ctx context.Context, s *Session, conn *ssh.Client, step setupStep) (done bool, err error) {
	asking, stop := context.WithCancel(ctx)
	var asked sync.WaitGroup
	defer func() { stop(); asked.Wait() }()
	settings, now := gs.w.Sessions.Config, *s
	asked.Go(func() { gs.w.watchGateway(asking, now, func() *config.Config { return settings }) })
	if err := gs.record(ctx, s, SetupResult{Step: step.Name, State: SetupRunning}); err != nil {
		return false, err
	}
	doing, what := "set up the repository", "the setup of the repository"
	if step.Starts {
		doing, what = "start the "+step.Name, "the start of the "+step.Name
	}
	began := time.Now()
	err = gs.w.step(ctx, s.ID, doing, func(ctx context.Context, p vm.Progress) error {
		first, _, _ := strings.Cut(strings.TrimSpace(step.Script), "\n")
		p(first)
		limited, cancel := context.WithTimeoutCause(ctx, setupTimeout, fail.New(fail.Timeout, "it did not end within %v", setupTimeout))
		defer cancel()
		err := conn.Run(limited, ssh.Quote("bash", "-c", setupRunner, "agent-sessionizer", s.Status.Dir, step.Name, step.Script), ssh.IO{})
		return errors.Join(err, gs.fetchSetupLog(ctx, *s, conn, step.Name))
	})
	result := SetupResult{Step: step.Name, State: SetupDone, Took: time.Since(began).Milliseconds()}
	if err != nil {
		if ctx.Err() != nil {
			return false, err
		}
		result.State = SetupFailed
		if exit, ok := errors.AsType[*ssh.ExitError](err); ok {
			result.ExitCode, err = exit.Code, exit
		}
		gs.w.warn(ctx, s.ID, fmt.Sprintf("agent-sessionizer logs --of %s %s", step.Name, s.Name), "%s failed: %v", what, err)
	}
	return result.State == SetupDone, gs.record(ctx, s, result)
}

func resultOf(all []SetupResult, step string) SetupResult {
	i := slices.IndexFunc(all, func(r SetupResult) bool { return r.Step == step })
	if i < 0 {
		return SetupResult{}
	}
	return all[i]
}

// record notes the result of a step, also if ctx has ended.
func (gs guestSetup) record(ctx context.Context, s *Session, r SetupResult) (err error) {
	*s, err = gs.w.Sessions.updateStatus(context.WithoutCancel(ctx), s.ID, store.Event{}, func(f *Status) {
		f.Setup = append(slices.DeleteFunc(slices.Clone(f.Setup), func(old SetupResult) bool { return old.Step == r.Step }), r)
	})
	return err
}

// setupRunner runs a script in a directory, in a process group of its own, after it has ended one
// that a keeper that died has started. Output goes to a file: a program that goes on in the background
// must not hold the connection. Usage: DIR NAME SCRIPT
const setupRunner = `set -eu
cd -- "$1"
state=$HOME/.cache/agent-sessionizer
mkdir -p -- "$state"
group=$state/$2.group
if [ -s "$group" ]; then
	kill -KILL -- "-$(cat "$group")" 2>/dev/null || :
fi
code=0
setsid --wait bash -c 'echo $$ >"$1"; exec bash -e -c "$2"' bash "$group" "$3" >"$state/$2.log" 2>&1 </dev/null || code=$?
rm -f -- "$group"
exit "$code"`

// fetchSetupLog copies the output of a step to the host, without the secrets of the session.
func (gs guestSetup) fetchSetupLog(ctx context.Context, s Session, conn *ssh.Client, step string) error {
	log, err := os.OpenFile(gs.w.Sessions.SetupLog(s.ID, step), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
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
	return conn.Run(limited, fmt.Sprintf("tail -c %d ~/.cache/agent-sessionizer/%s.log", setupOutput, step), ssh.IO{Stdout: out})
}

// saveResult keeps the result of a setup for later sessions of the repository. A failure is only a
// warning.
func (gs guestSetup) saveResult(ctx context.Context, s Session, plan setupPlan) {
	k := gs.w.checkpointer()
	if !s.mayKeep() || !plan.Renewable || k.guestHasSecrets(s) {
		gs.w.Log.InfoContext(ctx, "the result of the setup is not kept for later sessions")
		return
	}
	bases := RepoBases{gs.w.Sessions.Config.Paths}
	b := RepoBase{
		RepoKey: s.RepoKey, Key: plan.Key, Profile: s.Spec.Profile, VM: baseVM(plan.Key), Checkpoint: plan.Key[:checkpointDigits], From: s.origin(),
		Provisioned: s.Status.Provisioned, Program: s.Status.Program, CreatedAt: time.Now().UTC(), UsedAt: time.Now().UTC(), Branch: plan.Branch,
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
