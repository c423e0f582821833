// One session: its screen, terminal, events, changes, network and usage.
import { can, get, post, request, sessionPath } from "../api";
import { ago, announce, clock, countText, fill, h, line, moneyText, plural, sizeText } from "../dom";
import { diffView } from "../diff";
import { needsAttention, overview, sessionName, watch } from "../live";
import { action, badge, confirmed, empty, errorBox, facts, load, loading, perform, sessionBadge, table } from "../parts";
import { questionList } from "../question";
import { recordings } from "../recordings";
import { pause } from "../stream";
import { timeline } from "../timeline";
import type { Changes, Decision, Denial, Network, Screen, Session, Usage, Use, Window } from "../types";

const tabs: Record<string, [string, (place: HTMLElement, id: string, signal: AbortSignal) => void]> = {
  screen: ["Screen", screenTab],
  terminal: ["Terminal", terminalTab],
  timeline: ["Timeline", (place, id, signal) => fill(place, timeline(sessionPath(id), signal))],
  changes: ["Changes", changesTab],
  network: ["Network", networkTab],
  recordings: ["Recordings", recordings],
  usage: ["Usage", usageTab],
};

export function sessionView(main: HTMLElement, signal: AbortSignal, id: string, tab = "screen") {
  const [title, show] = tabs[tab] ?? tabs["screen"]!;
  const head = h("div");
  const questions = questionList();
  const panel = h("section", { class: "panel", "aria-label": title });
  const links = Object.entries(tabs).filter(([name]) => name !== "terminal" || can("admin"))
    .map(([name, [label]]) => h("li", {}, h("a", { href: `#/sessions/${id}/${name}`, "aria-current": name === tab ? "page" : undefined, "data-tab": name }, label)));
  fill(main, head, questions.root, questions.late, h("nav", { class: "tabs", "aria-label": "Parts of the session" }, h("ul", {}, links)), panel);
  fill(head, loading());

  let shown = "";
  const update = (s: Session) => {
    const text = JSON.stringify(s);
    if (text === shown) return;
    const first = shown === "";
    shown = text;
    const focused = head.contains(document.activeElement) ? document.activeElement?.textContent : undefined;
    fill(head, header(s));
    if (focused) [...head.querySelectorAll("button")].find((b) => b.textContent === focused)?.focus();
    if (first) show(panel, id, signal);
  };
  const now = overview()?.sessions.find((s) => s.id === id);
  if (now) update(now);
  else get<Session>(sessionPath(id), signal).then(update, (err) => { if (!signal.aborted) fill(head, errorBox(err)); });
  watch((o) => {
    const s = o.sessions.find((it) => it.id === id);
    if (s) update(s);
    else if (shown) get<Session>(sessionPath(id), signal).then(update, () => {});
    questions.show(o.questions.filter((q) => q.session === id && q.state === "open"));
  }, signal);
}

function header(s: Session): HTMLElement {
  const place = h("div");
  const path = sessionPath(s.id);
  const buttons: (HTMLElement | false)[] = [];
  if (can("admin") && s.state !== "gone") {
    if (["stopped", "broken"].includes(s.state)) buttons.push(action("Start", place, () => post(`${path}/start`), { kind: "primary", done: "Starting" }));
    if (s.state === "ready") buttons.push(action("Fetch", place, async () => {
      const r = await post<{ commits: number; refs: { name: string }[] | null }>(`${path}/fetch`);
      const text = `Fetched ${plural(r.commits, "commit")}, ${plural(r.refs?.length ?? 0, "ref")} changed.`;
      fill(place, h("p", { class: "done", role: "status" }, text));
    }, { title: "Fetch the agent's commits to the mirror on the host" }));
    if (s.state === "ready" && s.lease_left_s) buttons.push(action("Renew lease", place, () => post(`${path}/lease`, {}), { kind: s.ending?.includes("lease") ? "primary" : undefined, done: "The lease was renewed", title: "Let the session run for at least 4 more hours" }));
    if (s.state === "ready" && !s.restoring) buttons.push(action("Checkpoint", place, async () => {
      const c = await post<{ name: string }>(`${path}/checkpoints`, {});
      fill(place, h("p", { class: "done", role: "status" }, "Checkpoint ", line(c.name, 40), " was created. To return to it: ", h("code", {}, `agent-sessionizer restore ${s.name} ${c.name}`)));
    }, { title: "Save the disk and the memory of the running session" }));
    if (s.state === "ready" && !s.restoring && !s.task) buttons.push(action("Fork", place, async () => {
      const { sessions } = await post<{ sessions: Session[] }>(`${path}/fork`, {});
      for (const fork of sessions) location.hash = `#/sessions/${fork.id}/timeline`;
    }, { title: "Create a session that continues from the current state of this one" }));
    if (["ready", "starting", "creating"].includes(s.state)) buttons.push(action("Stop", place, () => post(`${path}/stop`), { done: "Stopping" }));
    if (s.state !== "destroying") buttons.push(action("Destroy…", place, () => destroy(s)));
  }
  return h("div", {},
    h("div", { class: "title" }, h("h1", { tabindex: -1 }, line(sessionName(s), 120)), sessionBadge(s), needsAttention(s) && s.attention?.on ? h("span", { class: "what" }, line(s.attention.on, 200)) : null, h("div", { class: "buttons" }, buttons)),
    s.error && s.state === "broken" && h("div", { class: "error" }, h("p", {}, s.error.message), s.error.hint && h("p", { class: "hint" }, "hint: ", h("code", {}, s.error.hint))),
    place,
    facts(["session", line(s.name, 100)], ["id", h("code", {}, s.id)], ["branch", line(s.branch ?? s.base?.branch, 80)], ["image", line(s.image, 60)], ["profile", line(s.profile, 60)],
      ["network", `${s.network_mode ?? ""}${s.enforced ? "" : " (not enforced)"}`], ["size", `${s.resources.cpus} CPUs, ${sizeText(s.resources.memory)}`],
      ["usage", s.usage && moneyText(s.usage.usd)], ["task", s.task && h("a", { href: `#/tasks/${s.task}` }, s.task)], ["fork of", s.fork_of && h("a", { href: `#/sessions/${s.fork_of}` }, s.fork_of)], ["workspace", line(s.workspace ?? "", 80)], ["setup", s.setup?.map((step) => `${step.step}: ${step.state}`).join(", ")], ["created", ago(s.created_at)], ["lifetime", lifetime(s)],
      ["ports", s.ports?.map((p) => `${p.guest} → ${p.host ?? "none"}`).join(", ")]));
}

function lifetime(s: Session): string | undefined {
  if (s.ending?.includes("lease")) return "the lease ends soon; then the session is stopped";
  if (s.ending?.length) return "idle; it will be stopped soon";
  if (s.restoring) return `checkpoint ${line(s.restoring, 40)} is being restored`;
  if (s.suspended) return "suspended; its programs resume when it starts";
  if (s.kept) return `kept: ${line(s.kept, 120)}`;
  if (s.ended) return s.ended === "idle" ? "stopped because it was idle" : "stopped because its lease ended";
  return s.lease_left_s ? `the lease ends in ${plural(Math.max(1, Math.round(s.lease_left_s / 60)), "minute")}` : undefined;
}

async function destroy(s: Session) {
  const lost = await get<{ what: string; hint?: string }>(`${sessionPath(s.id)}/unsaved`);
  confirmed(`Destroy ${line(s.name, 80)}?`,
    lost.what
      ? [h("div", { class: "error", role: "alert" }, h("p", {}, "This would be lost: ", h("strong", {}, lost.what)), lost.hint && h("p", { class: "hint" }, "to save it: ", h("code", {}, lost.hint)))]
      : ["It has no unsaved work. Its VM is removed."],
    lost.what ? "Destroy it and lose this work" : "Destroy",
    async () => {
      await request(`${sessionPath(s.id)}${lost.what ? "?force=true" : ""}`, { method: "DELETE" });
      announce("Destroying");
      location.hash = "#/";
    });
}

function screenTab(place: HTMLElement, id: string, signal: AbortSignal) {
  const screen = h("pre", { class: "screen text", role: "group", tabindex: 0, "aria-label": "Screen of the agent" });
  const about = h("div");
  const errors = h("div");
  const agents = h("div", { class: "agents" });
  fill(place, h("div", { class: "split" }, h("div", {}, errors, agents, screen, about), can("admin") && promptForm(id)));
  let shown = "";
  const refresh = async () => {
    while (!signal.aborted) {
      try {
        if (document.visibilityState === "visible") {
          const s = await get<Screen>(`${sessionPath(id)}/screen`, signal);
          errors.replaceChildren();
          const text = (s.screen ?? []).join("\n");
          if (text !== shown || !screen.hasChildNodes()) fill(screen, (shown = text) || "Nothing is on the agent's screen.");
          fill(agents, (s.agents ?? []).slice(0, 20).map((a) => h("span", { class: "agent" }, badge(line(a.state, 20), a.state === "blocked" ? "warn" : a.state === "error" ? "bad" : a.state === "working" ? "busy" : "quiet"), " ", line(a.name, 60), a.on ? `: ${line(a.on, 120)}` : "", " ", ago(a.since))));
          fill(about, facts(["window", line(s.window, 60)], ["branch", line(s.changes?.branch, 80)], ["changes", s.changes && `${plural(s.changes.commits, "commit")}, ${plural(s.changes.files, "changed file")}, +${countText(s.changes.insertions)} −${countText(s.changes.deletions)}`],
            ["load", s.machine && s.machine.load.toFixed(2)], ["memory", s.machine && `${sizeText(s.machine.mem_used)} of ${sizeText(s.machine.mem_total)}`], ["disk", s.machine && `${sizeText(s.machine.disk_used)} of ${sizeText(s.machine.disk_total)}`], ["reported", ago(s.at)]));
        }
      } catch (err) {
        if (signal.aborted) return;
        fill(errors, errorBox(err));
      }
      await pause(3000, signal);
    }
  };
  void refresh();
}

function promptForm(id: string): HTMLElement {
  const place = h("div");
  const field = h("textarea", { id: "prompt", rows: 4, maxlength: 16000, required: true });
  const send = h("button", { type: "submit" }, "Send prompt");
  return h("form", { class: "prompt", onsubmit: (e: Event) => {
    e.preventDefault();
    void perform(send, place, async () => { await post(`${sessionPath(id)}/prompt`, { text: field.value }); field.value = ""; }, "The prompt was sent");
  } }, h("label", { for: "prompt" }, "Prompt to the agent"), field, place, h("div", { class: "buttons" }, send));
}

function terminalTab(place: HTMLElement, id: string, signal: AbortSignal) {
  const windows = h("select", { id: "window" });
  const screen = h("div", { class: "terminal" });
  const errors = h("div");
  const bar = h("div", { class: "row bar" }, h("label", { for: "window" }, "Window"), windows, action("Refresh", errors, () => read()));
  fill(place, bar, errors, screen);
  let connection = new AbortController();
  signal.addEventListener("abort", () => connection.abort());
  const read = async () => {
    const list = (await get<{ windows: Window[] }>(`${sessionPath(id)}/windows`, signal)).windows ?? [];
    const chosen = windows.value || list.find((w) => w.active)?.id;
    fill(windows, list.slice(0, 100).map((w) => h("option", { value: w.id, selected: w.id === chosen }, `${w.index}: ${line(w.name, 60)}${w.command && w.command !== w.name ? ` (${line(w.command, 40)})` : ""}`)));
    return list.length;
  };
  const attach = async () => {
    connection.abort();
    connection = new AbortController();
    const { terminal } = await import("../terminal");
    if (!signal.aborted) terminal(screen, id, windows.value, connection.signal);
  };
  windows.addEventListener("change", () => void attach());
  void load(errors, read, (n) => {
    if (n === 0) return empty("The session has no tmux windows.");
    void attach();
    post(`${sessionPath(id)}/visit`).catch(() => {});
    return [];
  }, signal);
}

function changesTab(place: HTMLElement, id: string, signal: AbortSignal) {
  const content = h("div");
  const read = () => load(content, () => get<Changes>(`${sessionPath(id)}/diff`, signal), (c) => [
    facts(["since", c.base && h("code", {}, line(c.base, 12))]),
    diffView(c.patch ?? ""),
  ], signal);
  fill(place, h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => { content.replaceChildren(); void read(); } }, "Refresh")), content);
  void read();
}

const target = (d: { name?: string; addr?: string; port?: number; request?: string }) => d.request || (d.name || d.addr || "") + (d.port ? `:${d.port}` : "");

function networkTab(place: HTMLElement, id: string, signal: AbortSignal) {
  const path = `${sessionPath(id)}/net`;
  const policy = h("div");
  const denials = h("div");
  const decisions = h("div");
  const read = () => {
    void load(policy, () => get<Network>(path, signal), (n) => [
      facts(["mode", n.policy.mode], ["enforced", n.enforced ? "yes" : "no"], ["allowed", n.gateway && countText(n.gateway.stats.allowed)], ["denied", n.gateway && countText(n.gateway.stats.denied)],
        ["received", n.gateway && sizeText(n.gateway.stats.bytes_in)], ["sent", n.gateway && sizeText(n.gateway.stats.bytes_out)], ["gateway", n.gateway_error]),
      h("details", {}, h("summary", {}, plural(n.policy.names?.length ?? 0, "allowed name"), n.policy.denied?.length ? `, ${plural(n.policy.denied.length, "denied name")}` : "", n.policy.asked?.length ? `, ${plural(n.policy.asked.length, "name")} to ask about` : ""),
        table("Rules of the policy", ["decision", "name", "ports", "from"],
          [["deny", n.policy.denied] as const, ["ask", n.policy.asked] as const, ["allow", n.policy.names] as const].flatMap(([decision, rules]) =>
            (rules ?? []).slice(0, 500).map((r) => [decision, line(r.pattern, 200), (r.ports ?? []).join(", "), line(r.source, 100)])))),
    ], signal);
    void load(denials, () => get<{ denials: Denial[] }>(`${path}/denials`, signal), ({ denials: list }) => {
      if (list.length === 0) return empty("Nothing was denied.");
      return h("ul", { class: "rows" }, list.toSorted((a, b) => b.last.localeCompare(a.last)).slice(0, 200).map((d) => {
        const errors = h("div");
        const name = d.request || (d.name ? target(d) : "");
        return h("li", { class: "row denial" }, badge("denied", "bad"), h("span", { class: "name" }, line(target(d), 250)), h("span", { class: "what" }, `${countText(d.count)}×, ${line(d.reason, 200)}`), ago(d.last),
          can("admin") && name !== "" && action("Allow", errors, async () => {
            await post(`${path}/allow`, { names: [name] });
            announce(`Allowed ${line(name, 100)}`);
            read();
          }, { name: `Allow ${line(name, 200)}` }), errors);
      }));
    }, signal);
    void load(decisions, () => get<{ decisions: Decision[] }>(`${path}/decisions?limit=200`, signal), ({ decisions: list }) =>
      list.length === 0 ? empty("No decisions yet.") : table("Latest decisions", ["time", "decision", "target", "kind", "rule or reason"],
        list.toReversed().filter((d) => !d.end).map((d) => [clock(d.time), badge(d.allowed ? "allowed" : "denied", d.allowed ? "good" : "bad"), h("span", { class: "target" }, line(target(d), 250), d.count && d.count > 1 ? ` ${countText(d.count)}×` : ""), line(d.kind, 20), line(d.rule ? `${d.rule} ${d.source ?? ""}` : d.reason, 200)])), signal);
  };
  fill(place, h("div", { class: "buttons" }, h("button", { type: "button", onclick: read }, "Refresh")), policy, h("h2", {}, "Denied"), denials, can("admin") && allowForm(path, read), h("h2", {}, "Latest decisions"), decisions);
  read();
}

function allowForm(path: string, done: () => void): HTMLElement {
  const place = h("div");
  const field = h("input", { id: "name", type: "text", required: true, maxlength: 4000, autocomplete: "off", autocapitalize: "off", spellcheck: "false", placeholder: "files.example.org" });
  const change = (verb: string) => async () => {
    if (!field.reportValidity()) return;
    await post(`${path}/${verb}`, { names: [field.value.trim()] });
    field.value = "";
    done();
  };
  return h("form", { class: "answer", onsubmit: (e: Event) => e.preventDefault() }, h("label", { for: "name" }, "Name, @group, or METHODS URL"),
    h("div", { class: "row" }, field, action("Allow", place, change("allow"), { done: "Allowed" }), action("Deny", place, change("deny"), { done: "Denied" })), place);
}

function usageTab(place: HTMLElement, id: string, signal: AbortSignal) {
  const budget = h("div");
  const models = h("div");
  const days = h("div");
  const readBudget = () => load(budget, () => get<{ budget: { session?: string; tokens?: string; day?: string }; used?: Usage; today?: Usage }>(`${sessionPath(id)}/budget`, signal), (b) => [
    limit("Money of this session", b.used?.usd ?? 0, amount(b.budget.session), moneyText),
    limit("Tokens of this session", b.used?.tokens ?? 0, amount(b.budget.tokens), countText),
    limit("Money of all sessions today", b.today?.usd ?? 0, amount(b.budget.day), moneyText),
  ], signal);
  void readBudget();
  void load(models, () => get<{ uses: Use[] }>(`/api/v1/usage?by=model&session=${id}`, signal), ({ uses }) => usageTable("model", uses), signal);
  void usageByDay(days, `/api/v1/usage?by=day&session=${id}`, signal);
  fill(place, h("h2", {}, "Budget"), budget, can("admin") && budgetForm(id, readBudget), h("h2", {}, "By model"), models, h("h2", {}, "By day"), days);
}

// amount reads "10 USD", "2M" or "1.5k".
function amount(text: string | undefined): number | undefined {
  const m = /^\$?([\d.]+)\s*([kKmMgG]?)/.exec(text ?? "");
  return m ? Number(m[1]) * ({ k: 1e3, m: 1e6, g: 1e9 }[(m[2] ?? "").toLowerCase()] ?? 1) : undefined;
}

function limit(label: string, used: number, most: number | undefined, text: (n: number) => string): HTMLElement {
  const shown = `${text(used)}${most ? ` of ${text(most)}` : " (no limit)"}`;
  return h("div", { class: "limit" }, h("span", {}, label), h("span", { class: "number" }, shown),
    most ? h("meter", { min: 0, max: most, high: most * 0.8, optimum: 0, value: Math.min(used, most), "aria-label": `${label}: ${shown}` }) : null);
}

export function usageTable(of: string, uses: Use[]): HTMLElement {
  if (uses.length === 0) return empty("No model was used.");
  return table(`Usage by ${of}`, [of, "requests", "tokens", "US dollars"], uses.slice(0, 200).map((u) => [line(u.name || u.of, 120) + (u.unknown_price ? " (no price)" : ""), countText(u.requests), countText(u.tokens), moneyText(u.usd)]));
}

// usageByDay shows a chart and a table of the usage of each day.
export function usageByDay(place: HTMLElement, path: string, signal: AbortSignal) {
  return load(place, () => get<{ uses: Use[] }>(path, signal), ({ uses }) => {
    const days = uses.toSorted((a, b) => a.of.localeCompare(b.of)).slice(-60);
    if (days.length === 0) return empty("No model was used.");
    const chart = h("div", { class: "chart", role: "img", "aria-label": "Chart of US dollars by day; the table below has the same figures" });
    void import("../chart").then(({ bars }) => { if (!signal.aborted) bars(chart, days.map((d) => line(d.of, 10)), days.map((d) => d.usd), signal); });
    return [chart, h("details", {}, h("summary", {}, "Figures"), usageTable("day", days.toReversed()))];
  }, signal);
}

function budgetForm(id: string, done: () => void): HTMLElement {
  const place = h("div");
  const money = h("input", { id: "money", type: "text", maxlength: 40, placeholder: "10 USD, or none", autocomplete: "off" });
  const tokens = h("input", { id: "tokens", type: "text", maxlength: 40, placeholder: "2M, or none", autocomplete: "off" });
  const set = h("button", { type: "submit" }, "Change budget");
  return h("form", { class: "inline", onsubmit: (e: Event) => {
    e.preventDefault();
    void perform(set, place, async () => {
      await post(`${sessionPath(id)}/budget`, { ...(money.value && { session: money.value.trim() }), ...(tokens.value && { tokens: tokens.value.trim() }) });
      done();
    }, "The budget was changed");
  } }, h("label", { for: "money" }, "Money"), money, h("label", { for: "tokens" }, "Tokens"), tokens, set, place);
}
