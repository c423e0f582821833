package manifest

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// field is a field of a type, as described by its tags.
type field struct {
	index    []int
	name     string
	doc      string
	byDef    string // default value
	required string
	quiet    bool
	own      string
	enum     []string
	orElse   string
	min, max string
	like     *rule
	keys     *rule
}

// fieldsOf returns the fields of a struct and of the structs that it embeds.
func fieldsOf(t reflect.Type) []field {
	var all []field
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" {
			continue
		}
		all = append(all, field{
			index: f.Index, name: name, doc: f.Tag.Get("doc"), byDef: f.Tag.Get("default"),
			required: f.Tag.Get("required"), quiet: f.Tag.Get("quiet") != "", own: f.Tag.Get("own"),
			enum: split(f.Tag.Get("enum")), orElse: f.Tag.Get("else"), min: f.Tag.Get("min"), max: f.Tag.Get("max"),
			like: rules[f.Tag.Get("like")], keys: rules[f.Tag.Get("keys")],
		})
	}
	return all
}

func split(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, "|")
}

var (
	sizeType     = reflect.TypeFor[measure.Size]()
	durationType = reflect.TypeFor[measure.Duration]()
)

// setDefaults fills in the defaults of a struct and of its nested structs.
func setDefaults(v reflect.Value) {
	for _, f := range fieldsOf(v.Type()) {
		at := v.FieldByIndex(f.index)
		switch {
		case at.Kind() == reflect.Struct:
			setDefaults(at)
		case f.byDef == "":
		case at.Type() == sizeType || at.Type() == durationType:
			at.SetInt(scale(at.Type(), f.byDef))
		case at.Kind() == reflect.Slice: // success_codes
			at.Set(reflect.ValueOf([]int{int(scale(at.Type().Elem(), f.byDef))}))
		case at.Kind() == reflect.Int:
			at.SetInt(scale(at.Type(), f.byDef))
		default:
			at.SetString(f.byDef)
		}
	}
}

// scale converts a number, size or duration in a tag. Values in tags are valid: a test
// parses each of them.
func scale(t reflect.Type, s string) int64 {
	switch t {
	case sizeType:
		n, _ := measure.ParseSize(s)
		return int64(n)
	case durationType:
		d, _ := measure.ParseDuration(s)
		return int64(d)
	}
	return number(s)
}

// number converts digits in a tag.
func number(digits string) int64 {
	n, _ := strconv.ParseInt(digits, 10, 64)
	return n
}

// decoder fills a struct from nodes, as its tags describe.
type decoder struct {
	*strictyaml.Problems
	inSession map[string]*strictyaml.Node // nodes in the manifest, by field
	inherits  bool                        // the repository may be omitted
}

// object fills a struct.
func (d *decoder) object(n *strictyaml.Node, path string, v reflect.Value) {
	if n.Kind != strictyaml.Object {
		d.WrongKind(n, path, strictyaml.Object)
		return
	}
	fields := fieldsOf(v.Type())
	for key, value := range d.Entries(n, path) {
		at := slices.IndexFunc(fields, func(f field) bool { return f.name == key.Text })
		if at < 0 {
			d.unknown(key, path, fields)
			continue
		}
		f := fields[at]
		d.inSession[strictyaml.Join(path, f.name)] = value
		d.value(value, strictyaml.Join(path, f.name), f, v.FieldByIndex(f.index))
	}
	for _, f := range fields {
		if f.required == "true" && d.inSession[strictyaml.Join(path, f.name)] == nil {
			d.missing(n, path, f)
		}
	}
}

func (d *decoder) missing(n *strictyaml.Node, path string, f field) {
	if len(f.enum) == 1 {
		d.Bad(n, strictyaml.Join(path, f.name), "is missing; add %s: %q", f.name, f.enum[0])
		return
	}
	d.Bad(n, strictyaml.Join(path, f.name), "is missing: %s", f.doc)
}

// checkOwnership checks keys that depend on whether the task has its own session: those that such
// a task needs, and those that are not allowed beside vm.session.
func (d *decoder) checkOwnership(path string, t reflect.Type) {
	given := d.inSession["vm.session"] != nil
	for _, f := range fieldsOf(t) {
		at := strictyaml.Join(path, f.name)
		n := d.inSession[at]
		switch {
		case n == nil:
			if f.required == "own" && !given && !d.inherits {
				d.missing(d.inSession[path], path, f)
			}
		case !given || f.own == "":
		case f.own == "*":
			d.Bad(n, at, "cannot be combined with vm.session, which uses a session unchanged; remove one of the two")
		case n.Text == f.own:
			d.Bad(n, at, "is %s, which cannot be combined with vm.session: the session remains in any case", strictyaml.Quote(f.own))
		}
		if sub := t.FieldByIndex(f.index).Type; sub.Kind() == reflect.Struct && n != nil && n.Kind == strictyaml.Object {
			d.checkOwnership(at, sub)
		}
	}
}

// unknown reports an unknown key, with the object that it belongs in or the key that was
// probably meant.
func (d *decoder) unknown(key *strictyaml.Node, path string, fields []field) {
	if path == "" && !d.Full() {
		if homes := homesOf(key.Text); len(homes) > 0 {
			d.Bad(key, path, "has an unknown key %s; it belongs in %s", strictyaml.Quote(key.Text), strings.Join(homes, " or "))
			return
		}
	}
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
	}
	d.UnknownKey(key, path, names)
}

// homesOf returns the top-level objects of a manifest that have the key.
func homesOf(key string) []string {
	var homes []string
	top := reflect.TypeFor[document]()
	for _, f := range fieldsOf(top) {
		t := top.FieldByIndex(f.index).Type
		if t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if t.Kind() == reflect.Struct && slices.ContainsFunc(fieldsOf(t), func(f field) bool { return f.name == key }) {
			homes = append(homes, f.name)
		}
	}
	return homes
}

// value fills one field.
func (d *decoder) value(n *strictyaml.Node, path string, f field, v reflect.Value) {
	if f.quiet && !d.Quiet {
		d.Quiet = true
		defer func() { d.Quiet = false }()
	}
	switch t := v.Type(); {
	case t.Kind() == reflect.Pointer:
		v.Set(reflect.New(t.Elem()))
		setDefaults(v.Elem())
		d.object(n, path, v.Elem())
	case t.Kind() == reflect.Struct:
		d.object(n, path, v)
	case t == sizeType || t == durationType:
		d.measure(n, path, f, v)
	case t.Kind() == reflect.String:
		d.text(n, path, f, v)
	case t.Kind() == reflect.Int:
		d.number(n, path, f, v)
	case t.Kind() == reflect.Bool:
		if n.Kind != strictyaml.Boolean {
			d.WrongKind(n, path, strictyaml.Boolean)
			return
		}
		v.SetBool(strings.EqualFold(n.Text, "true"))
	case t.Kind() == reflect.Slice:
		d.list(n, path, f, v)
	case t.Kind() == reflect.Map:
		d.table(n, path, f, v)
	}
}

func (d *decoder) text(n *strictyaml.Node, path string, f field, v reflect.Value) {
	switch {
	case n.Kind != strictyaml.Text:
		d.WrongKind(n, path, strictyaml.Text)
	case f.enum == nil || slices.Contains(f.enum, n.Text):
		v.SetString(d.checked(n, path, f.like))
	default:
		why := "must be " + strictyaml.Alternatives(f.enum)
		if !d.Quiet {
			why += ", got " + strictyaml.Quote(n.Text)
		}
		if f.orElse != "" {
			why += "; " + f.orElse
		}
		d.Bad(n, path, "%s", why)
	}
}

// checked returns a node's text, normalized by its rule, and reports a text that breaks
// the rule.
func (d *decoder) checked(n *strictyaml.Node, path string, r *rule) string {
	if r == nil {
		return n.Text
	}
	value := r.normal(n.Text)
	if why := r.broken(value); why != "" {
		d.Bad(n, path, "%s", why)
	}
	return value
}

func (d *decoder) number(n *strictyaml.Node, path string, f field, v reflect.Value) {
	if n.Kind != strictyaml.Integer {
		switch n.Kind {
		case strictyaml.Text, strictyaml.Fraction:
			d.Bad(n, path, "must be a whole number in decimal and without quotes, got %s", strictyaml.Quote(n.Text))
		default:
			d.WrongKind(n, path, strictyaml.Integer)
		}
		return
	}
	i, err := strconv.ParseInt(n.Text, 10, 64)
	if err != nil || i < number(f.min) || i > number(f.max) {
		d.Bad(n, path, "must be from %s to %s, got %s", f.min, f.max, n.Text[:min(len(n.Text), 20)])
		return
	}
	v.SetInt(i)
}

// measure fills in a size or a duration.
func (d *decoder) measure(n *strictyaml.Node, path string, f field, v reflect.Value) {
	var m int64
	var err error
	example := "8G"
	if v.Type() == durationType {
		example = "30m"
	}
	switch {
	case n.Kind == strictyaml.Integer || n.Kind == strictyaml.Fraction:
		d.Bad(n, path, "must have a unit, as in %s, got %s", example, strictyaml.Quote(n.Text))
		return
	case n.Kind != strictyaml.Text:
		d.WrongKind(n, path, strictyaml.Text)
		return
	case v.Type() == sizeType:
		var s measure.Size
		s, err = measure.ParseSize(n.Text)
		m = int64(s)
	default:
		var t measure.Duration
		t, err = measure.ParseDuration(n.Text)
		m = int64(t)
	}
	switch {
	case err != nil:
		d.Bad(n, path, "%v, got %s", err, strictyaml.Quote(n.Text))
	case m < scale(v.Type(), f.min) || m > scale(v.Type(), f.max):
		d.Bad(n, path, "must be from %s to %s, got %s", f.min, f.max, strictyaml.Quote(n.Text))
	default:
		v.SetInt(m)
	}
}

func (d *decoder) list(n *strictyaml.Node, path string, f field, v reflect.Value) {
	if n.Kind != strictyaml.List {
		d.WrongKind(n, path, strictyaml.List)
		return
	}
	if !d.countFits(n, path, f) {
		return
	}
	v.SetZero() // replace the default instead of adding to it
	for i, item := range n.Items {
		at := fmt.Sprintf("%s[%d]", path, i)
		entry := reflect.New(v.Type().Elem()).Elem()
		switch entry.Kind() {
		case reflect.Struct:
			d.object(item, at, entry)
		case reflect.Int:
			d.number(item, at, field{min: exitCodes.min, max: exitCodes.max}, entry)
		default:
			d.text(item, at, field{like: f.like}, entry)
		}
		v.Set(reflect.Append(v, entry))
	}
}

// exitCodes holds the bounds of the numbers in success_codes, the only list of numbers.
var exitCodes = field{min: "0", max: "255"}

func (d *decoder) table(n *strictyaml.Node, path string, f field, v reflect.Value) {
	if n.Kind != strictyaml.Object {
		d.WrongKind(n, path, strictyaml.Object)
		return
	}
	if !d.countFits(n, path, f) {
		return
	}
	entries := map[string]string{}
	for key, value := range d.Entries(n, path) {
		if why := f.keys.broken(key.Text); why != "" {
			d.Bad(key, path, "%s", why)
		}
		if value.Kind != strictyaml.Text {
			d.WrongKind(value, path, strictyaml.Text)
			continue
		}
		entries[key.Text] = d.checked(value, path, f.like)
	}
	if len(entries) > 0 {
		v.Set(reflect.ValueOf(entries))
	}
}

// countFits reports whether a list or a map has an allowed number of entries.
func (d *decoder) countFits(n *strictyaml.Node, path string, f field) bool {
	least, most := number("0"+f.min), number(f.max)
	switch count := int64(len(n.Items)); {
	case count > most:
		d.Bad(n, path, "must have at most %d entries, got %d", most, count)
	case count < least:
		d.Bad(n, path, "must have at least %d entry, got %d", least, count)
	default:
		return true
	}
	return false
}
