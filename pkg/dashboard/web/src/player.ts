// A player of recorded terminals. What it shows comes from a guest, which can draw in it, and nothing else.
import { request } from "./api";
import { fill, h } from "./dom";
import { emulator, styleSheets } from "./terminal";

interface Event { at: number; kind: string; data: string } // at: seconds
interface Cast { width: number; height: number; events: Event[] }

const longestPause = 2; // seconds that are shown of a time without output
const replayed = 2_000_000; // characters before a position that are drawn to get there, at most
const largest = 500; // columns and rows

const size = (n: unknown) => (typeof n === "number" && n >= 1 ? Math.min(Math.floor(n), largest) : 80);

// parse reads an asciicast v2 file. It leaves out lines that are none of its events.
function parse(text: string): Cast {
  const lines = text.split("\n");
  const head = JSON.parse(lines[0] ?? "{}");
  const events: Event[] = [];
  for (const l of lines.slice(1)) {
    if (l === "") continue;
    try {
      const [at, kind, data] = JSON.parse(l);
      if (typeof at === "number" && typeof data === "string" && (kind === "o" || kind === "r")) events.push({ at, kind, data });
    } catch {
      // a line that was cut off
    }
  }
  return { width: size(head.width), height: size(head.height), events };
}

const clock = (seconds: number) => {
  const two = (n: number) => String(Math.floor(n)).padStart(2, "0");
  return `${seconds >= 3600 ? `${Math.floor(seconds / 3600)}:` : ""}${two((seconds / 60) % 60)}:${two(seconds % 60)}`;
};

// Parts of a recording begin with the whole screen.
const isWhole = (e: Event) => e.kind === "o" && /^(\x1b\[\?1049h)?\x1b\[0m\x1b\[H\x1b\[2J/.test(e.data);

// player shows a recording until the signal aborts.
export async function player(place: HTMLElement, id: string, signal: AbortSignal, at = 0) {
  const cast = parse(await (await request(`/api/v1/recordings/${encodeURIComponent(id)}`, { signal })).text());
  if (signal.aborted) return;
  const end = cast.events.at(-1)?.at ?? 0;
  const term = emulator({ cols: cast.width, rows: cast.height, disableStdin: true }, signal);
  const screen = h("div", { class: "screen" });
  const toggle = h("button", { type: "button", onclick: () => (playing ? stop() : start()) }, "Play");
  const seek = h("input", { id: "seek", type: "range", min: 0, max: Math.ceil(end), value: 0, "aria-label": "Position in seconds", oninput: () => show(Number(seek.value)) });
  const time = h("span", { class: "number" });
  const speed = h("select", { id: "speed" }, [0.5, 1, 2, 5, 20].map((n) => h("option", { value: n, selected: n === 1 }, `${n}×`)));
  fill(place, h("div", { class: "row bar", role: "toolbar", "aria-label": "Player" }, toggle, seek, time, h("label", { for: "speed" }, "Speed"), speed), screen);
  styleSheets(() => term.open(screen));
  term.textarea?.setAttribute("aria-label", "Recorded terminal");

  let position = 0;
  let next = 0; // index of the next event
  let playing = false;
  const draw = (e: Event) => {
    if (e.kind === "o") return term.write(e.data);
    const [cols, rows] = e.data.split("x").map(Number);
    term.resize(size(cols), size(rows));
  };
  const label = () => {
    seek.value = String(Math.floor(position));
    fill(time, `${clock(position)} / ${clock(end)}`);
  };
  // show draws what the terminal showed at a position.
  const show = (to: number) => {
    to = Math.max(to, cast.events[0]?.at ?? 0); // the first screen, not an empty one
    let first = cast.events.findIndex((e) => e.at > to);
    if (first < 0) first = cast.events.length;
    let from = first;
    for (let left = replayed; from > 0 && left > 0; ) {
      const e = cast.events[--from]!;
      left -= e.data.length;
      if (isWhole(e)) break;
    }
    term.reset();
    term.resize(cast.width, cast.height);
    const resized = cast.events.slice(0, from).findLast((e) => e.kind === "r");
    if (resized) draw(resized);
    for (const e of cast.events.slice(from, first)) draw(e);
    [position, next] = [to, first];
    label();
  };
  const stop = () => {
    playing = false;
    fill(toggle, "Play");
  };
  const start = () => {
    if (next >= cast.events.length) show(0);
    playing = true;
    fill(toggle, "Pause");
    let last = performance.now();
    const step = (now: number) => {
      if (!playing || signal.aborted) return;
      position += ((now - last) / 1000) * Number(speed.value);
      last = now;
      for (let e = cast.events[next]; e && e.at <= position; e = cast.events[++next]) draw(e);
      const coming = cast.events[next];
      if (!coming) stop();
      else position = Math.max(position, coming.at - longestPause);
      label();
      if (playing) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  };
  show(Math.min(at, end));
}
