// Elements are made only here. All text, whether from a guest or not, becomes text nodes and
// attributes of an allowlist, so it can never become markup, a script or an address.

export type Child = Node | string | number | false | null | undefined | Child[];
type Handler = (event: any) => void;
type Attributes = Record<string, string | number | boolean | undefined | Handler>;

const allowed = new Set(
  `accept autocapitalize autocomplete class cols colspan datetime dir disabled enterkeyhint for hidden high href id
  inputmode list low max maxlength min name open optimum placeholder readonly required role rows scope selected spellcheck
  tabindex title type value wrap`.split(/\s+/),
);
const events = new Set(["onclick", "onsubmit", "oninput", "onchange", "ontoggle", "onclose", "onkeydown", "onpointerdown"]);
const tags = new Set(
  `a article b button code datalist dd details dialog div dl dt fieldset footer form h1 h2 h3 header input label legend li
  main meter nav ol option p pre progress section select small span strong summary table tbody td textarea th thead time tr ul`.split(/\s+/),
);

// h makes an element. It throws for a tag, attribute or address that is not on the allowlists.
export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes?: Attributes, ...children: Child[]): HTMLElementTagNameMap[K] {
  if (!tags.has(tag)) throw new Error(`tag ${tag}`);
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") {
      if (!events.has(name)) throw new Error(`event ${name}`);
      el.addEventListener(name.slice(2), value);
    } else if (value !== undefined && value !== false) {
      if (!allowed.has(name) && !/^(aria|data)-[a-z-]+$/.test(name)) throw new Error(`attribute ${name}`);
      const plain = value === true ? "" : visible(String(value), 4000);
      if (name === "href" && !/^#[\w/.,@-]*$/.test(plain)) throw new Error("href must be a fragment of this page");
      el.setAttribute(name, plain);
    }
  }
  append(el, children);
  return el;
}

function append(el: Element, children: Child[]) {
  for (const child of children) {
    if (Array.isArray(child)) append(el, child);
    else if (child instanceof Node) el.append(child);
    else if (child !== null && child !== undefined && child !== false) el.append(document.createTextNode(visible(String(child))));
  }
}

// Characters that hide text, or change its direction.
const invisible = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\ufff9-\ufffb\u{e0000}-\u{e0fff}]|[\ud800-\udfff]/gu;

// visible shows characters that hide or reorder text by their numbers, and shortens long text.
export function visible(text: string, most = 200_000): string {
  if (text.length > most) text = text.slice(0, most) + "…";
  return text.replace(invisible, (c) => `⟨${(c.codePointAt(0) ?? 0).toString(16)}⟩`);
}

// line is like visible, but for text of one line that a guest could make very long.
export const line = (text: string | undefined, most = 300) => visible((text ?? "").replace(/\s+/g, " ").trim(), most);

// fill replaces the children of an element.
export function fill(el: Element, ...children: Child[]) {
  el.replaceChildren();
  append(el, children);
}

interface Kept { node: HTMLElement; signature: string }
const lists = new WeakMap<Element, Map<string, Kept>>();

// keyed brings the children of an element in line with items. It keeps the element of an item
// that has not changed, so that what a user typed there and the focus stay.
export function keyed<T>(parent: Element, items: T[], key: (item: T) => string, render: (item: T) => HTMLElement, of: (item: T) => unknown = (i) => i) {
  const old = lists.get(parent) ?? new Map<string, Kept>();
  const now = new Map<string, Kept>();
  let refocus: HTMLElement | undefined;
  for (const item of items) {
    const id = key(item);
    const signature = JSON.stringify(of(item));
    let kept = old.get(id);
    if (kept?.signature !== signature) {
      const index = kept ? focusables(kept.node).indexOf(document.activeElement as HTMLElement) : -1;
      const node = render(item);
      if (index >= 0) refocus = focusables(node)[index];
      kept?.node.replaceWith(node);
      kept = { node, signature };
    }
    now.set(id, kept);
  }
  const nodes = new Set([...now.values()].map((k) => k.node));
  const focused = document.activeElement as HTMLElement;
  if (!refocus && parent.contains(focused)) refocus = focused; // it loses the focus if its row moves
  for (const child of [...parent.children]) if (!nodes.has(child as HTMLElement)) child.remove();
  let at = parent.firstElementChild;
  for (const node of nodes) {
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at); // moves only what is in another place
  }
  lists.set(parent, now);
  if (refocus !== document.activeElement) refocus?.focus();
}

const focusables = (el: HTMLElement) => [...el.querySelectorAll<HTMLElement>("a[href], button, input, select, textarea, summary")];

// ago makes the age of a time, which refreshAges keeps up to date.
export function ago(at: string | undefined): HTMLElement {
  const time = Date.parse(at ?? "");
  if (!at || Number.isNaN(time) || time < 0) return h("span");
  return h("time", { datetime: new Date(time).toISOString(), title: new Date(time).toLocaleString() }, age(time));
}

function age(time: number): string {
  const s = Math.max(0, Math.round((Date.now() - time) / 1000));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

export function refreshAges() {
  for (const el of document.querySelectorAll("time[datetime]:not(.clock)")) {
    const text = age(Date.parse(el.getAttribute("datetime") ?? ""));
    if (el.textContent !== text) el.textContent = text;
  }
}

// clock makes a time of day.
export function clock(at: string): HTMLElement {
  const d = new Date(at);
  if (Number.isNaN(d.getTime())) return h("span");
  const today = new Date().toDateString() === d.toDateString();
  const text = d.toLocaleString(undefined, { ...(!today && { dateStyle: "short" }), timeStyle: "medium", hour12: false });
  return h("time", { class: "clock", datetime: d.toISOString() }, text);
}

// announce has a screen reader speak a text.
export function announce(text: string) {
  const region = document.getElementById("announcements");
  if (region) region.textContent = line(text);
}

export const sizeText = (bytes: number) => {
  let unit = 0;
  for (; bytes >= 1000 && unit < 5; unit++) bytes /= 1024;
  return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
};
export const countText = (n: number) => n.toLocaleString();
export const moneyText = (usd: number) => `$${usd.toFixed(usd && usd < 0.1 ? 4 : 2)}`;
export const plural = (n: number, one: string, many = one + "s") => `${countText(n)} ${n === 1 ? one : many}`;
