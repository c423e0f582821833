package wire

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
)

// These limit a glance, equally on both sides.
const (
	MaxGlance      = 64 << 10 // one line, bytes
	MaxAgents      = 16
	MaxScreen      = 60  // lines
	MaxScreenWidth = 200 // characters of a line
	maxName        = 80  // characters: of an agent, window or branch
	maxOn          = 200 // characters
)

// Encode writes one line. It omits what exceeds the limits; of the screen it omits
// the beginning.
func (g Glance) Encode(w io.Writer) error {
	g = g.within()
	g.Version = Version
	for {
		var line bytes.Buffer
		e := json.NewEncoder(&line)
		e.SetEscapeHTML(false) // a screen may be full of characters that escaping turns into six bytes
		if err := e.Encode(g); err != nil {
			return fmt.Errorf("send a snapshot: %w", err)
		}
		if line.Len() > MaxGlance && len(g.Screen) > 0 {
			g.Screen = g.Screen[(len(g.Screen)+1)/2:]
			continue
		}
		if _, err := w.Write(line.Bytes()); err != nil {
			return fmt.Errorf("send a snapshot: %w", err)
		}
		return nil
	}
}

// Glances reads what a guest's `agent-guest watch` writes until r ends. It stops
// after the first error.
func Glances(r io.Reader) iter.Seq2[Glance, error] {
	return func(yield func(Glance, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(make([]byte, 0, 4096), MaxGlance)
		for lines.Scan() {
			g, err := decodeGlance(lines.Bytes())
			if err != nil {
				yield(Glance{}, fmt.Errorf("snapshot: %w", err))
				return
			}
			if !yield(g, nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Glance{}, fmt.Errorf("snapshot: %w", err))
		}
	}
}

func decodeGlance(line []byte) (Glance, error) {
	g, err := decode[Glance](bytes.NewReader(line), MaxGlance)
	if err != nil {
		return Glance{}, err
	}
	if g.Version != Version {
		return Glance{}, fmt.Errorf("version %d, want %d", g.Version, Version)
	}
	for _, a := range g.Agents {
		if !a.State.known() {
			return Glance{}, fmt.Errorf("unknown agent state %q", short(string(a.State), maxName))
		}
	}
	return g.within(), nil
}

// within returns a glance that is safe to display: limited in size, with clean text
// and plausible numbers, the most urgent agents first.
func (g Glance) within() Glance {
	g.Agents = slices.Clone(g.Agents)
	slices.SortStableFunc(g.Agents, func(a, b Agent) int { return a.State.Urgency() - b.State.Urgency() })
	g.Agents = g.Agents[:min(len(g.Agents), MaxAgents)]
	for i, a := range g.Agents {
		g.Agents[i] = Agent{Name: short(a.Name, maxName), PID: max(a.PID, 0), State: a.State, On: short(a.On, maxOn), Since: possible(a.Since)}
	}
	g.Window = short(g.Window, maxName)
	g.Screen = slices.Clone(g.Screen[:min(len(g.Screen), MaxScreen)])
	for i, line := range g.Screen {
		g.Screen[i] = short(line, MaxScreenWidth)
	}
	if c := g.Changes; c != nil {
		g.Changes = &Changes{
			Branch: short(c.Branch, maxName), Commits: max(c.Commits, 0), Files: max(c.Files, 0),
			Insertions: max(c.Insertions, 0), Deletions: max(c.Deletions, 0),
		}
	}
	if m := g.Machine; m != nil {
		g.Machine = &Machine{
			Load: min(max(m.Load, 0), maxLoad), MemTotal: max(m.MemTotal, 0), DiskTotal: max(m.DiskTotal, 0),
			MemUsed: min(max(m.MemUsed, 0), max(m.MemTotal, 0)), DiskUsed: min(max(m.DiskUsed, 0), max(m.DiskTotal, 0)),
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

// short returns clean text of at most this many characters.
func short(s string, most int) string {
	s = Clean(s)
	for i := range s {
		if most == 0 {
			s = s[:i]
			break
		}
		most--
	}
	return strings.TrimRight(s, " ")
}
