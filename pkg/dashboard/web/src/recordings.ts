// The recordings of a session's or a task's terminals.
import { download, get } from "./api";
import { ago, fill, h, line, sizeText } from "./dom";
import { action, empty, load } from "./parts";
import type { Recording } from "./types";

// recordings lists recordings, and plays one of them.
export function recordings(place: HTMLElement, subject: string, signal: AbortSignal) {
  const list = h("div");
  const errors = h("div");
  const screen = h("div", { class: "terminal player" });
  let playing = new AbortController();
  signal.addEventListener("abort", () => playing.abort());
  const play = async (id: string) => {
    playing.abort();
    playing = new AbortController();
    const { player } = await import("./player");
    await player(screen, id, playing.signal);
    screen.querySelector("button")?.focus();
  };
  const row = (r: Recording) => {
    const name = line(r.title, 60) || r.id;
    const seconds = Math.max(0, Math.round((Date.parse(r.ended) - Date.parse(r.began)) / 1000));
    return h("li", { class: "row", "data-recording": r.id }, h("span", { class: "name" }, name), h("span", { class: "what" }, `${r.width}×${r.height}, ${Math.floor(seconds / 60)} min ${seconds % 60} s, ${sizeText(r.size)}`), ago(r.ended),
      action("Play", errors, () => play(r.id), { name: `Play ${name}` }),
      action("Download", errors, () => download(`/api/v1/recordings/${encodeURIComponent(r.id)}`, `${r.id}.cast`), { name: `Download ${name}` }));
  };
  const read = () => load(list, () => get<{ recordings: Recording[] }>(`/api/v1/recordings?subject=${encodeURIComponent(subject)}`, signal), ({ recordings: all }) =>
    all.length === 0 ? empty("Nothing was recorded. The settings record and recordings.tasks select what is.") : h("ul", { class: "rows" }, all.slice(0, 500).map(row)), signal);
  fill(place, h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => void read() }, "Refresh")), list, errors, screen);
  void read();
}
