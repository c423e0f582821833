// What needs the user, all sessions, and the latest tasks.
import { can, post } from "../api";
import { ago, fill, h, keyed, line, moneyText, plural } from "../dom";
import { byUrgency, isOver, needsAttention, sessionName, watch } from "../live";
import { dialog, empty, loading, perform, sessionBadge, taskBadge } from "../parts";
import { questionList } from "../question";
import type { Overview, Session, Task } from "../types";

const changing = ["creating", "starting", "stopping", "destroying"];
const groups: [string, (s: Session) => boolean][] = [
  ["Needs attention", needsAttention],
  ["Working", (s) => s.state === "ready" && s.attention?.state === "working"],
  ["Ready", (s) => s.state === "ready"],
  ["Changing", (s) => changing.includes(s.state)],
  ["Stopped", () => true],
];
const endedTasks = 15; // as many are shown at first

export function overviewView(main: HTMLElement, signal: AbortSignal) {
  const summary = h("p", { class: "summary", role: "status" });
  const questions = questionList();
  const questionSection = h("section", { "aria-labelledby": "questions", class: "questions", hidden: true }, h("h2", { id: "questions" }, "Questions"), questions.root);
  const sections = groups.map(([title]) => section(title));
  const running = section("Running tasks");
  const ended = section("Ended tasks");
  const more = h("button", { type: "button", hidden: true, onclick: () => { all = true; if (latest) show(latest); } }, "Show all");
  ended.root.append(more);
  const nothing = h("div", {}, loading());
  const notes = h("div");
  let all = false;
  let latest: Overview | undefined;

  const show = (o: Overview) => {
    latest = o;
    const open = o.questions.filter((q) => q.state === "open");
    questionSection.hidden = open.length === 0;
    questions.show(open);
    let rest = o.sessions.filter((s) => s.state !== "gone");
    const total = rest.length;
    const waiting = rest.filter(needsAttention).length;
    groups.forEach(([, belongs], i) => {
      const rows = rest.filter(belongs);
      if (belongs === needsAttention) rows.sort(byUrgency);
      sections[i]?.show(rows, (s) => s.id, sessionRow);
      rest = rest.filter((s) => !belongs(s));
    });
    const active = o.tasks.filter((t) => !isOver(t));
    running.show(active, (t) => t.id, taskRow);
    const over = o.tasks.filter(isOver);
    ended.show(all ? over : over.slice(0, endedTasks), (t) => t.id, taskRow);
    more.hidden = all || over.length <= endedTasks;
    more.textContent = `Show all ${over.length}`;
    keyed(notes, (o.notes ?? []).slice(0, 5), (n) => n, (n) => h("p", { class: "note" }, line(n, 600)));
    const text = `${plural(total, "session")}, ${waiting === 1 ? "1 needs" : `${waiting} need`} attention · ${plural(active.length, "running task")}`;
    if (summary.textContent !== text) summary.textContent = text;
    fill(nothing, total + o.tasks.length === 0 && empty("No sessions and no tasks yet. Open a repository, or submit a task."));
  };

  fill(main,
    h("div", { class: "title" }, h("h1", { tabindex: -1 }, "Overview"), summary,
      h("div", { class: "buttons" },
        can("admin") && h("button", { type: "button", class: "primary", onclick: openRepository }, "Open repository"),
        can("submit") && h("a", { class: "button", href: "#/submit" }, "Submit task"))),
    questionSection, questions.late, notes, nothing, sections.map((s) => s.root), running.root, ended.root);
  watch(show, signal);
}

export function section(title: string) {
  const list = h("ul", { class: "rows" });
  const count = h("span", { class: "count" });
  const id = title.toLowerCase().replaceAll(" ", "-");
  const root = h("section", { "aria-labelledby": id, hidden: true }, h("h2", { id }, title, " ", count), list);
  return {
    root,
    show<T>(items: T[], key: (t: T) => string, row: (t: T) => HTMLElement) {
      root.hidden = items.length === 0;
      count.textContent = String(items.length);
      keyed(list, items, key, row);
    },
  };
}

function sessionRow(s: Session): HTMLElement {
  const a = s.state === "ready" ? s.attention : undefined;
  const what = s.error && s.state === "broken" ? s.error.message : a?.on || (s.branch ?? s.base?.branch ?? "");
  return h("li", { class: needsAttention(s) ? "row attention" : "row", "data-session": s.id },
    sessionBadge(s),
    h("a", { class: "name", href: `#/sessions/${s.id}` }, line(sessionName(s), 120)),
    h("span", { class: "what" }, line(what, 200)),
    h("span", { class: "meta" },
      a?.agent && h("span", {}, line(a.agent, 40)), s.task && h("a", { href: `#/tasks/${s.task}` }, "task"),
      s.usage && h("span", {}, moneyText(s.usage.usd)), s.ports?.length ? h("span", {}, plural(s.ports.length, "port")) : null),
    ago(a?.since ?? s.state_changed_at));
}

export function taskRow(t: Task): HTMLElement {
  const what = t.error?.message || t.outcome?.reason || t.progress?.current_tool || t.repository.replace(/^\/.*\//, ""); // of a path, the last part
  return h("li", { class: "row", "data-task": t.id },
    taskBadge(t),
    h("a", { class: "name", href: `#/tasks/${t.id}` }, line(t.name || t.id, 120)),
    h("span", { class: "what" }, line(what, 200)),
    h("span", { class: "meta" }, t.host ? h("span", {}, `on ${line(t.host, 63)}`) : null, h("span", {}, line(t.agent, 40)), t.usage && h("span", {}, moneyText(t.usage.usd)), t.artifacts ? h("span", {}, plural(t.artifacts, "artifact")) : null),
    ago(t.ended_at ?? t.state_changed_at));
}

function openRepository() {
  dialog("Open a repository", (close) => {
    const place = h("div");
    const repo = h("input", { id: "repo", type: "text", required: true, maxlength: 4096, placeholder: "owner/repo", autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
    const profile = h("input", { id: "profile", type: "text", maxlength: 255, autocomplete: "off", autocapitalize: "off" });
    const network = h("select", { id: "network" }, ["as configured", "allowlist", "isolated", "open"].map((m, i) => h("option", { value: i ? m : "" }, m)));
    const another = h("input", { id: "another", type: "checkbox" });
    const label = h("input", { id: "label", type: "text", maxlength: 100, autocomplete: "off", autocapitalize: "off", spellcheck: "false" });
    const open = h("button", { type: "submit", class: "primary" }, "Open");
    return h("form", {
      onsubmit: (e: Event) => {
        e.preventDefault();
        void perform(open, place, async () => {
          const s = await post<Session>("/api/v1/sessions", { repo: repo.value.trim(), ...(profile.value && { profile: profile.value.trim() }), ...(network.value && { network: network.value }), ...(another.checked && { new: true, ...(label.value && { label: label.value.trim() }) }) });
          close();
          location.hash = `#/sessions/${s.id}/timeline`;
        }, "The session is being created");
      },
    },
      h("label", { for: "repo" }, "Repository: owner/repo, a git URL, or a path on the host"), repo,
      h("label", { for: "profile" }, "Profile (optional)"), profile,
      h("label", { for: "network" }, "Network"), network,
      h("label", { for: "another", class: "check" }, another, " Create another session, even if the repository has one"),
      h("label", { for: "label" }, "Label of another session (optional)"), label,
      place, h("div", { class: "buttons" }, open, h("button", { type: "button", onclick: close }, "Cancel")));
  });
}
