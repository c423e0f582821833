// Requests to the API. The cookie alone proves nothing: every request also carries the key of
// the login, which other ports of this host cannot read.
import type { Login, Problem } from "./types";

const place = "agent-sessionizer";
const ranks = { read: 0, submit: 1, admin: 2 };

let login: Login | undefined;

// ApiError is an answer of the API that reports a problem.
export class ApiError extends Error {
  constructor(readonly problem: Problem) {
    super(problem.detail);
  }
}

export const whoami = () => login;
export const can = (scope: Login["scope"]) => login !== undefined && ranks[login.scope] >= ranks[scope];

let loggedOut: () => void = () => {};
export function onLoggedOut(f: () => void) { loggedOut = f; }

export function restoreLogin() {
  try {
    const saved = JSON.parse(localStorage.getItem(place) ?? "null");
    if (typeof saved?.key === "string" && /^[\w.~+/=-]{16,200}$/.test(saved.key)) login = saved;
  } catch {
    // what was saved is unusable
  }
  return login;
}

function setLogin(l: Login | undefined) {
  login = l;
  if (l) localStorage.setItem(place, JSON.stringify(l));
  else localStorage.removeItem(place);
}

export async function logIn(credentials: { code: string } | { token: string }): Promise<void> {
  const response = await fetch("/dashboard/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(credentials) });
  if (!response.ok) throw await problemOf(response);
  setLogin(await response.json());
}

export async function logOut(): Promise<void> {
  await request("/dashboard/logout", { method: "POST" }).catch(() => {});
  setLogin(undefined);
  loggedOut();
}

export interface Options { method?: string; json?: unknown; yaml?: string; headers?: Record<string, string>; signal?: AbortSignal | undefined }

// request performs a request and throws an ApiError if it does not succeed.
export async function request(path: string, o: Options = {}): Promise<Response> {
  const key = login?.key; // a request that was sent before may change the login
  const headers: Record<string, string> = { ...o.headers, "X-Dashboard-Key": key ?? "" };
  let body: string | undefined;
  if (o.json !== undefined) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(o.json);
  } else if (o.yaml !== undefined) {
    headers["Content-Type"] = "application/yaml";
    body = o.yaml;
  }
  let response: Response;
  try {
    response = await fetch(path, { method: o.method ?? (body === undefined ? "GET" : "POST"), headers, ...(body === undefined ? {} : { body }), signal: o.signal ?? null, cache: "no-store" });
  } catch (err) {
    if (o.signal?.aborted) throw err;
    throw new ApiError({ status: 0, code: "UNREACHABLE", detail: "serve does not answer", hint: "agent-sessionizer serve" });
  }
  if (!response.ok) {
    const problem = await problemOf(response);
    if (response.status === 401 && login) {
      if (restoreLogin()?.key !== key) location.reload(); // another tab has logged in, and the cookie is of that login
      else {
        setLogin(undefined);
        loggedOut();
      }
    }
    throw problem;
  }
  return response;
}

// get and post return the JSON of the answer.
export const get = async <T>(path: string, signal?: AbortSignal): Promise<T> => (await request(path, { signal })).json();
export const post = async <T = unknown>(path: string, json?: unknown): Promise<T> => (await request(path, { method: "POST", json })).json();

async function problemOf(response: Response): Promise<ApiError> {
  let p: Partial<Problem> = {};
  try {
    p = await response.json();
  } catch {
    // not a problem document
  }
  return new ApiError({ status: response.status, code: p.code ?? "INTERNAL", detail: p.detail ?? `the server answered with status ${response.status}`, hint: p.hint ?? "", errors: p.errors ?? [], trace_id: p.trace_id });
}

export const sessionPath = (id: string) => `/api/v1/sessions/${encodeURIComponent(id)}`;
export const taskPath = (id: string) => `/api/v1/tasks/${encodeURIComponent(id)}`;

// socket opens a WebSocket, which carries the key as a subprotocol because it cannot have headers.
export function socket(path: string): WebSocket {
  const url = new URL(path, location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return new WebSocket(url, ["agent-sessionizer", `key.${login?.key ?? ""}`]);
}

// download saves the answer to a request as a file. A link could not carry the key.
export async function download(path: string, name: string) {
  const blob = await (await request(path)).blob();
  const url = URL.createObjectURL(blob);
  const a = document.createElement("a");
  a.href = url;
  a.download = name.replace(/^.*\//, "").replace(/[^\p{L}\p{N} ._+=@-]/gu, "_").slice(-120) || "file";
  a.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
