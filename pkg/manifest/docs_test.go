package manifest

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// TestBoundsInDocsAndSchema checks that docs/tasks.md and the schema state the bounds
// that Parse enforces.
func TestBoundsInDocsAndSchema(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "tasks.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "| `"); ok {
			key, row, _ := strings.Cut(rest, "`")
			rows[key] = row
		}
	}
	var root struct {
		Properties map[string]struct {
			Properties map[string]struct {
				Description      string
				Minimum, Maximum *int64
			}
		}
	}
	if err := json.Unmarshal(Schema(), &root); err != nil {
		t.Fatal(err)
	}
	checked := 0
	var walk func(path string, of reflect.Type)
	walk = func(path string, of reflect.Type) {
		for _, f := range fieldsOf(of) {
			at := strictyaml.Join(path, f.name)
			switch ft := of.FieldByIndex(f.index).Type; {
			case ft.Kind() == reflect.Struct:
				walk(at, ft)
			case ft == sizeType || ft == durationType || ft.Kind() == reflect.Int:
				checked++
				if want := "from " + f.min + " to " + f.max; !strings.Contains(rows[at], want) {
					t.Errorf("row of %s in the docs = %s, want %q", at, rows[at], want)
				}
				if parts := strings.Split(at, "."); len(parts) == 2 {
					s := root.Properties[parts[0]].Properties[parts[1]]
					numbers := s.Minimum != nil && *s.Minimum == number(f.min) && *s.Maximum == number(f.max)
					if !numbers && !strings.HasSuffix(s.Description, " From "+f.min+" to "+f.max+".") {
						t.Errorf("schema of %s = %+v, want bounds %s to %s", at, s, f.min, f.max)
					}
				}
			}
		}
	}
	walk("", reflect.TypeFor[Task]())
	if checked < 20 {
		t.Errorf("fields with bounds = %d, want at least 20", checked)
	}
}
