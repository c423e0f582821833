package picture

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "draw docs/benchmarks.svg again")

const (
	benchmarks = "../../docs/benchmarks.json"
	benchChart = "../../docs/benchmarks.svg"
)

func TestChartIsCurrent(t *testing.T) {
	text, err := os.ReadFile(benchmarks)
	if err != nil {
		t.Fatal(err)
	}
	want, err := Chart(text)
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(benchChart, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(benchChart)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s does not show %s; run: make charts", benchChart, benchmarks)
	}
	checkXML(t, want)
}

func TestChart(t *testing.T) {
	svg, err := Chart([]byte(`{"rows": [
		{"name": "alone", "table": "A", "unit": "s", "baseline": null, "ratio": null, "aim": "≤ 1", "met": true},
		{"name": "vm_upload_vs_slirp", "table": "<B>", "unit": "Mbit/s", "baseline": {"median": 50}, "baseline_name": "a & b", "ratio": 2, "aim": "≥ 5×", "met": false},
		{"name": "ssh_ready", "table": "<B>", "unit": "s", "baseline": {"median": 2}, "baseline_name": "other", "ratio": 1.5, "aim": "≤ 10", "met": true},
		{"name": "late", "table": "<B>", "unit": "of 10,000", "baseline": {"median": 0}, "baseline_name": "other", "ratio": 0.5, "aim": "≤ 0", "met": false}]}`))
	if err != nil {
		t.Fatal(err)
	}
	checkXML(t, svg)
	for _, want := range []string{ // the axis has 200 pixels from 0.2× to 1×, and as many from 1× to 5×
		`y="136">&lt;B&gt;</text>`,
		`>VM upload *</text><rect class="better" x="345.9" y="145" width="86.1" height="9"/><path class="aim" d="M232.0 `,
		`<text class="end missed" x="690" y="153">0.500×</text><text class="faint" x="700" y="153">a &amp; b</text>`,
		`>SSH ready</text><rect class="worse" x="432.0" y="160" width="50.4" height="9"/><path class="aim" d="M632.0 `,
		`<text class="end" x="690" y="168">1.500×</text>`,
		`>late</text><rect class="better" x="345.9" y="175" width="86.1" height="9"/><text `,
	} {
		if !strings.Contains(svg, want) {
			t.Errorf("Chart = %s, want %s in it", svg, want)
		}
	}
	if strings.Contains(svg, "alone") {
		t.Error("the chart shows a figure without an alternative")
	}
	for _, row := range []string{`"unit": "s", "aim": "≥ 1×"`, `"unit": "1/s", "aim": "≤ 1×"`, `"unit": "s", "aim": "≤ x"`} {
		if _, err := Chart([]byte(`{"rows": [{"name": "wrong", "ratio": 1, ` + row + `}]}`)); err == nil {
			t.Errorf("Chart of %s: got no error", row)
		}
	}
}
