package sessionizer_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// place is a function, method or type in a walk of docs/architecture.md.
var place = regexp.MustCompile("`([a-z]+)\\.([A-Za-z]+)(?:\\.([A-Za-z]+))?`")

// TestWalksNamePlaces checks that the places in the walks of docs/architecture.md exist.
func TestWalksNamePlaces(t *testing.T) {
	text, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, walks, _ := strings.Cut(string(text), "## Three walks")
	walks, _, _ = strings.Cut(walks, "\n## ")
	exist := placesIn(t, "pkg")
	places := place.FindAllStringSubmatch(walks, -1)
	for _, p := range places {
		if name := strings.Trim(p[0], "`"); !exist[name] {
			t.Errorf("docs/architecture.md names %s, which does not exist", name)
		}
	}
	if len(places) < 30 {
		t.Errorf("found %d places in the walks, want at least 30", len(places))
	}
}

// placesIn returns what the packages below dir declare: package.Name and package.Type.Method.
func placesIn(t *testing.T, dir string) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range f.Decls {
			for _, name := range declared(d) {
				all[f.Name.Name+"."+name] = true
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func declared(d ast.Decl) (names []string) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil {
			return []string{d.Name.Name}
		}
		of := d.Recv.List[0].Type
		if star, ok := of.(*ast.StarExpr); ok {
			of = star.X
		}
		if generic, ok := of.(*ast.IndexListExpr); ok {
			of = generic.X
		}
		if id, ok := of.(*ast.Ident); ok {
			names = []string{id.Name + "." + d.Name.Name}
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				names = append(names, s.Name.Name)
			case *ast.ValueSpec:
				for _, id := range s.Names {
					names = append(names, id.Name)
				}
			}
		}
	}
	return names
}
