package strictyaml

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v4"
)

// readYAML parses the text into nodes. It returns nil if the text is not YAML or has
// features that are not allowed: tags; a second document; and, unless p allows them, anchors,
// aliases and merge keys, which expand a small text into a large value.
func readYAML(data []byte, p *Problems) (n *Node) {
	// There is no known input that makes the parser panic, but the author of a text may know
	// one.
	defer func() {
		if r := recover(); r != nil {
			p.Add(start(), "", "the YAML parser failed on this %s; write it differently, for example as JSON", p.What)
			n = nil
		}
	}()
	if marks(data) > maxMarks {
		p.Add(start(), "", "%s", p.tooMuch(0))
		return nil
	}
	documents, err := yaml.NewLoader(bytes.NewReader(data))
	if err != nil {
		syntax(err, p)
		return nil
	}
	var first, second yaml.Node
	switch err := documents.Load(&first); {
	case errors.Is(err, io.EOF) || err == nil && len(first.Content) == 0:
		return start()
	case err != nil:
		syntax(err, p)
		return nil
	}
	r := yamlReader{problems: p}
	n = r.read(first.Content[0], 0)
	switch err := documents.Load(&second); {
	case err == nil:
		r.refuse(&second, "a "+p.What+" must not contain a second document; remove it and its ---")
	case !errors.Is(err, io.EOF):
		syntax(err, p)
		return nil
	}
	if r.failed {
		return nil
	}
	return n
}

// maxMarks bounds how many nodes the parser can create before readYAML counts them. It
// is larger than the number of characters of the longest prompt.
const maxMarks = 200_000

// marks counts the characters of which each node needs one.
func marks(data []byte) int {
	n := 0
	for _, c := range data {
		switch c {
		case '\n', ',', ':', '-', '?', '[', '{':
			n++
		}
	}
	return n
}

// syntax reports the parser's error, but nothing that repeats the text, which could be
// a credential or anything else.
func syntax(err error, p *Problems) {
	at, why := start(), "this is not YAML"
	if e, ok := errors.AsType[*yaml.LoadError](err); ok {
		if e.Mark.Line > 0 {
			at.Line, at.Col = e.Mark.Line, max(1, e.Mark.Column)
		}
		switch e.Stage {
		case yaml.ReaderStage, yaml.ScannerStage, yaml.ParserStage:
			why += ": " + e.Message
			if e.ContextMark.Line > 0 {
				why += fmt.Sprintf(", %s that begins on line %d", e.ContextMsg, e.ContextMark.Line)
			}
		case yaml.ComposerStage: // an alias without its anchor: usually a text that begins with *
			why = noAlias
		case yaml.ResolverStage:
			why = noTag
		}
	}
	p.Add(at, "", "%s", why)
}

// Errors about features that are not allowed.
const (
	noAnchor = "anchors such as &name are not allowed; write the value out, or put a string that begins with & in quotes"
	noAlias  = "aliases such as *name are not allowed; write the value out, or put a string that begins with * in quotes"
	noTag    = "tags such as !name are not allowed; put a string that begins with ! in quotes"
)

// yamlReader converts YAML's nodes into nodes.
type yamlReader struct {
	problems *Problems
	nodes    int
	failed   bool
}

func (r *yamlReader) refuse(y *yaml.Node, why string) {
	r.failed = true
	r.problems.Add(&Node{Line: y.Line, Col: y.Column}, "", "%s", why)
}

func (r *yamlReader) read(y *yaml.Node, depth int) *Node {
	n := &Node{Line: y.Line, Col: y.Column}
	r.nodes++
	switch {
	case r.nodes == maxNodes+1 || depth > maxDepth:
		r.refuse(y, r.problems.tooMuch(depth))
		return n
	case r.nodes > maxNodes:
		return n
	case y.Anchor != "" && !r.problems.Aliases:
		r.refuse(y, noAnchor)
	case y.Style&yaml.TaggedStyle != 0:
		r.refuse(y, noTag)
	}
	switch y.Kind {
	case yaml.AliasNode:
		if r.problems.Aliases {
			return r.read(y.Alias, depth+1)
		}
		r.refuse(y, noAlias)
	case yaml.SequenceNode:
		n.Kind = List
		for _, item := range y.Content {
			n.Items = append(n.Items, r.read(item, depth+1))
		}
	case yaml.MappingNode:
		n.Kind = Object
		var merged []*Node
		for i := 0; i+1 < len(y.Content); i += 2 {
			key, value := r.read(y.Content[i], depth+1), r.read(y.Content[i+1], depth+1)
			switch k := y.Content[i]; {
			case k.Kind != yaml.ScalarNode || key.Kind == Null:
				r.refuse(k, "this key must be a string; put it in quotes")
			case k.ShortTag() == "!!merge" && r.problems.Aliases:
				merged = append(merged, value)
				continue
			case k.ShortTag() == "!!merge":
				r.refuse(k, "merge keys (<<) are not allowed; write the values out")
			}
			n.Keys, n.Items = append(n.Keys, key), append(n.Items, value)
		}
		r.merge(n, merged)
	case yaml.ScalarNode:
		n.Text = y.Value
		switch y.ShortTag() {
		case "!!null":
			n.Kind = Null
		case "!!bool":
			n.Kind = Boolean
		case "!!int", "!!float":
			n.Kind = numberKind(y.Value)
		default: // also what looks like a date
			n.Kind = Text
		}
	}
	return n
}

// merge adds the keys of other objects that n does not have itself.
func (r *yamlReader) merge(n *Node, others []*Node) {
	for _, other := range others {
		switch other.Kind {
		case List:
			r.merge(n, other.Items)
		case Object:
			for i, key := range other.Keys {
				if value, _ := n.Get(key.Text); value == nil {
					n.Keys, n.Items = append(n.Keys, key), append(n.Items, other.Items[i])
				}
			}
		default:
			r.failed = true
			r.problems.Add(other, "", "a merge key (<<) must name an object")
		}
	}
}
