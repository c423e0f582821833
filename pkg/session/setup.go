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
	"path"
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
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	setupTimeout = time.Hour
	setupOutput  = 4 << 20 // bytes that are kept
)

// SetupState is how far a step of a setup got.
type SetupState string

// The states of a step.
const (
	SetupRunning SetupState = "running"
	SetupDone    SetupState = "done"
	SetupFailed  SetupState = "failed"
	SetupReused  SetupState = "reused" // the session started from a saved setup
)

// The steps of a setup, in their order. Each has a log of its own.
const (
	SetupScript       = "setup"
	SetupDevcontainer = "devcontainer"
	SetupServices     = "services"
)

// SetupOutcome is the last outcome of a step of a setup.
type SetupOutcome struct {
	Step     string     `json:"step"`
	State    SetupState `json:"state"`
	ExitCode int        `json:"exit_code,omitempty"`
	Took     int64      `json:"took_ms,omitempty"`
}

// setupPlan is the steps of a session's setup, and the key under which the setup is saved.
type setupPlan struct {
	Steps     []setupStep `json:"steps,omitempty"`
	Key       string      `json:"key,omitempty"` // changes with everything that the setup depends on
	Branch    string      `json:"branch,omitempty"`
	Updatable bool        `json:"renewable,omitempty"` // whether the checkout can be updated for later sessions
}

// setupStep is a named bash script.
type setupStep struct {
	Name      string `json:"name"`
	Script    string `json:"script"`
	EveryBoot bool   `json:"every_boot,omitempty"` // not only once
}

//go:embed guest/services.sh
var servicesScript string

func setupSteps(of config.Setup) (steps []setupStep) {
	if of.Run != "" {
		steps = append(steps, setupStep{Name: SetupScript, Script: string(of.Run)})
	}
	if of.Devcontainer {
		steps = append(steps, setupStep{Name: SetupDevcontainer, Script: "devcontainer up --workspace-folder .", EveryBoot: true})
	}
	if of.Services != "" {
		steps = append(steps, setupStep{Name: SetupServices, Script: "file=" + ssh.Quote(string(of.Services)) + "\n" + servicesScript, EveryBoot: true})
	}
	return steps
}

// failedSetupSteps returns "NAME failed" for each step of the setup that failed.
func (v View) failedSetupSteps() (failed []string) {
	for _, r := range v.Setup {
		if r.State == SetupFailed {
			failed = append(failed, r.Step+" failed")
		}
	}
	return failed
}

// planSetup returns the setup of a new session.
func (w *Worker) planSetup(ctx context.Context, s Session, set config.Settings, of fetchedRepo) (setupPlan, error) {
	src := of.source
	setup := set.Setup
	if setup.IsZero() && of.project != nil {
		setup = of.project.Setup
	}
	if setup.IsZero() {
		return setupPlan{}, nil
	}
	steps := setupSteps(setup)
	scripts, err := json.Marshal(steps)
	if err != nil {
		return setupPlan{}, err
	}
	from, err := w.Golden.Images.Find(s.Spec.Image, s.Arch())
	if err != nil {
		return setupPlan{}, err
	}
	image, err := w.Golden.Key(from)
	if err != nil {
		return setupPlan{}, err
	}
	var files []string
	for _, name := range setup.Files {
		files = append(files, path.Clean(string(name)))
	}
	entries, err := src.Entries(ctx, files...)
	if err != nil {
		return setupPlan{}, err
	}
	h := sha256.New()
	r := s.Spec.Resources
	// The key includes the branch, because the setup runs its code, and whether the source is a local
	// clone, because only the user writes the branches of one.
	parts := []string{
		"1", s.RepoKey, set.Profile, string(set.Network.Mode), image, fmt.Sprint(r.CPUs, int64(r.Memory), int64(r.Disk), s.Spec.Enforced),
		src.Branch, fmt.Sprint(src.Local), string(scripts),
	}
	for _, name := range files {
		if entries[name] == "" {
			w.warn(ctx, s.ID, "", "setup.files: %s is not in the commit", name)
		}
		parts = append(parts, name, entries[name])
	}
	for _, text := range parts {
		fmt.Fprintf(h, "%d:%s\n", len(text), text)
	}
	plan := setupPlan{Steps: steps, Key: hex.EncodeToString(h.Sum(nil)), Branch: src.Branch}
	plan.Updatable, err = src.Updatable(ctx)
	plan.Updatable = plan.Updatable && src.Branch != ""
	return plan, err
}

// mayUseSavedSetup reports whether s may start from a saved setup.
func (s Session) mayUseSavedSetup() bool {
	return !s.Spec.WithChanges && s.Spec.Fork == nil && s.Status.Workspace == ""
}

// whyNotSaved returns why the setup of s must not be saved for later sessions, "" if it may be.
func (s Session) whyNotSaved(plan setupPlan, fresh, secrets bool) string {
	switch {
	case !fresh:
		return "an earlier start of the session was interrupted"
	case s.Spec.WithChanges:
		return "the session has uncommitted changes"
	case s.Status.Workspace != "":
		return "the session has a workspace"
	case s.Task != "" || s.Spec.Within != nil || s.Spec.Restricted:
		return "the session was not opened by the user"
	case s.Spec.Repo.Commit != "":
		return "the session is of a commit, not of a branch"
	case s.origin() == golden.FromGeneric:
		return "the VM did not start from a golden image"
	case !plan.Updatable:
		return "the repository is empty, shallow, or not on a branch"
	case secrets:
		return "the guest has secrets"
	}
	return ""
}

// SetupLog returns the path of the output of a step of a session's setup.
func (m *Manager) SetupLog(id, step string) string {
	return filepath.Join(m.Config.Paths.SessionDir(id), step+".log")
}

// prepareRepository runs all steps in a new session, and saves the setup unless the session started from
// a saved one or the script failed. In other sessions it runs only the steps marked EveryBoot. A failed
// step does not fail the session. fresh is whether this start created the VM: an older one may contain
// what the user put there.
func (gs guestSetup) prepareRepository(ctx context.Context, s *Session, conn *ssh.Client, plan setupPlan, fresh bool) error {
	isNew, reused := s.isUntouched(), s.Status.FromSetup != nil
	save, worked := isNew && !reused, false
	for _, step := range plan.Steps {
		result := outcomeOf(s.Status.Setup, step.Name)
		switch {
		case !isNew && !step.EveryBoot:
			continue
		case isNew && reused && !step.EveryBoot:
			if err := gs.record(ctx, s, SetupOutcome{Step: step.Name, State: SetupReused}); err != nil {
				return err
			}
			continue
		case isNew && result.State != "" && result.State != SetupRunning: // an earlier keeper has done it
			continue
		}
		done, err := gs.runSetupStep(ctx, s, conn, step)
		if err != nil {
			return err
		}
		save = save && (done || step.EveryBoot)
		worked = worked || done
	}
	if save && worked {
		gs.saveSetup(ctx, *s, plan, fresh)
	}
	return nil
}

// runSetupStep runs one step of a setup. While it runs, watchGateway forwards the gateway's questions to
// the user.
func (gs guestSetup) runSetupStep(ctx context.Context, s *Session, conn *ssh.Client, step setupStep) (done bool, err error) {
	asking, stop := context.WithCancel(ctx)
	var asked sync.WaitGroup
	defer func() { stop(); asked.Wait() }()
	settings, now := gs.w.Sessions.Config, *s
	asked.Go(func() { gs.w.watchGateway(asking, now, func() *config.Config { return settings }) })
	if err := gs.record(ctx, s, SetupOutcome{Step: step.Name, State: SetupRunning}); err != nil {
		return false, err
	}
	doing := "set up the repository"
	if step.EveryBoot {
		doing = "start the " + step.Name
	}
	began := time.Now()
	err = gs.w.step(ctx, s.ID, doing, func(ctx context.Context, p vm.Progress) error {
		first, _, _ := strings.Cut(strings.TrimSpace(step.Script), "\n")
		p(first)
		limited, cancel := context.WithTimeoutCause(ctx, setupTimeout+time.Minute, fail.New(fail.Timeout, "the script did not finish within %v", setupTimeout))
		defer cancel()
		err := conn.Run(limited, ssh.Quote("bash", "-c", setupRunner, "agent-sessionizer", s.Status.Dir, step.Name, step.Script, fmt.Sprint(setupTimeout.Seconds())), ssh.IO{})
		return errors.Join(err, gs.fetchSetupLog(ctx, *s, conn, step.Name))
	})
	result := SetupOutcome{Step: step.Name, State: SetupDone, Took: time.Since(began).Milliseconds()}
	if err != nil {
		if !isGuestFault(ctx, err) {
			return false, err
		}
		result.State = SetupFailed
		if exit, ok := errors.AsType[*ssh.ExitError](err); ok {
			result.ExitCode, err = exit.Code, exit
		}
		gs.w.warn(ctx, s.ID, fmt.Sprintf("agent-sessionizer logs --of %s %s", step.Name, s.Name), "%s: %v", doing, err)
	}
	return result.State == SetupDone, gs.record(ctx, s, result)
}

func outcomeOf(all []SetupOutcome, step string) SetupOutcome {
	i := slices.IndexFunc(all, func(r SetupOutcome) bool { return r.Step == step })
	if i < 0 {
		return SetupOutcome{}
	}
	return all[i]
}

// record stores the outcome of a step, even if ctx is done.
func (gs guestSetup) record(ctx context.Context, s *Session, r SetupOutcome) (err error) {
	*s, err = gs.w.Sessions.updateStatus(context.WithoutCancel(ctx), s.ID, store.Event{}, func(f *Status) {
		f.Setup = append(slices.DeleteFunc(slices.Clone(f.Setup), func(old SetupOutcome) bool { return old.Step == r.Step }), r)
	})
	return err
}

// setupRunner runs a script in a directory, in its own process group. It first kills the process group
// that an interrupted attempt left. Output goes to a file, so that a background process cannot hold the
// SSH connection open. Usage: DIR NAME SCRIPT SECONDS
const setupRunner = `set -eu
cd -- "$1"
state=$HOME/.cache/agent-sessionizer
mkdir -p -- "$state"
group=$state/$2-$(cat /proc/sys/kernel/random/boot_id).group
if [ -s "$group" ]; then
	kill -KILL -- "-$(cat "$group")" 2>/dev/null || :
fi
code=0
setsid --wait bash -c 'echo $$ >"$1"; exec timeout -k 10 "$3" bash -e -c "$2"' bash "$group" "$3" "$4" >"$state/$2.log" 2>&1 </dev/null || code=$?
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

// saveSetup saves the setup for later sessions of the repository. A failure is only a warning.
func (gs guestSetup) saveSetup(ctx context.Context, s Session, plan setupPlan, fresh bool) {
	k := gs.w.checkpointer()
	if why := s.whyNotSaved(plan, fresh, k.guestHasSecrets(s)); why != "" {
		gs.w.warn(ctx, s.ID, "", "the setup is not saved for later sessions: %s", why)
		return
	}
	saved := SavedSetups{gs.w.Sessions.Config.Paths}
	b := SavedSetup{
		RepoKey: s.RepoKey, Key: plan.Key, Profile: s.Spec.Profile, VM: setupVM(plan.Key), Checkpoint: plan.Key[:checkpointDigits], From: s.origin(),
		Provisioned: s.Status.Provisioned, Program: s.Status.Program, CreatedAt: time.Now().UTC(), UsedAt: time.Now().UTC(), Branch: plan.Branch,
	}
	err := gs.w.step(ctx, s.ID, "save the setup for later sessions", func(ctx context.Context, p vm.Progress) error {
		d, err := k.driver()
		if err = errors.Join(err, k.checkSpace(s)); err != nil {
			return err
		}
		lock, free, err := lockfile.Try(saved.Lock(b.VM))
		if err != nil || !free { // another session is saving the same setup
			return err
		}
		defer lock.Unlock()
		// A crashed keeper may have left the VM.
		if err := saved.Remove(ctx, gs.w.Driver, b.VM); err != nil {
			return err
		}
		// Once the session is ready, its keeper removes the checkpoint, even if this one crashes.
		if _, err := gs.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.removeUnlisted(b.Checkpoint) }); err != nil {
			return err
		}
		prepared := k.prepare(ctx, s)
		is, err := d.Checkpoint(ctx, s.VM(), b.Checkpoint, p)
		if err != nil {
			return err
		}
		// Containers that resumed would have the certificates and placeholders of this session.
		everyBoot := slices.ContainsFunc(plan.Steps, func(step setupStep) bool { return step.EveryBoot })
		b.Memory, b.Size = is.Memory && prepared && !everyBoot, is.Size
		err = d.Fork(ctx, s.VM(), b.Checkpoint, vm.Spec{Name: b.VM, User: guestclient.User, Boot: guestclient.BootScript(), ExternalNet: s.Spec.Enforced}, b.Memory)
		if err == nil {
			err = saved.write(b)
		}
		if err != nil {
			return errors.Join(err, saved.Remove(context.WithoutCancel(ctx), gs.w.Driver, b.VM))
		}
		if err := saved.removeReplaced(ctx, gs.w.Driver, b); err != nil {
			gs.w.Log.WarnContext(ctx, "failed to remove a saved setup that was replaced", "error", err)
		}
		return nil
	})
	if err != nil && ctx.Err() == nil {
		gs.w.warn(ctx, s.ID, fail.HintOf(err), "save the setup for later sessions: %v", err)
	}
}
