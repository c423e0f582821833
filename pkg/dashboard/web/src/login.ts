// The page that asks for a token, when no one-time link brought the user.
import { logIn } from "./api";
import { fill, h } from "./dom";
import { errorBox, perform } from "./parts";

export function loginView(main: HTMLElement, done: () => void, problem?: unknown) {
  const place = h("div", {}, problem ? errorBox(problem) : null);
  const token = h("input", { id: "token", type: "password", required: true, maxlength: 400, autocomplete: "off" });
  const enter = h("button", { type: "submit", class: "primary" }, "Log in");
  fill(main, h("div", { class: "login" }, h("h1", { tabindex: -1 }, "Log in"),
    h("p", {}, "On the host, run ", h("code", {}, "agent-sessionizer dashboard"), ". It opens this page with a link that works once."),
    place,
    h("form", { onsubmit: (e: Event) => {
      e.preventDefault();
      void perform(enter, place, async () => { await logIn({ token: token.value.trim() }); done(); }, "Logged in");
    } }, h("label", { for: "token" }, "Or use an API token"), token, h("div", { class: "buttons" }, enter))));
}
