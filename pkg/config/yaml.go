package config

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// maxFile bounds the size of a settings file. A larger file is a mistake.
const maxFile = 1 << 20

// decode parses strict YAML. Errors have the code fail.Usage and start with file:line.
func decode(file string, text []byte, into any) error {
	if len(text) > maxFile {
		return fail.New(fail.Usage, "%s: file is larger than %v", file, Size(maxFile))
	}
	err := decodeNode(bytes.TrimPrefix(text, []byte("\ufeff")), into) // the byte order mark that some editors write
	if err == nil {
		return nil
	}
	at, what := file, err.Error()
	if ye, ok := errors.AsType[yaml.Error](err); ok {
		what = ye.GetMessage()
		if tok := ye.GetToken(); tok != nil && tok.Position != nil {
			at = fmt.Sprintf("%s:%d", file, tok.Position.Line)
		}
	}
	if pe, ok := errors.AsType[*positionError](err); ok {
		at, what = fmt.Sprintf("%s:%d", file, pe.line), pe.what
	}
	return fail.New(fail.Usage, "%s: %s", at, what)
}

func decodeNode(text []byte, into any) (err error) {
	// The library has panicked on input that only a fuzzer or an attacker writes.
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("parse YAML: %v", r)
		}
	}()
	f, err := parser.ParseBytes(text, 0)
	if err != nil {
		return err
	}
	var body ast.Node // stays nil for an empty file, which is valid
	for _, doc := range f.Docs {
		switch {
		case doc.Body == nil || doc.Body.Type() == ast.CommentType || doc.Body.Type() == ast.CommentGroupType:
		case body != nil:
			// The decoder would silently ignore all documents but the first.
			return at(doc.Body, "second YAML document; a file must contain only one")
		default:
			body = doc.Body
		}
	}
	if body == nil {
		return nil
	}
	check := checker{}
	_, check.hostile = into.(*Project)
	ast.Walk(&check, body)
	if check.err != nil {
		return check.err
	}
	err = yaml.NewDecoder(bytes.NewReader(nil), yaml.DisallowUnknownField()).DecodeFromNode(body, into)
	return rewordYAMLError(err, body)
}

// rewordYAMLError rewrites the error of a value of the wrong type. It names the key and the
// expected type in terms of the file, where the library refers to Go types.
func rewordYAMLError(err error, body ast.Node) error {
	var wanted string
	var tok *token.Token
	if e, ok := errors.AsType[*yaml.TypeError](err); ok {
		wanted, tok = expectedKind(e.DstType), e.Token
	} else if e, ok := errors.AsType[*yaml.OverflowError](err); ok {
		wanted, tok = "a smaller number", e.Token
	} else if e, ok := errors.AsType[*yaml.UnexpectedNodeTypeError](err); ok {
		wanted, tok = map[ast.NodeType]string{ast.MappingType: "a mapping (key: value)", ast.SequenceType: "a list"}[e.Expected], e.Token
	}
	f := finder{token: tok}
	if wanted != "" {
		ast.Walk(&f, body)
	}
	if f.found == nil {
		return err
	}
	key, ok := strings.CutPrefix(f.found.GetPath(), "$.")
	if !ok {
		key = "the file"
	}
	return at(f.found, "%s must be %s", key, wanted)
}

// expectedKind describes what a file may contain for a value of type t.
func expectedKind(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[time.Duration]():
		return "a duration like 360h"
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.String:
		return "a string"
	case t.Kind() >= reflect.Int && t.Kind() <= reflect.Float64:
		return "a number"
	case t.Kind() == reflect.Slice:
		return "a list"
	case t.Kind() == reflect.Map, t.Kind() == reflect.Struct:
		return "a mapping (key: value)"
	}
	return ""
}

// finder finds the outermost node with a given token.
type finder struct {
	token *token.Token
	found ast.Node
}

// Visit implements ast.Visitor.
func (v *finder) Visit(n ast.Node) ast.Visitor {
	if v.found == nil && n.GetToken() == v.token {
		v.found = n
	}
	if v.found != nil {
		return nil
	}
	return v
}

// checker rejects YAML that the decoder reads in ways the author did not intend.
type checker struct {
	hostile bool // the author of the file is not the user
	err     error
}

// Visit implements ast.Visitor.
func (v *checker) Visit(n ast.Node) ast.Visitor {
	if v.err != nil {
		return nil
	}
	switch n := n.(type) {
	case *ast.SequenceNode:
		// For null items, the decoder makes zero values without calling UnmarshalYAML.
		for _, item := range n.Values {
			if item.Type() == ast.NullType {
				v.err = at(item, "list item is empty")
			}
		}
	case *ast.TagNode:
		v.err = at(n, "tags such as %s are not allowed", n.Start.Value)
	case *ast.AliasNode:
		if v.hostile { // a cycle of aliases is endless
			v.err = at(n, "aliases are not allowed")
		}
	}
	return v
}

type positionError struct {
	line int
	what string
}

func (e *positionError) Error() string { return fmt.Sprintf("line %d: %s", e.line, e.what) }

func at(n ast.Node, format string, args ...any) error {
	line := 0
	if tok := n.GetToken(); tok != nil && tok.Position != nil {
		line = tok.Position.Line
	}
	return &positionError{line, fmt.Sprintf(format, args...)}
}

// Size is a number of bytes, written as "512MiB" or "8GiB". 8G and 8GB also mean 8GiB.
type Size int64

// maxSize is 1 PiB, which no host has and which is far from overflowing sums.
const maxSize = 1 << 50

// ParseSize parses a size.
func ParseSize(s string) (Size, error) {
	n, err := units.RAMInBytes(s)
	if err != nil || n <= 0 || n > maxSize {
		return 0, fmt.Errorf("must be a size like 8GiB, got %q", s)
	}
	return Size(n), nil
}

// String formats the size for people, with four significant digits.
func (s Size) String() string {
	return units.CustomSize("%.4g%s", float64(s), 1024, []string{"B", "KiB", "MiB", "GiB", "TiB"})
}

// MarshalYAML formats the size for people if that is exact, and otherwise in the largest
// unit that divides it.
func (s Size) MarshalYAML() ([]byte, error) {
	text := s.String()
	if v, err := ParseSize(text); err == nil && v == s {
		return []byte(text), nil
	}
	n, unit := int64(s), 0
	for n != 0 && n%1024 == 0 && unit < 4 {
		n, unit = n/1024, unit+1
	}
	return fmt.Appendf(nil, "%d%s", n, []string{"B", "KiB", "MiB", "GiB", "TiB"}[unit]), nil
}

// UnmarshalYAML parses a size; its errors contain the line.
func (s *Size) UnmarshalYAML(n ast.Node) error {
	text, ok := scalar(n)
	if !ok {
		return at(n, "must be a size like 8GiB")
	}
	v, err := ParseSize(text)
	if err != nil {
		return at(n, "%v", err)
	}
	*s = v
	return nil
}

func scalar(n ast.Node) (string, bool) {
	if _, ok := n.(ast.ScalarNode); !ok || n.Type() == ast.NullType {
		return "", false
	}
	return n.GetToken().Value, true
}

// Set implements pflag.Value, so that flags and files accept the same sizes.
func (s *Size) Set(text string) error {
	v, err := ParseSize(text)
	if err == nil {
		*s = v
	}
	return err
}

// Type implements pflag.Value.
func (*Size) Type() string { return "size" }
