package manifest_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// parse parses a manifest that must be valid and cause no notices.
func parse(t testing.TB, text string) *manifest.Task {
	t.Helper()
	task, notices, err := manifest.Parse("task.yaml", []byte(text), "/srv/project")
	if err != nil || len(notices) > 0 {
		t.Fatalf("Parse = %v, notices %q, want neither", err, notices)
	}
	return task
}

// day is 24 hours.
const day = 24 * time.Hour

// defaults returns the meaning of the shortest manifest, with every default.
func defaults() *manifest.Task {
	return &manifest.Task{
		Version: "1", Kind: "Task",
		Repository: manifest.Repository{URL: "owner/repo"},
		Agent:      manifest.Agent{Kind: manifest.Claude, Prompt: "Do it.", MaxTurns: 100},
		VM:         manifest.VM{CPUs: 4, Memory: 8 << 30, Disk: 40 << 30},
		Subtasks:   manifest.Subtasks{Count: 1000, Depth: 1000, Running: 1000, Orphans: "cancel"},
		Lifecycle: manifest.Lifecycle{
			Timeout:          measure.Duration(day),
			StageTimeout:     measure.Duration(15 * time.Minute),
			ProvisionTimeout: measure.Duration(10 * time.Minute),
			HangTimeout:      measure.Duration(30 * time.Minute),
			HangAction:       "terminate",
			FailureAction:    "destroy",
			PreserveFor:      measure.Duration(2 * time.Hour),
			Rerun:            "if-not-started",
			SuccessCodes:     []int{0},
			MaxArtifactBytes: 4 << 30,
			CancelGrace:      measure.Duration(30 * time.Second),
			Retries:          manifest.Retries{Clone: 3, Provision: 2, Connect: measure.Duration(5 * time.Minute)},
			Hang: manifest.Hang{
				NoOutput: measure.Duration(10 * time.Minute), LowCPUPercent: 5, LowCPU: measure.Duration(15 * time.Minute),
				NoProgress: measure.Duration(20 * time.Minute),
			},
			CrashLoop: manifest.CrashLoop{
				Restarts: 5, Window: measure.Duration(10 * time.Minute), HealthyAfter: measure.Duration(time.Minute), Rebuilds: 3,
			},
		},
	}
}

func TestDefaults(t *testing.T) {
	if diff := manifest.Diff(defaults(), parse(t, minimal)); diff != "" {
		t.Errorf("Parse(minimal) mismatch (-want +got):\n%s", diff)
	}
	// An empty value is equivalent to a missing one.
	for _, more := range []string{
		"metadata: {}", "vm: {}", "secrets: []", "lifecycle: {}", "lifecycle: {retries: {}, hang: {}, crash_loop: {}, artifact_patterns: []}",
		"metadata: {labels: {}}", "# nothing", "---\n", "...",
	} {
		text := minimal + more + "\n"
		if more == "---\n" {
			text = more + minimal
		}
		if diff := manifest.Diff(defaults(), parse(t, text)); diff != "" {
			t.Errorf("Parse with %q mismatch (-want +got):\n%s", more, diff)
		}
	}
	// Each kind of agent has its own defaults.
	for text, want := range map[string]manifest.Agent{
		"agent: {kind: claude, prompt: x}":                {Kind: manifest.Claude, Prompt: "x", MaxTurns: 100},
		"agent: {kind: codex, prompt: x}":                 {Kind: manifest.Codex, Prompt: "x"},
		"agent: {kind: command, command: [a]}":            {Kind: manifest.Command, Command: []string{"a"}},
		"agent: {kind: command, command: [a], prompt: x}": {Kind: manifest.Command, Command: []string{"a"}, Prompt: "x"},
		"claude: {prompt: x}":                             {Kind: manifest.Claude, Prompt: "x", MaxTurns: 100},
	} {
		if diff := cmp.Diff(want, parse(t, unmanned+text).Agent); diff != "" {
			t.Errorf("agent of %q mismatch (-want +got):\n%s", text, diff)
		}
	}
	rules := manifest.Requests{Host: "*.example.org", Allow: []string{"GET /**"}, Deny: []string{"* /x?y=z"}}
	if diff := cmp.Diff([]manifest.Requests{rules}, parse(t, minimal+"vm: {http: [{host: \"*.example.org\", allow: [GET /**], deny: [\"* /x?y=z\"]}]}").VM.HTTP); diff != "" {
		t.Errorf("vm.http mismatch (-want +got):\n%s", diff)
	}
	// A profile defines the resources of its VMs.
	if got, want := parse(t, minimal+"vm: {profile: big, cpus: 2}").VM, (manifest.VM{Profile: "big", CPUs: 2}); !cmp.Equal(got, want) {
		t.Errorf("vm = %+v, want %+v", got, want)
	}
}

// everything is a manifest with every key.
const everything = `# a comment
version: "1"
kind: Task
metadata:
  name: Refactor authentication module
  labels:
    team: platform
    priority: high
  priority: -7
repository:
  url: https://github.com/org/repo
  branch: feature/x
  commit: abc123
  subpath: packages/auth
agent:
  kind: claude
  prompt: |
    Refactor the authentication module.

    - Use OAuth 2.0: "quotes", 'others', \ and # are fine.
  model: claude-sonnet-4-5-20250929
  max_turns: 7
  allowed_tools: [Read, Edit, mcp__docs__search]
  env:
    CI: "true"
    EMPTY: ""
vm:
  profile: agentic-dev
  cpus: 8
  memory: 16G
  disk: 1.5T
  network_mode: isolated
secrets:
  - name: ANTHROPIC_API_KEY
    source: env
    key: ANTHROPIC_API_KEY
  - {name: TOKEN, source: file, key: ~/.config/token}
  - {name: OTHER, source: op, key: op://Private/GitHub PAT/token}
  - {name: FOURTH, source: cmd, key: pass show x}
  - {name: FIFTH, source: vault, key: "work/github:token"}
  - {name: SIXTH, source: keychain, key: https://example.org/me}
  - {name: SEVENTH, source: age, key: ~/token.age}
lifecycle:
  timeout: 2d12h
  stage_timeout: 90s
  provision_timeout: 1.5h
  hang_timeout: 5m
  hang_action: restart
  failure_action: preserve
  preserve_for: 1d
  success_codes: [0, 3]
  artifact_patterns:
    - "*.patch"
    - "coverage/**/*"
  max_artifact_bytes: 512MiB
  cancel_grace: 5s
  retries: {clone: 0, provision: 1, connect: 10s}
  hang: {no_output: 1m, low_cpu_percent: 0, low_cpu: 2m, no_progress: 3m}
  crash_loop: {restarts: 0, window: 1m, healthy_after: 2s, rebuilds: 0}
`

func TestEverything(t *testing.T) {
	want := &manifest.Task{
		Version: "1", Kind: "Task",
		Metadata: manifest.Metadata{
			Name: "Refactor authentication module", Labels: map[string]string{"team": "platform", "priority": "high"}, Priority: -7,
		},
		Repository: manifest.Repository{URL: "https://github.com/org/repo", Branch: "feature/x", Commit: "abc123", Subpath: "packages/auth"},
		Agent: manifest.Agent{
			Kind: manifest.Claude, Prompt: "Refactor the authentication module.\n\n- Use OAuth 2.0: \"quotes\", 'others', \\ and # are fine.\n",
			Model: "claude-sonnet-4-5-20250929", MaxTurns: 7, AllowedTools: []string{"Read", "Edit", "mcp__docs__search"},
			Env: map[string]string{"CI": "true", "EMPTY": ""},
		},
		VM: manifest.VM{Profile: "agentic-dev", CPUs: 8, Memory: 16 << 30, Disk: 3 << 39, NetworkMode: "isolated"},
		Secrets: []manifest.Secret{
			{Name: "ANTHROPIC_API_KEY", Source: "env", Key: "ANTHROPIC_API_KEY"},
			{Name: "TOKEN", Source: "file", Key: "~/.config/token"},
			{Name: "OTHER", Source: "op", Key: "op://Private/GitHub PAT/token"},
			{Name: "FOURTH", Source: "cmd", Key: "pass show x"},
			{Name: "FIFTH", Source: "vault", Key: "work/github:token"},
			{Name: "SIXTH", Source: "keychain", Key: "https://example.org/me"},
			{Name: "SEVENTH", Source: "age", Key: "~/token.age"},
		},
		Subtasks: manifest.Subtasks{Count: 1000, Depth: 1000, Running: 1000, Orphans: "cancel"},
		Lifecycle: manifest.Lifecycle{
			Timeout: measure.Duration(60 * time.Hour), StageTimeout: measure.Duration(90 * time.Second),
			ProvisionTimeout: measure.Duration(90 * time.Minute), HangTimeout: measure.Duration(5 * time.Minute),
			HangAction: "restart", FailureAction: "preserve", PreserveFor: measure.Duration(day), SuccessCodes: []int{0, 3}, Rerun: "if-not-started",
			ArtifactPatterns: []string{"*.patch", "coverage/**/*"}, MaxArtifactBytes: 512 << 20, CancelGrace: measure.Duration(5 * time.Second),
			Retries: manifest.Retries{Clone: 0, Provision: 1, Connect: measure.Duration(10 * time.Second)},
			Hang: manifest.Hang{
				NoOutput: measure.Duration(time.Minute), LowCPU: measure.Duration(2 * time.Minute), NoProgress: measure.Duration(3 * time.Minute),
			},
			CrashLoop: manifest.CrashLoop{Window: measure.Duration(time.Minute), HealthyAfter: measure.Duration(2 * time.Second)},
		},
	}
	got := parse(t, everything)
	if diff := manifest.Diff(want, got); diff != "" {
		t.Errorf("Parse(everything) mismatch (-want +got):\n%s", diff)
	}
	var refs []string
	for _, s := range got.Secrets {
		refs = append(refs, s.Ref())
	}
	if want := []string{"env:ANTHROPIC_API_KEY", "file:~/.config/token", "op://Private/GitHub PAT/token", "cmd:pass show x", "vault:work/github:token", "keychain:https://example.org/me", "age:~/token.age"}; !slices.Equal(refs, want) {
		t.Errorf("secret references = %q, want %q", refs, want)
	}
	if ref := (manifest.Secret{Source: "op", Key: "vault/item/field"}).Ref(); ref != "op://vault/item/field" {
		t.Errorf("Ref = %q, want \"op://vault/item/field\"", ref)
	}
}

// TestReference parses the document that this format comes from, verbatim.
func TestReference(t *testing.T) {
	task := parse(t, `version: "1"
kind: Task
metadata:
  name: "Refactor authentication module"
  labels:
    team: platform
    priority: high
repository:
  url: https://github.com/org/repo
  branch: main
  # commit: abc123 # Optional: pin to commit
claude:
  prompt: |
    Refactor the authentication module to use OAuth 2.0.
    Update all tests and documentation.
  model: claude-sonnet-4-5-20250929
  max_turns: 100
  # allowed_tools: [Read, Write, Edit, Bash, Glob, Grep] # Optional whitelist
vm:
  profile: agentic-dev
  cpus: 4
  memory: 8G
  disk: 40G
  # network_mode: outbound # isolated | outbound | full
secrets:
  - name: ANTHROPIC_API_KEY
    source: env
    key: ANTHROPIC_API_KEY
lifecycle:
  timeout: 24h
  failure_action: preserve # destroy | preserve
  artifact_patterns:
    - "*.patch"
    - "coverage/**/*"
    - "reports/*.json"
`)
	if task.Metadata.Priority != 50 || task.Agent.Kind != manifest.Claude || task.VM.Disk != 40<<30 || len(task.Lifecycle.ArtifactPatterns) != 3 {
		t.Errorf("task = %+v, want priority 50, agent %s, 40 GiB of disk, 3 artifact patterns", task, manifest.Claude)
	}
}

// TestSession checks that in an existing session nothing is asked of a VM. The
// submitter may name the session; then the manifest need not name one, and still must
// not ask for a VM.
func TestSession(t *testing.T) {
	const rest = "version: \"1\"\nkind: Task\nclaude: {prompt: x}\n"
	want := manifest.VM{Session: "s1"}
	for _, text := range []string{rest, rest + "vm: {session: other}\n"} {
		task, _, err := manifest.ParseIn("s1", "m", []byte(text), "")
		if err != nil || !cmp.Equal(task.VM, want) || task.Repository != (manifest.Repository{}) {
			t.Errorf("ParseIn(s1) = %+v, %v, want vm %+v and no repository", task, err, want)
		}
	}
	if task := parse(t, rest+"vm: {session: s1}\n"); !cmp.Equal(task.VM, want) {
		t.Errorf("vm = %+v, want %+v", task.VM, want)
	}
	_, _, err := manifest.ParseIn("s1", "m", []byte(rest+"vm: {cpus: 2}\n"), "")
	if err == nil || !strings.Contains(err.Error(), "m:4:12: vm.cpus cannot be combined with vm.session") {
		t.Errorf("ParseIn(s1) with vm.cpus = %v, want \"m:4:12: vm.cpus cannot be combined with vm.session\"", err)
	}
	if _, _, err := manifest.Parse("m", []byte(rest), ""); err == nil || !strings.Contains(err.Error(), "repository is missing") {
		t.Errorf("Parse without a repository = %v, want \"repository is missing\"", err)
	}
}

func TestNetworkMode(t *testing.T) {
	for mode, want := range map[string]string{"isolated": "isolated", "allowlist": "allowlist", "open": "open", "outbound": "open", "full": "open"} {
		task, notices, err := manifest.Parse("m", []byte(minimal+"vm: {network_mode: "+mode+"}"), "")
		if err != nil || task.VM.Network() != want {
			t.Errorf("Parse with network_mode %s = %+v, %v, want network %q", mode, task, err, want)
		}
		if full := mode == "full"; full != (len(notices) == 1) || full && !strings.HasPrefix(notices[0], "m:7:20: vm.network_mode is full, which is the same as open") {
			t.Errorf("notices for network_mode %s = %q, want one for full alone", mode, notices)
		}
	}
	if mode := parse(t, minimal).VM.Network(); mode != "" {
		t.Errorf("network without a mode = %q, want none", mode)
	}
}

func TestPriority(t *testing.T) {
	for text, want := range map[string]int{
		"{}":                                      0,
		"{priority: 100}":                         100,
		"{priority: -100}":                        -100,
		"{labels: {priority: high}}":              50,
		"{labels: {priority: normal}}":            0,
		"{labels: {priority: low}}":               -50,
		"{labels: {priority: high}, priority: 0}": 0,
	} {
		if got := parse(t, minimal+"metadata: "+text).Metadata.Priority; got != want {
			t.Errorf("priority of %s = %d, want %d", text, got, want)
		}
	}
	task, notices, err := manifest.Parse("m", []byte(minimal+"metadata: {labels: {priority: urgent}}"), "")
	if err != nil || task.Metadata.Priority != 0 || len(notices) != 1 || !strings.Contains(notices[0], "other than high, normal or low") {
		t.Errorf("Parse with priority urgent = %+v, %q, %v, want priority 0 and a notice", task, notices, err)
	}
}

// TestRelativeRepository checks that a path that begins with a dot is relative to the
// manifest's directory. Every other URL stays unchanged.
func TestRelativeRepository(t *testing.T) {
	for url, want := range map[string]string{
		".": "/srv/project", "./": "/srv/project", "..": "/srv", "../other": "/srv/other", "./a/../b c": "/srv/project/b c",
		"/abs": "/abs", "owner/repo": "owner/repo", "git@example.org:a/b.git": "git@example.org:a/b.git", "file:///srv/x": "file:///srv/x",
	} {
		text := strings.Replace(minimal, "owner/repo", `"`+url+`"`, 1)
		if got := parse(t, text).Repository.URL; got != want {
			t.Errorf("URL of %s = %s, want %s", url, got, want)
		}
		_, _, err := manifest.Parse("m", []byte(text), "")
		if relative := strings.HasPrefix(url, "."); relative != (err != nil) || relative && !strings.Contains(err.Error(), "m:4:8: repository.url is relative") {
			t.Errorf("Parse(%s) without a directory = %v, want \"m:4:8: repository.url is relative\": %t", url, err, relative)
		}
	}
	t.Chdir(t.TempDir())
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	text := []byte(strings.Replace(minimal, "owner/repo", ".", 1))
	if task, _, err := manifest.Parse("m", text, "."); err != nil || task.Repository.URL != here {
		t.Errorf("Parse with directory . = %+v, %v, want URL %s", task, err, here)
	}
	if _, _, err := manifest.Parse("m", text, "/"+strings.Repeat("d", 1100)); err == nil || !strings.Contains(err.Error(), "at most 1024 bytes") {
		t.Errorf("Parse with a long directory = %v, want \"at most 1024 bytes\"", err)
	}
}

// TestJSON checks that JSON is read as JSON, including tabs and escapes.
func TestJSON(t *testing.T) {
	task := parse(t, "\ufeff{\n\t\"version\": \"1\", \"kind\": \"Task\",\n\t\"repository\": {\"url\": \"a\\/b\"},\r\n"+
		`"claude": {"prompt": "\ud83d\ude00 \u00e9\r\n\tdone", "max_turns": 5}, "lifecycle": {"success_codes": [0, 1]}}`)
	if task.Agent.Prompt != "😀 é\n\tdone" || task.Agent.MaxTurns != 5 || task.Repository.URL != "a/b" || !slices.Equal(task.Lifecycle.SuccessCodes, []int{0, 1}) {
		t.Errorf("task from JSON = %+v, want its prompt, 5 turns, a/b, codes 0 and 1", task)
	}
	_, _, err := manifest.Parse("m", []byte("{\n\t\"é\": 1, \"versio\": 2}"), "")
	e, _ := errors.AsType[*strictyaml.Error](err)
	if e == nil || len(e.Problems) != 6 { // two keys; version, kind, repository and an agent are missing
		t.Fatalf("Parse = %v, want 6 problems", err)
	}
	var at []strictyaml.Problem
	for _, p := range e.Problems {
		if strings.Contains(p.Text, "unknown key") {
			at = append(at, p)
		}
	}
	if len(at) != 2 || at[0].Line != 2 || at[0].Column != 2 || at[1].Line != 2 || at[1].Column != 10 {
		t.Errorf("positions = %+v, want 2:2 and 2:10", at)
	}
}

// TestPrompts checks that YAML's forms for long texts are read as YAML defines them.
func TestPrompts(t *testing.T) {
	for text, want := range map[string]string{
		"|\n    a\n      b\n\n    c\n":    "a\n  b\n\nc\n",
		"|-\n    a\n    b\n":              "a\nb",
		">\n    a\n    b\n\n    c\n":      "a b\nc\n",
		"a\n    b\n":                      "a b",
		`"a\n\tb \u00e9 \x41 \U0001F600"`: "a\n\tb é A 😀",
		`'it''s'`:                         "it's",
		"2026-01-02":                      "2026-01-02", // looks like a date
		"no":                              "no",
		"~/x":                             "~/x",
		"|\r\n    a\r\n    b\r\n":         "a\nb\n",
		"${HOME} `id` $(id)":              "${HOME} `id` $(id)",
	} {
		if got := parse(t, unmanned+"claude:\n  prompt: "+text).Agent.Prompt; got != want {
			t.Errorf("prompt of %q = %q, want %q", text, got, want)
		}
	}
	if got := parse(t, unmanned+"claude: {prompt: "+strings.Repeat("p", 100<<10)+"}").Agent.Prompt; len(got) != 100<<10 {
		t.Errorf("prompt = %d bytes, want %d", len(got), 100<<10)
	}
}

// TestManyProblems checks that Parse reports all problems at once, in the order of the
// lines, up to 20.
func TestManyProblems(t *testing.T) {
	_, _, err := manifest.Parse("dir/m.yaml", []byte(`version: "2"
kind: Task
metadata:
  nam: x
repository:
  url: ""
claude:
  prompt: x
  max_turns: many
vm:
  memory: 8
lifecycle:
  timeout: 1y
  success_codes: [0, 999]
`), "")
	want := `dir/m.yaml:1:10: version must be 1, got "2"
dir/m.yaml:4:3: metadata has an unknown key "nam"; did you mean name?
dir/m.yaml:6:8: repository.url must be a repository: owner/repo, a git URL, or a path
dir/m.yaml:9:14: claude.max_turns must be a whole number in decimal and without quotes, got "many"
dir/m.yaml:11:11: vm.memory must have a unit, as in 8G, got "8"
dir/m.yaml:13:12: lifecycle.timeout must be a duration like 90s, 30m, 24h or 2d, got "1y"
dir/m.yaml:14:22: lifecycle.success_codes[1] must be from 0 to 255, got 999`
	if err == nil || err.Error() != want {
		t.Errorf("Parse = %v\nwant %s", err, want)
	}
	_, _, err = manifest.Parse("m", []byte(minimal+"secrets: ["+entries(50, "5")+"]\n"), "")
	e, ok := errors.AsType[*strictyaml.Error](err)
	if !ok || len(e.Problems) != 20 || e.More != 30 || !strings.HasSuffix(err.Error(), "\nand 30 more") {
		t.Errorf("Parse with many problems = %v, want 20 and \"30 more\"", err)
	}
}

// TestErrorsKeepSecrets checks that a secret pasted in place of its reference does not
// appear in an error, which may be logged.
func TestErrorsKeepSecrets(t *testing.T) {
	const secret = "sk-ant-hunter2"
	for _, text := range []string{
		"secrets: SECRET", "secrets: [SECRET]", "secrets: {SECRET: x}", "secrets: {TOKEN: SECRET}", "secrets: [{SECRET: x}]",
		"secrets: [{name: SECRET, source: env, key: X}]", "secrets: [{name: X, source: SECRET, key: X}]",
		"secrets: [{name: X, source: env, key: SECRET}]", "secrets: [{name: X, source: file, key: SECRET}]",
		"secrets: [{name: X, source: op, key: SECRET}]", "secrets: [{name: X, source: op, key: op://SECRET}]",
		"secrets: [{name: X, name: SECRET, source: env, key: Y}]", "secrets: [{SECRET: x, SECRET: y}]",
		"secrets: [{name: X, source: env, key: \"SECRET\\e\"}]", "secrets: [{name: X, source: env, key: *SECRET}]",
		"secrets: [{name: X, source: env, key: &SECRET x}]", "secrets: [{name: X, source: env, key: !SECRET x}]",
		"secrets: [{name: X, source: env, key: @SECRET}]", "secrets: [{name: X, source: env, key: 'SECRET]",
		"secrets: [{name: X, source: env, key: SECRET: x}", "secrets: [{name: X, source: env, key: \"SECRET\\q\"}]", "secrets: %SECRET",
		"env: &SECRET x\nsecrets: SECRET",
	} {
		_, _, err := manifest.Parse("m", []byte(minimal+strings.ReplaceAll(text, "SECRET", secret)), "/")
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("Parse(%s) = %v, want an error without the secret", text, err)
		}
	}
	for _, text := range []string{
		"{SECRET: x}", "{A: [SECRET]}", "{A: x, A: SECRET}", "[SECRET]", "SECRET", "{A-B: SECRET}", "{A: \"SECRET\\e\"}", "{SECRET: x, SECRET: y}",
	} {
		_, _, err := manifest.Parse("m", []byte(unmanned+"agent: {kind: command, command: [x], env: "+strings.ReplaceAll(text, "SECRET", secret)+"}"), "/")
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("Parse with env %s = %v, want an error without the secret", text, err)
		}
	}
	_, _, err := manifest.Parse("m", []byte(strings.Replace(minimal, "owner/repo", "https://x:"+secret+"@example.org/a/b", 1)), "/")
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("Parse with a password in the URL = %v, want an error without it", err)
	}
}

// TestEncode checks that the stored form preserves the task exactly and is itself a
// manifest.
func TestEncode(t *testing.T) {
	for _, text := range []string{
		minimal, everything, unmanned + "agent: {kind: codex, prompt: x}", unmanned + "agent: {kind: command, command: [sh, -c, \"a\\nb\"]}",
		minimal + "vm: {profile: big}", minimal + "metadata: {labels: {priority: low}}", minimal + "lifecycle: {timeout: 1h1ms, max_artifact_bytes: 1025B}",
	} {
		task := parse(t, text)
		data, err := task.Encode()
		if err != nil {
			t.Fatal(err)
		}
		got, err := manifest.Decode(data)
		if diff := manifest.Diff(task, got); err != nil || diff != "" {
			t.Errorf("Decode = %v, mismatch (-want +got):\n%s", err, diff)
		}
		if diff := manifest.Diff(task, parse(t, string(data))); diff != "" {
			t.Errorf("Parse of the encoded task mismatch (-want +got):\n%s", diff)
		}
		if err := task.Validate(); err != nil {
			t.Error(err)
		}
	}
	if _, err := manifest.Decode([]byte(`{"version": 1}`)); fail.CodeOf(err) != fail.Failure || err == nil {
		t.Errorf("Decode of another version = %v, want code %v", err, fail.Failure)
	}
}

func TestValidate(t *testing.T) {
	task := parse(t, minimal)
	task.VM.CPUs, task.Agent.Prompt, task.Lifecycle.Timeout = 2000, "", measure.Duration(-time.Hour)
	err := task.Validate()
	if fail.CodeOf(err) != fail.Usage {
		t.Fatalf("Validate = %v, want code %v", err, fail.Usage)
	}
	for _, want := range []string{"vm.cpus must be from 1 to 1024, got 2000", "agent.prompt is missing", "lifecycle.timeout must be"} {
		if !strings.Contains("\n"+err.Error(), "\n"+want) {
			t.Errorf("Validate = %v, want %q in it", err, want)
		}
	}
}

// TestExamples checks that every example is valid and causes no notices.
func TestExamples(t *testing.T) {
	files := examples(t)
	if len(files) < 3 {
		t.Errorf("examples = %d, want at least 3", len(files))
	}
	for name, text := range files {
		task, notices, err := manifest.Parse(name, text, "/srv/project")
		if err != nil || len(notices) > 0 {
			t.Errorf("Parse(%s) = %v, notices %q, want neither", name, err, notices)
			continue
		}
		if task.Metadata.Name == "" {
			t.Errorf("name in %s = \"\", want one", name)
		}
	}
}

// examples returns the files in the examples directory.
func examples(t testing.TB) map[string][]byte {
	t.Helper()
	paths, err := filepath.Glob("../../examples/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		files[filepath.Base(path)] = text
	}
	return files
}

// bombs returns texts that are expensive for a careless reader.
func bombs() map[string]string {
	fill := func(unit string) string { return strings.Repeat(unit, manifest.MaxBytes/len(unit)) }
	all := map[string]string{
		"brackets":       fill("["),
		"braces":         fill("{"),
		"pairs":          fill("{a: "),
		"dashes":         fill("- "),
		"keys":           fill("? "),
		"colons":         fill(": "),
		"plain colons":   fill("a:"),
		"commas":         "[" + fill("a,")[2:],
		"anchors":        fill("&a "),
		"anchored":       "[" + fill("&a x,")[2:],
		"aliases":        "a: &a b\nc: [" + fill("*a,")[20:],
		"tags":           fill("!a "),
		"exclamations":   fill("!"),
		"quotes":         fill("'"),
		"double quotes":  fill(`"`),
		"tabs in quotes": `a: "` + fill("\t")[6:] + `"`,
		"lines":          fill("a\n"),
		"blank lines":    fill("\n"),
		"spaces":         fill(" "),
		"comments":       fill("#\n"),
		"a comment":      fill("#"),
		"keys on lines":  fill("a: b\n"),
		"folded":         "a: >\n" + fill(" b\n")[10:],
		"literal":        "a: |\n" + fill(" b\n")[10:],
		"indented":       staircase(1400),
		"documents":      fill("---\n"),
		"directives":     fill("%A b\n"),
		"escapes":        `a: "` + fill(`\x41`)[8:] + `"`,
		"a long key":     fill("k") + ": v",
		"JSON":           `{"a":` + fill("[]")[:100] + "}",
		"JSON keys":      "{" + fill(`"a":1,`)[12:] + `"a":1}`,
		"JSON list":      "[" + fill("1,")[4:] + "1]",
		"JSON escapes":   `{"a":"` + fill(`\u0041`)[16:] + `"}`,
	}
	for name, text := range all {
		all[name] = text[:min(len(text), manifest.MaxBytes)]
	}
	return all
}

// TestBombs checks that bombs are refused in about the time that any other megabyte
// takes.
func TestBombs(t *testing.T) {
	for name, text := range bombs() {
		done := make(chan error, 1)
		go func() {
			_, _, err := manifest.Parse("m", []byte(text), "/")
			done <- err
		}()
		select {
		case err := <-done:
			if err == nil || len(err.Error()) > 20*500 {
				t.Errorf("Parse of %s = %.200v, want an error of at most %d bytes", name, err, 20*500)
			}
		case <-time.After(time.Minute):
			t.Fatalf("Parse of %s takes more than a minute, want an error", name)
		}
	}
}

// staircase returns lines that are each nested one level deeper than the previous one.
func staircase(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

func FuzzParse(f *testing.F) {
	for _, b := range bads {
		if len(b.text) < 4096 {
			f.Add(b.text)
		}
	}
	f.Add(minimal)
	f.Add(everything)
	for _, text := range examples(f) {
		f.Add(string(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		task, notices, err := manifest.Parse("m", []byte(text), "/dir")
		if err != nil {
			e, ok := errors.AsType[*strictyaml.Error](err)
			if !ok || task != nil || len(e.Problems) == 0 || len(e.Problems) > 20 || fail.CodeOf(err) != fail.Usage {
				t.Fatalf("Parse = %+v, %v, want no task and a *strictyaml.Error", task, err)
			}
			for _, p := range e.Problems {
				if p.Line < 1 || p.Column < 1 || p.Text == "" || strings.ContainsAny(p.Field+p.Text, "\n\x1b\u202e") {
					t.Fatalf("problem = %+v, want a position and text without control bytes", p)
				}
			}
			return
		}
		if len(notices) > 2 {
			t.Fatalf("notices = %q, want at most 2", notices)
		}
		data, err := task.Encode()
		if err != nil {
			t.Fatal(err)
		}
		decoded, err := manifest.Decode(data)
		if diff := manifest.Diff(task, decoded); err != nil || diff != "" {
			t.Fatalf("Decode = %v, mismatch (-want +got):\n%s", err, diff)
		}
		again, _, err := manifest.Parse("again", data, "")
		if diff := manifest.Diff(task, again); err != nil || diff != "" {
			t.Fatalf("Parse of the encoded task = %v, mismatch (-want +got):\n%s", err, diff)
		}
	})
}
