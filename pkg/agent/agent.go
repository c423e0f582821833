// Package agent is how a coding agent is called without anybody at the keyboard,
// and what its output says of its progress.
//
// It runs nothing. What it reads comes from a guest and is hostile: it is bounded
// and cleaned, and what cannot be read is passed over. It redacts nothing: a
// prompt, an answer or a command may hold a secret, as all output of an agent.
package agent

import (
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
)

// Command is the program and the arguments that run a. Its stdout is what a
// Parser of the same kind reads.
func Command(a manifest.Agent) []string {
	switch a.Kind {
	case manifest.Claude:
		argv := []string{"claude", "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose"}
		argv = option(argv, "--model", a.Model)
		if a.MaxTurns > 0 {
			argv = append(argv, "--max-turns", strconv.Itoa(a.MaxTurns))
		}
		argv = option(argv, "--tools", strings.Join(a.AllowedTools, ","))
		return append(argv, "--print", "--", a.Prompt)
	case manifest.Codex:
		argv := []string{"codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"}
		argv = option(argv, "--model", a.Model)
		return append(argv, "--", a.Prompt)
	}
	return a.Command
}

// option adds an option that has a value.
func option(argv []string, name, value string) []string {
	if value == "" {
		return argv
	}
	return append(argv, name, value)
}
