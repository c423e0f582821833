package manifest

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v4"
)

// readYAML parses the text into nodes. It returns nil if the text is not YAML or has
// features that manifests do not allow: anchors, aliases and merge keys, which expand a
// small text into a large value; tags; a second document.
func readYAML(data []byte, p *problems) (n *node) {
	// There is no known input that makes the parser panic, but the author of a manifest
	// may know one.
	defer func() {
		if r := recover(); r != nil {
			p.add(&node{line: 1, col: 1}, "", "the YAML parser failed on this manifest; write it differently, for example as JSON")
			n = nil
		}
	}()
	if marks(data) > maxMarks {
		p.add(&node{line: 1, col: 1}, "", "%s", tooMuch(0))
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
		p.add(&node{line: 1, col: 1}, "", "the manifest is empty")
		return nil
	case err != nil:
		syntax(err, p)
		return nil
	}
	r := yamlReader{problems: p}
	n = r.read(first.Content[0], 0)
	switch err := documents.Load(&second); {
	case err == nil:
		r.refuse(&second, "a manifest must not contain a second document; remove it and its ---")
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
func syntax(err error, p *problems) {
	at, why := &node{line: 1, col: 1}, "this is not YAML"
	if e, ok := errors.AsType[*yaml.LoadError](err); ok {
		if e.Mark.Line > 0 {
			at.line, at.col = e.Mark.Line, max(1, e.Mark.Column)
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
	p.add(at, "", "%s", why)
}

// Errors about features that manifests do not allow.
const (
	noAnchor = "anchors such as &name are not allowed; write the value out, or put a string that begins with & in quotes"
	noAlias  = "aliases such as *name are not allowed; write the value out, or put a string that begins with * in quotes"
	noTag    = "tags such as !name are not allowed; put a string that begins with ! in quotes"
)

// yamlReader converts YAML's nodes into nodes.
type yamlReader struct {
	problems *problems
	nodes    int
	failed   bool
}

func (r *yamlReader) refuse(y *yaml.Node, why string) {
	r.failed = true
	r.problems.add(&node{line: y.Line, col: y.Column}, "", "%s", why)
}

func (r *yamlReader) read(y *yaml.Node, depth int) *node {
	n := &node{line: y.Line, col: y.Column}
	r.nodes++
	switch {
	case r.nodes == maxNodes+1 || depth > maxDepth:
		r.refuse(y, tooMuch(depth))
		return n
	case r.nodes > maxNodes:
		return n
	case y.Anchor != "":
		r.refuse(y, noAnchor)
	case y.Style&yaml.TaggedStyle != 0:
		r.refuse(y, noTag)
	}
	switch y.Kind {
	case yaml.AliasNode:
		r.refuse(y, noAlias)
	case yaml.SequenceNode:
		n.kind = list
		for _, item := range y.Content {
			n.items = append(n.items, r.read(item, depth+1))
		}
	case yaml.MappingNode:
		n.kind = object
		for i := 0; i+1 < len(y.Content); i += 2 {
			key := r.read(y.Content[i], depth+1)
			switch k := y.Content[i]; {
			case k.Kind != yaml.ScalarNode || key.kind == null:
				r.refuse(k, "this key must be a string; put it in quotes")
			case k.ShortTag() == "!!merge":
				r.refuse(k, "merge keys (<<) are not allowed; write the values out")
			}
			n.keys = append(n.keys, key)
			n.items = append(n.items, r.read(y.Content[i+1], depth+1))
		}
	case yaml.ScalarNode:
		n.text = y.Value
		switch y.ShortTag() {
		case "!!null":
			n.kind = null
		case "!!bool":
			n.kind = boolean
		case "!!int", "!!float":
			n.kind = numberKind(y.Value)
		default: // also what looks like a date
			n.kind = text
		}
	}
	return n
}
