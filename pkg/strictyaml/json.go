package strictyaml

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// readJSON parses the text into nodes if it is JSON. A YAML parser would not understand
// all of JSON, such as surrogate pairs of escapes.
func readJSON(data []byte, p *Problems) (*Node, bool) {
	if !json.Valid(data) {
		return nil, false
	}
	r := jsonReader{decoder: json.NewDecoder(bytes.NewReader(data)), at: cursor{data: data}, problems: p}
	r.decoder.UseNumber()
	n := r.read(0)
	if r.failed {
		n = nil
	}
	return n, true
}

// jsonReader turns the tokens of valid JSON into nodes.
type jsonReader struct {
	decoder  *json.Decoder
	at       cursor
	problems *Problems
	nodes    int
	failed   bool
}

// read reads the next value. After a failure it stops reading.
func (r *jsonReader) read(depth int) *Node {
	data, offset := r.at.data, int(r.decoder.InputOffset())
	for offset < len(data) && strings.IndexByte(" \t\r\n,:", data[offset]) >= 0 {
		offset++
	}
	n := r.at.node(offset)
	token, err := r.decoder.Token()
	if r.nodes++; err != nil || r.nodes > maxNodes || depth > maxDepth {
		r.failed = true
		r.problems.Add(n, "", "%s", r.problems.tooMuch(depth))
		return n
	}
	switch token := token.(type) {
	case json.Delim:
		n.Kind = List
		if token == '{' {
			n.Kind = Object
		}
		for !r.failed && r.decoder.More() {
			if n.Kind == Object {
				n.Keys = append(n.Keys, r.read(depth+1))
			}
			if !r.failed {
				n.Items = append(n.Items, r.read(depth+1))
			}
		}
		if !r.failed {
			_, err = r.decoder.Token() // the closing token
			r.failed = err != nil
		}
	case string:
		n.Kind, n.Text = Text, token
	case json.Number:
		n.Kind, n.Text = numberKind(token.String()), token.String()
	case bool:
		n.Kind = Boolean
	}
	return n
}

// tooMuch returns why reading ended.
func (p *Problems) tooMuch(depth int) string {
	if depth > maxDepth {
		return "lists and objects are nested more than 20 levels deep; a few are enough"
	}
	return "the " + p.What + " has more than 10,000 values; a few dozen are enough"
}

var wholeRE = lazyregexp.New(`^-?(0|[1-9][0-9]*)$`)

// numberKind returns the kind of a number from its spelling.
func numberKind(s string) Kind {
	if wholeRE.MatchString(s) {
		return Integer
	}
	return Fraction
}
