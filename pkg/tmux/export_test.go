package tmux

import "context"

// SwitchOrAttach brings the user to a session that exists, ours or not.
func (c Client) SwitchOrAttach(ctx context.Context, client, name, text string) ([]string, error) {
	return c.switchOrAttach(ctx, client, name, text)
}
