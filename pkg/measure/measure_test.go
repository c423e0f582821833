package measure_test

import (
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
)

const day = 24 * time.Hour

func TestSizes(t *testing.T) {
	for text, want := range map[string]measure.Size{
		"0B": 0, "1B": 1, "1b": 1, "1K": 1 << 10, "1k": 1 << 10, "1KB": 1 << 10, "1KiB": 1 << 10, "512MiB": 512 << 20, "8G": 8 << 30,
		"8gb": 8 << 30, "1.5T": 3 << 39, "0.5G": 1 << 29, "1.001K": 1025, "1024T": 1 << 50, "1125899906842624B": 1 << 50,
	} {
		got, err := measure.ParseSize(text)
		if err != nil || got != want {
			t.Errorf("ParseSize(%s) = %d, %v, want %d", text, got, err, want)
		}
		if back, err := measure.ParseSize(got.String()); err != nil || back != got {
			t.Errorf("ParseSize(%s), printed and parsed again, = %d, %v, want %d", text, back, err, got)
		}
	}
	for _, text := range []string{
		"", "8", "8 G", "-8G", "+8G", "8P", "8GiBs", "G", ".5G", "5.G", "1e3K", "0x8G", "8iB", "1025T", "9999999999999999T", "1.0001K", "８G", "8G\n",
	} {
		if got, err := measure.ParseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %d, nil, want an error", text, got)
		}
	}
	for size, want := range map[measure.Size]string{0: "0B", 1023: "1023B", 1 << 10: "1KiB", 3 << 29: "1536MiB", 8 << 30: "8GiB", 1 << 50: "1024TiB"} {
		if got := size.String(); got != want {
			t.Errorf("Size(%d) = %q, want %q", int64(size), got, want)
		}
	}
	for size, want := range map[measure.Size]string{0: "0B", 1023: "1023B", 3 << 29: "1.5GiB", 123456789: "117.7MiB", 1<<20 - 1: "1024KiB", 1 << 50: "1024TiB"} {
		if got := size.Human(); got != want {
			t.Errorf("Human() of Size %d = %q, want %q", int64(size), got, want)
		}
	}
}

func TestDurations(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"0s": 0, "1ms": time.Millisecond, "90s": 90 * time.Second, "30m": 30 * time.Minute, "24h": day, "2d": 2 * day, "2d12h": 60 * time.Hour,
		"1.5h": 90 * time.Minute, "0.001s": time.Millisecond, "1h30m15s5ms": 90*time.Minute + 15005*time.Millisecond, "10000d": 10000 * day,
		"1s1s": 2 * time.Second, "1m5ms": time.Minute + 5*time.Millisecond,
	} {
		got, err := measure.ParseDuration(text)
		if err != nil || time.Duration(got) != want {
			t.Errorf("ParseDuration(%s) = %v, %v, want %v", text, time.Duration(got), err, want)
		}
		if back, err := measure.ParseDuration(got.String()); err != nil || back != got {
			t.Errorf("ParseDuration(%s), printed and parsed again, = %v, %v, want %v", text, time.Duration(back), err, time.Duration(got))
		}
	}
	for _, text := range []string{
		"", "5", "-5s", "+5s", "5 s", "5S", "1w", "1y", "s", ".5s", "5.s", "1us", "0.5ms", "1h 5m", "10001d", "999999999d", "9999d9999d", "1s1s1s1s1s1s", "1.0001s",
	} {
		if got, err := measure.ParseDuration(text); err == nil {
			t.Errorf("ParseDuration(%q) = %v, nil, want an error", text, got)
		}
	}
	for d, want := range map[time.Duration]string{day: "1d", 25 * time.Hour: "25h", 0: "0s", 90 * time.Second: "1m30s", 61*time.Minute + time.Millisecond: "1h1m1ms"} {
		if got := measure.Duration(d).String(); got != want {
			t.Errorf("Duration(%v) = %q, want %q", d, got, want)
		}
	}
}
