package picker

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// decisionLogTime limits how long a preview reads the decision log.
const decisionLogTime = 200 * time.Millisecond

// maxPreview limits the window size that fzf reports.
const maxPreview = 1000

// Preview draws the preview of a row for a window of the given size. For a session, the
// agent's screen gets the space that the rest leaves. Sessions of other hosts are for PreviewRemote.
func (p *Picker) Preview(ctx context.Context, w io.Writer, key string, width, height int) error {
	page := p.page(width, height)
	t, ok := ParseKey(key)
	if !ok || t.Host != "" {
		return nil
	}
	var err error
	if t.Session != "" {
		err = page.local(ctx, t.Session)
	} else {
		err = page.repository(ctx, t.Repo)
	}
	if err != nil {
		return err
	}
	return page.write(w)
}

// PreviewRemote draws the preview of a session on another host, with what its guest last reported. at is
// when; zero if there is no report.
func (p *Picker) PreviewRemote(w io.Writer, r Remote, seen guestproto.Observation, at time.Time, width, height int) error {
	page := p.page(width, height)
	page.session(sight{View: r.View, host: r.Host, Observation: seen, at: at})
	return page.write(w)
}

// page is a preview that is being drawn.
type page struct {
	p             *Picker
	width, height int
	lines         []string
}

func (p *Picker) page(width, height int) *page {
	return &page{p: p, width: min(max(width, 10), maxPreview), height: min(max(height, 3), maxPreview)}
}

func (g *page) write(w io.Writer) error {
	_, err := io.WriteString(w, strings.Join(g.lines, "\n")+"\n")
	return err
}

// add adds a line of untrusted text to the page.
func (g *page) add(tone console.Tone, format string, args ...any) {
	g.raw(tone, g.p.fit(fmt.Sprintf(format, args...), g.width))
}

func (g *page) raw(tone console.Tone, line string) {
	if len(g.lines) < g.height {
		g.lines = append(g.lines, g.p.Console.Paint(tone, line))
	}
}

// sight is what a preview shows of a session.
type sight struct {
	session.View
	host string // in the cluster, "" for this one

	// What the session's guest last reported, and when; zero without a report.
	guestproto.Observation
	at time.Time

	// Known on the session's own host only.
	step   string // that its keeper works on
	lost   string // what its destruction would lose, while its VM does not run
	budget string
	denied string // by the gateway
}

// local draws a session of this host.
func (g *page) local(ctx context.Context, id string) error {
	s, err := g.p.Manager.Get(ctx, id)
	if err != nil {
		return err
	}
	of := sight{View: s.View(), step: g.p.step(ctx, s), budget: g.p.budget(s), denied: g.p.denied(ctx, s)}
	if w := s.Status.Work; w != nil && s.Phase != session.Ready {
		of.lost = fmt.Sprintf("%s%swould lose: %s", w.Branch, g.dot(), w.Summary())
	}
	if seen, at, err := session.Observation(g.p.Manager.Config.Paths, s); err == nil { // missing if the keeper has not seen the guest yet
		of.Observation, of.at = seen, at
	}
	g.session(of)
	return nil
}

// dot returns what separates the parts of a line.
func (g *page) dot() string {
	if g.p.Unicode {
		return " · "
	}
	return ", "
}

func (g *page) session(s sight) {
	dot, now := g.dot(), time.Now()
	st, since := stateOf(s.View)
	g.add(console.Plain, "%s", s.DisplayName())
	g.add(console.Faint, "%s", onHost(s.host, s.Name))
	how := st.word + " " + age(since, now)
	if a := s.Attention; a != nil {
		how += dot + a.Agent
	}
	g.add(st.tone, "%s", how)
	if on := waitsFor(s.View, st); on != "" {
		g.wrap(st.tone, on, 3)
	}
	if st != broken && s.Message() != "" {
		g.wrap(console.Bad, s.Message(), 3)
	}
	if s.Error != nil && s.Error.Hint != "" {
		g.add(console.Faint, "hint: %s", s.Error.Hint)
	}
	if s.step != "" && st == moving(st.word) {
		g.add(console.Notice, "%s", s.step)
	}

	switch c := s.Changes; {
	case s.lost != "":
		g.add(console.Plain, "%s", s.lost)
	case c != nil:
		g.add(console.Plain, "%s", strings.Join([]string{
			cmp.Or(c.Branch, "no branch"), count(c.Commits, "commit") + " not pushed",
			fmt.Sprintf("%s +%d -%d", count(c.Files, "file"), c.Insertions, c.Deletions),
		}, dot))
	case s.Branch != "":
		g.add(console.Plain, "%s", s.Branch)
	}
	for _, parts := range machine(s) {
		g.add(console.Faint, "%s", strings.Join(parts, dot))
	}
	if s.Usage != nil {
		g.add(console.Faint, "used: %s%s", s.Usage, s.budget)
	}
	for _, note := range s.Notes() {
		g.add(console.Notice, "%s", note)
	}
	if !s.Enforced {
		g.add(console.Notice, "network not enforced: root in the guest can bypass the network policy")
	}
	for _, port := range s.Ports {
		switch {
		case port.Close:
		case port.Host == 0 || port.Error != "":
			g.add(console.Notice, "port %d: %s", port.Guest, cmp.Or(port.Error, "not published yet"))
		case s.host != "":
			g.add(console.Plain, "port %d: published on %s", port.Guest, s.host)
		default:
			g.add(console.Plain, "port %d: %s", port.Guest, port.URL(s.Name))
		}
	}
	if s.denied != "" {
		g.add(console.Notice, "denied: %s", s.denied)
	}
	if len(s.Screen) > 0 && s.State == session.Ready {
		g.screen(s.Observation, s.at, now)
	}
}

// machine returns what a VM has and uses, and what it was made from, on one line each.
func machine(s sight) [][]string {
	r, m := s.Resources, s.Machine
	has := []string{fmt.Sprintf("%d CPU", r.CPUs), r.Memory.String(), r.Disk.String() + " disk"}
	if m != nil && s.State == session.Ready {
		has = []string{
			fmt.Sprintf("%d CPU, load %.1f", r.CPUs, m.Load),
			fmt.Sprintf("memory %v of %v", config.Size(m.MemUsed), r.Memory),
			fmt.Sprintf("disk %v of %v", config.Size(m.DiskUsed), r.Disk),
		}
	}
	made := []string{"image " + s.Image}
	if s.From != "" {
		made = append(made, "from "+string(s.From))
	}
	return [][]string{has, made}
}

// step returns the step that the session's keeper is working on.
func (p *Picker) step(ctx context.Context, s session.Session) string {
	seq, err := p.Manager.LastPhaseSeq(ctx, s.ID)
	if err != nil {
		return ""
	}
	last := ""
	events, err := p.Manager.Store.Events(ctx, s.ID, seq, 1000)
	if err != nil {
		return ""
	}
	for _, ev := range events {
		var step lifecycle.Step
		if ev.Kind == session.EventStep && json.Unmarshal(ev.Data, &step) == nil {
			last = strings.TrimSpace(step.Name + "  " + step.Detail)
		}
	}
	return last
}

// denied returns what the gateway has denied since the user last visited, the most
// frequent first.
func (p *Picker) denied(ctx context.Context, s session.Session) string {
	ctx, cancel := context.WithTimeout(ctx, decisionLogTime)
	defer cancel()
	all, err := session.Net{Sessions: p.Manager}.DeniedSince(ctx, s, s.Status.Attached)
	if err != nil || len(all) == 0 {
		return ""
	}
	const most = 4
	var names []string
	for _, d := range all[:min(len(all), most)] {
		names = append(names, d.Target())
	}
	text := strings.Join(names, ", ")
	if more := len(all) - len(names); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// budget returns the session's budget of money, to be read after what was used.
func (p *Picker) budget(s session.Session) string {
	b, err := session.Net{Sessions: p.Manager}.Budget(s)
	if err != nil || b.Session == 0 {
		return ""
	}
	return fmt.Sprintf(", budget %s", b.Session)
}

// screen shows the end of the agent's screen, because agents ask their questions there.
func (g *page) screen(observation guestproto.Observation, at, now time.Time) {
	lines := observation.Screen
	for len(lines) > 0 && strings.TrimSpace(lines[len(lines)-1]) == "" {
		lines = lines[:len(lines)-1]
	}
	rows := g.height - len(g.lines) - 1
	if rows < 1 || len(lines) == 0 {
		return
	}
	g.add(console.Faint, "-- %s, %s ago --", cmp.Or(observation.Window, "screen"), age(at, now))
	for _, l := range lines[max(0, len(lines)-rows):] {
		g.raw(console.Plain, ansi.Truncate(layout(l), g.width, ""))
	}
}

// layout returns a line of a screen as harmless text with its spacing preserved.
func layout(line string) string {
	line = ansi.Strip(strings.ToValidUTF8(line[:min(len(line), maxText)], ""))
	words := strings.Split(strings.ReplaceAll(line, "\t", "    "), " ")
	for i, word := range words {
		words[i] = termtext.Line(word)
	}
	return strings.TrimRight(strings.Join(words, " "), " ")
}

// wrap adds a long text in several lines.
func (g *page) wrap(tone console.Tone, text string, most int) {
	text = g.p.fit(text, most*g.width)
	for l := range strings.SplitSeq(ansi.Wrap(text, g.width, ""), "\n") {
		if most--; most < 0 {
			return
		}
		g.raw(tone, ansi.Truncate(l, g.width, ""))
	}
}

func (g *page) repository(ctx context.Context, open string) error {
	_, repos, err := g.p.read(ctx)
	if err != nil {
		return err
	}
	for _, r := range repos {
		if r.open != open {
			continue
		}
		g.add(console.Plain, "%s", r.name)
		g.add(console.Faint, "no session; Enter creates one from %s", tilde(r.open))
		if r.path != "" {
			g.add(console.Plain, "local clone: %s", tilde(r.path))
		}
		if r.listed {
			g.add(console.Plain, "listed in repos.txt")
		}
		if !r.used.IsZero() {
			g.add(console.Plain, "last session ended %s ago", age(r.used, time.Now()))
		}
		return nil
	}
	return nil // it has a session by now
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
