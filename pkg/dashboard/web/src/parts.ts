// What several views consist of.
import { ApiError } from "./api";
import { announce, fill, h, line, type Child } from "./dom";
import { isOver, needsAttention } from "./live";
import type { Session, Task } from "./types";

// errorBox shows an error of the API with its hint.
export function errorBox(err: unknown): HTMLElement {
  if (!(err instanceof ApiError)) {
    console.error(err);
    return h("div", { class: "error", role: "alert" }, h("p", {}, err instanceof Error ? line(err.message) : "something went wrong"));
  }
  const p = err.problem;
  const details = (p.errors ?? []).filter((e) => e !== p.detail);
  return h("div", { class: "error", role: "alert" },
    h("p", {}, p.detail || p.title || p.code),
    details.length > 0 && h("ul", {}, details.map((e) => h("li", {}, e))),
    p.hint && h("p", { class: "hint" }, "hint: ", h("code", {}, p.hint)));
}

// perform disables a button while it does something, and shows an error below it.
export async function perform(button: HTMLButtonElement, place: Element, work: () => Promise<unknown>, done?: string) {
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true"); // a disabled button would lose the focus
  place.replaceChildren();
  try {
    await work();
    if (done) announce(done);
  } catch (err) {
    fill(place, errorBox(err));
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

// action makes a button that performs something.
export function action(label: string, place: Element, work: () => Promise<unknown>, o: { kind?: string; done?: string; title?: string; name?: string } = {}): HTMLButtonElement {
  const button = h("button", { type: "button", class: o.kind, title: o.title, "aria-label": o.name, onclick: () => void perform(button, place, work, o.done) }, label);
  return button;
}

// dialog shows a dialog, and returns a function that closes it.
export function dialog(title: string, content: (close: () => void) => HTMLElement): () => void {
  const d = h("dialog", { "aria-labelledby": "dialog-title", onclose: () => d.remove() });
  const close = () => d.close();
  fill(d, h("h2", { id: "dialog-title" }, title), content(close));
  document.body.append(d);
  d.showModal();
  return close;
}

// confirmed asks the user, and then performs something.
export function confirmed(title: string, text: (string | HTMLElement)[], verb: string, work: () => Promise<unknown>) {
  dialog(title, (close) => {
    const place = h("div");
    return h("div", {}, text.map((t) => (typeof t === "string" ? h("p", {}, t) : t)), place,
      h("div", { class: "buttons" },
        action(verb, place, async () => { await work(); close(); }, { kind: "danger" }),
        h("button", { type: "button", onclick: close }, "Cancel")));
  });
}

export function badge(state: string, tone: string): HTMLElement {
  return h("span", { class: `badge ${tone}` }, state);
}

export function sessionBadge(s: Session): HTMLElement {
  const tone: Record<string, string> = { ready: "good", creating: "busy", starting: "busy", stopping: "busy", destroying: "busy", stopped: "quiet", broken: "bad", gone: "quiet" };
  if (s.state === "ready" && s.attention) {
    const shown: Record<string, string> = { blocked: "warn", error: "bad", done: "good", working: "busy", idle: "quiet" };
    return badge(line(s.attention.state, 20), s.attention.state === "done" && !needsAttention(s) ? "quiet" : shown[s.attention.state] ?? "quiet");
  }
  return badge(line(s.state, 20), tone[s.state] ?? "quiet");
}

export function taskBadge(t: Task): HTMLElement {
  const tone = t.state === "COMPLETED" ? "good" : t.state.startsWith("FAILED") ? "bad" : isOver(t) || t.state === "PENDING" ? "quiet" : "busy";
  return badge(line(t.state.toLowerCase().replaceAll("_", " "), 20), tone);
}

// hostLink makes a link to a host of the cluster. Another host made up the name.
export function hostLink(name: string, text = line(name, 63)): HTMLElement {
  return /^[a-z0-9-]{1,63}$/.test(name) ? h("a", { href: `#/hosts/${name}` }, text) : h("span", {}, text);
}

// facts makes a list of names and values, and leaves out what has no value.
export function facts(...rows: [string, (Node | string | number | undefined | false)?][]): HTMLElement {
  return h("dl", { class: "facts" }, rows.filter(([, v]) => v !== undefined && v !== "" && v !== false).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))));
}

// table makes a table that scrolls by itself if it is too wide.
export function table(caption: string, columns: string[], rows: (Node | string | number | undefined)[][]): HTMLElement {
  const number = (i: number) => (rows.length > 0 && rows.every((r) => typeof r[i] === "number" || /^\$?[\d.,]+( [KMGT]?i?B)?$/.test(String(r[i]))) ? "number" : undefined);
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("thead", {}, h("tr", {}, columns.map((c, i) => h("th", { scope: "col", class: number(i) }, c)))),
      h("tbody", {}, rows.map((r) => h("tr", {}, r.map((cell, i) => h("td", { class: number(i) ?? (typeof cell === "string" && cell.length > 40 ? "long" : undefined) }, cell)))))));
}

export const empty = (text: string) => h("p", { class: "empty" }, text);
export const loading = () => h("p", { class: "empty", "aria-busy": "true" }, "Loading…");

// load shows what a request returns, or its error with a button to try again.
export function load<T>(place: Element, read: () => Promise<T>, show: (value: T) => Child, signal: AbortSignal) {
  const attempt = async () => {
    if (!place.hasChildNodes()) fill(place, loading());
    try {
      const value = await read();
      if (!signal.aborted) fill(place, show(value));
    } catch (err) {
      if (!signal.aborted) fill(place, errorBox(err), h("p", {}, h("button", { type: "button", onclick: () => { place.replaceChildren(); void attempt(); } }, "Try again")));
    }
  };
  return attempt();
}
