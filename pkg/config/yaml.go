package config

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// maxFile bounds the size of a settings file. A larger file is a mistake.
const maxFile = 1 << 20

// decode reads a file into a struct and returns its nodes. The error has the code fail.Usage,
// and a line FILE:LINE:COLUMN for each problem.
func decode(file string, text []byte, into any) (*strictyaml.Node, error) {
	if len(text) > maxFile {
		return nil, fail.New(fail.Usage, "%s: file is larger than %v", file, Size(maxFile))
	}
	d := decoder{Problems: &strictyaml.Problems{What: "file", Aliases: true}}
	switch into.(type) {
	case *document:
		d.scalars = settings
	case *Project:
		d.Aliases = false // a few could make a huge value
	}
	root := strictyaml.Read(text, d.Problems)
	if root != nil {
		d.value(root, "", reflect.ValueOf(into).Elem())
	}
	if err := d.Err(file); err != nil {
		return nil, fail.New(fail.Usage, "%w", err)
	}
	return root, nil
}

// decoder fills a value from nodes. A node without a value leaves the setting inherited.
type decoder struct {
	*strictyaml.Problems
	scalars []setting // are checked here, and set by setScalars
}

// value fills v. Path is the key, as in network.allow[0].
func (d *decoder) value(n *strictyaml.Node, path string, v reflect.Value) {
	text, isScalar := n.Scalar()
	if n.Kind == strictyaml.Null {
		return
	}
	if i := slices.IndexFunc(d.scalars, func(s setting) bool { return s.key == path }); i >= 0 && isScalar {
		if isSet(n, path) {
			d.refuse(n, path, d.scalars[i].set(&Config{}, text))
		}
		return
	}
	switch into := v.Addr().Interface().(type) {
	case interface{ Set(text string) error }:
		if v.Kind() == reflect.Struct && !isScalar {
			if n.Kind == strictyaml.Object { // its long form
				break
			}
			d.WrongKind(n, path, strictyaml.Text)
			return
		}
		if !isScalar {
			text = n.Kind.String() // which none accepts
		}
		d.refuse(n, path, into.Set(text))
		return
	case *time.Duration:
		d.refuse(n, path, (*Duration)(into).Set(n.Kind.String()))
		return
	case *Persist:
		d.persist(n, path, into)
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(n, path, v.Elem())
	case reflect.Struct:
		d.object(n, path, v)
	case reflect.Map:
		d.table(n, path, v)
	case reflect.Slice:
		d.list(n, path, v)
	case reflect.Bool:
		if n.Kind != strictyaml.Boolean {
			d.Bad(n, path, "must be true or false, got %v", n.Kind)
		}
		v.SetBool(strings.EqualFold(text, "true"))
	case reflect.Int, reflect.Int64:
		i, err := strconv.Atoi(text)
		if err != nil {
			d.WrongKind(n, path, strictyaml.Integer)
		}
		v.SetInt(int64(i))
	case reflect.Float64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil {
			d.Bad(n, path, "must be a number, got %q", text)
		}
		v.SetFloat(f)
	default:
		if !isScalar {
			d.WrongKind(n, path, strictyaml.Text)
			return
		}
		v.SetString(text)
	}
}

// refuse reports why a value is not accepted.
func (d *decoder) refuse(n *strictyaml.Node, path string, err error) {
	if err == nil {
		return
	}
	why := strings.TrimPrefix(err.Error(), path+" ")
	if !strings.HasPrefix(why, "must ") {
		why = "is refused: " + why
	}
	d.Bad(n, path, "%s", why)
}

func (d *decoder) object(n *strictyaml.Node, path string, v reflect.Value) {
	if n.Kind != strictyaml.Object {
		d.WrongKind(n, path, strictyaml.Object)
		return
	}
	names, fields := fieldsOf(v)
	for key, value := range d.Entries(n, path) {
		i := slices.Index(names, key.Text)
		if i < 0 {
			d.UnknownKey(key, path, names)
			continue
		}
		d.value(value, strictyaml.Join(path, key.Text), fields[i])
	}
}

// fieldsOf returns the keys of a struct, and the field of each.
func fieldsOf(v reflect.Value) (names []string, fields []reflect.Value) {
	for i := range v.NumField() {
		switch name, options, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ","); options {
		case "inline":
			n, f := fieldsOf(v.Field(i))
			names, fields = append(names, n...), append(fields, f...)
		default:
			names, fields = append(names, name), append(fields, v.Field(i))
		}
	}
	return names, fields
}

func (d *decoder) table(n *strictyaml.Node, path string, v reflect.Value) {
	if n.Kind != strictyaml.Object {
		d.WrongKind(n, path, strictyaml.Object)
		return
	}
	v.Set(reflect.MakeMap(v.Type()))
	for key, value := range d.Entries(n, path) {
		k, entry := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		at := strictyaml.Join(path, key.Text)
		d.value(key, at, k)
		d.value(value, at, entry)
		v.SetMapIndex(k, entry)
	}
}

func (d *decoder) list(n *strictyaml.Node, path string, v reflect.Value) {
	if n.Kind != strictyaml.List {
		d.WrongKind(n, path, strictyaml.List)
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Items), len(n.Items)))
	for i, item := range n.Items {
		at := fmt.Sprintf("%s[%d]", path, i)
		if item.Kind == strictyaml.Null {
			d.WrongKind(item, at, strictyaml.Text)
		}
		d.value(item, at, v.Index(i))
	}
}

// persist reads one path, or a list of paths.
func (d *decoder) persist(n *strictyaml.Node, path string, p *Persist) {
	items := n.Items
	if n.Kind != strictyaml.List {
		items = []*strictyaml.Node{n}
	}
	*p = Persist{}
	for _, item := range items {
		text, ok := item.Scalar()
		switch {
		case !ok:
			d.Bad(item, path, "must be a path like .claude/projects, or %q", persistAgents)
		case text == persistAgents:
			*p = append(*p, homearchive.Agents()...)
		default:
			if err := homearchive.CheckPattern(text); err != nil {
				d.Bad(item, path, "is refused: cannot save %q: %v", text, err)
			}
			*p = append(*p, text)
		}
	}
	if len(*p) > homearchive.MaxPatterns {
		d.Bad(n, path, "must have at most %d paths, got %d", homearchive.MaxPatterns, len(*p))
	}
}

// Size is a number of bytes, written as "512MiB" or "8GiB". 8G and 8GB also mean 8GiB.
type Size int64

// ParseSize parses a size of at least one byte.
func ParseSize(s string) (Size, error) {
	n, err := measure.ParseSize(s)
	if err == nil && n == 0 {
		err = errors.New("must be a size of at least 1B")
	}
	if err != nil {
		return 0, fmt.Errorf("%w, got %q", err, s)
	}
	return Size(n), nil
}

// String formats the size for people, with four significant digits.
func (s Size) String() string { return measure.Size(s).Human() }

// MarshalYAML formats the size for people if that is exact, and otherwise in the largest
// unit that divides it.
func (s Size) MarshalYAML() ([]byte, error) {
	text := s.String()
	if v, err := ParseSize(text); err != nil || v != s {
		text = measure.Size(s).String()
	}
	return []byte(text), nil
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
