package sessionizer_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestRegularExpressionsAreLazy fails if a package of the program compiles a regular
// expression before main. Such a variable must be a lazyregexp.Regexp.
func TestRegularExpressionsAreLazy(t *testing.T) {
	checked := 0
	for _, name := range sourceFiles(t) {
		dir, _, _ := strings.Cut(name, "/")
		ofProgram := dir == "pkg" || dir == "cmd" || dir == name
		if filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") || !ofProgram {
			continue
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			continue
		}
		checked++
		for _, at := range compiledBeforeMain(file) {
			t.Errorf("%s: a package-level variable compiles a regular expression, want lazyregexp.New", files.Position(at))
		}
	}
	if checked < 400 {
		t.Errorf("checked %d files, want at least 400", checked)
	}
}

func TestCompiledBeforeMain(t *testing.T) {
	for declaration, want := range map[string]int{
		"var a = regexp.MustCompile(`a`)":                                           1,
		"var ( a = 1; b, c = regexp.MustCompilePOSIX(`a`), regexp.MustCompile(``))": 2,
		"var a = map[string]*regexp.Regexp{`a`: regexp.MustCompile(`a`)}":           1,
		"var a = with(regexp.MustCompile)":                                          1,
		"var a = func() any { return regexp.MustCompile(`a`) }()":                   1,
		"var a = sync.OnceValue(func() any { return regexp.MustCompile(`a`) })":     0,
		"func init() { a = regexp.MustCompile(`a`) }":                               1,
		"func f() { a = regexp.MustCompile(`a`) }":                                  0,
		"var a *regexp.Regexp; var b = regexp.QuoteMeta(`a`)":                       0,
	} {
		file, err := parser.ParseFile(token.NewFileSet(), "", "package p\nimport \"regexp\"\n"+declaration, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		if got := compiledBeforeMain(file); len(got) != want {
			t.Errorf("%s compiles %d expressions before main, want %d", declaration, len(got), want)
		}
	}
}

// compiledBeforeMain returns where variables of the package and its init functions compile
// regular expressions. It ignores functions that are not called where they are declared.
func compiledBeforeMain(file *ast.File) (places []token.Pos) {
	name := ""
	for _, imported := range file.Imports {
		if path, _ := strconv.Unquote(imported.Path.Value); path == "regexp" {
			if name = "regexp"; imported.Name != nil {
				name = imported.Name.Name
			}
		}
	}
	for _, declared := range file.Decls {
		if f, ok := declared.(*ast.FuncDecl); name == "" || ok && (f.Recv != nil || f.Name.Name != "init") {
			continue
		}
		called := map[ast.Node]bool{}
		ast.Inspect(declared, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				called[n.Fun] = true
			case *ast.FuncLit:
				return called[n]
			case *ast.SelectorExpr:
				of, ok := n.X.(*ast.Ident)
				if compiles := strings.Contains(n.Sel.Name, "Compile"); ok && compiles && of.Name == name {
					places = append(places, n.Pos())
				}
			}
			return true
		})
	}
	return places
}
