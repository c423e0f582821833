package release_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/release"
)

var update = flag.Bool("update", false, "write notices.txt.gz")

// notice is the licence of one module or package.
type notice struct {
	name  string
	texts []string
}

// legalFile matches the names of files that must be passed on with a program.
var legalFile = regexp.MustCompile(`(?i)^(licen[sc]e|copying|notice|unlicense|patents)([.-].*)?$`)

// TestNoticesAreCurrent compares the embedded licences with those of the modules in the module
// cache. With -update it writes them.
func TestNoticesAreCurrent(t *testing.T) {
	root := filepath.Join("..", "..")
	want := renderNotices(t, root, append(moduleNotices(t, root), pageNotices(t, root)...))
	if *update {
		var b bytes.Buffer
		w, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(want)); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("notices.txt.gz", b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Logf("%d bytes, compressed to %d", len(want), b.Len())
		return
	}
	got, err := release.Notices()
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("notices.txt.gz is not current; run: make notices\n%s", cmp.Diff(strings.Split(got, "\n"), strings.Split(want, "\n")))
	}
}

// moduleNotices returns the notices of all modules in the binaries of all platforms, and of Go.
func moduleNotices(t *testing.T, root string) []notice {
	t.Helper()
	dirs := map[string]string{} // by module
	for _, platform := range []struct{ os, arch, cgo string }{{"linux", "amd64", "0"}, {"linux", "arm64", "0"}, {"darwin", "arm64", "1"}, {"darwin", "amd64", "1"}} {
		cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}\t{{with .Replace}}{{.Path}}{{else}}{{.Version}}{{end}}\t{{.Dir}}{{end}}{{end}}", "./cmd/agent-sessionizer", "./cmd/agent-guest")
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "GOOS="+platform.os, "GOARCH="+platform.arch, "CGO_ENABLED="+platform.cgo, "GOFLAGS=")
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("list modules for %s/%s: %v", platform.os, platform.arch, err)
		}
		for line := range strings.Lines(string(out)) {
			if path, rest, ok := strings.Cut(strings.TrimSpace(line), "\t"); ok {
				version, dir, _ := strings.Cut(rest, "\t")
				dirs[path+" "+version] = dir
			}
		}
	}
	var notices []notice
	for _, name := range slices.Sorted(maps.Keys(dirs)) {
		texts := legalTexts(t, dirs[name])
		if strings.HasPrefix(name, "golang.org/x/crypto ") {
			notices = append(notices, notice{"Go", texts}) // the same, and a distribution's Go may come without
		}
		notices = append(notices, notice{name, texts})
	}
	return notices
}

// pageNotices returns the notices of the npm packages that the dashboard's pages contain, which
// make web has installed.
func pageNotices(t *testing.T, root string) (notices []notice) {
	t.Helper()
	web := filepath.Join(root, "pkg", "dashboard", "web")
	text, err := os.ReadFile(filepath.Join(web, "package.json"))
	if err != nil {
		t.Fatal(err)
	}
	var page struct {
		DevDependencies map[string]string `json:"devDependencies"`
	}
	if err := json.Unmarshal(text, &page); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"@xterm/addon-fit", "@xterm/xterm", "uplot"} {
		dir := filepath.Join(web, "node_modules", filepath.FromSlash(name))
		if _, err := os.Stat(dir); err != nil {
			t.Fatalf("package %s is not installed; run: npm ci --ignore-scripts --prefix pkg/dashboard/web", name)
		}
		notices = append(notices, notice{name + " " + page.DevDependencies[name], legalTexts(t, dir)})
	}
	return notices
}

// legalTexts returns the texts of the licence files in dir and in what was copied into it.
func legalTexts(t *testing.T, dir string) (texts []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != dir && (name == "testdata" || name == "src" || name == "node_modules" || strings.HasPrefix(name, ".")) {
				return fs.SkipDir
			}
			return nil
		}
		if !legalFile.MatchString(d.Name()) || strings.HasSuffix(d.Name(), ".go") || !d.Type().IsRegular() {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		clean := trimLines(string(text))
		if clean != "" && !slices.Contains(texts, clean) {
			texts = append(texts, clean)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return texts
}

func trimLines(text string) string {
	lines := strings.Split(strings.ReplaceAll(strings.TrimPrefix(text, "\ufeff"), "\r\n", "\n"), "\n")
	for i, line := range lines {
		lines[i] = strings.TrimRight(line, " \t\f")
	}
	return strings.Trim(strings.Join(lines, "\n"), "\n")
}

// renderNotices writes each text once, after the names of all that have it.
func renderNotices(t *testing.T, root string, notices []notice) string {
	t.Helper()
	program, err := os.ReadFile(filepath.Join(root, "LICENSE"))
	if err != nil {
		t.Fatal(err)
	}
	names := map[string][]string{} // by text
	for _, n := range notices {
		if len(n.texts) == 0 {
			t.Errorf("licence of %s is missing", n.name)
		}
		for _, text := range n.texts {
			names[text] = append(names[text], n.name)
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "agent-sessionizer is under the licence that follows. It contains other software, whose licences\nfollow after it.\n\n%s\n", trimLines(string(program)))
	// Similar texts are next to each other, because they compress better.
	for _, text := range slices.Sorted(maps.Keys(names)) {
		fmt.Fprintf(&b, "\n%s\n\n", strings.Repeat("=", 80))
		for _, name := range names[text] {
			fmt.Fprintf(&b, "%s\n", name)
		}
		fmt.Fprintf(&b, "\n%s\n", text)
	}
	return b.String()
}
