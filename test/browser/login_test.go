//go:build browser

package browser

import (
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
)

// TestLogIn logs in with a one-time link, which then works no more, and with a token.
func TestLogIn(t *testing.T) {
	h := newHost(t)
	h.open("repo")
	h.serve()
	b := driver.Start(t)

	p := b.Open(t)
	link := h.link()
	p.LogIn(link)
	p.Sees("repo")
	if at := p.Address(); strings.Contains(at, "code") || !strings.HasSuffix(at, "/dashboard/") {
		t.Errorf("address after the login = %q, want the dashboard's without a code", at)
	}
	p.CheckHarmless()

	p.Click("Log out")
	p.Sees("Or use an API token")
	p.Load(link) // a second time
	p.Until("the error of a used link", `document.querySelector("[role=alert]")`)
	p.Fill("#token", "wrong-token-that-was-never-made")
	p.Press("\r")
	p.Until("the error of a wrong token", `document.querySelector("[role=alert]")`)

	token := strings.TrimSpace(h.must("serve", "token", "add", "viewer", "--scope", "read"))
	p.Fill("#token", token)
	p.Press("\r")
	p.Until("the overview", `document.querySelector("h1")?.textContent === "Overview"`)
	p.Sees("repo")
	if text := p.Text(); strings.Contains(text, "Open repository") {
		t.Errorf("overview with the scope read = %q, want no control for the scope admin", text)
	}
	var hidden bool
	if p.Eval(`!document.querySelector("a[href='#/hosts']").checkVisibility()`, &hidden); !hidden {
		t.Error("link to the hosts of a cluster = visible, want it hidden without a cluster")
	}
	h.must("serve", "token", "remove", "viewer")
	p.Eval("location.hash = '#/host'", nil)
	p.Sees("Or use an API token")
	p.CheckHarmless()
}
