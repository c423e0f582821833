package tmux

import (
	"context"
	"fmt"
	"strings"
)

// StatusOption is the server option that holds the text of SetStatus. A user's status
// line shows it as #{@agent_status}.
const StatusOption = "@agent_status"

// SetStatus changes what status lines show, immediately, and reports whether the text
// changed. text may hold styles (#[fg=red]) and no other format; see Plain. Without a
// server there is nothing to change.
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

// Plain removes what tmux's formats would interpret.
func Plain(text string) string { return strings.ReplaceAll(text, "#", "") }

// ShowMessage shows a line to one client for some seconds; with "" tmux chooses the client.
func (c Client) ShowMessage(ctx context.Context, client, text string) error {
	if _, err := c.run(ctx, nil, displayCommand(client, text)); err != nil {
		return fmt.Errorf("show a message in tmux: %w", err)
	}
	return nil
}
