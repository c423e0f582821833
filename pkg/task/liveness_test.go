package task

import (
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
)

func d(text string) measure.Duration {
	v, err := time.ParseDuration(text)
	if err != nil {
		panic(err)
	}
	return measure.Duration(v)
}

func defaultLifecycle() manifest.Lifecycle {
	return manifest.Lifecycle{
		HangTimeout: d("30m"), Hang: manifest.Hang{NoOutput: d("10m"), LowCPUPercent: 5, LowCPU: d("15m"), NoProgress: d("20m")},
		CrashLoop: manifest.CrashLoop{Restarts: 5, Window: d("10m"), HealthyAfter: d("60s"), Rebuilds: 3},
	}
}

// live simulates time second by second, as the keeper sees it. It returns the minute
// in which each sign appeared.
func live(v *liveness, from time.Time, minutes int, each func(minute, second int, now time.Time)) (signs map[string]int, hungAt int) {
	signs = map[string]int{}
	for s := range minutes * 60 {
		now := from.Add(time.Duration(s) * time.Second)
		if each != nil {
			each(s/60, s%60, now)
		}
		news, hung := v.check(now)
		for _, n := range news {
			signs[n.Sign] = s / 60
		}
		if hung && hungAt == 0 {
			hungAt = s / 60
		}
	}
	return signs, hungAt
}

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestSilenceIsTold(t *testing.T) {
	v := newLiveness(defaultLifecycle(), 0, epoch)
	signs, hung := live(v, epoch, 45, nil)
	want := map[string]int{signNoOutput: 10, signLowCPU: 15, signNoProgress: 20, signTimeout: 30}
	for sign, at := range want {
		if signs[sign] != at {
			t.Errorf("minutes until %s = %d, want %d", sign, signs[sign], at)
		}
	}
	if hung != 30 {
		t.Errorf("hung after %d minutes, want 30", hung)
	}
}

func TestLifeIsNotHang(t *testing.T) {
	v := newLiveness(defaultLifecycle(), 0, epoch)
	var cpu int64
	signs, hung := live(v, epoch, 120, func(minute, second int, now time.Time) {
		if second == 0 {
			cpu += 4000 // about 7 % of a processor
			v.markCPU(now, cpu)
		}
		if second == 0 && minute%9 == 0 {
			v.markOutput(now)
			v.markProgress(now)
		}
	})
	if len(signs) != 0 || hung != 0 {
		t.Errorf("signs = %v, hung at %d, want none, 0", signs, hung)
	}
}

func TestAnIdleProcessorIsTold(t *testing.T) {
	v := newLiveness(defaultLifecycle(), 0, epoch)
	signs, _ := live(v, epoch, 20, func(_, second int, now time.Time) {
		if second%30 == 0 {
			v.markOutput(now)
			v.markProgress(now)
			v.markCPU(now, now.Sub(epoch).Milliseconds()*4/100)
		}
	})
	if len(signs) != 1 || signs[signLowCPU] != 15 {
		t.Errorf("signs = %v, want %s at 15 alone", signs, signLowCPU)
	}
}

// If the keeper was stopped or the host slept, the agent's silence was not observed.
func TestNobodySawIt(t *testing.T) {
	v := newLiveness(defaultLifecycle(), 0, epoch)
	v.check(epoch)
	later := epoch.Add(8 * time.Hour)
	if news, hung := v.check(later); len(news) != 0 || hung {
		t.Errorf("check after a stall = %v, %t, want none, false", news, hung)
	}
	if signs, hung := live(v, later, 31, nil); hung == 0 || signs[signNoOutput] != 10 {
		t.Errorf("signs later = %v, hung at %d, want %s at 10, and hung", signs, hung, signNoOutput)
	}
}

// The silence that the previous keeper observed counts; unobserved time does not.
func TestQuietBefore(t *testing.T) {
	if v := newLiveness(defaultLifecycle(), 29*time.Minute, epoch); !v.output.Equal(epoch.Add(-29 * time.Minute)) {
		t.Errorf("last output = %v, want %v", v.output, epoch.Add(-29*time.Minute))
	}
}

// Limits use the monotonic clock while a keeper runs. Between two keepers they use
// the wall clock, and never count backwards.
func TestSpent(t *testing.T) {
	for _, c := range []struct {
		name   string
		at     time.Duration // how long ago the last record was made
		ours   bool
		jumped time.Duration // of the wall clock, since then
		want   time.Duration
	}{
		{"lived through", time.Minute, true, 0, 2 * time.Minute},
		{"the clock goes on by an hour", time.Minute, true, time.Hour, 2 * time.Minute},
		{"the clock goes back by an hour", time.Minute, true, -time.Hour, 2 * time.Minute},
		{"the keeper before", time.Minute, false, 0, 2 * time.Minute},
		{"the keeper before, and the clock goes on", time.Minute, false, time.Hour, time.Hour + 2*time.Minute},
		{"the keeper before, and the clock goes back", time.Minute, false, -time.Hour, time.Minute},
	} {
		// Adding to a time keeps its monotonic reading; the time in the row comes
		// from a wall clock that is then set forward or back.
		noted := time.Now().Add(-c.at)
		row := Status{Spent: Spent{For: time.Minute, At: noted.Add(-c.jumped).Round(0)}}
		rec := &recorder{}
		if c.ours {
			rec.noted = noted
			row.Spent.At = noted.Round(0)
		}
		if got := rec.phaseTime(row).Round(time.Second); got != c.want {
			t.Errorf("phaseTime for %s = %v, want %v", c.name, got, c.want)
		}
	}
}

func TestCrashLoop(t *testing.T) {
	c := defaultLifecycle().CrashLoop
	var restarts []time.Time
	rebuilds := 0
	var did []crashAction
	now := epoch
	for range 30 {
		now = now.Add(20 * time.Second)
		var what crashAction
		what, restarts = afterCrash(c, restarts, rebuilds, 10*time.Second, now)
		did = append(did, what)
		if what == actionRebuild {
			rebuilds++
		}
		if what == actionGiveUp {
			break
		}
	}
	want := 0
	for try := range 4 {
		for range 5 {
			if did[want] != actionRestart {
				t.Fatalf("actions after crashes = %v, want %v at index %d", did, actionRestart, want)
			}
			want++
		}
		last := actionRebuild
		if try == 3 {
			last = actionGiveUp
		}
		if did[want] != last {
			t.Fatalf("actions after crashes = %v, want %v at index %d", did, last, want)
		}
		want++
	}
	if len(did) != want {
		t.Errorf("crashes = %d, want %d: %v", len(did), want, did)
	}
}

func TestAWellRunForgives(t *testing.T) {
	c := defaultLifecycle().CrashLoop
	var restarts []time.Time
	now := epoch
	for i := range 50 {
		now = now.Add(90 * time.Second)
		var what crashAction
		if what, restarts = afterCrash(c, restarts, 0, time.Minute, now); what != actionRestart {
			t.Fatalf("action after crash %d = %v, want %v", i, what, actionRestart)
		}
	}
	// The same for crashes that are long ago.
	for i := range 50 {
		now = now.Add(150 * time.Second)
		var what crashAction
		if what, restarts = afterCrash(c, restarts, 0, time.Second, now); what != actionRestart {
			t.Fatalf("action after crash %d in hours = %v, want %v", i, what, actionRestart)
		}
	}
}
