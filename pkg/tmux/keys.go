package tmux

import "strings"

// The guest has its own tmux. So our sessions have neither a status line nor a prefix key, and
// use our own key tables instead of the user's root and prefix tables:
//
//	agent-sessionizer          the user's prefix key waits for the next key;
//	                           the keys of Bind do what they are bound to;
//	                           any other key goes to the guest
//	agent-sessionizer-prefix   D  destroys, after a confirmation in a popup
//	                           d  detaches, as everywhere
//	                           any other key goes to the guest, after the prefix
//
// All sessions of a server share its key tables. The command of D differs between sessions, so
// an option of the session holds it.
const (
	table       = "agent-sessionizer"
	prefixTable = "agent-sessionizer-prefix"
)

// configuration returns the commands that set the session's options and our key tables. It is
// safe to repeat them.
func configuration(s Session, prefixes []string) [][]string {
	set := func(name, value string) []string { return []string{"set-option", "-t", target(s.Name), name, value} }
	window := func(name, value string) []string {
		return []string{"set-option", "-w", "-t", target(s.Name), name, value}
	}
	cmds := [][]string{
		// Name the window as the guest names its own.
		window("automatic-rename", "on"), window("automatic-rename-format", "#{pane_title}"),
		set("status", "off"), set("prefix", "None"), set("prefix2", "None"), set("key-table", table),
		set(destroyOption, destroyCommand(s)),
		// First remove the old bindings, because the user's prefix may have changed. The
		// new ones are set in the same call, so that no key is lost in between. tmux
		// refuses to empty a table that does not exist, so F12 creates it.
		{"bind-key", "-T", table, "F12", "send-keys"},
		{"unbind-key", "-a", "-T", table},
	}
	cmds = append(cmds, passKeys()...)
	for _, p := range prefixes {
		// One table per prefix, because the binding of Any sends that prefix.
		sub := prefixTable
		if p != prefixes[0] {
			sub += "2"
		}
		cmds = append(cmds,
			[]string{"bind-key", "-T", table, p, "switch-client -T " + sub},
			[]string{"bind-key", "-T", sub, "d", "detach-client"},
			[]string{"bind-key", "-T", sub, "D", `run-shell -C "#{` + destroyOption + `}"`},
			// Without a key, send-keys sends the one that was pressed.
			[]string{"bind-key", "-T", sub, "Any", "send-keys " + quote(p) + " ; send-keys"},
		)
	}
	return cmds
}

// destroyCommand returns the tmux command of prefix + D.
func destroyCommand(s Session) string {
	if len(s.Destroy) == 0 {
		return `display-message "this session cannot be destroyed from here"`
	}
	return "display-popup -E -w 80% -h 60% " + quote(commandLine(s.Destroy))
}

// quote makes s one word, both in a shell and in a tmux command line.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// commandLine returns commands as one command line of tmux. With one command, a shell can read it, too.
func commandLine(cmds ...[]string) string {
	var line []string
	for i, cmd := range cmds {
		if i > 0 {
			line = append(line, ";")
		}
		for _, word := range cmd {
			line = append(line, quote(word))
		}
	}
	return strings.Join(line, " ")
}

// argument returns s as one argument in tmux's argv, where a semicolon at the end of
// a word would end the command.
func argument(s string) string {
	if head, ok := strings.CutSuffix(s, ";"); ok {
		return head + `\;`
	}
	return s
}
