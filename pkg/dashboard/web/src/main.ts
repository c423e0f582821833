// Starts the dashboard: logs in, and shows the view that the address names.
import { logIn, logOut, onLoggedOut, restoreLogin, whoami } from "./api";
import { fill, h, line, refreshAges } from "./dom";
import { onConnection, run, watch } from "./live";
import { loginView } from "./login";
import { empty } from "./parts";
import { hostView } from "./views/host";
import { hostsView } from "./views/hosts";
import { overviewView } from "./views/overview";
import { sessionView } from "./views/session";
import { submitView } from "./views/submit";
import { taskView } from "./views/task";

const routes: [RegExp, (main: HTMLElement, signal: AbortSignal, ...parts: string[]) => void][] = [
  [/^#?\/?$/, overviewView],
  [/^#\/sessions\/([0-9a-f]{12})(?:\/([a-z]+))?$/, sessionView],
  [/^#\/tasks\/([0-9a-f]{12})(?:\/([a-z]+))?$/, taskView],
  [/^#\/submit$/, submitView],
  [/^#\/host$/, hostView],
  [/^#\/hosts(?:\/([a-z0-9-]{1,63}))?$/, hostsView],
];

const main = h("main", { id: "main", tabindex: -1 });
const header = h("header");
const offline = h("p", { class: "offline", role: "status", hidden: true }, "The connection to serve is lost. Trying again…");
let view = new AbortController();
let session = new AbortController();

function show(moved: boolean) {
  view.abort();
  view = new AbortController();
  const before = main.querySelector("h1")?.textContent;
  const tab = main.querySelector("nav.tabs")?.contains(document.activeElement) ? document.activeElement?.getAttribute("data-tab") : undefined;
  const hash = location.hash;
  const route = routes.find(([pattern]) => pattern.test(hash));
  for (const a of header.querySelectorAll("a")) {
    if (a.getAttribute("href") === (hash || "#/")) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  if (!route) return fill(main, empty("There is no such page."));
  const parts = (route[0].exec(hash) ?? []).slice(1).filter((p) => p !== undefined);
  main.replaceChildren();
  route[1](main, view.signal, ...parts);
  if (!moved) return;
  const heading = main.querySelector<HTMLElement>("h1");
  if (tab && heading?.textContent === before) main.querySelector<HTMLElement>(`nav.tabs [aria-current]`)?.focus();
  else {
    scrollTo(0, 0);
    (heading ?? main).focus();
  }
}

function start() {
  const login = whoami();
  session.abort();
  session = new AbortController();
  const hosts = h("li", { hidden: true }, h("a", { href: "#/hosts" }, "Hosts"));
  fill(header,
    h("button", { type: "button", class: "skip", onclick: () => main.focus() }, "Skip to content"),
    h("a", { class: "brand", href: "#/" }, "agent-sessionizer"),
    h("nav", { "aria-label": "Pages" }, h("ul", {}, h("li", {}, h("a", { href: "#/" }, "Overview")), h("li", {}, h("a", { href: "#/submit" }, "New task")), h("li", {}, h("a", { href: "#/host" }, "Host")), hosts)),
    h("span", { class: "who" }, line(login?.name, 40)),
    h("button", { type: "button", onclick: () => void logOut() }, "Log out"));
  void run(session.signal);
  watch((o) => { hosts.hidden = !o.cluster; }, session.signal);
  show(false);
}

function leave(problem?: unknown) {
  view.abort();
  session.abort();
  offline.hidden = true;
  header.replaceChildren();
  for (const d of document.querySelectorAll("dialog")) d.remove();
  loginView(main, start, problem);
}

async function begin() {
  const code = /^#code=([\w-]{16,200})$/.exec(location.hash)?.[1];
  if (location.hash.startsWith("#code=")) history.replaceState(null, "", location.pathname); // no code stays in the address
  document.body.append(header, offline, main, h("div", { id: "announcements", class: "unseen", role: "status", "aria-live": "polite" }));
  onLoggedOut(leave);
  onConnection((online) => { offline.hidden = online; });
  addEventListener("hashchange", () => {
    if (location.hash.startsWith("#code=")) location.reload(); // another link was opened in this tab
    else if (whoami()) show(true);
  });
  setInterval(refreshAges, 1000);
  if (!code) return restoreLogin() ? start() : leave();
  try {
    await logIn({ code });
    start();
  } catch (err) {
    leave(err);
  }
}

void begin();
