// Package driver shows the dashboard in a real browser, and does there what a user would do:
// it clicks, types and reads. It records what the page must never do.
//
// It owns the browser and knows the pages. It knows nothing about the host that serves them,
// so that tests on fake and on real VMs can use it.
package driver

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto"
	"github.com/chromedp/cdproto/browser"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// patience bounds each wait for a page, also for what a real VM does meanwhile.
const patience = 2 * time.Minute

// Browser is a running browser with a profile of its own.
type Browser struct {
	ctx       context.Context
	downloads string
}

// Start starts a browser, which ends with the test. It resolves names by the rules, such as
// MAP evil.test 127.0.0.1, before it asks the host's resolver.
func Start(t testing.TB, rules ...string) *Browser {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal("chromium is needed: apt install chromium")
	}
	b := &Browser{downloads: t.TempDir()}
	profile, err := os.MkdirTemp("", "asz-browser")
	if err != nil {
		t.Fatal(err)
	}
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]),
		chromedp.ExecPath(program), chromedp.UserDataDir(profile), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true),
		chromedp.Flag("disable-background-networking", true), chromedp.Flag("no-first-run", true), chromedp.Flag("no-proxy-server", true),
		chromedp.Flag("hide-scrollbars", true), chromedp.Flag("host-resolver-rules", strings.Join(rules, ",")))
	allocated, end := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, closeBrowser := chromedp.NewContext(allocated, chromedp.WithErrorf(func(format string, args ...any) {
		if !strings.HasPrefix(format, "unhandled node event") { // events that this version of chromedp does not know
			t.Logf(format, args...)
		}
	}))
	t.Cleanup(func() {
		closeBrowser()
		end()
		_ = os.RemoveAll(profile)
	})
	b.ctx = ctx
	if err := chromedp.Run(ctx, browser.SetDownloadBehavior(browser.SetDownloadBehaviorBehaviorAllow).WithDownloadPath(b.downloads).WithEventsEnabled(true)); err != nil {
		t.Fatalf("start chromium: %v", err)
	}
	return b
}

// Page is a tab of the browser. Its methods fail the test if something does not succeed.
type Page struct {
	t       testing.TB
	ctx     context.Context
	browser *Browser

	mu        sync.Mutex
	requests  []string
	events    []string
	exchanges []*Exchange
}

// Exchange is a request that the tab sent, and how it was answered.
type Exchange struct {
	Method, URL string
	Cookies     []string // names of those that the browser sent
	Status      int64    // 0 if it was not answered
	Failed      bool     // the browser did not send it, or did not use the answer

	id network.RequestID
}

// watcher runs in every document before its scripts.
const watcher = `window.__violations = [];
document.addEventListener("securitypolicyviolation", (e) => window.__violations.push(e.violatedDirective + " " + e.blockedURI + " " + e.sample + " " + e.sourceFile + ":" + e.lineNumber));`

// Open opens an empty tab, which is closed at the end of the test.
func (b *Browser) Open(t testing.TB) *Page {
	t.Helper()
	ctx, closeTab := chromedp.NewContext(b.ctx)
	t.Cleanup(closeTab)
	p := &Page{t: t, ctx: ctx, browser: b}
	if err := chromedp.Run(ctx); err != nil { // the tab lives as long as the context of this first call
		t.Fatalf("open a tab: %v", err)
	}
	chromedp.ListenTarget(ctx, p.record)
	p.run(page.BringToFront(), emulation.SetFocusEmulationEnabled(true), network.Enable(), page.Enable(), runtime.Enable(), chromedp.ActionFunc(func(ctx context.Context) error {
		_, err := page.AddScriptToEvaluateOnNewDocument(watcher).Do(ctx)
		return err
	}))
	p.Size(1280, 900)
	return p
}

func (p *Page) record(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		p.requests = append(p.requests, e.Request.URL)
		x := p.exchange(e.RequestID)
		x.Method, x.URL = e.Request.Method, e.Request.URL
	case *network.EventRequestWillBeSentExtraInfo:
		x := p.exchange(e.RequestID)
		for _, c := range e.AssociatedCookies {
			if len(c.BlockedReasons) == 0 {
				x.Cookies = append(x.Cookies, c.Cookie.Name)
			}
		}
	case *network.EventResponseReceivedExtraInfo:
		p.exchange(e.RequestID).Status = e.StatusCode
	case *network.EventLoadingFailed:
		p.exchange(e.RequestID).Failed = true
	case *network.EventWebSocketCreated:
		p.requests = append(p.requests, e.URL)
	case *page.EventJavascriptDialogOpening:
		p.events = append(p.events, "dialog: "+e.Message)
		go func() { _ = chromedp.Run(p.ctx, page.HandleJavaScriptDialog(false)) }()
	case *runtime.EventExceptionThrown:
		p.events = append(p.events, "exception: "+e.ExceptionDetails.Error())
	}
}

// exchange returns the exchange of a request. The caller holds the lock.
func (p *Page) exchange(id network.RequestID) *Exchange {
	i := slices.IndexFunc(p.exchanges, func(x *Exchange) bool { return x.id == id })
	if i < 0 {
		i, p.exchanges = len(p.exchanges), append(p.exchanges, &Exchange{id: id})
	}
	return p.exchanges[i]
}

// Exchanges returns the requests of the tab, and of the frames in it, whose URLs have a prefix.
func (p *Page) Exchanges(prefix string) (all []Exchange) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.exchanges {
		if strings.HasPrefix(x.URL, prefix) {
			all = append(all, *x)
		}
	}
	return all
}

func (p *Page) try(actions ...chromedp.Action) error {
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	return chromedp.Run(ctx, actions...)
}

func (p *Page) run(actions ...chromedp.Action) {
	p.t.Helper()
	if err := p.try(actions...); err != nil {
		p.t.Fatal(err)
	}
}

func evaluate(expression string, result any) chromedp.Action {
	return chromedp.Evaluate(expression, result, func(e *runtime.EvaluateParams) *runtime.EvaluateParams { return e.WithAwaitPromise(true) })
}

// Eval evaluates an expression in the page, and stores its value in result.
func (p *Page) Eval(expression string, result any) {
	p.t.Helper()
	p.run(evaluate(expression, result))
}

// Until waits until an expression is true in the page, which may load another one meanwhile.
func (p *Page) Until(what, expression string) {
	p.t.Helper()
	tick := time.NewTicker(30 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); ; <-tick.C {
		var yes bool
		err := p.try(evaluate("!!("+expression+")", &yes))
		var left *cdproto.Error // the page was left before it answered
		switch {
		case err != nil && !errors.As(err, &left):
			p.t.Fatal(err)
		case yes:
			return
		case time.Now().After(end):
			p.t.Fatalf("%s: not within %v; the page at %s shows:\n%.3000s", what, patience, p.Address(), p.Text())
		}
	}
}

// Load goes to an address, and waits until the page is loaded.
func (p *Page) Load(address string) {
	p.t.Helper()
	for _, to := range []string{"about:blank", address} { // another fragment alone would load nothing
		p.run(chromedp.ActionFunc(func(ctx context.Context) error {
			_, _, failure, _, err := page.Navigate(to).Do(ctx)
			if err == nil && failure != "" {
				err = errors.New(failure)
			}
			return err
		}))
	}
	p.Until("the page", `document.readyState === "complete"`)
}

// LogIn opens a one-time link, and waits for the overview.
func (p *Page) LogIn(link string) {
	p.t.Helper()
	p.Load(link)
	p.Until("the overview", `document.querySelector("h1")?.textContent === "Overview" && document.querySelector("main [role=status]")?.textContent`)
}

// Show goes to a view of the dashboard, such as #/host, and waits until it has loaded.
func (p *Page) Show(hash string) {
	p.t.Helper()
	p.Eval(fmt.Sprintf("location.hash = %q", hash), nil)
	p.Until("the view "+hash, fmt.Sprintf(`location.hash === %q && document.querySelector("main h1") && !document.querySelector("main [aria-busy]")`, hash))
}

// Address returns the address that the browser shows.
func (p *Page) Address() (address string) {
	p.t.Helper()
	p.Eval("location.href", &address)
	return address
}

// Text returns the text that the page shows.
func (p *Page) Text() (text string) {
	p.t.Helper()
	p.Eval("document.body?.innerText ?? ''", &text)
	return text
}

// Sees waits until the page shows a text.
func (p *Page) Sees(text string) {
	p.t.Helper()
	p.Until("the text "+text, fmt.Sprintf("document.body?.innerText.includes(%q)", text))
}

// Misses waits until the page no longer shows a text.
func (p *Page) Misses(text string) {
	p.t.Helper()
	p.Until("no text "+text, fmt.Sprintf("!document.body?.innerText.includes(%q)", text))
}

// finder is an expression for the visible control with a name, such as a button's text.
const finder = `[...document.querySelectorAll("dialog[open]"), document].flatMap((root) => [...root.querySelectorAll("a[href], button, summary, label")])
	.find((e) => (e.getAttribute("aria-label") ?? e.innerText).trim() === %q && e.checkVisibility() && !e.closest("[data-moving]"))`

// guard lets only the control that the expression %s finds have the next click. It stops a click on
// anything else, which happens if the page moves between the look at a control and the click on it.
const guard = `(() => {
	removeEventListener("mousedown", window.guard, true);
	removeEventListener("click", window.guard, true);
	window.clicked = false;
	let control;
	window.guard = (e) => {
		if (e.type === "mousedown") control = %s;
		if (!control?.contains(e.target)) { e.preventDefault(); e.stopImmediatePropagation(); return; }
		if (e.type !== "click") return;
		window.clicked = true;
		removeEventListener("mousedown", window.guard, true);
		removeEventListener("click", window.guard, true);
	};
	addEventListener("mousedown", window.guard, true);
	addEventListener("click", window.guard, true);
})()`

// Click clicks the link or button with a name, with the mouse.
func (p *Page) Click(name string) {
	p.t.Helper()
	for clicked := false; !clicked; {
		at := p.locate(name)
		p.Eval(fmt.Sprintf(guard, fmt.Sprintf(finder, name)), nil)
		p.run(chromedp.MouseClickXY(at.X, at.Y))
		p.Eval("window.clicked ?? true", &clicked) // a click may load another page
	}
}

type point struct{ X, Y float64 }

// locate waits for the link or button with a name, and scrolls to it.
func (p *Page) locate(name string) (at point) {
	p.t.Helper()
	find := fmt.Sprintf(finder, name)
	p.Until("the control "+name, find)
	p.Eval("(() => { const e = "+find+`; e.scrollIntoView({block: "center"}); const r = e.getBoundingClientRect(); return {x: r.x + r.width / 2, y: r.y + r.height / 2} })()`, &at)
	return at
}

// Tap taps the link or button with a name, with a finger.
func (p *Page) Tap(name string) {
	p.t.Helper()
	at := p.locate(name)
	p.run(input.DispatchTouchEvent(input.TouchStart, []*input.TouchPoint{{X: at.X, Y: at.Y}}), input.DispatchTouchEvent(input.TouchEnd, []*input.TouchPoint{}))
}

// Touch makes the screen a touch screen, or no more.
func (p *Page) Touch(on bool) {
	p.t.Helper()
	p.run(emulation.SetTouchEmulationEnabled(on))
}

// Copy puts a text into the clipboard, which the page may then read.
func (p *Page) Copy(text string) {
	p.t.Helper()
	p.run(chromedp.ActionFunc(func(ctx context.Context) error {
		ctx = cdp.WithExecutor(ctx, chromedp.FromContext(ctx).Browser)
		for _, name := range []string{"clipboard-read", "clipboard-write"} {
			if err := browser.SetPermission(&browser.PermissionDescriptor{Name: name}, browser.PermissionSettingGranted).Do(ctx); err != nil {
				return err
			}
		}
		return nil
	}))
	p.Eval(fmt.Sprintf("navigator.clipboard.writeText(%q)", text), nil)
}

// Paste pastes into the element that has the focus, as Ctrl+Shift+V does.
func (p *Page) Paste() {
	p.t.Helper()
	key := input.DispatchKeyEvent(input.KeyRawDown).WithKey("V").WithCode("KeyV").WithWindowsVirtualKeyCode(86).WithModifiers(input.ModifierCtrl | input.ModifierShift)
	p.run(key.WithCommands([]string{"pasteAndMatchStyle"}))
}

// Fill replaces the text of the field that a selector finds, as if the user typed it.
func (p *Page) Fill(selector, text string) {
	p.t.Helper()
	p.Until("the field "+selector, fmt.Sprintf("document.querySelector(%q)", selector))
	p.Eval(fmt.Sprintf("(() => { const e = document.querySelector(%q); e.focus(); e.select() })()", selector), nil)
	p.run(input.InsertText(text))
}

// Press presses keys, such as "\t", "\r" or kb.ArrowDown, in the element that has the focus.
func (p *Page) Press(keys string) {
	p.t.Helper()
	var presses []chromedp.Action
	for _, key := range keys {
		var down *input.DispatchKeyEventParams
		for _, e := range kb.Encode(key) {
			switch e.Type {
			case input.KeyDown, input.KeyRawDown:
				down = e
				presses = append(presses, e)
			case input.KeyChar: // with it, a page could not prevent the effect of the key
				down.Type, down.Text, down.UnmodifiedText = input.KeyDown, e.Text, e.UnmodifiedText
			default:
				presses = append(presses, e)
			}
		}
	}
	p.run(presses...)
}

// Tab presses Tab until the control with a name has the focus, at most a number of times.
func (p *Page) Tab(name string, most int) {
	p.t.Helper()
	var passed []string
	for range most {
		p.Press(kb.Tab)
		var focused string
		p.Eval(`(() => { const e = document.activeElement; return (e.getAttribute("aria-label") ?? (e.innerText || e.labels?.[0]?.innerText) ?? "").trim() })()`, &focused)
		if focused == name {
			return
		}
		passed = append(passed, focused)
	}
	p.t.Fatalf("control %q did not get the focus within %d presses of Tab, which went to %q", name, most, passed)
}

// Screen returns the text of the terminal.
func (p *Page) Screen() (text string) {
	p.t.Helper()
	p.Eval(`[...document.querySelectorAll(".xterm-rows > div")].map((e) => e.textContent.trimEnd()).join("\n")`, &text)
	return text
}

// ScreenShows waits until the terminal shows a text.
func (p *Page) ScreenShows(text string) {
	p.t.Helper()
	p.Until("the terminal's text "+text, fmt.Sprintf(`[...document.querySelectorAll(".xterm-rows > div")].map((e) => e.textContent.trimEnd()).join("\n").includes(%q)`, text))
}

// TypeInTerminal types text into the terminal.
func (p *Page) TypeInTerminal(text string) {
	p.t.Helper()
	p.Eval(`document.querySelector(".xterm-helper-textarea").focus()`, nil)
	p.Press(text)
}

// Size sets the size of the window, in CSS pixels.
func (p *Page) Size(width, height int64) {
	p.t.Helper()
	p.run(emulation.SetDeviceMetricsOverride(width, height, 1, width < 600))
}

// Dark chooses between the dark and the light colours, and turns animations off.
func (p *Page) Dark(dark bool) {
	p.t.Helper()
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	p.run(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"}}))
}

// Picture returns what the window shows, as PNG.
func (p *Page) Picture() (png []byte) {
	p.t.Helper()
	p.run(chromedp.CaptureScreenshot(&png))
	return png
}

// Draw saves what the page shows in a window of that size to the directory that the environment variable PICTURES
// names, for README and docs. Without the variable, it does nothing.
func (p *Page) Draw(name string, width, height int64) {
	p.t.Helper()
	dir := os.Getenv("PICTURES")
	if dir == "" {
		return
	}
	p.Dark(false)
	p.Size(width, height)
	png := p.Picture()
	if len(png) >= 150_000 {
		p.t.Errorf("%s has %d bytes, want fewer than 150000", name, len(png))
	}
	if err := os.WriteFile(filepath.Join(dir, name), png, 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// Download waits until the browser has saved a file with a name, and returns its content.
func (p *Page) Download(name string) []byte {
	p.t.Helper()
	tick := time.NewTicker(30 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); ; <-tick.C {
		if content, err := os.ReadFile(filepath.Join(p.browser.downloads, name)); err == nil && len(content) > 0 {
			return content
		}
		if time.Now().After(end) {
			p.t.Fatalf("download of %s: not within %v; the page shows:\n%s", name, patience, p.Text())
		}
	}
}

// Overflow returns how many pixels the page is wider than the window.
func (p *Page) Overflow() (pixels int) {
	p.t.Helper()
	p.Eval("document.documentElement.scrollWidth - innerWidth", &pixels)
	return pixels
}

// Axe checks the page with the axe-core in the file source, and returns its serious and
// critical findings.
func (p *Page) Axe(source string) []string {
	p.t.Helper()
	var there bool
	if p.Eval(`typeof axe === "object"`, &there); !there {
		p.Eval(source+"; true", nil)
	}
	var found []string
	p.Eval(`axe.run(document, {preload: false, resultTypes: ["violations"]}).then((r) => r.violations.filter((v) => v.impact === "serious" || v.impact === "critical")
		.flatMap((v) => v.nodes.slice(0, 5).map((n) => v.id + " (" + v.impact + "): " + n.target.join(" ") + ": " + n.failureSummary.replace(/\s+/g, " ") + " " + n.html.slice(0, 200))))`, &found)
	return found
}

// CheckHarmless fails the test if a script of a guest ran in the page, if the page broke its
// content security policy, showed a dialog or threw an exception, or if it sent a request to
// another origin than the dashboard's.
func (p *Page) CheckHarmless() {
	p.t.Helper()
	var state struct {
		XSS        any      `json:"xss"`
		Violations []string `json:"violations"`
	}
	p.Eval(`({xss: window.__xss ?? null, violations: window.__violations ?? []})`, &state)
	if state.XSS != nil {
		p.t.Errorf("a guest's script ran: window.__xss = %v, want none", state.XSS)
	}
	if len(state.Violations) > 0 {
		p.t.Errorf("violations of the content security policy = %q, want none", state.Violations)
	}
	own, err := url.Parse(p.Address())
	if err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.events) > 0 {
		p.t.Errorf("events = %q, want no dialog and no exception", p.events)
	}
	for _, address := range p.requests {
		u, err := url.Parse(address)
		if err != nil || u.Host != own.Host && !strings.HasPrefix(address, "blob:http://"+own.Host+"/") && address != "about:blank" {
			p.t.Errorf("request to %q, want only requests to %s", address, own.Host)
		}
	}
}
