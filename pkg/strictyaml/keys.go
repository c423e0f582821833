package strictyaml

import (
	"iter"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Entries returns the keys and values of an object, and reports keys that it has twice.
func (p *Problems) Entries(n *Node, path string) iter.Seq2[*Node, *Node] {
	return func(yield func(key, value *Node) bool) {
		first := map[string]*Node{}
		for i, key := range n.Keys {
			if earlier := first[key.Text]; earlier != nil {
				name := " " + Quote(key.Text)
				if p.Quiet {
					name = ""
				}
				p.Bad(key, path, "has the key%s twice; the first is on line %d", name, earlier.Line)
				continue
			}
			first[key.Text] = key
			if !yield(key, n.Items[i]) {
				return
			}
		}
	}
}

// UnknownKey reports a key that is none of the known ones, with the one that was probably
// meant.
func (p *Problems) UnknownKey(key *Node, path string, known []string) {
	switch {
	case p.Full():
		p.more++
	case p.Quiet:
		p.Bad(key, path, "has an unknown key; known keys are %s", strings.Join(known, ", "))
	default:
		fix := "known keys are " + strings.Join(known, ", ")
		if i := slices.IndexFunc(known, func(name string) bool { return near(name, key.Text) }); i >= 0 {
			fix = "did you mean " + known[i] + "?"
		}
		p.Bad(key, path, "has an unknown key %s; %s", Quote(key.Text), fix)
	}
}

// WrongKind reports a node of the wrong kind.
func (p *Problems) WrongKind(n *Node, path string, want Kind) {
	switch {
	case n.Kind == Null:
		p.Bad(n, path, "is empty; add a value or remove the line")
	case want == Text && n.Kind != List && n.Kind != Object:
		p.Bad(n, path, "must be a string, got %v; put it in quotes", n.Kind)
	case want == List && n.Kind == Text:
		p.Bad(n, path, "must be a list, got a string; write it as [one, another]")
	default:
		p.Bad(n, path, "must be %v, got %v", want, n.Kind)
	}
}

// Quote quotes s for an error, shortened and on one line.
func Quote(s string) string {
	const most = 40
	if utf8.RuneCountInString(s) > most {
		s = string([]rune(s)[:most]) + "…"
	}
	return strconv.Quote(s)
}

// Join returns the path of a key of the object at path.
func Join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// Alternatives lists words for an error: "a", "a or b", "a, b or c".
func Alternatives(words []string) string {
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// near reports whether b differs from a by at most two letters that are wrong, missing
// or added.
func near(a, b string) bool {
	if len(b) > len(a)+2 || len(a) > len(b)+2 || len(a) < 3 {
		return false
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			swap := before
			if a[i] != b[j] {
				swap++
			}
			before, row[j+1] = row[j+1], min(swap, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)] <= 2
}
