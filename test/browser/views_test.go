//go:build browser

package browser

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// at returns the time that long ago, as guests report it.
func at(ago time.Duration) string { return time.Now().Add(-ago).UTC().Format(time.RFC3339) }

// task submits a task whose agent is a shell script, and returns its id.
func (h *host) task(name, repo, script string) string {
	h.t.Helper()
	file := strings.ReplaceAll(name, " ", "-") + ".yaml"
	h.write(file, fmt.Sprintf("version: \"1\"\nkind: Task\nmetadata: {name: %s}\nrepository: {url: %s/%s}\nagent:\n  kind: command\n  command:\n  - sh\n  - -ec\n  - |\n    %s\n",
		name, h.dir, repo, strings.ReplaceAll(script, "\n", "\n    ")), 0o600)
	out := strings.Fields(h.must("task", "submit", "-f", file))
	return out[len(out)-1]
}

// populate makes sessions and tasks in all states. It returns the session that asks.
func populate(h *host) (asking guest, patched string) {
	h.t.Helper()
	asking = h.open("payments-api")
	asking.tmux("vim", "server", "claude", "git")
	asking.exec(`sed -i 's/evening/night/' greeting.txt; git -c user.name=a -c user.email=a@localhost commit -qam 'Say good night'; printf 'package main\n\nfunc main() {}\n' >main.go`)
	asking.observe(fmt.Sprintf(`{"version":1,"agents":[{"name":"claude","state":"blocked","on":"permission to use Bash","since":%q}],"window":"claude",
		"screen":["● I have renamed the column and updated the queries.","","● Bash(make migrate)","","  Do you want to run the migration now?"],
		"changes":{"branch":"main","commits":1,"files":2,"insertions":4,"deletions":1},"machine":{"load":0.42,"mem_total":8589934592,"mem_used":2147483648,"disk_total":53687091200,"disk_used":9663676416},
		"questions":[{"id":"00000000000000a1","kind":"permission","agent":"claude","tool":"Bash","text":"make migrate DB=staging\n\nApply the new migration to the staging database"}]}`, at(4*time.Minute)))
	storefront := h.open("storefront")
	storefront.observe(fmt.Sprintf(`{"version":1,"agents":[{"name":"codex","state":"working","since":%q}],"changes":{"branch":"checkout-form","commits":3,"files":11}}`, at(11*time.Minute)))
	search := h.open("search")
	search.observe(fmt.Sprintf(`{"version":1,"agents":[{"name":"claude","state":"done","on":"All 214 tests pass; the index is built in the background now","since":%q}],"changes":{"branch":"main","commits":2,"files":5}}`, at(35*time.Minute)))
	docs := h.open("docs")
	docs.observe(fmt.Sprintf(`{"version":1,"agents":[{"name":"claude","state":"blocked","on":"question","since":%q}],"changes":{"branch":"main","commits":0,"files":0},
		"questions":[{"id":"00000000000000a2","kind":"question","agent":"claude","text":"Which version should the upgrade guide start from?","choices":["2.4 (current LTS)","3.0"]}]}`, at(time.Minute)))
	h.open("infrastructure")
	h.must("stop", "infrastructure")
	h.write("faults.json", `{"start": {"error": "no space left on device", "code": 5, "hint": "df -h"}}`, 0o600)
	h.command("git", "init", "-q", "legacy-billing")
	h.command("git", "-C", "legacy-billing", "commit", "-q", "--allow-empty", "-m", "first")
	_, _ = h.run("open", "-d", "./legacy-billing") // fails
	if err := os.Remove(filepath.Join(h.dir, "faults.json")); err != nil {
		h.t.Fatal(err)
	}
	patched = h.task("fix the greeting", "docs", "echo fixing\necho more >>greeting.txt\nmkdir -p out\necho '{\"ok\": true}' >out/report.json\ngit add -A\ngit -c user.name=a -c user.email=a@localhost commit -qm fixed")
	failing := h.task("nightly tests", "search", "echo 'FAIL: TestSearch' >&2\nexit 3")
	h.task("update dependencies", "storefront", "echo resolving\nexec sleep 600")
	for id, state := range map[string]string{patched: "COMPLETED", failing: "FAILED"} {
		testenv.WaitFor(h.t, "task "+state, func() bool { return strings.Contains(h.must("task", "show", id, "--json"), `"state": "`+state+`"`) })
	}
	db, err := store.Open(h.t.Context(), filepath.Join(h.dir, ".local/state/agent-sessionizer/store.db"))
	if err != nil {
		h.t.Fatal(err)
	}
	defer db.Close()
	for day := range 12 {
		for i, model := range []string{"claude-opus-4-5", "gpt-5.1-codex"} {
			use := store.Usage{
				Session: asking.id, Request: fmt.Sprint(day, model), At: time.Now().AddDate(0, 0, -day), RepoKey: "local:" + h.dir + "/payments-api", Model: model,
				Input: 40_000, Output: 9_000, Cost: int64(day*day%7+1+i) * 400_000_000,
			}
			if err := db.ReserveUsage(h.t.Context(), use, nil); err != nil {
				h.t.Fatal(err)
			}
		}
	}
	h.must("budget", "payments-api", "--money", "80 USD")
	return asking, patched
}

// views returns the address of every view of the dashboard.
func views(asking guest, task string) []string {
	all := []string{"#/", "#/submit", "#/host"}
	for _, tab := range []string{"screen", "terminal", "timeline", "changes", "network", "usage"} {
		all = append(all, "#/sessions/"+asking.id+"/"+tab)
	}
	for _, tab := range []string{"timeline", "output", "artifacts", "changes"} {
		all = append(all, "#/tasks/"+task+"/"+tab)
	}
	return all
}

// TestViews checks every view, in light and dark, on a wide and a narrow window: axe-core
// finds nothing serious, nothing is wider than the window, and no request leaves serve.
// It also draws the pictures of README.
func TestViews(t *testing.T) {
	h := newHost(t)
	h.serve()
	asking, task := populate(h)
	p := driver.Start(t).Open(t)
	p.LogIn(h.link())
	checkContents(t, p, asking)
	source := axe(t)
	for _, view := range views(asking, task) {
		p.Show(view)
		if strings.HasSuffix(view, "terminal") {
			p.ScreenShows("guest$")
		}
		for _, width := range []int64{1280, 390} {
			p.Size(width, 900)
			for _, dark := range []bool{false, true} {
				p.Dark(dark)
				name := fmt.Sprintf("%s at %d px, dark: %v", view, width, dark)
				for _, found := range p.Axe(source) {
					t.Errorf("%s: %s", name, found)
				}
				if extra := p.Overflow(); extra > 0 {
					t.Errorf("%s is %d px wider than the window, want no scrolling", name, extra)
				}
				if dir := os.Getenv("BROWSER_LOOK"); dir != "" {
					file := fmt.Sprintf("%s-%d-%v.png", strings.NewReplacer("#/", "", "/", "-", asking.id, "s", task, "t").Replace(view), width, dark)
					if err := os.WriteFile(filepath.Join(dir, file), p.Picture(), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
	}
	p.CheckHarmless()
	p.Show("#/")
	p.Draw("dashboard.png", 1100, 960)
	p.Draw("dashboard-phone.png", 390, 844)
}

// checkContents checks what the overview puts first, what the page of the host says, and the chart.
func checkContents(t *testing.T, p *driver.Page, asking guest) {
	t.Helper()
	var groups []string
	p.Eval(`[...document.querySelectorAll("main section")].filter((e) => !e.hidden && e.querySelector(".rows, .cards")).map((e) => {
		const title = e.querySelector("h2").firstChild.textContent.trim();
		const names = [...e.querySelectorAll(".rows a.name")].map((a) => a.innerText);
		return title + ": " + (title === "Needs attention" ? names : names.toSorted()).join(", ");
	})`, &groups)
	want := []string{"Questions: ", "Needs attention: payments-api, docs, legacy-billing, search", "Working: storefront"}
	if len(groups) < 6 || !slices.Equal(groups[:3], want) || groups[len(groups)-2] != "Running tasks: update dependencies" || groups[len(groups)-1] != "Ended tasks: fix the greeting, nightly tests" {
		t.Errorf("groups of the overview = %q, want %q first, and tasks last", groups, want)
	}

	// populate has inserted the uses: by day 0.40 to 2.80 USD for the one model, 0.40 USD more for the other.
	const models = `[...document.querySelectorAll("section[aria-labelledby=models] tbody tr")].map((r) => [...r.cells].map((c) => c.innerText).join(" "))`
	const repos = `[...document.querySelectorAll("section[aria-labelledby=repos] tbody tr")].map((r) => [...r.cells].map((c) => c.innerText).join(" "))`
	for _, c := range []struct {
		view, rows string
		want       []string
	}{
		{"#/host", models, []string{"gpt-5.1-codex 12 588,000 $18.80", "claude-opus-4-5 12 588,000 $14.00"}},
		{"#/host", repos, []string{"local:" + asking.dir + "/payments-api 24 1,176,000 $32.80"}},
	} {
		p.Show(c.view)
		p.Until("the rows", c.rows+".length > 0")
		var got []string
		if p.Eval(c.rows, &got); !slices.Equal(got, c.want) {
			t.Errorf("rows of %s = %q, want %q", c.view, got, c.want)
		}
	}
	var sizes []string
	if p.Eval(`[...document.querySelectorAll("section[aria-labelledby=disk] dd")].map((e) => e.innerText)`, &sizes); len(sizes) < 2 || slices.ContainsFunc(sizes, func(s string) bool { return !strings.HasSuffix(s, "B") }) {
		t.Errorf("sizes on the disk = %q, want two or more", sizes)
	}

	// The chart has a bar in the colour of the accent for each of the 12 days.
	p.Show("#/sessions/" + asking.id + "/usage")
	p.Until("12 bars in the chart", `(() => {
		const canvas = document.querySelector(".chart canvas");
		if (!canvas) return false;
		const probe = document.createElement("canvas").getContext("2d");
		probe.fillStyle = getComputedStyle(document.querySelector(".chart")).getPropertyValue("--accent").trim();
		probe.fillRect(0, 0, 1, 1);
		const accent = probe.getImageData(0, 0, 1, 1).data;
		const { width, height } = canvas;
		const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
		const is = (x, y) => x >= 0 && [0, 1, 2].every((i) => pixels[4 * (y * width + x) + i] === accent[i]);
		for (let y = 0; y < height; y++) {
			let bars = 0;
			for (let x = 0; x < width; x++) if (is(x, y) && !is(x - 1, y)) bars++;
			if (bars === 12) return true;
		}
		return false;
	})()`)
	p.Show("#/")
}
