package sessionizer_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// avoided lists words and phrases that the project's texts do not use, each with what to
// write instead. They made the texts sound translated.
var avoided = []struct{ words, instead string }{
	{`anew`, `"again"`},
	{`who(m)?ever`, "the name of the user or the process"},
	{`somebody|someone|nobody`, "the name of the user or the process"},
	{`is there`, `"exists", or "is present"`},
	{`sees? to`, `"handles", or "ensures"`},
	{`in vain`, `"without success"`},
	{`as ever`, `"as before"`},
	{`unless told`, `"(default X)"`},
	{`(brought|brings?|comes?|came) home`, `"collect", or "fetch"`},
	{`stands?|stood`, `"is running", "is active", or "is"`},
	{`told|said`, `"reported", or "logged"`},
	{`wanted`, `"expected", or "requested"`},
	{`by (itself|themselves)`, `"automatically"`},
	{`is no [a-z]+`, `"is not a"`},
	{`[,;:] else`, `"otherwise"`},
}

// idioms matches correct uses of these words.
var idioms = regexp.MustCompile(`(?i)\bstands?\s+for\b|\bstand-ins?\b|\bthere\s+is\s+no\b|\bis\s+no\s+longer\b`)

// TestTextsAvoidWords checks the comments of all Go files and scripts, the documentation,
// and the texts of commands.
func TestTextsAvoidWords(t *testing.T) {
	patterns := make([]*regexp.Regexp, len(avoided))
	for i, a := range avoided {
		patterns[i] = regexp.MustCompile(`(?i)\b(?:` + strings.ReplaceAll(a.words, " ", `\s+`) + `)\b`)
	}
	checked := 0
	for _, name := range sourceFiles(t) {
		texts, err := textsOf(name)
		if err != nil {
			t.Error(err)
		}
		checked += len(texts)
		for _, p := range texts {
			text := idioms.ReplaceAllStringFunc(p.text, func(idiom string) string { return strings.Repeat("\n", strings.Count(idiom, "\n")) })
			for i, pattern := range patterns {
				for _, at := range pattern.FindAllStringIndex(text, -1) {
					line := p.line + strings.Count(text[:at[0]], "\n")
					t.Errorf("%s:%d: got %q, want %s", name, line, text[at[0]:at[1]], avoided[i].instead)
				}
			}
		}
	}
	if checked < 10_000 {
		t.Errorf("checked %d texts, want at least 10000", checked)
	}
}

// TestFunctionCommentsStartWithVerb checks that a function's comment starts with its name
// and a verb in the third person: "Run starts …". The comment of a test may have any other
// form, if it does not start with the name.
func TestFunctionCommentsStartWithVerb(t *testing.T) {
	checked := 0
	for _, name := range sourceFiles(t) {
		if filepath.Ext(name) != ".go" {
			continue
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, name, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Doc == nil || f.Name.Name == "init" {
				continue
			}
			comment := strings.TrimSpace(f.Doc.Text())
			rest, named := strings.CutPrefix(comment, f.Name.Name+" ")
			if comment == "" || !named && strings.HasSuffix(name, "_test.go") {
				continue
			}
			checked++
			if !named || !startsWithVerb(rest) {
				line, _, _ := strings.Cut(comment, "\n")
				t.Errorf("%s: comment of %s: got %q, want its name and a verb", files.Position(f.Doc.Pos()), f.Name.Name, line)
			}
		}
	}
	if checked < 1000 {
		t.Errorf("checked %d comments, want at least 1000", checked)
	}
}

// startsWithVerb reports whether a text starts with a verb in the third person, perhaps
// after an adverb. Of "is", it allows only "is like".
func startsWithVerb(text string) bool {
	words := strings.Fields(text)
	for len(words) > 1 && (words[0] == "also" || words[0] == "first" || words[0] == "only") {
		words = words[1:]
	}
	if len(words) < 2 {
		return false
	}
	switch verb := strings.TrimRight(words[0], ",:;."); verb {
	case "is":
		return words[1] == "like"
	case "was":
		return false
	default:
		return strings.HasSuffix(verb, "s")
	}
}

// sourceFiles returns the names of all files of the repository, except test data other than
// scripts, third-party code, and this file.
func sourceFiles(t *testing.T) (names []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "git", "ls-files", "-co", "--exclude-standard").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.Lines(string(out)) {
		name = strings.TrimSuffix(name, "\n")
		testdata := strings.Contains(name, "/testdata/") && filepath.Ext(name) != ".txtar"
		if testdata || strings.Contains(name, "third_party/") || name == "language_test.go" {
			continue
		}
		if _, err := os.Lstat(name); err == nil { // a removed file is listed until it leaves the index
			names = append(names, name)
		}
	}
	return names
}

// passage is a text that people read. Its first line is a line of its file.
type passage struct {
	line int
	text string
}

// textsOf returns the comments of a program, or the text of a document. It returns nothing
// for other files.
func textsOf(name string) (all []passage, err error) {
	switch ext := filepath.Ext(name); {
	case ext == ".go":
		return goTexts(name)
	case ext == ".md":
		fenced := false
		return filterLines(name, func(line string) string {
			if strings.HasPrefix(strings.TrimSpace(line), "```") {
				fenced = !fenced
			}
			if fenced || strings.HasPrefix(line, "    ") {
				return ""
			}
			return line
		})
	case ext == ".sh", ext == ".txtar", ext == ".yaml", ext == ".yml", ext == ".txt", ext == ".env", name == "Makefile":
		return filterLines(name, func(line string) string {
			_, comment, _ := strings.Cut(line, "# ")
			return comment
		})
	}
	return nil, nil
}

// filterLines returns a file as one passage, in which text replaces each line.
func filterLines(name string, text func(line string) string) ([]passage, error) {
	content, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read source file: %w", err)
	}
	lines := strings.Split(string(content), "\n")
	for i, line := range lines {
		lines[i] = text(line)
	}
	return []passage{{1, strings.Join(lines, "\n")}}, nil
}

// goTexts returns the comments of a Go file without the names that they start with, and its
// strings of several words, such as help and messages. In tests, strings of less than four
// words count as data.
func goTexts(name string) (all []passage, err error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("parse source file: %w", err)
	}
	spaces := 1
	if strings.HasSuffix(name, "_test.go") {
		spaces = 3
	}
	names := map[*ast.CommentGroup]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			names[n.Doc] = n.Name.Name
		case *ast.BasicLit:
			if n.Kind == token.STRING && strings.Count(n.Value, " ") >= spaces {
				text := n.Value
				if text[0] == '"' {
					text = strings.NewReplacer(`\n`, " ", `\t`, " ").Replace(text)
				}
				all = append(all, passage{files.Position(n.Pos()).Line, text})
			}
		}
		return true
	})
	for _, group := range file.Comments {
		var text strings.Builder
		for _, c := range group.List {
			if !strings.HasPrefix(c.Text, "//go:") {
				text.WriteString(strings.TrimPrefix(c.Text, "//"))
			}
			text.WriteByte('\n')
		}
		all = append(all, passage{files.Position(group.Pos()).Line, strings.TrimPrefix(text.String(), " "+names[group])})
	}
	return all, nil
}
