package cli

import (
	"bytes"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

func testRoot(t *testing.T) (*cobra.Command, *bytes.Buffer) {
	t.Helper()
	t.Setenv("HOME", t.TempDir())
	for _, name := range []string{"XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"} {
		t.Setenv(name, "")
	}
	var out bytes.Buffer
	root := newRootCmd(&app{con: console.New(&out, &out, func(string) string { return "" }), redact: secret.NewRedactor()})
	root.SetOut(&out)
	root.SetErr(&out)
	return root, &out
}

// TestHelpOfEveryCommand checks that the help of every command has a summary, an example
// and a description of each flag, in one style.
func TestHelpOfEveryCommand(t *testing.T) {
	root, out := testRoot(t)
	all := visible(root)
	if len(all) < 30 {
		t.Fatalf("only %d commands", len(all))
	}
	for _, cmd := range all {
		t.Run(cmd.CommandPath(), func(t *testing.T) {
			if s := cmd.Short; s == "" || !unicode.IsUpper([]rune(s)[0]) || strings.HasSuffix(s, ".") {
				t.Errorf("short: %q", s)
			}
			if len(cmd.Short) > 60 || strings.Contains(cmd.Short, ";") {
				t.Errorf("short has %d letters, must be at most 60 without a semicolon: %q", len(cmd.Short), cmd.Short)
			}
			for line := range strings.Lines(cmd.Long) {
				if len([]rune(line)) > 91 {
					t.Errorf("long has a line of %d letters: %s", len([]rune(line)), line)
				}
			}
			if !strings.Contains(cmd.Example, "agent-sessionizer "+strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "agent-sessionizer"), " ")) {
				t.Errorf("no example of it: %q", cmd.Example)
			}
			cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
				if f.Name == "help" || f.Name == "version" || f.Hidden {
					return
				}
				if u := []rune(f.Usage); len(u) == 0 || strings.HasSuffix(f.Usage, ".") || unicode.IsUpper(u[0]) && !unicode.IsUpper(u[min(1, len(u)-1)]) {
					t.Errorf("--%s: %q", f.Name, f.Usage)
				}
				if value, _ := pflag.UnquoteUsage(f); f.NoOptDefVal == "" && value == "string" {
					t.Errorf("--%s takes a string; name the value in `backquotes`", f.Name)
				}
			})
			out.Reset()
			root.SetArgs(append(strings.Fields(cmd.CommandPath())[1:], "--help"))
			if err := root.ExecuteContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{"Usage:", "Examples:", cmd.Example} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("--help has no %q", want)
				}
			}
		})
	}
}

// TestEverythingCompletes checks that everything that takes a value has a completion:
// values, files, or explicitly nothing.
func TestEverythingCompletes(t *testing.T) {
	root, _ := testRoot(t)
	for _, cmd := range visible(root) {
		if _, args, _ := strings.Cut(cmd.Use, " "); args != "" && cmd.ValidArgsFunction == nil && len(cmd.ValidArgs) == 0 {
			t.Errorf("%s takes %s, and completes nothing", cmd.CommandPath(), args)
		}
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if _, ok := cmd.GetFlagCompletionFunc(f.Name); !ok && f.NoOptDefVal == "" && f.Name != "help" {
				t.Errorf("%s --%s completes nothing", cmd.CommandPath(), f.Name)
			}
		})
	}
	// A value in this table that no flag uses was meant for a flag.
	used := map[string]bool{}
	for _, cmd := range visible(root) {
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) { used[f.Name] = true })
	}
	for name := range (&app{}).flagValues() {
		if !used[name] {
			t.Errorf("no command has --%s", name)
		}
	}
}

// TestExamplesCanBeTyped checks that the commands in help texts and documents exist, and
// accept the given flags and number of arguments.
func TestExamplesCanBeTyped(t *testing.T) {
	root, _ := testRoot(t)
	n := 0
	for _, cmd := range visible(root) {
		for line := range strings.Lines(cmd.Example) {
			n += typed(t, cmd.CommandPath(), line)
		}
	}
	for _, file := range []string{"README.md", "docs/configuration.md"} {
		text, err := os.ReadFile(filepath.Join("..", "..", file))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.HasPrefix(line, "    ") {
				n += typed(t, file, line)
			}
		}
	}
	if n < 80 {
		t.Errorf("only %d examples were found", n)
	}
}

// TestHintsCanBeTyped checks the same for the hints of errors in all packages.
func TestHintsCanBeTyped(t *testing.T) {
	n := 0
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok || len(call.Args) == 0 {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			text, isText := call.Args[0].(*ast.BasicLit)
			if !ok || !isText || method.Sel.Name != "WithHint" {
				return true
			}
			hint, err := strconv.Unquote(text.Value)
			if err != nil {
				t.Error(err)
			}
			hint = strings.NewReplacer("--disk %s", "--disk 1GiB", "%s", "x", "%v", "x", "%d", "1", "=SIZE", "=1GiB", "=N", "=1", ", ", "   ").Replace(hint)
			n += typed(t, path, hint)
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n < 40 {
		t.Errorf("only %d hints were found", n)
	}
}

var (
	afterCommand = regexp.MustCompile(`   .*|\s#.*| [|>&;].*|\)"?$| \|`)
	shellWord    = regexp.MustCompile(`'[^']*'|"[^"]*"|[^\s'"]+`)
)

// typed parses this program's commands in a line, and returns their number.
func typed(t *testing.T, where, line string) int {
	t.Helper()
	n := 0
	for _, part := range strings.Split(strings.TrimSpace(line), "agent-sessionizer ")[1:] {
		part = strings.TrimSpace(afterCommand.ReplaceAllString(part, ""))
		words := shellWord.FindAllString(part, -1)
		for i, w := range words {
			words[i] = strings.Trim(w, `'"`)
		}
		n++
		root, _ := testRoot(t) // a root keeps parsed flag values, so each command needs a new one
		cmd, args, err := root.Find(words)
		if err == nil && cmd.Name() != "help" {
			if err = cmd.ParseFlags(args); err == nil && cmd.Args != nil {
				err = cmd.Args(cmd, cmd.Flags().Args())
			}
		}
		if err != nil && !errors.Is(err, pflag.ErrHelp) {
			t.Errorf("%s: agent-sessionizer %s: %v", where, part, err)
		}
	}
	return n
}

func TestTopicsAreWhatTheDocumentsSay(t *testing.T) {
	text, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "## Exit codes")
	rows := regexp.MustCompile("(?m)^\\| (\\d+) \\| (?:`([A-Z_]+)`)? *\\| (.*) \\|$").FindAllStringSubmatch(table, -1)
	var want []entry
	for _, r := range rows {
		e := entry{r[1], r[3]}
		if r[2] != "" {
			e.text += " (" + r[2] + ")"
		}
		want = append(want, e)
	}
	if got := exitCodes(); !slices.Equal(got, want) {
		t.Errorf("%v\n%v", got, want)
	}
	for _, e := range exitCodes() {
		if strings.Contains(e.text, "reserved") {
			t.Errorf("exit code %s is called reserved, but commands return it: %s", e.name, e.text)
		}
	}
	all := lines(environment)
	for _, name := range config.Variables() {
		if !strings.Contains(all, name) {
			t.Errorf("help environment does not name %s", name)
		}
	}
	conf, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range environment {
		for _, name := range strings.Split(e.name, ", ") {
			if short := strings.TrimPrefix(name, "AGENT_SESSIONIZER"); !strings.Contains(string(conf), "`"+name+"`") && !strings.Contains(string(conf), "`"+short+"`") {
				t.Errorf("docs/configuration.md does not name %s", name)
			}
		}
	}
}

// TestManPages checks that both man page formatters read the pages without complaint.
func TestManPages(t *testing.T) {
	root, _ := testRoot(t)
	dir := t.TempDir()
	if err := writeManPages(root, dir); err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil || len(pages) != len(visible(root)) {
		t.Fatalf("%d pages of %d commands, %v", len(pages), len(visible(root)), err)
	}
	main, err := os.ReadFile(filepath.Join(dir, "agent-sessionizer.1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{".SH EXIT STATUS", ".SH FILES", ".SH ENVIRONMENT", ".SH EXAMPLES", `agent\-sessionizer\-net`} {
		if !strings.Contains(string(main), want) {
			t.Errorf("the main page has no %s", want)
		}
	}
	read := 0
	for _, reader := range [][]string{
		{"mandoc", "-Tlint", "-Wwarning"},
		{"groff", "-man", "-ww", "-z", "-Tutf8"},
	} {
		if _, err := exec.LookPath(reader[0]); err != nil {
			continue
		}
		read++
		out, err := exec.CommandContext(t.Context(), reader[0], append(reader[1:], pages...)...).CombinedOutput()
		if err != nil || len(out) > 0 {
			t.Errorf("%v: %v\n%.2000s", reader, err, out)
		}
	}
	if read == 0 {
		t.Error("neither mandoc nor groff is there; run: make setup")
	}
}

func TestRoff(t *testing.T) {
	var p page
	p.text(".hidden -x \\n \"q\" …")
	p.text("'quoted")
	if got, want := p.String(), "\\&.hidden \\-x \\en \\(dqq\\(dq \\[u2026]\n\\&'quoted\n"; got != want {
		t.Errorf("%q, not %q", got, want)
	}
}
