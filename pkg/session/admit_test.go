package session

import (
	"runtime"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestAdmit(t *testing.T) {
	const gib = config.Size(1 << 30)
	rows := func(phases ...Phase) (out []store.Session) {
		for i, p := range phases {
			out = append(out, store.Session{Name: "vm" + string(rune('a'+i)), Phase: string(p)})
		}
		return out
	}
	limits := config.Limits{Running: 2, MemoryReserve: gib, DiskReserve: 5 * gib}
	plenty := Host{FreeMemory: 100 * gib, FreeDisk: 100 * gib, DiskDir: "/vms"}
	for _, c := range []struct {
		name       string
		others     []store.Session
		host       Host
		code       fail.Code // 0 means admitted
		text, hint string
	}{
		{"alone", nil, plenty, 0, "", ""},
		{"one other", rows(Ready), plenty, 0, "", ""},
		{"what does not run does not count", rows(Stopped, Broken, Gone, Stopped, Ready), plenty, 0, "", ""},
		{"full, the oldest is named", rows(Stopped, Ready, Creating), plenty, fail.Conflict, "vmb, vmc", "agent-sessionizer stop vmb"},
		{"what ends still runs", rows(Stopping, Destroying), plenty, fail.Conflict, "limit of 2", "agent-sessionizer stop vma"},
		{"starting", rows(Starting, Ready), plenty, fail.Conflict, "limit of 2", "agent-sessionizer stop vma"},
		{"just enough memory", nil, Host{5 * gib, 100 * gib, "/"}, 0, "", ""},
		{"too little memory", nil, Host{5*gib - 1, 100 * gib, "/"}, fail.Conflict, "8GiB needs 5GiB", "agent-sessionizer list"},
		{"too little memory, one runs", rows(Ready), Host{gib, 100 * gib, "/"}, fail.Conflict, "1GiB free", "agent-sessionizer stop vma"},
		{"unknown memory", nil, Host{0, 100 * gib, "/"}, 0, "", ""},
		{"just enough disk", nil, Host{100 * gib, 5 * gib, "/vms"}, 0, "", ""},
		{"too little disk", nil, Host{100 * gib, 5*gib - 1, "/vms"}, fail.Host, "/vms", "df -h /vms # and: agent-sessionizer destroy SESSION, agent-sessionizer image prune"},
		{"full disk", nil, Host{100 * gib, 0, "/vms"}, fail.Host, "/vms", "df -h /vms # and: agent-sessionizer destroy SESSION, agent-sessionizer image prune"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := admit(c.others, config.Resources{CPUs: 4, Memory: 8 * gib, Disk: 50 * gib}, limits, c.host)
			if c.code == 0 {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if fail.CodeOf(err) != c.code || err == nil || !strings.Contains(err.Error(), c.text) || fail.HintOf(err) != c.hint {
				t.Fatalf("admit = %v (code %v, hint %q), want code %v, %q, hint %q", err, fail.CodeOf(err), fail.HintOf(err), c.code, c.text, c.hint)
			}
		})
	}
}

func TestClamp(t *testing.T) {
	const gib = config.Size(1 << 30)
	got, notices, err := clamp(config.Resources{CPUs: 1, Memory: 512 << 20, Disk: 4 * gib})
	if err != nil || len(notices) != 0 || got.CPUs != 1 || got.Memory != 512<<20 {
		t.Errorf("clamp within the host = %+v, notices %q, %v, want 1 CPU and 512 MiB, no notices", got, notices, err)
	}
	got, notices, err = clamp(config.Resources{CPUs: 1 << 20, Memory: 1 << 50, Disk: 4 * gib})
	if err != nil || len(notices) != 2 || got.CPUs != runtime.NumCPU() || got.Memory >= 1<<50 || got.Memory%(1<<20) != 0 || got.Disk != 4*gib {
		t.Errorf("clamp above the host = %+v, notices %q, %v, want %d CPUs, less memory in whole MiB, the same disk, 2 notices", got, notices, err, runtime.NumCPU())
	}
	for _, r := range []config.Resources{
		{CPUs: 0, Memory: gib, Disk: 4 * gib},
		{CPUs: -1, Memory: gib, Disk: 4 * gib},
		{CPUs: 1, Memory: 511 << 20, Disk: 4 * gib},
		{CPUs: 1, Memory: gib, Disk: 4*gib - 1},
	} {
		if _, _, err := clamp(r); fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "" {
			t.Errorf("clamp(%+v) = %v, want code %v with a hint", r, err, fail.Usage)
		}
	}
}

func TestMeasureHost(t *testing.T) {
	h, err := MeasureHost(t.TempDir() + "/not/made/yet")
	if err != nil || h.FreeDisk <= 0 || h.FreeMemory <= 0 {
		t.Errorf("MeasureHost = %+v, %v, want free disk and free memory", h, err)
	}
}

func TestAvailablePages(t *testing.T) {
	const out = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n" +
		"Pages free:                                8217.\nPages active:                            365430.\n" +
		"Pages inactive:                          351250.\nPages speculative:                        13370.\n" +
		"Pages throttled:                              0.\nPages wired down:                        152434.\n" +
		"Pages purgeable:                           8313.\n\"Translation faults\":                1095396245.\n"
	for _, c := range []struct {
		out  string
		want uint64
	}{
		{out, (8217 + 351250 + 13370) * 16384},
		{strings.Replace(out, "16384", "4096", 1), (8217 + 351250 + 13370) * 4096},
		{"", 0},
		{"Pages free: 1.\n", 0},
		{strings.Replace(out, "8217.", "many", 1), 0},
	} {
		if got := availablePages(c.out); got != c.want {
			t.Errorf("availablePages(%q) = %d, want %d", c.out, got, c.want)
		}
	}
}
