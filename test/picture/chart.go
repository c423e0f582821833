package picture

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// The columns and rows of a chart, in pixels.
const (
	chartWidth = 900
	plotLeft   = 232
	plotRight  = 632
	rowHeight  = 15
	headHeight = 30  // of a table's title and the space above it
	chartTop   = 112 // height of the caption and the axis
)

const (
	chartTitle = "This program compared with its alternatives"
	chartDesc  = "Each bar is a ratio: our figure divided by that of the alternative named on the right. The axis is logarithmic. A ratio below 1× is better for us."
	chartRates = "* For a rate, more is better. So its ratio is the alternative's figure divided by ours. Figures without an alternative are only in the tables."
)

// chartStyle has neutral colours for light pages, and others for dark ones. The background
// is part of the picture, because a page's scheme can differ from the browser's.
const chartStyle = `<style>
svg{--paper:#ffffff;--ink:#1f2328;--faint:#59636e;--grid:#d1d9e0;--better:#1f6feb;--worse:#d4761b}
@media(prefers-color-scheme:dark){svg{--paper:#0d1117;--ink:#e6edf3;--faint:#9198a1;--grid:#30363d;--better:#4493f8;--worse:#db8b3c}}
text{fill:var(--ink)}.faint{fill:var(--faint)}.end{text-anchor:end}.mid{text-anchor:middle}.head{font-weight:bold}
.missed{fill:var(--worse);font-weight:bold}.grid{stroke:var(--grid)}.one{stroke:var(--faint)}.aim{stroke:var(--ink);stroke-width:2.5}
.better{fill:var(--better)}.worse{fill:var(--worse)}
</style>
`

// benchmark is a row of docs/benchmarks.json.
type benchmark struct {
	Name, Table, Unit string
	Baseline          struct{ Median float64 }
	BaselineName      string `json:"baseline_name"`
	Ratio             float64
	Aim               string
	Met               *bool
	aim               float64 // a ratio too; 0 without an aim
}

// turn parses the aim. It inverts the ratio and the aim of a rate, so that less is better.
func (r *benchmark) turn() (err error) {
	if r.Aim != "" {
		sign, text, _ := strings.Cut(r.Aim, " ")
		number, relative := strings.CutSuffix(text, "×")
		if r.aim, err = strconv.ParseFloat(number, 64); err != nil {
			return fmt.Errorf("parse aim of %s: %w", r.Name, err)
		}
		if r.rate() != (sign == "≥") {
			return fmt.Errorf("aim of %s must be ≥ for a rate and ≤ otherwise, got %q in %s", r.Name, r.Aim, r.Unit)
		}
		switch {
		case relative:
		case r.Baseline.Median > 0:
			r.aim /= r.Baseline.Median
		default: // the ratio is one of means
			r.aim = 0
		}
	}
	if r.rate() {
		r.Ratio = 1 / r.Ratio
		if r.aim != 0 {
			r.aim = 1 / r.aim
		}
	}
	return nil
}

// rate reports whether more is better.
func (r benchmark) rate() bool { return strings.Contains(r.Unit, "/") }

// chartWords turns the name of a row into words. The first entry that fits a part of the name
// replaces it.
var chartWords = strings.NewReplacer(
	"generic_create", "generic image", "restart_golden", "restart of a golden clone", "three_at_once", "three sessions at once",
	"_vs_limactl_ready", ", limactl to READY", "_ssh_ready", ", SSH ready", "_prompt", ", prompt",
	"exec_first", "first exec", "exec_repeated", "repeated exec",
	"host_memory_per_session_private", "memory of a session, private", "host_memory_per_session", "memory of a session, PSS",
	"restore_command", "restore", "suspend_command", "stop --suspend", "resume_command", "start of a suspended session", "fork_five", "fork -n 5",
	"setup_kept", "later session, setup saved", "list_1_sessions", "list --json, one session", "list_", "list --json, ", "help", "--help",
	"picker_first_paint", "picker, first paint", "switch_session", "open a ready session in tmux",
	"task_submit_20_", "20 clients submit, ", "task_submit_", "one client submits, ", "event_ingest_", "event to reader, ",
	"memory_idle", "idle memory", "memory_peak", "peak memory", "pss_idle", "idle PSS", "pss_peak", "peak PSS",
	"download_twice_slirp", "download, aim twice slirp's",
	"dns_listed_rate", "listed names, answers", "dns_listed_", "listed names, ", "dns_other_rate", "other names, answers", "dns_other_", "other names, ",
	"intercept_memory", "peak memory", "intercept_h1_", "HTTP/1.1 ", "intercept_h2_", "HTTP/2 ",
	"review_running_files", "session runs, list of files", "review_stopped_files", "session stopped, list of files", "review_json_files", "session stopped, --json",
	"review_running_change", "session runs, first change", "review_stopped_change", "session stopped, first change",
	"search_rare", "a text in one line", "search_ignore_case", "the same, in any case",
	"stack_", "", "_mtu", ", MTU ", "dns", "DNS", "ssh", "SSH", "vm_", "VM ", "_vs_", "\n", "_", " ")

// label shortens the row's name: the chart shows the alternative in another column.
func (r benchmark) label() string {
	label, _, _ := strings.Cut(chartWords.Replace(r.Name), "\n")
	if r.rate() {
		label += " *"
	}
	return label
}

// Chart draws the ratios of docs/benchmarks.json, which make bench writes.
func Chart(benchmarks []byte) (string, error) {
	var all struct{ Rows []benchmark }
	if err := json.Unmarshal(benchmarks, &all); err != nil {
		return "", fmt.Errorf("parse benchmarks: %w", err)
	}
	var rows []benchmark
	least, most := 0.5, 2.0
	for _, r := range all.Rows {
		if r.Ratio <= 0 {
			continue
		}
		if err := r.turn(); err != nil {
			return "", err
		}
		rows = append(rows, r)
		least, most = min(least, r.Ratio), max(most, r.Ratio, r.aim)
		if r.aim > 0 {
			least = min(least, r.aim)
		}
	}
	axis := newLogAxis(least, most)
	var b strings.Builder
	y := chartTop
	for i, r := range rows {
		if i == 0 || r.Table != rows[i-1].Table {
			y += headHeight
			fmt.Fprintf(&b, `<text class="head" x="12" y="%d">%s</text>`+"\n", y-6, escape(r.Table))
		}
		axis.drawRow(&b, r, y)
		y += rowHeight
	}
	axis.drawNumbers(&b, y+14)

	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="11">`+"\n", chartWidth, y+24, chartWidth, y+24)
	fmt.Fprintf(&out, "<title id=\"title\">%s</title>\n<desc id=\"desc\">%s %s</desc>\n%s", chartTitle, chartDesc, chartRates, chartStyle)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" rx="8" fill="var(--paper)"/>`+"\n", chartWidth, y+24)
	fmt.Fprintf(&out, `<text class="head" x="12" y="24" font-size="15">%s</text><text x="12" y="44">%s</text><text x="12" y="60">%s</text>`+"\n", chartTitle, chartDesc, chartRates)
	out.WriteString(`<rect class="better" x="12" y="72" width="24" height="8"/><text x="42" y="80">better</text><rect class="worse" x="92" y="72" width="24" height="8"/><text x="122" y="80">worse than the alternative</text>` +
		`<path class="aim" d="M282 70V82"/><text x="290" y="80">aim, as a ratio to the alternative's figure</text><text class="missed" x="632" y="80">bold: the aim was missed</text>` + "\n")
	fmt.Fprintf(&out, `<text class="faint end" x="%.1f" y="102">← better</text><text class="faint" x="%.1f" y="102">worse →</text>`+"\n", axis.at(1)-8, axis.at(1)+8)
	axis.drawNumbers(&out, chartTop+4)
	out.WriteString(axis.grid() + b.String() + "</svg>\n")
	return out.String(), nil
}

// logAxis maps ratios to positions. Its ends are among its ticks: 1, 2 and 5 of each decade.
type logAxis struct{ ticks []float64 }

func newLogAxis(least, most float64) (a logAxis) {
	for decade := math.Floor(math.Log10(least)); ; decade++ {
		for _, digit := range []float64{1, 2, 5} {
			tick, _ := strconv.ParseFloat(fmt.Sprintf("%ge%g", digit, decade), 64) // it parses its own output
			if tick <= least {
				a.ticks = nil
			}
			a.ticks = append(a.ticks, tick)
			if tick >= most {
				return a
			}
		}
	}
}

func (a logAxis) at(ratio float64) float64 {
	first, last := a.ticks[0], a.ticks[len(a.ticks)-1]
	return plotLeft + (plotRight-plotLeft)*math.Log(ratio/first)/math.Log(last/first)
}

// grid returns the lines behind one row, which every row uses.
func (a logAxis) grid() string {
	var lines strings.Builder
	for _, tick := range a.ticks {
		fmt.Fprintf(&lines, "M%.1f 0v%d", a.at(tick), rowHeight)
	}
	return fmt.Sprintf(`<defs><g id="grid"><path class="grid" d="%s"/><path class="one" d="M%.1f 0v%d"/></g></defs>`+"\n", lines.String(), a.at(1), rowHeight)
}

func (a logAxis) drawNumbers(b *strings.Builder, y int) {
	for _, tick := range a.ticks {
		fmt.Fprintf(b, `<text class="faint mid" x="%.1f" y="%d" font-size="10">%g×</text>`, a.at(tick), y, tick)
	}
	b.WriteString("\n")
}

func (a logAxis) drawRow(b *strings.Builder, r benchmark, y int) {
	class, figure := "better", "end"
	if r.Ratio > 1 {
		class = "worse"
	}
	if r.Met != nil && !*r.Met {
		figure = "end missed"
	}
	from, to := a.at(min(r.Ratio, 1)), a.at(max(r.Ratio, 1))
	fmt.Fprintf(b, `<use href="#grid" y="%d"/><text x="12" y="%d">%s</text><rect class="%s" x="%.1f" y="%d" width="%.1f" height="9"/>`, y, y+11, escape(r.label()), class, from, y+3, to-from)
	if r.aim > 0 {
		fmt.Fprintf(b, `<path class="aim" d="M%.1f %dv%d"/>`, a.at(r.aim), y+1, rowHeight-2)
	}
	fmt.Fprintf(b, `<text class="%s" x="690" y="%d">%.3f×</text><text class="faint" x="700" y="%d">%s</text>`+"\n", figure, y+11, r.Ratio, y+11, escape(r.BaselineName))
}
