package session

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
)

// PrepareCommand is the hidden command that prepares in the background what lets the
// next session start faster: PrepareCommand IMAGE CPUS MEMORY DISK ARCH (memory and disk
// in bytes).
const PrepareCommand = "prepare"

const (
	prepareLog     = "prepare.log"    // in the state directory; holds the log of the last run
	prepareMemory  = 2 << 30          // the most memory its VM uses, in addition to the reserve
	prepareRetryIn = 6 * time.Hour    // the pause after a failure
	proveRetryIn   = 10 * time.Minute // the pause after a failure that left an image still to be proved
)

// prepareNext starts the prepare command in the background. It does nothing when nothing is
// missing, when another process is already making it, right after a failure, or when
// the host lacks capacity. A session neither waits for the command nor fails with it.
func (p standbys) prepareNext(ctx context.Context, s Session) {
	if why, err := p.startPrepare(ctx, s); err != nil {
		p.w.Log.ErrorContext(ctx, "failed to start background preparation", "error", err)
	} else if why != "" {
		p.w.Log.InfoContext(ctx, "background preparation skipped", "reason", why)
	}
}

func (p standbys) startPrepare(ctx context.Context, s Session) (why string, err error) {
	r := s.Spec.Resources
	best, err := p.w.Golden.Best(ctx, p.w.Sessions.Config.Prepare, s.Spec.Image, s.Arch(), SizeOf(r))
	if err != nil || !best.MissingStandbys {
		return "nothing is missing", err
	}
	name := image.Golden(s.Spec.Image)
	underway, err := p.w.Golden.Images.Underway()
	if err != nil {
		return "", err
	}
	if slices.ContainsFunc(underway, func(m image.Making) bool { return m.Name == name }) {
		return "another process is preparing it", nil
	}
	if f, ok := p.w.Golden.Images.Failure(name); ok && time.Since(f.At) < retryIn(f) {
		return "the last attempt failed at " + f.At.Format(time.TimeOnly), nil
	}
	host, err := MeasureHost(p.w.Sessions.Config.Paths.Data)
	if err != nil {
		return "", err
	}
	need := prepareMemory + p.w.Sessions.Config.Limits.MemoryReserve
	if best.Standbys.Name != "" { // a standby VM keeps its memory
		need = r.Memory + p.w.Sessions.Config.Limits.MemoryReserve
		if onBattery(ctx) {
			return "the host is on battery power", nil
		}
	}
	if host.FreeMemory < need {
		return fmt.Sprintf("%v of memory free, %v needed", host.FreeMemory, need), nil
	}
	if host.FreeDisk < p.w.Sessions.Config.Limits.DiskReserve {
		return fmt.Sprintf("%v free on the disk", host.FreeDisk), nil
	}
	return "", p.spawnPrepare(ctx, s)
}

// retryIn returns how long to wait after a failure before trying again.
func retryIn(f image.Failure) time.Duration {
	if f.Kept {
		return proveRetryIn
	}
	return prepareRetryIn
}

func (p standbys) spawnPrepare(ctx context.Context, s Session) error {
	r := s.Spec.Resources
	log, err := os.OpenFile(filepath.Join(p.w.Sessions.Config.Paths.State, prepareLog), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	return lifecycle.Detach(ctx, p.w.Sessions.Self, log, PrepareCommand, s.Spec.Image, fmt.Sprint(r.CPUs), fmt.Sprint(int64(r.Memory)), fmt.Sprint(int64(r.Disk)), s.Arch())
}

// onBattery reports whether the host is known to run on battery power.
func onBattery(ctx context.Context) bool {
	if runtime.GOOS == "darwin" {
		out, err := exec.CommandContext(ctx, "pmset", "-g", "batt").Output()
		return err == nil && drawsFromBattery(string(out))
	}
	return batteryOf("/sys/class/power_supply")
}

// drawsFromBattery reads the output of macOS's "pmset -g batt".
func drawsFromBattery(out string) bool {
	first, _, _ := strings.Cut(out, "\n")
	return strings.Contains(first, "'Battery Power'")
}

// batteryOf reads Linux's power supplies below dir. It reports true when mains
// supplies exist and none of them is online.
func batteryOf(dir string) bool {
	found, err := filepath.Glob(filepath.Join(dir, "*", "online"))
	if err != nil {
		return false
	}
	mains := 0
	for _, file := range found {
		if kind, err := os.ReadFile(filepath.Join(filepath.Dir(file), "type")); err != nil || strings.TrimSpace(string(kind)) != "Mains" {
			continue
		}
		if online, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(online)) != "0" {
			return false
		}
		mains++
	}
	return mains > 0
}
