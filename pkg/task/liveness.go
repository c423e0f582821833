package task

import (
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
)

// These are the signs that an agent is stuck.
const (
	signNoOutput   = "no_output"
	signLowCPU     = "low_cpu"
	signNoProgress = "no_progress"
	signTimeout    = "timeout"
)

// stall is the gap between two checks that means that nothing was observed: this
// process was stopped, or the host slept.
const stall = 10 * time.Second

// liveness records when a running agent last gave each sign of life.
type liveness struct {
	limits  manifest.Hang
	timeout time.Duration // how long without output until the agent counts as hung; 0 means never

	output, progress, busy time.Time
	checked                time.Time
	beat                   time.Time
	cpu                    int64
	reported               map[string]bool
}

// newLiveness starts with an agent that was observed to be quiet for the given time.
func newLiveness(l manifest.Lifecycle, quiet time.Duration, now time.Time) *liveness {
	return &liveness{
		limits: l.Hang, timeout: time.Duration(l.HangTimeout),
		output: now.Add(-quiet), progress: now, busy: now, checked: now, reported: map[string]bool{},
	}
}

// markOutput records output.
func (v *liveness) markOutput(now time.Time) {
	v.output = now
	delete(v.reported, signNoOutput)
	delete(v.reported, signTimeout)
}

// markProgress records progress: a tool call, a message.
func (v *liveness) markProgress(now time.Time) {
	v.progress = now
	delete(v.reported, signNoProgress)
}

// markCPU records how much processor time the agent has used in total.
func (v *liveness) markCPU(now time.Time, cpuMillis int64) {
	if !v.beat.IsZero() {
		passed := now.Sub(v.beat)
		if passed < time.Second {
			return // too short to measure; the next call measures from the same beat
		}
		if share := time.Duration(cpuMillis-v.cpu) * time.Millisecond * 100 / passed; int(share) >= v.limits.LowCPUPercent {
			v.busy = now
			delete(v.reported, signLowCPU)
		}
	}
	v.beat, v.cpu = now, cpuMillis
}

// pause counts the time until now as if the agent had been active: it waits for a person.
func (v *liveness) pause(now time.Time) {
	v.markOutput(now)
	v.markProgress(now)
	v.busy = now
	delete(v.reported, signLowCPU)
}

// check returns the new signs, and whether the agent counts as hung.
func (v *liveness) check(now time.Time) (news []Hang, hung bool) {
	if gap := now.Sub(v.checked); gap > stall {
		for _, at := range []*time.Time{&v.output, &v.progress, &v.busy} {
			*at = at.Add(gap)
		}
		v.beat = time.Time{}
	}
	v.checked = now
	for _, s := range []struct {
		sign  string
		since time.Time
		limit time.Duration
	}{
		{signNoOutput, v.output, time.Duration(v.limits.NoOutput)},
		{signLowCPU, v.busy, time.Duration(v.limits.LowCPU)},
		{signNoProgress, v.progress, time.Duration(v.limits.NoProgress)},
		{signTimeout, v.output, v.timeout},
	} {
		age := now.Sub(s.since)
		if s.limit <= 0 || age < s.limit || v.reported[s.sign] {
			continue
		}
		v.reported[s.sign] = true
		news = append(news, Hang{Sign: s.sign, SinceMS: age.Milliseconds()})
		hung = hung || s.sign == signTimeout
	}
	return news, hung
}

// crashAction is the reaction to a VM that went away under a running agent.
type crashAction int

const (
	actionRestart crashAction = iota
	actionRebuild
	actionGiveUp
)

// afterCrash decides how to react when an agent that ran for uptime crashes or hangs,
// and returns the restarts that count from then on.
func afterCrash(c manifest.CrashLoop, restarts []time.Time, rebuilds int, uptime time.Duration, now time.Time) (crashAction, []time.Time) {
	if uptime >= time.Duration(c.HealthyAfter) {
		restarts = nil // the VM was healthy in between
	}
	var recent []time.Time
	for _, at := range restarts {
		if age := now.Sub(at); age >= 0 && age < time.Duration(c.Window) {
			recent = append(recent, at)
		}
	}
	switch {
	case len(recent) < c.Restarts:
		return actionRestart, append(recent, now)
	case rebuilds < c.Rebuilds:
		return actionRebuild, nil
	}
	return actionGiveUp, recent
}
