package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Reference information besides commands: help topics, and sections of the manual page.

type entry struct{ name, text string }

// exitCodes returns the exit codes listed in docs/architecture.md.
func exitCodes() []entry {
	all := []entry{{"0", "done"}}
	for _, c := range []struct {
		code fail.Code
		text string
	}{
		{fail.Failure, "any other error"},
		{fail.Usage, "the command line or a settings file is wrong"},
		{fail.NotFound, "no such session, repository, image or file"},
		{fail.Conflict, "already exists, is in use, would lose work, or exceeds a limit"},
		{fail.Host, "the host lacks something: QEMU, tmux, disk space"},
		{fail.Secret, "a secret or a login is missing or refused"},
		{fail.Policy, "a policy does not allow it"},
		{fail.Preserved, "a task failed and its VM was kept"},
		{fail.Timeout, "a deadline passed"},
		{fail.Interrupted, "the user interrupted or declined"},
	} {
		all = append(all, entry{fmt.Sprint(int(c.code)), c.text + " (" + c.code.String() + ")"})
	}
	return all
}

// environment lists every variable that the program reads itself.
func environment() (all []entry) {
	var aliases []string
	for _, v := range config.Variables() {
		all = append(all, entry{v.Name, v.About + " (" + v.Key + ")"})
		if v.Alias != "" {
			aliases = append(aliases, v.Alias)
		}
	}
	all = append(all, entry{strings.Join(aliases, ", "), "the same, without the prefix; each counts if the prefixed variable is not set and the program understands its value"})
	return append(all, otherVariables...)
}

// otherVariables are those that are not settings.
var otherVariables = []entry{
	{app.HostVariable, "host that commands work on, like --host"},
	{"AGENT_SESSIONIZER_TOKEN", "token for an https:// host that is not a context"},
	{"TRACEPARENT", "trace id for logs, as in W3C Trace Context"},
	{"AGENT_SESSIONIZER_ACCEL", "kvm or tcg; skips the check"},
	{"XDG_CONFIG_HOME, XDG_STATE_HOME, XDG_DATA_HOME, XDG_CACHE_HOME", "directories of settings, store, images and mirrors; relative paths are ignored"},
	{"NO_COLOR, CLICOLOR, CLICOLOR_FORCE, FORCE_COLOR", "colours: NO_COLOR and CLICOLOR=0 turn them off, the others turn them on without a terminal"},
	{"VISUAL, EDITOR", "the editor of config edit"},
	{"OP_SERVICE_ACCOUNT_TOKEN, OP_ACCOUNT", "1Password, for secrets op://…"},
	{"VAULT_ADDR, VAULT_TOKEN, VAULT_NAMESPACE, VAULT_CACERT", "HashiCorp Vault, for secrets vault:…; all variables of the vault command apply"},
	{"VAULT_MOUNT", "mount of Vault's KV engine (default secret)"},
	{"AGE_IDENTITY, SOPS_AGE_KEY_FILE", "file of age identities, for secrets age:… (default ~/.config/age/keys.txt)"},
	{"TMUX, TMUX_TMPDIR", "the local tmux, as for tmux itself"},
	{"TERM", "passed to the guest; xterm-256color instead of a terminal type that a guest may not know"},
}

// files lists the default locations; see config path for the actual ones.
var files = []entry{
	{"~/.config/agent-sessionizer/config.yaml", "settings; config show --origin shows where each value comes from"},
	{"~/.config/agent-sessionizer/resources.yaml", "CPUs, memory and disk of VMs"},
	{"~/.config/agent-sessionizer/network-allowlist.txt", "names that sessions may reach; groups of them are in network-groups/"},
	{"~/.config/agent-sessionizer/repos.txt", "repositories that the picker offers"},
	{"~/.config/agent-sessionizer/agent-sandbox.yaml", "VM template that replaces the shipped one"},
	{"/etc/agent-sessionizer/", "the same files for all users of the host; a user's own files override them"},
	{".agent-sessionizer.yaml", "in a repository: narrows the network of its sessions"},
	{"~/.local/state/agent-sessionizer/", "store, keys, logs"},
	{"~/.local/share/agent-sessionizer/images/", "built images"},
	{"~/.cache/agent-sessionizer/mirrors/", "mirrors of repositories"},
	{"~/.agent-vms/", "VMs (the LIMA_HOME for limactl)"},
}

// newTopics returns the topics that "help NAME" explains besides commands.
func newTopics() []*cobra.Command {
	return []*cobra.Command{
		{
			Use: "exit-codes", Short: "Explain exit codes",
			Long: "The exit status of a command, and the name that --json shows for it:\n\n" + columns(exitCodes()) +
				"\nexec and ssh return the exit status of the guest's command, or 128 plus the signal that ended it.",
		},
		{
			Use: "environment", Short: "List environment variables",
			Long: "Environment variables that the program reads. A variable overrides the setting in\nparentheses, and a flag overrides both.\n\n" + lines(environment()),
		},
	}
}

// columns formats entries, one per line.
func columns(all []entry) string {
	width := 0
	for _, e := range all {
		width = max(width, len(e.name))
	}
	var b strings.Builder
	for _, e := range all {
		fmt.Fprintf(&b, "  %-*s  %s\n", width, e.name, e.text)
	}
	return b.String()
}

// lines formats entries with the text below the name.
func lines(all []entry) string {
	var b strings.Builder
	for _, e := range all {
		fmt.Fprintf(&b, "  %s\n      %s\n", e.name, e.text)
	}
	return strings.TrimSuffix(b.String(), "\n")
}
