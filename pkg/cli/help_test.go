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
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
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
	root := newRootCmd(&app.App{Con: console.New(&out, &out, func(string) string { return "" }), Redact: secret.NewRedactor()})
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
		t.Fatalf("%d visible commands, want at least 30", len(all))
	}
	for _, cmd := range all {
		t.Run(cmd.CommandPath(), func(t *testing.T) {
			if s := cmd.Short; s == "" || !unicode.IsUpper([]rune(s)[0]) || strings.HasSuffix(s, ".") {
				t.Errorf("Short = %q, want an upper-case letter at its beginning and no full stop", s)
			}
			if len(cmd.Short) > 60 || strings.Contains(cmd.Short, ";") {
				t.Errorf("Short = %q (%d letters), want at most 60 without a semicolon", cmd.Short, len(cmd.Short))
			}
			for line := range strings.Lines(cmd.Long) {
				if len([]rune(line)) > 91 {
					t.Errorf("line of Long = %q (%d letters), want at most 91", line, len([]rune(line)))
				}
			}
			if !strings.Contains(cmd.Example, "agent-sessionizer "+strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "agent-sessionizer"), " ")) {
				t.Errorf("Example = %q, want one of %s", cmd.Example, cmd.CommandPath())
			}
			cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
				if f.Name == "help" || f.Name == "version" || f.Hidden {
					return
				}
				if u := []rune(f.Usage); len(u) == 0 || strings.HasSuffix(f.Usage, ".") || unicode.IsUpper(u[0]) && !unicode.IsUpper(u[min(1, len(u)-1)]) {
					t.Errorf("usage of --%s = %q, want a lower-case letter at its beginning and no full stop", f.Name, f.Usage)
				}
				if value, _ := pflag.UnquoteUsage(f); f.NoOptDefVal == "" && value == "string" {
					t.Errorf("usage of --%s = %q, want a name for its value in `backquotes`", f.Name, f.Usage)
				}
			})
			out.Reset()
			root.SetArgs(append(strings.Fields(cmd.CommandPath())[1:], "--help"))
			if err := root.ExecuteContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{"Usage:", "Examples:", cmd.Example} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("--help prints %q, want %q in it", out.String(), want)
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
			t.Errorf("%s has no completion for %s, want one", cmd.CommandPath(), args)
		}
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if _, ok := cmd.GetFlagCompletionFunc(f.Name); !ok && f.NoOptDefVal == "" && f.Name != "help" {
				t.Errorf("%s has no completion for --%s, want one", cmd.CommandPath(), f.Name)
			}
		})
	}
	// A value in this table that no flag uses was meant for a flag.
	used := map[string]bool{}
	for _, cmd := range visible(root) {
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) { used[f.Name] = true })
	}
	for name := range complete.FlagValues((&app.App{})) {
		if !used[name] {
			t.Errorf("flagValues() contains --%s, want only flags of a command", name)
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
		t.Errorf("%d examples were found, want at least 80", n)
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
				t.Errorf("%s: hint %s: %v", path, text.Value, err)
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
		t.Errorf("%d hints were found, want at least 40", n)
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
			t.Errorf("%s: agent-sessionizer %s: error %v, want nil", where, part, err)
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
	if diff := cmp.Diff(want, exitCodes(), cmp.AllowUnexported(entry{})); diff != "" {
		t.Errorf("exit codes of the help, compared with docs/architecture.md, mismatch (-want +got):\n%s", diff)
	}
	for _, e := range exitCodes() {
		if strings.Contains(e.text, "reserved") {
			t.Errorf("text of exit code %s = %q, want it without %q: commands return it", e.name, e.text, "reserved")
		}
	}
	all := lines(environment())
	for _, v := range config.Variables() {
		if !strings.Contains(all, v.Name) || !strings.Contains(all, v.Key) {
			t.Errorf("help environment = %q, want %s and %s in it", all, v.Name, v.Key)
		}
	}
	conf, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range environment() {
		for _, name := range strings.Split(e.name, ", ") {
			if short := strings.TrimPrefix(name, "AGENT_SESSIONIZER"); !strings.Contains(string(conf), "`"+name+"`") && !strings.Contains(string(conf), "`"+short+"`") {
				t.Errorf("docs/configuration.md lacks %s, want every variable of the help", name)
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
		t.Fatalf("%d pages, %v, want %d, one for each command", len(pages), err, len(visible(root)))
	}
	main, err := os.ReadFile(filepath.Join(dir, "agent-sessionizer.1"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{".SH EXIT STATUS", ".SH FILES", ".SH ENVIRONMENT", ".SH EXAMPLES", `agent\-sessionizer\-net`} {
		if !strings.Contains(string(main), want) {
			t.Errorf("agent-sessionizer.1 lacks %q:\n%.2000s", want, main)
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
			t.Errorf("%v: %v, output %.2000q, want none", reader, err, out)
		}
	}
	if read == 0 {
		t.Error("neither mandoc nor groff is installed, want one of them; run: make setup")
	}
}

func TestRoff(t *testing.T) {
	var p page
	p.text(".hidden -x \\n \"q\" …")
	p.text("'quoted")
	if got, want := p.String(), "\\&.hidden \\-x \\en \\(dqq\\(dq \\[u2026]\n\\&'quoted\n"; got != want {
		t.Errorf("page = %q, want %q", got, want)
	}
}
