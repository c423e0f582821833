//go:build browser

package browser

import (
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"

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

	// A second login, in another tab, also is the login of the first tab.
	second := b.Open(t)
	second.LogIn(h.link())
	p.Eval("window.old = true; setTimeout(() => { location.hash = '#/host' })", nil) // the page loads again, which would fail Eval
	p.Until("the first tab with the second login", `!window.old && document.querySelector("h1")?.textContent === "Host"`)
	for _, page := range []*driver.Page{p, second} {
		page.Load(strings.TrimSuffix(page.Address(), "#/host"))
		page.Sees("repo")
	}
	source := axe(t)
	findings := func(view string) {
		t.Helper()
		for _, width := range []int64{390, 1280} {
			p.Size(width, 900)
			for _, dark := range []bool{true, false} {
				p.Dark(dark)
				for _, found := range p.Axe(source) {
					t.Errorf("%s at %d px, dark: %v: %s", view, width, dark, found)
				}
			}
			if extra := p.Overflow(); extra > 0 {
				t.Errorf("%s is %d px wider than the window of %d px, want no scrolling", view, extra, width)
			}
		}
	}
	p.Click("Open repository")
	p.Sees("Open a repository")
	findings("dialog that opens a repository")
	p.Press(kb.Escape)
	p.Misses("Open a repository")

	p.Click("Log out")
	p.Sees("Or use an API token")
	findings("login")
	p.Load(link) // a second time
	p.Until("the error of a used link", `document.querySelector("[role=alert]")`)
	p.Fill("#token", "wrong-token-that-was-never-made")
	p.Press("\r")
	p.Until("the error of a wrong token", `document.querySelector("[role=alert]")`)
	findings("login with an error")

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
