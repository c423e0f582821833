package picker

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/charmbracelet/x/ansi"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

func preview(t *testing.T, p *Picker, key string, width, height int) string {
	t.Helper()
	var b bytes.Buffer
	if err := p.Preview(t.Context(), &b, key, width, height); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func wants(t *testing.T, text string, all ...string) {
	t.Helper()
	for _, want := range all {
		if !strings.Contains(text, want) {
			t.Errorf("preview = %s, want %q in it", text, want)
		}
	}
}

func TestPreview(t *testing.T) {
	p := newPicker(t)
	status := attention(guestproto.AgentBlocked, "Bash: rm -rf build", time.Now().Add(-3*time.Minute))
	status.Ports = []session.PublishedPort{{Guest: 3000, Host: 40000}, {Guest: 1, Error: "in use"}, {Guest: 2, Close: true}}
	p.put(t, row{id: "aaaaaaaaaaaa", slug: "o/r", phase: session.Ready, status: status})
	p.observation(t, "aaaaaaaaaaaa", guestproto.Observation{
		Window: "claude", Screen: []string{"first", "  indented   twice", "Do you want to proceed?", "", ""},
		Changes: &guestproto.Changes{Branch: "fix", Commits: 1, Files: 2, Insertions: 30, Deletions: 4},
		Machine: &guestproto.Machine{Load: 1.25, MemUsed: 512 << 20, MemTotal: 1 << 30, DiskUsed: 2 << 30, DiskTotal: 4 << 30},
	})
	text := preview(t, p, "s:aaaaaaaaaaaa", 80, 40)
	wants(
		t, text, "o/r\n", "agent-aaaaaaaaaaaa\n", "\nblocked ", "m · claude\n", "image none\n", "Bash: rm -rf build\n", "fix · 1 commit not pushed · 2 files +30 -4",
		"2 CPU, load 1.2", "memory 512MiB of 1GiB", "disk 2GiB of 4GiB", "network not enforced", "port 3000: http://3000.agent-aaaaaaaaaaaa.localhost:40000", "port 1: in use",
		"m ago --\nfirst\n  indented   twice\nDo you want to proceed?\n",
	)
	if strings.Contains(text, "port 2") {
		t.Errorf("preview = %s, want no port 2, which was removed", text)
	}
	// In a small window, the end of the screen remains.
	small := preview(t, p, "s:aaaaaaaaaaaa", 80, 13)
	if !strings.Contains(small, "proceed?") || strings.Contains(small, "first") || strings.Count(small, "\n") > 13 {
		t.Errorf("preview of 13 lines = %s, want the question alone", small)
	}

	p.put(t, row{id: "bbbbbbbbbbbb", slug: "o/b", phase: session.Broken, err: "no space left on device", hint: "df -h"})
	wants(t, preview(t, p, "s:bbbbbbbbbbbb", 80, 40), "broken", "no space left on device\n", "hint: df -h\n")

	work := session.Status{
		Work: &repo.WorkState{Branch: "main", Ahead: 2, Dirty: 1}, Attention: status.Attention,
		Workspace: "scratch", Resumes: "suspended", Setup: []session.SetupOutcome{{Step: session.SetupScript, State: session.SetupFailed}},
	}
	p.put(t, row{id: "cccccccccccc", slug: "o/c", phase: session.Stopped, status: work})
	stopped := preview(t, p, "s:cccccccccccc", 80, 40)
	wants(t, stopped, "stopped", "would lose: 2 commits neither pushed nor fetched, 1 changed file",
		"setup failed\n", "suspended\n", "workspace scratch\n")
	if strings.Contains(stopped, "claude") {
		t.Errorf("preview of a stopped session = %s, want no agent", stopped)
	}

	p.Listed = []string{"o/listed"}
	wants(t, preview(t, p, repositoryKey("o/listed"), 80, 40), "o/listed\n", "no session", "listed in repos.txt")
	for _, key := range []string{lineKey, "", "x", repositoryKey("o/unknown")} {
		if text := preview(t, p, key, 80, 40); strings.TrimSpace(text) != "" {
			t.Errorf("preview of %q = %q, want none", key, text)
		}
	}
	if err := p.Preview(t.Context(), &bytes.Buffer{}, "s:nobody", 80, 40); err == nil {
		t.Error("Preview of an unknown session = nil, want an error")
	}
}

// TestPreviewIsHarmless checks that only harmless text of a guest reaches the terminal,
// and no more than the window has space for.
func TestPreviewIsHarmless(t *testing.T) {
	p := newPicker(t)
	long := strings.Repeat(hostile, 300)
	status := attention(guestproto.AgentBlocked, long, time.Now())
	status.Attention.Agent = long
	p.put(t, row{id: "aaaaaaaaaaaa", key: "local:/x", slug: hostile, phase: session.Ready, status: status, err: long, hint: long})
	g := guestproto.Observation{Window: long, Changes: &guestproto.Changes{Branch: long, Commits: -1 << 60, Insertions: 1 << 60}, Machine: &guestproto.Machine{Load: 1e300, MemUsed: -1}}
	for range 1200 {
		g.Screen = append(g.Screen, long[:2*maxText])
	}
	p.observation(t, "aaaaaaaaaaaa", g)
	p.Listed = []string{hostile}
	other := session.View{ID: "aaaaaaaaaaaa", Name: long, Repo: long, RepoKey: long, Branch: long, State: hostile, Image: long, From: hostile, Workspace: long}
	for _, key := range []string{"s:aaaaaaaaaaaa", repositoryKey(hostile), "s:box2:aaaaaaaaaaaa"} {
		for _, size := range [][2]int{{80, 24}, {20, 5}, {0, 0}, {1 << 30, 1 << 30}, {-1, -1}} {
			var b bytes.Buffer
			err := p.Preview(t.Context(), &b, key, size[0], size[1])
			if target, _ := ParseKey(key); target.Host != "" {
				b.Reset()
				err = p.PreviewRemote(&b, Remote{Host: target.Host, View: other}, g, time.Now(), size[0], size[1])
			}
			if err != nil {
				t.Fatal(err)
			}
			text := b.String()
			lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
			if len(lines) > max(size[1], 3) || len(lines) > maxPreview {
				t.Errorf("lines of the preview = %d, want at most %d", len(lines), max(size[1], 3))
			}
			for _, l := range lines {
				if strings.IndexFunc(l, func(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Cf, r) }) >= 0 {
					t.Fatalf("line of the preview = %q, want no control characters", l)
				}
				if w := ansi.StringWidth(l); w > max(size[0], 10) || len(l) > 8*maxText {
					t.Errorf("line of the preview = %d cells, %d bytes, want at most %d cells", w, len(l), size[0])
				}
			}
		}
	}
}
