//go:build bench

package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/picture"
)

// The results go into tables between two comments of the document, and into two files
// beside it: as JSON, and as a chart of their ratios.
const (
	docs       = "../../docs"
	document   = "benchmarks.md"
	machine    = "benchmarks.json"
	chart      = "benchmarks.svg"
	markBegin  = "<!-- begin of what make bench measured -->\n"
	markEnd    = "<!-- end of what make bench measured -->\n"
	heading    = "### "
	enoughRuns = 5
)

// These are the parts, as BENCH names them, and the tables, in the document's order.
const (
	partLifecycle = "lifecycle"
	partLarge     = "large"
	partPicker    = "picker"
	partTasks     = "tasks"
	partNetwork   = "network"
	partIntercept = "intercept"
	partDNS       = "dns"
	partReview    = "review"

	titleReady     = "A session: time until it is ready"
	titleSteps     = "A session: where the time goes, in seconds"
	titleCommand   = "A session: commands and memory"
	titleSaved     = "A session: checkpoints and suspension"
	titleSetup     = "A repository: its setup"
	titleLarge     = "A large repository: 60,000 files, 340 MB"
	titleList      = "The list of sessions"
	titlePicker    = "The picker and the switch"
	titleServe     = "Tasks: submitted to serve, and followed"
	titleTasks     = "Tasks: a thousand at once"
	titleDash      = "Fifty dashboards of a hundred sessions"
	titleStack     = "The network without QEMU: a user-space guest on the link"
	titleVM        = "The network with QEMU: from a Debian guest"
	titleIntercept = "Requests that the gateway reads, compared with connections that it passes on"
	titleDNS       = "The guest's DNS proxy, with 10,000 names on the list"
	titleReview    = "A review of 5,000 files: its first screen"
	titleSearch    = "A search of recordings: 1 GiB"
)

var titles = []string{titleReady, titleSteps, titleCommand, titleSaved, titleSetup, titleLarge, titleList, titlePicker, titleServe, titleTasks, titleDash, titleStack, titleVM, titleIntercept, titleDNS, titleReview, titleSearch}

// runs returns how many turns each contender has.
func runs() int {
	if n, err := strconv.Atoi(os.Getenv("BENCH_RUNS")); err == nil && n > 0 {
		return n
	}
	return enoughRuns
}

// results is what this run measured.
var results report

type report struct{ tables []*table }

// span is a figure's range over all turns.
type span struct {
	Min    float64 `json:"min"`
	Median float64 `json:"median"`
	Max    float64 `json:"max"`
}

// entry is a row of benchmarks.json. A figure without a comparison has no baseline
// and no ratio.
type entry struct {
	Name         string   `json:"name"`
	Table        string   `json:"table"`
	Unit         string   `json:"unit"`
	Runs         int      `json:"runs"`
	Ours         span     `json:"ours"`
	Baseline     *span    `json:"baseline"`
	BaselineName string   `json:"baseline_name"`
	Ratio        *float64 `json:"ratio"`
	Aim          string   `json:"aim,omitempty"`
	Met          *bool    `json:"met,omitempty"`
}

type entries struct {
	Rows []entry `json:"rows"`
}

func (s series) span() span {
	return span{Min: round(s[0]), Median: round(s.median()), Max: round(s[len(s)-1])}
}

// round keeps four digits: more would suggest false precision.
func round(v float64) float64 {
	v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 4, 64), 64) // it parses its own output
	return v
}

func (t *table) entries() (out []entry) {
	for _, r := range t.rows {
		for _, res := range t.results(r) {
			e := entry{
				Name: res.key, Table: t.title, Unit: res.unit, Runs: len(res.ours),
				Ours: res.ours.span(), BaselineName: res.other, Aim: res.aim.String(),
			}
			if len(res.theirs) > 0 {
				e.Baseline = new(res.theirs.span())
			}
			if res.ratio != 0 {
				e.Ratio = new(round(res.ratio))
			}
			if met, judged := res.judged(); judged {
				e.Met = &met
			}
			out = append(out, e)
		}
	}
	return out
}

// publish prints the tables and writes them into the files of dir. Each replaces the
// table with the same title, so a run of one part leaves the others unchanged.
func (r *report) publish(dir string) error {
	measured := map[string]*table{}
	for _, t := range r.tables {
		if t.whole {
			measured[t.title] = t
			fmt.Print("\n" + t.markdown())
		}
	}
	if runs() < enoughRuns {
		fmt.Printf("\n%d of %d runs: shown, not written\n", runs(), enoughRuns)
		return nil
	}
	return errors.Join(write(filepath.Join(dir, document), measured), writeJSON(filepath.Join(dir, machine), measured))
}

func write(path string, measured map[string]*table) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(text), markBegin)
	old, after, ok2 := strings.Cut(rest, markEnd)
	if !ok || !ok2 {
		return errors.New(path + " has no place for the tables")
	}
	kept := map[string]string{}
	for _, part := range strings.Split(old, heading)[1:] {
		title, _, _ := strings.Cut(part, "\n")
		kept[title] = heading + part
	}
	out := before + markBegin + "\n"
	for _, title := range titles {
		if t := measured[title]; t != nil {
			kept[title] = t.markdown() + "\n"
		}
		out += kept[title]
	}
	return os.WriteFile(path, []byte(out+markEnd+after), 0o644)
}

// writeJSON also draws the chart, which shows what the file then has.
func writeJSON(path string, measured map[string]*table) error {
	var old entries
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err == nil {
		if err := json.Unmarshal(text, &old); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	all := entries{Rows: []entry{}}
	for _, title := range titles {
		if t := measured[title]; t != nil {
			all.Rows = append(all.Rows, t.entries()...)
			continue
		}
		for _, e := range old.Rows {
			if e.Table == title {
				all.Rows = append(all.Rows, e)
			}
		}
	}
	text, err = json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, append(text, '\n'), 0o644); err != nil {
		return err
	}
	svg, err := picture.Chart(text)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(filepath.Dir(path), chart), []byte(svg), 0o644)
}

// TestReport publishes two tables and then one of them again: what was not measured
// again stays, and an absent contender has no figures.
func TestReport(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, document), []byte("before\n"+markBegin+markEnd+"after\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	publish := func(measured ...*table) (string, entries) {
		t.Helper()
		m := map[string]*table{}
		for _, t := range measured {
			m[t.title] = t
		}
		if err := errors.Join(write(filepath.Join(dir, document), m), writeJSON(filepath.Join(dir, machine), m)); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(filepath.Join(dir, document))
		if err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(filepath.Join(dir, machine))
		if err != nil {
			t.Fatal(err)
		}
		var e entries
		if err := json.Unmarshal(raw, &e); err != nil {
			t.Fatal(err)
		}
		return string(text), e
	}
	list := func(theirs ...float64) *table {
		var r report
		l := r.table(table{title: titleReady, rows: []row{{name: "time, s", unit: "s", comparisons: []comparison{
			{key: "mine", mine: "we", other: "they", aim: aim{atMost, 0.5}},
			{key: "other", mine: "absentee", other: "they", aim: aim{atMost, 0.5}},
		}}}})
		for i, v := range theirs {
			l.add("they", sample{"time, s": v})
			l.add("we", sample{"time, s": float64(i + 1)})
		}
		l.absent("absentee", "Not installed.")
		return l
	}
	var r report
	grid := r.table(table{title: titleVM, columns: []string{"we", "they"}, rows: []row{{
		name: "rate", unit: "1/s", whole: true, hope: "≥ they", comparisons: []comparison{{key: "rate", mine: "we", other: "they", aim: aim{atLeast, 1}}},
	}}})
	grid.add("we", sample{"rate": 100})
	grid.add("they", sample{"rate": 200})
	publish(list(10, 30, 20), grid)
	text, got := publish(list(4, 1, 2))

	for _, want := range []string{
		"before\n" + markBegin, markEnd + "after\n",
		"| we: time, s | 2.00 | 1.00–3.00 |      2.00 | 1.00–4.00 | 1.00× | they    | ≤ 0.5× | **no** |",
		"| rate | 100 |  200 | ≥ they | **no**, 0.50× |",
		"Absent: absentee. Not installed.",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("document = %s, want %q in it", text, want)
		}
	}
	if len(got.Rows) != 2 || got.Rows[0].Name != "mine" || got.Rows[1].Name != "rate" {
		t.Fatalf("rows = %+v, want mine and rate", got.Rows)
	}
	if e := got.Rows[0]; e.Ours != (span{1, 2, 3}) || *e.Baseline != (span{1, 2, 4}) || *e.Ratio != 1 || *e.Met || e.Runs != 3 {
		t.Errorf("row mine = %+v, want ours {1 2 3}, baseline {1 2 4}, ratio 1, met, 3 runs", e)
	}
	svg, err := os.ReadFile(filepath.Join(dir, chart))
	if err != nil || !strings.Contains(string(svg), ">mine</text>") || !strings.Contains(string(svg), ">rate *</text>") {
		t.Errorf("chart = %s, %v, want mine and rate in it", svg, err)
	}
}
