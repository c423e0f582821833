package tmux

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Users choose whether keys open the picker and jump to the next agent. Such a key is bound in
// two tables: the root table and that of our sessions. Both bindings run what a server option
// holds. If the option is unset, the key goes to the guest.

const (
	pickOption = "@agent_pick" // holds the tmux command that opens the picker
	nextOption = "@agent_next" // holds the tmux command that jumps to the next waiting agent
)

// boundKeys lists the keys of each option. Terminals send Alt+Shift+P in three forms.
var boundKeys = []struct {
	option string
	keys   []string
}{
	{pickOption, []string{"M-P", "M-S-P", "M-S-p", "M-p"}},
	{nextOption, []string{"M-n"}},
}

// Bindings holds the command lines that keys run. To each, --client is added, with the name of
// the tmux client in which the key was pressed.
type Bindings struct {
	Pick []string // runs in a popup
	Next []string // runs in the background
}

// Lines returns b as lines for the user's tmux.conf.
func (b Bindings) Lines() []string {
	var lines []string
	for _, cmd := range b.commands() {
		words := make([]string, len(cmd))
		for i, w := range cmd {
			if words[i] = w; !plainWord(w) {
				words[i] = quote(w)
			}
		}
		lines = append(lines, strings.Join(words, " "))
	}
	return lines
}

func plainWord(word string) bool {
	return word != "" && strings.Trim(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-") == ""
}

func (b Bindings) commands() [][]string {
	cmds := [][]string{
		{"set-option", "-g", pickOption, popup(b.Pick)},
		{"set-option", "-g", nextOption, background(b.Next)},
	}
	for _, bound := range boundKeys {
		for _, key := range bound.keys {
			cmds = append(cmds, append([]string{"bind-key", "-n", key}, bindKey(bound.option)...))
		}
	}
	return cmds
}

// bindKey returns the command that a key is bound to. The option's formats are expanded
// when the key is pressed, for the client in which it was pressed.
func bindKey(option string) []string { return []string{"run-shell", "-C", "#{E:" + option + "}"} }

// popup returns the tmux command that runs argv in a popup, in the pane's directory. Anyone may
// have chosen that directory's name. So display-popup must insert it, after tmux has parsed the
// command line.
func popup(argv []string) string {
	words := []string{"display-popup -E -w 90% -h 85% -c #{client_name} -d '##{pane_current_path}'", "--"}
	for _, a := range argv {
		words = append(words, quote(literal(a)))
	}
	return strings.Join(append(words, "--client #{client_name}"), " ")
}

// background returns the tmux command that runs argv in a shell, without a terminal. It
// escapes formats twice, because run-shell expands them again.
func background(argv []string) string {
	var words []string
	for _, a := range argv {
		words = append(words, quote(literal(literal(a))))
	}
	return "run-shell -b " + quote(strings.Join(append(words, "--client #{client_name}"), " "))
}

// literal escapes s for use in a format.
func literal(s string) string { return strings.ReplaceAll(s, "#", "##") }

// passKeys returns the commands that bind the keys in our sessions' table. A key goes to the
// guest unless its option is set.
func passKeys() [][]string {
	var cmds [][]string
	for _, bound := range boundKeys {
		bind := strings.Join([]string{"run-shell", "-C", quote("#{E:" + bound.option + "}")}, " ")
		for _, key := range bound.keys {
			cmds = append(cmds, []string{"bind-key", "-T", table, key, "if-shell", "-F", "#{" + bound.option + "}", bind, "send-keys"})
		}
	}
	return cmds
}

// Bind binds the keys on the running server, until the server ends. If the user has bound one
// of them to another command, Bind returns a Conflict, or replaces that binding if force is set.
func (c Client) Bind(ctx context.Context, b Bindings, force bool) error {
	others, err := c.others(ctx)
	if noServer(err) {
		return fail.New(fail.NotFound, "bind tmux keys: no tmux server is running").
			WithHint("tmux new-session, or permanently: agent-sessionizer tmux bind --print >>~/.tmux.conf")
	}
	if err != nil {
		return err
	}
	if len(others) > 0 && !force {
		return fail.New(fail.Conflict, "these tmux keys are already bound: %s", strings.Join(others, "; ")).
			WithHint("agent-sessionizer tmux bind --force, or --print and choose other keys")
	}
	if _, err := c.run(ctx, nil, b.commands()...); err != nil {
		return fmt.Errorf("bind keys in tmux: %w", err)
	}
	return nil
}

// Unbind removes the bindings of Bind, and no others. It succeeds if no server runs.
func (c Client) Unbind(ctx context.Context) error {
	bound, err := c.rootKeys(ctx)
	if noServer(err) {
		return nil
	}
	if err != nil {
		return err
	}
	var cmds [][]string
	for _, b := range boundKeys {
		cmds = append(cmds, []string{"set-option", "-gqu", b.option})
		for _, key := range b.keys {
			if strings.Contains(bound[key], b.option) {
				cmds = append(cmds, []string{"unbind-key", "-n", key})
			}
		}
	}
	if _, err := c.run(ctx, nil, cmds...); err != nil {
		return fmt.Errorf("unbind keys in tmux: %w", err)
	}
	return nil
}

// others returns the keys that Bind needs and that are bound to other commands, with those
// commands.
func (c Client) others(ctx context.Context) ([]string, error) {
	bound, err := c.rootKeys(ctx)
	if err != nil {
		return nil, err
	}
	var others []string
	for _, b := range boundKeys {
		for _, key := range b.keys {
			if command := bound[key]; command != "" && !strings.Contains(command, b.option) {
				others = append(others, key+" "+clip(command))
			}
		}
	}
	return others, nil
}

// rootKeys returns the keys of the root table with their commands.
func (c Client) rootKeys(ctx context.Context) (map[string]string, error) {
	// list-keys starts a server if none runs. list-sessions fails instead.
	_, err := c.run(ctx, nil, []string{"list-sessions"})
	var out string
	if err == nil {
		out, err = c.run(ctx, nil, []string{"list-keys", "-T", "root"})
	}
	if err != nil {
		return nil, fmt.Errorf("list tmux keys: %w", err)
	}
	keys := map[string]string{}
	for line := range strings.Lines(out) {
		// bind-key [-r] -T root KEY COMMAND
		words := strings.Fields(line)
		if i := slices.Index(words, "root"); i >= 0 && i+2 < len(words) {
			keys[words[i+1]] = strings.Join(words[i+2:], " ")
		}
	}
	return keys, nil
}

// SetClipboard puts data into a tmux buffer, and on the clipboard of a client's terminal. If
// client is "", tmux chooses one.
func (c Client) SetClipboard(ctx context.Context, client string, data []byte) error {
	cmd := []string{"load-buffer", "-w"}
	if client != "" {
		cmd = append(cmd, "-t", client)
	}
	if _, err := c.run(ctx, bytes.NewReader(data), append(cmd, "-")); err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	return nil
}
