// A question with the controls to answer it.
import { ApiError, can, post } from "./api";
import { ago, announce, fill, h, keyed, line } from "./dom";
import { action, errorBox, perform } from "./parts";
import type { Question } from "./types";

const settle = 700; // milliseconds in which a user notices that questions moved

// questionList returns an element that shows open questions. A guest decides when it asks, and
// when it withdraws a question. A click just after questions have moved may be meant for
// another one, so it has no effect. An answer to a question that another person has answered is
// reported in the element late, which stays when the question disappears.
export function questionList(): { root: HTMLElement; late: HTMLElement; show: (open: Question[]) => void } {
  const root = h("div", { class: "cards" });
  const late = h("div");
  let order = "";
  let timer = 0;
  root.addEventListener("click", (e) => {
    if (!("moving" in root.dataset) || e.detail === 0) return; // 0: by the keyboard, on the element that has the focus
    e.preventDefault();
    e.stopPropagation();
  }, true);
  return {
    root,
    late,
    show(open) {
      const now = open.map((q) => q.id).join();
      if (now !== order) {
        order = now;
        root.dataset.moving = "";
        clearTimeout(timer);
        timer = setTimeout(() => { delete root.dataset.moving; }, settle);
      }
      keyed(root, open, (q) => q.id, (q) => questionCard(q, late), (q) => [q.id, q.text, q.state]);
    },
  };
}

// questionCard makes the card of an open question.
function questionCard(q: Question, late: HTMLElement): HTMLElement {
  const place = h("div");
  const respond: Respond = async (answer, done) => {
    late.replaceChildren();
    try {
      await post(`/api/v1/hitl/${encodeURIComponent(q.id)}/respond`, { answer });
      announce(done);
    } catch (err) {
      if (!(err instanceof ApiError) || err.problem.status !== 409) throw err;
      fill(late, h("p", {}, h("strong", {}, "Your answer was not used: "), line(q.text, 200)), errorBox(err), h("button", { type: "button", onclick: () => late.replaceChildren() }, "Dismiss"));
    }
  };
  const heading = `question-${q.id}`;
  const ofGateway = q.kind === "network" || q.kind === "budget";
  return h("article", { class: "question", "data-question": q.id, "aria-labelledby": heading },
    h("h3", { id: heading },
      h("span", { class: "kind" }, line(q.kind, 20)), " ",
      ofGateway ? "The gateway" : line(q.agent || "a script", 60), " in ",
      h("a", { href: `#/sessions/${q.session}` }, line(q.repo || q.session_name, 80)),
      q.tool && !ofGateway ? [" wants to use ", h("code", {}, line(q.tool, 80))] : null,
      h("span", { class: "age" }, ago(q.asked_at))),
    h("pre", { class: "text", role: "group", tabindex: 0, "aria-label": ofGateway ? "The question" : "The question, written by a program in the VM" }, q.kind === "network" ? `Connect to ${q.text}?` : q.text),
    can("admin") ? controls(q, respond, place) : h("p", { class: "hint" }, "Answering needs the scope admin."),
    place);
}

type Respond = (answer: string, done: string) => Promise<void>;

function controls(q: Question, respond: Respond, place: HTMLElement): HTMLElement {
  const buttons: HTMLElement[] = [];
  const answer = (label: string, text: string, kind?: string) => buttons.push(action(label, place, () => respond(text, `Answered: ${label}`), { kind }));
  const decides = ["permission", "plan", "network"].includes(q.kind);
  const parts = Math.max(1, Math.min(q.parts ?? 1, 8));
  if (decides) {
    answer("Allow", "allow", "primary");
    answer("Deny", "deny");
  } else if (q.kind === "budget") {
    answer("Deny", "deny");
  } else if (parts === 1) {
    const choices = q.choices ?? [];
    choices.slice(0, 20).forEach((choice, i) => {
      const number = String(i + 1);
      answer(line(choice, 80), choices.includes(number) ? choice : number); // "2" means the choice 2 if there is one
    });
  }
  if (q.kind === "network" || (q.only && parts === 1 && !decides)) return h("div", { class: "answers" }, buttons);
  const label = q.kind === "budget" ? `The new limit, such as ${q.tool === "tokens" ? "2M" : "10 USD"}, or none` : decides ? "Or deny, and say what to do instead" : parts > 1 ? `Answers, one line for each of ${parts} parts` : buttons.length > 0 ? "Or another answer" : "Answer";
  const field = parts > 1
    ? h("textarea", { id: `answer-${q.id}`, rows: parts, maxlength: 4000, required: true, placeholder: label, spellcheck: "false" })
    : h("input", { id: `answer-${q.id}`, type: "text", maxlength: 4000, required: true, placeholder: label, autocomplete: "off" });
  const send = h("button", { type: "submit" }, "Send");
  const form = h("form", {
    class: "answer",
    onsubmit: (e: Event) => {
      e.preventDefault();
      void perform(send, place, () => respond(field.value, "Answer sent"));
    },
  }, h("label", { class: "unseen", for: `answer-${q.id}` }, label), h("div", { class: "row" }, field, send));
  return h("div", { class: "answers" }, buttons, form);
}
