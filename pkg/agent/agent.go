// Package agent knows how to call a coding agent unattended, and how to read progress from
// its output.
//
// It runs nothing. Its input comes from a guest and is hostile: it is bounded and cleaned,
// and what cannot be parsed is skipped. It redacts nothing: a prompt, an answer or a
// command may contain a secret, like any output of an agent.
package agent

import (
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
)

// Command returns the program and arguments that run a. A Parser of the same kind reads the
// program's stdout.
func Command(a manifest.Agent) []string {
	switch a.Kind {
	case manifest.Claude:
		argv := []string{"claude", "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"}
		if a.Permissions == manifest.AskPermissions { // its client has to answer
			argv = []string{"agent-guest", "claude"}
		}
		argv = option(argv, "--model", a.Model)
		if a.MaxTurns > 0 {
			argv = append(argv, "--max-turns", strconv.Itoa(a.MaxTurns))
		}
		argv = option(argv, "--tools", strings.Join(a.AllowedTools, ","))
		if a.Permissions != manifest.AskPermissions {
			argv = append(argv, "--print")
		}
		return append(argv, "--", a.Prompt)
	case manifest.Codex:
		if a.Permissions == manifest.AskPermissions { // codex exec cannot ask
			return append(option([]string{"agent-guest", "codex"}, "--model", a.Model), "--", a.Prompt)
		}
		argv := []string{"codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"}
		argv = option(argv, "--model", a.Model)
		return append(argv, "--", a.Prompt)
	}
	return a.Command
}

// option appends an option and its value, unless the value is empty.
func option(argv []string, name, value string) []string {
	if value == "" {
		return argv
	}
	return append(argv, name, value)
}
