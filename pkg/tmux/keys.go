package tmux

import "strings"

// This is how keys work in our sessions. The guest has its own tmux, so the outer one
// stays out of the way: no status line, no prefix, and our own key tables in place of
// the user's root and prefix tables.
//
//	agent-sessionizer          every key goes to the guest, except the user's
//	                           prefix key, which is held until the next key,
//	                           and those of Bind
//	agent-sessionizer-prefix   D  destroys, after a confirmation in a popup
//	                           d  detaches, as everywhere
//	                           any other key: the prefix and it go to the guest
//
// Key tables belong to the server. What differs between sessions (the command of D)
// is therefore stored in an option of the session.
const (
	table       = "agent-sessionizer"
	prefixTable = "agent-sessionizer-prefix"
)

// configuration returns the commands that set the session's options and our key tables;
// they may be repeated.
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
		// Empty the table first, because the user's prefix may have changed. The new
		// bindings are set in the same call, so no key is missed in between. Only a
		// table that exists can be emptied.
		{"bind-key", "-T", table, "F12", "send-keys"},
		{"unbind-key", "-a", "-T", table},
	}
	cmds = append(cmds, passKeys()...)
	for _, p := range prefixes {
		// One table per prefix, because Any must know which prefix it holds back.
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
	words := make([]string, len(s.Destroy))
	for i, w := range s.Destroy {
		words[i] = quote(w)
	}
	return "display-popup -E -w 80% -h 60% " + quote(strings.Join(words, " "))
}

// quote makes s one word, both in a shell and in a tmux command line.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// argument returns s as one argument in tmux's argv, where a semicolon at the end of
// a word would end the command.
func argument(s string) string {
	if head, ok := strings.CutSuffix(s, ";"); ok {
		return head + `\;`
	}
	return s
}
