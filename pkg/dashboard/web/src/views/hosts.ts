// The hosts of the cluster, or one of them with its tasks. A host writes most of what is shown about
// it, and other hosts do not check it.
import { can, get, post, request } from "../api";
import { ago, announce, fill, h, keyed, line, plural, sizeText } from "../dom";
import { isOver, overview, watch } from "../live";
import { action, badge, confirmed, empty, errorBox, facts, hostLink, loading } from "../parts";
import { pause } from "../stream";
import type { ClusterHost, ClusterHosts, Overview, Task } from "../types";
import { section, taskRow } from "./overview";

const path = "/api/v1/cluster/hosts";
const every = 5000; // as often as hosts send heartbeats
const most = 20; // labels and images that are shown of a host

const tones: Record<string, string> = { up: "good", drains: "busy", drained: "quiet", silent: "warn", revoked: "bad", removed: "quiet", joined: "busy" };
const meanings: Record<string, string> = {
  drains: "it will take no more tasks", drained: "it takes no more tasks", silent: "it sends no heartbeats", revoked: "it was silent too long, and its tasks were released", joined: "it has sent no heartbeat yet",
};

export function hostsView(main: HTMLElement, signal: AbortSignal, only?: string) {
  const summary = h("p", { class: "summary", role: "status" });
  const waiting = h("div", {}, loading());
  const [unread, failed] = [h("div"), h("div")]; // errors of the list and of a button
  const list = h("ul", { class: "cards hosts" });
  const more = h("button", { type: "button", hidden: true, onclick: () => { removed = true; show(); list.querySelector<HTMLElement>("li:last-child a")?.focus(); } });
  const running = section("Running tasks");
  const ended = section("Ended tasks");
  const limited = h("p", { class: "hint", hidden: true }, "Only the latest 100 tasks of the cluster are searched.");
  const elsewhere = h("p", { class: "hint", hidden: true }, "To drain or remove hosts, open the dashboard of a core.");
  let latest: ClusterHosts | undefined;
  let removed = only !== undefined;

  const show = () => {
    const o = overview();
    if (only) {
      const of = (o?.tasks ?? []).filter((t) => hostOf(t, latest) === only);
      running.show(of.filter((t) => !isOver(t)), (t) => t.id, taskRow);
      ended.show(of.filter(isOver), (t) => t.id, taskRow);
      limited.hidden = (o?.tasks.length ?? 0) < 100;
    }
    if (!latest) return;
    const l = latest;
    const shown = l.hosts.filter((it) => (only ? it.name === only : removed || it.state !== "removed"));
    const text = only ? "" : `cluster ${line(l.cluster, 63)} · ${count(l.hosts)}`;
    if (summary.textContent !== text) summary.textContent = text;
    fill(waiting, shown.length === 0 && empty("There is no such host."));
    const gone = l.hosts.length - l.hosts.filter((it) => it.state !== "removed").length;
    more.hidden = removed || gone === 0;
    more.textContent = `Show ${plural(gone, "removed host")}`;
    elsewhere.hidden = !can("admin") || isCore(l);
    // What changes with every heartbeat is outside of what can have the focus.
    keyed(list, shown, (it) => it.name, (it) => card(it, l, failed, only, read), (it) => [it.state, it.role, l.host, tasksText(it, l, o)]);
    [...list.children].forEach((el, i) => fill(el.querySelector(".data")!, data(shown[i]!)));
  };
  let problem = "";
  const read = async () => {
    try {
      latest = await get<ClusterHosts>(path, signal);
      if (problem) unread.replaceChildren();
      problem = "";
    } catch (err) {
      if (signal.aborted) return;
      waiting.replaceChildren();
      const text = String(err);
      if (text !== problem) fill(unread, errorBox(err)); // a screen reader speaks it once
      problem = text;
    }
    if (!signal.aborted) show();
  };
  const keep = async () => {
    while (!signal.aborted) {
      if (document.visibilityState === "visible") await read();
      await pause(every, signal);
    }
  };

  fill(main,
    h("div", { class: "title" }, h("h1", { tabindex: -1 }, only ? `Host ${only}` : "Hosts"), summary, only && h("a", { href: "#/hosts" }, "All hosts")),
    unread, waiting, failed, list, more, elsewhere, only && [running.root, ended.root, limited]);
  watch(show, signal);
  void keep();
}

// isCore reports whether the host that answers may change the others.
const isCore = (l: ClusterHosts) => l.hosts.some((it) => it.name === l.host && it.role === "core");

// hostOf returns the host of a task: the API leaves out its own, and a task that waits has none.
const hostOf = (t: Task, l: ClusterHosts | undefined) => t.host || (t.state === "PENDING" ? undefined : l?.host);

function count(hosts: ClusterHost[]): string {
  const states = new Map<string, number>();
  for (const { state } of hosts) if (state !== "removed") states.set(state, (states.get(state) ?? 0) + 1);
  return [...states].map(([state, n]) => `${n} ${line(state, 20)}`).join(", ");
}

function tasksText(it: ClusterHost, l: ClusterHosts, o: Overview | undefined): string {
  const n = (o?.tasks ?? []).filter((t) => !isOver(t) && hostOf(t, l) === it.name).length;
  return `Tasks of ${line(it.name, 63)}${n ? ` (${n} running)` : ""}`;
}

function card(it: ClusterHost, l: ClusterHosts, failed: HTMLElement, only: string | undefined, read: () => Promise<void>): HTMLElement {
  const name = line(it.name, 63);
  const of = `${path}/${encodeURIComponent(it.name)}`;
  const buttons: (HTMLElement | false)[] = [];
  if (can("admin") && it.state !== "removed" && isCore(l)) {
    const drained = it.state === "drained" || it.state === "drains";
    buttons.push(
      action(drained ? "Undrain" : "Drain", failed, async () => {
        await post(`${of}/drain`, { drained: !drained });
        await read();
      }, { done: drained ? `${name} takes tasks again` : `${name} takes no more tasks`, name: `${drained ? "Undrain" : "Drain"} ${name}`, title: drained ? "Let it take tasks again" : "Let it take no more tasks; those that it has continue" }),
      it.name !== l.host && action("Remove…", failed, async () => confirmed(`Remove ${name} from the cluster?`, [
        "This cannot be undone: its keys are refused from now on, and its name is never used again.",
        "Its tasks are released after 90 seconds. They run again on other hosts if their manifests allow that, and fail otherwise."], "Remove it for good", async () => {
        await request(of, { method: "DELETE" });
        announce(`${name} was removed`);
        await read();
      }), { name: `Remove ${name}…` }));
  }
  return h("li", { class: "host", "data-host": name },
    h("div", { class: "title" },
      h("h2", {}, name, it.name === l.host && " (this host)"), badge(line(it.state, 20), tones[it.state] ?? "quiet"), h("span", { class: "what" }, meanings[it.state]),
      h("div", { class: "buttons" }, !only && hostLink(it.name, tasksText(it, l, overview())), buttons)),
    h("div", { class: "data" }));
}

function data(it: ClusterHost): HTMLElement {
  const beats = it.heartbeat !== undefined;
  return facts(["role", line(it.role, 20)],
    ["free slots", beats && `${it.free_slots} of ${it.slots}`], ["free memory", beats && sizeText(it.free_memory)], ["free disk", beats && sizeText(it.free_disk)],
    ["machine", line(`${it.arch ?? ""} ${it.accel ?? ""}`, 60)], ["version", line(it.version, 80)],
    ["labels", some(Object.entries(it.labels ?? {}).map(([key, value]) => `${line(key, 60)}=${line(value, 60)}`))],
    ["images", some((it.images ?? []).map((i) => line(i, 60)))],
    ["heartbeat", beats && ago(it.heartbeat)], ["joined", ago(it.joined_at)], ["removed", it.removed_at !== undefined && ago(it.removed_at)]);
}

const some = (all: string[]) => all.slice(0, most).join(", ") + (all.length > most ? `, and ${all.length - most} more` : "");
