package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestOperators checks that each operator produces its change.
func TestOperators(t *testing.T) {
	const src = `package p

import "errors"

func (s *T) f(a, b int, ok bool) (int, error) {
	defer s.close()
	if err := s.check(a); err != nil {
		return 0, err
	}
	for i := 0; i < a && ok; i++ {
		s.n = i
		continue
	}
	switch {
	case a == 0o600:
		return a, errors.New("the text of an error")
	}
	s.log("text", s.all[a:b], min(a, b), true)
	return a + b, nil
}
`
	found, err := findMutants("p.go", []byte(src))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range found {
		if m.Func != "(*T).f" || src[m.start:m.end] == m.with {
			t.Errorf("mutation %s: %q becomes %q, want a change in (*T).f", m.Key(), src[m.start:m.end], m.with)
		}
		got = append(got, strings.TrimPrefix(m.Key(), "(*T).f | ")+" → "+m.with)
	}
	want := []string{
		"drop defer | defer s.close() → if false { defer s.close() }",
		"never | err != nil → false && (err != nil)",
		"always | err != nil → true || (err != nil)",
		"skip call | s.check(a) → func() error { if false { return s.check(a) }; return nil }()",
		"return nil | err → func() error { if false { return err }; return nil }()",
		"plus one | 0 → (0 + 1)",
		"plus one | 0 | 2 → (0 + 1)",
		"drop operand | i < a → (true || (i < a))",
		"drop operand | ok → (true || (ok))",
		"boundary | i < a → <=",
		"drop assignment | s.n = i → if false { s.n = i }",
		"drop continue | continue → if false { continue }",
		"never | a == 0o600 → false && (a == 0o600)",
		"always | a == 0o600 → true || (a == 0o600)",
		"open mode | 0o600 → (0o600 | 0o066)",
		`return nil | errors.New("the text of an error") → func() error { if false { return errors.New("the text of an error") }; return nil }()`,
		`drop call | s.log("text", s.all[a:b], min(a, b), true) → if false { s.log("text", s.all[a:b], min(a, b), true) }`,
		`empty text | "text" → ""`,
		"drop bound | s.all[a:b] → ",
		"drop bound | s.all[a:b] | 2 → ",
		"bound | min(a, b) → max",
		"bool | true → false",
		"arithmetic | a + b → -",
	}
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("mutations = %q, want %s among them", got, line)
		}
	}
	if len(got) != len(want) {
		t.Errorf("mutants = %d, want %d:\n%s", len(got), len(want), strings.Join(got, "\n"))
	}
}

// TestMeasure measures a package whose tests reach one of two functions, and detect two of
// its mutants. Undetected mutants must be reported with their line, and unreached ones must
// not be tried.
func TestMeasure(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":      "module example.test\ngo 1.26\n",
		"p/p.go":      "package p\n\nfunc Over(n int) bool {\n\tif n > 10 {\n\t\treturn true\n\t}\n\treturn false\n}\n\nfunc Unreached(ok bool) bool {\n\treturn !ok || false\n}\n",
		"p/p_test.go": "package p\n\nimport \"testing\"\n\nfunc TestOver(t *testing.T) {\n\tif Over(9) || !Over(12) {\n\t\tt.Fatal()\n\t}\n}\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	measure := func(equivalent string) (bool, string, error) {
		if err := os.WriteFile("equivalent.txt", []byte(equivalent), 0o600); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		passed, err := run(t.Context(), Options{Packages: []string{"p"}, Seed: "1", Jobs: 2, Min: 0.9, Equivalent: "equivalent.txt"}, &out)
		return passed, out.String(), err
	}
	passed, out, err := measure("")
	if err != nil || passed {
		t.Fatalf("measure = %t, %v, want a share that is too low:\n%s", passed, err, out)
	}
	for _, want := range []string{
		"survived p/p.go:4\n  p Over | boundary | n > 10\n  - \tif n > 10 {\n  + \tif n >= 10 {\n",
		"survived p/p.go:4\n  p Over | plus one | 10\n  - \tif n > 10 {\n  + \tif n > (10 + 1) {\n",
		"\n        p       4        0         2      67%        0           0          3\n",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("output = %s, want %q in it", out, want)
		}
	}
	passed, out, err = measure("# why\np Over | boundary | n > 10\n\tNo caller passes ten.\np Over | plus one | 10\n\tNor for eleven.\n")
	if err != nil || !passed || strings.Contains(out, "survived p/") {
		t.Errorf("measure with explained survivors = %t, %v, want true, nil, none of p survived\n%s", passed, err, out)
	}
	for list, want := range map[string]string{
		"p Over | boundary | n > 10\n":          "has no reason",
		"p Over | boundary | n > 11\n\tGone.\n": "does not have: Over | boundary | n > 11",
	} {
		if _, _, err := measure(list); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("measure with list %q = %v, want %q", list, err, want)
		}
	}
}
