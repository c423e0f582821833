package manifest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
)

// schema is the subset of JSON Schema that a manifest needs.
type schema struct {
	Draft       string     `json:"$schema,omitempty"`
	ID          string     `json:"$id,omitempty"`
	Title       string     `json:"title,omitempty"`
	Description string     `json:"description,omitempty"`
	Type        string     `json:"type,omitempty"`
	Const       any        `json:"const,omitempty"`
	Enum        []string   `json:"enum,omitempty"`
	Default     any        `json:"default,omitempty"`
	Pattern     string     `json:"pattern,omitempty"`
	MaxLength   int        `json:"maxLength,omitempty"`
	Minimum     *int64     `json:"minimum,omitempty"`
	Maximum     *int64     `json:"maximum,omitempty"`
	Items       *schema    `json:"items,omitempty"`
	MinItems    int64      `json:"minItems,omitempty"`
	MaxItems    int64      `json:"maxItems,omitempty"`
	Properties  properties `json:"properties,omitempty"`
	Names       *schema    `json:"propertyNames,omitempty"`
	MaxEntries  int64      `json:"maxProperties,omitempty"`
	Additional  any        `json:"additionalProperties,omitempty"`
	Required    []string   `json:"required,omitempty"`
	Not         *schema    `json:"not,omitempty"`
	AnyOf       []*schema  `json:"anyOf,omitempty"`
	OneOf       []*schema  `json:"oneOf,omitempty"`
	AllOf       []*schema  `json:"allOf,omitempty"`
	If          *schema    `json:"if,omitempty"`
	Then        *schema    `json:"then,omitempty"`
	Else        *schema    `json:"else,omitempty"`
}

// properties keeps the order of the fields, which is the order in which people write
// them.
type properties []property

type property struct {
	name string
	*schema
}

// MarshalJSON writes the properties as an object.
func (p properties) MarshalJSON() ([]byte, error) {
	out := []byte{'{'}
	for i, f := range p {
		if i > 0 {
			out = append(out, ',')
		}
		value, err := json.Marshal(f.schema)
		if err != nil {
			return nil, err
		}
		out = append(strconv.AppendQuote(out, f.name), ':')
		out = append(out, value...)
	}
	return append(out, '}'), nil
}

// Schema returns the JSON Schema (2020-12) of a manifest, for editors. Everything that
// it refuses, Parse refuses as well. Only Parse checks the bounds of sizes and
// durations, git's rules for names, and how the parts of a manifest fit together.
func Schema() []byte {
	s := schemaOf(reflect.TypeFor[document]())
	s.Draft, s.ID = "https://json-schema.org/draft/2020-12/schema", "urn:agent-sessionizer:task:1"
	s.Title, s.Description = "Task", "A task of agent-sessionizer: an unattended run of a coding agent in a VM."
	s.OneOf = []*schema{{Required: []string{"agent"}}, {Required: []string{"claude"}}}
	i := slices.IndexFunc(s.Properties, func(p property) bool { return p.name == "agent" })
	s.Properties[i].AllOf = []*schema{
		whenKind(Claude, []string{"prompt"}, "command"),
		whenKind(Codex, []string{"prompt"}, "command", "max_turns", "allowed_tools"),
		whenKind(Command, []string{"command"}, "model", "max_turns", "allowed_tools", "permissions"),
	}
	s.If = &schema{Properties: properties{{"vm", &schema{Required: []string{"session"}}}}, Required: []string{"vm"}}
	s.Then, s.Else = forbiddenWithSession(reflect.TypeFor[Task]()), requiredWithoutSession(reflect.TypeFor[Task]())
	out, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		panic(err) // a type of this package cannot be marshalled; every test would fail
	}
	return append(out, '\n')
}

// whenKind returns the keys that an agent of a kind needs, and those that it must not
// have.
func whenKind(k Kind, needs []string, not ...string) *schema {
	then := &schema{Required: needs, Not: &schema{}}
	for _, key := range not {
		then.Not.AnyOf = append(then.Not.AnyOf, &schema{Required: []string{key}})
	}
	is := &schema{Properties: properties{{"kind", &schema{Const: string(k)}}}, Required: []string{"kind"}}
	return &schema{If: is, Then: then}
}

// forbiddenWithSession returns what a manifest that names a session must not contain, or nil for
// nothing.
func forbiddenWithSession(t reflect.Type) *schema {
	s := &schema{}
	for _, f := range fieldsOf(t) {
		switch sub := t.FieldByIndex(f.index).Type; {
		case f.own == "*":
			if s.Not == nil {
				s.Not = &schema{}
			}
			s.Not.AnyOf = append(s.Not.AnyOf, &schema{Required: []string{f.name}})
		case f.own != "":
			s.Properties = append(s.Properties, property{f.name, &schema{Not: &schema{Const: f.own}}})
		case sub.Kind() == reflect.Struct:
			if in := forbiddenWithSession(sub); in != nil {
				s.Properties = append(s.Properties, property{f.name, in})
			}
		}
	}
	if s.Not == nil && s.Properties == nil {
		return nil
	}
	return s
}

// requiredWithoutSession returns what a manifest that names no session must contain, or nil for nothing.
func requiredWithoutSession(t reflect.Type) *schema {
	s := &schema{}
	for _, f := range fieldsOf(t) {
		if f.required == "own" {
			s.Required = append(s.Required, f.name)
		}
		if sub := t.FieldByIndex(f.index).Type; sub.Kind() == reflect.Struct {
			if in := requiredWithoutSession(sub); in != nil {
				s.Properties = append(s.Properties, property{f.name, in})
			}
		}
	}
	if s.Required == nil && s.Properties == nil {
		return nil
	}
	return s
}

// schemaOf returns the schema of a struct.
func schemaOf(t reflect.Type) *schema {
	s := &schema{Type: "object", Additional: false}
	for _, f := range fieldsOf(t) {
		of := f.schema(t.FieldByIndex(f.index).Type)
		of.Description = f.doc
		if of.Pattern == measure.SizePattern || of.Pattern == measure.DurationPattern {
			of.Description += fmt.Sprintf(" From %s to %s.", f.min, f.max) // a schema cannot check these
		}
		s.Properties = append(s.Properties, property{f.name, of})
		if f.required == "true" {
			s.Required = append(s.Required, f.name)
		}
	}
	return s
}

// schema returns the schema of one field.
func (f field) schema(t reflect.Type) *schema {
	switch {
	case t.Kind() == reflect.Pointer:
		return schemaOf(t.Elem())
	case t.Kind() == reflect.Struct:
		return schemaOf(t)
	case t == sizeType:
		return &schema{Type: "string", Pattern: measure.SizePattern, Default: orNone(f.byDef)}
	case t == durationType:
		return &schema{Type: "string", Pattern: measure.DurationPattern, Default: orNone(f.byDef)}
	case t.Kind() == reflect.Int:
		s := numberSchema(f.min, f.max)
		if f.byDef != "" {
			s.Default = number(f.byDef)
		}
		return s
	case t.Kind() == reflect.Bool:
		return &schema{Type: "boolean"}
	case t.Kind() == reflect.Slice:
		s := &schema{Type: "array", MinItems: number("0" + f.min), MaxItems: number(f.max)}
		switch t.Elem().Kind() {
		case reflect.Struct:
			s.Items = schemaOf(t.Elem())
		case reflect.Int:
			s.Items, s.Default = numberSchema(exitCodes.min, exitCodes.max), []int64{number(f.byDef)}
		default:
			s.Items = f.like.schema()
		}
		return s
	case t.Kind() == reflect.Map:
		return &schema{Type: "object", MaxEntries: number(f.max), Names: f.keys.schema(), Additional: f.like.schema()}
	case f.enum != nil:
		return &schema{Type: "string", Enum: f.enum, Default: orNone(f.byDef)}
	}
	return f.like.schema()
}

func numberSchema(least, most string) *schema {
	low, high := number(least), number(most)
	return &schema{Type: "integer", Minimum: &low, Maximum: &high}
}

func (r *rule) schema() *schema {
	return &schema{Type: "string", Pattern: r.pattern, MaxLength: r.max}
}

func orNone(s string) any {
	if s == "" {
		return nil
	}
	return s
}
