// A live terminal of a tmux window in a guest. Its output is hostile: it can draw in the
// terminal, and nothing else.
import { FitAddon } from "@xterm/addon-fit";
import { type ITerminalInitOnlyOptions, type ITerminalOptions, Terminal } from "@xterm/xterm";
import { socket } from "./api";
import { fill, h, line } from "./dom";

// styleSheets calls f, and puts the styles that f adds to the page into constructed style
// sheets: the content security policy allows no <style> elements.
export function styleSheets(f: () => void) {
  const create = document.createElement.bind(document);
  document.createElement = ((name: string, options?: ElementCreationOptions) => {
    if (name !== "style") return create(name, options);
    const sheet = new CSSStyleSheet();
    document.adoptedStyleSheets.push(sheet);
    const stand = create("span");
    stand.hidden = true;
    Object.defineProperty(stand, "textContent", { set: (css: string) => sheet.replaceSync(css) });
    stand.remove = () => {
      document.adoptedStyleSheets = document.adoptedStyleSheets.filter((s) => s !== sheet);
      Element.prototype.remove.call(stand);
    };
    return stand;
  }) as typeof document.createElement;
  try {
    f();
  } finally {
    delete (document as { createElement?: unknown }).createElement; // the prototype's is visible again
  }
}

const themes = {
  light: { background: "#ffffff", foreground: "#1d232b", cursor: "#2456a6", cursorAccent: "#ffffff", selectionBackground: "#c5d8f5", black: "#1d232b", red: "#b3261e", green: "#1c6b34", yellow: "#7a5200", blue: "#2456a6", magenta: "#7b3494", cyan: "#0b6a75", white: "#5b6470", brightBlack: "#5b6470", brightRed: "#c4372e", brightGreen: "#237f40", brightYellow: "#8a5f00", brightBlue: "#2f68c2", brightMagenta: "#9142ad", brightCyan: "#117e8a", brightWhite: "#1d232b" },
  dark: { background: "#12161b", foreground: "#dfe4ea", cursor: "#86b1f2", cursorAccent: "#12161b", selectionBackground: "#2f4568", black: "#2a313a", red: "#f28b82", green: "#7fcf98", yellow: "#e3bd6b", blue: "#86b1f2", magenta: "#d3a1e6", cyan: "#74cad3", white: "#dfe4ea", brightBlack: "#8b95a1", brightRed: "#f7a79f", brightGreen: "#9be0b1", brightYellow: "#edcf8c", brightBlue: "#a8c8f7", brightMagenta: "#e2bdf0", brightCyan: "#98dde4", brightWhite: "#ffffff" },
};

const ignoredSequences = [0, 1, 2, 7, 8, 9, 52, 777, 1337]; // titles, links, notifications, the clipboard

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => (dark.matches ? themes.dark : themes.light);

// emulator makes a terminal emulator that a hostile guest can draw in, in the colours of the page.
export function emulator(options: ITerminalOptions & ITerminalInitOnlyOptions, signal: AbortSignal): Terminal {
  const term = new Terminal({
    theme: theme(), fontFamily: "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace", fontSize: innerWidth < 600 ? 11 : 13,
    scrollback: 0, cursorBlink: false, minimumContrastRatio: 4.5, linkHandler: { activate: () => {} }, ...options,
  });
  for (const id of ignoredSequences) term.parser.registerOscHandler(id, () => true);
  const recolour = () => { term.options.theme = theme(); };
  dark.addEventListener("change", recolour);
  signal.addEventListener("abort", () => {
    dark.removeEventListener("change", recolour);
    term.dispose();
  });
  return term;
}

// terminal shows a window of a session until the signal aborts.
export function terminal(place: HTMLElement, session: string, window: string, signal: AbortSignal) {
  const term = emulator({ macOptionIsMeta: true }, signal);
  const fit = new FitAddon();
  term.loadAddon(fit);
  term.attachCustomKeyEventHandler((e) => {
    if (e.key !== "F6" || !e.shiftKey) return true;
    if (e.type === "keydown") keys.querySelector("button")?.focus(); // leaves the terminal, which takes Tab
    return false;
  });

  const screen = h("div", { class: "screen" });
  const status = h("div", { role: "status", class: "hint" });
  let control = false;
  let connection: WebSocket | undefined;
  const send = (text: string) => {
    if (control && text.length === 1) {
      text = String.fromCharCode(text.toUpperCase().charCodeAt(0) & 31);
      setControl(false);
    }
    if (connection?.readyState === WebSocket.OPEN) connection.send(new TextEncoder().encode(text));
  };
  const key = (label: string, text: string, name = label) => h("button", { type: "button", "aria-label": name, onclick: () => { send(text); term.focus(); } }, label);
  const arrow = (label: string, letter: string, name: string) => h("button", { type: "button", "aria-label": name, onclick: () => { send((term.modes.applicationCursorKeysMode ? "\x1bO" : "\x1b[") + letter); term.focus(); } }, label);
  const ctrl = h("button", { type: "button", "aria-pressed": "false", onclick: () => { setControl(!control); term.focus(); } }, "Ctrl");
  const setControl = (on: boolean) => {
    control = on;
    ctrl.setAttribute("aria-pressed", String(on));
  };
  const keys = h("div", { class: "keys", role: "toolbar", "aria-label": "Keys" },
    key("Esc", "\x1b"), ctrl, key("Tab", "\t"), arrow("↑", "A", "Up"), arrow("↓", "B", "Down"), arrow("←", "D", "Left"), arrow("→", "C", "Right"), key("^C", "\x03", "Control C"),
    h("button", { type: "button", onclick: async () => { term.paste(await navigator.clipboard.readText()); term.focus(); } }, "Paste"),
    h("button", { type: "button", onclick: () => void navigator.clipboard.writeText(term.getSelection()) }, "Copy"),
    h("button", { type: "button", "aria-pressed": "false", onclick: (e: { currentTarget: HTMLElement }) => {
      term.options.screenReaderMode = !term.options.screenReaderMode;
      e.currentTarget.setAttribute("aria-pressed", String(term.options.screenReaderMode));
    } }, "Screen reader"));
  fill(place, status, screen, keys, h("p", { class: "hint" }, "Shift+F6 leaves the terminal. It cannot read your clipboard, and links in it do not open."));

  styleSheets(() => term.open(screen));
  term.textarea?.setAttribute("aria-label", "Terminal of the session; Shift+F6 leaves it");
  fit.fit();
  term.onData(send);
  term.onBinary((text) => connection?.readyState === WebSocket.OPEN && connection.send(Uint8Array.from(text, (c) => c.charCodeAt(0))));
  term.onResize(({ cols, rows }) => connection?.readyState === WebSocket.OPEN && connection.send(JSON.stringify({ cols, rows })));

  const connect = () => {
    fill(status, "Connecting…");
    const query = new URLSearchParams({ window, cols: String(term.cols), rows: String(term.rows) });
    const ws = (connection = socket(`/ws/sessions/${session}/terminal?${query}`));
    ws.binaryType = "arraybuffer";
    let reason = "";
    ws.onopen = () => {
      status.replaceChildren();
      term.reset();
      if (!matchMedia("(pointer: coarse)").matches) term.focus();
    };
    ws.onmessage = ({ data }) => {
      if (data instanceof ArrayBuffer) return term.write(new Uint8Array(data));
      try {
        const m = JSON.parse(data);
        if (m.type === "end") reason = line(m.reason, 200);
      } catch {
        // the server sends nothing else
      }
    };
    ws.onclose = () => {
      if (signal.aborted || ws !== connection) return;
      fill(status, `The terminal is disconnected${reason ? `: ${reason}` : ""}. `, h("button", { type: "button", onclick: connect }, "Connect again"));
    };
  };
  connect();

  const resize = new ResizeObserver(() => fit.fit());
  resize.observe(screen);
  signal.addEventListener("abort", () => {
    resize.disconnect();
    connection?.close();
  });
}
