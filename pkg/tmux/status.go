package tmux

import (
	"context"
	"fmt"
	"strings"
)

// StatusOption is the server option that holds the text of SetStatus. A user's status
// line shows it as #{@agent_status}.
const StatusOption = "@agent_status"

// SetStatus changes what status lines show, immediately, and reports whether the text changed.
// The text may contain styles such as #[fg=red], but no other formats: Plain removes those. If
// no server runs, SetStatus does nothing.
func (c Client) SetStatus(ctx context.Context, text string) (changed bool, err error) {
	now, err := c.run(ctx, nil, []string{"show-options", "-gqv", StatusOption})
	if err == nil {
		// Setting the option redraws every client.
		if changed = strings.TrimSuffix(now, "\n") != text; changed {
			_, err = c.run(ctx, nil, []string{"set-option", "-g", StatusOption, text})
		}
	}
	if err != nil {
		if noServer(err) {
			return false, nil
		}
		return false, fmt.Errorf("set the tmux status: %w", err)
	}
	return changed, nil
}

// Plain returns a text without the characters that start formats of tmux.
func Plain(text string) string { return strings.ReplaceAll(text, "#", "") }

// ShowMessage shows a line in one client for some seconds. If client is "", tmux chooses one.
func (c Client) ShowMessage(ctx context.Context, client, text string) error {
	if _, err := c.run(ctx, nil, displayCommand(client, text)); err != nil {
		return fmt.Errorf("show a message in tmux: %w", err)
	}
	return nil
}
