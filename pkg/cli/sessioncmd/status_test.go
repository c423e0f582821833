package sessioncmd

import (
	"math"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

func TestSummary(t *testing.T) {
	now := time.Now()
	s := func(repo string, phase session.Phase, state guestproto.AgentState, since, visited time.Duration) session.View {
		s := session.View{ID: repo, Repo: repo, RepoKey: "github.com/" + repo, State: phase, VisitedAt: now.Add(-visited)}
		if state != "" {
			s.Attention = &session.Attention{State: state, Since: now.Add(-since)}
		}
		return s
	}
	all := []session.View{
		s("o/old-done", session.Ready, guestproto.AgentDone, time.Hour, time.Minute), // visited since
		s("o/done", session.Ready, guestproto.AgentDone, time.Minute, time.Hour),
		s("o/late", session.Ready, guestproto.AgentBlocked, time.Minute, 0),
		s("o/early#(x)", session.Ready, guestproto.AgentBlocked, time.Hour, 0),
		s("o/failed", session.Ready, guestproto.AgentError, time.Second, 0),
		s("o/broken", session.Broken, guestproto.AgentBlocked, time.Hour, 0), // its agent is gone
		s("o/working", session.Ready, guestproto.AgentWorking, 0, 0),
		s("o/plain", session.Ready, "", 0, 0),
		s("o/stopped", session.Stopped, guestproto.AgentBlocked, time.Hour, 0),
	}
	sum := summarise(all)
	plain := sum.text(func(_, text string) string { return text })
	if want := "2 blocked (o/early#(x), …) · 2 failed · 1 done · 1 working · 2 ready"; plain != want {
		t.Errorf("summary without colours = %q, want %q", plain, want)
	}
	if got, want := sum.text(tmuxStyle), "#[fg=colour16,bg=colour220]2 blocked (o/early(x), …)#[default] · #[fg=colour231,bg=colour160]2 failed#[default] · #[fg=colour16,bg=colour40]1 done#[default] · 1 working · 2 ready"; got != want {
		t.Errorf("summary for tmux = %q, want %q", got, want)
	}
	var order string
	for _, s := range queue(all) {
		order += s.ID + " "
	}
	if want := "o/early#(x) o/late o/failed o/done "; order != want {
		t.Errorf("queue() = %q, want %q", order, want)
	}
	if got := summarise(nil).text(tmuxStyle); got != "" {
		t.Errorf("summary of no sessions = %q, want none", got)
	}
}

// TestNext checks, among others, that a user in the only waiting session learns that no
// other agent waits.
func TestNext(t *testing.T) {
	s := func(id string, state guestproto.AgentState) session.View {
		return session.View{ID: id, State: session.Ready, Attention: &session.Attention{State: state, Since: time.Unix(int64(id[0]), 0)}}
	}
	a, b, idle := s("a", guestproto.AgentBlocked), s("b", guestproto.AgentBlocked), s("c", guestproto.AgentIdle)
	for _, c := range []struct {
		all           []session.View
		current       string
		want, sayNone string
	}{
		{[]session.View{b, a, idle}, "", "a", ""},
		{[]session.View{b, a, idle}, "a", "b", ""},
		{[]session.View{b, a, idle}, "b", "a", ""},
		{[]session.View{a, idle}, "c", "a", ""},
		{[]session.View{a, idle}, "a", "", "no other agent is waiting for you"},
		{[]session.View{idle}, "c", "", "no agent is waiting for you"},
	} {
		if got, none := next(c.all, c.current); got.ID != c.want || none != c.sayNone {
			t.Errorf("next from %q = %q, %q, want %q, %q", c.current, got.ID, none, c.want, c.sayNone)
		}
	}
}

// TestStatusCanBeRead checks that each part of the line is readable on a bar of any colour.
// It must set both its colours, with enough contrast between them (WCAG AA).
func TestStatusCanBeRead(t *testing.T) {
	sum := summary{Blocked: 1, Error: 1, Done: 1}
	parts := regexp.MustCompile(`#\[([^\]]*)\]\d`).FindAllStringSubmatch(sum.text(tmuxStyle), -1)
	if len(parts) != 3 {
		t.Fatalf("summary %q has %d coloured parts, want 3", sum.text(tmuxStyle), len(parts))
	}
	for _, p := range parts {
		colors := regexp.MustCompile(`^fg=colour(\d+),bg=colour(\d+)$`).FindStringSubmatch(p[1])
		if colors == nil {
			t.Errorf("style %q, want foreground and background colours by number", p[1])
			continue
		}
		a, b := luminance(t, colors[1]), luminance(t, colors[2])
		if contrast := (max(a, b) + 0.05) / (min(a, b) + 0.05); contrast < 4.5 {
			t.Errorf("contrast of style %q = %.1f, want at least 4.5", p[1], contrast)
		}
	}
}

// luminance returns the luminance, from 0 to 1, of a colour of xterm's 6×6×6 cube.
func luminance(t *testing.T, number string) float64 {
	t.Helper()
	n, err := strconv.Atoi(number)
	if err != nil || n < 16 || n > 231 {
		t.Fatalf("colour %s, %v, want one of the cube, 16 to 231, because themes change the others", number, err)
	}
	linear := func(level int) float64 {
		c := float64([]int{0, 95, 135, 175, 215, 255}[level]) / 255
		if c <= 0.03928 {
			return c / 12.92
		}
		return math.Pow((c+0.055)/1.055, 2.4)
	}
	n -= 16
	return 0.2126*linear(n/36) + 0.7152*linear(n/6%6) + 0.0722*linear(n%6)
}
