package guestproto

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// These limit an observation, equally on both sides.
const (
	MaxObservation = 128 << 10 // one line, bytes
	MaxAgents      = 16
	MaxScreen      = 60  // lines
	MaxScreenWidth = 200 // characters of a line
	maxName        = 80  // characters: of an agent, window or branch
	maxOn          = 200 // characters
)

// Encode writes one line. It omits what exceeds the limits; of the screen it omits
// the beginning, and of questions the end.
func (g Observation) Encode(w io.Writer) error {
	g = g.sanitized()
	g.Version = Version
	for {
		var line bytes.Buffer
		e := json.NewEncoder(&line)
		e.SetEscapeHTML(false) // a screen may be full of characters that escaping turns into six bytes
		if err := e.Encode(g); err != nil {
			return fmt.Errorf("send an observation: %w", err)
		}
		if line.Len() > MaxObservation && len(g.Screen) > 0 {
			g.Screen = g.Screen[(len(g.Screen)+1)/2:]
			continue
		}
		if line.Len() > MaxObservation && len(g.Questions) > 0 {
			for i, q := range g.Questions {
				g.Questions[i].Text = head(q.Text, utf8.RuneCountInString(q.Text)/2)
			}
			continue
		}
		if _, err := w.Write(line.Bytes()); err != nil {
			return fmt.Errorf("send an observation: %w", err)
		}
		return nil
	}
}

// ReadObservations reads what a guest's `agent-guest watch` writes until r ends. It stops
// after the first error.
func ReadObservations(r io.Reader) iter.Seq2[Observation, error] {
	return func(yield func(Observation, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(make([]byte, 0, 4096), MaxObservation)
		for lines.Scan() {
			g, err := decodeObservation(lines.Bytes())
			if err != nil {
				yield(Observation{}, fmt.Errorf("observation: %w", err))
				return
			}
			if !yield(g, nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Observation{}, fmt.Errorf("observation: %w", err))
		}
	}
}

func decodeObservation(line []byte) (Observation, error) {
	g, err := decode[Observation](bytes.NewReader(line), MaxObservation)
	if err != nil {
		return Observation{}, err
	}
	if g.Version != Version {
		return Observation{}, fmt.Errorf("version must be %d, got %d", Version, g.Version)
	}
	for _, a := range g.Agents {
		if !a.State.known() {
			return Observation{}, fmt.Errorf("unknown agent state %q", shorten(string(a.State), maxName))
		}
	}
	for _, q := range g.Questions {
		if !q.Kind.known() {
			return Observation{}, fmt.Errorf("unknown kind of question %q", shorten(string(q.Kind), maxName))
		}
		if !ValidQuestionID(q.ID) {
			return Observation{}, fmt.Errorf("id of question must be 16 hex digits, got %q", shorten(q.ID, maxName))
		}
	}
	return g.sanitized(), nil
}

// sanitized returns an observation that is safe to display: limited in size, with clean text
// and plausible numbers, the most urgent agents first.
func (g Observation) sanitized() Observation {
	g.Agents = slices.Clone(g.Agents)
	slices.SortStableFunc(g.Agents, func(a, b Agent) int { return a.State.Urgency() - b.State.Urgency() })
	g.Agents = g.Agents[:min(len(g.Agents), MaxAgents)]
	for i, a := range g.Agents {
		g.Agents[i] = Agent{Name: shorten(a.Name, maxName), PID: max(a.PID, 0), State: a.State, On: shorten(a.On, maxOn), Since: possible(a.Since)}
	}
	g.Window = shorten(g.Window, maxName)
	g.Screen = slices.Clone(g.Screen[:min(len(g.Screen), MaxScreen)])
	for i, line := range g.Screen {
		g.Screen[i] = shorten(line, MaxScreenWidth)
	}
	g.Questions = slices.Clone(g.Questions[:min(len(g.Questions), MaxQuestions)])
	for i, q := range g.Questions {
		g.Questions[i] = q.Sanitized()
	}
	g.Taken = slices.DeleteFunc(slices.Clone(g.Taken[:min(len(g.Taken), MaxTaken)]), func(id string) bool { return !ValidQuestionID(id) })
	if c := g.Changes; c != nil {
		g.Changes = &Changes{
			Branch: shorten(c.Branch, maxName), Commits: max(c.Commits, 0), Files: max(c.Files, 0),
			Insertions: max(c.Insertions, 0), Deletions: max(c.Deletions, 0),
		}
	}
	if m := g.Machine; m != nil {
		g.Machine = &Machine{
			Load: min(max(m.Load, 0), maxLoad), MemTotal: max(m.MemTotal, 0), DiskTotal: max(m.DiskTotal, 0),
			MemUsed: min(max(m.MemUsed, 0), max(m.MemTotal, 0)), DiskUsed: min(max(m.DiskUsed, 0), max(m.DiskTotal, 0)), Input: max(m.Input, 0),
		}
	}
	return g
}

// maxLoad is more than any machine has, in few enough digits to display.
const maxLoad = 9999

// possible returns t, or the zero time if t could not be encoded again.
func possible(t time.Time) time.Time {
	t = t.UTC().Round(0)
	if t.Year() < 1 || t.Year() > 9999 {
		return time.Time{}
	}
	return t
}

// shorten returns clean text of at most this many characters.
func shorten(s string, most int) string { return head(Clean(s), most) }

// head returns the beginning of clean text.
func head(s string, most int) string {
	for i := range s {
		if most == 0 {
			s = s[:i]
			break
		}
		most--
	}
	return strings.TrimRight(s, " \n")
}
