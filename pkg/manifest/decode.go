package manifest

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
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
	sizeType     = reflect.TypeFor[Size]()
	durationType = reflect.TypeFor[Duration]()
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
		n, _ := ParseSize(s)
		return int64(n)
	case durationType:
		d, _ := ParseDuration(s)
		return int64(d)
	}
	return number(s)
}

// decoder fills a struct from nodes, as its tags describe.
type decoder struct {
	problems  *problems
	inSession map[string]*node // nodes in the manifest, by field
	quiet     bool             // set in a part that could hold a credential
}

func (d *decoder) bad(n *node, path, format string, args ...any) {
	if path == "" {
		format = "the manifest " + format
	}
	d.problems.add(n, path, format, args...)
}

// quote quotes s for an error, shortened and on one line.
func quote(s string) string {
	const most = 40
	if utf8.RuneCountInString(s) > most {
		s = string([]rune(s)[:most]) + "…"
	}
	return strconv.Quote(s)
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// object fills a struct.
func (d *decoder) object(n *node, path string, v reflect.Value) {
	if n.kind != object {
		d.wrongKind(n, path, object)
		return
	}
	fields := fieldsOf(v.Type())
	first := map[string]*node{}
	for i, key := range n.keys {
		if d.isDuplicate(key, path, first) {
			continue
		}
		at := slices.IndexFunc(fields, func(f field) bool { return f.name == key.text })
		if at < 0 {
			d.unknown(key, path, fields)
			continue
		}
		f := fields[at]
		d.inSession[join(path, f.name)] = n.items[i]
		d.value(n.items[i], join(path, f.name), f, v.FieldByIndex(f.index))
	}
	for _, f := range fields {
		if f.required == "true" && first[f.name] == nil {
			d.missing(n, path, f)
		}
	}
}

func (d *decoder) missing(n *node, path string, f field) {
	if len(f.enum) == 1 {
		d.bad(n, join(path, f.name), "is missing; add %s: %q", f.name, f.enum[0])
		return
	}
	d.bad(n, join(path, f.name), "is missing: %s", f.doc)
}

// checkOwnership checks keys that depend on whether the task has its own session: those that such
// a task needs, and those that are not allowed beside vm.session.
func (d *decoder) checkOwnership(path string, t reflect.Type) {
	given := d.inSession["vm.session"] != nil
	for _, f := range fieldsOf(t) {
		at := join(path, f.name)
		n := d.inSession[at]
		switch {
		case n == nil:
			if f.required == "own" && !given {
				d.missing(d.inSession[path], path, f)
			}
		case !given || f.own == "":
		case f.own == "*":
			d.bad(n, at, "cannot be combined with vm.session, which uses a session unchanged; remove one of the two")
		case n.text == f.own:
			d.bad(n, at, "is %s, which cannot be combined with vm.session: the session remains in any case", quote(f.own))
		}
		if sub := t.FieldByIndex(f.index).Type; sub.Kind() == reflect.Struct && n != nil && n.kind == object {
			d.checkOwnership(at, sub)
		}
	}
}

// isDuplicate reports whether the object already has the key, and adds a problem if so.
func (d *decoder) isDuplicate(key *node, path string, first map[string]*node) bool {
	earlier := first[key.text]
	if earlier == nil {
		first[key.text] = key
		return false
	}
	name := " " + quote(key.text)
	if d.quiet {
		name = ""
	}
	d.bad(key, path, "has the key%s twice; the first is on line %d", name, earlier.line)
	return true
}

// unknown reports an unknown key, with the key that was probably meant.
func (d *decoder) unknown(key *node, path string, fields []field) {
	if d.problems.full() {
		d.problems.more++
		return
	}
	names := make([]string, len(fields))
	for i, f := range fields {
		names[i] = f.name
	}
	if d.quiet {
		d.bad(key, path, "has an unknown key; known keys are %s", strings.Join(names, ", "))
		return
	}
	if homes := homesOf(key.text); len(homes) > 0 && path == "" {
		d.bad(key, path, "has an unknown key %s; it belongs in %s", quote(key.text), strings.Join(homes, " or "))
		return
	}
	if i := slices.IndexFunc(names, func(name string) bool { return near(name, key.text) }); i >= 0 {
		d.bad(key, path, "has an unknown key %s; did you mean %s?", quote(key.text), names[i])
		return
	}
	d.bad(key, path, "has an unknown key %s; known keys are %s", quote(key.text), strings.Join(names, ", "))
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

// wrongKind reports a node of the wrong kind.
func (d *decoder) wrongKind(n *node, path string, want kind) {
	switch {
	case n.kind == null:
		d.bad(n, path, "is empty; add a value or remove the line")
	case want == text && n.kind != list && n.kind != object:
		d.bad(n, path, "must be a string, got %v; put it in quotes", n.kind)
	case want == list && n.kind == text:
		d.bad(n, path, "must be a list, got a string; write it as [one, another]")
	default:
		d.bad(n, path, "must be %v, got %v", want, n.kind)
	}
}

// value fills one field.
func (d *decoder) value(n *node, path string, f field, v reflect.Value) {
	if f.quiet && !d.quiet {
		d.quiet = true
		defer func() { d.quiet = false }()
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
	case t.Kind() == reflect.Slice:
		d.list(n, path, f, v)
	case t.Kind() == reflect.Map:
		d.table(n, path, f, v)
	}
}

func (d *decoder) text(n *node, path string, f field, v reflect.Value) {
	switch {
	case n.kind != text:
		d.wrongKind(n, path, text)
	case f.enum == nil || slices.Contains(f.enum, n.text):
		v.SetString(d.checked(n, path, f.like))
	default:
		why := "must be " + alternatives(f.enum)
		if !d.quiet {
			why += ", got " + quote(n.text)
		}
		if f.orElse != "" {
			why += "; " + f.orElse
		}
		d.bad(n, path, "%s", why)
	}
}

// alternatives lists words for an error: "a", "a or b", "a, b or c".
func alternatives(words []string) string {
	last := len(words) - 1
	if last == 0 {
		return words[0]
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// checked returns a node's text, normalized by its rule, and reports a text that breaks
// the rule.
func (d *decoder) checked(n *node, path string, r *rule) string {
	if r == nil {
		return n.text
	}
	value := r.normal(n.text)
	if why := r.broken(value); why != "" {
		d.bad(n, path, "%s", why)
	}
	return value
}

func (d *decoder) number(n *node, path string, f field, v reflect.Value) {
	if n.kind != integer {
		switch n.kind {
		case text, fraction:
			d.bad(n, path, "must be a whole number in decimal and without quotes, got %s", quote(n.text))
		default:
			d.wrongKind(n, path, integer)
		}
		return
	}
	i, err := strconv.ParseInt(n.text, 10, 64)
	if err != nil || i < number(f.min) || i > number(f.max) {
		d.bad(n, path, "must be from %s to %s, got %s", f.min, f.max, n.text[:min(len(n.text), 20)])
		return
	}
	v.SetInt(i)
}

// measure fills in a size or a duration.
func (d *decoder) measure(n *node, path string, f field, v reflect.Value) {
	var m int64
	var err error
	example := "8G"
	if v.Type() == durationType {
		example = "30m"
	}
	switch {
	case n.kind == integer || n.kind == fraction:
		d.bad(n, path, "must have a unit, as in %s, got %s", example, quote(n.text))
		return
	case n.kind != text:
		d.wrongKind(n, path, text)
		return
	case v.Type() == sizeType:
		var s Size
		s, err = ParseSize(n.text)
		m = int64(s)
	default:
		var t Duration
		t, err = ParseDuration(n.text)
		m = int64(t)
	}
	switch {
	case err != nil:
		d.bad(n, path, "%v, got %s", err, quote(n.text))
	case m < scale(v.Type(), f.min) || m > scale(v.Type(), f.max):
		d.bad(n, path, "must be from %s to %s, got %s", f.min, f.max, quote(n.text))
	default:
		v.SetInt(m)
	}
}

func (d *decoder) list(n *node, path string, f field, v reflect.Value) {
	if n.kind != list {
		d.wrongKind(n, path, list)
		return
	}
	if !d.countFits(n, path, f) {
		return
	}
	v.SetZero() // replace the default instead of adding to it
	for i, item := range n.items {
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

func (d *decoder) table(n *node, path string, f field, v reflect.Value) {
	if n.kind != object {
		d.wrongKind(n, path, object)
		return
	}
	if !d.countFits(n, path, f) {
		return
	}
	first, entries := map[string]*node{}, map[string]string{}
	for i, key := range n.keys {
		if d.isDuplicate(key, path, first) {
			continue
		}
		if why := f.keys.broken(key.text); why != "" {
			d.bad(key, path, "%s", why)
		}
		if n.items[i].kind != text {
			d.wrongKind(n.items[i], path, text)
			continue
		}
		entries[key.text] = d.checked(n.items[i], path, f.like)
	}
	if len(entries) > 0 {
		v.Set(reflect.ValueOf(entries))
	}
}

// countFits reports whether a list or a map has an allowed number of entries.
func (d *decoder) countFits(n *node, path string, f field) bool {
	least, most := number("0"+f.min), number(f.max)
	switch count := int64(len(n.items)); {
	case count > most:
		d.bad(n, path, "must have at most %d entries, got %d", most, count)
	case count < least:
		d.bad(n, path, "must have at least %d entry, got %d", least, count)
	default:
		return true
	}
	return false
}
