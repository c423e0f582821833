package cli

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// TestOnlyTheConsoleWritesToTheStandardStreams checks that commands print through the
// console, which filters output to a terminal. Only three uses may access the standard
// streams directly: child processes, attach and replay, which have their own filters, and pipes between
// processes of this program.
func TestOnlyTheConsoleWritesToTheStandardStreams(t *testing.T) {
	allowed := []string{
		"main.go:Main",                                            // passes them to the console
		"app/terminal.go:Interactive", "app/terminal.go:Transfer", // check whether they are terminals
		"sessioncmd/play.go:playOnTerminal",                                                  // has a filter of its own
		"sessioncmd/run.go:Terminal",                                                         // attach.Run filters
		"app/editor.go:Edit", "internal_commands.go:runPrepare", "sessioncmd/open.go:runJob", // child processes of this host
		"sessioncmd/pull.go:showScreen", "sessioncmd/pull.go:openTool", // the screen cleans what it draws; a merge tool is a child process
		"internal_commands.go:newHiddenCmds", // resolve-secrets answers on a pipe
	}
	files := token.NewFileSet()
	var used []string
	err := filepath.WalkDir(".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(files, name, nil, 0)
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			ast.Inspect(decl, func(n ast.Node) bool {
				where := ""
				if sel, ok := n.(*ast.SelectorExpr); ok {
					x, _ := sel.X.(*ast.Ident)
					if x != nil && (x.Name == "os" && (sel.Sel.Name == "Stdout" || sel.Sel.Name == "Stderr") || x.Name == "fmt" && strings.HasPrefix(sel.Sel.Name, "Print")) {
						where = fmt.Sprintf("%s:%s", name, nameOf(decl))
					}
				}
				if where != "" && !slices.Contains(used, where) {
					used = append(used, where)
				}
				return true
			})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(used)
	slices.Sort(allowed)
	for _, where := range used {
		if !slices.Contains(allowed, where) {
			t.Errorf("%s writes to a standard stream, want it to use the console's Out or Err, which are filtered", where)
		}
	}
	for _, where := range allowed {
		if !slices.Contains(used, where) {
			t.Errorf("%s does not use the standard streams, want only those that do in the list of exceptions", where)
		}
	}
}

func nameOf(decl ast.Decl) string {
	if f, ok := decl.(*ast.FuncDecl); ok {
		return f.Name.Name
	}
	return "(top level)"
}

// TestEveryCommandMeetsAHostileGuest checks that the table of
// TestCommandsOnATerminalWithAHostileGuest in test/script covers all commands. That test
// runs each command on a terminal with a hostile guest.
func TestEveryCommandMeetsAHostileGuest(t *testing.T) {
	table, err := os.ReadFile("../../test/script/testdata/hostile/commands")
	if err != nil {
		t.Fatal(err)
	}
	root, _ := testRoot(t)
	root.InitDefaultHelpCmd()
	met := map[string]bool{}
	for line := range strings.Lines(string(table)) {
		verb, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if verb == "" || verb == "#" {
			continue
		}
		words := strings.Fields(rest)
		if verb == "skip" {
			name, reason, _ := strings.Cut(rest, ":")
			if words = strings.Fields(name); reason == "" {
				t.Errorf("line %q gives no reason, want one after a colon", line)
			}
		}
		cmd, args, err := root.Find(words)
		if err != nil || verb == "skip" && len(args) > 0 {
			t.Errorf("line %q names no command: %v, arguments %q, want an existing command", line, err, args)
			continue
		}
		met[cmd.CommandPath()] = true
	}
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		if !met[cmd.CommandPath()] {
			t.Errorf("the table lacks %s, want a line for every command", cmd.CommandPath())
		}
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(root)
}
