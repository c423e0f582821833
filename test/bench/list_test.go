//go:build bench

package bench

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

const (
	theHelp  = "--help"
	limaList = "limactl list, one instance"
	rowTook  = "duration, ms"

	listsPerTurn = 5
	atOnce       = 3 // running sessions; the rest are stopped
)

func listOf(sessions int) string {
	if sessions == 1 {
		return "list --json, one session"
	}
	return fmt.Sprintf("list --json, %d sessions", sessions)
}

// TestLifecycleList lists sessions whose VMs are fake: the measured program is the
// real one, and it reads the same data.
func TestLifecycleList(t *testing.T) {
	r := row{name: rowTook, unit: "ms"}
	sizes := []int{1, 10, 50}
	for _, n := range sizes {
		c := comparison{key: fmt.Sprintf("list_%d_sessions", n), mine: listOf(n), other: limaList}
		if n == sizes[len(sizes)-1] {
			c.aim = aim{below, 1}
		}
		r.comparisons = append(r.comparisons, c)
	}
	r.comparisons = append(r.comparisons, comparison{key: "help", mine: theHelp, other: limaList})
	table := results.table(table{title: titleList, rows: []row{r}})

	b := realvm.NewBox(t)
	b.Env = append(b.Env, "AGENT_SESSIONIZER_PREPARE=none") // nothing in the background
	fake := filepath.Join(b.Home, "fake")
	if err := realvm.Build(t.Context(), fake, "../../cmd/agent-sessionizer", "-tags=fakevm"); err != nil {
		t.Fatal(err)
	}
	must := func(argv ...string) string {
		t.Helper()
		r := b.Run(argv...)
		if r.Code != 0 {
			t.Fatalf("%s = exit %d\n%s\nwant exit 0", strings.Join(argv, " "), r.Code, r.All())
		}
		return strings.TrimSpace(r.Stdout)
	}
	var names []string
	t.Cleanup(func() { // with the program that knows these VMs
		if len(names) > 0 {
			must(append([]string{fake, "destroy", "--force"}, names...)...)
		}
	})
	theirs := newLimactl(t, "")
	theirs.run("create", "--tty=false", "--name="+instance, "bench.yaml")

	for _, n := range sizes {
		for len(names) < n {
			repo := fmt.Sprintf("repo%d", len(names))
			b.Repo(repo)
			name := must(fake, "open", "-d", "--cpus=1", "--memory=512MiB", "--disk=4GiB", "./"+repo)
			names = append(names, name)
			if len(names) > atOnce {
				must(fake, "stop", name)
			}
		}
		var listed []json.RawMessage
		if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &listed); err != nil || len(listed) != n {
			t.Fatalf("list --json = %d sessions, %v, want %d", len(listed), err, n)
		}
		for range runs() * listsPerTurn {
			table.add(listOf(n), took(func() { b.Asz("list", "--json") }))
			table.add(theHelp, took(func() { b.Asz("--help") }))
			table.add(limaList, sample{rowTook: theirs.run("list") * 1000})
		}
	}
	table.done(t, runs(), listOf(1), listOf(10), listOf(50), theHelp, limaList)
}

func took(f func()) sample {
	began := time.Now()
	f()
	return sample{rowTook: time.Since(began).Seconds() * 1000}
}
