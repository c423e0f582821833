// The events of a session or a task, live.
import { get } from "./api";
import { clock, fill, h, line, moneyText, plural, sizeText } from "./dom";
import { errorBox, loading } from "./parts";
import { follow } from "./stream";
import type { Event } from "./types";

const most = 400; // events that are shown

interface Page { events: Event[]; oldest: number; newest: number }

// timeline shows the latest events of a subject, the newest first, and new ones as they happen.
export function timeline(base: string, signal: AbortSignal): HTMLElement {
  const list = h("ol", { class: "timeline", reversed: undefined });
  const status = h("div", { role: "status", class: "hint" });
  const root = h("div", {}, status, list);
  fill(status, loading());
  const run = async () => {
    const page = await get<Page>(`${base}/events?after=oldest&limit=1`, signal);
    let after = Math.max(page.oldest - 1, page.newest - most, 0);
    if (after >= page.oldest) fill(status, `The latest ${most} events; earlier ones: `, h("code", {}, "agent-sessionizer logs"));
    else status.replaceChildren();
    let pending: Event[] = [];
    const show = () => {
      list.prepend(...pending.reverse().map(eventRow));
      pending = [];
      while (list.children.length > most) list.lastElementChild?.remove();
    };
    await follow((last) => `${base}/events?after=${encodeURIComponent(last || String(after))}`, {
      message: (m) => {
        if (m.event !== "message") return;
        const event = JSON.parse(m.data) as Event;
        after = event.seq;
        if (pending.push(event) === 1) setTimeout(show, 50);
      },
      connected: (yes, err) => fill(status, !yes && err ? errorBox(err) : null),
    }, signal);
  };
  run().catch((err) => { if (!signal.aborted) fill(status, errorBox(err)); });
  return root;
}

function eventRow(e: Event): HTMLElement {
  const [text, tone] = describe(e);
  return h("li", { class: tone, "data-kind": line(e.kind, 20) }, clock(e.at), " ", h("span", { class: "kind" }, line(e.kind, 20)), " ", h("span", { class: "what" }, text));
}

// describe returns a line about an event, and its tone.
function describe(e: Event): [string, string] {
  const d = e.data ?? {};
  const t = (name: string, length = 400) => line(typeof d[name] === "string" || typeof d[name] === "number" ? String(d[name]) : "", length);
  const join = (...parts: string[]) => parts.filter(Boolean).join(" · ");
  switch (e.kind) {
    case "phase": {
      const bad = /^(broken|FAILED)/.test(t("to"));
      return [join(d.from ? `${t("from")} → ${t("to")}` : t("to"), line(d.outcome?.result, 40), t("reason") || line(d.outcome?.reason), t("hint")), bad ? "bad" : "strong"];
    }
    case "step":
      return [join(t("name"), t("state"), d.state !== "start" && d.elapsed_ms ? `${(Number(d.elapsed_ms) / 1000).toFixed(1)} s` : "", t("detail")), d.state === "failed" ? "bad" : d.state === "done" ? "" : "quiet"];
    case "warning":
    case "error":
      return [join(t("message") || t("error") || line(JSON.stringify(d)), t("hint")), "warn"];
    case "attention":
      return [join(t("agent"), t("state"), t("on")), d.state === "blocked" || d.state === "error" ? "warn" : ""];
    case "question":
      return [join(t("state"), t("agent"), t("text"), d.answer ? `answer: ${t("answer")}` : "", d.by ? `by ${t("by")}` : ""), d.state === "open" ? "warn" : ""];
    case "net":
      return [join(d.allow ? `allow ${t("allow")}` : "", d.deny ? `deny ${t("deny")}` : "", d.host_services ? `host services ${t("host_services")}` : ""), ""];
    case "fetch":
      return [`${plural(Number(d.commits) || 0, "commit")}, ${plural(Number(d.refs) || 0, "ref")}`, ""];
    case "exec":
      return [join(t("exec"), t("state"), d.exit_code !== undefined ? `exit code ${t("exit_code")}` : "", t("signal"), t("actor")), ""];
    case "heartbeat":
      return [join(`output ${sizeText(Number(d.stdout_bytes) || 0)}`, `memory ${sizeText(Number(d.memory_bytes) || 0)}`, d.usage?.turns ? plural(Number(d.usage.turns), "turn") : "", d.usage?.cost_usd ? moneyText(Number(d.usage.cost_usd)) : ""), "quiet"];
    case "artifacts":
      return [join(plural(Number(d.files) || 0, "file"), sizeText(Number(d.bytes) || 0), d.skipped ? `${t("skipped")} skipped` : ""), ""];
    case "outcome":
      return [join(t("result"), t("reason"), d.exit_code !== undefined ? `exit code ${t("exit_code")}` : ""), d.result === "success" ? "strong" : "bad"];
    default:
      return [line(Object.entries(d).map(([k, v]) => `${k}: ${typeof v === "object" ? JSON.stringify(v) : v}`).join(" · "), 600), ""];
  }
}
