//go:build bench

package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/bench/load"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// These are the contenders.
const (
	ours      = "ours"
	ours1500  = "ours, MTU 1500"
	ours65520 = "ours, MTU 65520"
	stock     = "stock user-v2"
	slirp     = "slirp"
)

// short holds their parts of the names in benchmarks.json.
var short = map[string]string{ours: "", ours1500: "_mtu1500", ours65520: "_mtu65520", stock: "user_v2", slirp: "slirp"}

// These are the figures of a network.
const (
	rowUp          = "upload, Mbit/s"
	rowDown        = "download, Mbit/s"
	rowConnections = "new connections/s"
	rowAnswers     = "DNS answers/s"
	rowLate        = "late or lost, of 10,000 connections"
	rowIdle        = "memory idle, MB"
	rowPeak        = "memory peak, MB"
	rowIdlePSS     = "… with the program's own pages"
	rowPeakPSS     = "… at the peak"
)

// maxAdded is the most memory that a session may add, in MB.
const maxAdded = 30

// figures returns the rows of a network: each of mine should be no worse than the
// best of the others.
func figures(prefix string, mine, others []string) []row {
	than := "≥ " + strings.Join(others, " and ")
	added := fmt.Sprintf("≤ %d", maxAdded)
	rows := []row{
		{name: rowUp, unit: "Mbit/s", whole: true, hope: than},
		{name: rowDown, unit: "Mbit/s", whole: true, hope: than},
		{name: rowConnections, unit: "1/s", whole: true, hope: than},
		{name: rowAnswers, unit: "1/s", whole: true, hope: than},
		{name: rowLate, unit: "of 10,000", whole: true, mean: true, hope: "0"},
		{name: rowIdle, unit: "MB", hope: added},
		{name: rowPeak, unit: "MB", hope: added},
		{name: rowIdlePSS, unit: "MB"},
		{name: rowPeakPSS, unit: "MB"},
	}
	keys := []string{"upload", "download", "connections", "dns_answers", "late_or_lost", "memory_idle", "memory_peak", "pss_idle", "pss_peak"}
	for i := range rows {
		goal, against := aim{atLeast, 1}, others
		switch {
		case rows[i].name == rowLate:
			goal = aim{absolute, 0}
		case rows[i].hope == added:
			goal = aim{absolute, maxAdded}
		case rows[i].hope == "":
			goal = aim{}
		}
		if rows[i].unit == "MB" {
			against = []string{stock} // slirp is part of QEMU
		}
		for _, m := range mine {
			for _, o := range against {
				key := prefix + "_" + keys[i] + short[m]
				if len(others) > 1 {
					key += "_vs_" + short[o]
				}
				rows[i].comparisons = append(rows[i].comparisons, comparison{key: key, mine: m, other: o, aim: goal})
			}
		}
	}
	return rows
}

// networkSample returns one turn of a network. A network inside QEMU has no process
// of its own, and therefore no memory figure.
func networkSample(r load.Result, idle, peak *memory) sample {
	s := sample{
		rowUp: r.Up, rowDown: r.Down, rowConnections: r.Connections, rowAnswers: r.Answers,
		rowLate: 1e4 * float64(r.Late) / float64(max(1, r.Made+r.Lost)),
	}
	if idle != nil {
		s[rowIdle], s[rowIdlePSS], s[rowPeak], s[rowPeakPSS] = idle.anon, idle.pss, peak.anon, peak.pss
	}
	return s
}

// patience is how long a process may take to start or to end, on any machine.
const patience = 60 * time.Second

// ourNetwork starts a session's gateway as shipped: the product's own binary as a
// separate process. It returns the process.
func ourNetwork(t *testing.T, dir string, w vm.NetSockets) (pid int) {
	t.Helper()
	p := gateway.Process{Dir: filepath.Join(dir, "gateway"), Self: realvm.Binary()}
	t.Cleanup(func() {
		if err := p.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	if err := p.Start(t.Context(), w, allowed(t)); err != nil {
		t.Fatal(err)
	}
	st, err := p.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return st.PID
}

func allowed(t *testing.T) *policy.Policy {
	t.Helper()
	p := policy.Default()
	rule, err := policy.ParseRule("*." + strings.TrimSuffix(load.Zone, ".") + ":" + strconv.Itoa(load.Port))
	if err != nil {
		t.Fatal(err)
	}
	rule.Source = "bench"
	p.Names = append(p.Names, rule)
	return p
}

// theStockNetwork starts the daemon of Lima's user-v2 networks as Lima starts it,
// with Lima's lease for the VM.
func theStockNetwork(t *testing.T, dir string, w vm.NetSockets) (pid int) {
	t.Helper()
	for _, path := range []string{w.Stream, w.Datagram, w.API} {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	log, err := os.Create(filepath.Join(dir, "stock.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), os.Getenv(envLimactl), "usernet", "--pidfile", filepath.Join(dir, "stock.pid"),
		"--endpoint", w.API, "--listen-qemu", w.Stream, "--listen", w.Datagram, "--subnet", w.Subnet.String(), "--leases", "192.168.5.15="+w.MAC)
	cmd.Env = append(os.Environ(), "LIMA_HOME="+dir)
	cmd.Stdout, cmd.Stderr = log, log
	start(t, notRoot(cmd))
	waitFor(t, "the stock network", func() bool {
		for _, path := range []string{w.Stream, w.Datagram, w.API} {
			if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
				return false
			}
		}
		return true
	})
	return cmd.Process.Pid
}

// start starts a process that is killed at the test's end.
func start(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()         // it was killed
	})
}

// waitFor polls for a condition without an event.
func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	waitLong(t, patience, what, done)
}

func waitLong(t *testing.T, long time.Duration, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(long); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, long)
		}
	}
}

// memory is the memory of a process, in MB.
type memory struct {
	anon    float64 // its own: heap and stacks
	pss     float64 // including its share of the program file
	private float64 // not shared with any process
}

func memoryOf(pid int) (memory, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return memory{}, err
	}
	var m memory
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		kb, _ := strconv.ParseFloat(f[1], 64) // the first line has no number, and is none of these
		switch f[0] {
		case "Pss_Anon:":
			m.anon = kb / 1000
		case "Pss:":
			m.pss = kb / 1000
		case "Private_Clean:", "Private_Dirty:":
			m.private += kb / 1000
		}
	}
	return m, nil
}

// watch returns a process's current memory and, when stopped, the maximum.
func watch(t *testing.T, pid int) (idle memory, stop func() memory) {
	t.Helper()
	idle, err := memoryOf(pid)
	if err != nil {
		t.Fatal(err)
	}
	end, done := make(chan struct{}), make(chan memory)
	go func() {
		most := idle
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-end:
				done <- most
				return
			case <-tick.C:
			}
			if m, err := memoryOf(pid); err == nil { // otherwise the process is gone, and the load reports it
				most.anon, most.pss = max(most.anon, m.anon), max(most.pss, m.pss)
			}
		}
	}()
	return idle, func() memory {
		close(end)
		return <-done
	}
}

// resolver returns a network's own resolver, which Lima's guests are configured with.
func resolver(w vm.NetSockets) netip.AddrPort {
	a := w.Subnet.Masked().Addr().As4()
	a[3] += 2
	return netip.AddrPortFrom(netip.AddrFrom4(a), 53)
}

// giveUp returns how long to wait for a contender's connection: a lost one of ours
// fails the test, one of the others is only a figure.
func giveUp(contender string) time.Duration {
	if strings.HasPrefix(contender, ours) {
		return patience
	}
	return load.Late
}

// judge fails if one of our networks lost a connection. Losses of the others, and of
// questions over UDP, are figures.
func judge(t *testing.T, contender string, r load.Result) {
	t.Helper()
	t.Logf("%-16s up %5.0f  down %5.0f  connections %5.0f (%d late, %d lost of %d %s)  answers %6.0f (%d lost)",
		contender, r.Up, r.Down, r.Connections, r.Late, r.Lost, r.Made+r.Lost, r.Why, r.Answers, r.Unanswered)
	if r.Lost > 0 && strings.HasPrefix(contender, ours) {
		t.Errorf("connections lost by %s = %d (%s), want 0", contender, r.Lost, r.Why)
	}
}
