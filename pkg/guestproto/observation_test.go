package guestproto_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// observations reads all observations up to the end or the first error.
func observations(r io.Reader) (all []guestproto.Observation, err error) {
	for g, err := range guestproto.ReadObservations(r) {
		if err != nil {
			return all, err
		}
		all = append(all, g)
	}
	return all, nil
}

// identicalTimes compares times with their locations.
var identicalTimes = cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) && a.Location() == b.Location() })

func TestObservationsRoundTrip(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
	sent := []guestproto.Observation{
		{Version: guestproto.Version},
		{
			Version: guestproto.Version,
			Agents: []guestproto.Agent{
				{Name: "claude", PID: 7, State: guestproto.AgentBlocked, On: "permission: Bash: rm -rf <x> & 'y'", Since: at},
				{Name: "codex", PID: 8, State: guestproto.AgentGone, Since: at},
			},
			Window:  "claude",
			Screen:  []string{"", "  ❯ indented, 日本語, é", "last"},
			Changes: &guestproto.Changes{Branch: "main", Commits: 1, Files: 2, Insertions: 3, Deletions: 4},
			Machine: &guestproto.Machine{Load: 0.5, MemUsed: 1, MemTotal: 2, DiskUsed: 3, DiskTotal: 4},
			Questions: []guestproto.Question{
				{ID: "0123456789abcdef", Kind: guestproto.AskPermission, Agent: "claude", Tool: "Bash", Text: "Bash: rm\n\n  -rf <x>"},
				{ID: "fedcba9876543210", Kind: guestproto.AskChoice, Text: "Which?", Choices: []string{"日本語", "é"}, Only: true, Parts: 2},
			},
			Taken: []string{"0123456789abcdee"},
		},
	}
	var stream bytes.Buffer
	for _, g := range sent {
		if err := g.Encode(&stream); err != nil {
			t.Fatal(err)
		}
	}
	if lines := strings.Count(stream.String(), "\n"); lines != len(sent) {
		t.Errorf("Encode() wrote %d lines, want %d", lines, len(sent))
	}
	got, err := observations(&stream)
	if err != nil {
		t.Errorf("read encoded observations: error %v, want nil", err)
	}
	if diff := cmp.Diff(sent, got, identicalTimes); diff != "" {
		t.Errorf("observations mismatch (-want +got):\n%s", diff)
	}
}

// Whatever is on the sender's screen, an observation fits in one line.
func TestAnObservationFits(t *testing.T) {
	g := guestproto.Observation{Machine: &guestproto.Machine{Load: 1}}
	for range 100 {
		g.Agents = append(g.Agents, guestproto.Agent{Name: strings.Repeat("𝔘", 500), On: strings.Repeat("𝔘", 5000), State: guestproto.AgentIdle})
		g.Screen = append(g.Screen, strings.Repeat("𝔘", 5000))
	}
	g.Agents = append(g.Agents, guestproto.Agent{Name: "one", State: guestproto.AgentBlocked})
	for i := range 100 {
		g.Questions = append(g.Questions, guestproto.Question{
			ID: fmt.Sprintf("%016x", i), Kind: guestproto.AskText, Text: strings.Repeat("𝔘", 9000), Tool: strings.Repeat("𝔘", 9000),
			Choices: slices.Repeat([]string{strings.Repeat("𝔘", 900)}, 100),
		})
		g.Taken = append(g.Taken, fmt.Sprintf("%016x", i))
	}
	var line bytes.Buffer
	if err := g.Encode(&line); err != nil || line.Len() > guestproto.MaxObservation {
		t.Fatalf("Encode() = %d bytes, %v, want at most %d", line.Len(), err, guestproto.MaxObservation)
	}
	got, err := observations(&line)
	if err != nil || len(got) != 1 {
		t.Fatalf("read %d observations, %v, want one", len(got), err)
	}
	if a := got[0].Agents; len(a) != guestproto.MaxAgents || a[0].Name != "one" {
		t.Fatalf("%d agents, %.20v, want %d, the first named %q", len(a), a, guestproto.MaxAgents, "one")
	}
	if q := got[0].Questions; len(q) != guestproto.MaxQuestions || q[0].Text == "" || len(q[0].Choices) == 0 || len(got[0].Taken) != guestproto.MaxTaken {
		t.Errorf("%d questions, the first %.20v, %d taken, want %d and %d", len(q), q, len(got[0].Taken), guestproto.MaxQuestions, guestproto.MaxTaken)
	}
	if n := len(got[0].Screen); n > guestproto.MaxScreen || n > 0 && utf8.RuneCountInString(got[0].Screen[0]) != guestproto.MaxScreenWidth {
		t.Errorf("%d lines of the screen, want at most %d, the first of %d characters", n, guestproto.MaxScreen, guestproto.MaxScreenWidth)
	}
}

func TestObservationsAreTextForPeople(t *testing.T) {
	line := `{"version":1,"agents":[
		{"name":"a\u001b[2J","pid":-4,"state":"idle","on":"x\ny\u202e","since":"9999-12-31T23:59:59-10:00"},
		{"name":"` + strings.Repeat("n", 500) + `","state":"blocked","since":"0000-01-01T00:00:00Z"}],
		"window":"w\u0007","screen":["\u001b]52;c;aGk=\u0007","` + strings.Repeat("w", 900) + `  ","tail   "],
		"changes":{"branch":"b\u009b","commits":-1,"files":-2,"insertions":-3,"deletions":-4},
		"machine":{"load":1e300,"mem_used":50,"mem_total":40,"disk_used":-1,"disk_total":-9}}`
	got, err := observations(strings.NewReader(strings.ReplaceAll(line, "\n", " ") + "\n"))
	if err != nil || len(got) != 1 {
		t.Fatalf("read observations %+v, %v, want one", got, err)
	}
	want := guestproto.Observation{
		Version: 1,
		Agents: []guestproto.Agent{
			{Name: strings.Repeat("n", 80), State: guestproto.AgentBlocked},
			{Name: "a\ufffd[2J", State: guestproto.AgentIdle, On: "x\ufffdy\ufffd"},
		},
		Window: "w\ufffd", Screen: []string{"\ufffd]52;c;aGk=\ufffd", strings.Repeat("w", 200), "tail"},
		Changes: &guestproto.Changes{Branch: "b\ufffd"},
		Machine: &guestproto.Machine{Load: 9999, MemUsed: 40, MemTotal: 40},
	}
	if diff := cmp.Diff(want, got[0], identicalTimes); diff != "" {
		t.Errorf("observation mismatch (-want +got):\n%s", diff)
	}
}

func TestObservationsRefused(t *testing.T) {
	good := `{"version":1}` + "\n"
	for name, bad := range map[string]string{
		"another version": `{"version":2}`,
		"none":            `{}`,
		"null":            `null`,
		"two values":      good[:13] + good[:13],
		"unknown field":   `{"version":1,"run":"rm"}`,
		"unknown state":   `{"version":1,"agents":[{"name":"a","state":"\u001b[31mhappy","since":"2026-01-01T00:00:00Z"}]}`,
		"no state":        `{"version":1,"agents":[{"name":"a","since":"2026-01-01T00:00:00Z"}]}`,
		"unknown kind":    `{"version":1,"questions":[{"id":"0123456789abcdef","kind":"\u001b[31m","text":"x"}]}`,
		"question's id":   `{"version":1,"questions":[{"id":"../../x","kind":"text","text":"x"}]}`,
		"a number's text": `{"version":1,"machine":{"load":"NaN"}}`,
		"huge number":     `{"version":1,"changes":{"commits":99999999999999999999}}`,
		"an empty line":   ``,
		"not JSON":        "\x1b]0;evil\x07",
		"endless":         strings.Repeat("x", guestproto.MaxObservation+1),
	} {
		got, err := observations(strings.NewReader(good + bad + "\n" + good))
		if err == nil || len(got) != 1 {
			t.Errorf("%s: read %d observations, %v, want one and an error", name, len(got), err)
			continue
		}
		if strings.ContainsAny(err.Error(), "\x1b\x07") {
			t.Errorf("%s: error %q, want it without control characters", name, err)
		}
	}
	broken := errors.New("broken")
	if _, err := observations(io.MultiReader(strings.NewReader(good), brokenReader{broken})); !errors.Is(err, broken) {
		t.Errorf("a reader that fails: error %v, want %v", err, broken)
	}
}

type brokenReader struct{ err error }

func (b brokenReader) Read([]byte) (int, error) { return 0, b.err }

// When the consumer stops, no more observations are read.
func TestObservationsStop(t *testing.T) {
	n := 0
	for range guestproto.ReadObservations(strings.NewReader(strings.Repeat(`{"version":1}`+"\n", 5))) {
		if n++; n == 2 {
			break
		}
	}
	if n != 2 {
		t.Errorf("read %d observations, want 2", n)
	}
}

func FuzzObservations(f *testing.F) {
	f.Add(`{"version":1}`)
	f.Add(`{"version":1,"agents":[{"name":"claude","pid":3,"state":"blocked","on":"permission: Bash: ls","since":"2026-01-02T03:04:05Z"},{"name":"b","state":"gone","since":"9999-12-31T23:59:59-10:00"}],"window":"claude","screen":["a\u001b[2J","` + "\x7f\u202e" + `"]}`)
	f.Add(`{"version":1,"changes":{"branch":"main","commits":-1,"files":2,"insertions":3,"deletions":4},"machine":{"load":-0.1,"mem_used":5,"mem_total":4,"disk_used":3,"disk_total":9}}` + "\n{\"version\":1}")
	f.Add(`{"version":1,"questions":[{"id":"0123456789abcdef","kind":"question","agent":"a\u001b","tool":"\u202e","text":"a\r\n\tb\u001b[2J ","choices":["x\ny"],"only":true,"parts":-1}],"taken":["0123456789abcdef","x"]}`)
	f.Fuzz(func(t *testing.T, stream string) {
		got, _ := observations(strings.NewReader(stream))
		for _, g := range got {
			texts := append([]string{g.Window}, g.Screen...)
			for _, q := range g.Questions {
				texts = append(append(texts, q.Agent, q.Tool), q.Choices...)
				if !guestproto.ValidQuestionID(q.ID) || utf8.RuneCountInString(q.Text) > guestproto.MaxQuestionText || strings.ContainsAny(q.Text, "\x1b\r\x00\u202e\u009b\t") || q.Parts < 0 {
					t.Fatalf("question %+v, want an id, and a text of at most %d characters without control characters", q, guestproto.MaxQuestionText)
				}
			}
			for i, a := range g.Agents {
				texts = append(texts, a.Name, a.On)
				if a.PID < 0 || i > 0 && a.State.Urgency() < g.Agents[i-1].State.Urgency() {
					t.Fatalf("agents %+v, want process ids of at least 0, the most urgent agent first", g.Agents)
				}
			}
			if c := g.Changes; c != nil {
				texts = append(texts, c.Branch)
				if min(c.Commits, c.Files, c.Insertions, c.Deletions) < 0 {
					t.Fatalf("changes %+v, want no negative count", c)
				}
			}
			if m := g.Machine; m != nil && (m.Load < 0 || min(m.MemUsed, m.DiskUsed) < 0 || m.MemUsed > m.MemTotal || m.DiskUsed > m.DiskTotal) {
				t.Fatalf("machine %+v, want no negative number and no use above the total", m)
			}
			for _, text := range texts {
				if !utf8.ValidString(text) || utf8.RuneCountInString(text) > guestproto.MaxScreenWidth || strings.ContainsAny(text, "\x1b\n\r\x00\u202e\u009b") {
					t.Fatalf("text %q, want at most %d characters of UTF-8 without control characters", text, guestproto.MaxScreenWidth)
				}
			}
			if len(g.Agents) > guestproto.MaxAgents || len(g.Screen) > guestproto.MaxScreen {
				t.Fatalf("%d agents, %d lines, want at most %d, %d", len(g.Agents), len(g.Screen), guestproto.MaxAgents, guestproto.MaxScreen)
			}
			// A keeper encodes the observation again, which must not change it.
			var once, twice bytes.Buffer
			if err := g.Encode(&once); err != nil {
				t.Fatal(err)
			}
			again, err := observations(bytes.NewReader(once.Bytes()))
			if err != nil || len(again) != 1 {
				t.Fatalf("read %d observations, %v, from %q, want one", len(again), err, once.String())
			}
			if err := again[0].Encode(&twice); err != nil || once.String() != twice.String() {
				t.Fatalf("observation encoded again = %q, %v, want %q", twice.String(), err, once.String())
			}
		}
	})
}
