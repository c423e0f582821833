//go:build browser

package browser

import (
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
)

// TestAnswerOnce answers a question on one page. It disappears from all other pages, and an answer
// that another page had already sent is reported there as not used.
func TestAnswerOnce(t *testing.T) {
	h := newHost(t)
	g := h.open("repo")
	h.serve()
	b := driver.Start(t)
	first, slow, session := b.Open(t), b.Open(t), b.Open(t)
	first.LogIn(h.link())
	for _, p := range []*driver.Page{slow, session} {
		p.Load(first.Address()) // with the same login
		p.Sees("repo")
	}
	session.Show("#/sessions/" + g.id + "/screen")
	g.ask("--choice", "blue", "--choice", "red", "Which colour?")
	for _, p := range []*driver.Page{first, slow, session} {
		p.Until("the question", `document.querySelector("[data-question]")?.innerText.includes("Which colour?")`)
	}
	// The second answer leaves its page before the first one is known there, and arrives after it.
	slow.Eval(`(() => {
		const send = fetch;
		const held = new Promise((release) => { window.release = release; });
		window.fetch = (path, o) => (String(path).endsWith("/respond") ? held.then(() => send(path, o)) : send(path, o));
	})()`, nil)
	slow.Click("red")
	first.Click("blue")
	for _, p := range []*driver.Page{first, slow, session} {
		p.Until("no question", `!document.querySelector("[data-question]")`)
	}
	if got := g.answer(); got != "blue" {
		t.Errorf("answer in the guest = %q, want blue", got)
	}
	slow.Eval(`release()`, nil)
	slow.Sees("Your answer was not used: Which colour?")
	slow.Sees("was already answered by")
	if text := slow.Text(); !strings.Contains(text, ": blue") {
		t.Errorf("page = %s, want the answer that was used", text)
	}
	for _, found := range slow.Axe(axe(t)) {
		t.Error(found)
	}
	slow.Click("Dismiss")
	slow.Misses("Your answer was not used")
	if out, err := h.run("answer", "repo", "red"); err == nil {
		t.Errorf("answer on the command line = %s, want an error: no question waits", out)
	}
	for _, p := range []*driver.Page{first, slow, session} {
		p.CheckHarmless()
	}
}
