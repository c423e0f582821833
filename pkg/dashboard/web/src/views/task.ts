// One task: its progress, output, results and patch.
import { can, download, get, post, request, taskPath } from "../api";
import { ago, announce, fill, h, line, moneyText, plural, sizeText } from "../dom";
import { diffView } from "../diff";
import { isOver, overview, taskOf, watch } from "../live";
import { action, confirmed, empty, errorBox, facts, hostLink, load, loading, taskBadge } from "../parts";
import { recordings } from "../recordings";
import { pause } from "../stream";
import { timeline } from "../timeline";
import type { Artifact, Task } from "../types";

const tailBytes = 200_000; // of a log, at most
const patchBytes = 2_000_000;

const tabs: Record<string, [string, (place: HTMLElement, id: string, signal: AbortSignal) => void]> = {
  timeline: ["Timeline", (place, id, signal) => fill(place, timeline(taskPath(id), signal))],
  output: ["Output", outputTab],
  artifacts: ["Artifacts", artifactsTab],
  changes: ["Changes", changesTab],
  recordings: ["Recordings", recordings],
};

export function taskView(main: HTMLElement, signal: AbortSignal, id: string, tab = "timeline") {
  const [title, show] = tabs[tab] ?? tabs["timeline"]!;
  const head = h("div", {}, loading());
  const panel = h("section", { class: "panel", "aria-label": title });
  fill(main, head, h("nav", { class: "tabs", "aria-label": "Parts of the task" }, h("ul", {}, Object.entries(tabs).map(([name, [label]]) =>
    h("li", {}, h("a", { href: `#/tasks/${id}/${name}`, "aria-current": name === tab ? "page" : undefined, "data-tab": name }, label))))), panel);

  let shown: Task | undefined;
  const update = (t: Task) => {
    const old = shown;
    if (JSON.stringify(old) === JSON.stringify(t)) return;
    shown = t;
    fill(head, header(t));
    if (!old || (tab !== "timeline" && isOver(old) !== isOver(t))) show(panel, id, signal); // its results exist now
  };
  const read = () => get<Task>(taskPath(id), signal).then(update, (err) => { if (!signal.aborted) fill(head, errorBox(err)); });
  const now = taskOf(id);
  if (now) update(now);
  else void read();
  watch(() => {
    const t = taskOf(id);
    if (t) update(t);
    else if (overview() && shown && !isOver(shown)) void read();
  }, signal);
}

function header(t: Task): HTMLElement {
  const place = h("div");
  const path = taskPath(t.id);
  const buttons: HTMLElement[] = [];
  if (can("submit")) {
    if (!isOver(t) && t.desired === "run") buttons.push(action("Cancel…", place, async () => confirmed(`Cancel ${line(t.name || t.id, 80)}?`, ["The agent is asked to end. Its results so far are collected, and its VM is removed."], "Cancel the task", async () => {
      await request(path, { method: "DELETE" });
      announce("Cancelling");
    })));
    if (isOver(t)) buttons.push(action("Retry", place, async () => {
      const again = await post<{ task_id: string }>(`${path}/retry`);
      location.hash = `#/tasks/${again.task_id}`;
    }));
    if (t.state === "FAILED_PRESERVED") buttons.push(action("Remove its VM", place, () => post(`${path}/destroy`), { done: "Removing the VM" }));
  }
  const failure = t.error?.message || (t.outcome && t.outcome.result !== "success" ? t.outcome.reason : "");
  const hint = t.error?.hint || t.outcome?.hint;
  return h("div", {},
    h("div", { class: "title" }, h("h1", { tabindex: -1 }, line(t.name || t.id, 120)), taskBadge(t), h("div", { class: "buttons" }, buttons)),
    failure ? h("div", { class: "error" }, h("p", {}, failure), hint && h("p", { class: "hint" }, "hint: ", h("code", {}, hint))) : null,
    place,
    facts(["id", h("code", {}, t.id)], ["repository", line(t.repository, 200)], ["agent", line([t.agent, t.model].filter(Boolean).join(" "), 100)], ["host", t.host && hostLink(t.host)], ["session", t.session && h("a", { href: `#/sessions/${t.session}` }, t.session)],
      ["attempt", t.attempt], ["result", t.outcome && line(t.outcome.result, 40) + (t.outcome.exit_code !== undefined ? `, exit code ${t.outcome.exit_code}` : "")],
      ["progress", t.progress && t.progress.turns > 0 && [plural(t.progress.turns, "turn"), plural(t.progress.tool_calls, "tool call"), line(t.progress.current_tool, 80)].filter(Boolean).join(", ")],
      ["usage", t.usage && moneyText(t.usage.usd)], ["labels", Object.entries(t.labels ?? {}).map(([k, v]) => `${k}=${v}`).join(", ")],
      ["submitted", ago(t.created_at)], ["by", line(t.actor, 60)], ["ended", t.ended_at && ago(t.ended_at)], ["retry of", t.retry_of && h("a", { href: `#/tasks/${t.retry_of}` }, t.retry_of)]));
}

// Sequences with which output colours or moves text.
const sequences = /\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]/g;

function outputTab(place: HTMLElement, id: string, signal: AbortSignal) {
  fill(place, (["stdout", "stderr"] as const).map((stream) => {
    const out = h("pre", { class: "log text", role: "group", tabindex: 0, "aria-label": stream });
    const status = h("div");
    void tail(id, stream, out, status, signal);
    return h("section", { "aria-label": stream }, h("h2", {}, stream), status, out);
  }));
}

// tail shows the end of a log, and what is added to it.
async function tail(id: string, stream: string, out: HTMLElement, status: HTMLElement, signal: AbortSignal) {
  const path = `${taskPath(id)}/logs?stream=${stream}`;
  let offset = -1;
  let text = "";
  while (!signal.aborted) {
    try {
      if (offset < 0) {
        const size = Number((await request(path, { method: "HEAD", signal })).headers.get("X-Log-Size") ?? 0);
        offset = Math.max(0, size - tailBytes);
        if (offset > 0) fill(status, h("p", { class: "hint" }, `The last ${sizeText(tailBytes)} of ${sizeText(size)}.`));
      }
      const task = taskOf(id);
      const response = await request(`${path}&offset=${offset}`, { signal });
      const bytes = new Uint8Array(await response.arrayBuffer());
      offset += bytes.length;
      if (bytes.length > 0 || !out.hasChildNodes()) {
        const bottom = out.scrollTop + out.clientHeight >= out.scrollHeight - 20;
        text = (text + new TextDecoder().decode(bytes)).slice(-tailBytes);
        fill(out, text.replace(sequences, "") || "No output.");
        if (bottom) out.scrollTop = out.scrollHeight;
      }
      if (overview() && (!task || isOver(task))) return;
    } catch (err) {
      if (signal.aborted) return;
      fill(status, errorBox(err));
      if (overview() && isOver(taskOf(id) ?? { state: "COMPLETED" })) return;
    }
    await pause(2000, signal);
  }
}

const artifactPath = (id: string, name: string) => `${taskPath(id)}/artifacts/${name.split("/").map(encodeURIComponent).join("/")}`;

function artifactsTab(place: HTMLElement, id: string, signal: AbortSignal) {
  void load(place, () => get<{ artifacts: Artifact[]; skipped: { name: string; reason: string }[] }>(`${taskPath(id)}/artifacts`, signal), ({ artifacts, skipped }) => {
    const errors = h("div");
    return [
      artifacts.length === 0 ? empty("No artifacts yet.") : h("div", { class: "buttons" }, action("Download all", errors, () => download(`${taskPath(id)}/bundle`, `${id}.tar.gz`))),
      errors,
      h("ul", { class: "rows" }, artifacts.slice(0, 1000).map((a) => {
        const failed = h("div");
        return h("li", { class: "row artifact" }, h("span", { class: "name" }, line(a.name, 400)), h("span", { class: "meta" }, h("span", {}, sizeText(a.size)), h("code", { title: a.sha256 }, a.sha256.slice(0, 12))),
          action("Download", failed, () => download(artifactPath(id, a.name), a.name), { name: `Download ${line(a.name, 200)}` }), failed);
      })),
      skipped.length > 0 && h("h2", {}, "Left out"),
      h("ul", { class: "rows" }, skipped.slice(0, 1000).map((s) => h("li", { class: "row" }, h("span", { class: "name" }, line(s.name, 400)), h("span", { class: "what" }, line(s.reason, 200))))),
    ];
  }, signal);
}

function changesTab(place: HTMLElement, id: string, signal: AbortSignal) {
  void load(place, async () => {
    const { artifacts } = await get<{ artifacts: Artifact[] }>(`${taskPath(id)}/artifacts`, signal);
    const patch = artifacts.find((a) => a.name === `${id}.patch`);
    if (!patch) return undefined;
    const response = await request(artifactPath(id, patch.name), { headers: { Range: `bytes=0-${patchBytes - 1}` }, signal });
    return { text: await response.text(), cut: patch.size > patchBytes };
  }, (patch) => (patch ? diffView(patch.text, patch.cut) : empty("The task has no patch.")), signal);
}
