//go:build browser

package browser

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// run is what a script of the guest would do.
const run = `window.__xss=1`

// corpus returns 100 hostile texts. Each begins with a mark of its own.
func corpus() []string {
	texts := []string{
		`<script>` + run + `</script>`, `<ScRiPt>` + run + `</sCrIpT>`, `<script src="data:text/javascript,` + run + `"></script>`, `<script src=//evil.example/x.js></script>`,
		`"><script>` + run + `</script>`, `'><script>` + run + `</script>`, `</title><script>` + run + `</script>`, `</textarea><script>` + run + `</script>`, `</style><script>` + run + `</script>`,
		`</pre></div></main><script>` + run + `</script>`, `--><script>` + run + `</script>`, `]]><script>` + run + `</script>`, `<<script>` + run + `//<</script>`, `<script/x>` + run + `</script>`,
		`<scr<script>ipt>` + run + `</scr</script>ipt>`, `<noscript><p title="</noscript><img src=x onerror=` + run + `>">`, `<template><script>` + run + `</script></template>`,
		`<iframe src="javascript:parent.__xss=1"></iframe>`, `<iframe srcdoc="<script>parent.__xss=1</script>"></iframe>`, `<object data="javascript:` + run + `"></object>`, `<embed src="javascript:` + run + `">`,
		`<a href="javascript:` + run + `">click</a>`, `<a href="jAvAsCrIpT:` + run + `">click</a>`, "<a href=\"java\tscript:" + run + `">click</a>`, `<a href="&#106;avascript:` + run + `">click</a>`, `<a href="data:text/html,<script>` + run + `</script>">click</a>`,
		`javascript:` + run, `JaVaScRiPt://%0a` + run, `vbscript:msgbox(1)`, `data:text/html,<script>` + run + `</script>`, `<form action="javascript:` + run + `"><input type=submit autofocus></form>`, `<button formaction="javascript:` + run + `">x</button>`,
		`<base href="//evil.example/">`, `<meta http-equiv="refresh" content="0;url=javascript:` + run + `">`, `<meta http-equiv="Content-Security-Policy" content="default-src *">`, `<link rel="stylesheet" href="//evil.example/x.css">`, `<style>@import "//evil.example/x.css"; *{display:none}</style>`,
		`<div style="background:url(//evil.example/x.png)">x</div>`, `<img src="//evil.example/track.png">`, `<video poster="//evil.example/x.png" autoplay><source onerror="` + run + `"></video>`,
		`<svg><script>` + run + `</script></svg>`, `<svg><animate onbegin="` + run + `" attributeName=x dur=1s>`, `<svg><a xlink:href="javascript:` + run + `"><text y=20>x</text></a></svg>`, `<svg><foreignObject><script>` + run + `</script></foreignObject></svg>`, `<svg><use href="data:image/svg+xml,<svg id=x onload=` + run + `>#x">`,
		`<math><mtext><table><mglyph><style><img src=x onerror=` + run + `>`, `<math href="javascript:` + run + `">x</math>`, `<isindex type=image src=1 onerror=` + run + `>`, `<xss id=x tabindex=1 onfocus=` + run + `></xss>`, `<input autofocus onfocus=` + run + `>`,
		`{{constructor.constructor('` + run + `')()}}`, `${` + run + `}`, `#{` + run + `}`, `<%= ` + run + ` %>`, `{%raw%}` + run, `[[${` + run + `}]]`, "`;" + run + ";//", `";` + run + `;//`, `';` + run + `;//`, `\";` + run + `;//`, `</script><script>` + run + `</script>`,
		`__proto__`, `constructor`, `toString`, `{"__proto__":{"hidden":true}}`, `null`, `undefined`, `[object Object]`, `%3Cscript%3E` + run + `%3C/script%3E`, `&lt;script&gt;` + run + `&lt;/script&gt;`, `&#60;script&#62;` + run, `\u003cscript\u003e` + run, `\x3cscript\x3e` + run, `+ADw-script+AD4-` + run,
		"\u202egnp.exe\u202c", "\u2066\u2067isolate\u2069", "\u200b\u200dzero\ufefflength", strings.Repeat("Z\u0351\u0363", 60), "\x1b[31mred\x1b[0m\x1b]0;title\x07", "\x1b]52;c;cHdu\x07\x1b]8;;javascript:" + run + "\x07link\x1b]8;;\x07", "\u009b31m\u009d0;x\u009c", "nul\x00byte<script\x00>" + run + "</script>",
		"a\r\nSet-Cookie: x=y\r\n\r\n<script>" + run + "</script>", "\ufffe\uffff<script>" + run + "</script>", "＜script＞" + run + "＜/script＞", strings.Repeat("long<b>", 400), strings.Repeat("w", 3000),
	}
	for _, event := range []string{"onerror", "onload", "onclick", "onmouseover", "ontoggle", "onanimationstart", "onpointerenter", "onfocusin", "onwheel", "onbeforeinput", "onscrollend", "ontransitionend", "oncontentvisibilityautostatechange"} {
		texts = append(texts, fmt.Sprintf(`"' %s=%s x="<img src=x %s=%s><details open %s=%s>`, event, run, event, run, event, run))
	}
	for i := range texts {
		texts[i] = mark(i) + texts[i]
	}
	return texts
}

func mark(i int) string { return fmt.Sprintf("M%02dM", i) }

// literal reports whether a text can be shown exactly as it is.
func literal(text string) bool {
	return len(text) < 120 && strings.IndexFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) < 0 && !strings.Contains(text, "  ")
}

// subtaskManifest is what a subtask in the store was submitted with.
const subtaskManifest = `{"version":"1","kind":"Task","repository":{"url":"owner/repo"},"agent":{"kind":"command","command":["true"]}}`

// shows fails the test unless the page shows the texts: those that can be shown as they are
// literally, and of the others the marks.
func shows(t *testing.T, p *driver.Page, where string, texts []string) {
	t.Helper()
	p.Sees(mark99(texts))
	var page string
	p.Eval(`document.querySelector("main").innerText + [...document.querySelectorAll("option")].map((o) => o.text).join("\n")`, &page)
	for _, text := range texts {
		want := text
		if !literal(text) || where == "task's artifacts" && strings.ContainsAny(text, "/%") { // such names are changed

			want = text[:len(mark(0))]
		}
		if !strings.Contains(page, want) {
			t.Errorf("%s does not show %q, want it as text", where, want)
		}
	}
	p.CheckHarmless()
}

// mark99 returns the mark of the last text.
func mark99(texts []string) string { return texts[len(texts)-1][:len(mark(0))] }

// fileName makes a hostile text the name of a file.
func fileName(text string) string {
	text = strings.ToValidUTF8(strings.NewReplacer("/", "∕", "\x00", "").Replace(text), "")
	for len(text) > 180 {
		text = strings.ToValidUTF8(text[:180], "")
	}
	return text
}

// TestHostileGuest puts 100 hostile texts into everything that a guest can write and a page
// shows. No script runs, no request leaves, and the texts are shown as text.
func TestHostileGuest(t *testing.T) {
	texts := corpus()
	if len(texts) != 100 {
		t.Fatalf("texts = %d, want 100", len(texts))
	}
	h := newHost(t)
	g := h.open("repo")
	h.serve()
	all := strings.Join(texts, "\n")
	h.write("texts", all+"\n", 0o600)
	quoted := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	p := driver.Start(t).Open(t)
	p.LogIn(h.link())

	// Windows of tmux.
	g.tmux("first")
	var names []string
	for _, text := range texts[1:] { // the host lists 100
		names = append(names, strings.ReplaceAll(text, "\x00", "")+".") // tmux takes ; at the end for itself
	}
	g.exec(`for name; do tmux new-window -d -t agent: -n "$name" 'exec cat'; done`, names...)
	view := "#/sessions/" + g.id + "/"
	p.Show(view + "terminal")
	p.Until("the list of windows", `document.querySelectorAll("option").length >= 100`)
	p.ScreenShows("guest$")
	p.TypeInTerminal("clear; cat '" + h.dir + "/texts'\r")
	p.Until("the texts in the terminal", `[...document.querySelectorAll(".xterm-rows > div")].some((e) => e.textContent.includes("M99M"))`)
	p.CheckHarmless()
	g.exec(`tmux kill-server`)

	// Files and their contents.
	dir := filepath.Join(g.root, "home/agent/repo")
	for _, text := range texts {
		g.write(filepath.Join(dir, fileName(text)), text+"\n", 0o600)
	}
	p.Show(view + "changes")
	p.Until("the open files", `[...document.querySelectorAll(".diff details[open] .scroll")].filter((e) => e.hasChildNodes()).length >= 100`)
	shows(t, p, "diff", texts)

	// The gateway's log.
	for i, text := range texts {
		g.decide(fmt.Sprintf(`{"seq":%d,"time":"2026-01-01T00:00:00Z","kind":%[2]s,"proto":%[2]s,"name":%[2]s,"port":443,"rule":%[2]s,"source":%[2]s,"reason":%[2]s}`, 1_000_000+i, quoted(text)))
	}
	p.Show(view + "network")
	p.Until("the decisions", `document.querySelectorAll("table tbody tr").length >= 100`)
	shows(t, p, "network", append(texts[:85:85], texts[87:]...)) // two are longer than a line of the log

	// Questions, agents, branch and screen; each round also adds events.
	for from := 0; from < len(texts); from += 8 {
		round := texts[from:min(from+8, len(texts))]
		var questions []map[string]any
		for i, text := range round {
			kind := []string{"question", "permission", "plan", "question"}[i%4]
			questions = append(questions, map[string]any{"id": fmt.Sprintf("%016x", from+i+1), "kind": kind, "parts": i % 4, "agent": text, "tool": text, "text": text, "choices": []string{text, "other"}})
		}
		g.observe(quoted(map[string]any{
			"version": 1, "window": strings.Join(round, " "), "screen": texts[max(0, from-20):min(from+20, 100)], "questions": questions,
			"agents":  []map[string]any{{"name": round[0], "state": "blocked", "on": round[len(round)-1], "since": at(time.Minute)}},
			"changes": map[string]any{"branch": round[len(round)/2], "commits": 1, "files": 1},
		}))
		p.Show("#/")
		shows(t, p, "overview", round)
	}
	for from := 0; from < len(texts); from += 20 {
		g.observe(quoted(map[string]any{"version": 1, "window": texts[from], "screen": texts[from : from+20]}))
		p.Show(view + "screen")
		shows(t, p, "screen", texts[from:from+20])
	}
	p.Show(view + "timeline")
	shows(t, p, "timeline", texts[99:]) // the host bounds the events about questions

	// Why images were not made: a repository's setup fails with a text of its own. The host shows five.
	for from := 0; from < len(texts); from += 5 {
		for i, text := range texts[from : from+5] {
			h.write(fmt.Sprintf(".local/share/agent-sessionizer/images/.failed-%d", i), quoted(map[string]any{"at": at(time.Minute), "error": text}), 0o600)
		}
		p.Show("#/")
		p.Show("#/host")
		shows(t, p, "images", texts[from:from+5])
	}
	p.Show(view + "timeline")

	// What a keeper and a gateway report: events of all kinds, models, setup, subtasks.
	db, err := store.Open(t.Context(), filepath.Join(h.dir, ".local/state/agent-sessionizer/store.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	// Questions of the gateway: connections to hosts of these names, and budgets.
	for from := 0; from < len(texts); from += 10 {
		var asked []store.Question
		for i, text := range texts[from : from+10] {
			kind := []string{store.QuestionNetwork, store.QuestionBudget}[i%2]
			asked = append(asked, store.Question{ID: ids.New(), GuestID: mark(from + i), Kind: kind, Agent: kind, Tool: text, Text: strings.ToValidUTF8(text, "")})
		}
		if _, err := db.SyncQuestions(t.Context(), g.id, asked, nil, store.Question.OfGateway, func(*store.Session, []store.Question) ([]store.Event, error) { return nil, nil }); err != nil {
			t.Fatal(err)
		}
		p.Show("#/")
		p.Until("the last question", `[...document.querySelectorAll("[data-question]")].some((e) => e.innerText.includes("`+mark(from+9)+`"))`)
		shows(t, p, "questions of the gateway", texts[from:from+10])
	}
	p.Show(view + "timeline")
	kinds := []string{"phase", "step", "warning", "error", "attention", "question", "net", "exec", "outcome", "subtask", "fetch"}
	var outcomes []map[string]string
	for i, text := range texts {
		data := map[string]any{}
		for _, name := range strings.Fields("agent actor allow answer by deny detail error exec exit_code from hint host_services message name on reason result signal state text to") {
			data[name] = strings.ToValidUTF8(text[:min(len(text), 2000)], "") // an event is bounded
		}
		ev := store.NewEvent(kinds[i%len(kinds)], data)
		if ev.Kind == "fetch" {
			ev.Kind = text
		}
		use := store.Usage{Session: g.id, Request: fmt.Sprint(i), At: time.Now(), RepoKey: text, Model: text, Input: 1, Cost: int64(i)}
		sub := store.Task{ID: fmt.Sprintf("%012x", i+1), Name: text, Phase: string(task.Completed), Desired: string(task.Run), Parent: g.id, Root: g.id, Depth: 1, Manifest: json.RawMessage(subtaskManifest), Status: json.RawMessage("{}")}
		submitted := store.NewEvent(task.EventPhase, task.PhaseChange{To: task.Completed})
		admit := func(store.Family) error { return nil }
		if _, err := db.CreateSubtask(t.Context(), sub, nil, submitted, store.NewEvent("subtask", map[string]string{"id": sub.ID, "name": text}), admit); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(db.Append(t.Context(), g.id, ev), db.ReserveUsage(t.Context(), use, nil)); err != nil {
			t.Fatal(err)
		}
		outcomes = append(outcomes, map[string]string{"step": text, "state": text})
	}
	_, err = db.Update(t.Context(), g.id, func(row *store.Session) (store.Event, error) {
		var status map[string]any
		err := json.Unmarshal(row.Status, &status)
		status["setup"] = outcomes
		row.Status = json.RawMessage(quoted(status))
		return store.Event{}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	p.Until("the setup", `document.querySelector("dl.facts")?.innerText.includes("M99M")`)
	shows(t, p, "timeline", texts)
	shows(t, p, "setup", texts)
	p.Show(view + "usage")
	shows(t, p, "usage", texts)
	p.Show("#/host")
	p.Until("both tables", `["models", "repos"].every((id) => document.querySelector("section[aria-labelledby=" + id + "]").innerText.includes("M99M"))`)
	shows(t, p, "host", texts)
	p.Show("#/")
	p.Click("Show all 100")
	shows(t, p, "subtasks", texts)
	p.Show("#/tasks/000000000001")
	shows(t, p, "subtask", texts[:1])

	// A task: its output, its error, its artifacts and its events.
	var output strings.Builder
	for _, text := range texts {
		output.WriteString(quoted(map[string]any{"type": "assistant", "message": map[string]any{"id": text, "content": []any{map[string]any{"type": "text", "text": text}, map[string]any{"type": "tool_use", "id": "x", "name": text, "input": map[string]any{"command": text}}}}}) + "\n")
	}
	output.WriteString(quoted(map[string]any{"type": "result", "is_error": true, "result": texts[0], "errors": []string{texts[0]}}) + "\n")
	g.write(filepath.Join(g.root, "output"), output.String(), 0o600)
	g.write(filepath.Join(g.root, "bin/claude"), "#!/bin/sh\ncat $AGENT_GUEST_ROOT/output\ncat "+h.dir+"/texts >&2\nexit 1\n", 0o755)
	h.write("task.yaml", "version: \"1\"\nkind: Task\nmetadata: {name: "+quoted("M00M<b>hostile</b>")+"}\nvm: {session: repo}\nagent: {kind: claude, prompt: x}\n", 0o600)
	words := strings.Fields(h.must("task", "submit", "-f", "task.yaml"))
	id := words[len(words)-1]
	testenv.WaitFor(t, "the end of the task", func() bool { return strings.Contains(h.must("task", "show", id, "--json"), `"state": "FAILED`) })
	task := "#/tasks/" + id + "/"
	for _, tab := range []string{"timeline", "output", "artifacts"} {
		p.Show(task + tab)
		last := `document.querySelector("main").innerText.includes("M99M")`
		if tab == "output" { // the two streams are read separately
			last = `[...document.querySelectorAll("pre.log")].every((e) => e.innerText.includes("M99M"))`
		}
		p.Until("the last text", last)
		shows(t, p, "task's "+tab, texts)
	}
	p.Show(task + "changes")
	p.CheckHarmless()
	p.Show("#/")
	p.Sees("<b>hostile</b>")
	p.Dark(true)
	for _, found := range p.Axe(axe(t)) {
		t.Error(found)
	}
	for _, width := range []int64{1280, 390} {
		p.Size(width, 900)
		for _, at := range []string{"#/", view + "screen", view + "changes", view + "network", view + "timeline", task + "timeline", task + "output", task + "artifacts"} {
			if p.Show(at); p.Overflow() > 0 {
				t.Errorf("%s with hostile texts is %d px wider than the window of %d px, want no scrolling", at, p.Overflow(), width)
			}
		}
	}
	p.CheckHarmless()
	if dir := os.Getenv("BROWSER_LOOK"); dir != "" {
		p.Show("#/")
		if err := os.WriteFile(filepath.Join(dir, "hostile.png"), p.Picture(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
