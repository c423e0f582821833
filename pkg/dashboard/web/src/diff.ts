// A unified diff, by file and hunk. The patch is a guest's text.
import { countText, fill, h, line, plural } from "./dom";
import { empty } from "./parts";

interface Hunk { title: string; lines: string[] }
interface File { path: string; notes: string[]; added: number; deleted: number; hunks: Hunk[]; size: number }

const mostFiles = 500;
const mostLines = 4000; // of one file
const openLines = 300; // a larger file is closed at first

// parse reads a patch of git.
export function parse(patch: string): File[] {
  const files: File[] = [];
  let file: File | undefined;
  let hunk: Hunk | undefined;
  let left = 0; // lines of the hunk
  for (const text of patch.split("\n")) {
    if (hunk && file && (left > 0 || text.startsWith("\\"))) {
      if (/^[ +-]/.test(text) || text === "") left -= 1;
      if (text.startsWith("+")) file.added++;
      else if (text.startsWith("-")) file.deleted++;
      else if (left >= 0 && !text.startsWith("\\")) left -= 1; // context counts on both sides
      if (file.size++ < mostLines) hunk.lines.push(text);
      continue;
    }
    hunk = undefined;
    if (text.startsWith("diff --git ")) {
      file = { path: text.slice("diff --git ".length), notes: [], added: 0, deleted: 0, hunks: [], size: 0 };
      files.push(file);
    } else if (file) {
      const at = /^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@/.exec(text);
      if (at) {
        hunk = { title: text, lines: [] };
        left = Number(at[1] ?? 1) + Number(at[2] ?? 1);
        file.hunks.push(hunk);
      } else if (text.startsWith("+++ ") && !text.startsWith("+++ /dev/null")) file.path = name(text.slice(4));
      else if (text.startsWith("--- ") && !text.startsWith("--- /dev/null")) file.path = name(text.slice(4));
      else if (/^(new file|deleted file|rename|copy|similarity|old mode|new mode|Binary files|GIT binary)/.test(text)) file.notes.push(text);
    }
  }
  return files;
}

const name = (text: string) => text.replace(/\t$/, "").replace(/^"?[ab]\//, "").replace(/"$/, "");

// diffView shows a patch.
export function diffView(patch: string, cut = false): HTMLElement {
  const files = parse(patch);
  if (files.length === 0) return empty("No changes.");
  const [added, deleted] = files.reduce(([a, d], f) => [a + f.added, d + f.deleted], [0, 0]);
  return h("div", { class: "diff" },
    h("p", { class: "summary" }, plural(files.length, "file"), ", ", counts(added, deleted), cut && " (the beginning of a longer patch)"),
    files.slice(0, mostFiles).map(fileView),
    files.length > mostFiles && h("p", {}, `${countText(files.length - mostFiles)} more files are not shown.`));
}

function counts(added: number, deleted: number): HTMLElement {
  return h("span", { class: "counts" }, h("span", { class: "added" }, `+${countText(added)}`), " ", h("span", { class: "deleted" }, `−${countText(deleted)}`));
}

function fileView(file: File): HTMLElement {
  const body = h("div", { class: "scroll code", tabindex: 0, role: "region", "aria-label": `Changes of ${line(file.path, 200)}` });
  const details = h("details", { ontoggle: () => { if (details.open && !body.hasChildNodes()) fill(body, hunks(file)); } },
    h("summary", {}, h("span", { class: "path" }, line(file.path, 400)), " ", counts(file.added, file.deleted)), body);
  details.open = file.size <= openLines; // its toggle event shows the lines
  return details;
}

function hunks(file: File): HTMLElement[] {
  const out = file.notes.map((n) => h("div", { class: "note" }, n));
  for (const hunk of file.hunks) {
    const at = /^@@ -(\d+)(?:,\d+)? \+(\d+)/.exec(hunk.title);
    let [before, after] = [Number(at?.[1] ?? 0), Number(at?.[2] ?? 0)];
    out.push(h("div", { class: "hunk" }, line(hunk.title)));
    for (const text of hunk.lines) {
      const sign = text[0];
      const kind = sign === "+" ? "added" : sign === "-" ? "deleted" : sign === "\\" ? "note" : "context";
      const numbers = [kind === "added" || kind === "note" ? "" : before++, kind === "deleted" || kind === "note" ? "" : after++];
      out.push(h("div", { class: kind }, h("span", { class: "ln", "aria-hidden": "true" }, numbers[0]), h("span", { class: "ln", "aria-hidden": "true" }, numbers[1]), h("span", { class: "src" }, text || " ")));
    }
  }
  if (file.size > mostLines) out.push(h("div", { class: "note" }, `${countText(file.size - mostLines)} more lines are not shown.`));
  if (out.length === 0) out.push(h("div", { class: "note" }, "No text to show."));
  return out;
}
