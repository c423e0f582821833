package tmux

import "context"

// Attach returns the command line that attaches a client to a session that exists, ours or not.
func (c Client) Attach(ctx context.Context, name string) ([]string, error) {
	return c.attach(ctx, name, nil, nil)
}
