package screen

import (
	"archive/zip"
	"bytes"
	"flag"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/chroma/v2"
	full "github.com/alecthomas/chroma/v2/lexers"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write languages.zip")

// inArchive has the languages of languages.zip.
var inArchive = []string{
	"Bash", "C", "C#", "C++", "Clojure", "CMake", "CSS", "Dart", "Diff", "Docker", "Elixir", "Erlang", "Go", "GraphQL", "Groovy", "Haskell", "HCL",
	"HTML", "INI", "Java", "JavaScript", "JSON", "Kotlin", "Lua", "Makefile", "Nix", "OCaml", "Perl", "PHP", "PowerShell", "Protocol Buffer",
	"Python", "R", "react", "Ruby", "Rust", "Scala", "SCSS", "SQL", "Swift", "Terraform", "TOML", "TypeScript", "vue", "XML", "YAML", "Zig",
}

// The archive has what the version of chroma in go.mod has.
func TestLanguages(t *testing.T) {
	want := map[string]string{}
	for _, name := range inArchive {
		l, ok := full.Get(name).(*chroma.RegexLexer)
		if !ok || l.Config().Name != name {
			t.Fatalf("lexer of %s = %T, want a RegexLexer of this name", name, full.Get(name))
		}
		text, err := marshal(l)
		if err != nil {
			t.Fatalf("marshal %s: %v", name, err)
		}
		want[strings.ToLower(name)+".xml"] = string(text)
	}
	if *update {
		writeLanguages(t, want)
		return
	}
	got := map[string]string{}
	archive, err := zip.NewReader(bytes.NewReader(languages), int64(len(languages)))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range archive.File {
		text, err := fs.ReadFile(archive, f.Name)
		if err != nil {
			t.Fatal(err)
		}
		got[f.Name] = string(text)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("languages.zip is outdated (go generate ./pkg/review/screen):\n%.2000s", diff)
	}
}

// marshal returns the definition of a language. In Go, chroma takes a raw string for a template, which
// a definition cannot express; here it is a string.
func marshal(l *chroma.RegexLexer) ([]byte, error) {
	rules, err := l.Rules()
	if err != nil {
		return nil, err
	}
	if l.Config().Name == "Go" {
		rules = rules.Clone()
		for i, r := range rules["root"] {
			if strings.HasPrefix(r.Pattern, "(`)") {
				rules["root"][i].Type = chroma.LiteralString
			}
		}
	}
	plain, err := chroma.NewLexer(l.Config(), func() chroma.Rules { return rules })
	if err != nil {
		return nil, err
	}
	text, err := chroma.Marshal(plain)
	if err != nil {
		return nil, err
	}
	// chroma writes the states in a random order.
	const state = "    <state "
	parts := strings.Split(strings.TrimSuffix(string(text), "  </rules>\n</lexer>"), state)
	slices.Sort(parts[1:])
	return []byte(strings.Join(parts, state) + "  </rules>\n</lexer>"), nil
}

func writeLanguages(t *testing.T, files map[string]string) {
	t.Helper()
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, name := range names {
		f, err := w.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write([]byte(files[name])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("languages.zip", b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Each language colours a text, and as the complete library does.
func TestColoursOfLanguages(t *testing.T) {
	const text = "import \"x\" // comment\n# comment\nif (a == 'b') { return 12; }\n<a href=\"c\">d</a><script>let x = 1</script><style>a { b: c }</style>\nclass X: def f(): pass\n"
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	for _, name := range inArchive {
		l := lexers().Get(name)
		if l == nil || l.Config().Name != name {
			t.Errorf("lexer of %s is missing", name)
			continue
		}
		tokens := func(l chroma.Lexer) string {
			next, err := chroma.Coalesce(l).Tokenise(nil, text)
			if err != nil {
				t.Fatalf("tokenise %s: %v", name, err)
			}
			var all []string
			for _, token := range next.Tokens() {
				all = append(all, token.String())
			}
			return strings.Join(all, "\n")
		}
		if diff := cmp.Diff(tokens(full.Get(name)), tokens(l)); diff != "" {
			t.Errorf("%s differs from the library:\n%.500s", name, diff)
		}
		if c := colourerOf(t, l); c.colours(lines) == nil {
			t.Errorf("%s colours nothing", name)
		}
	}
}
