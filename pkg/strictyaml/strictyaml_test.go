package strictyaml_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// format formats a node on one line, with the line of each scalar.
func format(n *strictyaml.Node) string {
	switch n.Kind {
	case strictyaml.List, strictyaml.Object:
		var parts []string
		for i, item := range n.Items {
			part := format(item)
			if n.Kind == strictyaml.Object {
				part = n.Keys[i].Text + ": " + part
			}
			parts = append(parts, part)
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case strictyaml.Null:
		return "null"
	}
	return fmt.Sprintf("%s@%d", n.Text, n.Line)
}

// TestAliases checks that aliases and merge keys are expanded where they are allowed, with
// the positions of what they name. Keys that an object has itself win.
func TestAliases(t *testing.T) {
	for text, want := range map[string]string{
		"a: &x 1\nb: *x\n":                                               "[a: 1@1, b: 1@1]",
		"a: &x [1, 2]\nb:\n- *x\n":                                       "[a: [1@1, 2@1], b: [[1@1, 2@1]]]",
		"a: &x {k: 1, l: 2}\nb:\n  <<: *x\n  l: 3\n":                     "[a: [k: 1@1, l: 2@1], b: [l: 3@4, k: 1@1]]",
		"a: &x {k: 1}\nb: &y {k: 2, l: 2}\nc:\n  <<: [*x, *y]\n  m: 3\n": "[a: [k: 1@1], b: [k: 2@2, l: 2@2], c: [m: 3@5, k: 1@1, l: 2@2]]",
		"": "null", "# nothing\n": "null", "---\n": "null",
	} {
		p := strictyaml.Problems{What: "file", Aliases: true}
		n := strictyaml.Read([]byte(text), &p)
		if n == nil {
			t.Errorf("Read of %q = nil, %v, want %s", text, p.Err("f"), want)
		} else if got := format(n); got != want {
			t.Errorf("Read of %q = %s, want %s", text, got, want)
		}
	}
	for text, want := range map[string]string{
		"a: &x [*x]\n": "nested more than 20 levels deep",
		"a: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n": "the file has more than 10,000 values",
		"<<: 5\n":        "must name an object",
		"a: *x\n":        "aliases such as *name",
		"a: !x y\n":      "tags such as !name",
		"a: 1\n---\nb\n": "must not contain a second document",
	} {
		p := strictyaml.Problems{What: "file", Aliases: true}
		if n := strictyaml.Read([]byte(text), &p); n != nil || p.Err("f") == nil || !strings.Contains(p.Err("f").Error(), want) {
			t.Errorf("Read of %q = %v, %v, want %q", text, n, p.Err("f"), want)
		}
	}
}
