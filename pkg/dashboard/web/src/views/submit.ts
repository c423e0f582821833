// A manifest: written, checked and submitted.
import { ApiError, request } from "../api";
import { fill, h, line } from "../dom";
import { perform } from "../parts";

const template = `version: "1"
kind: Task
metadata:
  name: run the tests
repository:
  url: owner/repo
agent:
  kind: claude
  prompt: |
    Run the tests, and fix what fails.
`;

const kept = "agent-sessionizer.manifest";

export function submitView(main: HTMLElement, signal: AbortSignal) {
  const text = h("textarea", { id: "manifest", rows: 22, spellcheck: "false", autocapitalize: "off", autocomplete: "off", wrap: "off", "aria-describedby": "position", maxlength: 1_000_000 });
  text.value = sessionStorage.getItem(kept) ?? template;
  const result = h("div");
  const position = h("p", { id: "position", class: "hint" });
  const check = h("button", { type: "button", onclick: () => void perform(check, result, validate) }, "Validate");
  const submit = h("button", { type: "submit", class: "primary" }, "Submit");
  let key = crypto.randomUUID(); // a repeated click submits one task

  const where = () => {
    const before = text.value.slice(0, text.selectionStart).split("\n");
    fill(position, `line ${before.length}, column ${(before.at(-1)?.length ?? 0) + 1}`);
  };
  text.addEventListener("input", () => {
    key = crypto.randomUUID();
    sessionStorage.setItem(kept, text.value);
    where();
  });
  document.addEventListener("selectionchange", where, { signal });
  text.addEventListener("selectionchange", where);

  const validate = () => guarded(async () => {
    const answer = await (await request("/api/v1/tasks/check", { yaml: text.value })).json() as { repository?: string; notices?: string[] };
    fill(result, h("div", { class: "done", role: "status" }, h("p", {}, "The manifest is valid.", answer.repository ? ` Repository: ${line(answer.repository, 200)}.` : ""),
      (answer.notices ?? []).map((n) => h("p", { class: "hint" }, n))));
  });
  const send = () => guarded(async () => {
    const task = await (await request("/api/v1/tasks", { yaml: text.value, headers: { "Idempotency-Key": key } })).json() as { task_id: string };
    sessionStorage.removeItem(kept);
    location.hash = `#/tasks/${task.task_id}`;
  });

  // guarded shows the errors of a manifest with buttons that go to their places.
  const guarded = async (work: () => Promise<void>) => {
    try {
      await work();
    } catch (err) {
      const errors = err instanceof ApiError ? err.problem.errors?.length ? err.problem.errors : [err.problem.detail] : [];
      const places = errors.map((e) => [e, /^[^:\s]+:(\d+):(\d+): (.*)$/s.exec(e)] as const);
      if (!places.some(([, m]) => m)) throw err;
      fill(result, h("div", { class: "error", role: "alert" }, h("p", {}, errors.length === 1 ? "The manifest has an error:" : `The manifest has ${errors.length} errors:`),
        h("ul", {}, places.map(([e, m]) => h("li", {}, m
          ? [h("button", { type: "button", class: "place", onclick: () => go(Number(m[1]), Number(m[2])) }, `line ${m[1]}, column ${m[2]}`), " ", m[3]]
          : e)))));
      const first = places.find(([, m]) => m)?.[1];
      if (first) text.setAttribute("aria-invalid", "true");
      return;
    }
    text.removeAttribute("aria-invalid");
  };
  const go = (row: number, column: number) => {
    const lines = text.value.split("\n");
    const start = lines.slice(0, row - 1).reduce((n, l) => n + l.length + 1, 0) + column - 1;
    text.focus();
    text.setSelectionRange(start, Math.max(start, start - column + 1 + (lines[row - 1]?.length ?? 0)));
    text.scrollTop = Math.max(0, (row - 5) * (text.scrollHeight / lines.length));
    where();
  };

  fill(main,
    h("div", { class: "title" }, h("h1", { tabindex: -1 }, "Submit a task")),
    h("form", { class: "manifest", onsubmit: (e: Event) => { e.preventDefault(); void perform(submit, result, send, "The task was submitted"); } },
      h("label", { for: "manifest" }, "Manifest (YAML or JSON)"), text, position, result, h("div", { class: "buttons" }, submit, check)));
  where();
}

