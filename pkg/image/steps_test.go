package image

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// step is one provision script and the hash that its stamp in the guest holds after it
// ran.
type step struct {
	Name string // such as "20-docker"
	Hash string // hex SHA-256
}

var stepFile = regexp.MustCompile(`^[0-9][0-9]-[a-z0-9-]+\.sh$`)

// listSteps lists the provision scripts of fsys, whose root is provision/, in the order in
// which they run. The hash is the one that provision/run.sh computes: SHA-256 over the
// lines "SHA256  PATH" of the script, lib.sh, versions.env and everything in files/,
// sorted by path.
func listSteps(fsys fs.FS) ([]step, error) {
	entries, err := fs.ReadDir(fsys, ".")
	if err != nil {
		return nil, fmt.Errorf("list provision steps: %w", err)
	}
	shared := []string{"lib.sh", "versions.env"}
	err = fs.WalkDir(fsys, "files", func(p string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			shared = append(shared, p)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list provision files: %w", err)
	}
	var steps []step
	for _, e := range entries {
		if !stepFile.MatchString(e.Name()) {
			continue
		}
		h, err := hashFiles(fsys, append([]string{e.Name()}, shared...))
		if err != nil {
			return nil, err
		}
		steps = append(steps, step{Name: strings.TrimSuffix(e.Name(), ".sh"), Hash: h})
	}
	if len(steps) == 0 {
		return nil, fmt.Errorf("no provision steps (NN-name.sh) found")
	}
	return steps, nil
}

func TestStepsHashWhatTheyRunWith(t *testing.T) {
	base := fstest.MapFS{
		"10-a.sh":       {Data: []byte("a")},
		"20-b.sh":       {Data: []byte("b")},
		"run.sh":        {Data: []byte("runner")},
		"lib.sh":        {Data: []byte("lib")},
		"versions.env":  {Data: []byte("V=1")},
		"files/.zshrc":  {Data: []byte("z")},
		"files/.c/conf": {Data: []byte("c")},
	}
	steps := func(edit map[string]string) []step {
		fsys := fstest.MapFS{}
		for k, v := range base {
			fsys[k] = v
		}
		for k, v := range edit {
			fsys[k] = &fstest.MapFile{Data: []byte(v)}
		}
		s, err := listSteps(fsys)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := steps(nil)
	if len(before) != 2 || before[0].Name != "10-a" || before[1].Name != "20-b" || before[0].Hash == before[1].Hash {
		t.Fatalf("steps = %+v, want 10-a and 20-b with different hashes", before)
	}
	for _, c := range []struct {
		file    string
		changes [2]bool
	}{
		{"10-a.sh", [2]bool{true, false}},
		{"lib.sh", [2]bool{true, true}},
		{"versions.env", [2]bool{true, true}},
		{"files/.c/conf", [2]bool{true, true}},
		{"files/new", [2]bool{true, true}},
		{"run.sh", [2]bool{false, false}},
	} {
		after := steps(map[string]string{c.file: "changed"})
		for n := range after {
			if (after[n].Hash != before[n].Hash) != c.changes[n] {
				t.Errorf("%s changed: hash of %s changed = %t, want %t", c.file, after[n].Name, !c.changes[n], c.changes[n])
			}
		}
	}
	if _, err := listSteps(fstest.MapFS{"lib.sh": {}, "versions.env": {}, "files/x": {}}); err == nil {
		t.Error("Steps without a step = nil, want an error")
	}
}

// TestRunnerAgreesWithSteps checks that the runner in the guest agrees with the host
// about hashes, skips completed steps, stops at a failed step, and leaves no stamp for
// a step that does not apply.
func TestRunnerAgreesWithSteps(t *testing.T) {
	dir, stamps := t.TempDir(), t.TempDir()
	if err := os.CopyFS(dir, provision(t)); err != nil {
		t.Fatal(err)
	}
	scripts, _ := filepath.Glob(filepath.Join(dir, "[0-9][0-9]-*.sh"))
	for _, s := range scripts {
		if err := os.Remove(s); err != nil {
			t.Fatal(err)
		}
	}
	write := func(name, body string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) (string, error) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "bash", append([]string{filepath.Join(dir, "run.sh")}, args...)...)
		cmd.Env = append(os.Environ(), "PROVISION_STAMPS="+stamps, "PROVISION_LOG="+filepath.Join(stamps, "log"))
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	write("10-ok.sh", "echo working\n")
	write("20-later.sh", "echo not now; exit 100\n")
	write("30-bad.sh", "echo details >>\"$PROVISION_LOG\"; exit 3\n")
	write("40-after.sh", "echo after\n")

	out, err := run()
	for _, want := range []string{"step 10-ok start 0", "working", "step 10-ok done ", "step 20-later skip ", "details", "step 30-bad failed "} {
		if !strings.Contains(out, want) {
			t.Errorf("first run = %s, want %q in it", out, want)
		}
	}
	if err == nil || strings.Contains(out, "40-after") {
		t.Errorf("first run = %v, output %s, want it to end at the failure", err, out)
	}
	write("30-bad.sh", "exit 0\n")
	if out, err = run(); err != nil || !strings.Contains(out, "step 10-ok skip 0\n") || !strings.Contains(out, "step 40-after done ") {
		t.Errorf("second run = %v, output %s, want 10-ok skipped, 40-after done", err, out)
	}
	if out, err = run("20-later", "40-after"); err != nil || strings.Contains(out, "10-ok") || !strings.Contains(out, "step 40-after skip 0\n") {
		t.Errorf("run of selected steps = %v, output %s, want 40-after skipped, no 10-ok", err, out)
	}

	steps, err := listSteps(os.DirFS(dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range steps {
		stamp, err := os.ReadFile(filepath.Join(stamps, s.Name))
		if s.Name == "20-later" {
			if err == nil {
				t.Errorf("stamp of a step that does not apply = %q, want none", stamp)
			}
			continue
		}
		if strings.TrimSpace(string(stamp)) != s.Hash {
			t.Errorf("stamp of %s = %q, want %s", s.Name, stamp, s.Hash)
		}
	}
	write("files/.zshrc", "changed\n")
	if out, err = run("10-ok"); err != nil || !strings.Contains(out, "step 10-ok done ") {
		t.Errorf("run with a changed dotfile = %v, output %s, want 10-ok done", err, out)
	}
}

func TestShippedStepsAreInOrder(t *testing.T) {
	steps, err := listSteps(provision(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(steps) < 8 || !slices.IsSortedFunc(steps, func(a, b step) int { return strings.Compare(a.Name, b.Name) }) {
		t.Fatalf("steps = %+v, want at least 8, in order", steps)
	}
}

// runStep runs a provision step with the real lib.sh, which more overrides so that
// nothing of the host changes, and returns what the step prints.
func runStep(t *testing.T, step, more string, env ...string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	lib, err := os.ReadFile("../../provision/lib.sh")
	if err != nil {
		t.Fatal(err)
	}
	more = "apt_update() { :; }; apt_install() { :; }; put() { cat >/dev/null; }; unit() { :; }; systemctl() { :; }\n" + more
	for name, text := range map[string]string{"lib.sh": string(lib) + more, "versions.env": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("bash", "../../provision/"+step)
	cmd.Env = append(append(os.Environ(), "PROVISION_DIR="+dir, "PROVISION_LOG="+filepath.Join(dir, "log"), "TMPDIR="+dir), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// apt pads a version to ten characters in what madison prints.
func TestDockerStepReadsTheVersionOfCompose(t *testing.T) {
	for _, c := range []struct {
		version string
		old     bool
	}{{"  1.29.2-3", true}, {"  2.26.1-4", false}, {"2.26.1-4+deb13u1", false}, {"12.0.0-1", true}} {
		out, err := runStep(t, "20-docker.sh", `apt_has() { [ "$1" = docker-cli ]; }; apt-cache() { echo "$MADISON"; }`,
			"MADISON=docker-compose | "+c.version+" | http://deb.example/debian main")
		if err != nil {
			t.Fatalf("docker step = %v, want nil\n%s", err, out)
		}
		if got := strings.Contains(out, "no compose v2"); got != c.old {
			t.Errorf("version %q: noted as old: %v, want %v\n%s", c.version, got, c.old, out)
		}
	}
}

func TestToolsStepComparesTheDigestOfLazygit(t *testing.T) {
	archive := filepath.Join(t.TempDir(), "lazygit.tar.gz")
	program := filepath.Join(filepath.Dir(archive), "lazygit")
	if err := os.WriteFile(program, []byte("lazygit"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("tar", "-C", filepath.Dir(program), "-czf", archive, "lazygit").CombinedOutput(); err != nil {
		t.Fatalf("tar -czf %s = %v, want nil\n%s", archive, err, out)
	}
	packed, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	digest := fmt.Sprintf("%x", sha256.Sum256(packed))
	for _, c := range []struct {
		digest    string
		installed bool
	}{{digest, true}, {strings.Repeat("0", 64), false}} {
		out, err := runStep(t, "40-tools.sh", `apt_has() { return 1; }; uname() { echo x86_64; }
			curl() { while [ "$1" != -o ]; do shift; done; cp "$ARCHIVE" "$2"; }
			install() { echo "installed $(cat "$3") as $4"; }`,
			"ARCHIVE="+archive, "LAZYGIT_VERSION=0.0.0-test", "LAZYGIT_SHA256_X86_64="+c.digest)
		if got := strings.Contains(out, "installed lazygit as /usr/local/bin/lazygit"); got != c.installed || (err == nil) != c.installed {
			t.Errorf("digest %s: installed: %v, %v, want %v\n%s", c.digest, got, err, c.installed, out)
		}
	}
}
