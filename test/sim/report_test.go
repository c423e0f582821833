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
	tasks, cores int
	join, start  time.Duration // of all hosts
	idle, busy   usage
	ran          int     // tasks of busy
	submitted    float64 // per second
	log          logged
	rss          int64 // of the largest core at the end
}

func (r result) cpu() float64      { return 1e3 * r.busy.cpu.Seconds() / float64(r.ran) } // ms for each task
func (r result) messages() float64 { return float64(r.busy.in+r.busy.out) / float64(r.ran) }

// column is a figure of the table and of the plot.
type column struct {
	title  string
	format string
	of     func(result) float64
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// share returns what each host costs a second.
func share(r result, n float64) float64 { return n / r.idle.at.Seconds() / float64(r.hosts) }

var (
	taskColumns = []column{
		{"hosts", "%.0f", func(r result) float64 { return float64(r.hosts) }},
		{"of them follow the log", "%.0f", func(r result) float64 { return float64(r.followers) }},
		{"tasks", "%.0f", func(r result) float64 { return float64(r.tasks) }},
		{"submitted, 1/s", "%.0f", func(r result) float64 { return r.submitted }},
		{"claimed, 1/s", "%.0f", func(r result) float64 { return r.log.claims }},
		{"to a host, p50, ms", "%.1f", func(r result) float64 { return ms(percentile(r.log.idle, 50)) }},
		{"to a host, p99, ms", "%.1f", func(r result) float64 { return ms(percentile(r.log.idle, 99)) }},
		{"CPU of the core, ms a task", "%.1f", result.cpu},
		{"CPU of all hosts, ms a task", "%.0f", func(r result) float64 { return 1e3 * r.busy.hosts.Seconds() / float64(r.ran) }},
		{"messages a task", "%.0f", result.messages},
		{"from the core, kB a task", "%.0f", func(r result) float64 { return float64(r.busy.sent) / float64(r.ran) / 1e3 }},
		{"entries a task", "%.1f", func(r result) float64 { return float64(r.log.entries) / float64(r.tasks) }},
		{"core's streams, kB a task", "%.1f", func(r result) float64 { return float64(r.busy.disk) / float64(r.ran) / 1e3 }},
	}
	hostColumns = []column{
		taskColumns[0],
		{"CPU of the core, ms/s", "%.2f", func(r result) float64 { return 1e3 * share(r, r.idle.cpu.Seconds()) }},
		{"messages to the core, 1/s", "%.1f", func(r result) float64 { return share(r, float64(r.idle.in)) }},
		{"messages from it, 1/s", "%.1f", func(r result) float64 { return share(r, float64(r.idle.out)) }},
		{"from it, kB/s", "%.1f", func(r result) float64 { return share(r, float64(r.idle.sent)) / 1e3 }},
		{"requests to JetStream, 1/s", "%.1f", func(r result) float64 { return share(r, float64(r.idle.requests)) }},
		{"written by the core, kB/s", "%.1f", func(r result) float64 { return share(r, float64(r.idle.written)) / 1e3 }},
		{"memory of the core at the end, MB", "%.0f", func(r result) float64 { return float64(r.rss) / 1e6 }},
		{"joined, hosts/s", "%.1f", func(r result) float64 { return float64(r.hosts) / r.join.Seconds() }},
	}
)

func grid(columns []column, all []result) string {
	var b strings.Builder
	for _, c := range columns {
		b.WriteString("| " + c.title + " ")
	}
	b.WriteString("|\n" + strings.Repeat("|---:", len(columns)) + "|\n")
	for _, r := range all {
		for _, c := range columns {
			fmt.Fprintf(&b, "| "+c.format+" ", c.of(r))
		}
		b.WriteString("|\n")
	}
	return b.String()
}

func table(all []result) string {
	return "\n" + grid(taskColumns, all) + "\nEach idle host costs:\n\n" + grid(hostColumns, all)
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
	is := before + markBegin + table(all) + "\n![What a task costs as the fleet grows](" + plotFile + ")\n\n" + markEnd + after
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
		if r.followers == measured[0].followers {
			all = append(all, r)
		}
	}
	panels := []struct {
		title  string
		series []column
	}{
		{"claimed tasks per second", []column{taskColumns[4]}},
		{"from submission to a host, ms", []column{{title: "p50", of: taskColumns[5].of}, {title: "p99", of: taskColumns[6].of}}},
		{"CPU of the core, ms a task", []column{taskColumns[7]}},
		{"messages a task", []column{taskColumns[9]}},
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

func drawPanel(b *strings.Builder, title string, series []column, all []result) {
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
