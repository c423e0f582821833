package cli

import (
	"runtime/debug"
	"runtime/metrics"
	"testing"
	"testing/synctest"
	"time"
)

// Garbage is collected as usual after a second, or as the process decided in the meantime.
func TestPostponeGC(t *testing.T) {
	percent := func() int {
		sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		metrics.Read(sample)
		return int(sample[0].Value.Uint64())
	}
	usual := percent()
	defer debug.SetGCPercent(usual)
	for _, c := range []struct{ own, want int }{{0, usual}, {50, 50}} {
		synctest.Test(t, func(t *testing.T) {
			debug.SetGCPercent(usual)
			postponeGC(time.Second)
			if percent() != youngGC {
				t.Errorf("percentage at the start = %d, want %d", percent(), youngGC)
			}
			if c.own != 0 {
				debug.SetGCPercent(c.own)
			}
			time.Sleep(2 * time.Second)
			synctest.Wait()
			if percent() != c.want {
				t.Errorf("percentage after two seconds = %d, want %d", percent(), c.want)
			}
		})
	}
}
