package sessionizer_test

import (
	"os/exec"
	"strings"
	"testing"
)

// layers is the table in docs/architecture.md. A package imports only packages of lower
// layers, and those that sideways lists.
var layers = map[string]int{
	"":            0, // the embedded files
	"agent":       0,
	"atomicfile":  0,
	"crash":       0,
	"fail":        0,
	"guestproto":  0,
	"homearchive": 0,
	"hostnet":     0,
	"ids":         0,
	"lockfile":    0,
	"logfile":     0,
	"manifest":    0,
	"peercred":    0,
	"pipe":        0,
	"policy":      0,
	"strictyaml":  0,
	"termtext":    0,
	"traceid":     0,
	"config":      1,
	"store":       1,
	"vm":          1,
	"ssh":         1,
	"secret":      1,
	"repo":        2, // talks to a guest over SSH
	"tmux":        1,
	"console":     1,
	"notify":      1,
	"audit":       2, // redacts secrets
	"guestagent":  1,
	"gateway":     2,
	"guestclient": 2,
	"image":       2,
	"attach":      2,
	"golden":      3,
	"lifecycle":   3,
	"session":     4,
	"picker":      5,
	"gc":          6,
	"task":        5,
	"ops":         6,
	"keeper":      6,
	"client":      7,
	"server":      7,
	"cli":         8,
}

// sideways lists the permitted imports within a layer.
var sideways = map[string]bool{
	"vm→ssh":              true, // vm/fake serves SSH
	"traceid→ids":         true, // to make them
	"agent→manifest":      true, // to run its Agent
	"manifest→strictyaml": true, // to read it
	"agent→guestproto":    true, // to clean a guest's text
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
		first, _, _ := strings.Cut(rest, "/")
		return first // vm/lima belongs to vm
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		paths := strings.Fields(line)
		from := name(paths[0])
		layer, ok := layers[from]
		if !ok {
			t.Errorf("package %q is not in any layer; add it to docs/architecture.md and here", paths[0])
			continue
		}
		seen++
		for _, path := range paths[1:] {
			if !strings.HasPrefix(path, module) {
				continue
			}
			to := name(path)
			if to == from || to == "fail" || sideways[from+"→"+to] {
				continue
			}
			if below, ok := layers[to]; !ok || below >= layer {
				t.Errorf("%s (layer %d) imports %s (layer %d)", paths[0], layer, path, below)
			}
		}
	}
	if seen < 15 {
		t.Fatalf("only %d packages were checked", seen)
	}
}
