package manifest

import (
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// TestTags checks that all tags are valid, because they are read only while a manifest
// is parsed.
func TestTags(t *testing.T) {
	used := map[string]bool{}
	var walk func(path string, of reflect.Type)
	walk = func(path string, of reflect.Type) {
		for _, f := range fieldsOf(of) {
			sf := of.FieldByIndex(f.index)
			at := strictyaml.Join(path, f.name)
			for _, key := range []string{"like", "keys"} {
				name := sf.Tag.Get(key)
				if name != "" && rules[name] == nil {
					t.Errorf("rule of %s = %q, want a known one", at, name)
				}
				used[name] = true
			}
			switch ft := sf.Type; {
			case ft.Kind() == reflect.Pointer:
				walk(at, ft.Elem())
			case ft.Kind() == reflect.Struct:
				walk(at, ft)
			case ft == sizeType || ft == durationType || ft.Kind() == reflect.Int:
				for _, tag := range []string{f.byDef, f.min, f.max} {
					if !reads(ft, tag) && (tag != "" || ft.Kind() != reflect.Int && tag == f.min) {
						t.Errorf("tag of %s = %q, want a %v", at, tag, ft)
					}
				}
				if d := scale(ft, f.byDef); f.byDef != "" && (d < scale(ft, f.min) || d > scale(ft, f.max)) || scale(ft, f.min) >= scale(ft, f.max) {
					t.Errorf("default of %s = %s, want it from %s to %s", at, f.byDef, f.min, f.max)
				}
			case ft.Kind() == reflect.Slice:
				if ft.Elem().Kind() == reflect.Struct {
					walk(at+"[]", ft.Elem())
				} else if f.like == nil && ft.Elem().Kind() != reflect.Int {
					t.Errorf("rule for the entries of %s = none, want one", at)
				}
				if number(f.max) < 1 {
					t.Errorf("bound of %s = %q, want at least 1", at, f.max)
				}
			case ft.Kind() == reflect.Map:
				if f.like == nil || f.keys == nil || number(f.max) < 1 {
					t.Errorf("rules of %s = %q, bound %q, want rules for keys and values, at least 1", at, sf.Tag, f.max)
				}
			case ft.Kind() == reflect.Bool:
			case f.like == nil && f.enum == nil:
				t.Errorf("rule of %s = none, want one", at)
			}
		}
	}
	walk("", reflect.TypeFor[document]())
	for name := range rules {
		if !used[name] {
			t.Errorf("rule %q is used by no field, want it used", name)
		}
	}
}

// reads reports whether a tag's text is a value of the type.
func reads(t reflect.Type, s string) bool {
	var err error
	switch t {
	case sizeType:
		_, err = measure.ParseSize(s)
	case durationType:
		_, err = measure.ParseDuration(s)
	default:
		_, err = strconv.ParseInt(s, 10, 64)
	}
	return err == nil
}

// TestDocs checks that the table of keys in the documentation lists every key, its
// default and its bounds.
func TestDocs(t *testing.T) {
	text, err := os.ReadFile("../../docs/tasks.md")
	if err != nil {
		t.Fatal(err)
	}
	var walk func(path string, of reflect.Type)
	walk = func(path string, of reflect.Type) {
		for _, f := range fieldsOf(of) {
			ft := of.FieldByIndex(f.index).Type
			at := strictyaml.Join(path, f.name)
			if ft.Kind() == reflect.Pointer || ft.Kind() == reflect.Struct {
				if ft.Kind() == reflect.Struct {
					walk(at, ft)
				}
				continue
			}
			if ft.Kind() == reflect.Slice && ft.Elem().Kind() == reflect.Struct {
				walk(at+"[]", ft.Elem())
				continue
			}
			_, row, ok := strings.Cut(string(text), "| `"+at+"` |")
			if !ok {
				t.Errorf("row of %s in docs/tasks.md = none, want one", at)
				continue
			}
			row, _, _ = strings.Cut(row, "\n")
			for _, want := range append([]string{f.byDef, f.min, f.max}, f.enum...) {
				if want != "" && !strings.Contains(row, want) {
					t.Errorf("row of %s in docs/tasks.md = %s, want %q in it", at, row, want)
				}
			}
		}
	}
	walk("", reflect.TypeFor[document]())
}
