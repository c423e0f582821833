package task

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
)

// Check and Submit refuse the same manifests. Both report all faults at once, with
// line and column, in the order of the manifest.
func TestCheckAndSubmitRefuseTheSame(t *testing.T) {
	m := newManager(t, 1, 100)
	const head = "version: \"1\"\nkind: Task\n"
	const rest = "agent: {kind: command, command: [\"true\"]}\n"
	for _, c := range []struct {
		name, text string
		says       []string
	}{
		{"http", head + rest + "repository: {url: http://example.com/a/b}\n", []string{"m.yaml:4:19: repository.url is refused: "}},
		{"profile", head + rest + "repository: {url: acme/app}\nvm:\n  profile: nosuch\n", []string{"m.yaml:6:12: vm.profile is refused: profile \"nosuch\" does not exist"}},
		{"reserved names", head + rest + "repository: {url: acme/app}\nsecrets:\n  - {name: PATH, source: env, key: HOME}\n  - {name: ZED, source: env, key: SET_NOWHERE_1}\n  - {name: HOME, source: env, key: PATH}\n  - {name: ANN, source: file, key: /nowhere/x}\n", []string{
			"m.yaml:6:12: secrets[0].name is refused: ", "m.yaml:7:35: secrets[1].key is refused: ", "m.yaml:8:12: secrets[2].name is refused: ", "m.yaml:9:36: secrets[3].key is refused: ",
		}},
		{"several", head + rest + "repository: {url: http://example.com/a/b}\nvm: {profile: nosuch}\n", []string{"m.yaml:4:19: ", "m.yaml:5:15: "}},
		{"no such session", head + rest + "vm: {session: nosuch}\n", []string{"m.yaml:4:15: vm.session is refused: no session"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			asked, _, err := manifest.Parse("m.yaml", []byte(c.text), "/")
			if err != nil {
				t.Fatal(err)
			}
			_, checked := m.Check(t.Context(), asked)
			_, _, submitted := m.Submit(t.Context(), asked, Submission{})
			if checked == nil || submitted == nil || checked.Error() != submitted.Error() || fail.CodeOf(checked) != fail.CodeOf(submitted) || fail.HintOf(checked) != fail.HintOf(submitted) {
				t.Fatalf("Check = %v, Submit = %v, want the same error with the same code and hint", checked, submitted)
			}
			lines := strings.Split(checked.Error(), "\n")
			if len(lines) != len(c.says) {
				t.Fatalf("lines of Check = %d, want %d:\n%v", len(lines), len(c.says), checked)
			}
			for i, want := range c.says {
				if !strings.HasPrefix(lines[i], want) {
					t.Errorf("line %d of Check = %q, want %q…", i, lines[i], want)
				}
			}
		})
	}
	good, _, err := manifest.Parse("m.yaml", []byte(head+rest+"repository: {url: acme/app}\nvm: {profile: small}\n"), "/")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Check(t.Context(), good); err != nil {
		t.Errorf("Check = %v, want nil", err)
	}
	// A manifest from the store has no line numbers.
	decoded := decode(t, head+rest+"repository: {url: acme/app}\nvm: {profile: nosuch}\n")
	if _, err := m.Check(t.Context(), decoded); err == nil || !strings.HasPrefix(err.Error(), "vm.profile is refused") {
		t.Errorf("Check = %v, want \"vm.profile is refused …\"", err)
	}
}

func decode(t *testing.T, text string) *manifest.Task {
	t.Helper()
	asked, _, err := manifest.Parse("m.yaml", []byte(text), "/")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := asked.Encode()
	if err == nil {
		asked, err = manifest.Decode(raw)
	}
	if err != nil {
		t.Fatal(err)
	}
	return asked
}

// Package config defines the limits of a VM; manifests, their schema and the docs
// agree with them. A manifest with the minimum of everything is accepted, one with
// less is not.
func TestBoundsOfAVM(t *testing.T) {
	m := newManager(t, 1, 100)
	text := func(cpus int, memory, disk config.Size) []byte {
		return fmt.Appendf(nil, `{"version": "1", "kind": "Task", "repository": {"url": "acme/app"}, "agent": {"kind": "command", "command": ["true"]},
			"vm": {"cpus": %d, "memory": "%dB", "disk": "%dB"}}`, cpus, int64(memory), int64(disk))
	}
	least, _, err := manifest.Parse("m", text(config.MinCPUs, config.MinMemory, config.MinDisk), "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Check(t.Context(), least); err != nil {
		t.Errorf("Check with the least resources = %v, want nil", err)
	}
	for field, less := range map[string][]byte{
		"vm.cpus":   text(config.MinCPUs-1, config.MinMemory, config.MinDisk),
		"vm.memory": text(config.MinCPUs, config.MinMemory-1, config.MinDisk),
		"vm.disk":   text(config.MinCPUs, config.MinMemory, config.MinDisk-1),
	} {
		if _, _, err := manifest.Parse("m", less, ""); err == nil || !strings.Contains(err.Error(), field+" must be from ") {
			t.Errorf("Parse with less of %s = %v, want \"%s must be from …\"", field, err, field)
		}
	}
	docs, err := os.ReadFile(filepath.Join("..", "..", "docs", "configuration.md"))
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("The minimum is %d CPU, %v and %v.", config.MinCPUs, config.MinMemory, config.MinDisk); !strings.Contains(string(docs), want) {
		t.Errorf("configuration.md without %q, want it", want)
	}
}

// Files that prune removed are reported as such.
func TestWhatPruneRemoved(t *testing.T) {
	m := newManager(t, 1, 100)
	task := submit(t, m, "one", "small", 0)
	if err := m.CheckFiles(task); err != nil {
		t.Errorf("CheckFiles of a waiting task = %v, want nil", err)
	}
	task, err := m.SetDesired(t.Context(), task, Cancel, Client{})
	if err != nil {
		t.Fatal(err)
	}
	task.Status.Artifacts = []Artifact{{Name: "files/x"}}
	if err := m.CheckFiles(task); err != nil {
		t.Errorf("CheckFiles of a task that has just ended = %v, want nil", err)
	}
	if _, err := m.OpenArtifact(task, "files/x"); err == nil || fail.HintOf(err) != "agent-sessionizer task artifacts "+task.ID {
		t.Errorf("OpenArtifact of a missing artifact = %v (hint %q), want a hint to list the artifacts of %s", err, fail.HintOf(err), task.ID)
	}
	if err := os.RemoveAll(string(m.Dir(task.ID))); err != nil {
		t.Fatal(err)
	}
	_, opened := m.OpenArtifact(task, "files/x")
	for _, err := range []error{m.CheckFiles(task), opened} {
		if fail.CodeOf(err) != fail.NotFound || !errors.Is(err, ErrPruned) || fail.HintOf(err) != "agent-sessionizer task retry "+task.ID {
			t.Errorf("error after pruning = %v (hint %q), want %v, a hint to retry %s", err, fail.HintOf(err), ErrPruned, task.ID)
		}
	}
}
