// Streams of server-sent events, read with fetch because an EventSource cannot send the key.
import { ApiError, request } from "./api";

export interface Message { event: string; data: string; id: string }

const patience = 45_000; // the server sends a heartbeat every 15 s
const longest = 16 << 20; // of one message

// messages reads the messages of a response.
export async function* messages(body: ReadableStream<Uint8Array>, alive: () => void): AsyncGenerator<Message> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  let message: Message = { event: "message", data: "", id: "" };
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      alive();
      rest += value;
      if (rest.length + message.data.length > longest) throw new Error("the server sent too long a message");
      const lines = rest.split(/\r?\n/);
      rest = lines.pop() ?? "";
      for (const text of lines) {
        if (text === "") {
          if (message.data !== "" || message.event !== "message") yield message;
          message = { event: "message", data: "", id: message.id };
          continue;
        }
        const colon = text.indexOf(":");
        const field = colon < 0 ? text : text.slice(0, colon);
        const content = colon < 0 ? "" : text.slice(colon + 1).replace(/^ /, "");
        if (field === "data") message.data += (message.data && "\n") + content;
        else if (field === "event") message.event = content;
        else if (field === "id") message.id = content;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export interface Follower { message(m: Message): void; connected(yes: boolean, err?: unknown): void; ended?(): void }

// follow reads a stream until the signal aborts or the stream has ended for good. It reconnects
// after the last message that it saw, and waits longer after each failure.
export async function follow(path: (last: string) => string, to: Follower, signal: AbortSignal) {
  let last = "";
  let failures = 0;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener("abort", stop);
    let watchdog = setTimeout(stop, patience);
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(stop, patience);
    };
    try {
      const response = await request(path(last), { headers: { Accept: "text/event-stream" }, signal: attempt.signal });
      if (response.status === 204 || !response.body) return to.ended?.();
      to.connected(true);
      for await (const m of messages(response.body, alive)) {
        failures = 0;
        if (m.id) last = m.id;
        if (m.event === "end") return to.ended?.();
        to.message(m);
      }
      to.connected(false);
    } catch (err) {
      if (signal.aborted) return;
      to.connected(false, err);
      if (err instanceof ApiError) {
        if (err.problem.status === 410) last = "oldest"; // the events after the anchor were removed
        else if ([400, 401, 403, 404].includes(err.problem.status)) return;
      }
    } finally {
      clearTimeout(watchdog);
      signal.removeEventListener("abort", stop);
    }
    await pause(Math.min(30_000, 500 * 2 ** failures++) * (0.75 + Math.random() / 2), signal);
  }
}

export function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
