package release_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// macTools are the programs that scripts/mac-check.sh runs on a Mac, as shell scripts that succeed.
var macTools = map[string]string{
	"uname":      `case $1 in -m) echo arm64 ;; *) echo Darwin ;; esac`,
	"sw_vers":    `echo 15.5`,
	"sysctl":     `case $2 in sysctl.proc_translated) exit 1 ;; hw.memsize) echo 17179869184 ;; *) echo 1 ;; esac`,
	"ssh":        `true`,
	"ssh-keygen": `true`,
	"npm":        `true`,
	"tmux":       `echo tmux next-3.6`,
	"git":        `echo git version 2.39.5`,
	"make":       `cp "$PROGRAM" bin/agent-sessionizer`,
	"go":         `case $1 in env) echo go1.26.0 ;; version) echo 'build CGO_ENABLED=1' ;; test) printf 'ok  \ta\t1s\nok  \tb\t1s\n' ;; esac`,
	"codesign":   `case $1 in -d) [ ! -e signed ] || echo '[Key] com.apple.security.virtualization' ;; --force) touch signed ;; esac`,
	"plutil":     `grep -q plist "$2"`,
	"osacompile": `[ "$1" = -o ] && [ "$3" = -e ]`,
	"df":         `printf 'Filesystem Blocks Used Available\ndisk 1 1 9000\n'`,
	"sync":       `true`,
	"cp":         `[ "$1" != -c ] || shift; exec "$REAL_CP" "$@"`,
}

// macProgram takes the place of bin/agent-sessionizer. It refuses to run with the user's home directory.
const macProgram = `#!/bin/sh
[ "$1" = version ] || [ "$HOME" != "$REAL_HOME" ] || exit 9
case $1 in
version) echo agent-sessionizer v0 ;;
doctor) echo '✓ acceleration  vz' ;;
serve) echo '<plist/>' ;;
*) exit 2 ;;
esac
`

// runMacCheck runs the script with changed tools in a directory that looks like a clone. An empty
// text removes a tool.
func runMacCheck(t *testing.T, changed map[string]string, args ...string) (out string, code int) {
	t.Helper()
	clone := testenv.ShortDir(t)
	bin := filepath.Join(clone, "tools")
	script, err := os.ReadFile("../../scripts/mac-check.sh")
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"scripts/mac-check.sh": string(script), "program": strings.ReplaceAll(macProgram, "$REAL_HOME", os.Getenv("HOME"))}
	for name, text := range macTools {
		if other, ok := changed[name]; ok {
			text = other
		}
		if text != "" {
			files["tools/"+name] = "#!/bin/sh\n" + text + "\n"
		}
	}
	for name, text := range files {
		path := filepath.Join(clone, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"cmd", "pkg", "lima", "provision", "config", "tmp"} {
		if err := os.Mkdir(filepath.Join(clone, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	cp := ""
	for _, name := range []string{
		"awk", "bash", "cat", "cp", "cut", "dd", "dirname", "env", "find", "grep", "head", "mkdir", "mktemp", "rm", "sed", "sh", "sleep", "tail", "touch", "tr",
	} {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if name == "cp" {
			cp = path
		} else if err := os.Symlink(path, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "bash"), append([]string{"scripts/mac-check.sh"}, args...)...)
	cmd.Dir = clone
	cmd.Env = []string{
		"PATH=" + bin, "HOME=" + os.Getenv("HOME"), "TMPDIR=" + filepath.Join(clone, "tmp"), "MAC_CHECK_CLONE_MIB=1", "PROGRAM=" + filepath.Join(clone, "program"), "REAL_CP=" + cp,
	}
	text, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(clone, "tmp", "*")); err != nil || len(left) > 0 {
		t.Errorf("temporary files = %q, %v, want none", left, err)
	}
	return string(text), cmd.ProcessState.ExitCode()
}

// row matches the line of a step, with its result and name.
var row = regexp.MustCompile(`(?m)^(PASS|FAIL|SKIP) +\d+ s  (.{24}) .+$`)

// TestMacCheck runs scripts/mac-check.sh without VMs, with tools that succeed or fail. The other
// steps go on after a failure.
func TestMacCheck(t *testing.T) {
	const steps = 9
	const hang = "sleep 1000"
	for _, c := range []struct {
		name    string
		changed map[string]string
		failed  string // the steps that fail
		says    string
		args    []string
	}{
		{name: "a Mac", says: "macOS 15.5 arm64, 1 CPUs, 16 GiB"},
		{name: "signed now", says: "signed now, with com.apple.security.virtualization"},
		{name: "another system", changed: map[string]string{"uname": "echo Linux"}, failed: "system", says: "Linux is not macOS"},
		{name: "an old macOS", changed: map[string]string{"sw_vers": "echo 12.7.6"}, failed: "system", says: "older than 13"},
		{name: "Rosetta", changed: map[string]string{"sysctl": "echo 1"}, failed: "system", says: "under Rosetta"},
		{name: "no tmux", changed: map[string]string{"tmux": ""}, failed: "tools", says: "missing: tmux"},
		{name: "an old tmux", changed: map[string]string{"tmux": "echo tmux 3.1c"}, failed: "tools", says: "tmux 3.1 is older than 3.2"},
		{name: "no compiler", changed: map[string]string{"make": "echo error: cc; exit 1"}, failed: "build", says: "make build failed"},
		{name: "no cgo", changed: map[string]string{"go": "echo CGO_ENABLED=0"}, failed: "build", says: "built without cgo"},
		{name: "no codesign", changed: map[string]string{"codesign": ""}, failed: "signature", says: "vz.entitlements"},
		{name: "no entitlement", changed: map[string]string{"codesign": "true"}, failed: "signature", says: "codesign added no entitlement"},
		{
			name: "a failing test", changed: map[string]string{"go": `case $1 in version) echo CGO_ENABLED=1 ;; test) echo '--- FAIL: TestRoutes (0.01s)'; exit 1 ;; esac`},
			failed: "unit tests", says: "failed: TestRoutes",
		},
		{name: "no plutil", changed: map[string]string{"plutil": ""}, failed: "launchd agent", says: "see:   pkg/server/unit.go"},
		{name: "osacompile fails", changed: map[string]string{"osacompile": "exit 1"}, failed: "notification", says: "see:   pkg/notify/notify.go"},
		{name: "no clones", changed: map[string]string{"cp": `[ "$1" != -c ] || { echo not supported >&2; exit 1; }; exec "$REAL_CP" "$@"`}, failed: "clonefile", says: "cp -c failed: not supported"},
		{
			name: "a copy", changed: map[string]string{"df": `printf 'Filesystem\ndisk 1 1 %s\n' $([ -e asked ] && echo 5000 || echo 9000); touch asked`},
			failed: "clonefile", says: "the clone of 1 MiB took 3 MiB",
		},
		{name: "a tool that hangs", changed: map[string]string{"osacompile": hang}, failed: "notification", says: "stopped after 3 s", args: []string{"--limit", "3"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			out, code := runMacCheck(t, c.changed, append(c.args, "--quick")...)
			var failed []string
			rows := row.FindAllStringSubmatch(out, -1)
			for _, r := range rows {
				if r[1] == "FAIL" {
					failed = append(failed, strings.TrimSpace(r[2]))
				}
			}
			if strings.Join(failed, ", ") != c.failed || (code == 0) != (c.failed == "") || len(rows) != steps || !strings.Contains(out, c.says) {
				t.Errorf("mac-check: status %d, failed steps %q of %d, want %q of %d and %q\n%s", code, failed, len(rows), c.failed, steps, c.says, out)
			}
			if hints := strings.Count(out, "means: "); hints != len(failed) || strings.Count(out, "see:   ") != hints {
				t.Errorf("mac-check: %d explanations for %d failures\n%s", hints, len(failed), out)
			}
			if took := time.Since(began); took > time.Minute {
				t.Errorf("mac-check took %v, want at most %v", took, time.Minute)
			}
		})
	}
}

// TestMacCheckSkips checks that steps without a program count neither as passed nor as failed.
func TestMacCheckSkips(t *testing.T) {
	out, code := runMacCheck(t, map[string]string{"make": "exit 1"}, "--quick")
	if code != 1 || !strings.Contains(out, "\n5 passed, 1 failed, 3 skipped; ") {
		t.Errorf("mac-check without a program: status %d, want 1, with 3 steps skipped\n%s", code, out)
	}
	if out, code := runMacCheck(t, nil, "--limit", "1s"); code != 2 || !strings.Contains(out, "usage: ") {
		t.Errorf("mac-check with a wrong limit: status %d, %q, want 2 and the usage", code, out)
	}
}
