//go:build e2e

package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// testDashboard does in a real browser what a user does with a running session. Claude Code is
// idle in it, and asks for permissions.
func testDashboard(t *testing.T, b *box, name string, m *model, w *attention, say func(string), typed func(...string)) {
	serve := b.start("serve", "--listen", "127.0.0.1:18123")
	defer func() {
		_ = serve.Process.Signal(syscall.SIGTERM)
		serve.ends(t)
	}()
	testenv.WaitFor(t, "an answer of serve", func() bool { r, err := b.api("/api/health"); return err == nil && r.Body.Close() == nil })
	link := strings.TrimSpace(b.Asz("dashboard", "--no-open"))
	p := driver.Start(t).Open(t)
	p.LogIn(link)
	if at := p.Address(); strings.Contains(at, "code=") {
		t.Errorf("address after the login = %s, want none of the link's code", at)
	}

	// A permission of the agent is answered on the first page, and the agent goes on.
	b.MustIn(name, "rm -f made-by-the-agent")
	say("RUNBASH seven")
	w.blocks()
	q := b.question(guestproto.AskPermission, "touch made-by-the-agent")
	p.Sees("Bash: touch made-by-the-agent")
	p.Draw("dashboard-question.png", 1100, 500)
	p.Click("Allow")
	p.Misses("Bash: touch made-by-the-agent")
	b.answered(q.ID, "allow", store.QuestionDelivered)
	w.agent(guestproto.AgentDone, "")
	b.MustIn(name, "test -e made-by-the-agent")

	all := places(t, b, p)
	testPlaces(t, b, name, m, w, say, all)
	t.Run("each kind from each place", func(t *testing.T) { testKinds(t, b, name, m, w, say, typed, all) })

	// The terminal of another window than the agent's.
	p.Click("project")
	p.Click("Terminal")
	p.Until("the windows", `[...document.querySelectorAll("#window option")].some((o) => o.textContent.includes("scratch"))`)
	p.Eval(`(() => { const s = document.querySelector("#window"); s.selectedIndex = [...s.options].findIndex((o) => o.textContent.includes("scratch")); s.dispatchEvent(new Event("change")) })()`, nil)
	p.ScreenShows("project main %") // of the shell; the agent's window was shown first
	p.TypeInTerminal("clear; uname -n; echo from-the-page-$((40+2))\r")
	p.ScreenShows("lima-" + name)
	p.ScreenShows("from-the-page-42")
	p.Draw("dashboard-terminal.png", 1100, 420)

	// A denied name is allowed.
	b.In(name, "curl -sS -m 20 http://dashboard.example/")
	p.Click("Network")
	p.Click("Allow dashboard.example")
	testenv.WaitFor(t, "an allowed name", func() bool {
		return strings.HasPrefix(b.Asz("net", "explain", name, "dashboard.example:80"), "allowed")
	})

	// A task, whose patch is downloaded.
	p.Show("#/submit")
	p.Fill("#manifest", fmt.Sprintf("version: \"1\"\nkind: Task\nmetadata: {name: from the page}\nvm: {session: %s}\nagent: {kind: command, command: [sh, -ec, 'echo from the page >from-the-page.txt; git add -A']}\n", name))
	p.Click("Validate")
	p.Sees("The manifest is valid.")
	p.Click("Submit")
	p.Sees("from the page")
	p.Until("the end of the task", `document.querySelector(".badge.good")?.textContent === "completed"`)
	p.Click("Artifacts")
	const patches = `[...document.querySelectorAll(".artifact .name")].map((e) => e.textContent).find((n) => n.endsWith(".patch"))`
	p.Until("the patch", patches)
	var patch string
	p.Eval(patches, &patch)
	p.Click("Download " + patch)
	b.Write("downloaded.patch", string(p.Download(patch)))
	if out, err := exec.Command("git", "-C", filepath.Join(b.Home, "project"), "apply", "--check", filepath.Join(b.Home, "downloaded.patch")).CombinedOutput(); err != nil {
		t.Errorf("git apply of the downloaded patch = %v, want nil\n%s", err, out)
	}
	b.MustIn(name, "git reset -q && rm -f from-the-page.txt made-by-the-agent")
	p.CheckHarmless()
}
