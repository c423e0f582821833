//go:build sim

package sim

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// result is what was measured of one fleet.
type result struct {
	size
	cores       int
	join, start time.Duration // of all hosts
	idle, busy  usage
	ran         int     // tasks of busy
	submitted   float64 // per second
	log         logged
	rss         int64 // of the largest core at the end
}

// row is a figure of the table, and perhaps of the plot.
type row struct {
	title  string
	format string
	of     func(result) float64
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// share returns what each host costs a second.
func share(r result, n float64) float64 { return n / r.idle.at.Seconds() / float64(r.hosts) }

var (
	claims   = row{"claimed, 1/s", "%.0f", func(r result) float64 { return r.log.claims }}
	placed50 = row{"from submission to a host, p50, ms", "%.0f", func(r result) float64 { return ms(percentile(r.log.idle, 50)) }}
	placed99 = row{"from submission to a host, p99, ms", "%.0f", func(r result) float64 { return ms(percentile(r.log.idle, 99)) }}
	cpu      = row{"a task: CPU of the core, ms", "%.1f", func(r result) float64 { return 1e3 * r.busy.cpu.Seconds() / float64(r.ran) }}
	messages = row{"a task: messages to and from the core", "%.0f", func(r result) float64 { return float64(r.busy.in+r.busy.out) / float64(r.ran) }}

	rows = []row{
		{"hosts that follow the log", "%.0f", func(r result) float64 { return float64(r.followers) }},
		{"tasks", "%.0f", func(r result) float64 { return float64(r.tasks) }},
		{"submitted, 1/s", "%.0f", func(r result) float64 { return r.submitted }},
		claims,
		{"the last 5 % of claims take, s", "%.1f", func(r result) float64 { return r.log.tail.Seconds() }},
		placed50, placed99, cpu,
		{"a task: CPU of all hosts, ms", "%.0f", func(r result) float64 { return 1e3 * r.busy.hosts.Seconds() / float64(r.ran) }},
		messages,
		{"a task: from the core, kB", "%.0f", func(r result) float64 { return float64(r.busy.sent) / float64(r.ran) / 1e3 }},
		{"a task: entries in the log", "%.1f", func(r result) float64 { return float64(r.log.entries) / float64(r.tasks) }},
		{"a task: on the core's disk, kB", "%.1f", func(r result) float64 { return float64(r.busy.disk) / float64(r.ran) / 1e3 }},
		{"an idle host: CPU of the core, ms/s", "%.2f", func(r result) float64 { return 1e3 * share(r, r.idle.cpu.Seconds()) }},
		{"an idle host: messages to the core, 1/s", "%.1f", func(r result) float64 { return share(r, float64(r.idle.in)) }},
		{"an idle host: messages from the core, 1/s", "%.1f", func(r result) float64 { return share(r, float64(r.idle.out)) }},
		{"an idle host: from the core, kB/s", "%.2f", func(r result) float64 { return share(r, float64(r.idle.sent)) / 1e3 }},
		{"an idle host: requests to JetStream, 1/s", "%.2f", func(r result) float64 { return share(r, float64(r.idle.requests)) }},
		{"an idle host: written by the core, kB/s", "%.1f", func(r result) float64 { return share(r, float64(r.idle.written)) / 1e3 }},
		{"the core: consumers", "%.0f", func(r result) float64 { return float64(r.idle.consumers) }},
		{"the core: memory at the end (RSS), MB", "%.0f", func(r result) float64 { return float64(r.rss) / 1e6 }},
		{"joined, hosts/s", "%.1f", func(r result) float64 { return float64(r.hosts) / r.join.Seconds() }},
	}
)

// table has a column for each fleet.
func table(all []result) string {
	lines := make([][]string, len(rows)+2)
	add := func(line int, cell string) { lines[line] = append(lines[line], cell) }
	add(0, "")
	for i, r := range rows {
		add(i+2, r.title)
	}
	for _, r := range all {
		add(0, fmt.Sprintf("%d hosts", r.hosts))
		for i, row := range rows {
			cell := "–" // idle hosts need so much that the difference means nothing
			if v := row.of(r); v >= 0 {
				cell = fmt.Sprintf(row.format, v)
			}
			add(i+2, cell)
		}
	}
	for column := range lines[0] {
		width := 0
		for _, line := range lines {
			if len(line) > column {
				width = max(width, len(line[column]))
			}
		}
		rule := strings.Repeat("-", width+1) + ":"
		if column == 0 {
			rule = strings.Repeat("-", width+2)
		}
		add(1, rule)
		for i := range lines {
			switch {
			case i == 1:
			case column == 0:
				lines[i][column] = fmt.Sprintf(" %-*s ", width, lines[i][column])
			default:
				lines[i][column] = fmt.Sprintf(" %*s ", width, lines[i][column])
			}
		}
	}
	var b strings.Builder
	for _, line := range lines {
		b.WriteString("|" + strings.Join(line, "|") + "|\n")
	}
	return b.String()
}

// These mark the result in the document.
const (
	markBegin = "<!-- begin of what make sim measured -->\n"
	markEnd   = "<!-- end of what make sim measured -->\n"
	plotFile  = "fleet.svg"
)

// document replaces the result in the documents.
func document(dir string, all []result) error {
	file := filepath.Join(dir, "benchmarks.md")
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(text), markBegin)
	_, after, end := strings.Cut(rest, markEnd)
	if !ok || !end {
		return fmt.Errorf("%s has no place for the result", file)
	}
	is := before + markBegin + "\n" + table(all) + "\n![What a task costs as the fleet grows](" + plotFile + ")\n\n" + markEnd + after
	if err := os.WriteFile(file, []byte(is), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, plotFile), []byte(plot(all)), 0o644)
}

// Sizes of the plot, in pixels.
const (
	panelWidth  = 250
	panelHeight = 150
	panelLeft   = 46
	panelTop    = 30
	panelBottom = 34
)

// plot draws what a task costs, over the number of hosts.
func plot(measured []result) string {
	var all []result // the others differ in more than the number of hosts
	for _, r := range measured {
		if r.followers == measured[0].followers && r.rate == measured[0].rate {
			all = append(all, r)
		}
	}
	panels := []struct {
		title  string
		series []row
	}{
		{"claimed tasks per second", []row{claims}},
		{"from submission to a host, ms", []row{{title: "p50", of: placed50.of}, {title: "p99", of: placed99.of}}},
		{"CPU of the core, ms a task", []row{cpu}},
		{"messages a task", []row{messages}},
	}
	width, height := panelLeft+panelWidth, panelTop+panelHeight+panelBottom
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" role="img" aria-label="What a task costs as the fleet grows" font-family="sans-serif" font-size="11">`+"\n", 2*width+20, 2*height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", 2*width+20, 2*height)
	for i, p := range panels {
		fmt.Fprintf(&b, `<g transform="translate(%d %d)">`+"\n", i%2*width+panelLeft, i/2*height+panelTop)
		drawPanel(&b, p.title, p.series, all)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func drawPanel(b *strings.Builder, title string, series []row, all []result) {
	most, low, high := 0.0, math.Inf(1), 0.0
	for _, r := range all {
		low, high = min(low, math.Log10(float64(r.hosts))), max(high, math.Log10(float64(r.hosts)))
		for _, s := range series {
			most = max(most, s.of(r))
		}
	}
	inner := float64(panelWidth - 30)
	x := func(r result) float64 { return (math.Log10(float64(r.hosts)) - low) / max(high-low, 1e-9) * inner }
	y := func(v float64) float64 { return panelHeight * (1 - v/max(1.1*most, 1e-9)) }
	fmt.Fprintf(b, `<text y="-10" font-weight="bold">%s</text><path d="M0 0V%d H%.0f" fill="none" stroke="#888888"/>`+"\n", title, panelHeight, inner)
	for _, v := range []float64{0, most / 2, most} {
		fmt.Fprintf(b, `<text x="-6" y="%.1f" text-anchor="end">%.3g</text>`+"\n", y(v)+4, v)
	}
	for _, r := range all {
		fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n", x(r), panelHeight+15, r.hosts)
	}
	fmt.Fprintf(b, `<text x="%.0f" y="%d" text-anchor="middle">hosts</text>`+"\n", inner/2, panelHeight+28)
	for i, s := range series {
		color := []string{"#1f6feb", "#d1242f"}[i]
		var line []string
		for _, r := range all {
			line = append(line, fmt.Sprintf("%.1f,%.1f", x(r), y(s.of(r))))
			fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, x(r), y(s.of(r)), color)
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/>`+"\n", strings.Join(line, " "), color)
		if len(series) > 1 {
			fmt.Fprintf(b, `<text x="%.0f" y="%d" fill="%s">%s</text>`+"\n", inner+4, 10+14*i, color, s.title)
		}
	}
}
