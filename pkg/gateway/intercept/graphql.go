package intercept

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/vektah/gqlparser/v2/ast"
	"github.com/vektah/gqlparser/v2/formatter"
	"github.com/vektah/gqlparser/v2/parser"
)

// Bounds of a GraphQL request.
const (
	maxGraphQLTokens  = 20_000
	maxGraphQLNesting = 50 // of fragments
	maxMutations      = 100
)

// Mutation is a field of a GraphQL mutation with its argument "input".
type Mutation struct {
	Field string
	Input map[string]any
}

// graphQLRequest is the body of a request ("GraphQL over HTTP", 6.3).
type graphQLRequest struct {
	Query         string         `json:"query"`
	OperationName string         `json:"operationName,omitempty"`
	Variables     map[string]any `json:"variables,omitempty"`
}

// ParseGraphQL reads the body of a GraphQL request. It returns the body to send instead, which
// can be read in one way only, and the mutations in it, those of every operation.
func ParseGraphQL(body []byte) (canonical []byte, mutations []Mutation, err error) {
	var r graphQLRequest
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	if err := d.Decode(&r); err != nil {
		return nil, nil, errors.New("the body must be one GraphQL request as JSON")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, nil, errors.New("the body must be one GraphQL request, got more")
	}
	if r.Query == "" {
		return nil, nil, errors.New("the request has no query")
	}
	doc, err := parser.ParseQueryWithTokenLimit(&ast.Source{Input: r.Query}, maxGraphQLTokens)
	if err != nil || len(doc.Operations) == 0 {
		return nil, nil, errors.New("the query is not GraphQL, or too long")
	}
	m := mutationReader{doc: doc, variables: r.Variables}
	for _, op := range doc.Operations {
		switch op.Operation {
		case ast.Query:
		case ast.Mutation:
			m.defaults = op.VariableDefinitions
			if err := m.read(op.SelectionSet, 0); err != nil {
				return nil, nil, err
			}
		default:
			return nil, nil, fmt.Errorf("a GraphQL %s is not supported", op.Operation)
		}
	}
	// The server gets what was checked, written again, whatever its own parser does with the text.
	var text strings.Builder
	formatter.NewFormatter(&text, formatter.WithCompacted()).FormatQueryDocument(doc)
	r.Query = text.String()
	canonical, err = json.Marshal(r)
	return canonical, m.found, err
}

type mutationReader struct {
	doc       *ast.QueryDocument
	variables map[string]any
	defaults  ast.VariableDefinitionList
	found     []Mutation
}

// read collects the fields of a selection at the root of a mutation.
func (m *mutationReader) read(set ast.SelectionSet, depth int) error {
	if depth > maxGraphQLNesting {
		return errors.New("the query has too many fragments in one another")
	}
	for _, s := range set {
		switch s := s.(type) {
		case *ast.InlineFragment:
			if err := m.read(s.SelectionSet, depth+1); err != nil {
				return err
			}
		case *ast.FragmentSpread:
			f := m.doc.Fragments.ForName(s.Name)
			if f == nil {
				return fmt.Errorf("the fragment %.40q does not exist", s.Name)
			}
			if err := m.read(f.SelectionSet, depth+1); err != nil {
				return err
			}
		case *ast.Field:
			if len(m.found) >= maxMutations {
				return fmt.Errorf("the request has over %d mutations", maxMutations)
			}
			one := Mutation{Field: s.Name, Input: map[string]any{}}
			if a := s.Arguments.ForName("input"); a != nil {
				v, err := m.value(a.Value, 0)
				if err != nil {
					return err
				}
				one.Input, _ = v.(map[string]any)
			}
			m.found = append(m.found, one)
		}
	}
	return nil
}

// value returns a value with its variables filled in.
func (m *mutationReader) value(v *ast.Value, depth int) (any, error) {
	if depth > maxGraphQLNesting {
		return nil, errors.New("the query has values in too many others")
	}
	switch v.Kind {
	case ast.Variable:
		if given, ok := m.variables[v.Raw]; ok {
			return given, nil
		}
		if def := m.defaults.ForName(v.Raw); def != nil && def.DefaultValue != nil {
			return m.value(def.DefaultValue, depth+1)
		}
		return nil, nil
	case ast.ObjectValue:
		all := map[string]any{}
		for _, child := range v.Children {
			one, err := m.value(child.Value, depth+1)
			if err != nil {
				return nil, err
			}
			if _, twice := all[child.Name]; twice {
				return nil, fmt.Errorf("the input has the field %.40q twice", child.Name)
			}
			all[child.Name] = one
		}
		return all, nil
	case ast.ListValue:
		all := make([]any, len(v.Children))
		for i, child := range v.Children {
			var err error
			if all[i], err = m.value(child.Value, depth+1); err != nil {
				return nil, err
			}
		}
		return all, nil
	case ast.NullValue:
		return nil, nil
	}
	return v.Raw, nil
}
