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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
)

// AheadCommand is the hidden command that makes in the background what lets the
// next session start faster: AheadCommand IMAGE CPUS MEMORY DISK (bytes).
const AheadCommand = "prepare"

const (
	aheadLog     = "prepare.log"    // in the state directory; the last run's
	aheadMemory  = 2 << 30          // what its VM takes at most, besides the reserve
	aheadAgainIn = 6 * time.Hour    // after a failure
	aheadProveIn = 10 * time.Minute // after one that has left an image to be proved
)

// ahead starts the command, unless there is nothing to make, somebody makes it
// already, it has just failed, or the host has no room. A session does not wait
// for it, nor fail with it.
func (w *Worker) ahead(ctx context.Context, s Session) {
	if why, err := w.startAhead(ctx, s); err != nil {
		w.Log.ErrorContext(ctx, "prepare in the background", "error", err)
	} else if why != "" {
		w.Log.InfoContext(ctx, "nothing is prepared in the background", "why", why)
	}
}

func (w *Worker) startAhead(ctx context.Context, s Session) (why string, err error) {
	r := s.Spec.Resources
	best, err := w.Golden.Best(ctx, w.Config.Prepare, s.Spec.Image, Arch(), SizeOf(r))
	if err != nil || !best.Lacks {
		return "nothing is lacking", err
	}
	name := image.Golden(s.Spec.Image)
	underway, err := w.Golden.Images.Underway()
	if err != nil {
		return "", err
	}
	if slices.ContainsFunc(underway, func(m image.Making) bool { return m.Name == name }) {
		return "it is being made", nil
	}
	if f, ok := w.Golden.Images.Failure(name); ok && time.Since(f.At) < againIn(f) {
		return "it failed at " + f.At.Format(time.TimeOnly), nil
	}
	host, err := measureHost(w.Config.Paths.Data)
	if err != nil {
		return "", err
	}
	need := aheadMemory + w.Config.Limits.MemoryReserve
	if best.Spares.Name != "" { // it stays
		need = r.Memory + w.Config.Limits.MemoryReserve
		if onBattery(ctx) {
			return "the host runs on its battery", nil
		}
	}
	if host.FreeMemory < need {
		return fmt.Sprintf("%v of memory are free, it takes %v", host.FreeMemory, need), nil
	}
	if host.FreeDisk < w.Config.Limits.DiskReserve {
		return fmt.Sprintf("%v are free on the disk", host.FreeDisk), nil
	}
	return "", w.spawnAhead(ctx, s.Spec.Image, r)
}

// againIn is how long nothing is made after a failure.
func againIn(f image.Failure) time.Duration {
	if f.Kept {
		return aheadProveIn
	}
	return aheadAgainIn
}

func (w *Worker) spawnAhead(ctx context.Context, source string, r config.Resources) error {
	log, err := os.OpenFile(filepath.Join(w.Config.Paths.State, aheadLog), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	return w.Detach(ctx, log, AheadCommand, source, fmt.Sprint(r.CPUs), fmt.Sprint(int64(r.Memory)), fmt.Sprint(int64(r.Disk)))
}

// onBattery reports whether the host is known to run on its battery.
func onBattery(ctx context.Context) bool {
	if runtime.GOOS == "darwin" {
		out, err := exec.CommandContext(ctx, "pmset", "-g", "batt").Output()
		return err == nil && strings.Contains(string(out), "'Battery Power'")
	}
	return batteryOf("/sys/class/power_supply")
}

// batteryOf reads Linux's own account: there are mains, and none is plugged in.
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
