package sessionizer_test

import (
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var layerRow = regexp.MustCompile("(?m)^\\| ([0-9]+) \\| (?:`([a-z/]+)`|\\(root\\)) \\|")

// layers returns the layer of each package, as docs/architecture.md has it. A package imports
// only packages of lower layers, and those that sideways lists.
func layers(t *testing.T) map[string]int {
	t.Helper()
	text, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]int{}
	for _, row := range layerRow.FindAllStringSubmatch(string(text), -1) {
		all[row[2]], _ = strconv.Atoi(row[1])
	}
	return all
}

// sideways lists the permitted imports within a layer.
var sideways = map[string]bool{
	"server→mcpserver":    true,
	"vm→ssh":              true, // vm/fake serves SSH
	"traceid→ids":         true, // to make them
	"agent→manifest":      true, // to run its Agent
	"manifest→strictyaml": true, // to read it
	"manifest→measure":    true, // to read it
	"agent→guestproto":    true, // to clean a guest's text
	"login→secret":        true, // to keep tokens from being printed
	"config→login":        true, // to know their names
	"atomicfile→crash":    true, // to mark where a test may kill the process
	"agent→termtext":      true, // to shorten text
	"guestproto→termtext": true,
}

func TestImportsPointDown(t *testing.T) {
	const module = "github.com/agent-sessionizer/agent-sessionizer"
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", `{{.ImportPath}}{{range .Imports}} {{.}}{{end}}`, module, module+"/pkg/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	name := func(path string) string {
		rest := strings.TrimPrefix(strings.TrimPrefix(path, module), "/pkg/")
		if strings.HasPrefix(rest, "cli/") {
			return rest
		}
		first, _, _ := strings.Cut(rest, "/")
		return first // vm/lima belongs to vm
	}
	layers := layers(t)
	seen := 0
	for line := range strings.Lines(string(out)) {
		paths := strings.Fields(line)
		from := name(paths[0])
		layer, ok := layers[from]
		if !ok {
			t.Errorf("package %q is not in any layer; add it to docs/architecture.md", paths[0])
			continue
		}
		seen++
		for _, path := range paths[1:] {
			if !strings.HasPrefix(path, module) {
				continue
			}
			to := name(path)
			if to == from || to == "fail" || to == "lazyregexp" || sideways[from+"→"+to] {
				continue
			}
			if below, ok := layers[to]; !ok || below >= layer {
				t.Errorf("%s (layer %d) imports %s (layer %d)", paths[0], layer, path, below)
			}
		}
	}
	if packages := len(layers); packages < 40 || seen < packages {
		t.Errorf("checked %d packages, docs/architecture.md has %d, want all, at least 40", seen, packages)
	}
}
