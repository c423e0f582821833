//go:build browser

package browser

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"

	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestSession uses a session as a user would: it types into its terminal, answers, looks at
// its changes, allows a denied name, fetches, and destroys it.
func TestSession(t *testing.T) {
	h := newHost(t)
	g := h.open("repo")
	g.tmux("first", "second")
	h.serve()
	p := driver.Start(t).Open(t)
	p.LogIn(h.link())
	p.Click("repo")
	p.Click("Terminal")
	p.ScreenShows("guest$")
	p.TypeInTerminal("echo 6 times 7 is $((6*7)) >result; cat result\r")
	p.ScreenShows("6 times 7 is 42")
	if content, err := os.ReadFile(filepath.Join(g.root, "home/agent/repo/result")); err != nil || !strings.Contains(string(content), "is 42") {
		t.Errorf("file in the guest = %q, %v, want what the terminal typed", content, err)
	}
	before := p.Screen()
	p.Size(700, 700)
	// The guest's tmux may run a command before it knows the new size.
	p.TypeInTerminal("until [ $(tput cols) -lt 100 ]; do sleep 0.1; done; tput cols >width; cat width\r")
	testenv.WaitFor(t, "a narrower terminal in the guest", func() bool {
		width, err := os.ReadFile(filepath.Join(g.root, "home/agent/repo/width"))
		return err == nil && len(strings.TrimSpace(string(width))) == 2 // below 100 columns
	})
	if p.Size(1280, 900); before == "" {
		t.Error("text of the terminal = none, want some")
	}
	// The on-screen keys: Ctrl and a letter, and the key that leaves the terminal.
	p.Until("the prompt", `[...document.querySelectorAll(".xterm-rows > div")].map((e) => e.textContent.trimEnd()).filter(Boolean).at(-1) === "guest$"`)
	p.TypeInTerminal("cat\r")
	p.TypeInTerminal("cat runs\r")
	p.ScreenShows("cat runs\ncat runs")
	p.Click("Ctrl")
	p.TypeInTerminal("c")
	p.ScreenShows("^C\nguest$")
	p.TypeInTerminal("echo after interrupt\r")
	p.ScreenShows("\nafter interrupt")
	pasteAndTap(g, p)
	// Another window is chosen from the list, and shown.
	p.Eval(`(() => { const s = document.querySelector("#window"); s.selectedIndex = 1; s.dispatchEvent(new Event("change")) })()`, nil)
	p.Until("a new terminal", `document.querySelector(".xterm-rows") && ![...document.querySelectorAll(".xterm-rows > div")].some((e) => e.textContent.includes("interrupt"))`)
	p.ScreenShows("guest$")
	p.TypeInTerminal("tmux display-message -p '#{window_name}'\r")
	p.ScreenShows("\nsecond")

	// A question appears without a reload, and is answered.
	g.ask("--choice", "blue", "--choice", "red", "Which colour?")
	p.Sees("Which colour?")
	p.Until("an announcement", `document.getElementById("announcements").textContent.includes("Which colour?")`)
	p.Click("red")
	p.Misses("Which colour?")
	if got := g.answer(); got != "red" {
		t.Errorf("answer in the guest = %q, want red", got)
	}

	g.exec(`rm -f result width; sed -i s/evening/night/ greeting.txt; git -c user.name=a -c user.email=a@localhost commit -qam 'Say good night'`)
	p.Click("Changes")
	p.Sees("+good night")
	p.Sees("-good evening")

	g.decide(`{"seq":1000001,"time":"2026-01-01T00:00:00Z","kind":"dns","proto":"udp","name":"files.example.org","port":443,"reason":"the policy does not allow it"}`)
	p.Click("Network")
	p.Click("Allow files.example.org")
	testenv.WaitFor(t, "an allowed name", func() bool {
		return strings.Contains(h.must("net", "explain", "repo", "files.example.org:443"), "allow")
	})
	p.Click("Fetch")
	p.Sees("Fetched 1 commit")

	p.Click("Timeline")
	p.Sees("creating → ready")
	p.Sees("files.example.org")
	p.Click("Screen")
	p.Fill("#prompt", "go on")
	p.Click("Send prompt")
	p.Until("the error of a session without an agent", `document.querySelector(".prompt [role=alert]")`)

	p.Click("Usage")
	p.Fill("#money", "ten")
	p.Click("Change budget")
	p.Until("the error of a budget", `document.querySelector(".inline [role=alert]")`)
	p.Fill("#money", "10 USD")
	p.Click("Change budget")
	p.Sees("$0.00 of $10.00")

	g.exec("echo more >>greeting.txt")
	p.Click("Destroy…")
	p.Sees("This would be lost:")
	for _, found := range p.Axe(axe(t)) {
		t.Errorf("dialog that destroys a session: %s", found)
	}
	p.Press(kb.Escape)
	p.Misses("This would be lost:")
	p.Click("Destroy…")
	p.Click("Destroy it and lose this work")
	p.Sees("No sessions and no tasks yet")
	p.CheckHarmless()
}

// pasteAndTap pastes into the terminal, by the keyboard and by the button, and taps the on-screen
// keys of a phone.
func pasteAndTap(g guest, p *driver.Page) {
	t := g.t
	t.Helper()
	p.TypeInTerminal("clear; cat >pasted\r")
	p.Copy("one & <b>two</b>\n")
	p.Paste()
	p.ScreenShows("one & <b>two</b>\n")
	p.Copy("three ${HOME}\n")
	p.Click("Paste")
	p.ScreenShows("three ${HOME}\n")
	p.TypeInTerminal("\x04")
	pasted := filepath.Join(g.root, "home/agent/repo/pasted")
	const want = "one & <b>two</b>\nthree ${HOME}\n"
	testenv.WaitFor(t, "the pasted text in the guest", func() bool {
		content, err := os.ReadFile(pasted)
		return err == nil && string(content) == want
	})

	p.Size(390, 844)
	p.Touch(true)
	p.TypeInTerminal("clear; rm pasted; cat\r")
	p.ScreenShows("cat\n")
	var small []string
	p.Eval(`[...document.querySelectorAll(".keys button")].filter((e) => { const r = e.getBoundingClientRect(); return r.height < 44 || r.width < 44 || r.left < 0 || r.right > innerWidth }).map((e) => e.innerText)`, &small)
	if len(small) > 0 {
		t.Errorf("on-screen keys %q are smaller than 44 px, or outside of the window", small)
	}
	for _, key := range []string{"Esc", "Up", "Down", "Left", "Right"} {
		p.Tap(key)
	}
	p.ScreenShows("^[^[[A^[[B^[[D^[[C")
	p.Tap("Control C")
	p.ScreenShows("^C\nguest$")
	p.Touch(false)
	p.Size(1280, 900)
}

// TestSubmit submits a task: first with an error in its manifest, then a valid one, whose
// patch it downloads.
func TestSubmit(t *testing.T) {
	h := newHost(t)
	g := h.open("repo")
	h.serve()
	p := driver.Start(t).Open(t)
	p.LogIn(h.link())
	p.Click("Submit task")
	manifest := "version: \"1\"\nkind: Task\nmetadata: {name: change it}\nrepository: {url: " + h.dir + "/repo}\nvm: {profile: nosuch}\nagent:\n  kind: command\n  command: [sh, -ec, 'echo working; echo again >>greeting.txt']\n"
	p.Fill("#manifest", manifest)
	p.Click("Validate")
	p.Sees(`profile "nosuch" does not exist`)
	p.Click("line 5, column 15")
	var selected string
	if p.Eval(`(() => { const e = document.activeElement; return e.id + ": " + e.value.slice(e.selectionStart, e.selectionEnd) })()`, &selected); selected != "manifest: nosuch}" {
		t.Errorf("selection after a click on the place of an error = %q, want %q", selected, "manifest: nosuch}")
	}
	p.Fill("#manifest", strings.Replace(manifest, "vm: {profile: nosuch}\n", "", 1))
	p.Click("Validate")
	p.Sees("The manifest is valid.")
	p.Click("Submit")
	p.Sees("change it")
	p.Until("the end of the task", `document.querySelector(".badge.good")?.textContent === "completed"`)
	p.Click("Output")
	p.Sees("working")
	p.Click("Changes")
	p.Sees("+again")
	p.Click("Artifacts")
	var name string
	p.Until("a patch", `[...document.querySelectorAll(".artifact .name")].some((e) => e.textContent.endsWith(".patch"))`)
	p.Eval(`[...document.querySelectorAll(".artifact .name")].map((e) => e.textContent).find((n) => n.endsWith(".patch"))`, &name)
	p.Click("Download " + name)
	h.write("downloaded.patch", string(p.Download(name)), 0o600)
	if out, err := exec.Command("git", "-C", filepath.Join(h.dir, g.repo), "apply", "--check", filepath.Join(h.dir, "downloaded.patch")).CombinedOutput(); err != nil {
		t.Errorf("git apply of the downloaded patch = %v, want nil\n%s", err, out)
	}
	p.Click("Retry")
	p.Until("the end of the second task", `document.querySelector(".badge.good")?.textContent === "completed" && document.querySelector(".facts")?.innerText.includes("retry of")`)
	p.CheckHarmless()
}

// TestKeyboard answers a question from the overview, with nothing but the keyboard.
func TestKeyboard(t *testing.T) {
	h := newHost(t)
	g := h.open("repo")
	h.serve()
	p := driver.Start(t).Open(t)
	p.LogIn(h.link())
	g.ask("--choice", "blue", "--choice", "red", "Which colour?")
	p.Sees("Which colour?")
	p.Tab("Skip to content", 1)
	p.Press("\r")
	p.Tab("red", 8)
	var outline string
	if p.Eval(`getComputedStyle(document.activeElement).outlineStyle`, &outline); outline != "solid" {
		t.Errorf("outline of the control with the focus = %q, want solid", outline)
	}
	p.Press("\r")
	p.Misses("Which colour?")
	if got := g.answer(); got != "red" {
		t.Errorf("answer in the guest = %q, want red", got)
	}
	g.ask("Anything else?")
	p.Sees("Anything else?")
	p.Press(kb.Tab)
	p.Tab("Answer", 12)
	p.Press("no, that is all\r")
	p.Misses("Anything else?")
	testenv.WaitFor(t, "the second answer", func() bool { return g.answer() == "no, that is all" })
	p.CheckHarmless()
}
