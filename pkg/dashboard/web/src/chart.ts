// A bar chart of money by day. A table beside it holds the same figures.
import uPlot from "uplot";

// bars draws a chart of values at dates into an element, and keeps its width.
export function bars(place: HTMLElement, dates: string[], values: number[], signal: AbortSignal) {
  const css = getComputedStyle(place);
  const [ink, rule, fill] = ["--quiet", "--line", "--accent"].map((name) => () => css.getPropertyValue(name)); // it follows the colour scheme
  const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "12px system-ui" };
  const chart = new uPlot({
    width: place.clientWidth, height: 180, legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false, range: [-0.6, Math.max(dates.length, 7) - 0.4] }, y: { range: (_, __, most) => [0, most * 1.1 || 1] } },
    axes: [
      { ...axis, grid: { show: false }, splits: () => dates.map((_, i) => i).filter((i) => i % Math.ceil(dates.length / 8) === 0), values: (_, at) => at.map((i) => dates[i]?.slice(5) ?? "") },
      { ...axis, size: 56, values: (_, at) => at.map((v) => `$${v}`) },
    ],
    series: [{}, { fill, stroke: fill, width: 0, points: { show: false }, paths: uPlot.paths.bars!({ size: [0.7, 48] }) }],
  }, [dates.map((_, i) => i), values], place);
  const resize = new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height: 180 }));
  resize.observe(place);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => chart.redraw(), { signal });
  signal.addEventListener("abort", () => { resize.disconnect(); chart.destroy(); });
}
