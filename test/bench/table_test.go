//go:build bench

package bench

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/test/bench/load"
)

// The contenders.
const (
	ours      = "ours"
	ours1500  = "ours, MTU 1500"
	ours65520 = "ours, MTU 65520"
	stock     = "stock user-v2"
	slirp     = "slirp"
)

// document gets the tables, between two comments of its own.
const document = "../../docs/benchmarks.md"

const (
	markBegin = "<!-- begin of what make bench measured -->\n"
	markEnd   = "<!-- end of what make bench measured -->\n"
	heading   = "### "
)

// The tables.
const (
	titleStack = "Without QEMU: a user-space guest on the cable"
	titleVM    = "With QEMU: from a Debian guest"
	titleDNS   = "The guest's DNS proxy, with 10,000 names on the list"
)

// results is what this run measured.
var results report

type report struct{ tables []*table }

// table has a row for every figure, and a column for every contender.
type table struct {
	title   string
	columns []string
	rows    []row
	samples map[string][]sample // by contender
	whole   bool                // every contender had every turn
}

// sample is one turn of one contender: a value for every row, by its name.
type sample map[string]float64

type row struct {
	name  string
	whole bool // without decimals
	aim   string
	met   func(of func(contender string) float64) (ratio float64, ok bool)
}

// table begins a table.
func (r *report) table(title string, columns []string, rows []row) *table {
	t := &table{title: title, columns: columns, rows: rows, samples: map[string][]sample{}}
	r.tables = append(r.tables, t)
	return t
}

func (t *table) add(contender string, s sample) {
	t.samples[contender] = append(t.samples[contender], s)
}

// done checks that nothing is missing: a contender whose turn failed has no
// figures to compare.
func (t *table) done(tt *testing.T, rounds int) {
	tt.Helper()
	for _, c := range t.columns {
		if len(t.samples[c]) != rounds {
			tt.Fatalf("%s had %d turns of %d", c, len(t.samples[c]), rounds)
		}
	}
	t.whole = true
}

// median of the turns of a contender, or the mean of what is rare; one that has
// no such figure has none.
func (t *table) median(row, contender string) (float64, bool) {
	var values []float64
	for _, s := range t.samples[contender] {
		if v, ok := s[row]; ok {
			values = append(values, v)
		}
	}
	if len(values) == 0 {
		return 0, false
	}
	if row == rowLate { // a median would not show what befell few turns
		sum := 0.0
		for _, v := range values {
			sum += v
		}
		return sum / float64(len(values)), true
	}
	slices.Sort(values)
	return (values[len(values)/2] + values[(len(values)-1)/2]) / 2, true
}

// markdown is the table with its aims.
func (t *table) markdown() string {
	lines := [][]string{append(append([]string{""}, t.columns...), "aim", "met")}
	for _, r := range t.rows {
		line := []string{r.name}
		for _, c := range t.columns {
			v, ok := t.median(r.name, c)
			switch {
			case !ok:
				line = append(line, "–")
			case r.whole:
				line = append(line, fmt.Sprintf("%.0f", v))
			default:
				line = append(line, fmt.Sprintf("%.2f", v))
			}
		}
		met := ""
		if r.met != nil {
			ratio, ok := r.met(func(c string) float64 { v, _ := t.median(r.name, c); return v })
			met = map[bool]string{true: "yes", false: "**no**"}[ok]
			if ratio > 0 {
				met += fmt.Sprintf(", %.2f×", ratio)
			}
		}
		lines = append(lines, append(line, r.aim, met))
	}
	width := make([]int, len(lines[0]))
	for _, l := range lines {
		for i, cell := range l {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	b.WriteString(heading + t.title + "\n\n")
	for n, l := range lines {
		for i, cell := range l {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i > 0 && i <= len(t.columns) {
				cell = pad + cell
			} else {
				cell += pad
			}
			b.WriteString("| " + cell + " ")
		}
		b.WriteString("|\n")
		if n == 0 {
			for i, w := range width {
				rule := strings.Repeat("-", w+2)
				if i > 0 && i <= len(t.columns) {
					rule = rule[:w+1] + ":"
				}
				b.WriteString("|" + rule)
			}
			b.WriteString("|\n")
		}
	}
	return b.String()
}

// publish prints the tables. In the document each replaces the one of its title,
// so that a run of one part leaves the others as they were.
func (r *report) publish() error {
	doc, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(doc), markBegin)
	old, after, ok2 := strings.Cut(rest, markEnd)
	if !ok || !ok2 {
		return errors.New(document + " has no place for the tables")
	}
	parts := map[string]string{}
	for _, part := range strings.Split(old, heading)[1:] {
		title, _, _ := strings.Cut(part, "\n")
		parts[title] = heading + part
	}
	for _, t := range r.tables {
		if t.whole {
			parts[t.title] = t.markdown() + "\n"
			fmt.Print("\n" + parts[t.title])
		}
	}
	text := before + markBegin + "\n"
	for _, title := range []string{titleStack, titleVM, titleDNS} {
		text += parts[title]
	}
	return os.WriteFile(document, []byte(text+markEnd+after), 0o644)
}

// Figures of a network.
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

// maxAdded is what a session may add, in MB.
const maxAdded = 30

// figures are the rows of a network: each of mine is to be no worse than the
// best of the others.
func figures(mine, others []string) []row {
	least := func(of func(string) float64) (float64, bool) {
		ratio := slices.Min(each(mine, of)) / slices.Max(each(others, of))
		return ratio, ratio >= 1
	}
	most := func(of func(string) float64) (float64, bool) {
		most := slices.Max(each(mine, of))
		return most / maxAdded, most <= maxAdded
	}
	none := func(of func(string) float64) (float64, bool) {
		late := slices.Max(each(mine, of))
		return late, late == 0
	}
	than := "≥ " + strings.Join(others, " and ")
	added := fmt.Sprintf("≤ %d", maxAdded)
	return []row{
		{rowUp, true, than, least},
		{rowDown, true, than, least},
		{rowConnections, true, than, least},
		{rowAnswers, true, than, least},
		{rowLate, true, "0", none},
		{rowIdle, false, added, most},
		{rowPeak, false, added, most},
		{rowIdlePSS, false, "", nil},
		{rowPeakPSS, false, "", nil},
	}
}

func each(contenders []string, of func(string) float64) (values []float64) {
	for _, c := range contenders {
		values = append(values, of(c))
	}
	return values
}

// networkSample is one turn of a network; one within QEMU has no process, and
// so no memory, of its own.
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
