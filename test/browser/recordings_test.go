//go:build browser

package browser

import (
	"regexp"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestRecordings plays the recording of a window, whose program is hostile, moves in it, and saves it.
func TestRecordings(t *testing.T) {
	h := newHost(t)
	h.write(".config/agent-sessionizer/config.yaml", "record: on\n", 0o600)
	g := h.open("repo")
	g.tmux("first<b>")
	recorded := func(text string) {
		t.Helper()
		testenv.WaitFor(t, text+" in a recording", func() bool {
			out, err := h.run("recordings", "search", text)
			return err == nil && strings.Contains(out, text)
		})
	}
	recorded("guest$")
	g.exec(`tmux send-keys -t agent: "printf '\033]0;title\a\033]52;c;aGk=\a<script>xss=1</script>\\n'; echo one-\$((40+2)); tput cols" Enter`)
	recorded("one-42")
	g.exec(`tmux resize-window -t agent: -x 60 -y 20; tmux send-keys -t agent: "clear; echo two-\$((40+3))" Enter`)
	recorded("two-43")
	h.serve()
	p := driver.Start(t).Open(t)
	p.LogIn(h.link())
	p.Click("repo")
	p.Click("Recordings")
	p.Click("Play first<b>")
	p.ScreenShows("guest$")
	for _, found := range p.Axe(axe(t)) {
		t.Errorf("player: %s", found)
	}
	p.Click("Play")
	p.ScreenShows("two-43")
	p.Until("the end", `[...document.querySelectorAll("button")].some((b) => b.innerText === "Play")`)
	p.Eval(`(() => { const s = document.querySelector("#seek"); s.value = 0; s.dispatchEvent(new Event("input")) })()`, nil)
	p.Until("the first screen", `!document.querySelector(".xterm-rows").innerText.includes("two-43")`)
	if overflow := p.Overflow(); overflow > 0 {
		t.Errorf("the page is %d pixels wider than the window", overflow)
	}
	p.Click("Download first<b>")
	var id string
	p.Eval(`document.querySelector("[data-recording]").dataset.recording`, &id)
	cast := string(p.Download(id + ".cast"))
	cast = regexp.MustCompile(`"]\n\[[0-9.]+, "o", "`).ReplaceAllString(cast, "") // a text may come in parts
	if !strings.HasPrefix(cast, `{"version":2,`) || !strings.Contains(cast, "one-42") || strings.Contains(cast, `\u001b]`) {
		t.Errorf("saved recording = %s, want an asciicast without operating system commands", cast)
	}
	p.CheckHarmless()
}
