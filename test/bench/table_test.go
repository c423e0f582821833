//go:build bench

package bench

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// table holds the measurements of some contenders.
type table struct {
	title string
	// columns lists the contenders of a table with one column each, where a cell is
	// the median. Without columns, the table has a line for each comparison, with
	// minimum and maximum too.
	columns []string
	rows    []row
	notes   []string            // absent contenders, and why
	samples map[string][]sample // by contender
	whole   bool                // every contender completed every turn
}

// sample is one turn of one contender: values by the rows' names.
type sample map[string]float64

// row is a figure that is measured for each contender.
type row struct {
	name        string // with its unit
	unit        string
	whole       bool   // shown without decimals
	mean        bool   // shown as a mean: a median would hide what happened in few turns
	hope        string // the comparisons' aims in words
	comparisons []comparison
}

// comparison is one row of benchmarks.json: one contender's figure, optionally
// compared with another's.
type comparison struct {
	key         string // its name there
	mine, other string // contenders; other is "" for a figure without a comparison
	aim         aim
}

// aim is what a comparison should show.
type aim struct {
	kind  aimKind
	limit float64
}

type aimKind int

const (
	noAim    aimKind = iota
	atLeast          // times the other's
	atMost           // times the other's
	below            // times the other's, and not equal to it
	absolute         // at most this value
)

func (a aim) String() string {
	switch a.kind {
	case atLeast:
		return fmt.Sprintf("≥ %g×", a.limit)
	case atMost:
		return fmt.Sprintf("≤ %g×", a.limit)
	case below:
		return fmt.Sprintf("< %g×", a.limit)
	case absolute:
		return fmt.Sprintf("≤ %g", a.limit)
	}
	return ""
}

func (a aim) met(figure, ratio float64) bool {
	switch a.kind {
	case atLeast:
		return ratio >= a.limit
	case atMost:
		return ratio <= a.limit
	case below:
		return ratio < a.limit
	case absolute:
		return figure <= a.limit
	}
	return true
}

// table starts a table.
func (r *report) table(t table) *table {
	t.samples = map[string][]sample{}
	r.tables = append(r.tables, &t)
	return &t
}

func (t *table) add(contender string, s sample) {
	t.samples[contender] = append(t.samples[contender], s)
}

// absent records that a contender is missing, and why.
func (t *table) absent(contender, why string) {
	t.note("Absent: " + contender + ". " + why)
}

// note adds a line below the table, once.
func (t *table) note(text string) {
	if !slices.Contains(t.notes, text) {
		t.notes = append(t.notes, text)
	}
}

// done checks that no turn is missing: a contender whose turn failed has no figures
// to compare.
func (t *table) done(tt *testing.T, turns int, contenders ...string) {
	tt.Helper()
	for _, c := range contenders {
		if len(t.samples[c]) < turns {
			tt.Fatalf("%s had %d turns of %d", c, len(t.samples[c]), turns)
		}
	}
	t.whole = true
}

// series holds every turn's value of one figure, in order.
type series []float64

// of returns a contender's values; it returns none if the contender lacks the figure.
func (t *table) of(row, contender string) series {
	var values series
	for _, s := range t.samples[contender] {
		if v, ok := s[row]; ok {
			values = append(values, v)
		}
	}
	slices.Sort(values)
	return values
}

func (s series) median() float64 { return (s[len(s)/2] + s[(len(s)-1)/2]) / 2 }

func (s series) mean() float64 {
	sum := 0.0
	for _, v := range s {
		sum += v
	}
	return sum / float64(len(s))
}

// figure returns what a row shows for a series.
func (r row) figure(s series) float64 {
	if r.mean {
		return s.mean()
	}
	return s.median()
}

func (r row) format(v float64) string {
	switch {
	case r.whole:
		return fmt.Sprintf("%.0f", v)
	case v != 0 && math.Abs(v) < 0.1:
		return fmt.Sprintf("%.4f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// result is a comparison with its figures.
type result struct {
	row
	comparison
	ours, theirs series  // theirs is empty without a comparison
	ratio        float64 // of the figures; 0 without a comparison
}

// results returns those comparisons of a row whose contender was measured.
func (t *table) results(r row) []result {
	var out []result
	for _, c := range r.comparisons {
		res := result{row: r, comparison: c, ours: t.of(r.name, c.mine)}
		if len(res.ours) == 0 {
			continue
		}
		if c.other != "" {
			res.theirs = t.of(r.name, c.other)
		}
		if len(res.theirs) > 0 && r.figure(res.theirs) != 0 {
			res.ratio = r.figure(res.ours) / r.figure(res.theirs)
		}
		out = append(out, res)
	}
	return out
}

// judged reports whether the aim is met, and whether that can be judged.
func (r result) judged() (met, ok bool) {
	if r.aim.kind == noAim || r.aim.kind != absolute && r.ratio == 0 {
		return false, false
	}
	return r.aim.met(r.figure(r.ours), r.ratio), true
}

// met returns the verdict on several comparisons: the worst of them.
func met(results []result) string {
	verdict, worst := "", 0.0
	for _, r := range results {
		ok, judged := r.judged()
		if !judged {
			continue
		}
		share := r.ratio
		if r.aim.kind == absolute {
			share = 0
			if r.aim.limit > 0 {
				share = r.figure(r.ours) / r.aim.limit
			}
		}
		switch {
		case verdict == "", r.aim.kind == atLeast && share < worst, r.aim.kind != atLeast && share > worst:
			worst = share
		}
		if verdict != "**no**" {
			verdict = map[bool]string{true: "yes", false: "**no**"}[ok]
		}
	}
	if worst > 0 {
		return fmt.Sprintf("%s, %.2f×", verdict, worst)
	}
	return verdict
}

// markdown returns the table with its title, its aims and its notes.
func (t *table) markdown() string {
	lines, numbers := t.lines(), 5
	if t.columns != nil {
		lines, numbers = t.grid(), len(t.columns)
	}
	var b strings.Builder
	b.WriteString(heading + t.title + "\n\n")
	layOut(&b, lines, numbers)
	for _, n := range t.notes {
		b.WriteString("\n" + n + "\n")
	}
	return b.String()
}

// grid returns a column for every measured contender.
func (t *table) grid() [][]string {
	aims := slices.ContainsFunc(t.rows, func(r row) bool { return r.hope != "" })
	head := append([]string{""}, t.columns...)
	if aims {
		head = append(head, "aim", "met")
	}
	lines := [][]string{head}
	for _, r := range t.rows {
		line := []string{r.name}
		for _, c := range t.columns {
			cell := "–"
			if values := t.of(r.name, c); len(values) > 0 {
				cell = r.format(r.figure(values))
			}
			line = append(line, cell)
		}
		if aims {
			line = append(line, r.hope, met(t.results(r)))
		}
		lines = append(lines, line)
	}
	return lines
}

// lines returns a line for every comparison.
func (t *table) lines() [][]string {
	lines := [][]string{{"", "ours", "range", "the other", "range", "ratio", "against", "aim", "met"}}
	for _, r := range t.rows {
		for _, res := range t.results(r) {
			line := []string{res.mine + ": " + r.name, r.format(r.figure(res.ours)), r.span(res.ours), "–", "", "", "", res.aim.String(), ""}
			if len(res.theirs) > 0 {
				line[3], line[4], line[6] = r.format(r.figure(res.theirs)), r.span(res.theirs), res.other
			}
			if res.ratio > 0 {
				line[5] = fmt.Sprintf("%.2f×", res.ratio)
			}
			if ok, judged := res.judged(); judged {
				line[8] = map[bool]string{true: "yes", false: "**no**"}[ok]
			}
			lines = append(lines, line)
		}
	}
	return lines
}

func (r row) span(s series) string { return r.format(s[0]) + "–" + r.format(s[len(s)-1]) }

// layOut writes lines as a table; this many columns after the first are numeric.
func layOut(b *strings.Builder, lines [][]string, numbers int) {
	width := make([]int, len(lines[0]))
	for _, l := range lines {
		for i, cell := range l {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	for n, l := range lines {
		for i, cell := range l {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i > 0 && i <= numbers {
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
				if i > 0 && i <= numbers {
					rule = rule[:w+1] + ":"
				}
				b.WriteString("|" + rule)
			}
			b.WriteString("|\n")
		}
	}
}
