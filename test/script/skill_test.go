package script

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSkill runs the commands of the skill for Claude Code as written, in order, with fake VMs. It
// replaces the repository and the ids.
func TestSkill(t *testing.T) {
	const dir = "../../integrations/claude-code/"
	text, err := os.ReadFile(dir + "skills/agent-sessions/SKILL.md")
	if err != nil {
		t.Fatal(err)
	}
	commands := regexp.MustCompile("`agent-sessionizer ([^`]+)`").FindAllStringSubmatch(string(text), -1)
	if len(commands) < 10 {
		t.Fatalf("commands of the skill = %q, want at least 10", commands)
	}
	h := newHome(t)
	manifest := `{version: "1", kind: Task, repository: {url: ./repo}, vm: {cpus: 1, memory: 512M, disk: 4G}, agent: {kind: command, command: ["true"]}}`
	if err := os.WriteFile(filepath.Join(h.dir, "task.yaml"), []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	// idFrom returns the id of the only element that a command prints.
	idFrom := func(args ...string) string {
		var list []struct{ ID string }
		out, err := h.command(t.Context(), args...).Output()
		if err != nil || json.Unmarshal(out, &list) != nil || len(list) != 1 {
			return ""
		}
		return list[0].ID
	}
	for _, c := range commands {
		line := strings.Join(strings.Fields(c[1]), " ")
		args := strings.Fields(strings.NewReplacer("owner/repo", "./repo").Replace(line))
		for i, arg := range args {
			if arg == "ID" && args[0] == "answer" {
				args[i] = idFrom("answer", "--json")
			} else if arg == "ID" {
				args[i] = idFrom("task", "list", "--all", "--json")
			}
		}
		h.must(t, args...)
		if line == "open -d owner/repo" { // what the next commands work with
			h.must(t, "exec", "repo", "--", "sh", "-c", `echo 'test:; @true' >Makefile; setsid "$AGENT_GUEST_ROOT/usr/local/bin/agent-guest" ask 'May I?' >../answer 2>&1 </dev/null &`)
			h.until(t, "the question", func() bool { return idFrom("answer", "--json") != "" })
		}
	}
	var plugin struct {
		Servers map[string]struct {
			Command string
			Args    []string
		} `json:"mcpServers"`
	}
	if text, err = os.ReadFile(dir + ".mcp.json"); err == nil {
		err = json.Unmarshal(text, &plugin)
	}
	for name, s := range plugin.Servers {
		if s.Command != "agent-sessionizer" || strings.Join(s.Args, " ") != "mcp" {
			t.Errorf("server %s of the plugin = %+v, want agent-sessionizer mcp", name, s)
		}
	}
	if err != nil || len(plugin.Servers) != 1 {
		t.Errorf("servers of the plugin = %+v, %v, want one", plugin.Servers, err)
	}
}
