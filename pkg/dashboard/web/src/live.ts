// The overview, kept up to date for all views. A browser has only six connections to a server,
// for all its tabs. So a hidden tab has no stream, and asks now and then.
import { get } from "./api";
import { announce, line, plural } from "./dom";
import { follow, pause } from "./stream";
import type { Overview, Question, Session, Task } from "./types";

const path = "/api/v1/overview";
const hiddenEvery = 20_000;

type Listener = (o: Overview) => void;

let current: Overview | undefined;
let known: Set<string> | undefined; // ids of questions
const listeners = new Set<Listener>();
const state = new Set<(online: boolean) => void>();

export const overview = () => current;
export const sessionOf = (id: string): Session | undefined => current?.sessions.find((s) => s.id === id);
export const taskOf = (id: string): Task | undefined => current?.tasks.find((t) => t.id === id);

// watch calls a function with the overview, now and at every change, until the signal aborts.
export function watch(f: Listener, signal: AbortSignal) {
  listeners.add(f);
  signal.addEventListener("abort", () => listeners.delete(f));
  if (current) f(current);
}

export function onConnection(f: (online: boolean) => void) { state.add(f); }

// run keeps the overview up to date until the signal aborts.
export async function run(signal: AbortSignal) {
  current = known = undefined;
  listeners.clear();
  while (!signal.aborted) {
    const phase = new AbortController();
    const stop = () => phase.abort();
    signal.addEventListener("abort", stop);
    document.addEventListener("visibilitychange", stop);
    if (document.visibilityState === "hidden") {
      await get<Overview>(path, signal).then(take, () => {});
      await pause(hiddenEvery, phase.signal);
    } else {
      await follow(() => path, {
        message: (m) => { if (m.event === "overview") take(JSON.parse(m.data)); },
        connected: (yes) => state.forEach((f) => f(yes)),
      }, phase.signal);
      if (!phase.signal.aborted) await pause(5000, phase.signal);
    }
    document.removeEventListener("visibilitychange", stop);
    signal.removeEventListener("abort", stop);
  }
}

function take(o: Overview) {
  o.sessions ??= [];
  o.tasks ??= [];
  o.questions ??= [];
  current = o;
  const fresh = known ? o.questions.filter((q) => !known?.has(q.id)) : [];
  known = new Set(o.questions.map((q) => q.id));
  document.title = (o.questions.length ? `(${o.questions.length}) ` : "") + "agent-sessionizer";
  if (fresh[0]) announce(fresh.length > 1 ? plural(fresh.length, "new question") : `New question from ${asker(fresh[0])}: ${line(fresh[0].text, 200)}`);
  for (const f of [...listeners]) f(o);
}

export const asker = (q: Question) => `${line(q.kind === "network" ? "the gateway" : q.agent || "a script", 60)} in ${line(q.repo || q.session_name, 80)}`;

// needsAttention reports whether an agent waits for a person, as the picker shows it.
export function needsAttention(s: Session): boolean {
  const a = s.attention;
  if (s.state === "broken") return true;
  if (s.state !== "ready" || !a) return false;
  return a.state === "blocked" || a.state === "error" || (a.state === "done" && Date.parse(a.since) > Date.parse(s.visited_at ?? "0001-01-01T00:00:00Z"));
}

// byUrgency orders sessions that need attention as the picker does: by what they wait for, and of equal ones the
// one that has waited longest first.
export function byUrgency(a: Session, b: Session): number {
  const rank = (s: Session) => s.state === "broken" ? 1 : ["blocked", "error", "done"].indexOf(s.attention?.state ?? "");
  const since = (s: Session) => Date.parse(s.state === "broken" ? s.state_changed_at : s.attention?.since ?? "");
  return rank(a) - rank(b) || since(a) - since(b);
}

export function sessionName(s: Session): string {
  const host = s.repo_key.split("/")[0];
  const repo = host === "github.com" || s.repo_key.startsWith("local:") ? s.repo : `${host}/${s.repo}`;
  return s.label ? `${repo}@${s.label}` : repo;
}

const over = new Set(["COMPLETED", "FAILED", "FAILED_PRESERVED", "CANCELLED"]);
export const isOver = (t: Pick<Task, "state">) => over.has(t.state);
