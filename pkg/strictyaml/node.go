package strictyaml

import (
	"bytes"
	"unicode/utf8"
)

// Bounds of a text, far above what people write.
const (
	maxDepth = 20
	maxNodes = 10_000
)

// Kind is the type of a node.
type Kind int

// The kinds.
const (
	Null Kind = iota
	Boolean
	Integer
	Fraction
	Text
	List
	Object
)

func (k Kind) String() string {
	return [...]string{"nothing", "a boolean", "a number", "a fraction", "a string", "a list", "an object"}[k]
}

// Node is a value with its position, whether it was written as YAML or as JSON.
type Node struct {
	Line, Col int // from 1; Col in characters
	Kind      Kind
	Text      string  // of a scalar: as it was written, without quotes
	Items     []*Node // of a list, or the values of an object
	Keys      []*Node // of an object, one for each of Items
}

// Scalar returns the text of a scalar, and whether n is one.
func (n *Node) Scalar() (string, bool) {
	return n.Text, n.Kind != Null && n.Kind != List && n.Kind != Object
}

// Get returns the value of an object's key, and the node of the key. It returns nil if
// there is none.
func (n *Node) Get(key string) (value, at *Node) {
	for i, k := range n.Keys {
		if k.Text == key {
			return n.Items[i], k
		}
	}
	return nil, nil
}

// start returns a node at the beginning of a text.
func start() *Node { return &Node{Line: 1, Col: 1} }

// Read parses the text into nodes. It adds what is wrong to p, and then returns nil. The
// node of an empty text has the kind Null.
func Read(data []byte, p *Problems) *Node {
	data = bytes.TrimPrefix(data, []byte("\ufeff")) // the byte order mark of some editors
	if !readable(data, p) {
		return nil
	}
	n, ok := readJSON(data, p)
	if !ok {
		n = readYAML(data, p)
	}
	return n
}

// readable refuses bytes that no manifest needs and that a terminal or an editor would
// not show, so that people see exactly what is read.
func readable(data []byte, p *Problems) bool {
	at := cursor{data: data}
	for i := 0; i < len(data); {
		r, size := utf8.DecodeRune(data[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			p.Add(at.node(i), "", "the %s is not UTF-8; save the file as UTF-8", p.What)
			return false
		case r == '\ufeff' || isControl(r) && r != '\n' && r != '\t' && r != '\r':
			p.Add(at.node(i), "", "the %s contains an invisible character, U+%04X; remove it", p.What, r)
			return false
		}
		i += size
	}
	return true
}

func isControl(r rune) bool { return r < ' ' || r >= 0x7f && r < 0xa0 }

// cursor computes line and column for increasing offsets.
type cursor struct {
	data      []byte
	offset    int
	line, col int // of offset, from 0
}

// node returns an empty node positioned at the offset.
func (c *cursor) node(offset int) *Node {
	passed := c.data[c.offset:offset]
	if i := bytes.LastIndexByte(passed, '\n'); i >= 0 {
		c.line += bytes.Count(passed, []byte{'\n'})
		c.col, passed = 0, passed[i+1:]
	}
	c.col += utf8.RuneCount(passed)
	c.offset = offset
	return &Node{Line: c.line + 1, Col: c.col + 1}
}
