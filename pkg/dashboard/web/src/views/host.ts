// The host: images, disk use, and what models were used for.
import { get } from "../api";
import { ago, fill, h, line, sizeText } from "../dom";
import { badge, empty, facts, load, table } from "../parts";
import type { Images, Use } from "../types";
import { usageByDay, usageTable } from "./session";

export function hostView(main: HTMLElement, signal: AbortSignal) {
  const [disk, images, days, models, repos] = [h("div"), h("div"), h("div"), h("div"), h("div")];
  fill(main, h("div", { class: "title" }, h("h1", { tabindex: -1 }, "Host")),
    h("section", { "aria-labelledby": "disk" }, h("h2", { id: "disk" }, "Disk"), disk),
    h("section", { "aria-labelledby": "images" }, h("h2", { id: "images" }, "Images"), images),
    h("section", { "aria-labelledby": "days" }, h("h2", { id: "days" }, "Usage by day"), days),
    h("section", { "aria-labelledby": "models" }, h("h2", { id: "models" }, "Usage by model"), models),
    h("section", { "aria-labelledby": "repos" }, h("h2", { id: "repos" }, "Usage by repository"), repos));
  void load(disk, () => get<Record<string, unknown>>("/api/v1/disk", signal), diskFacts, signal);
  void load(images, () => get<Images>("/api/v1/images", signal), imageList, signal);
  void usageByDay(days, "/api/v1/usage?by=day", signal);
  for (const [place, by] of [[models, "model"], [repos, "repo"]] as const) {
    void load(place, () => get<{ uses: Use[] }>(`/api/v1/usage?by=${by}`, signal), ({ uses }) => usageTable(by, uses), signal);
  }
}

// diskFacts shows all sizes of an answer by their names.
function diskFacts(sizes: Record<string, unknown>): HTMLElement {
  const rows = Object.entries(sizes).filter((e): e is [string, number] => typeof e[1] === "number");
  return facts(...rows.map(([name, bytes]) => [line(name.replaceAll("_", " "), 40), sizeText(bytes)] as [string, string]));
}

function imageList(list: Images): HTMLElement[] {
  return [
    ...list.making.map((m) => h("p", {}, badge("building", "busy"), ` ${line(m.name, 100)}: ${line(m.doing, 200)} `, ago(m.since))),
    ...(list.failures ?? []).slice(0, 5).map((f) => h("div", { class: "error" }, h("p", {}, line(f.error, 600), " ", ago(f.at)))),
    list.images.length === 0 ? empty("No images yet.") : table("Images", ["image", "state", "source", "size", "saved VMs", "created"], list.images.map((i) => [
      `${line(i.name, 100)} ${i.arch}`, badge(i.ready ? "ready" : "incomplete", i.ready ? "good" : "quiet"), line(i.source, 200), sizeText(i.size), i.warm?.length ?? 0, ago(i.created_at)])),
    facts(["standby VMs", list.pool.length || undefined]),
  ];
}
